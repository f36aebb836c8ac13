// Writes text after a prompt with a directory of `quant export --to onnx --genai`, without Python:
//
//   generate_text DIRECTORY NEW PROMPT [SAMPLING=VALUE...]
//
// onnxruntime-genai brings the tokenizer, the loop over the KV cache and sampling. Its wheel has the library and no
// header; where that is installed (`ort_genai_c.h` of its release archives), it is included, and otherwise the part of
// the C API that is used here is declared below. Without a wheel's Python, ORT_LIB_PATH names onnxruntime's library:
//
//   site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
//   g++ -std=c++17 -O2 examples/cpp/generate_text.cpp $site/onnxruntime_genai/libonnxruntime-genai.so
//       -Wl,-rpath,$site/onnxruntime_genai -o generate_text           (one line)
//   export ORT_LIB_PATH=$(ls $site/onnxruntime/capi/libonnxruntime.so*)
//   ./generate_text MODEL-genai 32 "The sky is" do_sample=1 temperature=0.7
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>

#if __has_include(<ort_genai_c.h>)
#include <ort_genai_c.h>
#else
extern "C" {
struct OgaResult;
struct OgaModel;
struct OgaTokenizer;
struct OgaTokenizerStream;
struct OgaSequences;
struct OgaGeneratorParams;
struct OgaGenerator;
const char* OgaResultGetError(const OgaResult*);
void OgaDestroyResult(OgaResult*);
void OgaShutdown();
OgaResult* OgaCreateModel(const char* directory, OgaModel**);
void OgaDestroyModel(OgaModel*);
OgaResult* OgaCreateTokenizer(const OgaModel*, OgaTokenizer**);
void OgaDestroyTokenizer(OgaTokenizer*);
OgaResult* OgaTokenizerEncode(const OgaTokenizer*, const char* text, OgaSequences*);
OgaResult* OgaCreateTokenizerStream(const OgaTokenizer*, OgaTokenizerStream**);
void OgaDestroyTokenizerStream(OgaTokenizerStream*);
OgaResult* OgaTokenizerStreamDecode(OgaTokenizerStream*, int32_t token, const char** text);
OgaResult* OgaCreateSequences(OgaSequences**);
void OgaDestroySequences(OgaSequences*);
size_t OgaSequencesGetSequenceCount(const OgaSequences*, size_t row);
OgaResult* OgaCreateGeneratorParams(const OgaModel*, OgaGeneratorParams**);
void OgaDestroyGeneratorParams(OgaGeneratorParams*);
OgaResult* OgaGeneratorParamsSetSearchNumber(OgaGeneratorParams*, const char* name, double);
OgaResult* OgaGeneratorParamsSetSearchBool(OgaGeneratorParams*, const char* name, bool);
OgaResult* OgaCreateGenerator(const OgaModel*, const OgaGeneratorParams*, OgaGenerator**);
void OgaDestroyGenerator(OgaGenerator*);
OgaResult* OgaGenerator_AppendTokenSequences(OgaGenerator*, const OgaSequences*);
bool OgaGenerator_IsDone(OgaGenerator*);
OgaResult* OgaGenerator_GenerateNextToken(OgaGenerator*);
OgaResult* OgaGenerator_GetNextTokens(const OgaGenerator*, const int32_t** tokens, size_t* rows);
}
#endif

void check(OgaResult* result) {
  if (result != nullptr) {
    const std::string message = OgaResultGetError(result);
    OgaDestroyResult(result);
    throw std::runtime_error(message);
  }
}

// What `create(inputs..., &object)` makes, destroyed at the end of its scope.
template <typename T, typename... Parameters, typename... Inputs>
auto made(void (*destroy)(T*), OgaResult* (*create)(Parameters...), Inputs... inputs) {
  T* object = nullptr;
  check(create(inputs..., &object));
  return std::unique_ptr<T, void (*)(T*)>(object, destroy);
}

void generate(const char* directory, int count, const char* prompt, int options, char** option) {
  const auto model = made(OgaDestroyModel, OgaCreateModel, directory);
  const auto tokenizer = made(OgaDestroyTokenizer, OgaCreateTokenizer, model.get());
  const auto ids = made(OgaDestroySequences, OgaCreateSequences);
  check(OgaTokenizerEncode(tokenizer.get(), prompt, ids.get()));
  const auto search = made(OgaDestroyGeneratorParams, OgaCreateGeneratorParams, model.get());
  const auto length = static_cast<double>(OgaSequencesGetSequenceCount(ids.get(), 0)) + count;
  check(OgaGeneratorParamsSetSearchNumber(search.get(), "max_length", length));
  for (int index = 0; index < options; ++index) {
    const std::string text = option[index];
    const size_t equals = text.find('=');
    const std::string name = text.substr(0, equals);
    char* end = nullptr;
    const double value = equals == std::string::npos ? 0 : std::strtod(text.c_str() + equals + 1, &end);
    if (end == nullptr || *end != '\0' || end == text.c_str() + equals + 1) {
      throw std::runtime_error(text + ": expected NAME=NUMBER, such as temperature=0.7");
    }
    if (name == "do_sample") {
      check(OgaGeneratorParamsSetSearchBool(search.get(), name.c_str(), value != 0));
    } else {
      check(OgaGeneratorParamsSetSearchNumber(search.get(), name.c_str(), value));
    }
  }
  const auto generator = made(OgaDestroyGenerator, OgaCreateGenerator, model.get(), search.get());
  const auto stream = made(OgaDestroyTokenizerStream, OgaCreateTokenizerStream, tokenizer.get());
  check(OgaGenerator_AppendTokenSequences(generator.get(), ids.get()));
  while (!OgaGenerator_IsDone(generator.get())) {
    check(OgaGenerator_GenerateNextToken(generator.get()));
    const int32_t* tokens = nullptr;
    size_t rows = 0;
    check(OgaGenerator_GetNextTokens(generator.get(), &tokens, &rows));
    const char* text = nullptr;  // empty inside of a character whose bytes are several tokens
    check(OgaTokenizerStreamDecode(stream.get(), tokens[0], &text));
    std::cout << text << std::flush;
  }
  std::cout << "\n";
}

int main(int argc, char** argv) {
  const int count = argc < 4 ? 0 : std::atoi(argv[2]);
  if (count < 1) {
    std::cerr << "usage: " << argv[0] << " DIRECTORY NEW PROMPT [SAMPLING=VALUE...]\n";
    return 2;
  }
  try {
    generate(argv[1], count, argv[3], argc - 4, argv + 4);
    OgaShutdown();
  } catch (const std::exception& error) {
    std::cerr << argv[1] << ": " << error.what() << "\n";
    return 1;
  }
}
