#include "tests/support/golden.h"

#include <cmath>
#include <cstdio>
#include <fstream>
#include <numeric>
#include <stdexcept>

#include "kernels/devices.h"
#include "libcore/format/mapped_file.h"
#include "libcore/format/safetensors.h"
#include "tests/support/replayed_backend.h"

namespace fnx::test {

std::string fixture(const std::string& name) { return std::string(FNX_SOURCE_DIR "/fixtures/") + name; }

std::vector<int32_t> Golden::Prompt::forced() const {
  std::vector<int32_t> all = ids;
  all.insert(all.end(), greedy.begin(), greedy.end() - 1);
  return all;
}

const Golden& Golden::get() {
  static const Golden golden;
  return golden;
}

Golden::Golden() {
  std::ifstream in(fixture("golden/golden-public.json"));
  json_ = nlohmann::json::parse(in);
  const auto order = nlohmann::ordered_json::parse(std::ifstream(fixture("golden/golden-public.json")));
  const auto text = [](const auto& j) { return j.is_null() ? std::string() : j.template get<std::string>(); };
  for (const auto& [name, p] : order.at("prompts").items())
    prompts_.push_back({name, text(p.at("text")), text(p.at("greedy_text")), p.at("prompt_ids"), p.at("greedy_ids"),
                        p.at("mtp_argmax"), p.at("margins")});
  const auto file = MappedFile::open(fixture("golden/golden-public.safetensors"));
  for (const TensorInfo& t : parse_safetensors(file->bytes(), "golden").tensors)
    tensors_[t.name] = {t, file->bytes().data() + t.offset};
  file_ = file;
}

const Golden::Prompt& Golden::prompt(const std::string& name) const {
  for (const Prompt& p : prompts_)
    if (p.name == name) return p;
  throw std::runtime_error("no golden prompt " + name);
}

const float* Golden::tensor(const std::string& name, int64_t* rows, int64_t* width) const {
  const auto it = tensors_.find(name);
  if (it == tensors_.end()) return nullptr;
  const auto& shape = it->second.info.shape;
  if (width != nullptr) *width = shape.back();
  if (rows != nullptr) *rows = it->second.info.elements() / shape.back();
  return reinterpret_cast<const float*>(it->second.data);
}

const Checkpoint& tiny_checkpoint() {
  static const Checkpoint checkpoint(fixture("flashnext-tiny"));
  return checkpoint;
}

Backend& cpu_backend() {
  static const std::unique_ptr<Backend> backend = make_cpu_backend();
  return *backend;
}

bool no_gpu() {
  if (!list_gpus().empty()) return false;
  std::puts("skipped: no GPU that this build can drive");  // as tests/CMakeLists.txt tells ctest
  return true;
}

Backend& backend_on(On on) {
  if (on == On::Cpu) return cpu_backend();
  if (on == On::Replayed) {
    static const std::unique_ptr<Backend> replayed = make_replayed_backend({});
    return *replayed;
  }
  static const std::unique_ptr<Backend> backend = make_cuda_backend();
  return *backend;
}

const Weights& tiny_weights(On on) {
  static std::map<On, const Weights> loaded;
  const auto found = loaded.find(on);
  if (found != loaded.end()) return found->second;
  return loaded
      .emplace(on, Weights::load(tiny_checkpoint(), ModelConfig::load(fixture("flashnext-tiny/config.json")),
                                 backend_on(on)))
      .first->second;
}

std::unique_ptr<Engine> tiny_engine(int64_t slots, int64_t tokens, bool draft_head, int64_t max_rows, DType kv, On on,
                                    bool graphs, int64_t inject_capture_failures) {
  EngineOptions o;
  o.state = {slots, slots * tokens, tokens, kv, draft_head};
  o.max_rows = max_rows;
  o.graphs = graphs, o.inject_capture_failures = inject_capture_failures;
  return std::make_unique<Engine>(tiny_weights(on), backend_on(on), o);
}

void feed(Engine& engine, int32_t slot, const std::vector<int32_t>& tokens, int64_t chunk, std::vector<float>* logits) {
  for (size_t at = 0; at < tokens.size(); at += chunk) {
    const size_t n = std::min<size_t>(chunk, tokens.size() - at);
    const LaneInput lane{slot, std::span(tokens).subspan(at, n)};
    engine.forward({&lane, 1});
    if (logits == nullptr) continue;
    std::vector<int32_t> rows(n);
    std::iota(rows.begin(), rows.end(), 0);
    const std::vector<float> values = engine.to_host(engine.logits(rows));
    logits->insert(logits->end(), values.begin(), values.end());
  }
}

double max_abs_difference(const float* a, const float* b, int64_t n) {
  double worst = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double d = std::abs(double{a[i]} - b[i]);
    if (!(d <= worst)) worst = d;  // a NaN stays
  }
  return worst;
}

double relative_norm(const float* got, const float* want, int64_t n) {
  double error = 0, size = 0;
  for (int64_t i = 0; i < n; ++i) {
    error += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
    size += double{want[i]} * want[i];
  }
  return std::sqrt(error / size);
}

}  // namespace fnx::test
