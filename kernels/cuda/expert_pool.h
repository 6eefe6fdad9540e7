// Pools of offloaded experts whose state is in device memory: plans by the rule of kernels/expert_planner.h, and the
// copies that they list, from host memory that the device reads.
#pragma once

#include "kernels/cuda/exl3_experts.h"
#include "kernels/cuda/stream.h"
#include "kernels/pool_state.h"

namespace fnx::cuda {

// Where a pooled expert is kept: gate at `home`, the others at these offsets.
struct PooledExpert {
  const std::byte* home = nullptr;      // 16-byte aligned
  int64_t up = 0, down = 0, bytes = 0;  // bytes: of all of it, a multiple of 16
};

// What was foreseen of a layer: experts, and the stage with what was copied of the first of them. An expert that is
// named twice has its first place alone.
struct ForeseenExperts {
  const int32_t* ids = nullptr;  // [count]; null: nothing was foreseen
  int32_t count = 0, first = 0;  // up to PoolStage::kForeseen; id of the state's expert 0
  PoolStage stage;               // lines 16-byte aligned, as line_bytes
};

// Counts, clock, lines and totals as ExpertPlanner::plan leaves them; heat of every choice; the copies, lines
// ascending; the table's trellis addresses of experts that lost or got a line: the stage where they have a place there.
// Choices outside [first, first + experts) are no part of the request, those outside [0, all) no heat. Domain: 1 <=
// lines <= experts <= 1024, rows * k up to 65536.
struct PlanExpertsParams {
  PoolState state;
  bool counts = true;  // keys of lfu-decay; else of lru
  uint32_t decay_touches = 1;
  const int32_t* ids = nullptr;  // [rows, columns]: the first k of a row are its choice
  int64_t rows = 0, columns = 0, k = 0;
  int64_t first = 0;                    // id of the state's expert 0
  const PooledExpert* homes = nullptr;  // [experts]
  Exl3Expert* table = nullptr;          // [experts]
  std::byte* lines = nullptr;           // [lines, line_bytes]
  int64_t line_bytes = 0;
  ForeseenExperts foreseen;  // its stage's order is given as soon as the misses are known
};
void plan_experts(const PlanExpertsParams& p, cudaStream_t stream);

// For every copy that the last plan listed: the expert's bytes to its place of the stage, but for pieces that are
// there, or, without a place, to its line; counts what it copied. Takes the order's go back.
struct FillPlannedParams {
  PoolState state;
  const PooledExpert* homes = nullptr;
  std::byte* lines = nullptr;  // 16-byte aligned, as line_bytes
  int64_t line_bytes = 0;
  PoolStage stage;  // its order is null: nothing has a place
};
void fill_planned(const FillPlannedParams& p, cudaStream_t stream);

// For every copy of an expert that has a place on the stage: from there to its line, where the table finds it then;
// counts them, and opens the guess for the next copies to the stage. Lines have the stage's line_bytes.
struct SettlePlannedParams {
  PoolState state;
  const PooledExpert* homes = nullptr;
  Exl3Expert* table = nullptr;
  std::byte* lines = nullptr;  // 16-byte aligned
  PoolStage stage;
};
void settle_planned(const SettlePlannedParams& p, cudaStream_t stream);

// Copies what is foreseen and has no line to the stage, place after place, until the order is given, and what is
// ordered then; counts what it copied. Runs beside other kernels and waits for the order, so it takes little of few
// multiprocessors, and leaves when none came for 2 ms.
struct FillForeseenParams {
  PoolState state;
  const PooledExpert* homes = nullptr;
  ForeseenExperts foreseen;
  bool follows = false;        // begins when the stage's order says go, or after 2 ms
  StageOrder* next = nullptr;  // gets the go when all of the order is on its way; or null
};
inline constexpr int kForeseenBlocks = 6, kForeseenThreads = 256,
                     kForeseenWarps = kForeseenBlocks * kForeseenThreads / 32;
void fill_foreseen(const FillForeseenParams& p, cudaStream_t stream);

}  // namespace fnx::cuda
