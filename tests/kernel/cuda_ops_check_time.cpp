// Times of the kernels at decode sizes, with weights, states and caches rotated through more memory than the L2 holds,
// beside the time their bytes take at the copy rate of the same run.
#include <algorithm>

#include "kernels/cuda/embed.h"
#include "kernels/cuda/gdn.h"
#include "kernels/cuda/moe.h"
#include "kernels/cuda/norm_hc.h"
#include "kernels/cuda/ple.h"
#include "kernels/cuda/qsa.h"
#include "kernels/cuda/sample.h"
#include "ops_check.h"

namespace fnx::check {

namespace {

double bytes_per_us = 1;

void line(const std::string& name, int64_t rows, double us, double bytes) {
  std::printf("time %-34s %5lld rows %9.2f us, floor %8.2f us\n", name.c_str(), static_cast<long long>(rows), us,
              bytes / bytes_per_us);
}

// The rate of a kernel that reads and writes a long array in 16-byte pieces.
void measure_copy() {
  const int64_t rows = 16384, n = 4, h = 2560;
  Device<float> inj(rows * n), y(rows * h), stack(rows * n * h);
  inj.zero(), y.zero(), stack.zero();
  const double us = time_launches(4, [&](int, cudaStream_t s) { cuda::hc_inject({inj, y, stack, rows, n, h}, s); });
  bytes_per_us = 4.0 * static_cast<double>(rows * h) * (2 * n + 1) / us;
  std::printf("time copy %.0f GB/s\n", bytes_per_us / 1000);
}

constexpr int64_t kPool = int64_t{96} << 20;  // halves

struct Pool {
  Device<uint16_t> halves_{check::halves(kPool, 0.02f)};
  // Weights of launch i: the pool is walked in steps of a matrix.
  const uint16_t* at(int i, int64_t count) const { return halves_ + (i * count) % (kPool - count) / 8 * 8; }
};

void time_dense(const Pool& pool, int64_t rows) {
  const int64_t n = 4, h = 2560, wide = n * h, rank = 320;
  const int reps = rows > 64 ? 4 : 24;
  Device<float> stack(normal(rows * wide)), w(normal(wide, 0.1f)), u(rows * h), inj(rows * n),
      normed(normal(rows * wide)), low(normal(rows * rank)), partials(cuda::hc_partials(rows, n, h, rank));
  Device<uint32_t> counters(4096);
  counters.zero();
  const auto params = [&](int i) {
    return cuda::HcMixParams{stack,
                             w,
                             1e-6f,
                             pool.at(3 * i, wide * rank),
                             pool.at(3 * i + 1, wide * rank),
                             pool.at(3 * i + 2, wide * n),
                             u,
                             inj,
                             rows,
                             n,
                             h,
                             rank,
                             normed,
                             low,
                             {partials, counters}};
  };
  const double x = 4.0 * static_cast<double>(rows * wide), m = 2.0 * wide * rank, r = static_cast<double>(rows);
  line("grouped_norm 4 x 2560", rows,
       time_launches(reps,
                     [&](int, cudaStream_t s) {
                       cuda::grouped_norm({stack, w, normed, rows, n, h, 1e-6f}, s);
                     }),
       2 * x);
  line("hc_down", rows, time_launches(reps, [&](int i, cudaStream_t s) { cuda::hc_down(params(i), s); }), m + x);
  line("hc_up", rows, time_launches(reps, [&](int i, cudaStream_t s) { cuda::hc_up(params(i), s); }), m + 1.25 * x);
  line("hc_mix", rows, time_launches(reps, [&](int i, cudaStream_t s) { cuda::hc_mix(params(i), s); }),
       2 * m + 1.25 * x);
  line("hc_inject", rows,
       time_launches(reps,
                     [&](int, cudaStream_t s) {
                       cuda::hc_inject({inj, u, stack, rows, n, h}, s);
                     }),
       2.25 * x);
  for (auto [out, in] : {std::pair<int64_t, int64_t>{512, h}, {48, h}, {1, h}, {10240, h}, {h, h}}) {
    Device<float> y(rows * out), p(cuda::plain_partials(rows, in, out));
    line("linear " + std::to_string(out) + " x " + std::to_string(in), rows,
         time_launches(reps,
                       [&](int i, cudaStream_t s) {
                         cuda::plain_linear(
                             {pool.at(i, out * in), DType::F16, nullptr, normed, y, rows, in, out, {p, counters}}, s);
                       }),
         2.0 * out * in + 4 * r * (in + out));
  }
  Device<float> logits(normal(rows * 512)), weights(rows * 10), slots(normal(rows * 10 * h)), sg(normal(rows));
  Device<int32_t> ids(rows * 10);
  line("router 512 top 10", rows,
       time_launches(reps,
                     [&](int, cudaStream_t s) {
                       cuda::router({logits, ids, weights, rows, 512, 10, true}, s);
                     }),
       4 * r * 532);
  line("combine 10 slots", rows,
       time_launches(reps,
                     [&](int, cudaStream_t s) {
                       cuda::combine({slots, weights, u, sg, normed, rows, 10, h}, s);
                     }),
       4 * r * 12 * h);
  line("swiglu 640", rows,
       time_launches(reps,
                     [&](int, cudaStream_t s) {
                       cuda::swiglu({slots, stack, low, rows * std::min<int64_t>(640, rank)}, s);
                     }),
       12 * r * rank);
  Device<int32_t> tokens(std::vector<int32_t>(rows, 17));
  line("embed 4 copies", rows,
       time_launches(reps,
                     [&](int, cudaStream_t s) {
                       cuda::embed({tokens, pool.at(0, 1), DType::BF16, stack, rows, n, h}, s);
                     }),
       1.125 * x);
}

// Decode: rows lanes of one row; prompts: one lane.
std::vector<int32_t> lanes_of(int64_t rows, bool prompt, int64_t start) {
  std::vector<int32_t> t;
  const auto n = static_cast<int32_t>(rows), at = static_cast<int32_t>(start);
  if (prompt) return {0, 0, n, at};
  for (int32_t i = 0; i < n; ++i) t.insert(t.end(), {i, i, 1, at});
  return t;
}

void time_state(int64_t rows) {
  const bool prompt = rows > 64;
  const int64_t kh = 16, vh = 48, taps = 4, channels = (2 * kh + vh) * 128, vd = vh * 128;
  const int64_t sets = prompt ? 1 : std::max<int64_t>(1, 40 / rows), lanes = prompt ? 1 : rows, slots = lanes * sets;
  const int reps = prompt ? 2 : 24;
  Device<int32_t> table(lanes_of(rows, prompt, 0));
  Device<float> qkv(normal(rows * channels)), z(normal(rows * vd)), b(normal(rows * vh)), a(normal(rows * vh)),
      conv(normal(channels * taps)), al(normal(vh)), dt(normal(vh)), norm(normal(128)), cs(slots * 3 * channels),
      delta(slots * vh * 128 * 128), out(rows * vd), convolved(rows * channels), gates(rows * vh * 2);
  cs.zero(), delta.zero();
  const auto params = [&](int i) {
    cuda::GdnParams p{qkv, z, b, a, out, conv, al, dt, norm, 1e-6f, false};
    p.conv_state = cs + i % sets * lanes * 3 * channels, p.delta = delta + i % sets * lanes * vh * 128 * 128;
    p.lanes = {table, lanes}, p.rows = rows, p.key_heads = kh, p.value_heads = vh, p.taps = taps;
    p.convolved = convolved, p.gates = gates;
    return p;
  };
  const double state = 8.0 * static_cast<double>(lanes * vh * 128 * 128), r = static_cast<double>(rows);
  line("gdn_conv", rows, time_launches(reps, [&](int i, cudaStream_t s) { cuda::gdn_conv(params(i), s); }),
       4 * r * 2 * channels + 4.0 * channels * (taps + 3 * lanes));
  line("gdn_recurrence", rows, time_launches(reps, [&](int i, cudaStream_t s) { cuda::gdn_recurrence(params(i), s); }),
       state + 4 * r * (channels + vd));
  line("gdn_norm", rows, time_launches(reps, [&](int i, cudaStream_t s) { cuda::gdn_norm(params(i), s); }),
       12 * r * vd);
  line("gdn", rows, time_launches(reps, [&](int i, cudaStream_t s) { cuda::gdn(params(i), s); }),
       state + 4 * r * (channels + 2 * vd));

  const int64_t n = 4, h = 2560, wide = n * h, history = 9;
  Device<float> w(normal(wide, 0.1f)), pc(normal(wide * 4)), key(normal(rows * wide)), value(normal(rows * h)),
      ps(lanes * history * wide), stack(normal(rows * wide)), gate(rows * n), normed(rows * wide), ngram(rows * h);
  ps.zero();
  line("ple_mix", rows,
       time_launches(
           reps,
           [&](int, cudaStream_t s) {
             cuda::PleMixParams p;
             p.norm_key = p.norm_query = p.norm_conv = w, p.conv = pc, p.key = key, p.value = value, p.state = ps;
             p.stack = stack, p.lanes = {table, lanes}, p.rows = rows, p.streams = n, p.hidden = h, p.taps = 4;
             p.dilation = 3, p.gate = gate, p.normed = normed;
             cuda::ple_mix(p, s);
           }),
       4.0 * wide * (5 * r + 18 * static_cast<double>(lanes)));
  Device<uint16_t> packed(halves(rows * 16 * 31, 1));
  line("ngram_decode 3 bits", rows,
       time_launches(reps,
                     [&](int, cudaStream_t s) {
                       cuda::ngram_decode({packed.get(), DType::I16, nullptr, ngram, rows, 16, 160, 3}, s);
                     }),
       r * (16 * 62 + 4 * h));
}

void time_qsa(int64_t rows, int64_t context) {
  const bool prompt = rows > 64;
  const int64_t heads = 24, kv = 2, dim = 256, ih = 4, page = 64, blocks = 512, lanes = prompt ? 1 : rows;
  const int64_t pages = (context + page - 1) / page, complete = context / 4, start = context - (prompt ? rows : 1);
  const int64_t sets = std::clamp<int64_t>(32 / lanes, 1, 16);
  const int reps = prompt ? 2 : 16;
  std::vector<int32_t> chosen(rows * blocks), pages_of(lanes * pages);
  for (int64_t i = 0; i < rows * blocks; ++i)
    chosen[i] = static_cast<int32_t>(i % blocks * std::max<int64_t>(1, (start + 1) / 4 / blocks));
  for (int64_t i = 0; i < lanes * pages; ++i) pages_of[i] = static_cast<int32_t>(i);
  const int64_t cache = lanes * pages * page * kv * dim, index_cache = lanes * pages * page / 4 * 128;
  const std::vector<uint16_t> some = halves(cache, 1, DType::BF16);
  Device<uint16_t> keys(sets * cache), values(sets * cache);
  for (int64_t i = 0; i < sets; ++i)
    for (auto* to : {&keys, &values})
      cuda(cudaMemcpy(to->get() + i * cache, some.data(), cache * 2, cudaMemcpyHostToDevice), "upload");
  std::vector<float> pooled = normal(index_cache);
  Device<float> index_keys(sets * index_cache), raw(lanes * 4 * 128), qg(normal(rows * heads * 2 * dim)),
      key(normal(rows * kv * dim)), value(normal(rows * kv * dim)), index(normal(rows * (ih + 1) * 128)),
      w(normal(dim)), freq(normal(32)), out(rows * heads * dim), scores(std::min<int64_t>(rows, 256) * complete);
  for (int64_t i = 0; i < sets; ++i)
    cuda(cudaMemcpy(index_keys + i * index_cache, pooled.data(), index_cache * 4, cudaMemcpyHostToDevice), "upload");
  raw.zero();
  Device<int32_t> selected(chosen), table(pages_of), lane_table(lanes_of(rows, prompt, start));
  cuda::QsaShape shape{rows, heads, kv, dim, ih, 128, 4, blocks, 64, page, pages, table, table, {lane_table, lanes}};
  Device<float> partials(cuda::qsa_partials(shape));
  const auto pages_at = [&](int i) {
    return cuda::QsaCache{
        DType::BF16, keys + i % sets * cache, values + i % sets * cache, index_keys + i % sets * index_cache, raw, 4};
  };
  const double r = static_cast<double>(rows);
  const std::string at = " at " + std::to_string(context);
  line("qsa_attend" + at, rows,
       time_launches(reps,
                     [&](int i, cudaStream_t s) {
                       cuda::qsa_attend({shape, pages_at(i), qg, selected, out, partials}, s);
                     }),
       r * (4.0 * kv * dim * std::min<double>(2048, static_cast<double>(context)) + 12 * heads * dim));
  const cuda::QsaSelectParams select{
      shape, pages_at(0), index, selected, complete, scores, std::min<int64_t>(rows, 256)};
  const double select_bytes = static_cast<double>(lanes) * complete * 512 + r * 2048;
  if (!prompt)
    line("qsa_scores" + at, rows,
         time_launches(reps,
                       [&](int i, cudaStream_t s) {
                         cuda::QsaSelectParams p = select;
                         p.cache = pages_at(i);
                         cuda::qsa_scores(p, 0, rows, s);
                       }),
         select_bytes);
  line("qsa_select" + at, rows,
       time_launches(reps,
                     [&](int i, cudaStream_t s) {
                       cuda::QsaSelectParams p = select;
                       p.cache = pages_at(i);
                       cuda::qsa_select(p, s);
                     }),
       select_bytes);
  line("qsa_write", rows,
       time_launches(reps,
                     [&](int i, cudaStream_t s) {
                       cuda::qsa_write(
                           {shape, pages_at(i), qg, key, value, index, freq, w, w, w, w, 1e-6f, 1e-6f, 1e-6f, 1e-6f},
                           s);
                     }),
       r * (8.0 * heads * dim + 12.0 * kv * dim + 8 * 5 * 128));
}

void time_sample(int64_t rows) {
  const int64_t v = 248320;
  Device<float> logits(normal(rows * v, 3));
  Device<int32_t> ids(rows);
  Device<uint64_t> masses(rows * v), best(rows * cuda::sample_chunks(v)), bins(rows * 4096);
  for (int kind = 0; kind < 4; ++kind) {
    std::vector<cuda::SampleRow> p(rows);
    for (int64_t r = 0; r < rows; ++r)
      p[r] = {kind == 0 ? 0.0f : 1.0f, kind == 2 ? 0.95f : 1.0f, 0, kind == 3 ? 40 : 0, 1, static_cast<uint64_t>(r), 5};
    Device<cuda::SampleRow> dp(p);
    const char* names[] = {"argmax", "sample", "sample top-p", "sample top-k"};
    line(names[kind], rows,
         time_launches(8,
                       [&](int, cudaStream_t s) {
                         cuda::sample({logits, dp, ids, rows, v, v, kind == 0, masses, best, bins}, s);
                       }),
         4.0 * static_cast<double>(rows * v));
  }
}

}  // namespace

void time_all(const std::string& only) {
  measure_copy();
  const auto wanted = [&](const char* family) { return only.empty() || only == family; };
  if (wanted("dense")) {
    const Pool pool;
    for (int64_t rows : {1, 4, 16, 4096}) time_dense(pool, rows);
  }
  if (wanted("state"))
    for (int64_t rows : {1, 4, 16, 4096}) time_state(rows);
  if (wanted("qsa")) {
    for (int64_t rows : {1, 4, 16}) time_qsa(rows, 32768);
    time_qsa(1, 262144);
    time_qsa(2048, 16384);
  }
  if (wanted("sample"))
    for (int64_t rows : {1, 16}) time_sample(rows);
}

}  // namespace fnx::check
