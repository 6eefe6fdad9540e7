// Sparse attention against dense attention around the index budget, and what the loader refuses.
#include <doctest/doctest.h>

#include "kernels/error.h"
#include "libcore/engine/scheduler.h"
#include "tests/support/golden.h"
#include "tests/support/raw_norms.h"
#include "tests/support/refusal.h"
#include "tests/support/temp_dir.h"

using namespace fnx;
using namespace fnx::test;

namespace {

// The tiny model with another index budget; a large one makes its attention dense.
std::vector<float> logits_with_budget(int64_t budget, const std::vector<int32_t>& tokens) {
  ModelConfig config = ModelConfig::load(fixture("flashnext-tiny/config.json"));
  config.index_budget = budget;
  EngineOptions o;
  o.state = {1, 512, 512, DType::F32, false};
  o.max_rows = 512;
  LoadOptions load;
  load.draft_head = false;
  const Weights weights = Weights::load(tiny_checkpoint(), config, cpu_backend(), load);
  Engine engine(weights, cpu_backend(), o);
  std::vector<float> logits;
  feed(engine, engine.state().open(), tokens, 512, &logits);
  return logits;
}

std::vector<int32_t> long_tokens(size_t n) {
  const std::vector<int32_t>& ids = Golden::get().prompt("long-700").ids;
  return {ids.begin(), ids.begin() + static_cast<ptrdiff_t>(n)};
}

int64_t selecting_rows(size_t prompt) {
  Request r;
  r.prompt = long_tokens(prompt);
  r.max_tokens = 0;
  auto engine = tiny_engine(1, 512, false, 512);
  return run_requests(*engine, {&r, 1}, {}, {}).selecting_rows;
}

}  // namespace

TEST_CASE("sparse: contexts of budget - 1 to budget + 5 equal dense attention until selection binds") {
  constexpr int64_t kBudget = 64, kRatio = 4;
  const std::vector<int32_t> tokens = long_tokens(kBudget + 40);
  const std::vector<float> dense = logits_with_budget(4096, tokens), sparse = logits_with_budget(kBudget, tokens);
  const size_t vocab = dense.size() / tokens.size();
  // A row selects once more than budget / ratio blocks are complete: from position budget + ratio - 1 on.
  const size_t first = kBudget + kRatio - 1;
  const auto row = [&](const std::vector<float>& x, size_t r) {
    return std::vector<float>(x.begin() + static_cast<ptrdiff_t>(r * vocab),
                              x.begin() + static_cast<ptrdiff_t>((r + 1) * vocab));
  };
  for (size_t r = 0; r < first; ++r) CHECK(row(dense, r) == row(sparse, r));
  for (size_t r = first; r < tokens.size(); ++r) CHECK(row(dense, r) != row(sparse, r));
}

TEST_CASE("sparse: the counter of selecting rows starts with the first row that has more blocks than its budget") {
  // Budget 256, ratio 4: position 259 completes the 65th block.
  for (const size_t n : {255, 256, 257, 259}) CHECK(selecting_rows(n) == 0);
  CHECK(selecting_rows(260) == 1);
  CHECK(selecting_rows(300) == 41);
}

TEST_CASE("loader: norms stored around 1 are refused by name, in the trunk and in the draft head alone") {
  const ModelConfig config = ModelConfig::load(fixture("flashnext-tiny/config.json"));
  for (const bool draft : {false, true}) {
    const TempDir folder;
    std::filesystem::copy(fixture("flashnext-tiny"), folder / "pack", std::filesystem::copy_options::recursive);
    add_one_to_norms(folder / "pack", [&](const std::string& name) { return name.starts_with("mtp.") == draft; });
    const Checkpoint pack(folder / "pack");
    const std::string what = refusal_of([&] { Weights::load(pack, config, cpu_backend()); });
    CHECK(has(what, draft ? "draft head" : "trunk"));
    CHECK(has(what, "q_norm.weight"));
    CHECK(has(what, "--accept-raw-norms"));
    LoadOptions accept;
    accept.accept_raw_norms = true;
    CHECK_NOTHROW(Weights::load(pack, config, cpu_backend(), accept));
  }
}

TEST_CASE("loader: constants of the n-gram table that the config does not give are refused with both lists") {
  ModelConfig config = ModelConfig::load(fixture("flashnext-tiny/config.json"));
  config.ngram_seed = 1235;
  const std::string what = refusal_of([&] { Weights::load(tiny_checkpoint(), config, cpu_backend()); });
  CHECK(has(what, "layer_multipliers"));
  CHECK(has(what, "2043359076095531"));
}

TEST_CASE("loader: a shape that contradicts the config is refused with tensor and numbers") {
  ModelConfig config = ModelConfig::load(fixture("flashnext-tiny/config.json"));
  config.expert_size = 256;
  const std::string what = refusal_of([&] { Weights::load(tiny_checkpoint(), config, cpu_backend()); });
  CHECK(has(what, "experts.0.gate_proj"));
  CHECK(has(what, "128"));
  CHECK(has(what, "256"));
}

TEST_CASE("state: a sequence too long or a pool too small is refused and changes nothing") {
  auto engine = tiny_engine(2, 64, false, 256);
  StatePool& state = engine->state();
  const int32_t a = state.open(), b = state.open();
  CHECK_THROWS_AS(state.open(), Error);
  const std::vector<int32_t> tokens = long_tokens(65);
  const LaneInput too_long{a, tokens};
  CHECK_THROWS_AS(engine->forward({&too_long, 1}), Error);
  CHECK(state.length(a) == 0);
  const LaneInput fits{b, std::span(tokens).first(64)};
  engine->forward({&fits, 1});
  CHECK(state.length(b) == 64);
  state.close(a);
  CHECK(state.length(state.open()) == 0);
}
