// Messages between ranks, and what ends them.
#include <doctest/doctest.h>

#include <chrono>
#include <cstring>
#include <future>
#include <string>
#include <thread>

#include "tests/support/ranks.h"

using namespace fnx;
using namespace fnx::test;

namespace {

void no_error(const std::vector<std::optional<Error>>& ends) {
  for (const auto& e : ends) CHECK_MESSAGE(!e.has_value(), (e ? e->what() : ""));
}

double seconds_of(const std::function<void()>& work) {
  const auto began = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

}  // namespace

TEST_CASE("ranks: every rank gets everybody's bytes in rank order, large and empty ones too") {
  for (const int world : {1, 2, 4, 8})
    no_error(run_ranks(world, [&](Communicator& c) {
      for (const size_t bytes : {size_t{0}, size_t{1}, size_t{3} << 20}) {
        const std::string mine(bytes, static_cast<char>('a' + c.rank()));
        const std::vector<std::string> all = c.channel().exchange(mine);
        if (all.size() != static_cast<size_t>(world)) throw Error(ErrorKind::Internal, "parts");
        for (int r = 0; r < world; ++r)
          if (all[r] != std::string(bytes, static_cast<char>('a' + r))) throw Error(ErrorKind::Internal, "bytes");
      }
    }));
}

TEST_CASE("ranks: arrays are gathered in place, broadcast from any root, answers agreed on") {
  no_error(run_ranks(3, [](Communicator& c) {
    const auto expect = [](bool ok, const char* what) {
      if (!ok) throw Error(ErrorKind::Internal, what);
    };
    const auto backend = make_cpu_backend({1, 0});
    const auto stream = backend->make_stream();
    const Buffer memory = backend->allocate(3 * 2 * sizeof(float), Space::Device);
    const View all = memory.view(DType::F32, {3, 2});
    all.rows(c.rank(), 1).as<float>()[1] = static_cast<float>(10 + c.rank());
    c.all_gather(*stream, all.rows(c.rank(), 1), all);
    for (int r = 0; r < 3; ++r) expect(all.as<float>()[2 * r + 1] == static_cast<float>(10 + r), "gathered");
    for (int root = 0; root < 3; ++root) {
      all.as<float>()[0] = static_cast<float>(c.rank());
      c.broadcast(*stream, all, root);
      expect(all.as<float>()[0] == static_cast<float>(root), "broadcast");
    }
    expect(c.agree(true), "all true");
    expect(!c.agree(c.rank() != 2), "one false");
    expect(c.minimum(int64_t{1} << 40 | c.rank()) == int64_t{1} << 40, "minimum");
  }));
}

TEST_CASE("ranks: the others throw a failing rank's own error, with its kind and number") {
  const auto ends = run_ranks(3, [](Communicator& c) {
    c.agree(true);
    if (c.rank() == 1) throw Error(ErrorKind::Unsupported, "too little memory");
    c.agree(true);
    c.agree(true);
  });
  for (const int r : {0, 2}) {
    REQUIRE(ends[r].has_value());
    CHECK(ends[r]->kind() == ErrorKind::Unsupported);
    CHECK(std::string(ends[r]->what()) == "rank 1: too little memory");
  }
}

TEST_CASE("ranks: a rank that ends without a word is a device failure on the others, at the next exchange") {
  const auto ends = run_ranks(3, [](Communicator& c) {
    c.agree(true);
    if (c.rank() == 2) return;
    c.agree(true);
  });
  for (const int r : {0, 1}) {
    REQUIRE(ends[r].has_value());
    CHECK(ends[r]->kind() == ErrorKind::Device);
    CHECK(std::string(ends[r]->what()).find("rank 2 ended without a word") != std::string::npos);
  }
}

TEST_CASE("ranks: a watch notices within a second that another rank ended while this one works alone") {
  for (const bool word : {false, true}) {
    auto channels = make_local_channels(2);
    std::promise<void> lost;
    channels[0]->watch([&] { lost.set_value(); });
    if (word) channels[1]->fail(ErrorKind::Input, "bad file");
    channels[1].reset();
    const double waited = seconds_of([&] { lost.get_future().wait_for(std::chrono::seconds(20)); });
    CHECK(waited < 1);
    CHECK_THROWS_WITH_AS(channels[0]->check(),
                         word ? "rank 1: bad file" : "rank 1 ended without a word: it was killed or its host is gone",
                         Error);
  }
}

TEST_CASE("ranks: a watch frees a rank that waits for one that waits for the rank that ended") {
  auto channels = make_local_channels(3);
  std::promise<void> root_lost, other_lost;
  channels[0]->watch([&] { root_lost.set_value(); });
  channels[1]->watch([&] { other_lost.set_value(); });
  std::future<double> waiting = std::async(
      std::launch::async, [&] { return seconds_of([&] { CHECK_THROWS_AS(channels[0]->exchange("x"), Error); }); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  channels[2].reset();  // rank 0 is at rank 1, which never comes
  CHECK(waiting.get() < 5);
  CHECK(other_lost.get_future().wait_for(std::chrono::seconds(5)) == std::future_status::ready);
  CHECK_THROWS_AS(channels[1]->check(), Error);
}

TEST_CASE("ranks: after end_watch another rank's end is no loss") {
  auto channels = make_local_channels(2);
  bool lost = false;
  channels[0]->watch([&] { lost = true; });
  channels[0]->end_watch();
  channels[1].reset();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  CHECK_FALSE(lost);
  CHECK_NOTHROW(channels[0]->check());
}
