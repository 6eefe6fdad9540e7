// Weights of the cuda backend: EXL3 and plain linears.
#include "kernels/cuda/backend.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/weight_form.h"

namespace fnx::cuda {

namespace {

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
  const auto matrix = static_cast<size_t>(matrix_bytes(s));
  const std::vector<uint16_t> suh = halves(s.suh, "suh", s), svh = halves(s.svh, "svh", s);
  const size_t suh_at = aligned_part(matrix), svh_at = suh_at + aligned_part(suh.size() * 2);
  const size_t bias_at = svh_at + aligned_part(svh.size() * 2);
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

}  // namespace fnx::cuda
