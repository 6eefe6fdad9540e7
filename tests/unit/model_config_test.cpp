#include "libcore/format/model_config.h"

#include <doctest/doctest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "kernels/error.h"
#include "libcore/format/json_text.h"
#include "tests/support/refusal.h"
#include "tests/support/temp_dir.h"

using namespace fnx;
using Json = nlohmann::ordered_json;
using fnx::test::has;
using fnx::test::refusal_of;
using fnx::test::TempDir;
using fnx::test::write_file;

namespace {

Json tiny() { return read_json(FNX_SOURCE_DIR "/fixtures/flashnext-tiny/config.json"); }

std::string refusal(const Json& root) {
  return refusal_of([&] { ModelConfig::parse(root); });
}

}  // namespace

TEST_CASE("model_config: reads the fixture") {
  const ModelConfig c = ModelConfig::load(FNX_SOURCE_DIR "/fixtures/flashnext-tiny/config.json");
  CHECK(c.vocab_size == 4096);
  CHECK(c.hidden_size == 256);
  CHECK(c.layers() == 8);
  CHECK(c.layer_types[3] == LayerType::SparseAttention);
  CHECK(c.layer_types[4] == LayerType::LinearAttention);
  CHECK(c.rotary_dim == 64);
  CHECK(c.rope_theta == 100000);
  CHECK(c.gdn_conv_width() == 640);
  CHECK(c.gdn_output_gate == GateType::Sigmoid);
  CHECK(c.index_blocks() == 64);
  CHECK(c.experts == 32);
  CHECK(c.hc_rank == 32);
  CHECK(c.ple_layers == std::vector<int64_t>{1});
  CHECK(c.ngram_heads() == 4);
  CHECK(c.ngram_dim() == 160);
  CHECK(c.ngram_eos == 4000);
  CHECK(c.ngram_seed == 1234);
  CHECK(c.mtp_layers == 1);
  CHECK(c.problems().empty());
  CHECK(load_stop_ids(FNX_SOURCE_DIR "/fixtures/flashnext-tiny") == std::vector<int32_t>{4002, 4000});
}

TEST_CASE("model_config: fills in the defaults of absent and null keys") {
  Json root = tiny();
  Json& text = root["text_config"];
  for (const char* key :
       {"head_dim", "norm_topk_prob", "ple_conv_kernel_size", "ngram_size", "heads_per_ngram", "hc_count", "hc_lowrank",
        "ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by", "seed", "output_gate_type",
        "mtp_num_hidden_layers", "tie_word_embeddings", "rms_norm_eps", "layer_types", "model_type"})
    text.erase(key);
  text["ple_embed_dim"] = nullptr;
  text["hidden_act"] = nullptr;
  text["eos_token_id"] = {7, 8};
  root["tie_word_embeddings"] = true;
  root.erase("quantization_config");
  const ModelConfig c = ModelConfig::parse(root);
  CHECK(c.head_dim == 256);
  CHECK(c.normalise_top_k);
  CHECK(c.ple_embed_dim == 256);
  CHECK(c.ple_conv_kernel == 4);
  CHECK(c.ngram_size == 3);
  CHECK(c.heads_per_ngram == 8);
  CHECK(c.ngram_vocab_base == 20000000);
  CHECK(c.ngram_vocab_divisor == 128);
  CHECK(c.ngram_seed == 1234);
  CHECK(c.ngram_eos == 7);
  CHECK(c.streams == 4);
  CHECK(c.hc_rank == 320);
  CHECK(c.gdn_output_gate == GateType::Silu);
  CHECK(c.mtp_layers == 0);
  CHECK(c.tie_word_embeddings);
  CHECK(c.rms_norm_eps == 1e-6);
  CHECK(c.layers() == 8);
  CHECK(c.layer_types[7] == LayerType::SparseAttention);
  CHECK(c.layer_types[6] == LayerType::LinearAttention);
}

