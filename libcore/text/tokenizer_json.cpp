#include "libcore/text/tokenizer_json.h"

#include <fmt/format.h>

#include "kernels/error.h"

namespace fnx {
namespace {

using nlohmann::json;

[[noreturn]] void refuse(const std::string& what) { throw Error(ErrorKind::Input, what); }

// Ids index arrays, so one absurd id must not ask for gigabytes.
constexpr uint64_t kMaxTokenId = (1u << 24) - 1;

class Handler : public nlohmann::json_sax<json> {
 public:
  explicit Handler(TokenizerJson& out) : out_(out) {}

  bool null() override { return value(nullptr); }
  bool boolean(bool v) override { return value(v); }
  bool number_integer(int64_t v) override { return value(v); }
  bool number_float(double v, const std::string&) override { return value(v); }
  bool binary(json::binary_t&) override { return false; }

  bool number_unsigned(uint64_t v) override {
    if (where_ != Where::Vocab) return value(v);
    if (v > kMaxTokenId) refuse(fmt::format("model.vocab: id {} of {} is above {}", v, key_, kMaxTokenId));
    out_.vocab.emplace_back(std::move(key_), static_cast<int32_t>(v));
    return true;
  }

  bool string(std::string& v) override {
    if (where_ == Where::Merges) {
      const size_t space = v.find(' ');
      if (space == std::string::npos || v.find(' ', space + 1) != std::string::npos)
        refuse(fmt::format("model.merges: entry {} is not two tokens: {}", out_.merges.size(), v));
      out_.merges.emplace_back(v.substr(0, space), v.substr(space + 1));
      return true;
    }
    if (where_ == Where::MergePair) {
      if (pair_size_ == 2) refuse_pair();
      (pair_size_++ == 0 ? out_.merges.back().first : out_.merges.back().second) = std::move(v);
      return true;
    }
    return value(std::move(v));
  }

  bool key(std::string& v) override {
    key_ = std::move(v);
    if (where_ == Where::Tree && stack_.back()->contains(key_)) refuse(fmt::format("key given twice: {}", key_));
    return true;
  }

  bool start_object(size_t) override {
    if (in_model() && key_ == "vocab") {
      if (out_.has_vocab) refuse("key given twice: vocab");
      out_.has_vocab = true;
      where_ = Where::Vocab;
      return true;
    }
    return open(json::object());
  }

  bool start_array(size_t) override {
    if (in_model() && key_ == "merges") {
      if (out_.has_merges) refuse("key given twice: merges");
      out_.has_merges = true;
      where_ = Where::Merges;
      return true;
    }
    if (where_ == Where::Merges) {
      out_.merges.emplace_back();
      pair_size_ = 0;
      where_ = Where::MergePair;
      return true;
    }
    return open(json::array());
  }

  bool end_object() override {
    if (where_ == Where::Vocab)
      where_ = Where::Tree;
    else
      stack_.pop_back();
    return true;
  }

  bool end_array() override {
    if (where_ == Where::MergePair) {
      if (pair_size_ != 2) refuse_pair();
      where_ = Where::Merges;
    } else if (where_ == Where::Merges) {
      where_ = Where::Tree;
    } else {
      stack_.pop_back();
    }
    return true;
  }

  bool parse_error(size_t, const std::string&, const json::exception& e) override { refuse(e.what()); }

 private:
  enum class Where { Tree, Vocab, Merges, MergePair };

  [[noreturn]] void refuse_pair() const {
    refuse(fmt::format("model.merges: entry {} is not two tokens", out_.merges.size() - 1));
  }

  // Directly inside the object that is the root's member "model".
  bool in_model() const { return where_ == Where::Tree && stack_.size() == 2 && model_ == stack_.back(); }

  json* add(json v) {
    if (where_ == Where::Vocab) refuse(fmt::format("model.vocab: the id of {} is not a whole number", key_));
    if (where_ != Where::Tree) refuse(fmt::format("model.merges: entry {} is not two tokens", out_.merges.size()));
    if (stack_.empty()) return &(out_.rest = std::move(v));
    if (stack_.back()->is_array()) return &stack_.back()->emplace_back(std::move(v));
    json* member = &((*stack_.back())[key_] = std::move(v));
    if (stack_.size() == 1 && key_ == "model") model_ = member;
    return member;
  }

  bool value(json v) { return add(std::move(v)) != nullptr; }

  bool open(json v) {
    stack_.push_back(add(std::move(v)));
    return true;
  }

  TokenizerJson& out_;
  std::vector<json*> stack_;
  json* model_ = nullptr;
  std::string key_;
  Where where_ = Where::Tree;
  int pair_size_ = 0;
};

}  // namespace

TokenizerJson parse_tokenizer_json(std::string_view text) {
  TokenizerJson out;
  Handler handler(out);
  json::sax_parse(text.begin(), text.end(), &handler);
  if (!out.rest.is_object()) refuse("not a JSON object");
  return out;
}

}  // namespace fnx
