#include "kernels/cuda/sample.h"

#include <cooperative_groups.h>

#include "kernels/cuda/device_math.cuh"
#include "kernels/random.h"

namespace fnx::cuda {

namespace {

namespace cg = cooperative_groups;

constexpr int kChunk = 2048, kBins = 2048;
constexpr int kCluster = 8;                     // blocks that draw for a row together
constexpr int kListed = 256;                    // candidates that one block draws from
constexpr double kUnitMass = 17592186044416.0;  // 2^44, the mass of the highest weight

// Order of candidates: by logit, NaN last; both zeros are equal.
__device__ __forceinline__ uint32_t rank_of(float x) {
  if (isnan(x)) return 0;
  const uint32_t bits = x == 0 ? 0u : __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float logit_of(uint32_t rank) {
  return __uint_as_float(rank & 0x80000000u ? rank ^ 0x80000000u : ~rank);
}
// Rank above, id below: the greatest is the highest-ranked candidate of lowest id.
__device__ __forceinline__ uint64_t candidate(float x, int id) {
  return uint64_t{rank_of(x)} << 32 | ~static_cast<uint32_t>(id);
}
__device__ __forceinline__ int id_of(uint64_t candidate) { return static_cast<int>(~static_cast<uint32_t>(candidate)); }

__device__ __forceinline__ uint64_t mass_of(float x, float highest, float temperature) {
  const double w = exp((static_cast<double>(x) - static_cast<double>(highest)) / static_cast<double>(temperature));
  return isnan(w) ? 0 : static_cast<uint64_t>(w * kUnitMass + 0.5);
}

template <int kWarps, class Merge>
__device__ __forceinline__ uint64_t block_merge(uint64_t v, uint64_t* shared, Merge merge) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) v = merge(v, static_cast<uint64_t>(__shfl_xor_sync(kFullWarp, v, d)));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
  __syncthreads();
  v = shared[0];
  for (int w = 1; w < kWarps; ++w) v = merge(v, shared[w]);
  __syncthreads();  // a caller may write `shared` at once
  return v;
}
struct Greater {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};
struct Lesser {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a < b ? a : b; }
};
struct Plus {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};

// The best of all chunks of a row.
template <int kWarps>
__device__ uint64_t best_of(const SampleLaunch& p, int64_t row, uint64_t* shared) {
  const int chunks = static_cast<int>((p.valid + kChunk - 1) / kChunk);
  uint64_t best = 0;
  for (int i = threadIdx.x; i < chunks; i += 32 * kWarps) best = Greater{}(best, p.best[row * chunks + i]);
  return block_merge<kWarps>(best, shared, Greater{});
}

// A row's coarse histogram: masses by the high 11 bits of the rank, then counts.
__device__ __forceinline__ uint64_t* bins_of(const SampleLaunch& p, int64_t row) { return p.bins + row * 2 * kBins; }

// blockIdx: chunk, row. Clears the row's histogram for mass_kernel.
__global__ void __launch_bounds__(256) best_kernel(SampleLaunch p) {
  __shared__ uint64_t shared[8];
  wait_previous();
  const float* logits = p.logits + blockIdx.y * p.vocabulary;
  const int first = blockIdx.x * kChunk;
  uint64_t best = 0;
#pragma unroll
  for (int i = 0; i < kChunk / 256; ++i) {
    const int id = first + i * 256 + threadIdx.x;
    if (id < p.valid) best = Greater{}(best, candidate(logits[id], id));
  }
  best = block_merge<8>(best, shared, Greater{});
  if (threadIdx.x == 0) p.best[int64_t{blockIdx.y} * gridDim.x + blockIdx.x] = best;
  if (!p.greedy && blockIdx.x == 0)
    for (int i = threadIdx.x; i < 2 * kBins; i += 256) bins_of(p, blockIdx.y)[i] = 0;
}

__global__ void __launch_bounds__(128) greedy_kernel(SampleLaunch p) {
  __shared__ uint64_t shared[4];
  wait_previous();
  const uint64_t best = best_of<4>(p, blockIdx.x, shared);
  if (threadIdx.x == 0) p.ids[blockIdx.x] = id_of(best);
}