TEST_CASE("model_config: takes a flat text config, the other layer name, an interval and unsorted PLE ids") {
  Json text = tiny()["text_config"];
  CHECK(ModelConfig::parse(text).hidden_size == 256);
  text["layer_types"][3] = "qwen_sparse_attention";
  text["ple_layer_ids"] = {3, 1, 3};
  CHECK(ModelConfig::parse(text).ple_layers == std::vector<int64_t>{0, 2});
  text.erase("layer_types");
  text["full_attention_interval"] = 8;
  const ModelConfig c = ModelConfig::parse(text);
  CHECK(c.layer_types[3] == LayerType::LinearAttention);
  CHECK(c.layer_types[7] == LayerType::SparseAttention);
  text["full_attention_interval"] = 3;
  text.erase("num_hidden_layers");
  CHECK(has(refusal(text), "num_hidden_layers is missing"));
}

TEST_CASE("model_config: reads rope settings at the config level and refuses other rope types") {
  Json text = tiny()["text_config"];
  text.erase("rope_parameters");
  text["rope_theta"] = 5000;
  text["partial_rotary_factor"] = 0.5;
  text["rope_scaling"] = nullptr;
  CHECK(ModelConfig::parse(text).rope_theta == 5000);
  CHECK(ModelConfig::parse(text).rotary_dim == 128);
  text["rope_scaling"] = {{"type", "default"}};
  CHECK(ModelConfig::parse(text).rotary_dim == 128);
  text["rope_scaling"] = {{"rope_type", "yarn"}};
  CHECK(has(refusal(text), "rope_type = \"yarn\": only default"));
  text["rope_scaling"] = {{"type", "linear"}};
  CHECK(has(refusal(text), "type = \"linear\""));
  text.erase("rope_scaling");
  text.erase("partial_rotary_factor");
  CHECK(has(refusal(text),
            "rotary dims (head_dim * partial_rotary_factor) = 256: must be at most indexer_head_dim = 128"));
}

TEST_CASE("model_config: an indexer is needed only by sparse layers and draft heads") {
  Json text = tiny()["text_config"];
  for (const char* key :
       {"indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio"}) {
    Json without = text;
    without.erase(key);
    CHECK(has(refusal(without), std::string(key) + " is missing"));
  }
  for (const char* key :
       {"indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio"})
    text.erase(key);
  text["layer_types"] = Json(std::vector<std::string>(8, "linear_attention"));
  CHECK(has(refusal(text), "indexer_budget is missing"));
  text["mtp_num_hidden_layers"] = 0;
  const ModelConfig c = ModelConfig::parse(text);
  CHECK(c.index_blocks() == 0);
}

