// Decodes every trellis of the format matrix on the device and compares each value's bits with the matrix.
// Usage: exl3-device-check format-matrix.safetensors; exit code 77 without a GPU.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "kernels/contract/contract.h"
#include "kernels/contract/device.h"
#include "kernels/error.h"
#include "kernels/exl3.h"
#include "libcore/format/checkpoint.h"

using namespace fnx;

namespace {

int check(const Checkpoint& matrix, const contract::Kernel& decode) {
  const contract::Implementation device = decode.device();
  int pairs = 0, wrong = 0;
  for (const TensorInfo& t : matrix.tensors()) {
    if (!t.name.ends_with(".trellis")) continue;
    const std::string stem = t.name.substr(0, t.name.size() - std::strlen(".trellis"));
    const exl3::Codebook codebook = stem.starts_with("mul1")  ? exl3::Codebook::Mul1
                                    : stem.starts_with("mcg") ? exl3::Codebook::Mcg
                                                              : exl3::Codebook::ThreeInst;
    const auto half_bits = static_cast<int64_t>(2 * std::strtod(stem.c_str() + stem.find('.') + 1, nullptr));
    const TensorData trellis = matrix.read(t), wanted = matrix.read(matrix.require(stem + ".decoded"));
    const contract::Shape shape{
        stem, {{"out", exl3::kHadamard}, {"codebook", static_cast<int64_t>(codebook)}, {"half_bits", half_bits}}};
    contract::Problem p = decode.make(shape, contract::Kind::Normal, 1, 1);
    std::memcpy(p["trellis"].data(), trellis.as<uint16_t>(), p["trellis"].bytes());
    device.launch(p);
    int different = 0;
    for (int64_t i = 0; i < p["w"].size(); ++i) different += p["w"].as<uint16_t>()[i] != wanted.as<uint16_t>()[i];
    std::printf("%-10s %lld values, %d differ\n", stem.c_str(), static_cast<long long>(p["w"].size()), different);
    wrong += different != 0 ? 1 : 0;
    ++pairs;
  }
  std::printf("%d pairs of codebook and width, %d of them wrong\n", pairs, wrong);
  return pairs == 27 && wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  if (!contract::device_present()) {
    std::puts("skipped: no GPU");
    return 77;
  }
  try {
    const Checkpoint matrix(argv[1], {.strict = false});
    for (const auto& kernel : contract::registry())
      if (kernel->record().id == "exl3_decode") return check(matrix, *kernel);
  } catch (const Error& error) {
    std::puts(error.what());
  }
  return 1;
}