__device__ __forceinline__ void add_to(uint64_t* bin, uint64_t amount) {
  atomicAdd(reinterpret_cast<unsigned long long*>(bin), static_cast<unsigned long long>(amount));
}

// blockIdx: chunk, row. Masses, and the row's coarse histogram.
__global__ void __launch_bounds__(256) mass_kernel(SampleLaunch p) {
  __shared__ uint64_t shared[8], bins[kBins];
  __shared__ uint32_t counts[kBins];
  wait_previous();
  const float temperature = p.rows[blockIdx.y].temperature;
  if (temperature <= 0) return;
  const float* logits = p.logits + blockIdx.y * p.vocabulary;
  for (int i = threadIdx.x; i < kBins; i += 256) bins[i] = 0, counts[i] = 0;
  const float highest = logits[id_of(best_of<8>(p, blockIdx.y, shared))];
#pragma unroll
  for (int i = 0; i < kChunk / 256; ++i) {
    const int id = blockIdx.x * kChunk + i * 256 + threadIdx.x;
    if (id >= p.valid) break;
    const uint64_t mass = mass_of(logits[id], highest, temperature);
    const uint32_t bin = rank_of(logits[id]) >> 21;
    p.masses[blockIdx.y * p.valid + id] = mass;
    if (mass > 0) add_to(bins + bin, mass);
    atomicAdd(counts + bin, 1u);
  }
  __syncthreads();
  uint64_t* to = bins_of(p, blockIdx.y);
  for (int i = threadIdx.x; i < kBins; i += 256)
    if (counts[i] > 0) add_to(to + i, bins[i]), add_to(to + kBins + i, counts[i]);
}

struct Shared {
  uint64_t bins[kBins], totals[kBins];  // of this block, of the row
  uint64_t sums[32];
  uint64_t value;  // this block's part of a sum over the cluster
  uint64_t want;
  uint32_t bin;
  uint32_t listed;  // in `bins` of the cluster's first block
  int id;
};

// A block's candidates of a row: ids [first, last), the blocks of the cluster ascending.
template <int kThreads>
struct Row {
  const float* logits = nullptr;
  const uint64_t* masses = nullptr;
  const uint64_t* coarse = nullptr;  // bins_of
  int first = 0, last = 0;
  // fn(rank, id) for every candidate of this thread, several logits in flight.
  template <class Fn>
  __device__ void each(Fn fn) const {
    constexpr int kBatch = 8;
    for (int i0 = first + threadIdx.x; i0 < last; i0 += kBatch * kThreads) {
      float x[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) x[j] = i0 + j * kThreads < last ? logits[i0 + j * kThreads] : 0.0f;
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (i0 + j * kThreads < last) fn(rank_of(x[j]), i0 + j * kThreads);
    }
  }
};

// Merge over the cluster of a value that each thread of a block holds.
template <class Merge>
__device__ uint64_t cluster_merge(uint64_t v, Shared& shared, Merge merge) {
  const cg::cluster_group cluster = cg::this_cluster();
  if (threadIdx.x == 0) shared.value = v;
  cluster.sync();
  v = *cluster.map_shared_rank(&shared.value, 0);
  for (unsigned b = 1; b < kCluster; ++b) v = merge(v, *cluster.map_shared_rank(&shared.value, b));
  cluster.sync();
  return v;
}

// Each block adds up its share of the bins and hands the totals to all.
__device__ void merge_bins(Shared& shared) {
  constexpr int kShare = kBins / kCluster;
  const cg::cluster_group cluster = cg::this_cluster();
  cluster.sync();
  if (threadIdx.x < kShare) {
    const int bin = static_cast<int>(cluster.block_rank()) * kShare + threadIdx.x;
    uint64_t sum = 0;
#pragma unroll 4
    for (unsigned b = 0; b < kCluster; ++b) sum += cluster.map_shared_rank(shared.bins, b)[bin];
#pragma unroll 1
    for (unsigned b = 0; b < kCluster; ++b) cluster.map_shared_rank(shared.totals, b)[bin] = sum;
  }
  cluster.sync();
}

