// Compiled with AVX-512 flags; called only where the processor has it.
#include "kernels/cpu/dense.h"

#if defined(__AVX512F__)
#include <immintrin.h>

namespace fnx::cpu {
#include "kernels/cpu/dense_kernel.inl"

namespace {
struct Avx512 {
  using Reg = __m512d;
  static constexpr int kLanes = 8, kPanelColumns = 32;
  static Reg zero() { return _mm512_setzero_pd(); }
  static Reg set1(float x) { return _mm512_set1_pd(x); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_pd(a, b, c); }
  static void store(double* p, Reg v) { _mm512_storeu_pd(p, v); }
  static Reg load(const float* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
  static Reg load(const uint16_t* p) {
    return _mm512_cvtps_pd(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
};
}  // namespace

extern const DenseIsa kDenseAvx512{"avx512", panel<Avx512, uint16_t>, panel<Avx512, float>};

}  // namespace fnx::cpu
#endif
