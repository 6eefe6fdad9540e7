// Routed experts in EXL3: slots[r, j] = down(silu(gate x_r) * (up x_r)) of expert ids[r, j].
//
// Each projection has the arithmetic of kernels/cuda/exl3_linear.h with fp32 outputs. The activation between is
// h = (g / (1 + expf(-g))) * u in fp32, rounded at each operation; h enters the down projection's rotation unrounded.
// A slot's bits depend on its row and its expert alone. Few rows: blocks of one (row, slot). Many rows: (row, slot)
// pairs are sorted by expert on the device (stable, by counting), and each expert's weights are decoded once per 96
// pairs, per 32 when experts have fewer each.
#pragma once

#include "kernels/cuda/exl3_linear.h"

namespace fnx::cuda {

// One projection of one expert; widths may differ between projections and experts.
struct Exl3Matrix {
  const uint16_t* trellis = nullptr;  // [in/16, out/16, 8 * half_bits], 16-byte aligned
  const uint16_t* suh = nullptr;      // F16 [in], 8-byte aligned
  const uint16_t* svh = nullptr;      // F16 [out], 8-byte aligned
  int half_bits = 0;                  // a width that the codebook has: checked by the loader, not by the kernels
};

struct Exl3Expert {
  Exl3Matrix gate, up, down;  // [hidden -> width], [hidden -> width], [width -> hidden]
};

// Most (row, slot) pairs that have blocks of their own; fewer when their split sums exceed the workspace' first 32 MiB.
inline constexpr int kExl3FewPairs = 768;

struct Exl3Experts {
  int64_t rows = 0, slots_per_row = 0, experts = 0;
  int64_t hidden = 0, width = 0;  // multiples of 128, at most 65536
  exl3::Codebook codebook = exl3::Codebook::Mul1;
  const Exl3Expert* table = nullptr;  // device [experts]; an expert whose gate.trellis is null is not held here
  const int32_t* ids =
      nullptr;               // I32 [rows, slots_per_row]; slots of ids outside [0, experts) or not held are not written
  const float* x = nullptr;  // F32 [rows, hidden], 16-byte aligned
  float* slots = nullptr;    // F32 [rows, slots_per_row, hidden], 16-byte aligned
  void* workspace = nullptr;  // as in Exl3Linear, and may be the same
  size_t workspace_bytes = 0;
  // The last id of every row is experts - 1. Few rows read x, and that expert, before the launch before this has ended.
  bool last_known = false;
};

// Enough for any row count up to `rows`.
size_t exl3_experts_workspace_bytes(int64_t rows, int64_t slots_per_row, int64_t experts, int64_t hidden,
                                    int64_t width);

// Throw Internal outside the domain, Device when a launch fails.
void exl3_experts(const Exl3Experts& p, CudaStream stream);       // few or many, by rows * slots_per_row
void exl3_experts_few(const Exl3Experts& p, CudaStream stream);   // up to kExl3FewPairs pairs
void exl3_experts_many(const Exl3Experts& p, CudaStream stream);  // any number of pairs

}  // namespace fnx::cuda
