#include "kernels/contract/exl3_math.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/float16.h"

namespace fnx::contract {

namespace {

constexpr int kBlock = exl3::kHadamard;
const float kScale = static_cast<float>(1.0 / std::sqrt(128.0));
const double kExactScale = 1.0 / std::sqrt(128.0);

template <class T>
void butterflies(T* v) {
  for (int h = 1; h < kBlock; h *= 2)
    for (int i = 0; i < kBlock; ++i)
      if ((i & h) == 0) {
        const T a = v[i], b = v[i + h];
        v[i] = a + b;
        v[i + h] = a - b;
      }
}

// What each of a codebook's 65536 states means: matrices are decoded many times.
const std::vector<float>& values_by_state(exl3::Codebook codebook) {
  static const auto tables = [] {
    std::array<std::vector<float>, 3> all;
    for (size_t c = 0; c < all.size(); ++c)
      for (uint32_t s = 0; s < 65536; ++s)
        all[c].push_back(f16_to_f32(exl3::decode_state(static_cast<uint16_t>(s), static_cast<exl3::Codebook>(c))));
    return all;
  }();
  return tables.at(static_cast<size_t>(codebook));
}

int split_begin(const Exl3Matrix& m, int s) { return 2 * static_cast<int>(m.in / 32 * s / m.splits); }

}  // namespace

std::vector<float> decode(const Exl3Matrix& m) {
  std::vector<float> w(static_cast<size_t>(m.in * m.out));
  const std::vector<float>& value = values_by_state(m.codebook);
  const int64_t columns = m.out / exl3::kTile;
  for (int64_t tile = 0; tile < m.in / exl3::kTile * columns; ++tile) {
    const uint16_t* words = m.trellis + tile * exl3::tile_words(m.half_bits);
    for (int p = 0; p < exl3::kTileValues; ++p) {
      const int64_t row = tile / columns * exl3::kTile + exl3::value_row(p);
      const int64_t column = tile % columns * exl3::kTile + exl3::value_column(p);
      w[static_cast<size_t>(row * m.out + column)] = value[exl3::tile_state(words, p, m.half_bits)];
    }
  }
  return w;
}

LinearSource linear_source(const Exl3Matrix& m) {
  LinearSource source;
  source.in = m.in;
  source.out = m.out;
  source.trellis = m.trellis;
  source.codebook = m.codebook;
  source.half_bits = m.half_bits;
  for (int64_t i = 0; i < m.in; ++i) source.suh.push_back(f16_to_f32(m.suh[i]));
  for (int64_t i = 0; i < m.out; ++i) source.svh.push_back(f16_to_f32(m.svh[i]));
  if (m.bias != nullptr) source.bias.assign(m.bias, m.bias + m.out);
  return source;
}

void rotate_block(const float* x, const uint16_t* suh, bool bf16, float* xh) {
  for (int i = 0; i < kBlock; ++i) xh[i] = x[i] * f16_to_f32(suh[i]);
  butterflies(xh);
  for (int i = 0; i < kBlock; ++i)
    xh[i] = bf16 ? bf16_to_f32(f32_to_bf16(xh[i] * kScale)) : f16_to_f32(f32_to_f16(xh[i] * kScale));
}

void linear_row(const Exl3Matrix& m, const std::vector<float>& decoded, const float* x, float* y, Exl3Fault fault) {
  std::vector<float> xh(static_cast<size_t>(m.in)), z(static_cast<size_t>(m.out), 0.0f), partial(z.size());
  for (int64_t b = 0; b < m.in; b += kBlock)
    rotate_block(x + b, m.suh + b, fault == Exl3Fault::Bf16Rotation, &xh[static_cast<size_t>(b)]);
  // Products of two fp16 numbers are exact in fp32, so a product and a sum round as one fma does.
  const auto chain = [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
      const float* row = decoded.data() + k * m.out;
      for (int64_t n = 0; n < m.out; ++n) partial[static_cast<size_t>(n)] += xh[static_cast<size_t>(k)] * row[n];
    }
  };
  const auto add_split = [&](int s) {
    const int64_t first = split_begin(m, s) * exl3::kTile;
    int64_t last = split_begin(m, s + 1) * exl3::kTile;
    if (fault == Exl3Fault::DroppedTile && s + 1 == m.splits) last -= exl3::kTile;
    std::fill(partial.begin(), partial.end(), 0.0f);
    if (fault == Exl3Fault::TwoChains) {
      const std::vector<float> before = z;
      chain(first, (first + last) / 2);
      for (size_t n = 0; n < z.size(); ++n) z[n] += partial[n];
      std::fill(partial.begin(), partial.end(), 0.0f);
      chain((first + last) / 2, last);
    } else {
      chain(first, last);
    }
    for (size_t n = 0; n < z.size(); ++n) z[n] += partial[n];
  };
  for (int s = 0; s < m.splits; ++s) add_split(fault == Exl3Fault::ReversedSplits ? m.splits - 1 - s : s);
  if (fault == Exl3Fault::RepeatedSplit) add_split(0);
  if (fault == Exl3Fault::ShiftedColumn)
    for (int64_t n = 0; n < m.out; n += exl3::kTile) std::rotate(&z[n], &z[n] + 1, &z[n] + exl3::kTile);
  for (int64_t b = 0; b < m.out; b += kBlock) {
    float* v = z.data() + b;
    if (fault != Exl3Fault::UnrotatedOutput) butterflies(v);
    for (int i = 0; i < kBlock; ++i) {
      y[b + i] = v[i] * kScale * f16_to_f32(m.svh[b + i]);
      if (m.bias != nullptr) y[b + i] += m.bias[b + i];
    }
  }
}

