// Runs the target on mutants for a given time, or on given files. The running input always lies in a shared file, so
// that it survives whatever the target dies of.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <unordered_set>

#include "tests/fuzz/format_target.h"
#include "tests/fuzz/mutator.h"

using namespace fnx::fuzz;

namespace {

constexpr size_t kMaxInput = 1 << 17;
constexpr unsigned kHangSeconds = 20;

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(in), {}};
}

// The input that is running: its length, then its bytes.
class Current {
 public:
  explicit Current(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0644);
    if (fd < 0 || ::ftruncate(fd, sizeof(uint64_t) + kMaxInput) != 0) throw std::runtime_error("cannot write " + path);
    void* map = ::mmap(nullptr, sizeof(uint64_t) + kMaxInput, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ::close(fd);
    if (map == MAP_FAILED) throw std::runtime_error("cannot map " + path);
    data_ = static_cast<char*>(map);
  }
  void set(const std::string& input) {
    const uint64_t size = input.size();
    std::memcpy(data_, &size, sizeof size);
    std::memcpy(data_ + sizeof size, input.data(), input.size());
  }

 private:
  char* data_ = nullptr;
};

std::string run(const std::string& input) {
  // A copy of the exact size, so that the sanitizer sees a read past its end.
  const std::vector<uint8_t> copy(input.begin(), input.end());
  return run_format_input(copy.data(), copy.size());
}

// The first words of an outcome, without numbers and names: new ones mean that the input reached something new.
std::string kind_of(const std::string& outcome) {
  std::string kind;
  bool quoted = false;
  const size_t end = std::min(outcome.size(), outcome.find("last read"));
  for (size_t i = 0; i < end && kind.size() < 60; ++i) {
    if (outcome[i] == '"') quoted = !quoted;
    if (outcome.compare(i, 7, "tensor ") == 0) i = std::min(outcome.find(": ", i), outcome.size() - 1);
    if (!quoted && (std::islower(static_cast<unsigned char>(outcome[i])) || outcome[i] == ' ')) kind += outcome[i];
  }
  return kind;
}

std::vector<std::string> seeds(const std::string& fixtures) {
  std::vector<std::string> all;
  for (const char* name : {"/flashnext-tiny/ngram_embedding.safetensors", "/golden/format-matrix.safetensors"}) {
    const std::string file = read_file(fixtures + name);
    uint64_t length = 0;
    std::memcpy(&length, file.data(), sizeof length);
    const std::string header = file.substr(8, length);
    all.push_back('\0' + file.substr(0, 8 + length));
    for (int bits : {0, 12, 20, 40, 62}) all.push_back(static_cast<char>(1 + 4 * bits) + header);
  }
  for (const char* header : {R"({})", R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
                             R"({"__metadata__":{"k":"v"},"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}})",
                             R"({"a":{"dtype":"X","shape":[0],"data_offsets":[4,4]},"b":{"dtype":"F16","shape":[1,1],)"
                             R"("data_offsets":[2,4]}})"}) {
    all.push_back(static_cast<char>(1 + 4 * 40) + std::string(header));
    std::string file(9, '\0');
    file[1] = static_cast<char>(std::strlen(header));
    all.push_back(file + header + std::string(8, '\0'));
  }
  all.push_back(
      "\2"
      R"({"metadata":{"total_size":1},"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}})");
  all.push_back(
      "\2"
      R"({"weight_map":{}})");
  all.push_back("\3" + read_file(fixtures + "/flashnext-tiny/config.json"));
  all.push_back(
      "\3"
      R"({"model_type":"qwen4_exp_text","rope_scaling":{"type":"default"},"full_attention_interval":4})");
  return all;
}

}  // namespace

// fnx-fuzz-format SECONDS SEED FIXTURES CURRENT, or fnx-fuzz-format FILE to run one saved input.
int main(int argc, char** argv) {
  if (argc == 2) {
    const std::string outcome = run(read_file(argv[1]));
    fmt::print("{}\n", outcome);
    return 0;
  }
  if (argc != 5) return 2;
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::seconds(std::atol(argv[1]));
  Mutator mutator(std::strtoull(argv[2], nullptr, 10));
  Current current(argv[4]);

  std::vector<std::string> corpus = seeds(argv[3]);
  std::unordered_set<std::string> kinds;
  for (const std::string& seed : corpus) {
    current.set(seed);
    kinds.insert(kind_of(run(seed)));
  }
  uint64_t runs = corpus.size(), accepted = 0;
  while (Clock::now() < end) {
    const std::string input = mutator.next(corpus);
    current.set(input);
    ::alarm(kHangSeconds);
    const std::string outcome = run(input);
    accepted += outcome == "accepted";
    if (kinds.insert(kind_of(outcome)).second && corpus.size() < 4000 && input.size() < 8192) corpus.push_back(input);
    ++runs;
  }
  fmt::print("{} inputs, {} accepted, {} kinds of outcome, corpus of {}\n", runs, accepted, kinds.size(),
             corpus.size());
  return 0;
}
