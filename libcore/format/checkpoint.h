// A checkpoint folder: shards, index and side files behind TensorSource.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "libcore/format/tensor_source.h"

namespace fnx {

struct CheckpointOptions {
  // Throw on the first pack-level problem (missing shards, index and shards disagree); the inspector lists them instead.
  bool strict = true;
};

// Maps every *.safetensors of `folder`, those the index names and the side files beside them. Reads headers only.
// Throws Input naming file, tensor and numbers for everything README, "What a reader refuses", lists.
class Checkpoint : public TensorSource {
 public:
  explicit Checkpoint(const std::filesystem::path& folder, const CheckpointOptions& options = {});
  ~Checkpoint() override;

  const std::filesystem::path& folder() const;
  // Pack-level problems found; empty when strict.
  const std::vector<std::string>& problems() const;

  std::span<const SourceFile> files() const override;
  std::span<const TensorInfo> tensors() const override;
  const TensorInfo* find(std::string_view name) const override;
  TensorData read(const TensorInfo& tensor) const override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fnx