// Sum of the values of this thread and of those before it in the block.
__device__ uint64_t sum_up_to(uint64_t v, Shared& shared) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint64_t below = __shfl_up_sync(kFullWarp, v, d);
    if (lane >= d) v += below;
  }
  if (lane == 31) shared.sums[threadIdx.x / 32] = v;
  __syncthreads();
  return v + before_warp(shared.sums);
}

// A place in the order of candidates: a rank, and the amount within it, from 1.
struct Place {
  uint32_t rank = 0;
  uint64_t into = 0;
};

// Where the running amount (candidates, or their masses of least_mass and more) first reaches `want`, from the highest
// rank down. Integers, so the order of the additions does not matter.
template <bool kMass, int kThreads>
__device__ Place descend(const Row<kThreads>& row, uint64_t least_mass, uint64_t want, Shared& shared) {
  constexpr int kThreadBins = kBins / kThreads;
  const int tid = threadIdx.x;
  uint32_t prefix = 0;
  for (int pass = 0; pass < 3; ++pass) {
    const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, width = pass == 2 ? 10 : 11;
    const bool known = pass == 0 && least_mass == 0;
    if (!known) {
      for (int i = tid; i < kBins; i += kThreads) shared.bins[i] = 0;
      __syncthreads();
      row.each([&](uint32_t rank, int id) {
        if (pass > 0 && rank >> (shift + width) != prefix) return;
        const uint64_t amount = kMass ? row.masses[id] : 1;
        if (amount > 0 && (!kMass || amount >= least_mass))
          add_to(shared.bins + (rank >> shift & ((1u << width) - 1)), amount);
      });
      merge_bins(shared);
    }
    const uint64_t* totals = known ? row.coarse + (kMass ? 0 : kBins) : shared.totals;
    const int high = kBins - 1 - kThreadBins * tid;  // the highest bins first
    uint64_t own[kThreadBins], sum = 0;
#pragma unroll
    for (int i = 0; i < kThreadBins; ++i) sum += own[i] = totals[high - i];
    uint64_t before = sum_up_to(sum, shared) - sum;
#pragma unroll
    for (int i = 0; i < kThreadBins; ++i) {
      if (before < want && want <= before + own[i]) shared.bin = high - i, shared.want = want - before;
      before += own[i];
    }
    __syncthreads();
    prefix = prefix << width | shared.bin;
    want = shared.want;
    __syncthreads();
  }
  return {prefix, want};
}

// Mass of all candidates of the row.
template <int kThreads>
__device__ uint64_t whole_mass(const Row<kThreads>& row, Shared& shared) {
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kBins / kThreads; ++i) sum += row.coarse[i * kThreads + threadIdx.x];
  return block_merge<kThreads / 32>(sum, shared.sums, Plus{});
}

// Mass of the candidates above a rank, of least_mass and more.
template <int kThreads>
__device__ uint64_t mass_above(const Row<kThreads>& row, uint32_t rank, uint64_t least_mass, Shared& shared) {
  uint64_t sum = 0;
  row.each([&](uint32_t r, int id) {
    if (r <= rank) return;
    const uint64_t mass = row.masses[id];
    if (mass >= least_mass) sum += mass;
  });
  return cluster_merge(block_merge<kThreads / 32>(sum, shared.sums, Plus{}), shared, Plus{});
}

