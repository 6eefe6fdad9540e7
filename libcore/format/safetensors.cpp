#include "libcore/format/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "kernels/error.h"
#include "libcore/format/json_text.h"

namespace fnx {
namespace {

constexpr size_t kMaxAxes = 16;

std::optional<DType> parse_dtype(std::string_view text) {
  for (int i = 0; i <= static_cast<int>(DType::F64); ++i)
    if (text == dtype_name(static_cast<DType>(i))) return static_cast<DType>(i);
  return std::nullopt;
}

// Collects the header's tensors; offsets are still relative to the data area.
class HeaderEvents final : public JsonEvents {
 public:
  explicit HeaderEvents(std::string_view name) : JsonEvents(name) {}
  std::vector<TensorInfo> tensors;

  bool start_object(size_t) override {
    if (place_ == Place::Start)
      place_ = Place::Root;
    else if (place_ == Place::Entry)
      place_ = metadata_ ? Place::Metadata : Place::Tensor;
    else
      refuse("an object");
    return true;
  }

  bool key(std::string& k) override {
    switch (place_) {
      case Place::Root:
        start_entry(k);
        return true;
      case Place::Metadata:
        if (!metadata_keys_.insert(k).second)
          fail(fmt::format("key \"{}\" of __metadata__ appears twice", printable(k)));
        return true;
      case Place::Tensor:
        start_field(k);
        return true;
      default:
        refuse(k);
    }
  }

  bool end_object() override {
    if (place_ == Place::Tensor) {
      if (!seen_[0] || !seen_[1] || !seen_[2])
        fail(fmt::format("tensor {}: lacks {}", current(), !seen_[0] ? "dtype" : !seen_[1] ? "shape" : "data_offsets"));
      place_ = Place::Root;
    } else if (place_ == Place::Metadata) {
      place_ = Place::Root;
    } else {
      place_ = Place::End;
    }
    return true;
  }

  bool string(std::string& s) override {
    if (place_ == Place::Metadata) return true;
    if (place_ != Place::Dtype) refuse('"' + s + '"');
    TensorInfo& t = tensors.back();
    t.dtype = parse_dtype(s);
    t.dtype_text = std::move(s);
    place_ = Place::Tensor;
    return true;
  }

  bool start_array(size_t) override {
    if (place_ == Place::ShapeValue)
      place_ = Place::Shape;
    else if (place_ == Place::OffsetsValue)
      place_ = Place::Offsets;
    else
      refuse("an array");
    return true;
  }

  bool number_unsigned(uint64_t v) override {
    if (place_ != Place::Shape && place_ != Place::Offsets) refuse(std::to_string(v));
    if (v > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) refuse(std::to_string(v));
    TensorInfo& t = tensors.back();
    if (place_ == Place::Shape) {
      if (t.shape.size() == kMaxAxes) fail(fmt::format("tensor {}: shape of more than {} axes", current(), kMaxAxes));
      t.shape.push_back(static_cast<int64_t>(v));
    } else {
      if (offsets_ == 2) refuse("a third number");
      (offsets_++ == 0 ? t.offset : end_) = v;
    }
    return true;
  }

  bool end_array() override {
    if (place_ == Place::Offsets) {
      if (offsets_ != 2) refuse(fmt::format("{} numbers", offsets_));
      TensorInfo& t = tensors.back();
      if (end_ < t.offset)
        fail(fmt::format("tensor {}: data_offsets [{}, {}] run backwards", current(), t.offset, end_));
      t.bytes = end_ - t.offset;
    }
    place_ = Place::Tensor;
    return true;
  }

 private:
  enum class Place { Start, Root, Entry, Metadata, Tensor, Dtype, ShapeValue, Shape, OffsetsValue, Offsets, End };

  std::string current() const { return printable(tensors.back().name); }

  void start_entry(std::string& k) {
    place_ = Place::Entry;
    if ((metadata_ = k == "__metadata__")) {
      if (had_metadata_) fail("__metadata__ appears twice");
      had_metadata_ = true;
      return;
    }
    tensors.emplace_back().name = std::move(k);
    seen_[0] = seen_[1] = seen_[2] = false;
    offsets_ = 0;
  }

  void start_field(const std::string& k) {
    const int field = k == "dtype" ? 0 : k == "shape" ? 1 : k == "data_offsets" ? 2 : -1;
    if (field < 0) fail(fmt::format("tensor {}: unknown key \"{}\"", current(), printable(k)));
    if (seen_[field]) fail(fmt::format("tensor {}: key \"{}\" appears twice", current(), k));
    seen_[field] = true;
    place_ = field == 0 ? Place::Dtype : field == 1 ? Place::ShapeValue : Place::OffsetsValue;
  }

  std::string expectation() const override {
    switch (place_) {
      case Place::Start:
        return "the header must be an object";
      case Place::Entry:
        return metadata_ ? "__metadata__ must be an object" : fmt::format("tensor {}: must be an object", current());
      case Place::Metadata:
        return "__metadata__ must map strings to strings";
      case Place::Dtype:
        return fmt::format("tensor {}: dtype must be a string", current());
      case Place::ShapeValue:
      case Place::Shape:
        return fmt::format("tensor {}: shape must be a list of integers in 0 .. 2^63-1", current());
      case Place::OffsetsValue:
      case Place::Offsets:
        return fmt::format("tensor {}: data_offsets must be two integers in 0 .. 2^63-1", current());
      default:
        return "the header must map names to tensors";
    }
  }

