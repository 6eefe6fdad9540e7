#include "libcore/engine/page_pool.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

using namespace fnx;

namespace {

// Of each page its distance from its sequence's end; whether it is on the device.
struct Seen {
  std::vector<std::pair<int64_t, bool>> pages;
  std::set<int32_t> numbers, places;
};
Seen look(const PagePool& pool, int32_t slots) {
  Seen seen;
  for (int32_t s = 0; s < slots; ++s)
    for (int64_t i = 0; i < pool.count(s); ++i) {
      seen.pages.emplace_back(pool.count(s) - i, pool.place(s, i) < pool.near());
      CHECK(seen.numbers.insert(pool.page(s, i)).second);
      CHECK(seen.places.insert(pool.place(s, i)).second);
      CHECK((pool.place(s, i) >= pool.near()) == (i < pool.spilled(s)));
    }
  return seen;
}

}  // namespace

TEST_CASE("page_pool: without a host tier a page is where its number says and nothing moves") {
  PagePool pool(7, 7, 2, 4);
  CHECK(!pool.tiered());
  CHECK(pool.table_count() == 1);
  CHECK(pool.grow(0, 2).empty());
  CHECK(pool.grow(1, 3).empty());
  pool.close(0);
  CHECK(pool.grow(1, 4).empty());
  CHECK(pool.grow(0, 3).empty());
  for (int32_t s = 0; s < 2; ++s)
    for (int64_t i = 0; i < pool.count(s); ++i) CHECK(pool.page(s, i) == pool.place(s, i));
  CHECK(pool.counts().spilled == 0);
}

TEST_CASE("page_pool: the page farthest from its end leaves the device first, of equals the first sequence's") {
  PagePool pool(10, 4, 2, 8);
  CHECK(pool.grow(0, 3).empty());
  CHECK(pool.grow(1, 1).empty());
  const std::vector<PagePool::Move> moves = pool.grow(1, 3);
  REQUIRE(moves.size() == 2);  // distances 3 2 1, and 3 of the other's first page, which has two new ones behind it
  CHECK(moves[0].from == 0);
  CHECK(moves[0].to == 4);
  CHECK(moves[1].from == 3);
  CHECK(moves[1].to == 5);
  CHECK(pool.spilled(0) == 1);
  CHECK(pool.spilled(1) == 1);
  CHECK(pool.counts().spilled == 2);
  pool.close(0);
  CHECK(pool.counts().freed_far == 1);
}

TEST_CASE("page_pool: pages that are too old when they come are never on the device") {
  PagePool pool(10, 2, 1, 8);
  CHECK(pool.grow(0, 7).empty());
  CHECK(pool.spilled(0) == 5);
  CHECK(pool.counts().born_far == 5);
  CHECK(pool.place(0, 5) == 0);
  CHECK(pool.place(0, 6) == 1);
}

TEST_CASE("page_pool: over random growth the device has the pages nearest to their ends and tables say where all are") {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const int32_t slots = 1 + static_cast<int32_t>(random() % 4);
    const int64_t width = 2 + random() % 9, pages = slots * width, near = 1 + random() % pages;
    PagePool pool(pages, near, slots, width);
    bool any_closed = false;
    std::map<int32_t, int32_t> holds;  // of each place the page whose keys and values it has
    for (int step = 0; step < 40; ++step) {
      const auto slot = static_cast<int32_t>(random() % static_cast<uint32_t>(slots));
      const bool closed = random() % 6 == 0;
      if (closed) {
        any_closed = true;
        for (int64_t i = 0; i < pool.count(slot); ++i) holds.erase(pool.place(slot, i));
        pool.close(slot);
      } else {
        const int64_t had = pool.count(slot), count = std::min<int64_t>(width, had + random() % 4);
        for (const PagePool::Move& m : pool.grow(slot, count)) {
          REQUIRE(holds.count(m.from) == 1);
          REQUIRE(holds.count(m.to) == 0);
          holds[m.to] = holds[m.from];
          holds.erase(m.from);
        }
        for (int64_t i = had; i < count; ++i) {
          REQUIRE(holds.count(pool.place(slot, i)) == 0);
          holds[pool.place(slot, i)] = pool.page(slot, i);
        }
      }
      const Seen seen = look(pool, slots);
      int64_t farthest_near = 0, nearest_far = INT64_MAX;
      for (const auto& [distance, on_device] : seen.pages) {
        if (on_device) farthest_near = std::max(farthest_near, distance);
        if (!on_device) nearest_far = std::min(nearest_far, distance);
      }
      if (!any_closed) CHECK(farthest_near <= nearest_far);
      for (int32_t s = 0; s < slots; ++s)
        for (int64_t i = 0; i < pool.count(s); ++i) {
          const auto at = static_cast<size_t>(s * width + i), table = static_cast<size_t>(slots * width);
          CHECK(holds.at(pool.place(s, i)) == pool.page(s, i));
          CHECK(pool.tables()[at] == pool.page(s, i));
          if (!pool.tiered()) continue;
          CHECK(pool.tables()[table + at] == pool.place(s, i));
          CHECK(pool.tables()[2 * table + at] == (i < pool.spilled(s) ? near + i : pool.place(s, i)));
        }
      pool.counts();
    }
  }
}
