// Sparse attention against the reference, chunks against the whole, and selection on exact scores with many ties.
#include <algorithm>

#include "kernels/cuda/qsa.h"
#include "ops_check.h"

namespace fnx::check {

namespace {

struct Shape {
  int64_t heads, kv_heads, blocks, page_tokens, tokens;
  DType pages;
};

constexpr int64_t kDim = 256, kIndexHeads = 4, kIndexDim = 128, kRatio = 4, kRotary = 64, kSlots = 2;

// One layer's activations and caches on both sides.
struct Site {
  Shape s;
  int64_t pages = 0, index_width = (kIndexHeads + 1) * kIndexDim, kv_width = 0;
  std::vector<float> query_gate, key, value, index, q_norm, k_norm, iq_norm, ik_norm, inv_freq;

  explicit Site(const Shape& shape) : s(shape) {
    pages = (s.tokens + s.page_tokens - 1) / s.page_tokens;
    kv_width = s.kv_heads * kDim;
    query_gate = normal(s.tokens * s.heads * 2 * kDim), key = normal(s.tokens * kv_width);
    value = normal(s.tokens * kv_width), index = normal(s.tokens * index_width);
    q_norm = normal(kDim, 0.1f, 0.3f), k_norm = normal(kDim, 0.1f, 0.3f);
    iq_norm = normal(kIndexDim, 0.1f), ik_norm = normal(kIndexDim, 0.1f);
    for (int i = 0; i < kRotary / 2; ++i) inv_freq.push_back(std::pow(1e7f, -2.0f * i / kRotary));
  }
  size_t cache_elements() const { return kSlots * pages * s.page_tokens * kv_width; }
  size_t index_elements() const { return kSlots * pages * s.page_tokens / kRatio * kIndexDim; }
};

// The device's side: everything that a run leaves behind.
struct Run {
  std::vector<float> query_gate, key, index, index_keys, raw_keys, out;
  std::vector<uint32_t> keys, values;  // as words
  std::vector<int32_t> selected;
};

// Takes the site's rows of slot 1 in chunks; a chunk of 0 ends the list with all that is left.
Run run_device(const Site& site, const std::vector<int64_t>& chunks) {
  const Shape& s = site.s;
  Tables tables({{1, 0, static_cast<int32_t>(s.tokens), 0}}, kSlots, site.pages);
  const bool wide = s.pages == DType::F32;
  const size_t words = wide ? site.cache_elements() : site.cache_elements() / 2;
  Device<float> qg(site.query_gate), key(site.key), value(site.value), index(site.index), qn(site.q_norm),
      kn(site.k_norm), iqn(site.iq_norm), ikn(site.ik_norm), freq(site.inv_freq), index_keys(site.index_elements()),
      raw_keys(kSlots * kRatio * kIndexDim), out(s.tokens * s.heads * kDim);
  Device<uint32_t> keys(words), values(words);
  keys.zero(), values.zero(), index_keys.zero(), raw_keys.zero();
  Device<int32_t> selected(s.tokens * s.blocks), block_table(tables.block_table);
  const int64_t most = s.tokens / kRatio, score_rows = 37;
  Device<float> scores(score_rows * cuda::qsa_score_width(most));
  int64_t first = 0;
  for (size_t i = 0; first < s.tokens; ++i) {
    const int64_t asked = i < chunks.size() ? chunks[i] : 0;
    const int64_t rows = asked > 0 ? std::min(asked, s.tokens - first) : s.tokens - first;
    Device<int32_t> lanes(std::vector<int32_t>{1, 0, static_cast<int32_t>(rows), static_cast<int32_t>(first)});
    cuda::QsaShape shape;
    shape.rows = rows, shape.heads = s.heads, shape.kv_heads = s.kv_heads, shape.head_dim = kDim;
    shape.index_heads = kIndexHeads, shape.index_dim = kIndexDim, shape.ratio = kRatio, shape.blocks = s.blocks;
    shape.rotary = kRotary, shape.page_tokens = s.page_tokens, shape.table_width = site.pages;
    shape.block_table = shape.kv_table = block_table, shape.lanes = {lanes, 1};
    const cuda::QsaCache cache{s.pages, keys.get(), values.get(), index_keys, raw_keys, kRatio};
    Device<float> partials(cuda::qsa_partials(shape));
    float* q = qg + first * s.heads * 2 * kDim;
    cuda::qsa_write({shape, cache, q, key + first * site.kv_width, value + first * site.kv_width,
                     index + first * site.index_width, freq, qn, kn, iqn, ikn, 1e-6f, 1e-6f, 1e-6f, 1e-6f},
                    nullptr);
    cuda::qsa_select({shape, cache, index + first * site.index_width, selected + first * s.blocks,
                      (first + rows) / kRatio, scores, score_rows},
                     nullptr);
    cuda::qsa_attend({shape, cache, q, selected + first * s.blocks, out + first * s.heads * kDim, partials}, nullptr);
    cuda(cudaDeviceSynchronize(), "qsa");
    first += rows;
  }
  return {qg.take(),  key.take(),  index.take(),  index_keys.take(), raw_keys.take(),
          out.take(), keys.take(), values.take(), selected.take()};
}

// Blocks that one side chose and the other did not must have nearly the score of the last chosen.
void check_selection(const std::string& name, const Site& site, const Run& run, const std::vector<int32_t>& reference,
                     const std::vector<int32_t>& block_table) {
  const Shape& s = site.s;
  int64_t differ = 0, wrong = 0;
  const int64_t per_page = s.page_tokens / kRatio;
  for (int64_t r = 0; r < s.tokens; ++r) {
    const int32_t *a = run.selected.data() + r * s.blocks, *b = reference.data() + r * s.blocks;
    if (std::equal(a, a + s.blocks, b)) continue;
    const auto score = [&](int32_t block) {
      const float* k = run.index_keys.data() +
                       (block_table[site.pages + block / per_page] * per_page + block % per_page) * kIndexDim;
      double sum = 0;
      for (int64_t h = 0; h < kIndexHeads; ++h) {
        double dot = 0;
        const float* q = run.index.data() + r * site.index_width + h * kIndexDim;
        for (int64_t d = 0; d < kIndexDim; ++d) dot += double{q[d]} * k[d];
        sum += std::max(0.0, dot);
      }
      return sum;
    };
    double least = 1e30;
    for (int64_t i = 0; i < s.blocks; ++i) least = std::min(least, score(b[i]));
    std::vector<int32_t> odd;
    std::set_symmetric_difference(a, a + s.blocks, b, b + s.blocks, std::back_inserter(odd));
    ++differ;
    for (int32_t block : odd)
      if (block < 0 || std::abs(score(block) - least) > 1e-5 * (least + 1)) ++wrong;
  }
  report(wrong == 0 && differ < s.tokens / 100 + 3, name + " selection",
         std::to_string(differ) + " of " + std::to_string(s.tokens) +
             " rows differ in blocks of equal score to 1e-5, " + std::to_string(wrong) + " wrong");
}

void check_site(Backend& cpu, Stream& stream, const Shape& s, const std::string& name) {
  Site site(s);
  const Run whole = run_device(site, {});

  // The reference writes its own caches, then attends with the device's caches and selection.
  Tables tables({{1, 0, static_cast<int32_t>(s.tokens), 0}}, kSlots, site.pages);
  const bool wide = s.pages == DType::F32;
  const int64_t all_pages = kSlots * site.pages;
  std::vector<uint32_t> keys(whole.keys.size()), values(keys.size());
  std::vector<float> index_keys(site.index_elements()), raw(kSlots * kRatio * kIndexDim),
      qg = site.query_gate, key = site.key, index = site.index, out(s.tokens * s.heads * kDim);
  std::vector<int32_t> selected(s.tokens * s.blocks);
  KvCache cache{s.page_tokens, view(keys, s.pages, {all_pages, s.page_tokens, s.kv_heads, kDim}),
                view(values, s.pages, {all_pages, s.page_tokens, s.kv_heads, kDim}),
                view(index_keys, {all_pages, s.page_tokens / kRatio, kIndexDim}),
                view(raw, {kSlots, kRatio, kIndexDim})};
  QsaWeights w{s.heads,
               s.kv_heads,
               kDim,
               kIndexHeads,
               kIndexDim,
               kRatio,
               s.blocks,
               kRotary,
               view(site.inv_freq, {kRotary / 2}),
               {view(site.q_norm, {kDim}), 1e-6f},
               {view(site.k_norm, {kDim}), 1e-6f},
               {view(site.iq_norm, {kIndexDim}), 1e-6f},
               {view(site.ik_norm, {kIndexDim}), 1e-6f}};
  QsaRows rows{view(qg, {s.tokens, s.heads, 2, kDim}), view(key, {s.tokens, s.kv_heads, kDim}),
               view(site.value, {s.tokens, s.kv_heads, kDim}), view(index, {s.tokens, kIndexHeads + 1, kIndexDim}),
               view(selected, DType::I32, {s.tokens, s.blocks})};
  cpu.qsa_write(stream, w, tables.batch(), rows, cache);
  near(name + " queries", whole.query_gate, qg);
  near(name + " keys", whole.key, key);
  near(name + " index queries", whole.index, index);
  near(name + " index keys", whole.index_keys, index_keys);
  same(name + " raw keys", whole.raw_keys, raw);
  same(name + " value pages", whole.values, values);
  if (wide) {
    const auto floats = [](const std::vector<uint32_t>& v) {
      std::vector<float> f(v.size());
      std::memcpy(f.data(), v.data(), v.size() * 4);
      return f;
    };
    near(name + " key pages", floats(whole.keys), floats(keys));
  } else {
    size_t differ = 0, far = 0;
    const auto *a = reinterpret_cast<const uint16_t*>(whole.keys.data()),
               *b = reinterpret_cast<const uint16_t*>(keys.data());
    for (size_t i = 0; i < keys.size() * 2; ++i) {
      const float x = bf16_to_f32(a[i]), y = bf16_to_f32(b[i]);
      differ += a[i] != b[i], far += !(std::abs(x - y) <= std::max(std::abs(x), std::abs(y)) / 128 + 1e-6f);
    }
    report(far == 0 && differ < keys.size() / 500 + 1, name + " key pages",
           std::to_string(differ) + " of " + std::to_string(keys.size() * 2) + " rounded to the other neighbour, " +
               std::to_string(far) + " further");
  }
  index = whole.index, index_keys = whole.index_keys, qg = whole.query_gate, keys = whole.keys;
  cpu.qsa_select(stream, w, tables.batch(), rows, cache);
  check_selection(name, site, whole, selected, tables.block_table);
  selected = whole.selected;
  cpu.qsa_attend(stream, w, tables.batch(), rows, cache, view(out, {s.tokens, s.heads * kDim}));
  near(name + " attention", whole.out, out);

  for (const std::vector<int64_t>& chunks : {std::vector<int64_t>{65, 1, 2, 3, 1, 1, 16, 64, 65, 100, 1, 1, 1, 17},
                                             {s.tokens - 9, 1, 1, 1, 1, 1, 1, 1, 1, 1}}) {
    const Run cut = run_device(site, chunks);
    const std::string chunked = name + " in chunks from " + std::to_string(chunks[0]);
    same(chunked + ": output", cut.out, whole.out);
    same(chunked + ": selection", cut.selected, whole.selected);
    same(chunked + ": index keys", cut.index_keys, whole.index_keys);
    same(chunked + ": key pages", cut.keys, whole.keys);
    same(chunked + ": raw keys", cut.raw_keys, whole.raw_keys);
  }
}

// Small integers: every score is exact and most are tied.
void check_ties(Backend& cpu, Stream& stream, int64_t blocks, int64_t position, int64_t rows) {
  const int64_t page = 64, pages = position / page + 1, index_width = (kIndexHeads + 1) * kIndexDim;
  const int64_t first = position - rows + 1;
  Tables tables({{0, 0, static_cast<int32_t>(rows), static_cast<int32_t>(first)}}, 1, pages);
  std::vector<float> index(rows * index_width), index_keys(pages * page / kRatio * kIndexDim);
  for (float& x : index) x = static_cast<float>(static_cast<int>(generator()() % 3) - 1);
  for (size_t i = 0; i < index_keys.size(); ++i)
    index_keys[i] = i % kIndexDim < 2 ? static_cast<float>(static_cast<int>(generator()() % 3) - 1) : 0.0f;
  std::vector<int32_t> selected(rows * blocks);
  QsaWeights w;
  w.heads = w.kv_heads = 1, w.head_dim = kDim, w.index_heads = kIndexHeads, w.index_dim = kIndexDim, w.ratio = kRatio;
  w.blocks = blocks;
  KvCache cache;
  cache.page_tokens = page, cache.index_keys = view(index_keys, {pages, page / kRatio, kIndexDim});
  QsaRows r;
  r.index = view(index, {rows, kIndexHeads + 1, kIndexDim});
  r.selected = view(selected, DType::I32, {rows, blocks});
  cpu.qsa_select(stream, w, tables.batch(), r, cache);

  Device<float> di(index), dk(index_keys), scores(rows * cuda::qsa_score_width((position + 1) / kRatio));
  Device<int32_t> ds(selected.size()), lanes(tables.lane_table()), table(tables.block_table);
  cuda::QsaShape shape;
  shape.rows = rows, shape.heads = shape.kv_heads = 1, shape.head_dim = kDim, shape.index_heads = kIndexHeads;
  shape.index_dim = kIndexDim, shape.ratio = kRatio, shape.blocks = blocks, shape.page_tokens = page;
  shape.table_width = pages, shape.block_table = shape.kv_table = table, shape.lanes = {lanes, 1};
  cuda::QsaCache dc;
  dc.index_keys = dk;
  cuda::qsa_select({shape, dc, di, ds, (position + 1) / kRatio, scores, rows}, nullptr);
  same("qsa_select ties, " + std::to_string((position + 1) / kRatio) + " blocks, " + std::to_string(rows) + " rows",
       ds.take(), selected);
}

}  // namespace

void check_qsa(Backend& cpu) {
  auto stream = cpu.make_stream();
  for (const int64_t rows : {int64_t{3}, cuda::kSpreadRows + 6}) {
    check_ties(cpu, *stream, 64, 400, rows);
    check_ties(cpu, *stream, 512, 9001, rows);
    check_ties(cpu, *stream, 512, 40001, rows);
    check_ties(cpu, *stream, 512, 262143, rows);
  }
  check_site(cpu, *stream, {4, 2, 64, 16, 701, DType::BF16}, "qsa 4/2 BF16");
  check_site(cpu, *stream, {4, 2, 64, 16, 333, DType::F32}, "qsa 4/2 F32");
  check_site(cpu, *stream, {24, 2, 512, 64, 2213, DType::BF16}, "qsa 24/2 BF16");
}

}  // namespace fnx::check
