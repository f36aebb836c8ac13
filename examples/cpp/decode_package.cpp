// Writes tokens with a decoder's package of `quant export --to aoti`, without Python:
//
//   decode_package MODEL.pt2 LAYERS KV_HEADS CAPACITY HEAD_DIM NEW TOKEN...
//
// The prompt is token ids, and so are the likeliest NEW tokens that are printed; a tokenizer is not part of it. The
// package takes input_ids [rows, tokens], lengths [rows], last [rows], and keys and values of each layer, into which it
// writes; it returns the logits of each row's last token.
#include <cstdlib>
#include <exception>
#include <iostream>
#include <vector>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

int main(int argc, char** argv) {
  if (argc < 8) {
    std::cerr << "usage: " << argv[0] << " MODEL.pt2 LAYERS KV_HEADS CAPACITY HEAD_DIM NEW TOKEN...\n";
    return 2;
  }
  try {
    const c10::InferenceMode no_autograd;
    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    const int64_t layers = std::atoll(argv[2]), heads = std::atoll(argv[3]), capacity = std::atoll(argv[4]);
    const int64_t dim = std::atoll(argv[5]), count = std::atoll(argv[6]);
    std::vector<int64_t> prompt;
    for (int index = 7; index < argc; ++index) {
      prompt.push_back(std::atoll(argv[index]));
    }
    // A package does not look at sizes: tokens beyond the capacity would be written over the cache's end.
    TORCH_CHECK(static_cast<int64_t>(prompt.size()) + count <= capacity, "prompt and new tokens exceed the capacity");
    // Here a cache in FP32 on a processor; a package for a GPU, or in BF16, takes caches of its own dtype there.
    std::vector<at::Tensor> inputs(3);
    for (int64_t cache = 0; cache < 2 * layers; ++cache) {
      inputs.push_back(torch::zeros({1, heads, capacity, dim}));
    }
    int64_t length = 0;
    std::vector<int64_t> step = prompt;  // the whole prompt, then one token at a time
    for (int64_t written = 0; written < count; ++written) {
      const int64_t tokens = static_cast<int64_t>(step.size());
      inputs[0] = torch::tensor(step).view({1, tokens});
      inputs[1] = torch::tensor(std::vector<int64_t>{length});
      inputs[2] = torch::tensor(std::vector<int64_t>{tokens - 1});
      const at::Tensor logits = model.run(inputs)[0];
      length += tokens;
      step = {logits.argmax(-1).item<int64_t>()};
      std::cout << step[0] << (written + 1 < count ? " " : "\n");
    }
  } catch (const c10::Error& error) {
    std::cerr << argv[1] << ": " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << argv[1] << ": " << error.what() << "\n";
    return 1;
  }
}
