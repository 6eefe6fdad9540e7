// The tiny checkpoint, its golden outputs, and engines over it.
#pragma once

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "libcore/engine/engine.h"
#include "libcore/format/checkpoint.h"

namespace fnx::test {

std::string fixture(const std::string& name);  // path of fixtures/NAME

// Outputs of an independent implementation (fixtures/README.md).
class Golden {
 public:
  static const Golden& get();
  struct Prompt {
    std::string name, text, greedy_text;  // text is empty for prompts given as ids
    std::vector<int32_t> ids, greedy, draft_argmax;
    std::vector<double> margins;
    std::vector<int32_t> forced() const;  // prompt and generated tokens but the last
  };
  const std::vector<Prompt>& prompts() const { return prompts_; }
  const Prompt& prompt(const std::string& name) const;
  const nlohmann::json& json() const { return json_; }
  // nullptr when absent; F32, rows of `width`.
  const float* tensor(const std::string& name, int64_t* rows = nullptr, int64_t* width = nullptr) const;

 private:
  Golden();
  nlohmann::json json_;
  std::vector<Prompt> prompts_;
  struct Entry {
    TensorInfo info;
    const std::byte* data;
  };
  std::map<std::string, Entry> tensors_;
  std::shared_ptr<const void> file_;
};

// Where a test runs the model; Replayed: on the cpu with graphs (replayed_backend.h). Tests of the cuda backend return
// at once, and count as skipped, when no_gpu() says so.
enum class On { Cpu, Cuda, Replayed };
bool no_gpu();

// One reader, and a backend and a set of weights of each kind, a process; decoded weights are kept between tests.
const Checkpoint& tiny_checkpoint();
Backend& cpu_backend();
Backend& backend_on(On on);
const Weights& tiny_weights(On on = On::Cpu);  // with the draft head
std::unique_ptr<Engine> tiny_engine(int64_t slots = 1, int64_t tokens = 2048, bool draft_head = false,
                                    int64_t max_rows = 2048, DType kv = DType::F32, On on = On::Cpu,
                                    bool graphs = false, int64_t inject_capture_failures = 0);

// Runs a whole token list through slot in pieces of `chunk` rows and appends each row's logits [V] to `logits` if
// given.
void feed(Engine& engine, int32_t slot, const std::vector<int32_t>& tokens, int64_t chunk,
          std::vector<float>* logits = nullptr);

double max_abs_difference(const float* a, const float* b, int64_t n);
double relative_norm(const float* got, const float* want, int64_t n);  // ||got - want|| / ||want||

}  // namespace fnx::test
