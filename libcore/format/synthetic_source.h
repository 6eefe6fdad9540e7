// A checkpoint that is made up as it is read: every byte is a pure function of the specification and the tensor's name,
// so that a model of any size needs neither a download nor a disk. Its numbers mean nothing; its shapes, widths and the
// scale of its activations are those of a real one.
//
// Values. Words come from splitmix64(key + i), key from XXH3-64 of the tensor's name and the seed. Trellis words are
// these words: any bits are a valid trellis, with values of mean 0 and variance 1. Other values are uniform on 4096
// levels around a centre. suh is +-1 within a quarter, svh the same times gain / sqrt(inputs), a plain matrix has the
// standard deviation gain / sqrt(inputs), norms lie near 0 (near 1 where they are not centred). The n-gram table
// repeats after kTablePeriod rows, so that it takes the memory of one period whatever its size.
//
// skew s gives routed experts a popularity like 1 / rank^s. The model has no router bias, so the scale of an expert's
// router row does it: with p_e the wanted share of rows that choose expert e (at most 1/4, adding up to the experts a
// row chooses) and z(p) the normal quantile that is exceeded with probability p, row e is scaled by z(p without skew) /
// z(p_e). Its logit so passes a common threshold with probability p_e. Ranks are permuted layer by layer. Where a row
// chooses more than a quarter of all experts skew does nothing.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "libcore/format/pack_layout.h"
#include "libcore/format/tensor_source.h"

namespace fnx {

struct SyntheticSpec {
  std::string name;          // flash-next-3.05bpw, flash-next-4.05bpw or tiny
  uint64_t seed = 0;         // of the values
  int expert_half_bits = 0;  // twice the width of routed experts
  int64_t layers = 0, experts = 0;
  double skew = 0;  // of expert popularity; 0: even

  // "synth:NAME[,seed=..,bits=..,layers=..,experts=..,skew=..]"; what is left out comes from NAME. Throws Usage.
  static SyntheticSpec parse(std::string_view text);
  // The same with every key, in one spelling.
  std::string text() const;
};

inline bool is_synthetic(std::string_view model) { return model.starts_with("synth:"); }
// Throws Usage when `model` is synthetic: for tools that need a folder.
void need_folder(std::string_view model);

inline constexpr int64_t kTablePeriod = int64_t{1} << 19;

// Safe to read from several threads. A tensor's memory lives as long as the owner handed out with it.
class SyntheticSource : public TensorSource {
 public:
  // `threads` that fill one large tensor; 0: one a hardware thread.
  explicit SyntheticSource(const SyntheticSpec& spec, int threads = 0);
  SyntheticSource(const SyntheticSource&) = delete;
  SyntheticSource& operator=(const SyntheticSource&) = delete;

  const SyntheticSpec& spec() const { return spec_; }
  // What config.json and generation_config.json of this model hold.
  nlohmann::ordered_json config_json() const;
  std::vector<int32_t> stop_ids() const;
  uint64_t bytes() const { return bytes_; }
  // XXH3-128, 32 hex digits, over the specification, the generator's version and every tensor's name, dtype and shape:
  // equal digests mean equal bytes.
  std::string digest() const;
  // The same for Receipt::add_subject.
  nlohmann::ordered_json fingerprint() const;

  // Files as fnx-synth writes them; offsets count from the start of their data areas.
  std::span<const SourceFile> files() const override { return files_; }
  std::span<const TensorInfo> tensors() const override { return tensors_; }
  const TensorInfo* find(std::string_view name) const override;
  TensorData read(const TensorInfo& tensor) const override;

  // The tensor's bytes [first, first + to.size()), first a multiple of 8; `tensor` is one of tensors().
  void fill(const TensorInfo& tensor, uint64_t first, std::span<std::byte> to) const;

 private:
  const Values& values(const TensorInfo& tensor) const;
  std::vector<double> router_scales(uint64_t key) const;
  TensorData map_table(const TensorInfo& tensor) const;

  SyntheticSpec spec_;
  ModelConfig config_;
  int threads_ = 1;
  uint64_t bytes_ = 0;
  std::vector<SourceFile> files_;
  std::vector<TensorInfo> tensors_;
  std::vector<Values> values_;  // as tensors_
  std::unordered_map<std::string_view, uint32_t> by_name_;
};

}  // namespace fnx