// The id of the index-th candidate of a rank, ids ascending.
template <int kThreads>
__device__ int id_at(const Row<kThreads>& row, uint32_t rank, int index, Shared& shared) {
  if (threadIdx.x == 0) shared.id = INT32_MAX;
  __syncthreads();
  if (index == 0) {
    row.each([&](uint32_t r, int id) {
      if (r == rank) atomicMin(&shared.id, id);
    });
  } else {
    const cg::cluster_group cluster = cg::this_cluster();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int run = (row.last - row.first + kThreads - 1) / kThreads * 32, from = row.first + warp * run;
    int count = 0;
#pragma unroll 8
    for (int i = from + lane; i < from + run; i += 32)
      count += __popc(__ballot_sync(kFullWarp, i < row.last && rank_of(row.logits[i]) == rank));
    if (lane == 0) shared.sums[warp] = count;
    __syncthreads();
    int before = static_cast<int>(before_warp(shared.sums));
    if (warp == kThreads / 32 - 1 && lane == 0) shared.value = before + count;
    cluster.sync();
    for (unsigned b = 0; b < cluster.block_rank(); ++b)
      before += static_cast<int>(*cluster.map_shared_rank(&shared.value, b));
    cluster.sync();
    if (before <= index && index < before + count)
      for (int i = from + lane; i < from + run; i += 32) {
        const bool equal = i < row.last && rank_of(row.logits[i]) == rank;
        const unsigned all = __ballot_sync(kFullWarp, equal);
        if (equal && before + __popc(all & ((1u << lane) - 1)) == index) shared.id = i;
        before += __popc(all);
      }
  }
  __syncthreads();
  return static_cast<int>(cluster_merge(static_cast<uint64_t>(shared.id), shared, Lesser{}));
}

__device__ __forceinline__ uint64_t least_mass_of(const SampleRow& s) {
  return static_cast<uint64_t>(fmin(ceil(static_cast<double>(s.min_p) * kUnitMass), 2 * kUnitMass));
}
__device__ __forceinline__ uint64_t top_p_mass(const SampleRow& s, uint64_t total) {
  return min(total, static_cast<uint64_t>(fmax(ceil(static_cast<double>(s.top_p) * static_cast<double>(total)), 1.0)));
}
__device__ __forceinline__ uint64_t drawn_mass(const SampleRow& s, uint64_t total) {
  const double u = uniform(s.seed, s.stream, static_cast<uint64_t>(s.position));
  return min(total, static_cast<uint64_t>(u * static_cast<double>(total)) + 1);
}

// Draws from the top_k candidates, the last of which has rank `least`: the cluster's first block puts them in order, so
// that filters and draw are places in running sums, as over all candidates. False when too many have a rank as high.
template <int kThreads, class MassAt>
__device__ bool draw_listed(const Row<kThreads>& row, const SampleRow& s, uint32_t least, MassAt mass_at,
                            Shared& shared, int& id) {
  static_assert(kListed <= kThreads && kListed <= kBins);
  const cg::cluster_group cluster = cg::this_cluster();
  Shared& first = *cluster.map_shared_rank(&shared, 0);
  row.each([&](uint32_t rank, int i) {
    if (rank < least) return;
    const uint32_t at = atomicAdd(&first.listed, 1u);
    if (at < kListed) first.bins[at] = uint64_t{rank} << 32 | ~static_cast<uint32_t>(i);
  });
  cluster.sync();
  const auto count = static_cast<int>(first.listed);
  cluster.sync();  // the first block may go, and with it the count
  if (count > kListed) return false;
  if (cluster.block_rank() > 0) return true;
  const int tid = threadIdx.x;
  if (tid < count) {
    const uint64_t own = shared.bins[tid];
    int place = 0;
    for (int j = 0; j < count; ++j) place += shared.bins[j] > own;
    shared.totals[place] = own;
  }
  __syncthreads();
  const uint64_t own = tid < s.top_k ? shared.totals[tid] : 0;
  uint64_t mass = tid < s.top_k ? mass_at(static_cast<uint32_t>(own >> 32)) : 0;
  uint64_t sum = sum_up_to(mass, shared);
  // The sum over all, and then the thread whose part of the running sum holds `want`, if any.
  const auto total_of = [&] {
    if (tid == kThreads - 1) shared.value = sum;
    __syncthreads();
    return shared.value;
  };
  const auto holds = [&](uint64_t want) { return sum - mass < want && want <= sum; };
  uint64_t total = total_of();
  if (s.top_p < 1 && total > 0) {
    if (holds(top_p_mass(s, total))) shared.bin = tid, shared.want = sum;
    __syncthreads();
    if (tid > static_cast<int>(shared.bin)) mass = 0;
    sum = min(sum, shared.want);
    total = shared.want;
  }
  if (s.min_p > 0 && total > 0) {
    if (mass < least_mass_of(s)) mass = 0;
    sum = sum_up_to(mass, shared);
    total = total_of();
  }
  if (total > 0) {
    if (holds(drawn_mass(s, total))) shared.id = id_of(own);
    __syncthreads();
    id = shared.id;
  }
  return true;
}

