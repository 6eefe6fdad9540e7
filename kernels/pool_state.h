// The state of one expert pool as one run of bytes, the same in host and in device memory: what ExpertPlanner keeps,
// and what Backend::plan_experts says to Backend::fill_planned and counts.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fnx {

struct PoolWords {
  uint64_t clock, since_decay;
  uint64_t requests, waves, touches, hits, misses, fills, evictions, resident, fills_by_kind[4];  // as PoolCounters
  // Of plans on a device alone, since their words were last zero.
  uint64_t placed, placed_bytes;      // experts that a plan wants copied to a line
  uint64_t in_place, in_place_bytes;  // experts that were chosen and have no line after the plan
  uint64_t copied_bytes;              // to lines, as they were copied
  uint64_t ahead, ahead_bytes;        // foreseen experts that a stage got bytes of before the choice, and these
  uint64_t chosen_bytes;              // that a stage got after it
  uint64_t taken_bytes;               // of copied_bytes, from a stage
};

struct PlannedFill {
  int32_t line, expert, place;  // place: of the stage, where it is served until it settles in its line; -1: has none
};

// Arrays inside a run of bytes(), which is 8-byte aligned. `experts` are the pooled ones of a bank of `all`.
struct PoolState {
  int32_t experts = 0, lines = 0, all = 0;
  PoolWords* words = nullptr;
  uint64_t* touched = nullptr;    // [experts]
  uint64_t* heat = nullptr;       // [all]: choices of rows
  uint32_t* count = nullptr;      // [experts]
  int32_t* line_of = nullptr;     // [experts]
  PlannedFill* fills = nullptr;   // [lines]: the copies of the last plan
  int32_t* fill_count = nullptr;  // [2], the second unused
  int32_t* expert_of = nullptr;   // [lines]

  static constexpr size_t bytes(int64_t experts, int64_t lines, int64_t all) {
    const int64_t need = static_cast<int64_t>(sizeof(PoolWords)) + 16 * experts + 8 * all + 16 * lines + 8;
    return static_cast<size_t>((need + 255) / 256 * 256);
  }
  static PoolState at(std::byte* data, int64_t experts, int64_t lines, int64_t all) {
    PoolState s;
    s.experts = static_cast<int32_t>(experts), s.lines = static_cast<int32_t>(lines), s.all = static_cast<int32_t>(all);
    s.words = reinterpret_cast<PoolWords*>(data);
    s.touched = reinterpret_cast<uint64_t*>(data + sizeof(PoolWords));
    s.heat = s.touched + experts;
    s.count = reinterpret_cast<uint32_t*>(s.heat + all);
    s.line_of = reinterpret_cast<int32_t*>(s.count + experts);
    s.fills = reinterpret_cast<PlannedFill*>(s.line_of + experts);
    s.fill_count = reinterpret_cast<int32_t*>(s.fills + lines);
    s.expert_of = s.fill_count + 2;
    return s;
  }
};

// What a plan wants of a stage whose copies run beside it, and how far these are. Copies draw their pieces from one
// counter, first of the guess, then of the order: in each place after place, ascending; who draws a piece copies it.
struct StageOrder {
  static constexpr int32_t kMost = 16, kForeseen = 16;
  static constexpr uint32_t kClosed = 1u << 30, kKnown = 1u << kForeseen;
  int32_t given;    // 1 as soon as what follows is known
  uint32_t places;  // bit i: the expert foreseen for place i
  int32_t count;    // and these of the state's experts, for the places behind those foreseen
  int32_t experts[kMost];
  uint32_t guessed;  // draws before the order: what they brought is no part of it
  // These, and `given`, are zero from settle_planned() on.
  uint32_t drawn;    // draws; the order closes the guess, and its own are counted from kClosed on
  uint32_t lacking;  // bit i: the expert foreseen for place i had no line, it is guessed; kKnown: this is decided
  // Zero from fill_planned() on: the stage before may give it again before this one has settled.
  int32_t go;  // 1: what the stage before wants is on its way, or the order is given
};

// Where experts that a layer will probably choose wait for its plan, and those that it then misses, as one run of
// bytes: those of Foreseen::ids, place by place, and behind them the order's, as far as their copies came. The plan's
// round reads them here; they settle in their lines behind it.
struct PoolStage {
  static constexpr int32_t kForeseen = StageOrder::kForeseen;  // the first of the ids
  static constexpr int32_t kPlaces = kForeseen + StageOrder::kMost;
  static constexpr int64_t kPiece = 4 << 10;  // bytes that are copied by one
  std::byte* lines = nullptr;                 // [kPlaces, line_bytes]
  StageOrder* order = nullptr;
  int64_t line_bytes = 0, pieces = 0;  // pieces: of a line, the last in part

  static constexpr int64_t pieces_of(int64_t bytes) { return (bytes + kPiece - 1) / kPiece; }
  static constexpr int64_t bytes(int64_t line_bytes) {
    return kPlaces * line_bytes + static_cast<int64_t>(sizeof(StageOrder));
  }
  static PoolStage at(std::byte* data, int64_t line_bytes) {
    PoolStage s;
    s.line_bytes = line_bytes, s.pieces = pieces_of(line_bytes);
    s.lines = data;
    s.order = reinterpret_cast<StageOrder*>(data + kPlaces * line_bytes);
    return s;
  }
};

}  // namespace fnx
