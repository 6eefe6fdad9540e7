// Scalar functions and reductions of the cpu backend, in fp64; callers round to fp32 where a value is stored.
#pragma once

#include <cmath>
#include <cstdint>

// Loops in functions so marked are compiled for several instruction sets; their bits do not depend on which one runs,
// because products of fp32 values are exact in fp64 and reductions have a fixed number of lanes.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__)
#define FNX_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FNX_CLONES
#endif

namespace fnx::cpu {

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double silu(double x) { return x / (1.0 + std::exp(-x)); }
inline double softplus(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }

// Sum of a[i] * b[i] in eight interleaved fp64 chains, added pairwise.
double dot(const float* a, const float* b, int64_t n);
// 1 / sqrt(mean(x^2) + eps), same lanes.
double inverse_rms(const float* x, int64_t n, double eps);
// out[i] = x[i] * scale * (1 + weight[i]), rounded once.
void scale_centred(const float* x, const float* weight, double scale, int64_t n, float* out);
// acc[i] += w * x[i].
void axpy(double w, const float* x, int64_t n, double* acc);
// Sylvester Hadamard transform of 128 values, without its factor 1 / sqrt(128).
void hadamard128(double* v);
// Rotates pairs (i, i + rotary/2) of x by position * inv_freq[i]; the angle is fp32.
void rope(float* x, int64_t rotary, const float* inv_freq, int64_t position);

}  // namespace fnx::cpu
