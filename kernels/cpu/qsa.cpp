// QSA: norms and rotations, index blocks and their selection, sparse attention. Scores, softmax and sums are fp64; a
// block's score is rounded to fp32 before blocks are compared, so that a tie means equal fp32 scores.
#include <algorithm>
#include <numeric>

#include "kernels/cpu/backend.h"
#include "kernels/cpu/math.h"
#include "kernels/float16.h"

namespace fnx::cpu {

namespace {

void norm_and_rope(float* x, int64_t dim, const NormWeights& norm, const QsaWeights& w, int64_t position) {
  scale_centred(x, norm.weight.as<float>(), inverse_rms(x, dim, norm.eps), dim, x);
  rope(x, w.rotary, w.inv_freq.as<float>(), position);
}

// The keys or values of all heads of the token at a place among both kinds of pages, [kv_heads, head_dim].
View token_at(const View& near, const View& far, int64_t place) {
  const int64_t near_tokens = near.shape[0] * near.shape[1];
  const View& pages = place < near_tokens ? near : far;
  const View tokens = pages.reshape({pages.shape[0] * pages.shape[1], pages.shape[2], pages.shape[3]});
  const View token = tokens.rows(place < near_tokens ? place : place - near_tokens, 1);
  return token.reshape({token.shape[1], token.shape[2]});
}

void store(const View& to, const float* x) {
  if (to.dtype == DType::BF16)
    for (int64_t i = 0; i < to.size(); ++i) to.as<uint16_t>()[i] = f32_to_bf16(x[i]);
  else
    std::copy_n(x, to.size(), to.as<float>());
}

// As fp32, through `scratch` when it is stored narrower.
const float* fetch(const View& from, float* scratch) {
  if (from.dtype != DType::BF16) return from.as<float>();
  for (int64_t i = 0; i < from.size(); ++i) scratch[i] = bf16_to_f32(from.as<uint16_t>()[i]);
  return scratch;
}

// Finds tokens and blocks of one sequence in its pages.
struct Pages {
  const int32_t *table, *kv_table;
  int64_t page_tokens;
  Pages(const Batch& batch, const KvCache& cache, int32_t slot)
      : table(row(batch.block_table, slot)),
        kv_table(batch.kv_table ? row(batch.kv_table, slot) : table),
        page_tokens(cache.page_tokens) {}
  static const int32_t* row(const View& table, int32_t slot) { return table.as<int32_t>() + slot * table.shape[1]; }
  int64_t token(int64_t t) const { return kv_table[t / page_tokens] * page_tokens + t % page_tokens; }
  int64_t block(int64_t b, int64_t ratio) const {
    const int64_t per_page = page_tokens / ratio;
    return table[b / per_page] * per_page + b % per_page;
  }
};

}  // namespace

void CpuBackend::qsa_write(Stream&, const QsaWeights& w, const Batch& batch, const QsaRows& rows,
                           const KvCache& cache) {
  const int64_t kv_width = w.kv_heads * w.head_dim, index_width = (w.index_heads + 1) * w.index_dim;
  for (const Lane& lane : batch.lanes) {
    const Pages pages(batch, cache, lane.slot);
    each(lane.rows, (2 * w.heads + 2 * w.kv_heads) * w.head_dim * 4, [&](int64_t i) {
      const int64_t r = lane.first_row + i, position = lane.start + i, place = pages.token(position);
      for (int64_t h = 0; h < w.heads; ++h)
        norm_and_rope(rows.query_gate.as<float>() + (r * w.heads + h) * 2 * w.head_dim, w.head_dim, w.q_norm, w,
                      position);
      for (int64_t h = 0; h < w.kv_heads; ++h)
        norm_and_rope(rows.key.as<float>() + r * kv_width + h * w.head_dim, w.head_dim, w.k_norm, w, position);
      for (int64_t h = 0; h < w.index_heads; ++h)
        norm_and_rope(rows.index.as<float>() + r * index_width + h * w.index_dim, w.index_dim, w.index_q_norm, w,
                      position);
      store(token_at(cache.keys, cache.far_keys, place), rows.key.as<float>() + r * kv_width);
      store(token_at(cache.values, cache.far_values, place), rows.value.as<float>() + r * kv_width);
    });
    const int64_t ring = cache.raw_keys.shape[1];
    float* raw = cache.raw_keys.as<float>() + lane.slot * ring * w.index_dim;
    for (int64_t i = 0; i < lane.rows; ++i) {
      const int64_t position = lane.start + i, block = position / w.ratio;
      std::copy_n(rows.index.as<float>() + (lane.first_row + i) * index_width + w.index_heads * w.index_dim,
                  w.index_dim, raw + position % ring * w.index_dim);
      if ((position + 1) % w.ratio != 0) continue;
      float* pooled = cache.index_keys.as<float>() + pages.block(block, w.ratio) * w.index_dim;
      for (int64_t d = 0; d < w.index_dim; ++d) {
        double sum = 0;
        for (int64_t j = 0; j < w.ratio; ++j) sum += raw[(block * w.ratio % ring + j) * w.index_dim + d];
        pooled[d] = static_cast<float>(sum / static_cast<double>(w.ratio));
      }
      norm_and_rope(pooled, w.index_dim, w.index_k_norm, w, block * w.ratio);
    }
  }
}

void CpuBackend::qsa_select(Stream&, const QsaWeights& w, const Batch& batch, const QsaRows& rows,
                            const KvCache& cache) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(w.index_dim));
  for (const Lane& lane : batch.lanes) {
    const Pages pages(batch, cache, lane.slot);
    const int64_t last = (lane.start + lane.rows) / w.ratio;
    each(lane.rows, last <= w.blocks ? w.blocks : last * w.index_heads * w.index_dim, [&](int64_t i) {
      const int64_t r = lane.first_row + i, complete = (lane.start + i + 1) / w.ratio;
      const int64_t count = std::min(w.blocks, complete);
      int32_t* selected = rows.selected.as<int32_t>() + r * w.blocks;
      std::fill(selected + count, selected + w.blocks, -1);
      if (complete <= w.blocks) {
        std::iota(selected, selected + count, 0);
        return;
      }
      thread_local std::vector<float> score;
      thread_local std::vector<int32_t> order;
      score.resize(complete), order.resize(complete);
      const float* query = rows.index.as<float>() + r * (w.index_heads + 1) * w.index_dim;
      for (int64_t b = 0; b < complete; ++b) {
        const float* key = cache.index_keys.as<float>() + pages.block(b, w.ratio) * w.index_dim;
        double sum = 0;
        for (int64_t h = 0; h < w.index_heads; ++h)
          sum += std::max(0.0, dot(query + h * w.index_dim, key, w.index_dim));
        const auto s = static_cast<float>(sum * scale);
        score[b] = std::isnan(s) ? -1.0f : s;  // keeps the order total; real scores are not negative
      }
      std::iota(order.begin(), order.end(), 0);
      std::nth_element(order.begin(), order.begin() + count - 1, order.end(),
                       [&](int32_t x, int32_t y) { return score[x] != score[y] ? score[x] > score[y] : x < y; });
      std::sort(order.begin(), order.begin() + count);
      std::copy_n(order.begin(), count, selected);
    });
  }
}

