// Checks, plans and launches of the EXL3 linear.
#include "kernels/cuda/exl3_linear.h"

#include <algorithm>

#include "kernels/cuda/exl3_few.cuh"
#include "kernels/cuda/exl3_many.cuh"
#include "kernels/cuda/exl3_plan.h"
#include "kernels/cuda/exl3_rotate.cuh"

namespace fnx::cuda {

namespace {

// Most bytes of decoded weights at a time.
constexpr int64_t kScratchBytes = 64 << 20;
// Most 128-blocks of input, rows included, that a few-row block rotates itself.
constexpr int64_t kInsideBlocks = 24;

int64_t chunk_columns(int64_t in, int64_t out) {
  return std::min(out, std::max<int64_t>(128, kScratchBytes / (2 * in) / 128 * 128));
}

size_t rotated_bytes(int64_t in, int64_t rows) { return aligned256(rows * in * 2); }
struct Workspace {
  size_t rotated = kExchangeBytes, scratch, bytes;  // offsets; scratch is decoded weights
};
Workspace few_workspace(int64_t in, int64_t rows) {
  Workspace w;
  w.scratch = w.bytes = w.rotated + rotated_bytes(in, rows);
  return w;
}
Workspace many_workspace(int64_t in, int64_t out, int64_t rows) {
  Workspace w = few_workspace(in, rows);
  w.bytes = w.scratch + aligned256(in * chunk_columns(in, out) * 2);
  return w;
}
// Bytes of the exchange that a launch takes.
int64_t sums_bytes(const Exl3Weight& w, int64_t rows) { return 4 * rows * (w.splits - 1) * w.out; }
bool few_fits(int64_t bytes, int64_t rows) {
  return rows <= kExl3FewRows && bytes <= static_cast<int64_t>(kExchangeBytes);
}
// Rotating in every block costs less than a launch while the blocks of a split have few 128-blocks of input.
bool rotates_inside(const Exl3Weight& w, int64_t rows) {
  return w.splits > 1 && rows <= 8 && rows * (w.in / 128) <= kInsideBlocks * w.splits;
}

std::string shape_text(const Exl3Weight& w) {
  return "EXL3 linear " + std::to_string(w.in) + " x " + std::to_string(w.out) + ", " +
         std::to_string(w.half_bits / 2.0).substr(0, 3) + " bits, " + exl3::codebook_name(w.codebook);
}

void check_weight(const Exl3Weight& w) {
  if (w.in <= 0 || w.in % 128 != 0 || w.in > 65536 || w.out <= 0 || w.out % 128 != 0 || w.out > kMostColumns)
    refuse(shape_text(w) + ": in and out must be multiples of 128, at most 65536 and " + std::to_string(kMostColumns));
  if (!exl3::width_supported(w.codebook, w.half_bits)) refuse(shape_text(w) + ": the codebook has no such width");
  if (w.splits < 1 || w.splits > std::min<int64_t>(kMostSplits, w.in / 32))
    refuse(shape_text(w) + ": " + std::to_string(w.splits) + " splits");
  check_aligned("trellis", w.trellis, 16), check_aligned("suh", w.suh, 8), check_aligned("svh", w.svh, 8);
  if (w.bias != nullptr) check_aligned("bias", w.bias, 16);
}

void check_linear(const Exl3Linear& p, const char* entry, int64_t most_rows, size_t bytes) {
  check_weight(p.weight);
  if (p.rows < 1 || p.rows > most_rows)
    refuse(std::string(entry) + " takes 1 to " + std::to_string(most_rows) + " rows, not " + std::to_string(p.rows));
  if (p.y_dtype != DType::F32 && p.y_dtype != DType::BF16)
    refuse(std::string(entry) + ": output of dtype " + dtype_name(p.y_dtype) + ", not F32 or BF16");
  check_aligned("x", p.x, 16), check_aligned("y", p.y, 16), check_aligned("workspace", p.workspace, 256);
  if (p.workspace_bytes < bytes)
    refuse(std::string(entry) + ": workspace of " + std::to_string(p.workspace_bytes) + " bytes, " +
           std::to_string(bytes) + " needed");
}

// The same rows with the scales of some matrices.
struct Rotations {
  int64_t rows, in;
  const float* x;
  int count = 0;
  const uint16_t* suh[kExl3Linears];
  uint16_t* xh[kExl3Linears];
};

// Grid: (warps of 128-blocks, matrices).
__global__ void __launch_bounds__(kRotateThreads) exl3_rotate_kernel(const Rotations p) {
  wait_for_previous();
  let_next_start();
  const int64_t blocks = p.in / 128, i = int64_t{blockIdx.x} * (kRotateThreads / 32) + threadIdx.x / 32;
  if (i >= p.rows * blocks) return;
  const int64_t row = i / blocks;
  rotate_row_block(p.x, p.suh[blockIdx.y], p.xh[blockIdx.y], p.in, p.rows, row, row, i % blocks, threadIdx.x % 32);
}

void rotate(const Rotations& p, cudaStream_t stream) {
  const int64_t warps = p.rows * (p.in / 128), per_block = kRotateThreads / 32;
  launch("exl3_rotate_kernel", exl3_rotate_kernel,
         dim3(static_cast<unsigned>((warps + per_block - 1) / per_block), p.count), kRotateThreads, 0, true, stream, p);
}
void rotate(const Exl3Rotate& p, cudaStream_t stream) {
  rotate(Rotations{p.rows, p.in, p.x, 1, {p.suh}, {p.xh}}, stream);
}

// Calls f.template operator()<Book, HalfBits>() for the weight's pair.
template <class F>
void with_weight(const Exl3Weight& w, F f) {
  const auto book = [&]<exl3::Codebook Book>() {
    with_width<Book>(w.half_bits, [&]<int HalfBits>() { f.template operator()<Book, HalfBits>(); });
  };
  switch (w.codebook) {
    case exl3::Codebook::ThreeInst:
      return book.template operator()<exl3::Codebook::ThreeInst>();
    case exl3::Codebook::Mcg:
      return book.template operator()<exl3::Codebook::Mcg>();
    case exl3::Codebook::Mul1:
      return book.template operator()<exl3::Codebook::Mul1>();
  }
}

void decode(const Exl3Weight& w, const DecodeArgs& a, cudaStream_t stream) {
  with_weight(w, [&]<exl3::Codebook Book, int HalfBits>() { launch_decode<Book, HalfBits>(a, stream); });
}

// Linears of the same x, whose sums fit the exchange together.
void launch_few(std::span<const Exl3Linear> list, cudaStream_t stream) {
  const Exl3Linear& first = list[0];
  auto* base = static_cast<std::byte*>(first.workspace);
  Rotations rotations{first.rows, first.weight.in, first.x, 0, {}, {}};
  for (const Exl3Linear& p : list) {
    if (rotates_inside(p.weight, p.rows)) continue;
    rotations.suh[rotations.count] = p.weight.suh;
    rotations.xh[rotations.count] =
        reinterpret_cast<uint16_t*>(base + kExchangeBytes + rotations.count * rotated_bytes(p.weight.in, p.rows));
    ++rotations.count;
  }
  if (rotations.count > 0) rotate(rotations, stream);
  uint32_t* exchange = reinterpret_cast<uint32_t*>(base);
  int rotated = 0;
  for (const Exl3Linear& p : list) {
    const Exl3Weight& w = p.weight;
    const bool inside = rotates_inside(w, p.rows);
    const FewArgs a{w.trellis,
                    inside ? p.x : nullptr,
                    w.suh,
                    inside ? nullptr : rotations.xh[rotated++],
                    w.svh,
                    w.bias,
                    p.y,
                    exchange,
                    w.in,
                    w.out,
                    static_cast<int>(p.rows),
                    w.splits,
                    split_begins(w.in, w.splits),
                    p.y_dtype == DType::BF16,
                    &p != &first};
    with_weight(w, [&]<exl3::Codebook Book, int HalfBits>() { launch_few<Book, HalfBits>(a, stream); });
    exchange += sums_bytes(w, p.rows) / 4;
  }
}

}  // namespace

int exl3_splits(int64_t in, int64_t out) { return plan_splits(in, out / 128); }

size_t exl3_workspace_bytes(int64_t in, int64_t out, int64_t rows) { return many_workspace(in, out, rows).bytes; }

void exl3_rotate(const Exl3Rotate& p, CudaStream stream) {
  if (p.rows < 1 || p.in <= 0 || p.in % 128 != 0)
    refuse("EXL3 rotation of " + std::to_string(p.rows) + " rows of " + std::to_string(p.in) +
           ": needs rows, and a multiple of 128 inputs");
  check_aligned("x", p.x, 16), check_aligned("suh", p.suh, 8), check_aligned("xh", p.xh, 8);
  rotate(p, stream);
}

void exl3_decode(const Exl3Weight& w, uint16_t* out, CudaStream stream) {
  check_weight(w);
  decode(w, {w.trellis, nullptr, out, w.in, w.out, 0, static_cast<int>(w.out / 16)}, stream);
}

void exl3_linear_few(const Exl3Linear& p, CudaStream stream) {
  const Exl3Weight& w = p.weight;
  const Workspace at = few_workspace(w.in, p.rows);
  check_linear(p, "exl3_linear_few", kExl3FewRows, at.bytes);
  if (!few_fits(sums_bytes(w, p.rows), p.rows))
    refuse("exl3_linear_few: the sums of " + std::to_string(w.splits) + " splits of " + std::to_string(p.rows) +
           " rows of " + std::to_string(w.out) + " exceed the exchange; exl3_linear takes them");
  launch_few({&p, 1}, stream);
}

void exl3_linear_many(const Exl3Linear& p, CudaStream stream) {
  const Exl3Weight& w = p.weight;
  const Workspace at = many_workspace(w.in, w.out, p.rows);
  check_linear(p, "exl3_linear_many", int64_t{1} << 24, at.bytes);
  auto* base = static_cast<std::byte*>(p.workspace);
  auto* xh = reinterpret_cast<uint16_t*>(base + at.rotated);
  auto* weights = reinterpret_cast<uint16_t*>(base + at.scratch);
  rotate({p.rows, w.in, p.x, w.suh, xh}, stream);
  const int64_t chunk = chunk_columns(w.in, w.out);
  for (int64_t column = 0; column < w.out; column += chunk) {
    const int first = static_cast<int>(column / 16), count = static_cast<int>(std::min(chunk, w.out - column) / 16);
    decode(w, {w.trellis, weights, nullptr, w.in, w.out, first, count}, stream);
    launch_many(
        {weights, xh, w.svh, w.bias, p.y, w.in, w.out, p.rows, first, count, w.splits, p.y_dtype == DType::BF16},
        stream);
  }
}

void exl3_linear(const Exl3Linear& p, CudaStream stream) {
  few_fits(sums_bytes(p.weight, p.rows), p.rows) ? exl3_linear_few(p, stream) : exl3_linear_many(p, stream);
}

size_t exl3_linears_workspace_bytes(std::span<const Exl3Weight> weights, int64_t rows) {
  size_t bytes = 0;
  for (const Exl3Weight& w : weights) bytes = std::max(bytes, exl3_workspace_bytes(w.in, w.out, rows));
  return std::max(bytes, kExchangeBytes + weights.size() * rotated_bytes(weights[0].in, rows));
}

void exl3_linears(std::span<const Exl3Linear> list, CudaStream stream) {
  if (list.empty() || list.size() > kExl3Linears)
    refuse("exl3_linears takes 1 to " + std::to_string(kExl3Linears) + " matrices, not " + std::to_string(list.size()));
  int64_t sums = 0;
  for (const Exl3Linear& p : list) {
    check_linear(p, "exl3_linears", int64_t{1} << 24,
                 kExchangeBytes + list.size() * rotated_bytes(p.weight.in, p.rows));
    if (p.x != list[0].x || p.rows != list[0].rows || p.weight.in != list[0].weight.in ||
        p.workspace != list[0].workspace)
      refuse(shape_text(p.weight) + ": not of the rows and workspace of the first of exl3_linears");
    sums += sums_bytes(p.weight, p.rows);
  }
  if (few_fits(sums, list[0].rows)) return launch_few(list, stream);
  for (const Exl3Linear& p : list) exl3_linear(p, stream);
}

}  // namespace fnx::cuda
