// fnx-generate as a user runs it: every way to give a prompt, every answer form, every kind of bad input.
#include <doctest/doctest.h>

#include <fmt/format.h>

#include <fstream>

#include "kernels/devices.h"
#include "libcore/cli/qualification.h"
#include "libcore/format/mapped_file.h"
#include "libcore/format/safetensors.h"
#include "tests/support/golden.h"
#include "tests/support/run_tool.h"
#include "tests/support/safetensors_file.h"

using namespace fnx;
using namespace fnx::test;
namespace fs = std::filesystem;

namespace {

const fs::path kTiny = FNX_SOURCE_DIR "/fixtures/flashnext-tiny";

RunResult generate(std::vector<std::string> more, const std::string& in = "", const fs::path& model = kTiny,
                   const std::vector<std::string>& env = {}) {
  more.insert(more.begin(), {tool_path("fnx-generate"), "--model", model.string()});
  return run_command(more, in, env);
}

std::string joined(const std::vector<int32_t>& ids, const char* separator = ",") {
  return fmt::format("{}", fmt::join(ids, separator));
}

std::vector<Json> lines_of(const std::string& text) {
  std::vector<Json> out;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) out.push_back(Json::parse(line));
  return out;
}

// The tool ends with `code`, one line on stderr that holds `words`, no output, and a receipt that says the same.
void refused(const RunResult& run, int code, const std::vector<std::string>& words) {
  CAPTURE(run.err);
  CHECK(run.exit_code == code);
  CHECK(run.out == "");
  CHECK(std::count(run.err.begin(), run.err.end(), '\n') == 1);
  for (const std::string& w : words) CHECK(run.err.find(w) != std::string::npos);
  const Json receipt = read_receipt(run, "fnx-generate");
  CHECK(receipt["run"]["outcome"] == "error");
  CHECK(receipt["run"]["exit_code"] == code);
  CHECK(run.err.find(receipt["run"]["error"].get<std::string>().substr(0, 12)) != std::string::npos);
}

}  // namespace

TEST_CASE("generate: answers a question in chat form and stops at the end of the turn") {
  const RunResult run = generate({"--chat", "--thinking", "off", "--prompt", "What is the capital of Paraguay?"});
  CHECK(run.exit_code == 0);
  CHECK(run.out == "The capital of Paraguay is Asuncion.\n");
  const Json receipt = read_receipt(run, "fnx-generate");
  const Json& answer = receipt["result"]["answers"][0];
  CHECK(answer["finish"] == "stop");
  CHECK(answer["text"] == "The capital of Paraguay is Asuncion.");
  CHECK(answer["tokens"].back() == 4002);
  CHECK(receipt["evidence"]["prompt_rows"] == 21);
}

TEST_CASE("generate: prints the reference's text for every golden prompt, from argument, file, stdin and ids") {
  const TempDir folder;
  int turn = 0;
  for (const Golden::Prompt& p : Golden::get().prompts()) {
    if (p.ids.size() > 300) continue;
    CAPTURE(p.name);
    std::vector<std::string> argv = {"--ignore-eos", "--max-tokens", std::to_string(p.greedy.size())};
    std::string in;
    if (p.text.empty() || turn % 4 == 3) {
      argv.insert(argv.end(), {"--token-ids", joined(p.ids)});
    } else if (turn % 4 == 2) {
      argv.insert(argv.end(), {"--prompt-file", "-"}), in = p.text;
    } else if (turn % 4 == 1) {
      write_file(folder / "prompt.txt", p.text);
      argv.insert(argv.end(), {"--prompt-file", (folder / "prompt.txt").string()});
    } else {
      argv.insert(argv.end(), {"--prompt", p.text});
    }
    ++turn;
    const RunResult run = generate(argv, in);
    CHECK(run.exit_code == 0);
    CHECK(read_receipt(run, "fnx-generate")["result"]["answers"][0]["tokens"] == p.greedy);
    if (!p.greedy_text.empty()) CHECK(run.out == p.greedy_text + "\n");
  }
}

