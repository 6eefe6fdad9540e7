#include "libcore/base/parallel.h"

#include <doctest/doctest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

using namespace fnx;

TEST_CASE("parallel: every piece runs once") {
  std::vector<int> runs(1000);
  in_parallel(8, runs.size(), [&](size_t i) { ++runs[i]; });
  CHECK(runs == std::vector<int>(1000, 1));
}

TEST_CASE("parallel: of pieces that fail the lowest is named, however late it fails") {
  for (const size_t lowest : {0, 3}) {
    std::string what;
    try {
      in_parallel(8, 100, [&](size_t i) {
        if (i < lowest) return;
        if (i == lowest) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        throw std::to_string(i);
      });
    } catch (const std::string& e) {
      what = e;
    }
    CHECK(what == std::to_string(lowest));
  }
}
