#include "libcore/format/ngram_table.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <map>

#include "kernels/error.h"
#include "libcore/format/float_values.h"

namespace fnx {
namespace {

[[noreturn]] void fail(const TensorSource& source, const TensorInfo& t, const std::string& what) {
  throw Error(ErrorKind::Input, fmt::format("tensor {} in {}: {}", t.name, source.files()[t.file].name, what));
}

std::string shape_text(const TensorInfo& t) { return fmt::format("[{}]", fmt::join(t.shape, ", ")); }

// The table's tensors in row order: prefix.trellis, prefix.weight or every prefix.shard_N of either kind by number.
std::vector<const TensorInfo*> find_shards(const TensorSource& source, std::string_view prefix) {
  std::vector<const TensorInfo*> whole;
  for (const char* suffix : {"trellis", "weight"})
    if (const TensorInfo* t = source.find(fmt::format("{}.{}", prefix, suffix))) whole.push_back(t);

  const std::string start = fmt::format("{}.shard_", prefix);
  std::map<uint32_t, const TensorInfo*> numbered;
  std::string_view suffix;
  for (const TensorInfo& t : source.tensors()) {
    const std::string_view name = t.name;
    const std::string_view end = name.ends_with(".trellis") ? ".trellis" : name.ends_with(".weight") ? ".weight" : "";
    if (end.empty() || !name.starts_with(start) || name.size() <= start.size() + end.size()) continue;
    suffix = end;
    const char *first = name.data() + start.size(), *last = name.data() + name.size() - end.size();
    uint32_t number = 0;
    if (const auto [stop, error] = std::from_chars(first, last, number); error != std::errc{} || stop != last)
      fail(source, t, "the shard's number is not an integer");
    if (const auto [it, fresh] = numbered.emplace(number, &t); !fresh)
      fail(source, t, fmt::format("has the same number as {}", it->second->name));
  }
  if (whole.size() + (numbered.empty() ? 0 : 1) > 1)
    throw Error(ErrorKind::Input, fmt::format("n-gram table {}: several forms at once: {}", prefix,
                                              numbered.empty() ? "trellis and weight" : "a whole table and shards"));
  if (!whole.empty()) return whole;
  if (numbered.empty())
    throw Error(ErrorKind::Input,
                fmt::format("n-gram table {0} is missing: there is no {0}.trellis, {0}.weight or {0}.shard_N of either "
                            "kind; is its side file beside the shards?",
                            prefix));
  std::vector<const TensorInfo*> shards;
  for (const auto& [number, t] : numbered) {
    if (number != shards.size())
      throw Error(ErrorKind::Input,
                  fmt::format("n-gram table {}: {}{}{} is missing ({} shards are there, the last is {})", prefix, start,
                              shards.size(), suffix, numbered.size(), numbered.rbegin()->first));
    shards.push_back(t);
  }
  return shards;
}

// A buffer under one of its public names, beside the table or one level above; nullptr when there is none.
const TensorInfo* find_buffer(const TensorSource& source, std::string_view prefix,
                              std::initializer_list<const char*> names) {
  const std::string_view parent = prefix.substr(0, prefix.rfind('.'));
  for (std::string_view place : {prefix, parent})
    for (const char* name : names)
      if (const TensorInfo* t = source.find(fmt::format("{}.{}", place, name))) return t;
  return nullptr;
}

// `count` 0: any length.
std::vector<int64_t> read_integers(const TensorSource& source, std::string_view prefix, int64_t count,
                                   std::initializer_list<const char*> names) {
  const TensorInfo* t = find_buffer(source, prefix, names);
  if (t == nullptr) return {};
  if (t->dtype != DType::I64) fail(source, *t, fmt::format("dtype {} where I64 is needed", t->dtype_text));
  if (t->shape.size() != 1 || (count > 0 && t->shape[0] != count))
    fail(source, *t,
         fmt::format("shape {} where [{}] is needed", shape_text(*t), count > 0 ? std::to_string(count) : "n"));
  const TensorData data = source.read(*t);
  return {data.as<int64_t>(), data.as<int64_t>() + t->elements()};
}

// Rows are gathered one by one: reading ahead would fetch a thousand times what is used.
void advise_random(std::span<const std::byte> bytes) {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(bytes.data()) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(bytes.data()) + bytes.size()) / page * page;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_RANDOM);
}

}  // namespace

