#include "libcore/engine/ngram.h"

#include <algorithm>

#include "kernels/random.h"

namespace fnx {

namespace {
bool is_prime(int64_t n) {
  if (n < 4) return n >= 2;
  if (n % 2 == 0) return false;
  for (int64_t d = 3; d <= n / d; d += 2)
    if (n % d == 0) return false;
  return true;
}
}  // namespace

NgramHash NgramHash::derive(const ModelConfig& c, int64_t ple_index) {
  NgramHash h;
  h.orders = c.ngram_size;
  h.heads_per_order = c.heads_per_ngram;
  h.eos = c.ngram_eos;
  const uint64_t base = c.ngram_seed + 10007u * static_cast<uint64_t>(ple_index);
  const uint64_t half =
      std::max<uint64_t>(1, static_cast<uint64_t>(INT64_MAX) / static_cast<uint64_t>(c.vocab_size) / 2);
  for (int64_t i = 0; i < c.ngram_size; ++i) {
    const uint64_t value = splitmix64(base + 0x9E3779B97F4A7C15u * static_cast<uint64_t>(i + 1));
    h.multipliers.push_back(static_cast<int64_t>(2 * (value % half) + 1));
  }
  // Heads of all PLE layers take consecutive primes from the base on.
  int64_t prime = c.ngram_vocab_base - 1, offset = 0;
  for (int64_t i = 0; i < (ple_index + 1) * c.ngram_heads(); ++i) {
    do ++prime;
    while (!is_prime(prime));
    if (i < ple_index * c.ngram_heads()) continue;
    h.sizes.push_back(prime);
    h.offsets.push_back(offset);
    offset += prime;
  }
  return h;
}

int64_t NgramHash::padded_rows(int64_t divisor) const {
  const int64_t total = offsets.back() + sizes.back();
  return (total + divisor - 1) / divisor * divisor;
}

void NgramHash::rows(std::span<const int32_t> history, int64_t* out) const {
  const auto count = static_cast<int64_t>(history.size());
  uint64_t mix = 0;
  bool ended = false;  // a boundary, or the start of the sequence, lies between the row's token and this one
  for (int64_t back = 0; back < orders; ++back) {
    const int64_t at = count - 1 - back;
    if (at < 0 || (back > 0 && history[at] == eos)) ended = true;
    const int64_t token = ended ? eos : history[at];
    mix ^= static_cast<uint64_t>(token) * static_cast<uint64_t>(multipliers[back]);
    if (back == 0) continue;
    for (int64_t j = 0; j < heads_per_order; ++j) {
      const int64_t head = (back - 1) * heads_per_order + j;
      int64_t rest = static_cast<int64_t>(mix) % sizes[head];
      if (rest < 0) rest += sizes[head];
      out[head] = rest + offsets[head];
    }
  }
}

}  // namespace fnx
