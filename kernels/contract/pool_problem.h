// Problems about a pool of experts on the device: operands "state", a PoolState of numbers experts, lines and all;
// "foreseen", I32 ids; "order", a StageOrder.
#pragma once

#include "kernels/contract/device.h"
#include "kernels/contract/kernel.h"
#include "kernels/cuda/expert_pool.h"
#include "kernels/expert_planner.h"

namespace fnx::contract {

Shape pool_shape(int64_t experts, int64_t lines, bool counts, int64_t decay, int64_t first, int64_t bytes = 4096);

PoolState state_of(Problem& p);
PoolOptions options_of(const Problem& p);
// A state after some requests, so that lines are full, in part or not at all.
void add_state(Problem& p, Kind kind, Random& random);
// An operand of words that a launch leaves as `wanted` has them.
Expectation words_as(const Problem& given, const Problem& wanted, const char* name);
inline constexpr int64_t kUp = 256, kDown = 512;  // of an expert's bytes
// Bytes of the state's expert, some smaller than others.
inline int64_t expert_bytes(const Problem& p, int64_t expert) { return p.number("bytes") - 16 * (expert % 3); }

// What is foreseen, by places of the stage: an expert twice, one that is not the state's, and any; of extremes none
// that is the state's.
void add_foreseen(Problem& p, Kind kind, Random& random, int64_t count);
// The place of the state's expert e among those foreseen, -1 without one.
int64_t place_of(const Problem& p, int64_t e);

// The place of the state's expert e on the stage, its order given, -1 without one.
int64_t staged_at(const Problem& p, int64_t e);

// Words of zeros.
void add_words(Problem& p, const char* name, Role role, int64_t words);
inline void add_order(Problem& p, Role role) { add_words(p, "order", role, sizeof(StageOrder) / 4); }
inline StageOrder& order_of(Problem& p) { return *reinterpret_cast<StageOrder*>(p["order"].data()); }
StageOrder order_of(const Problem& p);
// Of an expert.
inline int64_t pieces(const Problem& p) { return PoolStage::pieces_of(p.number("bytes")); }
// Draws of the guess before its order: none, all and more, or any.
uint32_t guessed_draws(const Problem& p, Kind kind, Random& random);

#ifdef FNX_HAS_CUDA
PoolState device_state(const Problem& p, DeviceProblem& d);
// Of experts that lie one after the other.
const cuda::PooledExpert* homes(const Problem& p, DeviceProblem& d, const std::byte* bank);
#endif

}  // namespace fnx::contract
