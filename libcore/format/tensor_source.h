// Where tensors come from. A checkpoint folder is one source; others (generated tensors) implement the same interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/dtype.h"

namespace fnx {

// What a header says of one tensor. `dtype` is empty when the spelling is unknown: listed, refused only when needed.
struct TensorInfo {
  std::string name;
  std::optional<DType> dtype;
  std::string dtype_text;      // as spelled in the file
  std::vector<int64_t> shape;  // row-major; empty for a scalar
  uint32_t file = 0;           // index into TensorSource::files()
  uint64_t offset = 0;         // of the data, from the start of the file, bytes
  uint64_t bytes = 0;

  int64_t elements() const {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    return n;
  }
};

// A file that holds tensors. `name` is relative to the checkpoint folder.
struct SourceFile {
  std::string name;
  uint64_t bytes = 0;
  bool in_index = true;  // false for side files, which the index does not list
};

// Bytes of one tensor, kept alive by `owner`.
struct TensorData {
  std::span<const std::byte> bytes;
  std::shared_ptr<const void> owner;

  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(bytes.data());
  }
};

class TensorSource {
 public:
  virtual ~TensorSource() = default;

  virtual std::span<const SourceFile> files() const = 0;
  // Every tensor, in file order and then by offset.
  virtual std::span<const TensorInfo> tensors() const = 0;
  // nullptr when there is no such tensor.
  virtual const TensorInfo* find(std::string_view name) const = 0;
  // The tensor's bytes, mapped and not yet read where the source is a file. Aligned to the element.
  virtual TensorData read(const TensorInfo& tensor) const = 0;

  // As find and read, but throws Input naming the tensor when it is absent or of an unknown dtype.
  const TensorInfo& require(std::string_view name) const;
  // Of all files together.
  uint64_t file_bytes() const;
};

}  // namespace fnx
