// Strict reading of JSON that others wrote: duplicate keys, NUL bytes and unbounded nesting are refused.
#pragma once

#include <cstddef>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>

namespace fnx {

// `text` for a message: invalid UTF-8 and control characters become '?', and it is cut at 300 bytes.
std::string printable(std::string_view text);

// A small document as a DOM, key order kept. `name` is what errors call it. Throws Input.
nlohmann::ordered_json parse_json(std::string_view text, std::string_view name);
nlohmann::ordered_json read_json(const std::filesystem::path& path);

// Base of event handlers for documents too large for a DOM: whatever a handler does not override is refused.
class JsonEvents : public nlohmann::json_sax<nlohmann::json> {
 public:
  // Feeds the whole text; throws Input.
  void parse(std::span<const std::byte> text);

  bool null() override { refuse("null"); }
  bool boolean(bool v) override { refuse(v ? "true" : "false"); }
  // Called for tokens with a minus sign only.
  bool number_integer(int64_t v) override { refuse(v == 0 ? "-0" : std::to_string(v)); }
  bool number_unsigned(uint64_t v) override { refuse(std::to_string(v)); }
  // Called for fractions, exponents and integers beyond 64 bits, with their spelling.
  bool number_float(double, const std::string& s) override { refuse(s); }
  bool string(std::string& s) override { refuse('"' + s + '"'); }
  bool binary(binary_t&) override { refuse("binary data"); }
  bool start_object(size_t) override { refuse("an object"); }
  bool key(std::string& k) override { refuse("the key \"" + k + '"'); }
  bool end_object() override { return true; }
  bool start_array(size_t) override { refuse("an array"); }
  bool end_array() override { return true; }
  bool parse_error(size_t position, const std::string& token, const nlohmann::detail::exception& e) override;

 protected:
  explicit JsonEvents(std::string_view name) : name_(name) {}
  // What the document should hold where the parser stands, as "tensor a: dtype must be a string".
  virtual std::string expectation() const = 0;
  [[noreturn]] void refuse(std::string_view found) const;
  [[noreturn]] void fail(std::string_view what) const;

 private:
  std::string name_;
};

}  // namespace fnx
