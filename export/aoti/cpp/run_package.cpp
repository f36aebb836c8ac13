// Runs an AOTInductor package that `quant export --to aoti` made, without Python:
//
//   run_package MODEL.pt2 INPUTS.pt OUTPUTS.pt
//
// INPUTS.pt holds a list of tensors, as `torch.save([x], "inputs.pt")` writes it, in the order of the model's
// parameters and on the device that the package was made for. OUTPUTS.pt gets a tuple of what comes out.
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

namespace {

std::vector<at::Tensor> read_tensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, path, ": cannot be read");
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const c10::IValue value = torch::pickle_load(bytes);
  TORCH_CHECK(value.isList(), path, ": holds no list of tensors; write it with torch.save([x, ...], path)");
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& item : value.toListRef()) {
    // A package does not look at strides, and `torch.save` keeps those of a slice.
    tensors.push_back(item.toTensor().contiguous());
  }
  return tensors;
}

void write_tensors(const std::string& path, const std::vector<at::Tensor>& tensors) {
  // A tuple, because pickled lists carry a type that torch.load refuses.
  const std::vector<c10::IValue> items(tensors.begin(), tensors.end());
  const std::vector<char> bytes = torch::pickle_save(c10::ivalue::Tuple::create(items));
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  TORCH_CHECK(file.flush(), path, ": cannot be written");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: " << argv[0] << " MODEL.pt2 INPUTS.pt OUTPUTS.pt\n";
    return 2;
  }
  try {
    const c10::InferenceMode no_autograd;
    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    const auto outputs = model.run(read_tensors(argv[2]));
    write_tensors(argv[3], outputs);
    for (const auto& output : outputs) {
      std::cout << output.scalar_type() << " " << output.sizes() << "\n";
    }
  } catch (const c10::Error& error) {
    std::cerr << argv[1] << ": " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << argv[1] << ": " << error.what() << "\n";
    return 1;
  }
}
