#include "libcore/engine/page_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "kernels/error.h"

namespace fnx {

namespace {

int32_t take(std::vector<int32_t>& free) {
  const int32_t lowest = free.back();
  free.pop_back();
  return lowest;
}

// From `first` on, lowest last.
std::vector<int32_t> numbered(int64_t first, int64_t count) {
  std::vector<int32_t> out(static_cast<size_t>(count));
  std::iota(out.rbegin(), out.rend(), static_cast<int32_t>(first));
  return out;
}

}  // namespace

PagePool::PagePool(int64_t pages, int64_t near, int64_t slots, int64_t width)
    : pages_(pages),
      near_(near),
      slots_(slots),
      width_(width),
      free_pages_(numbered(0, pages)),
      free_near_(numbered(0, near)),
      free_far_(numbered(near, pages - near)),
      owned_(static_cast<size_t>(slots)) {
  if (near < 1 || near > pages)
    throw Error(ErrorKind::Internal, fmt::format("{} of {} KV pages on the device", near, pages));
  tables_.resize(static_cast<size_t>(table_count() * slots * width));
}

std::vector<PagePool::Move> PagePool::grow(int32_t slot, int64_t count) {
  std::vector<Move> moves;
  Owned& own = owned_[slot];
  const int64_t had = this->count(slot);
  if (count <= had) return moves;
  for (int64_t i = had; i < count; ++i) own.pages.push_back(take(free_pages_));
  own.places.resize(static_cast<size_t>(count), -1);

  // From the newest page on: each takes a free place on the device, or that of the page which is farthest from its own
  // sequence's end, unless that is no farther.
  std::vector<int32_t> found;
  int64_t first = count;
  for (; first > had; --first) {
    if (!free_near_.empty()) {
      found.push_back(take(free_near_));
      continue;
    }
    int64_t farthest = count - first + 1;
    int32_t victim = -1;
    for (int32_t s = 0; s < static_cast<int32_t>(slots_); ++s) {
      const int64_t oldest = owned_[s].spilled, end = this->count(s);
      if (oldest < (s == slot ? had : end) && end - oldest > farthest) farthest = end - oldest, victim = s;
    }
    if (victim < 0) break;
    Owned& from = owned_[victim];
    int32_t& place = from.places[static_cast<size_t>(from.spilled)];
    const int32_t to = take(free_far_);
    moves.push_back({place, to});
    found.push_back(place);
    place = to;
    write_row(victim, from.spilled++);
  }
  // In order, so that neighbours stay neighbours.
  for (int64_t i = had; i < first; ++i) own.places[static_cast<size_t>(i)] = take(free_far_);
  std::copy(found.begin(), found.end(), own.places.begin() + first);
  own.spilled += first - had;
  counts_.spilled += static_cast<int64_t>(moves.size()), counts_.born_far += first - had;
  for (int64_t i = had; i < count; ++i) write_row(slot, i);
  return moves;
}

void PagePool::close(int32_t slot) {
  Owned& own = owned_[slot];
  const auto give = [](std::vector<int32_t>& free, int32_t i) { free.push_back(i); };
  for (const int32_t p : own.pages) give(free_pages_, p);
  for (const int32_t p : own.places) give(p < near_ ? free_near_ : free_far_, p);
  for (std::vector<int32_t>* free : {&free_pages_, &free_near_, &free_far_})
    std::sort(free->begin(), free->end(), std::greater<>());
  counts_.freed_far += own.spilled;
  own = {};
}

void PagePool::write_row(int32_t slot, int64_t i) {
  const Owned& own = owned_[slot];
  const int64_t at = slot * width_ + i, table = slots_ * width_;
  const int32_t place = own.places[static_cast<size_t>(i)];
  tables_[static_cast<size_t>(at)] = own.pages[static_cast<size_t>(i)];
  if (!tiered()) return;
  tables_[static_cast<size_t>(table + at)] = place;
  tables_[static_cast<size_t>(2 * table + at)] = place < near_ ? place : static_cast<int32_t>(near_ + i);
}

PageCounts PagePool::counts() const {
  const int64_t far = pages_ - near_ - static_cast<int64_t>(free_far_.size());
  int64_t owned = 0;
  for (const Owned& o : owned_) owned += o.spilled;
  if (far != owned || counts_.spilled + counts_.born_far - counts_.freed_far != far)
    throw Error(ErrorKind::Internal,
                fmt::format("{} KV pages are in host memory and sequences own {} there: {} were spilled, {} came to be "
                            "there, {} were freed",
                            far, owned, counts_.spilled, counts_.born_far, counts_.freed_far));
  return counts_;
}

}  // namespace fnx