TEST_CASE("generate: JSONL answers come in the order of the lines, whatever runs beside them") {
  std::string in;
  std::vector<const Golden::Prompt*> asked;
  for (const char* name : {"budget-257", "one-token", "capital", "unicode", "genesis"})
    asked.push_back(&Golden::get().prompt(name));
  for (const Golden::Prompt* p : asked) in += Json{{"id", p->name}, {"tokens", p->ids}}.dump() + "\n";
  in += "\n" +
        Json{{"id", 7},
             {"messages", Json::array({Json{{"role", "user"}, {"content", "What is the capital of Paraguay?"}}})}}
            .dump() +
        "\n";
  in += Json{{"prompt", "In the beginning God created"}}.dump() + "\n";
  std::string first;
  for (const char* parallel : {"1", "3", "8"}) {
    const RunResult run = generate(
        {"--jsonl", "-", "--parallel", parallel, "--max-tokens", "24", "--ignore-eos", "--thinking", "off"}, in);
    REQUIRE(run.exit_code == 0);
    const std::vector<Json> answers = lines_of(run.out);
    REQUIRE(answers.size() == asked.size() + 2);
    for (size_t i = 0; i < asked.size(); ++i) {
      const std::vector<int32_t> want(asked[i]->greedy.begin(), asked[i]->greedy.begin() + 24);
      CHECK(answers[i]["id"] == asked[i]->name);
      CHECK(answers[i]["tokens"] == want);
      CHECK(answers[i]["finish"] == "length");
      CHECK(answers[i]["token_hash"] == token_hash(want));
    }
    CHECK(answers[5]["id"] == 7);
    CHECK(answers[5]["tokens"][0] == Golden::get().prompt("capital").greedy[0]);
    CHECK(answers[6]["id"] == 8);  // the number of its line
    if (first.empty()) first = run.out;
    CHECK(run.out == first);
  }
}

TEST_CASE("generate: seeded draws repeat, other seeds differ, greedy ignores the seed") {
  const std::vector<std::string> base = {
      "--prompt", "In the beginning", "--max-tokens", "32", "--ignore-eos", "--top-k", "50"};
  const auto text = [&](const char* temperature, const char* seed) {
    std::vector<std::string> argv = base;
    argv.insert(argv.end(), {"--temperature", temperature, "--seed", seed});
    return generate(argv).out;
  };
  CHECK(text("1.5", "1") == text("1.5", "1"));
  CHECK(text("1.5", "1") != text("1.5", "2"));
  CHECK(text("0", "1") == text("0", "2"));
}

TEST_CASE("generate: --logits writes the golden rows, with and without a draft head, whole or not at all") {
  const TempDir folder;
  const Golden::Prompt& p = Golden::get().prompt("capital");
  const std::string file = (folder / "logits.safetensors").string();
  const RunResult run = generate({"--token-ids", joined(p.ids), "--max-tokens", "8", "--ignore-eos", "--logits", file,
                                  "--logits-rows", "all", "--mtp-logits"});
  CHECK(run.exit_code == 0);
  const auto mapped = MappedFile::open(file);
  const SafetensorsHeader header = parse_safetensors(mapped->bytes(), "logits");
  int64_t rows = 0, width = 0;
  const float* stored = Golden::get().tensor("capital.logits", &rows, &width);
  const auto n = static_cast<int64_t>(p.ids.size());
  int seen = 0;
  for (const TensorInfo& t : header.tensors) {
    const auto* values = reinterpret_cast<const float*>(mapped->bytes().data() + t.offset);
    if (t.name == "logits") {
      REQUIRE(t.shape == std::vector<int64_t>{n + 7, width});
      CHECK(max_abs_difference(values + (n - 1) * width, stored, rows * width) < 5e-4);
      ++seen;
    } else if (t.name == "mtp_logits") {
      CHECK(t.shape == std::vector<int64_t>{n + 6, width});
      ++seen;
    } else if (t.name == "tokens") {
      CHECK(t.shape == std::vector<int64_t>{n + 8});
      ++seen;
    }
  }
  CHECK(seen == 3);

  const std::string gone = (folder / "missing" / "logits.safetensors").string();
  const RunResult bad = generate({"--prompt", "a", "--max-tokens", "1", "--logits", gone});
  CHECK(bad.exit_code == 6);
  CHECK_FALSE(fs::exists(gone));
}

