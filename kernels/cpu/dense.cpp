#include "kernels/cpu/dense.h"

namespace fnx::cpu {
#include "kernels/cpu/dense_kernel.inl"

namespace {
struct Plain {
  typedef double Reg __attribute__((vector_size(16)));
  static constexpr int kLanes = 2, kPanelColumns = 8;
  static Reg zero() { return Reg{0, 0}; }
  static Reg set1(float x) { return Reg{x, x}; }
  static Reg fma(Reg a, Reg b, Reg c) { return c + a * b; }
  static void store(double* p, Reg v) { p[0] = v[0], p[1] = v[1]; }
  static Reg load(const float* p) { return Reg{p[0], p[1]}; }
};
constexpr DenseIsa kPlain{"plain", nullptr, panel<Plain, float>};
}  // namespace

#if defined(__x86_64__)
extern const DenseIsa kDenseAvx2, kDenseAvx512;
#endif

const DenseIsa* const* dense_isas() {
  static const DenseIsa* list[4] = {&kPlain, nullptr, nullptr, nullptr};
  [[maybe_unused]] static const bool filled = [] {
    [[maybe_unused]] int n = 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx2) list[n++] = &kDenseAvx2;
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")) list[n++] = &kDenseAvx512;
#endif
    return true;
  }();
  return list;
}

const DenseIsa& dense_isa() {
  const DenseIsa* const* isa = dense_isas();
  while (isa[1] != nullptr) ++isa;
  return **isa;
}

}  // namespace fnx::cpu
