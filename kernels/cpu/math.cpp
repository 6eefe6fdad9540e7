#include "kernels/cpu/math.h"

#include <vector>

namespace fnx::cpu {

namespace {
constexpr int kLanes = 8;
typedef double Lanes __attribute__((vector_size(kLanes * sizeof(double))));
typedef int64_t Index __attribute__((vector_size(kLanes * sizeof(double))));
}  // namespace

FNX_CLONES double dot(const float* a, const float* b, int64_t n) {
  Lanes sum[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int v = 0; v < 4; ++v) {
      Lanes x, y;
      for (int l = 0; l < kLanes; ++l) x[l] = a[i + v * kLanes + l], y[l] = b[i + v * kLanes + l];
      sum[v] += x * y;
    }
  for (int l = 0; i < n; ++i, ++l) sum[l / kLanes][l % kLanes] += double{a[i]} * double{b[i]};
  const Lanes s = (sum[0] + sum[2]) + (sum[1] + sum[3]);
  return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
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

// H128 = H16 x H8: sixteen vectors against each other, then the eight lanes of each.
FNX_CLONES void hadamard128(double* v) {
  Lanes x[16];
  for (int i = 0; i < 16; ++i)
    for (int l = 0; l < kLanes; ++l) x[i][l] = v[i * kLanes + l];
  for (int h = 1; h < 16; h *= 2)
    for (int i = 0; i < 16; ++i)
      if ((i & h) == 0) {
        const Lanes a = x[i], b = x[i + h];
        x[i] = a + b;
        x[i + h] = a - b;
      }
  const Index swap1 = {1, 0, 3, 2, 5, 4, 7, 6}, swap2 = {2, 3, 0, 1, 6, 7, 4, 5}, swap4 = {4, 5, 6, 7, 0, 1, 2, 3};
  const Lanes sign1 = {1, -1, 1, -1, 1, -1, 1, -1}, sign2 = {1, 1, -1, -1, 1, 1, -1, -1},
              sign4 = {1, 1, 1, 1, -1, -1, -1, -1};
  for (int i = 0; i < 16; ++i) {
    x[i] = __builtin_shuffle(x[i], swap1) + x[i] * sign1;
    x[i] = __builtin_shuffle(x[i], swap2) + x[i] * sign2;
    x[i] = __builtin_shuffle(x[i], swap4) + x[i] * sign4;
    for (int l = 0; l < kLanes; ++l) v[i * kLanes + l] = x[i][l];
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