TEST_CASE("generate: a checkpoint without a tokenizer takes ids and answers with ids") {
  const TempDir folder;
  fs::copy(kTiny, folder / "pack");
  fs::remove(folder / "pack" / "tokenizer.json");
  const Golden::Prompt& p = Golden::get().prompt("genesis");
  const RunResult run = generate({"--token-ids", joined(p.ids), "--max-tokens", "5"}, "", folder / "pack");
  CHECK(run.exit_code == 0);
  CHECK(run.out == joined({p.greedy.begin(), p.greedy.begin() + 5}, " ") + "\n");
  refused(generate({"--prompt", "text"}, "", folder / "pack"), 3, {"tokenizer.json", "--token-ids"});
}

TEST_CASE("generate: no id at or above the tokenizer's limit is ever drawn") {
  const RunResult run =
      generate({"--prompt", "a", "--max-tokens", "300", "--ignore-eos", "--temperature", "50", "--format", "ids"});
  REQUIRE(run.exit_code == 0);
  std::istringstream ids(run.out);
  int count = 0;
  for (int id = 0; ids >> id; ++count) CHECK(id < 4007);
  CHECK(count == 300);
}

TEST_CASE("generate: the receipt's result is byte-equal on a rerun") {
  const std::vector<std::string> argv = {"--prompt",      "And God said", "--max-tokens", "16",
                                         "--temperature", "0.8",          "--seed",       "9"};
  const Json a = read_receipt(generate(argv), "fnx-generate"), b = read_receipt(generate(argv), "fnx-generate");
  CHECK(a["result"].dump() == b["result"].dump());
  CHECK(a["result_digest"] == b["result_digest"]);
  CHECK(a["subjects"][0]["fingerprint"]["digest"] == b["subjects"][0]["fingerprint"]["digest"]);
}

TEST_CASE("generate: wrong model paths are refused by name with code 3") {
  const TempDir folder;
  fs::create_directory(folder / "empty");
  fs::create_directory(folder / "text");
  write_file(folder / "text" / "notes.txt", "nothing");
  fs::create_directory(folder / "vision");
  write_file(folder / "vision" / "config.json", R"({"model_type": "qwen4_exp_vision", "hidden_size": 64})");
  write_safetensors(folder / "vision" / "model.safetensors",
                    {tensor("model.visual.blocks.0.norm1.weight", DType::F32, {2}, std::vector<float>{1, 2})});
  refused(generate({"--prompt", "a"}, "", folder / "nowhere"), 3, {"nowhere"});
  refused(generate({"--prompt", "a"}, "", folder / "empty"), 3, {"empty"});
  refused(generate({"--prompt", "a"}, "", folder / "text"), 3, {"text"});
  refused(generate({"--prompt", "a"}, "", folder / "vision"), 3, {});
  refused(generate({"--prompt", "a"}, "", kTiny / "model-00001-of-00003.safetensors"), 3, {"model-00001"});
}

TEST_CASE("generate: prompts that cannot run are refused with their numbers") {
  const TempDir folder;
  refused(generate({"--token-ids", "1,2,5000"}), 3, {"5000", "4096"});
  refused(generate({"--token-ids", "1,x"}), 2, {"x"});
  write_file(folder / "bad.txt", std::string("ab\xff", 3));
  refused(generate({"--prompt-file", (folder / "bad.txt").string()}), 3, {"bad.txt", "2"});
  write_file(folder / "empty.txt", "");
  refused(generate({"--prompt-file", (folder / "empty.txt").string()}), 3, {"empty"});
  refused(generate({"--prompt-file", (folder / "none.txt").string()}), 3, {"none.txt"});
  refused(generate({}), 2, {"--prompt"});
  refused(generate({"--prompt", "a", "--token-ids", "1"}), 2, {"exactly one"});
  refused(generate({"--jsonl", "-"}, "{\"id\":1,\"prompt\":\"a\"}\n{\"id\":2}\n"), 3, {"line 2"});
  refused(generate({"--jsonl", "-"}, "{\"id\":1,\"prompt\":\"a\",\"tokens\":[1]}\n"), 3, {"line 1"});
  refused(generate({"--jsonl", "-"}, "{\"id\":1,\"promt\":\"a\"}\n"), 3, {"promt"});
  refused(generate({"--jsonl", "-"}, "not json\n"), 3, {"line 1"});
  refused(generate({"--jsonl", "-"}, "{\"id\":1,\"tokens\":[1]}\n{\"prompt\":\"ab\xff\"}\n"), 3,
          {"stdin, line 2", "not UTF-8", "offset 13"});
  for (const char* option : {"--prompt-file", "--jsonl"})
    refused(generate({option, folder.path().string()}), 3, {"it is a folder"});
}

