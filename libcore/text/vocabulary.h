// Token ids, their spelling in tokenizer.json and the bytes they stand for.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fnx {

// The byte-level alphabet: byte -> the character (UTF-8) that spells it. Printable Latin-1 stands for itself, the other
// 68 bytes are U+0100 and up in byte order.
const std::array<std::string, 256>& byte_alphabet();

// Spelling to bytes; a spelling with a character outside the alphabet stands for itself.
std::string bytes_of_spelling(std::string_view spelling);

class Vocabulary {
 public:
  void reserve(size_t tokens);
  // Throws Input when the id or the spelling is taken by another token; the same pair again is allowed.
  void add(std::string spelling, int32_t id);

  int32_t limit() const { return static_cast<int32_t>(spelling_.size()); }
  bool contains(int32_t id) const { return id >= 0 && id < limit() && !spelling_[id].empty(); }
  std::optional<int32_t> find(std::string_view spelling) const;
  // Empty when there is no such token.
  std::string_view spelling(int32_t id) const { return contains(id) ? std::string_view(spelling_[id]) : ""; }
  std::string_view bytes(int32_t id) const { return contains(id) ? std::string_view(bytes_[id]) : ""; }

 private:
  struct Slot {
    uint32_t hash = 0;
    int32_t id = -1;
  };

  // Where `spelling` is, or the free slot where it belongs.
  size_t slot_of(std::string_view spelling, uint32_t hash) const;

  size_t count_ = 0;
  std::vector<std::string> spelling_;
  std::vector<std::string> bytes_;
  std::vector<Slot> table_;  // open addressing, a power of two of slots, at most half full
};

}  // namespace fnx