TEST_CASE("model_config: names each violation with key, value and rule") {
  struct Case {
    const char* key;
    Json value;
    const char* message;
  };
  const Case cases[] = {
      {"vocab_size", 0, "vocab_size = 0: must be in 1 .. 2147483647"},
      {"vocab_size", "4096", "vocab_size = \"4096\": must be an integer"},
      {"vocab_size", nullptr, "vocab_size is missing"},
      {"hidden_size", 256.0, "hidden_size = 256.0: must be an integer"},
      {"hidden_size", true, "hidden_size = true: must be an integer"},
      {"hidden_size", -256, "hidden_size = -256: must be in 1"},
      {"hidden_size", (int64_t{1} << 40) + 1, "hidden_size = 1099511627777: must be in 1 .. 1099511627776"},
      {"hidden_size", uint64_t{1} << 63, "hidden_size = 9223372036854775808: above 2^63-1"},
      {"hidden_size", 1e30, "hidden_size = 1e+30: must be an integer"},
      {"hidden_size", int64_t{1} << 40, "the product must be at most 1099511627776"},
      {"num_hidden_layers", 9, "num_hidden_layers = 9: layer_types has 8 entries"},
      {"layer_types", Json::array({"linear_attention", "mamba"}), "layer_types[1] = \"mamba\""},
      {"layer_types", Json::array(), "num_hidden_layers"},
      {"layer_types", "linear_attention", "must be a list"},
      {"num_attention_heads", 3, "num_attention_heads = 3: must be a multiple of num_key_value_heads = 2"},
      {"head_dim", 0, "head_dim = 0"},
      {"attention_bias", 1, "attention_bias = 1: must be true or false"},
      {"rms_norm_eps", 0, "rms_norm_eps = 0"},
      {"rms_norm_eps", "x", "rms_norm_eps = \"x\": must be a number"},
      {"max_position_embeddings", int64_t{1} << 31, "max_position_embeddings = 2147483648"},
      {"hidden_act", "gelu", "hidden_act = \"gelu\": only silu"},
      {"output_gate_type", "relu", "output_gate_type = \"relu\": only sigmoid or silu"},
      {"linear_num_value_heads", 0, "linear_num_value_heads = 0"},
      {"linear_num_key_heads", 2, "linear_num_value_heads = 3: must be a multiple of linear_num_key_heads = 2"},
      {"linear_conv_kernel_dim", 100000, "linear_conv_kernel_dim = 100000"},
      {"num_experts_per_tok", 33, "num_experts_per_tok = 33: must be at most num_experts = 32"},
      {"num_experts_per_tok", 0, "num_experts_per_tok = 0"},
      {"moe_intermediate_size", -1, "moe_intermediate_size = -1"},
      {"hc_count", 1, "hc_count = 1: must be above 1"},
      {"hc_lowrank", 0, "hc_lowrank = 0"},
      {"ple_layer_ids", Json::array({0}), "ple_layer_ids[0] = 0: must be in 1 .. 8"},
      {"ple_layer_ids", Json::array({2, 9}), "ple_layer_ids[1] = 9: must be in 1 .. 8"},
      {"ple_layer_ids", Json::array({4}), "ple_layer_ids holds 4: that layer is not linear_attention"},
      {"ple_layer_ids", 2, "ple_layer_ids = 2: must be a list"},
      {"ple_embed_dim", 642, "ple_embed_dim = 642: must be a multiple of (ngram_size - 1) * heads_per_ngram = 4"},
      {"ngram_size", 1, "ngram_size = 1"},
      {"eos_token_id", nullptr, "eos_token_id is missing"},
      {"eos_token_id", 4096, "eos_token_id = 4096: must be in 0 .. vocab_size - 1 = 4095"},
      {"seed", -1, "seed = -1"},
      {"indexer_kv_heads", 2, "indexer_kv_heads = 2: only 1"},
      {"indexer_budget", 255, "indexer_budget = 255: must be a multiple of indexer_compress_ratio = 4"},
      {"indexer_n_heads", 0, "indexer_n_heads = 0"},
      {"indexer_head_dim", 32, "must be at most indexer_head_dim = 32"},
      {"mtp_num_hidden_layers", 2, "mtp_num_hidden_layers = 2: must be 0 or 1"},
      {"model_type", "llama", "model_type = \"llama\""},
      {"rope_parameters", Json{{"rope_theta", 0}, {"partial_rotary_factor", 0.25}}, "rope_theta = 0"},
      {"rope_parameters", Json{{"partial_rotary_factor", 1e300}}, "partial_rotary_factor = 1e+300"},
      {"rope_parameters", Json{{"partial_rotary_factor", 0.25}, {"rope_type", "mrope"}}, "rope_type = \"mrope\""},
      {"rope_parameters", Json{{"partial_rotary_factor", 0.001}}, "= 0: must be even and positive"},
      {"rope_parameters", Json{{"partial_rotary_factor", 0.02}},
       "rotary dims (head_dim * partial_rotary_factor) = 5: must be even"},
      {"rope_parameters", 3, "rope_parameters = 3: must be an object"},
      {"tie_word_embeddings", 0, "tie_word_embeddings = 0"},
  };
  for (const Case& c : cases) {
    Json root = tiny();
    root["text_config"][c.key] = c.value;
    const std::string text = refusal(root);
    CAPTURE(std::string(c.key));
    CAPTURE(text);
    CHECK(has(text, c.message));
  }
}

