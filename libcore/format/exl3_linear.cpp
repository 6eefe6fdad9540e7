#include "libcore/format/exl3_linear.h"

#include <fmt/format.h>

#include <cstring>

#include "kernels/error.h"
#include "libcore/format/float_values.h"

namespace fnx {
namespace {

constexpr int64_t kMaxWidth = int64_t{1} << 40;

// The tensors under one prefix.
class Layer {
 public:
  Layer(const TensorSource& source, std::string_view prefix) : source_(source), prefix_(prefix) {}

  const TensorInfo* find(const char* suffix) const { return source_.find(name(suffix)); }
  std::string name(const char* suffix) const { return fmt::format("{}.{}", prefix_, suffix); }

  [[noreturn]] void fail(const char* suffix, const std::string& what) const {
    const TensorInfo* t = find(suffix);
    throw Error(ErrorKind::Input,
                fmt::format("tensor {}{}: {}", name(suffix), t ? " in " + source_.files()[t->file].name : "", what));
  }

  // A tensor that is there, held to its shape.
  const TensorInfo& expect(const char* suffix, std::initializer_list<DType> dtypes, std::vector<int64_t> shape) const {
    const TensorInfo* t = find(suffix);
    if (t == nullptr) fail(suffix, "missing");
    bool known = false;
    for (DType d : dtypes) known |= t->dtype == d;
    if (!known) fail(suffix, fmt::format("dtype {} is not supported here", t->dtype_text));
    if (t->shape != shape)
      fail(suffix, fmt::format("shape [{}] where [{}] is needed", fmt::join(t->shape, ", "), fmt::join(shape, ", ")));
    return *t;
  }

  // The codebook that the markers name.
  exl3::Codebook codebook() const {
    const bool mul1 = marker("mul1", exl3::kMul1), mcg = marker("mcg", exl3::kMcg);
    if (mul1 && mcg) fail("mul1", "the layer has both a mul1 and an mcg marker");
    return mul1 ? exl3::Codebook::Mul1 : mcg ? exl3::Codebook::Mcg : exl3::Codebook::ThreeInst;
  }

  // Scales with their signs, either stored as such or as packed signs of 1.
  bool packed(const char* scales, const char* signs, int64_t n) const {
    const bool has_scales = find(scales) != nullptr, has_signs = find(signs) != nullptr;
    if (has_scales && has_signs) fail(scales, fmt::format("{} and {} contradict each other", scales, signs));
    if (!has_scales && !has_signs) fail(scales, fmt::format("missing, and so is {}", signs));
    if (has_signs)
      expect(signs, {DType::I16}, {n / 16});
    else
      expect(scales, kFloats, {n});
    return has_signs;
  }

  static constexpr std::initializer_list<DType> kFloats = {DType::F16, DType::BF16, DType::F32};

 private:
  bool marker(const char* suffix, uint32_t value) const {
    const TensorInfo* t = find(suffix);
    if (t == nullptr) return false;
    if (t->dtype != DType::I32 || t->bytes > 4)
      fail(suffix,
           fmt::format("a codebook marker must be one I32, found {} [{}]", t->dtype_text, fmt::join(t->shape, ", ")));
    if (t->bytes == 0) return true;
    uint32_t stored = 0;
    std::memcpy(&stored, source_.read(*t).bytes.data(), 4);
    if (stored != value) fail(suffix, fmt::format("marker value 0x{:08X} where 0x{:08X} is needed", stored, value));
    return true;
  }

