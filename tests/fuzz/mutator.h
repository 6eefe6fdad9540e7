// Deterministic mutations of JSON inside binary files, for a driver that needs no compiler support.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace fnx::fuzz {

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  // A mutant of one of `corpus`, whose entries start with the byte that picks the reader. Entries are never empty.
  std::string next(const std::vector<std::string>& corpus);

 private:
  using Span = std::pair<size_t, size_t>;  // begin, length

  size_t below(size_t n) { return n == 0 ? 0 : random_() % n; }
  // Half of the time one of the first, the seeds.
  const std::string& pick(const std::vector<std::string>& corpus) {
    return corpus[below(below(2) == 0 ? std::min<size_t>(corpus.size(), 24) : corpus.size())];
  }
  // A random JSON value: a string, word, number, object or list; empty when there is none.
  Span value(const std::string& s);
  void mutate(std::string& s, const std::vector<std::string>& corpus);

  std::mt19937_64 random_;
};

}  // namespace fnx::fuzz