TEST_CASE("model_config: names all violations at once, each once") {
  Json root = tiny();
  Json& text = root["text_config"];
  text["vocab_size"] = "many";
  text["hc_count"] = 1;
  text["num_experts_per_tok"] = 99;
  text.erase("num_key_value_heads");
  root["quantization_config"]["quant_method"] = "gptq";
  const std::string message = refusal(root);
  CHECK(has(message, "5 problems"));
  for (const char* part : {"vocab_size = \"many\"", "hc_count = 1", "num_experts_per_tok = 99",
                           "num_key_value_heads is missing", "quant_method = \"gptq\": only exl3"})
    CHECK(has(message, part));
}

TEST_CASE("model_config: a config filled in by hand is held to the same rules") {
  ModelConfig c = ModelConfig::parse(tiny());
  c.streams = 1;
  c.experts_per_token = 64;
  REQUIRE(c.problems().size() == 2);
  CHECK(has(c.problems()[0], "num_experts_per_tok = 64"));
  CHECK(!ModelConfig().problems().empty());
}

TEST_CASE("model_config: refuses JSON that is malformed, doubled, nested too deep or no object") {
  TempDir dir;
  const std::string deep(200, '[');
  const std::pair<std::string, const char*> cases[] = {
      {R"({"a":1,"a":2})", "key \"a\" appears twice"},
      {R"({"text_config":{"seed":1,"seed":1}})", "key \"seed\" appears twice"},
      {R"({"a":[{"b":1,"b":1}]})", "key \"b\" appears twice"},
      {"{", "not valid JSON"},
      {"", "not valid JSON"},
      {"{}\n{}", "not valid JSON"},
      {R"({"a":1e999})", "not valid JSON"},
      {std::string("{}\0", 3), "NUL"},
      {"[]", "not an object"},
      {R"({"text_config":[]})", "not an object"},
      {R"({"a":)" + deep + std::string(200, ']') + "}", "nested deeper"},
  };
  for (const auto& [text, message] : cases) {
    CAPTURE(text);
    write_file(dir / "config.json", text);
    CHECK_THROWS_WITH_AS(ModelConfig::load(dir / "config.json"), doctest::Contains(message), Error);
    CHECK_THROWS_WITH_AS(ModelConfig::load(dir / "config.json"), doctest::Contains("config.json"), Error);
  }
  CHECK_THROWS_WITH_AS(ModelConfig::load(dir / "none.json"), doctest::Contains("cannot open"), Error);
}

TEST_CASE("model_config: equal keys in different objects are no duplicates") {
  CHECK(parse_json(R"({"a":{"b":1},"c":[{"b":1},{"b":2}],"b":3})", "x")["b"] == 3);
}

TEST_CASE("model_config: stop ids come from generation_config, then from config, and may be absent") {
  TempDir dir;
  CHECK(load_stop_ids(dir.path()).empty());
  write_file(dir / "config.json", R"({"eos_token_id":5})");
  CHECK(load_stop_ids(dir.path()) == std::vector<int32_t>{5});
  write_file(dir / "config.json", R"({"text_config":{"eos_token_id":[6,7,6]},"eos_token_id":5})");
  CHECK(load_stop_ids(dir.path()) == std::vector<int32_t>{6, 7});
  write_file(dir / "generation_config.json", R"({"eos_token_id":null})");
  CHECK(load_stop_ids(dir.path()) == std::vector<int32_t>{6, 7});
  write_file(dir / "generation_config.json", R"({"eos_token_id":8})");
  CHECK(load_stop_ids(dir.path()) == std::vector<int32_t>{8});
  for (const char* bad : {"-1", "2147483648", "1.0", "\"x\"", "[true]", "{}"}) {
    write_file(dir / "generation_config.json", std::string(R"({"eos_token_id":)") + bad + "}");
    CHECK_THROWS_WITH_AS(load_stop_ids(dir.path()), doctest::Contains("eos_token_id"), Error);
  }
}
