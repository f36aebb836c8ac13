#include "bundle.h"

#include <sstream>
#include <stdexcept>

namespace blockscale {
namespace {

constexpr std::string_view kFirst = "blockscale-kernels 1\n";

std::vector<Parameter> parseParameters(std::string const& listed) {
    // q:*fp8e4nv,heads:i32 names each parameter with Triton's type of it.
    std::vector<Parameter> parameters;
    std::istringstream words(listed);
    for (std::string word; std::getline(words, word, ',');) {
        auto const colon = word.find(':');
        if (colon == std::string::npos || colon + 1 == word.size()) {
            throw std::invalid_argument("a bundle of kernels lists a parameter without a type: " + word);
        }
        parameters.push_back({word.substr(0, colon), word[colon + 1] == '*'});
    }
    return parameters;
}

}  // namespace

std::vector<KernelImage> parseBundle(std::string_view text) {
    if (text.substr(0, kFirst.size()) != kFirst) {
        throw std::invalid_argument("not a bundle of kernels: export the engine again with this version");
    }
    std::vector<KernelImage> kernels;
    for (auto position = kFirst.size(); position < text.size();) {
        auto const end = text.find('\n', position);
        auto const cut = "a bundle of kernels is cut off after " + std::to_string(kernels.size()) + " of them";
        if (end == std::string_view::npos) {
            throw std::invalid_argument(cut);
        }
        std::istringstream header{std::string(text.substr(position, end - position))};
        KernelImage kernel;
        std::string listed;
        std::size_t length = 0;
        header >> kernel.role >> kernel.arch >> kernel.name >> kernel.warps >> kernel.shared >> kernel.rows >> listed
            >> length;
        if (!header || text.size() < end + 2 + length) {
            throw std::invalid_argument(cut);
        }
        kernel.parameters = parseParameters(listed);
        kernel.ptx = std::string(text.substr(end + 1, length));
        kernels.push_back(std::move(kernel));
        position = end + 2 + length;
    }
    return kernels;
}

}  // namespace blockscale