// blockIdx: block of the row's cluster, row.
template <int kThreads>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1024 / kThreads)
    draw_kernel(SampleLaunch p) {
  __shared__ Shared shared;
  if (threadIdx.x == 0) shared.listed = 0;  // for all, behind the first pass of descend()
  wait_previous();
  const SampleRow& s = p.rows[blockIdx.y];
  const int valid = static_cast<int>(p.valid), share = (valid + kCluster - 1) / kCluster;
  const Row<kThreads> row{p.logits + blockIdx.y * p.vocabulary, p.masses + blockIdx.y * p.valid, bins_of(p, blockIdx.y),
                          min(valid, static_cast<int>(blockIdx.x) * share),
                          min(valid, static_cast<int>(blockIdx.x + 1) * share)};
  const int best = id_of(best_of<kThreads / 32>(p, blockIdx.y, shared.sums));
  int id = best;
  if (s.temperature > 0) {
    const float highest = row.logits[best];
    const auto mass_at = [&](uint32_t rank) { return mass_of(logit_of(rank), highest, s.temperature); };
    // The last rank that is kept, and how many of its candidates.
    Place last{0, static_cast<uint64_t>(valid)};
    uint64_t total = whole_mass(row, shared);
    if (s.top_k > 0 && s.top_k < valid && total > 0) {
      last = descend<false>(row, 0, s.top_k, shared);
      if (s.top_k <= kListed && draw_listed(row, s, last.rank, mass_at, shared, id)) {
        if (blockIdx.x == 0 && threadIdx.x == 0) p.ids[blockIdx.y] = id;
        return;
      }
      total = mass_above(row, last.rank, 0, shared) + last.into * mass_at(last.rank);
    }
    if (s.top_p < 1 && total > 0) {
      const uint64_t want = top_p_mass(s, total);
      const Place place = descend<true>(row, 0, want, shared);
      const uint64_t each = mass_at(place.rank);
      last = {place.rank, (place.into - 1) / each + 1};
      total = want - place.into + last.into * each;
    }
    uint64_t least = 0;
    if (s.min_p > 0 && total > 0) {
      least = least_mass_of(s);
      const uint64_t each = mass_at(last.rank);
      total = mass_above(row, last.rank, least, shared) + (each >= least ? last.into * each : 0);
    }
    if (total > 0) {
      const Place place = descend<true>(row, least, drawn_mass(s, total), shared);
      id = id_at(row, place.rank, static_cast<int>((place.into - 1) / mass_at(place.rank)), shared);
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) p.ids[blockIdx.y] = id;
}

}  // namespace

int64_t sample_chunks(int64_t valid) { return (valid + kChunk - 1) / kChunk; }

void sample(const SampleLaunch& p, cudaStream_t stream) {
  require(p.valid >= 1 && p.valid <= p.vocabulary && p.vocabulary < (int64_t{1} << 31) - kChunk && p.count >= 0 &&
              p.count < 65536,
          "sample", "1 <= valid <= V < 2^31 and fewer than 65536 rows (valid, V, rows)",
          {p.valid, p.vocabulary, p.count});
  if (p.count == 0) return;
  const auto rows = static_cast<unsigned>(p.count);
  const dim3 chunks(static_cast<unsigned>(sample_chunks(p.valid)), rows);
  launch("sample", best_kernel, chunks, 256, 0, stream, p);
  if (p.greedy) {
    launch("sample", greedy_kernel, rows, 128, 0, stream, p);
  } else {
    launch("sample", mass_kernel, chunks, 256, 0, stream, p);
    // Fewer threads where the candidates are few; their number changes no sum, for sums are of integers.
    constexpr int64_t kFewCandidates = 32768;
    const bool few = p.valid <= kFewCandidates;
    launch("sample", few ? draw_kernel<256> : draw_kernel<1024>, dim3(kCluster, rows), few ? 256 : 1024, 0, stream, p);
  }
}

}  // namespace fnx::cuda
