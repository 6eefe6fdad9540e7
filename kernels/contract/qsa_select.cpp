// Selection of index blocks: the chosen must score at least what the others do, but for rounding; equal keys by number.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/contract/entry.h"
#include "kernels/contract/families.h"
#include "kernels/contract/lanes.h"
#include "kernels/contract/qsa_site.h"

namespace fnx::contract {

namespace {

const double kScale = 1.0 / std::sqrt(128.0);

const float* key_of(const Problem& p, const QsaSizes& s, int32_t slot, int64_t block) {
  return p["index_keys"].as<float>() + block_place(p, s, slot, block) * kIndexDim;
}

// A block's score: dot products of 16 fused steps a lane and a butterfly, relu (of a NaN: 0), heads ascending, scale.
Bounded score(const float* queries, const float* key, int64_t heads) {
  double total = 0, error = 0;
  for (int64_t h = 0; h < heads; ++h) {
    double sum = 0, size = 0;
    for (int64_t i = 0; i < kIndexDim; ++i) {
      const double term = double{queries[h * kIndexDim + i]} * double{key[i]};
      sum += term;
      size += std::abs(term);
    }
    if (std::isnan(sum)) continue;
    total += std::max(0.0, sum);
    if (std::isfinite(sum)) error += gamma(20) * size;
  }
  if (!std::isfinite(total)) return {total, 0};
  return {total * kScale, (error + gamma(static_cast<double>(heads) + 3) * total) * kScale + 0x1p-140};
}

std::string row_choice(const Problem& p, const QsaSizes& s, const QsaRow& row, const int32_t* ids) {
  const int64_t complete = (row.position + 1) / s.ratio, count = std::min(s.blocks, complete);
  const auto bad = [&](int64_t j, const std::string& what) {
    return "selected[" + std::to_string(row.row) + ", " + std::to_string(j) + "] is " + std::to_string(ids[j]) + what;
  };
  std::vector<uint8_t> taken(static_cast<size_t>(complete), 0);
  for (int64_t j = 0; j < s.blocks; ++j) {
    if (j >= count ? ids[j] != -1 : ids[j] < 0 || ids[j] >= complete || (j > 0 && ids[j] <= ids[j - 1]))
      return bad(j, ", of " + std::to_string(complete) + " complete blocks");
    if (j < count) taken[static_cast<size_t>(ids[j])] = 1;
  }
  if (count == complete) return "";
  std::vector<Bounded> scores;
  std::vector<const float*> keys;
  // The best of those left out, and of those of one key the lowest left out.
  int64_t best = -1;
  for (int64_t b = 0; b < complete; ++b) {
    keys.push_back(key_of(p, s, row.slot, b));
    scores.push_back(score(p["index"].as<float>() + row.row * s.index_width(), keys.back(), s.index_heads));
    const Bounded left = scores.back();
    if (taken[static_cast<size_t>(b)] == 0 &&
        (best < 0 ||
         left.value - left.error > scores[static_cast<size_t>(best)].value - scores[static_cast<size_t>(best)].error))
      best = b;
  }
  const Bounded most = scores[static_cast<size_t>(best)];
  for (int64_t j = 0; j < count; ++j) {
    const Bounded mine = scores[static_cast<size_t>(ids[j])];
    if (most.value - most.error > mine.value + mine.error) return bad(j, " before " + std::to_string(best));
    // Certain ties: equal keys, and what is infinite.
    for (int64_t other = 0; other < ids[j]; ++other)
      if (taken[static_cast<size_t>(other)] == 0 && scores[static_cast<size_t>(other)].value == mine.value &&
          (!std::isfinite(mine.value) ||
           std::memcmp(keys[static_cast<size_t>(other)], keys[static_cast<size_t>(ids[j])],
                       kIndexDim * sizeof(float)) == 0))
        return bad(j, " before " + std::to_string(other));
  }
  return "";
}

std::string select_choices(const Problem& given, const Problem& done) {
  const QsaSizes s(given);
  for (const QsaRow& row : rows_of(given)) {
    const std::string what = row_choice(given, s, row, done["selected"].as<int32_t>() + row.row * s.blocks);
    if (!what.empty()) return what;
  }
  return "";
}

enum class Fault : uint8_t { None, HigherIdOnTies, NoRelu, OneFewerBlock };

void select_host(Problem& p, Fault fault) {
  const QsaSizes s(p);
  for (const QsaRow& row : rows_of(p)) {
    const int64_t complete = (row.position + 1) / s.ratio - (fault == Fault::OneFewerBlock ? 1 : 0);
    const int64_t count = std::min(s.blocks, complete);
    const float* queries = p["index"].as<float>() + row.row * s.index_width();
    std::vector<float> scores;
    for (int64_t b = 0; b < complete; ++b) {
      const float* key = key_of(p, s, row.slot, b);
      float total = 0;
      for (int64_t h = 0; h < s.index_heads; ++h) {
        float sum = 0;
        for (int64_t i = 0; i < kIndexDim; ++i) sum += queries[h * kIndexDim + i] * key[i];
        total += fault == Fault::NoRelu ? sum : sum > 0 ? sum : 0.0f;
      }
      const float v = total * static_cast<float>(kScale);
      scores.push_back(std::isnan(v) ? -1.0f : v);
    }
    std::vector<int32_t> order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    if (fault == Fault::HigherIdOnTies) std::reverse(order.begin(), order.end());
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
    });
    order.resize(static_cast<size_t>(count));
    std::sort(order.begin(), order.end());
    int32_t* to = p["selected"].as<int32_t>() + row.row * s.blocks;
    std::fill(to, to + s.blocks, -1);
    std::copy(order.begin(), order.end(), to);
  }
}

