// Weights of the cuda backend: EXL3 and plain linears, the expert banks.
#include <algorithm>
#include <cstring>

#include "kernels/cuda/backend.h"
#include "kernels/cuda/device.cuh"
#include "kernels/float16.h"

namespace fnx::cuda {

namespace {

constexpr size_t kAlign = 256;
size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

size_t trellis_bytes(const LinearSource& s) {
  return static_cast<size_t>(s.in / exl3::kTile) * (s.out / exl3::kTile) * exl3::tile_words(s.half_bits) * 2;
}

std::string shape_text(const LinearSource& s) {
  return "[" + std::to_string(s.out) + ", " + std::to_string(s.in) + "]";
}

// Scales are F16 on disk; anything else that a file holds must be one.
std::vector<uint16_t> halves(const std::vector<float>& values, const char* what, const LinearSource& s) {
  std::vector<uint16_t> out(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    out[i] = f32_to_f16(values[i]);
    const float back = f16_to_f32(out[i]);
    if (std::memcmp(&back, &values[i], sizeof back) != 0)
      throw Error(ErrorKind::Unsupported, std::string(what) + " of a linear layer " + shape_text(s) +
                                              " holds a value that is no F16; the cuda backend keeps it as F16, use "
                                              "--backend cpu");
  }
  return out;
}

void check_quantized(const LinearSource& s) {
  if (s.in > 65536 || s.out > 524288)
    throw Error(ErrorKind::Unsupported, "an EXL3 linear layer " + shape_text(s) +
                                            ": the cuda backend takes at most 65536 inputs and 524288 outputs; use "
                                            "--backend cpu");
}

}  // namespace

Uploader& CudaBackend::uploader() {
  if (!uploader_) uploader_ = std::make_unique<Uploader>(*memory_, load_stream_);
  return *uploader_;
}

std::unique_ptr<Linear> CudaBackend::load_linear(LinearSource s) {
  auto linear = std::make_unique<CudaLinear>();
  linear->in = s.in, linear->out = s.out;
  const bool plain = s.plain != nullptr;
  const size_t matrix = plain ? static_cast<size_t>(s.in * s.out) * dtype_size(s.plain_dtype) : trellis_bytes(s);
  const std::vector<uint16_t> suh = halves(s.suh, "suh", s), svh = halves(s.svh, "svh", s);
  const size_t suh_at = aligned(matrix), svh_at = suh_at + aligned(suh.size() * 2);
  const size_t bias_at = svh_at + aligned(svh.size() * 2);
  linear->memory = memory_->device(bias_at + s.bias.size() * 4, load_stream_);
  std::byte* base = linear->memory.view(DType::U8, {0}).data;
  const auto put = [&](size_t at, const void* from, size_t bytes) {
    uploader().seek(base + at);
    uploader().write(from, bytes);
  };
  if (s.full_out == 0) {
    put(0, plain ? s.plain : s.trellis, matrix);
  } else {
    const int64_t words = exl3::tile_words(s.half_bits), row = s.full_out / exl3::kTile * words;
    uploader().seek(base);
    for (int64_t k = 0; k < s.in / exl3::kTile; ++k)
      uploader().write(s.trellis + k * row + s.first_out / exl3::kTile * words, s.out / exl3::kTile * words * 2);
  }
  put(suh_at, suh.data(), suh.size() * 2);
  put(svh_at, svh.data(), svh.size() * 2);
  put(bias_at, s.bias.data(), s.bias.size() * 4);
  uploader().finish();
  linear->bias = s.bias.empty() ? nullptr : reinterpret_cast<const float*>(base + bias_at);
  if (plain) {
    linear->plain = base, linear->plain_dtype = s.plain_dtype;
    return linear;
  }
  check_quantized(s);
  linear->exl3 = {s.in,
                  s.out,
                  exl3_splits(s.in, s.full_out > 0 ? s.full_out : s.out),
                  s.codebook,
                  s.half_bits,
                  reinterpret_cast<const uint16_t*>(base),
                  reinterpret_cast<const uint16_t*>(base + suh_at),
                  reinterpret_cast<const uint16_t*>(base + svh_at),
                  linear->bias};
  return linear;
}

std::unique_ptr<ExpertBank> CudaBackend::load_experts(std::vector<ExpertSource> experts) {
  auto bank = std::make_unique<CudaExperts>();
  bank->experts = static_cast<int64_t>(experts.size());
  const auto held = std::find_if(experts.begin(), experts.end(), [](const ExpertSource& e) { return e.held(); });
  if (held == experts.end()) return bank;
  const LinearSource& first = held->gate;
  bank->in = first.in, bank->width = first.out, bank->codebook = first.codebook;
  if (hidden_ == 0) hidden_ = bank->in, expert_width_ = bank->width;
  if (bank->in != hidden_ || bank->width != expert_width_)
    throw Error(ErrorKind::Unsupported, "expert banks of two shapes, " + std::to_string(hidden_) + " x " +
                                            std::to_string(expert_width_) + " and " + std::to_string(bank->in) + " x " +
                                            std::to_string(bank->width) + "; use --backend cpu");
  size_t trellis = 0;
  size_t held_count = 0;
  for (const ExpertSource& e : experts) {
    if (!e.held()) continue;
    ++held_count;
    for (const LinearSource* s : {&e.gate, &e.up, &e.down}) {
      if (s->plain != nullptr || s->codebook != bank->codebook || !s->bias.empty())
        throw Error(ErrorKind::Unsupported,
                    "the cuda backend runs routed experts in EXL3, of one codebook a layer and without bias; use "
                    "--backend cpu");
      trellis += aligned(trellis_bytes(*s));
    }
  }
  const size_t in_bytes = aligned(bank->in * 2), width_bytes = aligned(bank->width * 2);
  const size_t scales = held_count * 3 * (in_bytes + width_bytes);
  bank->memory = memory_->device(trellis + scales + aligned(experts.size() * sizeof(Exl3Expert)), load_stream_);
  std::byte* base = bank->memory.view(DType::U8, {0}).data;
  // One run of bytes from the arena's start to its end, so that the uploads are few and large.
  uploader().seek(base);
  static constexpr std::byte kZeros[kAlign] = {};
  size_t at = 0;
  const auto put = [&](const void* from, size_t bytes) {
    const size_t was = at;
    uploader().write(from, bytes);
    uploader().write(kZeros, aligned(bytes) - bytes);
    at += aligned(bytes);
    return reinterpret_cast<const uint16_t*>(base + was);
  };
  std::vector<Exl3Expert> table(experts.size());
  const auto each = [&](auto fn) {
    for (size_t e = 0; e < experts.size(); ++e) {
      if (!experts[e].held()) continue;
      fn(experts[e].gate, table[e].gate);
      fn(experts[e].up, table[e].up);
      fn(experts[e].down, table[e].down);
    }
  };
  each([&](const LinearSource& s, Exl3Matrix& m) {
    m.trellis = put(s.trellis, trellis_bytes(s));
    m.half_bits = s.half_bits;
  });
  each([&](const LinearSource& s, Exl3Matrix& m) {
    m.suh = put(halves(s.suh, "suh", s).data(), s.suh.size() * 2);
    m.svh = put(halves(s.svh, "svh", s).data(), s.svh.size() * 2);
  });
  bank->table = reinterpret_cast<const Exl3Expert*>(put(table.data(), table.size() * sizeof(Exl3Expert)));
  uploader().finish();
  return bank;
}

}  // namespace fnx::cuda
