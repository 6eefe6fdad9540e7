#include "kernels/cpu/math.h"

#include <vector>

namespace fnx::cpu {

namespace {
typedef double Lanes __attribute__((vector_size(64)));

inline double fold(Lanes v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
}  // namespace

FNX_CLONES double dot(const float* a, const float* b, int64_t n) {
  Lanes sum{};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    Lanes x, y;
    for (int l = 0; l < 8; ++l) x[l] = a[i + l], y[l] = b[i + l];
    sum += x * y;
  }
  for (int l = 0; i < n; ++i, ++l) sum[l] += double{a[i]} * double{b[i]};
  return fold(sum);
}

double inverse_rms(const float* x, int64_t n, double eps) {
  return 1.0 / std::sqrt(dot(x, x, n) / static_cast<double>(n) + eps);
}

FNX_CLONES void scale_centred(const float* x, const float* weight, double scale, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(x[i] * scale * (1.0 + weight[i]));
}

FNX_CLONES void axpy(double w, const float* x, int64_t n, double* acc) {
  for (int64_t i = 0; i < n; ++i) acc[i] += w * x[i];
}

FNX_CLONES void hadamard128(double* v) {
  for (int h = 1; h < 128; h *= 2)
    for (int i = 0; i < 128; i += 2 * h)
      for (int j = i; j < i + h; ++j) {
        const double a = v[j], b = v[j + h];
        v[j] = a + b;
        v[j + h] = a - b;
      }
}

void rope(float* x, int64_t rotary, const float* inv_freq, int64_t position) {
  const int64_t half = rotary / 2;
  for (int64_t i = 0; i < half; ++i) {
    const double angle = static_cast<float>(position) * inv_freq[i];
    const float c = static_cast<float>(std::cos(angle)), s = static_cast<float>(std::sin(angle));
    const double a = x[i], b = x[i + half];
    x[i] = static_cast<float>(a * c - b * s);
    x[i + half] = static_cast<float>(b * c + a * s);
  }
}

}  // namespace fnx::cpu