NgramTable::NgramTable(const TensorSource& source, std::string_view prefix, int64_t heads, int64_t dim) : dim_(dim) {
  const std::vector<const TensorInfo*> shards = find_shards(source, prefix);
  const TensorInfo& first = *shards.front();
  const auto plain = {DType::F16, DType::BF16, DType::F32};
  const bool packed = first.name.ends_with(".trellis");
  if (first.shape.size() != 2)
    fail(source, first, fmt::format("shape {} where [rows, row width] is needed", shape_text(first)));
  const int64_t width = first.shape[1];
  if (packed) {
    if (first.dtype != DType::I16) fail(source, first, fmt::format("dtype {} where I16 is needed", first.dtype_text));
    for (int bits = 1; bits <= 8; ++bits)
      if (dim * bits % 16 == 0 && width == 1 + dim * bits / 16) bits_ = bits;
    if (bits_ == 0)
      fail(source, first,
           fmt::format("shape {}: rows of {} words are not 1 + {} * bits / 16 for any width of 1 to 8 bits",
                       shape_text(first), width, dim));
  } else {
    if (std::none_of(plain.begin(), plain.end(), [&](DType d) { return first.dtype == d; }))
      fail(source, first, fmt::format("dtype {} where F16, BF16 or F32 is needed", first.dtype_text));
    if (width != dim) fail(source, first, fmt::format("shape {} where [rows, {}] is needed", shape_text(first), dim));
  }
  dtype_ = *first.dtype;
  row_bytes_ = width * static_cast<int64_t>(dtype_size(dtype_));
  shard_rows_ = first.shape[0];
  for (const TensorInfo* t : shards) {
    const bool last = t == shards.back();
    if (t->dtype != first.dtype || t->shape.size() != 2 || t->shape[1] != width || t->shape[0] < 1 ||
        (last ? t->shape[0] > shard_rows_ : t->shape[0] != shard_rows_))
      fail(source, *t,
           fmt::format("{} {} does not continue {} {} of {}", t->dtype_text, shape_text(*t), first.dtype_text,
                       shape_text(first), first.name));
    shards_.push_back({rows_, source.read(*t)});
    advise_random(shards_.back().data.bytes);
    rows_ += t->shape[0];
  }

  if (const TensorInfo* bias = find_buffer(source, prefix, {"head_bias"})) {
    if (bias->shape != std::vector<int64_t>{heads, dim})
      fail(source, *bias, fmt::format("shape {} where [{}, {}] is needed", shape_text(*bias), heads, dim));
    head_bias_ = float_values(source, *bias);
  }
  head_offsets_ = read_integers(source, prefix, heads, {"head_offsets", "ngram_heads_offsets"});
  head_sizes_ = read_integers(source, prefix, heads, {"head_vocab_sizes", "ngram_heads_vocab_sizes"});
  multipliers_ = read_integers(source, prefix, 0, {"layer_multipliers"});
  for (size_t h = 0; h < std::min(head_offsets_.size(), head_sizes_.size()); ++h) {
    const int64_t offset = head_offsets_[h], size = head_sizes_[h];
    if (offset < 0 || size < 1 || offset > rows_ || size > rows_ - offset)
      throw Error(ErrorKind::Input,
                  fmt::format("n-gram table {}: head {} has {} rows from {} on, but the table has {} rows in {} "
                              "tensors",
                              prefix, h, size, offset, rows_, shards_.size()));
  }
}

const std::byte* NgramTable::row(int64_t index) const {
  if (index < 0 || index >= rows_)
    throw Error(ErrorKind::Internal, fmt::format("n-gram row {} is outside 0 .. {}", index, rows_ - 1));
  const Shard& shard = shards_[static_cast<size_t>(index / shard_rows_)];
  return shard.data.bytes.data() + (index - shard.first_row) * row_bytes_;
}

}  // namespace fnx