TEST_CASE("generate: a prompt that cannot be read to its end is refused, whatever the number of ranks") {
  for (const char* option : {"--prompt-file", "--jsonl"}) {
    refused(generate({option, std::string(300, 'x')}), 3, {"cannot read xxx"});        // longer than a name may be
    refused(generate({option, "/proc/self/mem"}), 3, {"cannot read /proc/self/mem"});  // reading its start fails
    for (const char* ranks : {"1", "2"}) {
      CAPTURE(ranks);
      const std::string line = fmt::format("exec \"$0\" --model {} {} - --tp {} < /", kTiny.string(), option, ranks);
      refused(run_command({"/bin/sh", "-c", line, tool_path("fnx-generate")}), 3, {"cannot read stdin"});
    }
  }
  refused(generate({"--prompt", "a\xff", "--tp", "2"}), 3, {"--prompt", "not UTF-8"});
}

TEST_CASE("generate: an answer is cut where the context ends") {
  const TempDir folder;
  fs::copy(kTiny, folder / "pack");
  Json config = read_json(kTiny / "config.json");
  config["text_config"]["max_position_embeddings"] = 8;
  write_file(folder / "pack" / "config.json", config.dump());
  const std::vector<std::string> options = {"--max-tokens", "100", "--ignore-eos", "--format", "ids"};
  for (const auto& [ids, count] : {std::pair{"5,5,5,5,5,5", 2}, {"5,5,5,5,5,5,5", 1}}) {
    std::vector<std::string> argv = {"--token-ids", ids};
    argv.insert(argv.end(), options.begin(), options.end());
    const RunResult run = generate(argv, "", folder / "pack");
    CHECK(run.exit_code == 0);
    CHECK(read_receipt(run, "fnx-generate")["result"]["answers"][0]["tokens"].size() == count);
  }
  refused(generate({"--token-ids", "5,5,5,5,5,5,5,5"}, "", folder / "pack"), 3, {"9 tokens", "context"});
}

TEST_CASE("generate: unknown flags, values out of range, cuda without a GPU and unwritable receipts have their codes") {
  CHECK(generate({"--prompt", "a", "--max-token", "3"}).exit_code == 2);
  CHECK(generate({"--prompt", "a", "--max-token", "3"}).err.find("--max-tokens") != std::string::npos);
  CHECK(generate({"--prompt", "a", "--temperature", "-1"}).exit_code == 2);
  const std::vector<std::string> no_device = {"CUDA_VISIBLE_DEVICES="};
  const std::string reason = cuda_runtime_version() == "none" ? "no cuda backend in this build" : "no GPU";
  refused(generate({"--prompt", "a", "--backend", "cuda"}, "", kTiny, no_device), 4, {reason, "--backend cpu"});
  refused(generate({"--prompt", "a", "--graph", "on"}, "", kTiny, no_device), 4, {"--graph off"});
  refused(generate({"--prompt", "a", "--tp", "3"}), 4, {"32 experts", "3 ranks", "--tp"});
  refused(generate({"--prompt", "a", "--draft", "3", "--mtp-logits"}), 4, {"--draft 3", "--mtp-logits"});
  refused(generate({"--prompt", "a", "--tp", "65"}), 2, {"--tp", "64"});
  refused(generate({"--prompt", "a", "--draft", "9"}), 2, {"--draft"});
  refused(generate({"--prompt", "a", "--draft", "some"}), 2, {"--draft"});
  refused(generate({"--prompt", "a", "--draft", "0x2"}), 2, {"--draft 0x2"});
  refused(generate({"--prompt", "a", "--kv-device-tokens", "0x10"}), 2, {"--kv-device-tokens 0x10"});
  refused(generate({"--prompt", "a", "--expert-lines", "4,8"}), 2, {"--expert-lines 4,8"});
  refused(generate({"--prompt-tokens", "010"}), 2, {"--prompt-tokens: 010"});
  const RunResult run = generate({"--prompt", "a", "--receipt", "/nonexistent-folder/r.json"});
  CHECK(run.exit_code == 6);
  CHECK(run.out == "");
}

