// Profiles and traces made up for tests.
#pragma once

#include <filesystem>
#include <vector>

#include "kernels/random.h"
#include "libcore/engine/expert_trace.h"

namespace fnx::test {

inline ExpertIdentity make_identity(int64_t layers = 3, int64_t experts = 8, int64_t top = 2, int64_t draft = 1) {
  ExpertIdentity id;
  id.checkpoint = "0123456789abcdef0123456789abcdef";
  id.layers = layers, id.draft_layers = draft, id.experts = experts, id.experts_per_token = top;
  return id;
}

// `rows` rows of distinct experts each, low ids more often than high ones.
inline std::vector<int32_t> make_ids(const ExpertIdentity& id, int64_t rows, uint64_t seed, uint64_t stream) {
  std::vector<int32_t> out;
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<char> taken(static_cast<size_t>(id.experts), 0);
    for (uint64_t n = 0, found = 0; found < static_cast<uint64_t>(id.experts_per_token); ++n) {
      const double u = uniform(seed, stream * 1000 + static_cast<uint64_t>(r), n);
      const auto e = static_cast<int32_t>(u * u * static_cast<double>(id.experts));
      if (taken[e]) continue;
      taken[e] = 1, ++found;
      out.push_back(e);
    }
  }
  return out;
}

// A prompt of `prompt` rows, then `steps` rows one at a time; expert e of layer l takes 1000 * l + e bytes.
inline void write_trace(const std::filesystem::path& file, const ExpertIdentity& id, int64_t prompt, int64_t steps,
                        uint64_t seed) {
  std::vector<uint32_t> bytes;
  for (int64_t l = 0; l < id.all_layers(); ++l)
    for (int64_t e = 0; e < id.experts; ++e) bytes.push_back(static_cast<uint32_t>(1000 * l + e));
  TraceRecorder recorder(id, bytes);
  for (int64_t f = 0; f <= steps; ++f)
    for (int64_t l = 0; l < id.all_layers(); ++l)
      recorder.add(l, make_ids(id, f == 0 ? prompt : 1, seed, static_cast<uint64_t>(f * 100 + l)));
  recorder.save(file);
}

}  // namespace fnx::test