  Place place_ = Place::Start;
  bool metadata_ = false, had_metadata_ = false;
  bool seen_[3] = {};
  int offsets_ = 0;
  uint64_t end_ = 0;
  std::unordered_set<std::string> metadata_keys_;
};

// Throws when dtype * shape, the byte range and the alignment of one tensor contradict each other.
void check_size(const TensorInfo& t, std::string_view file) {
  const auto fail = [&](const std::string& what) {
    throw Error(ErrorKind::Input, fmt::format("{}: tensor {}: {}", file, printable(t.name), what));
  };
  const std::string shape = fmt::format("[{}]", fmt::join(t.shape, ", "));
  int64_t bytes = t.dtype ? static_cast<int64_t>(dtype_size(*t.dtype)) : 1;
  for (int64_t d : t.shape)
    if (__builtin_mul_overflow(bytes, d, &bytes))
      fail(fmt::format("shape {} of {} overflows 2^63-1 bytes", shape, printable(t.dtype_text)));
  if (!t.dtype) return;
  if (static_cast<uint64_t>(bytes) != t.bytes)
    fail(fmt::format("shape {} of {} takes {} bytes, but data_offsets [{}, {}] span {}", shape, t.dtype_text, bytes,
                     t.offset, t.offset + t.bytes, t.bytes));
  if (t.offset % dtype_size(*t.dtype) != 0)
    fail(fmt::format("data_offsets [{}, {}] are not aligned to the {} bytes of {}", t.offset, t.offset + t.bytes,
                     dtype_size(*t.dtype), t.dtype_text));
}

std::string range_of(const TensorInfo& t) { return fmt::format("[{}, {}]", t.offset, t.offset + t.bytes); }

void check_names(const std::vector<TensorInfo>& tensors, std::string_view file) {
  std::unordered_map<std::string_view, const TensorInfo*> names;
  names.reserve(tensors.size());
  for (const TensorInfo& t : tensors)
    if (const auto [it, fresh] = names.emplace(t.name, &t); !fresh)
      throw Error(ErrorKind::Input, fmt::format("{}: tensor {} appears twice, with data_offsets {} and {}", file,
                                                printable(t.name), range_of(*it->second), range_of(t)));
}

// `tensors` by offset.
void check_overlap(const std::vector<TensorInfo>& tensors, std::string_view file) {
  const TensorInfo* last = nullptr;
  for (const TensorInfo& t : tensors) {
    if (t.bytes == 0) continue;
    if (last != nullptr && t.offset < last->offset + last->bytes)
      throw Error(ErrorKind::Input,
                  fmt::format("{}: tensors {} and {} overlap: data_offsets {} and {}", file, printable(last->name),
                              printable(t.name), range_of(*last), range_of(t)));
    last = &t;
  }
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> json, uint64_t data_start, uint64_t file_bytes,
                                           std::string_view name) {
  if (json.empty() || json[0] != std::byte{'{'})
    throw Error(ErrorKind::Input, fmt::format("{}: not a safetensors file: the header does not start with '{{'", name));
  HeaderEvents events(name);
  events.parse(json);

  SafetensorsHeader header{std::move(events.tensors), {}};
  auto& tensors = header.tensors;
  check_names(tensors, name);
  for (const TensorInfo& t : tensors) check_size(t, name);
  std::stable_sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.offset, a.bytes) < std::tie(b.offset, b.bytes);
  });
  check_overlap(tensors, name);

  // Ends stay below 2^63 and data_start is small, so that no sum can wrap.
  const TensorInfo* cut = nullptr;
  size_t cut_count = 0;
  uint64_t needed = data_start;
  for (TensorInfo& t : tensors) {
    t.offset += data_start;
    needed = std::max(needed, t.offset + t.bytes);
    if (t.offset + t.bytes > file_bytes) {
      ++cut_count;
      if (cut == nullptr) cut = &t;
    }
  }
  if (cut != nullptr)
    header.incomplete = fmt::format(
        "{} has {} bytes, its header asks for {}: the data of {} tensors are cut, the first is {} at {} .. {}", name,
        file_bytes, needed, cut_count, printable(cut->name), cut->offset, cut->offset + cut->bytes);
  return header;
}

SafetensorsHeader parse_safetensors(std::span<const std::byte> file, std::string_view name) {
  if (file.size() < 8) return {{}, fmt::format("{} has {} bytes, too few for a header length", name, file.size())};
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | std::to_integer<uint64_t>(file[static_cast<size_t>(i)]);
  if (length == 0 || length > kMaxHeaderBytes)
    throw Error(ErrorKind::Input, fmt::format("{}: not a safetensors file: header length {} is not in 1 .. {}", name,
                                              length, kMaxHeaderBytes));
  if (length > file.size() - 8)
    return {{}, fmt::format("{} has {} bytes, its header alone asks for {}", name, file.size(), 8 + length)};
  return parse_safetensors_header(file.subspan(8, length), 8 + length, file.size(), name);
}

}  // namespace fnx