Problem select_make(const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
  Problem p{rows, shape.numbers, {}};
  const QsaSizes s(p);
  Random random(seed, 1);
  fill(p.add("index", DType::F32, Role::In, true, {rows, s.index_heads + 1, kIndexDim}).as<float>(), rows,
       s.index_width(), kind, {-30, 10}, Random(seed, 2));
  const int64_t pages = add_pages(p, rows, random), blocks = pages * s.per_page();
  float* keys = p.add("index_keys", DType::F32, Role::In, false, {pages, s.per_page(), kIndexDim}).as<float>();
  fill(keys, blocks, kIndexDim, Kind::Normal, {}, random);
  // Every third block has its neighbour's key: ties in every row.
  for (int64_t b = 0; b + 1 < blocks; b += 3) std::copy_n(keys + b * kIndexDim, kIndexDim, keys + (b + 1) * kIndexDim);
  p.add("selected", DType::I32, Role::Out, true, {rows, s.blocks});
  return p;
}

}  // namespace

std::unique_ptr<Kernel> qsa_select_entry() {
  Entry e;
  e.record = {"qsa_select",
              "qsa_select",
              {{"qsa_scores_kernel", 256, 128, 0, 4096, 0},
               {"qsa_scores_prompt_kernel", 256, 128, 0, 32 * 1024, 0},
               {"qsa_select_kernel", 1024, 64, 27 * 1024, 0, 0},
               {"qsa_select_warp_kernel", 128, 168, 32, 0, 0},
               {"qsa_select_warps_kernel", 512, 128, 256, 0, 0}},
              "index dim 128, 1 to 8 index heads, ratio 1 to 64, 1 to 4096 blocks of at most 65536 tokens, any lanes "
              "and rows",
              "scores: blocks of 64 index blocks by rows (128 by 8 rows above 64), as many rows at a time as the "
              "workspace holds, none when all blocks are selected; selection: a block of 1024 a row, of more than "
              "8192 index blocks by the highest of each eight, or above 64 rows 1, 4 or 16 warps for up to 2048, 8192 "
              "or 32768 index blocks",
              {{"index", "F32", "[rows, index_heads + 1, 128]", 16, "read"},
               {"index_keys", "F32", "[pages, page_tokens / ratio, 128]", 16, "read"},
               {"lanes", "I32", "[lanes, 4]", 16, "read"},
               {"block_table", "I32", "[slots, width]", 4, "read"},
               {"selected", "I32", "[rows, blocks]", 4, "written"}},
              "none",
              "a row depends on its queries, its position and its sequence's blocks",
              "a dot product: 8 lanes chain 16 dims, then a butterfly; heads ascending",
              "none",
              "a head whose dot product is NaN counts as 0"};
  // A part of the blocks, all of them with and without scores, more than a warp's registers hold, and more than a
  // block's.
  e.host_shapes = {qsa_shape(2, 1, 9, DType::BF16), qsa_shape(2, 1, 40, DType::BF16),
                   qsa_shape(2, 1, 9, DType::BF16, 8300), qsa_shape(2, 1, 9, DType::BF16, 33000)};
  e.more_device_shapes = {qsa_shape(24, 2, 512, DType::BF16), qsa_shape(24, 2, 512, DType::BF16, 12000),
                          qsa_shape(24, 2, 512, DType::BF16, 34000)};
  e.value_rows = 20;
  e.bit_rows = 140;
  e.make = select_make;
  e.expect = [](const Problem&, const Problem& done) {
    // What was selected is judged as a choice; here only that something was.
    return std::vector<Expectation>{expect_elements(done["selected"], [&](int64_t i) {
      return Bounded{done["selected"].at(i), 0};
    })};
  };
  e.choices = select_choices;
  e.domain = qsa_domain;
  e.host = [](Problem& p) { select_host(p, Fault::None); };
  e.cpu = [](Problem& p) {
    const auto backend = make_cpu_backend({1, 0});
    LaneBatch lanes(p);
    lanes.batch.block_table = p["block_table"].view();
    backend->qsa_select(*backend->make_stream(), qsa_weights(p), lanes.batch, qsa_rows(p), qsa_cache(p));
  };
  e.part = lanes_part;
  e.refusals = qsa_refusals();
  e.refusals.push_back({"index off by 8 bytes", misalign("index", 8)});
  e.refusals.push_back({"index keys off by 4 bytes", misalign("index_keys", 4)});
  const auto inside = [](const char* name, Fault fault) {
    return host_control(name, 2, [fault](Problem& p) { select_host(p, fault); });
  };
  e.controls = {inside("ties to the higher block", Fault::HigherIdOnTies), inside("relu left out", Fault::NoRelu),
                inside("a complete block left out", Fault::OneFewerBlock), crossed_slots(), crossed_pages()};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::QsaSelectParams q;
    q.shape = device_shape(p, d), q.cache = device_cache(p, d);
    q.index = d.get<float>("index"), q.selected = d.get<int32_t>("selected");
    for (const QsaRow& row : rows_of(p))
      q.max_complete = std::max(q.max_complete, (row.position + 1) / std::max<int64_t>(1, p.number("ratio")));
    q.score_rows = cuda::kSpreadRows + 16;  // runs of rows that share index keys, and a shorter last one
    q.scores = d.scratch_of<float>("scores", q.score_rows * cuda::qsa_score_width(q.max_complete));
    cuda::qsa_select(q, d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

}  // namespace fnx::contract
