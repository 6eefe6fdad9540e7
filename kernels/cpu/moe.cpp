// Router, routed experts, shared expert's activation, combination in slot order.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels/cpu/backend.h"
#include "kernels/cpu/math.h"

namespace fnx::cpu {

void CpuBackend::router(Stream&, bool normalise, View logits, View ids, View weights) {
  const int64_t rows = logits.shape[0], experts = logits.shape[1], k = weights.shape[1];
  const int64_t columns = ids.shape[1];  // k, or k + 1 with the expert after the routed ones
  each(rows, experts * 16, [&](int64_t r) {
    const float* x = logits.as<float>() + r * experts;
    thread_local std::vector<double> e;
    thread_local std::vector<float> p;
    thread_local std::vector<int32_t> order;
    e.resize(experts), p.resize(experts), order.resize(experts);
    const double highest = *std::max_element(x, x + experts);
    double total = 0;
    for (int64_t i = 0; i < experts; ++i) total += e[i] = std::exp(x[i] - highest);
    for (int64_t i = 0; i < experts; ++i) p[i] = static_cast<float>(e[i] / total);
    std::iota(order.begin(), order.end(), 0);
    // NaN ranks below every number, so that the order stays total and the lowest ids win.
    const auto rank = [&](int32_t i) { return std::isnan(p[i]) ? -1.0f : p[i]; };
    std::partial_sort(order.begin(), order.begin() + k, order.end(),
                      [&](int32_t a, int32_t b) { return rank(a) != rank(b) ? rank(a) > rank(b) : a < b; });
    double sum = 0;
    for (int64_t j = 0; j < k; ++j) sum += p[order[j]];
    for (int64_t j = 0; j < k; ++j) {
      ids.as<int32_t>()[r * columns + j] = order[j];
      weights.as<float>()[r * k + j] = normalise ? static_cast<float>(p[order[j]] / sum) : p[order[j]];
    }
    if (columns > k) ids.as<int32_t>()[r * columns + k] = static_cast<int32_t>(experts);
  });
}

std::unique_ptr<ExpertBank> CpuBackend::load_experts(std::vector<ExpertSource> experts, int64_t pooled) {
  auto bank = std::make_unique<CpuExperts>();
  place_experts(*bank, experts, pooled);
  bank->list.resize(experts.size());
  for (int64_t e = bank->first; e < bank->first + bank->pooled; ++e) {
    CpuExperts::Expert& to = bank->list[e];
    to.extent = ExpertExtent(experts[e]);
    to.at = static_cast<int64_t>(bank->host_bytes);
    to.served = false;
    bank->host_bytes += to.extent.stride();
    bank->line_bytes = std::max(bank->line_bytes, to.extent.stride());
  }
  bank->arena = allocate(bank->host_bytes, Space::Host);
  for (size_t e = 0; e < experts.size(); ++e) {
    CpuExperts::Expert& to = bank->list[e];
    if (!experts[e].held()) {
      to.served = false;
      continue;
    }
    bank->in = experts[e].gate.in, bank->width = experts[e].gate.out;
    if (!to.served) {
      to.extent.write(experts[e], static_cast<int32_t>(e), bank->arena.view(DType::U8, {0}).data + to.at);
      for (LinearSource* s : {&experts[e].gate, &experts[e].up, &experts[e].down}) s->owner.clear();
    }
    to.gate = std::make_unique<CpuLinear>(std::move(experts[e].gate), budget_);
    to.up = std::make_unique<CpuLinear>(std::move(experts[e].up), budget_);
    to.down = std::make_unique<CpuLinear>(std::move(experts[e].down), budget_);
  }
  return bank;
}

namespace {
void swiglu_row(const float* gate, const float* up, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(silu(gate[i]) * up[i]);
}
}  // namespace

void CpuBackend::experts(Stream&, const ExpertBank& bank, View x, View ids, View slots) {
  auto& list = const_cast<CpuExperts&>(static_cast<const CpuExperts&>(bank)).list;
  const int64_t pairs = ids.size(), k = ids.shape[1], in = bank.in, width = bank.width;
  // (row, slot) pairs by expert; an expert's weights are read once for all of its rows.
  std::vector<std::vector<int64_t>> of(bank.experts);
  std::vector<int32_t> used;
  for (int64_t i = 0; i < pairs; ++i) {
    const int32_t e = ids.as<int32_t>()[i];
    if (!list[e].served) continue;
    if (of[e].empty()) used.push_back(e);
    of[e].push_back(i);
  }
  each(static_cast<int64_t>(used.size()), in * width * 3, [&](int64_t u) {
    const std::vector<int64_t>& mine = of[used[u]];
    const auto n = static_cast<int64_t>(mine.size());
    thread_local std::vector<float> rows, gate, up, down;
    rows.resize(n * in), gate.resize(n * width), up.resize(n * width), down.resize(n * in);
    for (int64_t i = 0; i < n; ++i) std::copy_n(x.as<float>() + mine[i] / k * in, in, rows.data() + i * in);
    list[used[u]].gate->apply(rows.data(), n, gate.data());
    list[used[u]].up->apply(rows.data(), n, up.data());
    swiglu_row(gate.data(), up.data(), n * width, gate.data());
    list[used[u]].down->apply(gate.data(), n, down.data());
    for (int64_t i = 0; i < n; ++i) std::copy_n(down.data() + i * in, in, slots.as<float>() + mine[i] * in);
  });
}

void CpuBackend::swiglu(Stream&, View gate, View up, View out) {
  const int64_t rows = gate.shape[0], width = gate.row_size();
  each(rows, width * 16, [&](int64_t r) {
    swiglu_row(gate.as<float>() + r * width, up.as<float>() + r * width, width, out.as<float>() + r * width);
  });
}

void CpuBackend::take_slots(Stream&, int64_t per_part, View ids, View parts, View slots) {
  const int64_t pairs = ids.size(), width = slots.size() / pairs, last = parts.shape[0] - 1;
  each(pairs, width, [&](int64_t i) {
    const int64_t part = std::min<int64_t>(ids.as<int32_t>()[i] / per_part, last);
    std::copy_n(parts.as<float>() + (part * pairs + i) * width, width, slots.as<float>() + i * width);
  });
}

void CpuBackend::join_columns(Stream&, std::span<const View> parts, View out) {
  int64_t column = 0;
  for (const View& p : parts) {
    const int64_t width = p.row_size();
    for (int64_t r = 0; r < p.shape[0]; ++r)
      std::copy_n(p.as<float>() + r * width, width, out.as<float>() + r * out.row_size() + column);
    column += width;
  }
}

void CpuBackend::combine(Stream&, View slots, View weights, View shared, View shared_gate, View y) {
  const int64_t rows = y.shape[0], hidden = y.shape[1], k = weights.shape[1], columns = slots.shape[1];
  each(rows, hidden * (k + 1), [&](int64_t r) {
    thread_local std::vector<double> sum;
    sum.assign(hidden, 0.0);
    for (int64_t j = 0; j < k; ++j)
      axpy(weights.as<float>()[r * k + j], slots.as<float>() + (r * columns + j) * hidden, hidden, sum.data());
    const float* last = columns > k ? slots.as<float>() + (r * columns + k) * hidden : shared.as<float>() + r * hidden;
    axpy(sigmoid(shared_gate.as<float>()[r]), last, hidden, sum.data());
    for (int64_t h = 0; h < hidden; ++h) y.as<float>()[r * hidden + h] = static_cast<float>(sum[h]);
  });
}

}  // namespace fnx::cpu
