// Pieces that all kernels share: mma, asynchronous copies, programmatic launch.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "kernels/error.h"

namespace fnx::cuda {

// d += a b: a 16x16 (row major fragments), b 16x8, fp32 sums.
__device__ __forceinline__ void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four matrices of 8 x 8 halves; lane 8 i + r gives where row r of matrix i lies.
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))));
}
// The same, transposed.
__device__ __forceinline__ void load_matrices_t(uint32_t (&m)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))));
}

// Copies 16 bytes to shared memory; zeros when `take` is false.
__device__ __forceinline__ void copy_async16(void* shared, const void* global, bool take = true) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = take ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// The next kernel may start; it waits below before it reads what this one writes.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Brings a line into the L2 before it is asked for.
__device__ __forceinline__ void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

inline void check_cuda(cudaError_t code, const char* what) {
  if (code != cudaSuccess) throw Error(ErrorKind::Device, std::string(what) + ": " + cudaGetErrorString(code));
}

// Launches; with `early` the kernel may start before the one before it on the stream has ended, and itself waits.
template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), dim3 grid, unsigned threads, size_t shared_bytes, bool early,
            cudaStream_t stream, Args... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, Params(args)...), name);
}
template <class... Params>
void launch(const char* name, void (*kernel)(Params...), dim3 grid, unsigned threads, size_t shared_bytes,
            cudaStream_t stream, const Params&... params) {
  launch(name, kernel, grid, threads, shared_bytes, true, stream, params...);
}

}  // namespace fnx::cuda
