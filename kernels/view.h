// Views of arrays and the owner of memory. Neither knows what the numbers mean.
#pragma once

#include <array>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <utility>

#include "kernels/dtype.h"

namespace fnx {

enum class Space : uint8_t { Host, Device };

// A dense row-major array of up to 4 axes that somebody else owns. Row strides other than shape products are not
// needed: a window of rows is a View of its own.
struct View {
  std::byte* data = nullptr;
  DType dtype = DType::F32;
  Space space = Space::Host;
  int rank = 0;
  std::array<int64_t, 4> shape{};

  int64_t size() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }
  int64_t bytes() const { return size() * static_cast<int64_t>(dtype_size(dtype)); }
  // Elements of one index of the first axis.
  int64_t row_size() const { return rank == 0 || shape[0] == 0 ? 0 : size() / shape[0]; }
  explicit operator bool() const { return data != nullptr; }

  template <class T>
  T* as() const {
    assert(dtype_size(dtype) == sizeof(T));
    return reinterpret_cast<T*>(data);
  }
  // Rows [first, first + count) of the first axis.
  View rows(int64_t first, int64_t count) const {
    View v = *this;
    v.data += first * row_size() * static_cast<int64_t>(dtype_size(dtype));
    v.shape[0] = count;
    return v;
  }
  View reshape(std::initializer_list<int64_t> dims) const {
    View v = *this;
    v.rank = 0;
    v.shape = {};
    for (int64_t d : dims) v.shape[v.rank++] = d;
    assert(v.size() == size());
    return v;
  }
};

// Move-only owner of one allocation of a backend; zero-filled when made.
class Buffer {
 public:
  Buffer() = default;
  Buffer(std::byte* data, size_t bytes, Space space, std::function<void(std::byte*)> release)
      : data_(data), bytes_(bytes), space_(space), release_(std::move(release)) {}
  Buffer(Buffer&& o) noexcept { swap(o); }
  Buffer& operator=(Buffer&& o) noexcept {
    Buffer(std::move(o)).swap(*this);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (data_ != nullptr) release_(data_);
  }

  size_t bytes() const { return bytes_; }
  Space space() const { return space_; }
  // The first elements of the buffer as an array.
  View view(DType dtype, std::initializer_list<int64_t> dims) const {
    View v{data_, dtype, space_, 0, {}};
    for (int64_t d : dims) v.shape[v.rank++] = d;
    assert(static_cast<size_t>(v.bytes()) <= bytes_);
    return v;
  }

 private:
  void swap(Buffer& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    std::swap(space_, o.space_);
    std::swap(release_, o.release_);
  }
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  Space space_ = Space::Host;
  std::function<void(std::byte*)> release_;
};

}  // namespace fnx