TEST_CASE("generate: a place where a file cannot be written is refused before the first token") {
  const TempDir folder;
  for (const char* option : {"--logits", "--trace-experts"}) {
    refused(generate({"--prompt", "a", option, (folder / "none" / "file").string()}), 6, {"No such file"});
    refused(generate({"--prompt", "a", option, folder.path().string()}), 6, {"Is a directory"});
    refused(generate({"--prompt", "a", option, (folder / std::string(300, 'a')).string()}), 6, {"File name too long"});
    const fs::path own = folder / option;
    fs::create_directory(own);
    const std::string receipt = (own / ".." / option / "one").string(), same = (own / "one").string();
    const RunResult run = generate({"--prompt", "a", option, same, "--receipt", receipt});
    CHECK(run.exit_code == 2);
    CHECK(run.err.find(std::string(option) + " would replace the receipt") != std::string::npos);
  }
  refused(generate({"--prompt", "a", "--logits", (folder / "x").string(), "--trace-experts", (folder / "x").string()}),
          2, {"--trace-experts would replace --logits"});
}

TEST_CASE("generate: a device memory limit that is too small is refused with the largest term and its way out") {
  if (cuda_runtime_version() == "none") return;  // there is no backend to plan for
  const RunResult run = generate({"--prompt", "a", "--memory-plan", "--vram-limit", "8MiB"});
  CHECK(run.exit_code == 4);
  CHECK(run.out.find("weights") != std::string::npos);  // the plan itself
  for (const char* words : {"8388608", "the largest term is", "--chunk-rows", "--vram-limit"})
    CHECK(run.err.find(words) != std::string::npos);
}

TEST_CASE("cuda: an architecture without a qualification is refused with the gate and the command") {
  if (no_gpu()) return;
  const TempDir empty;
  refused(generate({"--prompt", "a", "--backend", "cuda"}, "", kTiny, {"XDG_DATA_HOME=" + empty.path().string()}), 4,
          {"is not qualified", "kernel contract", "fnx-kernel-contract --qualify", "--backend cpu"});
}

TEST_CASE("cuda: prompts and limits that do not fit are refused with their numbers and the option that helps") {
  if (no_gpu()) return;
  if (!qualification_problem(list_gpus()[0].architecture).empty()) {
    std::puts("skipped: no GPU that is qualified");
    return;
  }
  refused(generate({"--prompt", "a", "--backend", "cuda", "--vram-limit", "8MiB"}), 4,
          {"8388608", "the largest term is", "--vram-limit"});
  refused(generate({"--prompt", "a", "--backend", "cuda", "--device", "99"}), 4, {"99", "--list-devices"});
  std::string ids = "5";
  for (int i = 0; i < 8192; ++i) ids += ",5";
  refused(generate({"--token-ids", ids, "--backend", "cuda"}), 3, {"8193 tokens", "8192", "shorten"});
}

TEST_CASE("generate: --reuse gives the same answers and counts what it did not read again") {
  std::string lines;
  const std::vector<int32_t> ids = Golden::get().prompt("long-700").ids;
  const std::vector<int32_t> shared(ids.begin(), ids.begin() + 60);
  for (int i = 0; i < 3; ++i) lines += fmt::format("{{\"id\": {}, \"tokens\": [{},{}]}}\n", i, joined(shared), 100 + i);
  const RunResult cold = generate({"--jsonl", "-", "--max-tokens", "5"}, lines);
  const RunResult warm = generate({"--jsonl", "-", "--max-tokens", "5", "--reuse"}, lines);
  REQUIRE(warm.exit_code == 0);
  CHECK(warm.out == cold.out);
  const Json evidence = read_receipt(warm, "fnx-generate")["evidence"];
  CHECK(evidence["reused_tokens"] == 2 * 60);
  CHECK(evidence["snapshots"] == 1);
  CHECK(evidence["prompt_rows"] == 61 + 2);
  CHECK(generate({"--prompt", "a", "--reuse", "--mtp-logits"}).exit_code == 2);
}
