// EXL3 and plain linear layers: y = ((((x * suh) H) Wq) H) * svh + bias, or W x + bias.
// Rounding points: the rotated input to fp32, the output to fp32; everything between is fp64.
#include <algorithm>
#include <cstring>

#include "kernels/cpu/backend.h"
#include "kernels/cpu/dense.h"
#include "kernels/cpu/math.h"
#include "kernels/error.h"
#include "kernels/float16.h"

namespace fnx::cpu {

namespace {

constexpr int kBlock = exl3::kHadamard;
const double kHadamardScale = 1.0 / std::sqrt(128.0);

// fp16 bits of every state of a codebook.
const std::vector<uint16_t>& codebook_table(exl3::Codebook c) {
  const auto build = [](exl3::Codebook book) {
    std::vector<uint16_t> t(65536);
    for (uint32_t s = 0; s < 65536; ++s) t[s] = exl3::decode_state(static_cast<uint16_t>(s), book);
    return t;
  };
  static const std::vector<uint16_t> tables[3] = {build(exl3::Codebook::ThreeInst), build(exl3::Codebook::Mcg),
                                                  build(exl3::Codebook::Mul1)};
  return tables[static_cast<int>(c)];
}

}  // namespace

bool DecodedBudget::take(uint64_t bytes) {
  if (used.fetch_add(bytes) + bytes <= limit) return true;
  used.fetch_sub(bytes);
  return false;
}

CpuLinear::CpuLinear(LinearSource source, DecodedBudget& budget) : source_(std::move(source)), budget_(budget) {
  in = source_.in;
  out = source_.out;
  quantized_ = source_.trellis != nullptr;
  half_ = dense_isa().f16 != nullptr && (quantized_ || source_.plain_dtype == DType::F16);
  decoded_.assign(blocks(), 0);
}

void CpuLinear::move_to(const std::byte* weights) {
  kept_ = 0;
  if (quantized_)
    source_.trellis = reinterpret_cast<const uint16_t*>(weights);
  else
    source_.plain = weights;
}

int64_t CpuLinear::block_bytes() const { return in * kBlock * (half_ ? 2 : 4); }

bool CpuLinear::keep() {
  if (kept_ < 0) {
    kept_ = budget_.take(block_bytes() * blocks());
    if (kept_) panels_.resize(block_bytes() * blocks());
  }
  return kept_ == 1;
}

void CpuLinear::decode_block(int64_t block, std::byte* to) const {
  const auto put = [&](int64_t k, int64_t n, uint16_t f16, float f32) {  // n: output within the block
    const int64_t at = (n / kPanel * in + k) * kPanel + n % kPanel;
    if (half_)
      reinterpret_cast<uint16_t*>(to)[at] = f16;
    else
      reinterpret_cast<float*>(to)[at] = f32;
  };
  if (!quantized_) {
    const int64_t first = block * kBlock, count = std::min<int64_t>(kBlock, out - first);
    std::memset(to, 0, block_bytes());
    for (int64_t n = 0; n < count; ++n) {
      const int64_t row = (first + n) * in;
      for (int64_t k = 0; k < in; ++k) switch (source_.plain_dtype) {
          case DType::F32:
            put(k, n, 0, static_cast<const float*>(source_.plain)[row + k]);
            break;
          case DType::BF16:
            put(k, n, 0, bf16_to_f32(static_cast<const uint16_t*>(source_.plain)[row + k]));
            break;
          default: {
            const uint16_t h = static_cast<const uint16_t*>(source_.plain)[row + k];
            put(k, n, h, f16_to_f32(h));
          }
        }
    }
    return;
  }
  const uint16_t* table = codebook_table(source_.codebook).data();
  const int words = exl3::tile_words(source_.half_bits);
  const int64_t tile_columns = (source_.full_out > 0 ? source_.full_out : out) / exl3::kTile;
  const int64_t first_column = source_.first_out / exl3::kTile;
  // Where each value's 16 bits begin in the ring; the same for every tile.
  int start[exl3::kTileValues];
  for (int p = 0; p < exl3::kTileValues; ++p)
    start[p] = (exl3::end_bit(p, source_.half_bits) - 16 + words * 16) % (words * 16);
  for (int64_t tk = 0; tk < in / exl3::kTile; ++tk)
    for (int64_t tn = 0; tn < kBlock / exl3::kTile; ++tn) {
      const uint16_t* tile =
          source_.trellis + (tk * tile_columns + first_column + block * (kBlock / exl3::kTile) + tn) * words;
      uint32_t ring[exl3::tile_words(16) / 2 + 1];
      for (int w = 0; w < words / 2; ++w) ring[w] = uint32_t{tile[2 * w]} | uint32_t{tile[2 * w + 1]} << 16;
      ring[words / 2] = ring[0];
      for (int p = 0; p < exl3::kTileValues; ++p) {
        const uint64_t window = uint64_t{ring[start[p] / 32]} << 32 | ring[start[p] / 32 + 1];
        const uint16_t h = table[static_cast<uint16_t>(window >> (48 - start[p] % 32))];
        put(tk * exl3::kTile + exl3::value_row(p), tn * exl3::kTile + exl3::value_column(p), h,
            half_ ? 0.0f : f16_to_f32(h));
      }
    }
}

void CpuLinear::rotate(const float* x, float* xh) const {
  for (int64_t b = 0; b < in; b += kBlock) {
    double v[kBlock];
    for (int i = 0; i < kBlock; ++i) v[i] = double{x[b + i]} * source_.suh[b + i];
    hadamard128(v);
    for (int i = 0; i < kBlock; ++i) xh[b + i] = static_cast<float>(v[i] * kHadamardScale);
  }
}

void CpuLinear::block_rows(int64_t block, const std::byte* weights, const float* x, int64_t rows, float* y) const {
  const DenseIsa& isa = dense_isa();
  const PanelFn panel = half_ ? isa.f16 : isa.f32;
  const int64_t panel_bytes = in * kPanel * (half_ ? 2 : 4);
  const int64_t first = block * kBlock, count = std::min<int64_t>(kBlock, out - first);
  const int64_t panels = (count + kPanel - 1) / kPanel;
  double z[kRowBlock][kBlock], acc[kRowBlock * kPanel];
  for (int64_t r0 = 0; r0 < rows; r0 += kRowBlock) {
    const int n = static_cast<int>(std::min<int64_t>(kRowBlock, rows - r0));
    for (int64_t p = 0; p < panels; ++p) {
      panel(weights + p * panel_bytes, in, x + r0 * in, in, n, acc);
      for (int r = 0; r < n; ++r) std::copy_n(acc + r * kPanel, kPanel, z[r] + p * kPanel);
    }
    for (int r = 0; r < n; ++r) {
      float* to = y + (r0 + r) * out + first;
      if (quantized_) hadamard128(z[r]);
      for (int64_t i = 0; i < count; ++i) {
        double v = quantized_ ? z[r][i] * kHadamardScale * source_.svh[first + i] : z[r][i];
        if (!source_.bias.empty()) v += source_.bias[first + i];
        to[i] = static_cast<float>(v);
      }
    }
  }
}

void CpuLinear::apply(const float* x, int64_t rows, float* y) {
  thread_local std::vector<float> rotated;
  thread_local std::vector<std::byte> block;
  if (quantized_) {
    rotated.resize(rows * in);
    for (int64_t r = 0; r < rows; ++r) rotate(x + r * in, rotated.data() + r * in);
    x = rotated.data();
  }
  const bool kept = keep();
  if (!kept) block.resize(block_bytes());
  for (int64_t b = 0; b < blocks(); ++b) {
    std::byte* w = kept ? panels_.data() + b * block_bytes() : block.data();
    if (!kept || !decoded_[b]) decode_block(b, w);
    if (kept) decoded_[b] = 1;
    block_rows(b, w, x, rows, y);
  }
}

void CpuLinear::apply(ThreadPool& pool, const float* x, int64_t rows, float* y) {
  constexpr int64_t kWorthWaking = 1 << 16;
  const bool kept = keep();
  const bool ready = kept && std::all_of(decoded_.begin(), decoded_.end(), [](uint8_t d) { return d != 0; });
  if (ready && rows * in * out < kWorthWaking) return apply(x, rows, y);
  static thread_local std::vector<float> rotated_rows;
  if (quantized_) {
    rotated_rows.resize(rows * in);
    float* to = rotated_rows.data();
    if (rows == 1)
      rotate(x, to);
    else
      pool.run(rows, [&](int64_t r) { rotate(x + r * in, to + r * in); });
    x = to;
  }
  // Chunks of rows share a block's weights while they are in cache.
  constexpr int64_t kChunk = 64;
  const int64_t chunks = kept ? (rows + kChunk - 1) / kChunk : 1, per_chunk = kept ? kChunk : rows;
  if (kept && !ready)
    pool.run(blocks(), [&](int64_t b) {
      if (!decoded_[b]) decode_block(b, panels_.data() + b * block_bytes());
      decoded_[b] = 1;
    });
  pool.run(blocks() * chunks, [&](int64_t i) {
    const int64_t b = i / chunks, r0 = i % chunks * per_chunk, n = std::min(per_chunk, rows - r0);
    thread_local std::vector<std::byte> block;
    const std::byte* w = panels_.data() + b * block_bytes();
    if (!kept) {
      block.resize(block_bytes());
      decode_block(b, block.data());
      w = block.data();
    }
    block_rows(b, w, x + r0 * in, n, y + r0 * out);
  });
}

std::unique_ptr<Linear> CpuBackend::load_linear(LinearSource source) {
  return std::make_unique<CpuLinear>(std::move(source), budget_);
}

void CpuBackend::linear(Stream&, const Linear& weights, View x, View y) {
  // The decoded form of a weight is a cache inside it.
  auto& w = const_cast<CpuLinear&>(static_cast<const CpuLinear&>(weights));
  const int64_t rows = x.size() / w.in;
  if (rows * w.in != x.size() || rows * w.out != y.size())
    throw Error(ErrorKind::Internal, "linear [" + std::to_string(w.out) + ", " + std::to_string(w.in) + "] given " +
                                         std::to_string(x.size()) + " inputs and " + std::to_string(y.size()) +
                                         " outputs");
  w.apply(pool_, x.as<float>(), rows, y.as<float>());
}

}  // namespace fnx::cpu