Exl3Reference::Exl3Reference(const Exl3Matrix& m, bool carries) : m_(m), decoded_(decode(m)) {
  std::vector<double> w(decoded_.begin(), decoded_.end());
  // Rounded up, because magnitudes of bounds must not shrink.
  const auto magnitudes = [&] {
    std::vector<float> out(w.size());
    for (size_t i = 0; i < w.size(); ++i) out[i] = static_cast<float>(std::abs(w[i]) * (1 + 0x1p-22));
    return out;
  };
  for (int64_t at = 0; at < m.in * m.out; at += kBlock) {
    butterflies(&w[static_cast<size_t>(at)]);
    for (int64_t i = at; i < at + kBlock; ++i)
      w[static_cast<size_t>(i)] *= kExactScale * double{f16_to_f32(m.svh[i % m.out])};
  }
  after_ = magnitudes();
  if (!carries) return;
  double column[kBlock];
  for (int64_t b = 0; b < m.in; b += kBlock)
    for (int64_t n = 0; n < m.out; ++n) {
      for (int i = 0; i < kBlock; ++i) column[i] = w[static_cast<size_t>((b + i) * m.out + n)];
      butterflies(column);
      for (int i = 0; i < kBlock; ++i)
        w[static_cast<size_t>((b + i) * m.out + n)] = column[i] * kExactScale * double{f16_to_f32(m.suh[b + i])};
    }
  whole_ = magnitudes();
}

