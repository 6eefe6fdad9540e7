// Tensors held in memory, for tests that need no files.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "libcore/format/tensor_source.h"
#include "tests/support/safetensors_file.h"

namespace fnx::test {

class MemorySource : public TensorSource {
 public:
  explicit MemorySource(const std::vector<FileTensor>& tensors) {
    for (const FileTensor& t : tensors) {
      TensorInfo info{t.name, std::nullopt, t.dtype, t.shape, 0, tensors_.size(), t.bytes.size()};
      for (int d = 0; d <= static_cast<int>(DType::F64); ++d)
        if (t.dtype == dtype_name(static_cast<DType>(d))) info.dtype = static_cast<DType>(d);
      // vector<max_align_t> storage keeps every element type aligned.
      auto data = std::make_shared<std::vector<std::max_align_t>>(t.bytes.size() / sizeof(std::max_align_t) + 1);
      if (!t.bytes.empty()) std::memcpy(data->data(), t.bytes.data(), t.bytes.size());
      bytes_.push_back({std::as_bytes(std::span(*data)).first(t.bytes.size()), data});
      tensors_.push_back(std::move(info));
    }
  }

  std::span<const SourceFile> files() const override { return files_; }
  std::span<const TensorInfo> tensors() const override { return tensors_; }
  const TensorInfo* find(std::string_view name) const override {
    const auto it = std::find_if(tensors_.begin(), tensors_.end(), [&](const TensorInfo& t) { return t.name == name; });
    return it == tensors_.end() ? nullptr : &*it;
  }
  TensorData read(const TensorInfo& t) const override { return bytes_[t.offset]; }

 private:
  std::vector<SourceFile> files_{{"memory", 0, true}};
  std::vector<TensorInfo> tensors_;  // offset: number of the tensor
  std::vector<TensorData> bytes_;
};

}  // namespace fnx::test
