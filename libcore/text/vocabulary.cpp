#include "libcore/text/vocabulary.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <bit>

#include "kernels/error.h"
#include "libcore/text/utf8.h"

namespace fnx {
namespace {

bool spells_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

// Every character of the alphabet is below U+0180; -1 for the others.
std::array<int16_t, 0x180> make_inverse() {
  std::array<int16_t, 0x180> byte_of;
  byte_of.fill(-1);
  for (int byte = 0; byte < 256; ++byte) byte_of[utf8_code_point(byte_alphabet()[byte])] = static_cast<int16_t>(byte);
  return byte_of;
}

}  // namespace

const std::array<std::string, 256>& byte_alphabet() {
  static const std::array<std::string, 256> alphabet = [] {
    std::array<std::string, 256> out;
    int next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const int c = spells_itself(byte) ? byte : next++;
      if (c < 0x80)
        out[byte] = {static_cast<char>(c)};
      else
        out[byte] = {static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 0x3F))};
    }
    return out;
  }();
  return alphabet;
}

std::string bytes_of_spelling(std::string_view spelling) {
  static const std::array<int16_t, 0x180> byte_of = make_inverse();
  std::string out;
  for (size_t i = 0; i < spelling.size(); i += utf8_step(spelling.substr(i)).length) {
    const char32_t c = utf8_code_point(spelling.substr(i));
    if (c >= byte_of.size() || byte_of[c] < 0) return std::string(spelling);
    out += static_cast<char>(byte_of[c]);
  }
  return out;
}

void Vocabulary::reserve(size_t tokens) {
  spelling_.reserve(tokens);
  bytes_.reserve(tokens);
  const std::vector<Slot> old = std::move(table_);
  table_.assign(std::bit_ceil(2 * tokens + 2), {});
  for (const Slot& slot : old)
    if (slot.id >= 0) table_[slot_of(spelling_[slot.id], slot.hash)] = slot;
}

size_t Vocabulary::slot_of(std::string_view spelling, uint32_t hash) const {
  const size_t mask = table_.size() - 1;
  size_t at = hash & mask;
  while (table_[at].id >= 0 && (table_[at].hash != hash || spelling_[table_[at].id] != spelling)) at = (at + 1) & mask;
  return at;
}

void Vocabulary::add(std::string spelling, int32_t id) {
  if (spelling.empty()) throw Error(ErrorKind::Input, fmt::format("token {} is empty", id));
  if (2 * (count_ + 1) > table_.size()) reserve(2 * (count_ + 1));
  const auto hash = static_cast<uint32_t>(XXH3_64bits(spelling.data(), spelling.size()));
  Slot& slot = table_[slot_of(spelling, hash)];
  if (slot.id == id) return;
  if (slot.id >= 0) throw Error(ErrorKind::Input, fmt::format("token {} has two ids: {}, {}", spelling, slot.id, id));
  if (contains(id))
    throw Error(ErrorKind::Input, fmt::format("id {} is given to two tokens: {}, {}", id, spelling_[id], spelling));
  if (id >= limit()) {
    spelling_.resize(id + 1);
    bytes_.resize(id + 1);
  }
  bytes_[id] = bytes_of_spelling(spelling);
  spelling_[id] = std::move(spelling);
  slot = {hash, id};
  ++count_;
}

std::optional<int32_t> Vocabulary::find(std::string_view spelling) const {
  if (table_.empty()) return std::nullopt;
  const auto hash = static_cast<uint32_t>(XXH3_64bits(spelling.data(), spelling.size()));
  const int32_t id = table_[slot_of(spelling, hash)].id;
  if (id < 0) return std::nullopt;
  return id;
}

}  // namespace fnx
