#include "libcore/base/parallel.h"

#include <doctest/doctest.h>

#include <pthread.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cpu/threads.h"
#include "kernels/error.h"

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

TEST_CASE("parallel: threads that the system does not start are done without, or refused with the way out") {
  pthread_attr_t usual, endless;
  REQUIRE(pthread_getattr_default_np(&usual) == 0);
  REQUIRE(pthread_attr_init(&endless) == 0);
  REQUIRE(pthread_attr_setstacksize(&endless, size_t{1} << 47) == 0);  // more than there are addresses
  REQUIRE(pthread_setattr_default_np(&endless) == 0);
  std::vector<int> runs(100);
  in_parallel(8, runs.size(), [&](size_t i) { ++runs[i]; });
  CHECK(runs == std::vector<int>(100, 1));
  std::string refusal;
  try {
    cpu::ThreadPool pool(4);
  } catch (const Error& e) {
    CHECK(e.kind() == ErrorKind::Unsupported);
    refusal = e.what();
  }
  CHECK(refusal.starts_with("4 threads cannot be started"));
  CHECK(refusal.ends_with("lower --threads"));
  pthread_setattr_default_np(&usual);
}
