// Harness of the CUDA operations' check: device arrays with guard bands, random inputs, comparisons.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/float16.h"
#include "kernels/ops.h"

namespace fnx::check {

inline int failures = 0, checks = 0;

inline void cuda(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::printf("FAIL %s: %s\n", what, cudaGetErrorString(e));
  std::exit(1);
}

// Device memory of n elements between two guard bands; starts as NaN bytes, so that an unwritten output shows.
template <class T>
class Device {
 public:
  explicit Device(size_t n) : n_(n) {
    cuda(cudaMalloc(reinterpret_cast<void**>(&base_), bytes() + 2 * kGuard), "cudaMalloc");
    cuda(cudaMemset(base_, 0xA5, bytes() + 2 * kGuard), "cudaMemset");
    poison();
  }
  explicit Device(const std::vector<T>& v) : Device(v.size()) { put(v); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() {
    std::vector<unsigned char> band(kGuard);
    for (size_t at : {size_t{0}, kGuard + bytes()}) {
      cuda(cudaMemcpy(band.data(), base_ + at, kGuard, cudaMemcpyDeviceToHost), "read of a guard band");
      for (unsigned char c : band)
        if (c != 0xA5) {
          ++failures;
          std::printf("FAIL a guard band of an array of %zu elements was written\n", n_);
          break;
        }
    }
    cudaFree(base_);
  }
  T* get() const { return reinterpret_cast<T*>(base_ + kGuard); }
  operator T*() const { return get(); }
  size_t size() const { return n_; }
  void poison() { cuda(cudaMemset(get(), 0xFF, bytes()), "cudaMemset"); }
  void zero() { cuda(cudaMemset(get(), 0, bytes()), "cudaMemset"); }
  void put(const std::vector<T>& v) {
    cuda(cudaMemcpy(get(), v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  }
  std::vector<T> take() const {
    std::vector<T> v(n_);
    cuda(cudaMemcpy(v.data(), get(), bytes(), cudaMemcpyDeviceToHost), "download");
    return v;
  }

 private:
  static constexpr size_t kGuard = 512;
  size_t bytes() const { return n_ * sizeof(T); }
  size_t n_ = 0;
  unsigned char* base_ = nullptr;
};

inline std::mt19937& generator() {
  static std::mt19937 g(12345);
  return g;
}
inline std::vector<float> normal(size_t n, float sigma = 1, float mean = 0) {
  std::normal_distribution<float> d(mean, sigma);
  std::vector<float> v(n);
  for (float& x : v) x = d(generator());
  return v;
}
inline std::vector<uint16_t> halves(size_t n, float sigma, DType type = DType::F16) {
  std::vector<uint16_t> v(n);
  const std::vector<float> pool = normal(std::min<size_t>(n, 1 << 20), sigma);
  for (size_t i = 0; i < n; ++i) {
    const float x = pool[(i * 7 + i / pool.size()) % pool.size()];
    v[i] = type == DType::F16 ? f32_to_f16(x) : f32_to_bf16(x);
  }
  return v;
}

template <class T>
View view(std::vector<T>& v, DType type, std::initializer_list<int64_t> dims) {
  View out{reinterpret_cast<std::byte*>(v.data()), type, Space::Host, 0, {}};
  for (int64_t d : dims) out.shape[out.rank++] = d;
  return out;
}
inline View view(std::vector<float>& v, std::initializer_list<int64_t> dims) { return view(v, DType::F32, dims); }

inline void report(bool ok, const std::string& name, const std::string& detail) {
  ++checks;
  if (!ok) ++failures;
  std::printf("%s %-52s %s\n", ok ? "ok  " : "FAIL", name.c_str(), detail.c_str());
}

// Relative norm of the difference under `limit`; NaN never passes.
inline void near(const std::string& name, const std::vector<float>& out, const std::vector<float>& ref,
                 double limit = 2e-6) {
  double diff = 0, norm = 0, worst = 0;
  size_t at = 0;
  for (size_t i = 0; i < ref.size(); ++i) {
    const double e = std::abs(double{out[i]} - ref[i]);
    diff += e * e, norm += double{ref[i]} * ref[i];
    if (!(e <= worst)) worst = e, at = i;
  }
  const double rel = std::sqrt(diff / norm);
  char text[160];
  std::snprintf(text, sizeof text, "relative %.2e of %.0e, worst %.2e at %zu (%g, reference %g)", rel, limit, worst, at,
                out[at], ref[at]);
  report(out.size() >= ref.size() && rel <= limit, name, text);
}

template <class T>
void same(const std::string& name, const std::vector<T>& a, const std::vector<T>& b) {
  size_t wrong = a.size() != b.size(), first = 0;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i)
    if (std::memcmp(&a[i], &b[i], sizeof(T)) != 0 && wrong++ == 0) first = i;
  report(wrong == 0, name,
         wrong == 0 ? "same bits"
                    : std::to_string(wrong) + " of " + std::to_string(a.size()) + " differ, first at " +
                          std::to_string(first));
}

template <class T>
std::vector<T> slice(const std::vector<T>& v, size_t from, size_t count) {
  return {v.begin() + from, v.begin() + from + count};
}

// A batch's tables on the host and on the device.
struct Tables {
  std::vector<Lane> lanes;
  std::vector<int32_t> positions, block_table;
  int64_t rows = 0, slots = 0, pages = 0;
  Tables(std::vector<Lane> l, int64_t slots_, int64_t pages_) : lanes(std::move(l)), slots(slots_), pages(pages_) {
    for (const Lane& x : lanes) {
      rows += x.rows;
      for (int i = 0; i < x.rows; ++i) positions.push_back(x.start + i);
    }
    // Pages of the slots are interleaved, so that a wrong table shows.
    for (int64_t s = 0; s < slots; ++s)
      for (int64_t i = 0; i < pages; ++i) block_table.push_back(static_cast<int32_t>(i * slots + (s + i) % slots));
  }
  std::vector<int32_t> lane_table() const {
    std::vector<int32_t> t;
    for (const Lane& l : lanes) t.insert(t.end(), {l.slot, l.first_row, l.rows, l.start});
    return t;
  }
  Batch batch() {
    Batch b;
    b.lanes = lanes;
    b.rows = rows;
    b.positions = view(positions, DType::I32, {rows});
    b.block_table = view(block_table, DType::I32, {slots, pages});
    return b;
  }
};

void check_dense(Backend& cpu);
void check_state(Backend& cpu);
void check_qsa(Backend& cpu);
void check_sample(Backend& cpu);

}  // namespace fnx::check
