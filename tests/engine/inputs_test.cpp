// What a forward tells its launches of the rows.
#include <doctest/doctest.h>

#include <set>

#include "kernels/cpu/backend.h"
#include "libcore/cli/prompts.h"
#include "libcore/engine/engine.h"
#include "libcore/format/synthetic_source.h"

using namespace fnx;

namespace {

// Keeps the bounds that launches get.
class Watched : public cpu::CpuBackend {
 public:
  Watched() : CpuBackend(CpuOptions{}) {}
  void qsa_select(Stream& s, const QsaWeights& w, const Batch& batch, const QsaRows& rows, const KvCache& kv) override {
    bounds.insert(batch.most_positions);
    ++selections;
    cpu::CpuBackend::qsa_select(s, w, batch, rows, kv);
  }
  std::set<int64_t> bounds;
  int selections = 0;
};

}  // namespace

TEST_CASE("inputs: the draft head launches with the trunk's bound of positions where a context outgrows one") {
  const SyntheticSource source(SyntheticSpec::parse("synth:tiny,layers=4,experts=8"));
  const ModelConfig config = ModelConfig::parse(source.config_json());
  Watched backend;
  const Weights weights = Weights::load(source, config, backend);
  EngineOptions o;
  o.state = {1, 4104, 4104, DType::F32, true};
  o.max_rows = 512;
  Engine engine(weights, backend, o);
  const std::vector<int32_t> tokens = made_up_prompt(4098, config.vocab_size);
  const int32_t slot = engine.state().open();
  for (size_t at = 0; at < 4096; at += 512) {
    const LaneInput lane{slot, std::span(tokens).subspan(at, 512)};
    engine.forward({&lane, 1});
  }
  CHECK(backend.bounds == std::set<int64_t>{4096});
  for (size_t at = 4096; at < tokens.size(); ++at) {
    backend.bounds.clear(), backend.selections = 0;
    const LaneInput lane{slot, std::span(tokens).subspan(at, 1)};
    engine.forward({&lane, 1});
    CHECK(backend.selections == 2);
    CHECK(backend.bounds == std::set<int64_t>{8192});
  }
}
