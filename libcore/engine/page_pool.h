// Which page of the caches holds which run of a sequence's tokens, and where its keys and values are: on the device,
// or, where that has fewer pages than there are, in host memory. Of every sequence the device has the newest pages; it
// has those that are nearest to their sequence's end. Knows no memory: whoever owns it makes the moves.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fnx {

struct PageCounts {
  int64_t spilled = 0;    // moved to host memory
  int64_t born_far = 0;   // given to a sequence where they are in host memory, being too old when they came
  int64_t freed_far = 0;  // of these two, those of sequences that were closed
};

class PagePool {
 public:
  // From a page of keys and values on the device to one in host memory, which is numbered behind those.
  struct Move {
    int32_t from = 0, to = 0;
  };

  // `near`: pages whose keys and values are on the device, 1 to `pages`; `width`: most pages of a sequence.
  PagePool(int64_t pages, int64_t near, int64_t slots, int64_t width);

  bool tiered() const { return near_ < pages_; }
  int64_t near() const { return near_; }
  int64_t free() const { return static_cast<int64_t>(free_pages_.size()); }
  int64_t count(int32_t slot) const { return static_cast<int64_t>(owned_[slot].pages.size()); }
  // Of a sequence's first pages, those in host memory.
  int64_t spilled(int32_t slot) const { return owned_[slot].spilled; }
  int32_t page(int32_t slot, int64_t i) const { return owned_[slot].pages[i]; }
  // Where its keys and values are: near() and above in host memory.
  int32_t place(int32_t slot, int64_t i) const { return owned_[slot].places[i]; }

  // Gives a sequence pages up to `count`, of which enough must be free. What is returned is to be moved before anything
  // is written to the new ones, in order.
  std::vector<Move> grow(int32_t slot, int64_t count);
  void close(int32_t slot);

  // Tables of [slots, width] one behind the other: pages; and of a pool with a host tier places; and places again,
  // those in host memory numbered as if each sequence's were the only ones, from near() on.
  std::span<const int32_t> tables() const { return tables_; }
  int64_t table_count() const { return tiered() ? 3 : 1; }
  int64_t width() const { return width_; }

  // Checked: throws Internal unless the pages in host memory are those that came and did not go.
  PageCounts counts() const;

 private:
  struct Owned {
    std::vector<int32_t> pages, places;
    int64_t spilled = 0;
  };
  void write_row(int32_t slot, int64_t i);

  int64_t pages_, near_, slots_, width_;
  std::vector<int32_t> free_pages_, free_near_, free_far_;  // lowest last
  std::vector<Owned> owned_;
  std::vector<int32_t> tables_;
  PageCounts counts_;
};

}  // namespace fnx
