// Models that are made up as they are read: scale of activations, and the written folder against the source itself.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "libcore/cli/prompts.h"
#include "libcore/format/pack_writer.h"
#include "tests/support/golden.h"
#include "tests/support/temp_dir.h"

using namespace fnx;
using namespace fnx::test;

namespace {

double rms(const std::vector<float>& v) {
  double sum = 0;
  for (float x : v) sum += double{x} * x;
  return std::sqrt(sum / static_cast<double>(v.size()));
}

std::vector<float> logits_of(const TensorSource& source, const ModelConfig& config, bool draft,
                             const Engine::Probe& probe = nullptr) {
  LoadOptions load;
  load.draft_head = draft;
  const Weights weights = Weights::load(source, config, cpu_backend(), load);
  EngineOptions o;
  o.state = {1, 64, 64, DType::F32, draft};
  o.max_rows = 32;
  Engine engine(weights, cpu_backend(), o);
  const std::vector<int32_t> tokens = made_up_prompt(32, config.vocab_size);
  const LaneInput lane{engine.state().open(), tokens};
  engine.forward({&lane, 1}, probe);
  std::vector<float> out = engine.to_host(engine.logits(std::vector<int32_t>{0, 7, 31}));
  if (draft) {
    const std::vector<float> more = engine.to_host(engine.draft_logits(std::vector<int32_t>{5}));
    out.insert(out.end(), more.begin(), more.end());
  }
  return out;
}

}  // namespace

TEST_CASE("synthetic: activations stay of order 1 through 48 layers, and logits tell rows and tokens apart") {
  const SyntheticSource source(SyntheticSpec::parse("synth:tiny,layers=48,experts=8"));
  const ModelConfig config = ModelConfig::parse(source.config_json());
  std::vector<double> scales;
  const std::vector<float> logits = logits_of(source, config, false, [&](int64_t, const View& stack) {
    scales.push_back(rms({stack.as<float>(), stack.as<float>() + stack.size()}));
  });
  REQUIRE(scales.size() == 49);
  CHECK(scales.front() == doctest::Approx(1).epsilon(0.1));
  CHECK(scales.back() > 1.2);  // the layers add something
  for (double s : scales) CHECK(s < 10);
  MESSAGE("streams after 48 layers ", scales.back(), ", logits ", rms(logits));
  CHECK(rms(logits) > 1);
  CHECK(rms(logits) < 10);
  const auto row = [&](int64_t r) { return logits.begin() + r * config.vocab_size; };
  CHECK(std::max_element(row(0), row(1)) - row(0) != std::max_element(row(1), row(2)) - row(1));
}

TEST_CASE("synthetic: the written folder gives the logits of the source itself, draft head included") {
  const TempDir dir;
  const SyntheticSource source(SyntheticSpec::parse("synth:tiny,layers=4,experts=8,seed=3,skew=0.5"));
  const uint64_t written = write_pack(source, dir / "pack");
  CHECK(written == source.bytes());
  const Checkpoint pack(dir / "pack");
  CHECK(pack.problems().empty());
  CHECK(pack.tensors().size() == source.tensors().size());
  const ModelConfig config = ModelConfig::load(dir / "pack/config.json");
  CHECK(logits_of(pack, config, true) == logits_of(source, ModelConfig::parse(source.config_json()), true));
}
