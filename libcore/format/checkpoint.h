// A checkpoint folder: shards, index and side files behind TensorSource.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "libcore/format/tensor_source.h"

namespace fnx {

struct CheckpointOptions {
  // Throw when the pack is incomplete or index and shards disagree, with the whole list; the inspector lists it
  // instead.
  bool strict = true;
};

// Maps every *.safetensors of `folder`, those the index names and the side files beside them. Reads headers only.
// Throws Input naming file, tensor and numbers for everything README, "What a reader refuses", lists. When not strict,
// `folder` may also be a single *.safetensors file. Safe to read from several threads.
class Checkpoint : public TensorSource {
 public:
  explicit Checkpoint(const std::filesystem::path& folder, const CheckpointOptions& options = {});
  ~Checkpoint() override;

  const std::filesystem::path& folder() const;
  // Pack-level problems found, one line each. When strict, only those that harm nothing: tensors that weight_map lacks.
  const std::vector<std::string>& problems() const;

  // Shards in name order, then side files in name order. Without an index every file counts as listed.
  std::span<const SourceFile> files() const override;
  std::span<const TensorInfo> tensors() const override;
  const TensorInfo* find(std::string_view name) const override;
  // Throws Input when the file is cut before the tensor's end, which only a checkpoint that is not strict can hold.
  TensorData read(const TensorInfo& tensor) const override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fnx
