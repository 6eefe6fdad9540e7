// Compiled with AVX2, FMA and F16C flags; called only where the processor has them.
#include "kernels/cpu/dense.h"

#if defined(__AVX2__)
#include <immintrin.h>

namespace fnx::cpu {
#include "kernels/cpu/dense_kernel.inl"

namespace {
struct Avx2 {
  using Reg = __m256d;
  static constexpr int kLanes = 4, kPanelColumns = 8;
  static Reg zero() { return _mm256_setzero_pd(); }
  static Reg set1(float x) { return _mm256_set1_pd(x); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_pd(a, b, c); }
  static void store(double* p, Reg v) { _mm256_storeu_pd(p, v); }
  static Reg load(const float* p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
  static Reg load(const uint16_t* p) {
    return _mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
};
}  // namespace

extern const DenseIsa kDenseAvx2{"avx2", panel<Avx2, uint16_t>, panel<Avx2, float>};

}  // namespace fnx::cpu
#endif
