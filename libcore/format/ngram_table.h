// The hashed n-gram table of one PLE layer (exl3 layout), mapped and gathered row by row, never loaded whole.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "libcore/format/tensor_source.h"

namespace fnx {

class NgramTable {
 public:
  // `prefix` ends in "ngram_embedding"; the table is prefix.trellis or a plain prefix.weight (F16, BF16, F32), or
  // prefix.shard_N of either kind in numeric order from 0. Throws Input naming what is missing or contradicts.
  NgramTable(const TensorSource& source, std::string_view prefix, int64_t heads, int64_t dim);

  int64_t rows() const { return rows_; }
  int64_t dim() const { return dim_; }
  int bits() const { return bits_; }            // K; 0 for a plain table
  DType plain_dtype() const { return dtype_; }  // of a plain table
  int64_t row_bytes() const { return row_bytes_; }
  // Address of a row; 64-bit throughout. Throws Internal outside [0, rows()).
  const std::byte* row(int64_t index) const;

  // As stored; empty when the checkpoint does not have them.
  const std::vector<float>& head_bias() const { return head_bias_; }  // [heads * dim]
  const std::vector<int64_t>& head_offsets() const { return head_offsets_; }
  const std::vector<int64_t>& head_sizes() const { return head_sizes_; }
  const std::vector<int64_t>& multipliers() const { return multipliers_; }

 private:
  struct Shard {
    int64_t first_row = 0;
    TensorData data;
  };
  std::vector<Shard> shards_;
  int64_t rows_ = 0, dim_ = 0, row_bytes_ = 0, shard_rows_ = 0;
  int bits_ = 0;
  DType dtype_ = DType::I16;
  std::vector<float> head_bias_;
  std::vector<int64_t> head_offsets_, head_sizes_, multipliers_;
};

}  // namespace fnx