  const TensorSource& source_;
  std::string_view prefix_;
};

void describe_plain(const Layer& layer, const TensorInfo& weight, LinearInfo& info) {
  if (weight.shape.size() != 2 || weight.shape[0] < 1 || weight.shape[1] < 1)
    layer.fail("weight", fmt::format("shape [{}] where [out, in] is needed", fmt::join(weight.shape, ", ")));
  layer.expect("weight", Layer::kFloats, weight.shape);
  info.out = weight.shape[0];
  info.in = weight.shape[1];
}

void describe_quantized(const Layer& layer, const TensorInfo& trellis, LinearInfo& info) {
  const auto& shape = trellis.shape;
  const std::string text = fmt::format("shape [{}]", fmt::join(shape, ", "));
  if (trellis.dtype != DType::I16)
    layer.fail("trellis", fmt::format("dtype {} where I16 is needed", trellis.dtype_text));
  if (shape.size() != 3) layer.fail("trellis", text + " where [in/16, out/16, 16*bits] is needed");
  info.quantized = true;
  info.codebook = layer.codebook();
  const char* codebook = exl3::codebook_name(info.codebook);
  if (shape[2] % 8 != 0 || shape[2] > 128 || !exl3::width_supported(info.codebook, static_cast<int>(shape[2] / 8)))
    layer.fail("trellis", fmt::format("{}: {} words a tile are {} bits, which codebook {} does not have", text,
                                      shape[2], static_cast<double>(shape[2]) / 16, codebook));
  info.half_bits = static_cast<int>(shape[2] / 8);
  for (int axis = 0; axis < 2; ++axis)
    if (shape[axis] < 1 || shape[axis] > kMaxWidth || shape[axis] % (exl3::kHadamard / exl3::kTile) != 0)
      layer.fail("trellis", fmt::format("{}: the {} width is not a positive multiple of {}", text,
                                        axis ? "output" : "input", exl3::kHadamard));
  info.in = shape[0] * exl3::kTile;
  info.out = shape[1] * exl3::kTile;
  const bool su = layer.packed("suh", "su", info.in), sv = layer.packed("svh", "sv", info.out);
  info.packed_signs = su || sv;
}

// ±1 a bit, low bit first.
std::vector<float> unpack_signs(const TensorData& data) {
  const auto* words = data.as<uint16_t>();
  std::vector<float> signs(data.bytes.size() * 8);
  for (size_t i = 0; i < signs.size(); ++i) signs[i] = words[i / 16] >> (i % 16) & 1 ? -1.0f : 1.0f;
  return signs;
}

}  // namespace

std::optional<LinearInfo> describe_linear(const TensorSource& source, std::string_view prefix) {
  const Layer layer(source, prefix);
  const TensorInfo *trellis = layer.find("trellis"), *weight = layer.find("weight");
  if (trellis == nullptr && weight == nullptr) return std::nullopt;
  if (trellis != nullptr && weight != nullptr) layer.fail("trellis", "the layer has a plain weight beside it");

  LinearInfo info;
  info.prefix = prefix;
  if (trellis != nullptr)
    describe_quantized(layer, *trellis, info);
  else
    describe_plain(layer, *weight, info);
  if ((info.bias = layer.find("bias") != nullptr)) layer.expect("bias", Layer::kFloats, {info.out});
  for (const char* suffix : {"trellis", "weight", "suh", "svh", "su", "sv", "bias", "mul1", "mcg"})
    if (const TensorInfo* t = layer.find(suffix)) info.bytes += t->bytes;
  return info;
}

LinearSource load_linear_source(const TensorSource& source, std::string_view prefix, int64_t in, int64_t out) {
  const std::optional<LinearInfo> info = describe_linear(source, prefix);
  if (!info)
    throw Error(ErrorKind::Input, fmt::format("linear layer {} is missing: there is neither {}.trellis nor {}.weight",
                                              prefix, prefix, prefix));
  if (info->in != in || info->out != out)
    throw Error(ErrorKind::Input, fmt::format("linear layer {} is [{}, {}] where [out, in] = [{}, {}] is needed",
                                              prefix, info->out, info->in, out, in));
  const Layer layer(source, prefix);
  const auto floats = [&](const char* suffix) { return float_values(source, *layer.find(suffix)); };
  LinearSource result;
  result.in = in;
  result.out = out;
  const TensorData data = source.read(*layer.find(info->quantized ? "trellis" : "weight"));
  result.owner.push_back(data.owner);
  if (info->bias) result.bias = floats("bias");
  if (!info->quantized) {
    result.plain = data.bytes.data();
    result.plain_dtype = *layer.find("weight")->dtype;
    return result;
  }
  result.trellis = data.as<uint16_t>();
  result.codebook = info->codebook;
  result.half_bits = info->half_bits;
  const TensorInfo *su = layer.find("su"), *sv = layer.find("sv");
  result.suh = su ? unpack_signs(source.read(*su)) : floats("suh");
  result.svh = sv ? unpack_signs(source.read(*sv)) : floats("svh");
  return result;
}

}  // namespace fnx
