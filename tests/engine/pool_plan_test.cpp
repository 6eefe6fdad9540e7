#include "libcore/engine/pool_plan.h"

#include <doctest/doctest.h>

#include "kernels/expert_planner.h"
#include "libcore/engine/expert_identity.h"
#include "libcore/format/checkpoint.h"
#include "libcore/format/synthetic_source.h"

using namespace fnx;

namespace {

PlanInput card(uint64_t vram_gib, uint64_t ram_gib) {
  PlanInput in;
  in.vram_bytes = vram_gib << 30, in.ram_bytes = ram_gib << 30, in.reserve_bytes = uint64_t{1} << 30;
  in.state = {1, 8192, 8192, DType::BF16, true};
  in.hit_ratio = 0.9, in.link_bytes_per_s = 25e9;
  return in;
}

}  // namespace

TEST_CASE("pool_plan: states take what the state pool allocates, to the byte") {
  const Checkpoint checkpoint(FNX_SOURCE_DIR "/fixtures/flashnext-tiny");
  const ModelConfig config = ModelConfig::load(checkpoint.folder() / "config.json");
  const auto backend = make_cpu_backend();
  const auto stream = backend->make_stream();
  for (const bool draft : {false, true})
    for (const int64_t tokens : {1, 64, 1000})
      for (const DType dtype : {DType::F32, DType::BF16})
        for (const int64_t device_tokens : {0, 1, 500}) {
          const StateOptions options{3, tokens, tokens, dtype, draft, 0, device_tokens};
          const StatePool pool(config, *backend, *stream, options);
          const StateBytes planned = state_bytes(config, options);
          CHECK(planned.device == static_cast<uint64_t>(pool.device_bytes()));
          CHECK(planned.host == static_cast<uint64_t>(pool.host_bytes()));
        }
}

TEST_CASE("pool_plan: the published geometry at 3.05 bpw has lines on a 16 GiB card, and each term its size") {
  const SyntheticSource source(SyntheticSpec::parse("synth:flash-next-3.05bpw"));
  const ModelConfig config = ModelConfig::parse(source.config_json());
  const PoolPlan plan = plan_pools(source, config, card(16, 64));
  CHECK(plan.problem == "");
  CHECK(plan.line_bytes == 49u * 1843200);
  CHECK(plan.host_bytes == uint64_t{49} * 512 * 1843200);
  CHECK(plan.lines >= config.experts_per_token);
  CHECK(plan.device_bytes <= uint64_t{16} << 30);
  CHECK(plan.device_bytes + plan.line_bytes > uint64_t{16} << 30);
  CHECK(plan.token_expert_bytes == doctest::Approx(48.0 * 10 * 1843200));
  CHECK(plan.token_miss_bytes == doctest::Approx(48.0 * 1843200));
  CHECK(plan.token_link_ns == doctest::Approx(48.0 * 1843200 / 25));
  MESSAGE(plan.lines, " lines a layer, ", plan.token_link_ns / 1e6, " ms a token at most hits of 0.9");

  CHECK(plan_pools(source, config, card(4, 64)).problem.find("hold no expert line") != std::string::npos);
  CHECK(plan_pools(source, config, card(16, 32)).problem.find("expert bank takes 46242201600") != std::string::npos);
  const PoolPlan whole = plan_pools(source, config, card(141, 64));
  CHECK(whole.lines == 512);
  CHECK(whole.token_link_ns == 0);
}

TEST_CASE("pool_plan: an expert's copy is its three trellises, and the tiny checkpoint's experts differ in size") {
  const Checkpoint checkpoint(FNX_SOURCE_DIR "/fixtures/flashnext-tiny");
  const ModelConfig config = ModelConfig::load(checkpoint.folder() / "config.json");
  const std::vector<uint32_t> bytes = expert_copy_bytes(checkpoint, config);
  REQUIRE(bytes.size() == 9u * 32);
  for (int64_t l = 0; l < 9; ++l)
    for (int64_t e = 0; e < 32; ++e) {
      uint64_t sum = 0;
      for (const char* part : {"gate_proj", "up_proj", "down_proj"})
        sum += checkpoint
                   .require((l < 8 ? "model.language_model.layers." + std::to_string(l) : std::string("mtp.layers.0")) +
                            ".mlp.experts." + std::to_string(e) + "." + part + ".trellis")
                   .bytes;
      CHECK(bytes[static_cast<size_t>(l * 32 + e)] == sum);
    }
}
