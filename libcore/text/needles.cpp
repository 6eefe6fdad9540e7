#include "libcore/text/needles.h"

#include <fmt/format.h>

#include <array>

#include "kernels/error.h"
#include "kernels/random.h"

namespace fnx {

namespace {

constexpr std::array<const char*, 12> kPlaces = {"harbour", "mill",   "orchard", "chapel", "quarry", "bakery",
                                                 "station", "market", "library", "bridge", "forge",  "garden"};
constexpr std::array<const char*, 6> kDeeds = {
    "opened before the rain came",   "was quiet for most of the day", "had visitors from the next valley",
    "kept its lamps lit until late", "was swept and put in order",    "sold more than in the week before"};

std::string filler(int64_t line, uint64_t stream) {
  const uint64_t x = splitmix64(stream * 1000003 + static_cast<uint64_t>(line));
  return fmt::format("On day {} the {} {}. ", line + 1, kPlaces[x % kPlaces.size()],
                     kDeeds[x / kPlaces.size() % kDeeds.size()]);
}

}  // namespace

NeedleText make_needle_text(const Tokenizer& tokenizer, int64_t tokens, int64_t needles, uint64_t stream) {
  NeedleText out;
  std::vector<std::vector<int32_t>> facts;
  int64_t taken = 0;
  for (int64_t i = 0; i < needles; ++i) {
    const std::string name =
        fmt::format("keeper {} of the {}", i + 1, kPlaces[(stream + static_cast<uint64_t>(i)) % 12]);
    const std::string number = fmt::format("{}", 10000 + splitmix64(stream * 7919 + static_cast<uint64_t>(i)) % 90000);
    facts.push_back(tokenizer.encode(fmt::format("The number of {} is {}. ", name, number)));
    taken += static_cast<int64_t>(facts.back().size());
    out.needles.push_back({tokenizer.encode(fmt::format("\nThe number of {} is", name)), number});
  }
  if (2 * taken > tokens)
    throw Error(ErrorKind::Usage,
                fmt::format("{} facts take {} of {} tokens; hide fewer, or give more tokens", needles, taken, tokens));
  const auto append = [&](const std::vector<int32_t>& ids) { out.ids.insert(out.ids.end(), ids.begin(), ids.end()); };
  // Fact i comes after (i + 1/2) / needles of the text.
  size_t next = 0;
  for (int64_t line = 0; static_cast<int64_t>(out.ids.size()) < tokens; ++line) {
    const auto at = static_cast<int64_t>(out.ids.size());
    if (next < facts.size() && at * 2 * needles >= tokens * (2 * static_cast<int64_t>(next) + 1)) append(facts[next++]);
    append(tokenizer.encode(filler(line, stream)));
  }
  out.ids.resize(static_cast<size_t>(tokens));
  return out;
}

}  // namespace fnx
