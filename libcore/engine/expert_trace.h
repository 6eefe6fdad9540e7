// The routing of a run, forward by forward: what `fnx-expert-profile replay` plays through pool policies.
//
// A sealed file (libcore/format/sealed_file.h), magic "fnxtrac\n", version 1. Its header is an ExpertIdentity and
// "forwards". Its body, little-endian:
//
//   u32 [all layers, experts]   bytes that a copy of each expert moves (expert_copy_bytes)
//   then for each forward:
//     u32 rows, u32 draft_rows
//     u16 [layers, rows, experts_per_token]               expert ids, slots in order
//     u16 [draft layers, draft_rows, experts_per_token]
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "libcore/engine/expert_identity.h"

namespace fnx {

class TraceRecorder {
 public:
  TraceRecorder(const ExpertIdentity& identity, std::span<const uint32_t> copy_bytes);

  // The router's ids [rows, experts_per_token] of one layer; a forward starts with layer 0 and goes through the trunk
  // in order, the draft layers after it are optional. Throws Internal for another order.
  void add(int64_t layer, std::span<const int32_t> ids);
  int64_t forwards() const { return forwards_; }
  // Replaces the file whole or not at all; throws Output.
  void save(const std::filesystem::path& file) const;

 private:
  ExpertIdentity identity_;
  std::string body_;
  int64_t forwards_ = 0, last_layer_ = -1;
  size_t rows_at_ = 0;  // where the running forward's rows stand in body_
};

struct RoutingTrace {
  struct Forward {
    int64_t rows = 0, draft_rows = 0;
    size_t first = 0;  // of its ids
  };
  ExpertIdentity identity;
  std::vector<uint32_t> copy_bytes;  // [all layers, experts]
  std::vector<Forward> forwards;
  std::vector<uint16_t> ids;
  std::string digest;  // of the file

  // Throws Input naming the file when it is absent, foreign, of another version, cut short, damaged or holds an id that
  // is no expert.
  static RoutingTrace load(const std::filesystem::path& file);

  // [rows, experts_per_token] of a layer; empty for a draft layer of a forward that had no draft rows.
  std::vector<int32_t> layer(const Forward& forward, int64_t l) const;
  std::span<const uint32_t> layer_bytes(int64_t l) const {
    return std::span(copy_bytes).subspan(l * identity.experts, identity.experts);
  }
  int64_t rows() const;
};

}  // namespace fnx