void CpuBackend::qsa_attend(Stream&, const QsaWeights& w, const Batch& batch, const QsaRows& rows, const KvCache& cache,
                            View out) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(w.head_dim));
  const int64_t group = w.heads / w.kv_heads;
  for (const Lane& lane : batch.lanes) {
    const Pages pages(batch, cache, lane.slot);
    const int64_t most = std::min<int64_t>(w.blocks * w.ratio, lane.start + lane.rows);
    each(lane.rows * w.kv_heads, most * group * w.head_dim * 2, [&](int64_t i) {
      const int64_t r = lane.first_row + i / w.kv_heads, position = lane.start + i / w.kv_heads, kv = i % w.kv_heads;
      thread_local std::vector<int64_t> tokens;
      thread_local std::vector<double> weight, sum;
      thread_local std::vector<float> row;
      tokens.clear();
      const int32_t* selected = rows.selected.as<int32_t>() + r * w.blocks;
      for (int64_t b = 0; b < w.blocks && selected[b] >= 0; ++b)
        for (int64_t j = 0; j < w.ratio; ++j) tokens.push_back(pages.token(selected[b] * w.ratio + j));
      for (int64_t t = (position + 1) / w.ratio * w.ratio; t <= position; ++t) tokens.push_back(pages.token(t));
      const auto count = static_cast<int64_t>(tokens.size());
      weight.resize(group * count), sum.assign(group * w.head_dim, 0.0), row.resize(w.head_dim);

      for (int64_t t = 0; t < count; ++t) {
        const float* key = fetch(token_at(cache.keys, cache.far_keys, tokens[t]).rows(kv, 1), row.data());
        for (int64_t g = 0; g < group; ++g) {
          const float* query = rows.query_gate.as<float>() + (r * w.heads + kv * group + g) * 2 * w.head_dim;
          weight[g * count + t] = dot(query, key, w.head_dim) * scale;
        }
      }
      for (int64_t g = 0; g < group; ++g) {
        double* p = weight.data() + g * count;
        const double highest = *std::max_element(p, p + count);
        double total = 0;
        for (int64_t t = 0; t < count; ++t) total += p[t] = std::exp(p[t] - highest);
        for (int64_t t = 0; t < count; ++t) p[t] /= total;
      }
      for (int64_t t = 0; t < count; ++t) {
        const float* value = fetch(token_at(cache.values, cache.far_values, tokens[t]).rows(kv, 1), row.data());
        for (int64_t g = 0; g < group; ++g) axpy(weight[g * count + t], value, w.head_dim, sum.data() + g * w.head_dim);
      }
      for (int64_t g = 0; g < group; ++g) {
        const int64_t head = kv * group + g;
        const float* gate = rows.query_gate.as<float>() + (r * w.heads + head) * 2 * w.head_dim + w.head_dim;
        float* to = out.as<float>() + (r * w.heads + head) * w.head_dim;
        for (int64_t d = 0; d < w.head_dim; ++d) to[d] = static_cast<float>(sum[g * w.head_dim + d] * sigmoid(gate[d]));
      }
    });
  }
}

}  // namespace fnx::cpu