std::vector<Bounded> Exl3Reference::row(const std::vector<Bounded>& x, Rotation rotation) const {
  const auto in = static_cast<size_t>(m_.in), out = static_cast<size_t>(m_.out);
  std::vector<Bounded> xh(in);
  std::vector<double> rounding(in);  // rho and the two roundings to fp16
  bool carries = false;
  for (size_t b = 0; b < in; b += kBlock) {
    double v[kBlock], magnitude = 0, given = 0;
    for (size_t i = 0; i < kBlock; ++i) {
      const double scale = f16_to_f32(m_.suh[b + i]);
      v[i] = x[b + i].value * scale;
      magnitude += (std::abs(x[b + i].value) + x[b + i].error) * std::abs(scale);
      given += x[b + i].error * std::abs(scale);
    }
    carries = carries || (given > 0 && !whole_.empty());
    butterflies(v);
    // Products below the smallest normal number round to multiples of 2^-149.
    const double rho = gamma(10) * magnitude * kExactScale + kBlock * 0x1p-149, error = rho + given * kExactScale;
    for (size_t i = 0; i < kBlock; ++i) {
      const double t = v[i] * kExactScale, half_ulp = 0x1p-11 * (std::abs(t) + error) + 0x1p-25;
      const bool rounds = rotation == Rotation::Fp16;
      xh[b + i] = rounds ? round_to_f16({t, error}) : Bounded{t, error + half_ulp};
      rounding[b + i] = rho + (rounds ? 2 : 1) * half_ulp;
    }
  }
  std::vector<double> z(out), magnitude(out), carried(out), through(out), whole(out);
  for (size_t k = 0; k < in; ++k) {
    const Bounded a = xh[k];
    const double most = std::abs(a.value) + a.error;
    const float *w = &decoded_[k * out], *after = &after_[k * out];
    for (size_t n = 0; n < out; ++n) {
      z[n] += a.value * w[n];
      magnitude[n] += most * std::abs(double{w[n]});
    }
    if (a.error != 0)
      for (size_t n = 0; n < out; ++n) {
        carried[n] += a.error * std::abs(double{w[n]});
        through[n] += a.error * after[n];
      }
    if (carries) {
      const float* layer = &whole_[k * out];
      for (size_t n = 0; n < out; ++n) whole[n] += x[k].error * layer[n] + rounding[k] * after[n];
    }
  }
  std::vector<Bounded> y(out);
  const double g = gamma(static_cast<double>(m_.in + m_.splits));
  for (size_t b = 0; b < out; b += kBlock) {
    double v[kBlock], sums = 0;
    for (size_t i = 0; i < kBlock; ++i) {
      v[i] = z[b + i];
      const double e_z = g * magnitude[b + i];
      sums += e_z + gamma(9) * (std::abs(v[i]) + carried[b + i] + e_z);
    }
    butterflies(v);
    for (size_t i = 0; i < kBlock; ++i) {
      const size_t n = b + i;
      const double scale = f16_to_f32(m_.svh[n]), product = v[i] * kExactScale * scale;
      const double value = product + (m_.bias != nullptr ? double{m_.bias[n]} : 0.0);
      const double input = carries ? std::min(through[n], whole[n]) : through[n];
      const double error = sums * std::abs(scale) * kExactScale + input;
      y[n] = {value, error + 2 * kUnit * (std::max(std::abs(value), std::abs(product)) + error) + 0x1p-148};
    }
  }
  return y;
}

void fill_trellis(uint16_t* words, int64_t in, int64_t out, int half_bits, Random& random, bool directed) {
  const int64_t row = out / exl3::kTile * exl3::tile_words(half_bits), tile_rows = in / exl3::kTile;
  for (int64_t i = 0; i < tile_rows * row; ++i) words[i] = static_cast<uint16_t>(random.bits() >> 48);
  if (!directed) return;
  for (int64_t t = kBlock / exl3::kTile; t < tile_rows; t += kBlock / exl3::kTile)
    std::copy_n(words, row, words + t * row);
}

void fill_scales(uint16_t* scales, int64_t count, Random& random, bool directed) {
  for (int64_t i = 0; i < count; ++i) {
    const double size = directed ? 1.0 : 0.5 + random.uniform();
    scales[i] = f32_to_f16(static_cast<float>(random.below(2) == 0 ? size : -size));
  }
}

void fill_directed(float* x, int64_t rows, int64_t in, const uint16_t* suh, Random& random) {
  const int64_t blocks = in / kBlock;
  std::vector<float> values(static_cast<size_t>(blocks));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t b = 0; b < blocks; ++b)
      values[static_cast<size_t>(b)] = static_cast<float>(random.below(5) - 2) * 0x1p-18f;
    // Two large numbers that cancel, in two blocks of the row's own.
    const int64_t first = random.below(blocks),
                  second = (first + 1 + random.below(std::max<int64_t>(1, blocks - 1))) % blocks;
    values[static_cast<size_t>(first)] = 0x1p12f;
    values[static_cast<size_t>(second)] = -0x1p12f;
    for (int64_t i = 0; i < in; ++i) x[r * in + i] = values[static_cast<size_t>(i / kBlock)] * f16_to_f32(suh[i]);
  }
}

}  // namespace fnx::contract
