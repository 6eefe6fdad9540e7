#include "libcore/format/checkpoint_index.h"

#include <fmt/format.h>

#include <unordered_set>

#include "kernels/error.h"
#include "libcore/format/json_text.h"

namespace fnx {
namespace {

class IndexEvents final : public JsonEvents {
 public:
  explicit IndexEvents(std::string_view name) : JsonEvents(name) {}
  CheckpointIndex index;
  bool has_map = false;

  bool null() override { return skip("null"); }
  bool boolean(bool v) override { return skip(v ? "true" : "false"); }
  bool number_integer(int64_t) override { return skip("a number"); }
  bool number_unsigned(uint64_t) override { return skip("a number"); }
  bool number_float(double, const std::string&) override { return skip("a number"); }

  bool start_object(size_t) override {
    if (depth_ == 1 && in_map_)
      has_map = true;
    else if (depth_ > 0)
      skip("an object");
    ++depth_;
    return true;
  }
  bool end_object() override {
    if (--depth_ == 1) in_map_ = false;
    return true;
  }
  bool start_array(size_t) override {
    if (depth_ == 0) refuse("an array");
    skip("an array");
    ++depth_;
    return true;
  }
  bool end_array() override { return end_object(); }

  bool key(std::string& k) override {
    if (depth_ == 1) {
      if (!root_keys_.insert(k).second) fail(fmt::format("key \"{}\" appears twice", printable(k)));
      in_map_ = k == "weight_map";
    } else if (depth_ == 2 && in_map_) {
      const auto [it, fresh] = index.weight_map.emplace(std::move(k), 0);
      entry_ = &*it;
      if (!fresh)
        fail(fmt::format("weight_map names tensor {} twice, the first time in {}", printable(it->first),
                         printable(index.shards[it->second])));
    }
    return true;
  }

  bool string(std::string& s) override {
    if (depth_ != 2 || !in_map_) return skip("a string");
    const auto [it, fresh] = shard_numbers_.emplace(s, static_cast<uint32_t>(index.shards.size()));
    if (fresh) {
      if (s.empty() || s == "." || s == ".." || s.find('/') != std::string::npos || s.find('\0') != std::string::npos)
        fail(fmt::format("tensor {}: shard \"{}\" is not a file name in this folder", printable(entry_->first),
                         printable(s)));
      index.shards.push_back(s);
    }
    entry_->second = it->second;
    return true;
  }

 private:
  // A value outside weight_map does not matter; inside, only strings may stand.
  bool skip(std::string_view found) {
    if (in_map_ || depth_ == 0) refuse(found);
    return true;
  }
  std::string expectation() const override {
    if (depth_ == 0) return "the index must be an object";
    if (depth_ == 1) return "weight_map must be an object";
    return fmt::format("weight_map must map tensor {} to a file name", entry_ ? printable(entry_->first) : "?");
  }

  int depth_ = 0;
  bool in_map_ = false;
  std::pair<const std::string, uint32_t>* entry_ = nullptr;
  std::unordered_map<std::string, uint32_t> shard_numbers_;
  std::unordered_set<std::string> root_keys_;
};

}  // namespace

CheckpointIndex parse_checkpoint_index(std::span<const std::byte> text, std::string_view name) {
  IndexEvents events(name);
  events.parse(text);
  if (!events.has_map) throw Error(ErrorKind::Input, fmt::format("{}: has no weight_map", name));
  return std::move(events.index);
}

}  // namespace fnx
