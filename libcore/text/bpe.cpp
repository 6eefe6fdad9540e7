#include "libcore/text/bpe.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "kernels/error.h"

namespace fnx {
namespace {

struct Symbol {
  int32_t id;  // -1 when merged into the symbol before
  int32_t previous;
  int32_t next;
};

struct Candidate {
  uint32_t rank;
  int32_t position;
  int32_t id;
};

// For the standard heap, which keeps the largest on top.
bool comes_later(const Candidate& a, const Candidate& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
}

}  // namespace

Bpe::Bpe(const Vocabulary& vocabulary, const std::vector<std::pair<std::string, std::string>>& merges) {
  for (int byte = 0; byte < 256; ++byte) byte_ids_[byte] = vocabulary.find(byte_alphabet()[byte]).value_or(-1);
  table_.resize(std::bit_ceil(2 * merges.size() + 2));
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [left, right] = merges[rank];
    const auto left_id = vocabulary.find(left);
    const auto right_id = vocabulary.find(right);
    const auto merged_id = vocabulary.find(left + right);
    if (!left_id || !right_id || !merged_id)
      throw Error(
          ErrorKind::Input,
          fmt::format("model.merges: entry {} ({} {}) names a token that model.vocab lacks: {}", rank, left, right,
                      !left_id    ? left
                      : !right_id ? right
                                  : left + right));
    const uint64_t pair = static_cast<uint64_t>(*left_id) << 32 | static_cast<uint32_t>(*right_id);
    table_[slot_of(pair)] = {pair, static_cast<uint32_t>(rank), *merged_id};
  }
}

size_t Bpe::slot_of(uint64_t pair) const {
  const size_t mask = table_.size() - 1;
  size_t slot = (pair * 0x9E3779B97F4A7C15u >> 20) & mask;
  while (table_[slot].pair != kNoPair && table_[slot].pair != pair) slot = (slot + 1) & mask;
  return slot;
}

const Bpe::Merge* Bpe::find(int32_t left, int32_t right) const {
  const Merge& merge = table_[slot_of(static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right))];
  return merge.pair == kNoPair ? nullptr : &merge;
}

void Bpe::encode(std::string_view bytes, std::vector<int32_t>& ids) const {
  const auto count = static_cast<int32_t>(bytes.size());
  std::vector<Symbol> symbols(bytes.size());
  for (int32_t i = 0; i < count; ++i) {
    const auto byte = static_cast<uint8_t>(bytes[i]);
    if (byte_ids_[byte] < 0)
      throw Error(ErrorKind::Input, fmt::format("the vocabulary has no token for byte 0x{:02X}", byte));
    symbols[i] = {byte_ids_[byte], i - 1, i + 1 < count ? i + 1 : -1};
  }

  std::vector<Candidate> heap;
  const auto candidate_at = [&](int32_t position) -> const Merge* {
    if (position < 0 || symbols[position].next < 0) return nullptr;
    return find(symbols[position].id, symbols[symbols[position].next].id);
  };
  heap.reserve(bytes.size());
  for (int32_t i = 0; i + 1 < count; ++i)
    if (const Merge* merge = candidate_at(i)) heap.push_back({merge->rank, i, merge->id});
  std::make_heap(heap.begin(), heap.end(), comes_later);

  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), comes_later);
    const Candidate best = heap.back();
    heap.pop_back();
    // An entry is stale when its pair has changed since; one that now makes the same token by another pair still
    // counts.
    if (symbols[best.position].id < 0) continue;
    const Merge* merge = candidate_at(best.position);
    if (merge == nullptr || merge->id != best.id) continue;

    Symbol& left = symbols[best.position];
    Symbol& right = symbols[left.next];
    left.id = best.id;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) symbols[left.next].previous = best.position;
    for (const int32_t position : {left.previous, best.position}) {
      if (const Merge* next = candidate_at(position)) {
        heap.push_back({next->rank, position, next->id});
        std::push_heap(heap.begin(), heap.end(), comes_later);
      }
    }
  }
  for (int32_t i = 0; i >= 0 && i < count; i = symbols[i].next) ids.push_back(symbols[i].id);
}

}  // namespace fnx
