#include "libcore/engine/parity.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "libcore/receipt/receipt.h"

namespace fnx {

namespace {

// Index of the first element whose bits differ; the shorter's length when one continues the other; -1 when equal.
template <class T>
int64_t first_other(const std::vector<T>& a, const std::vector<T>& b) {
  const size_t n = std::min(a.size(), b.size());
  for (size_t i = 0; i < n; ++i)
    if (std::memcmp(&a[i], &b[i], sizeof(T)) != 0) return static_cast<int64_t>(i);
  return a.size() == b.size() ? -1 : static_cast<int64_t>(n);
}

template <class T>
double value_at(const std::vector<T>& v, int64_t i) {
  return i < static_cast<int64_t>(v.size()) ? static_cast<double>(v[i]) : 0;
}

std::optional<ParityDifference> slots_difference(const ParityRecord::Slots& a, const ParityRecord::Slots& b) {
  ParityDifference d;
  d.layer = a.layer;
  if (const int64_t i = first_other(a.ids, b.ids); i >= 0) {
    d.what = "chosen expert";
    d.row = i / a.columns, d.slot = i % a.columns;
    d.a = value_at(a.ids, i), d.b = value_at(b.ids, i);
    return d;
  }
  const int64_t i = first_other(a.values, b.values);
  if (i < 0) return std::nullopt;
  const int64_t width = static_cast<int64_t>(a.values.size() / a.ids.size()), pair = i / width;
  d.what = "expert output";
  d.row = pair / a.columns, d.slot = pair % a.columns, d.element = i % width;
  d.expert = a.ids[pair];
  d.a = value_at(a.values, i), d.b = value_at(b.values, i);
  return d;
}

}  // namespace

std::vector<int32_t> ParityRecord::tokens() const {
  std::vector<int32_t> all;
  for (const Forward& f : forwards) all.insert(all.end(), f.drawn.begin(), f.drawn.end());
  return all;
}

std::string ParityRecord::logits_hash() const {
  std::string hashes;
  for (const Forward& f : forwards) hashes += xxh3_hex(f.logits.data(), f.logits.size() * sizeof(float));
  return xxh3_hex(hashes.data(), hashes.size());
}

std::string ParityRecord::slots_hash() const {
  std::string hashes;
  for (const Forward& f : forwards)
    for (const Slots& s : f.slots) hashes += xxh3_hex(s.values.data(), s.values.size() * sizeof(float));
  return hashes.empty() ? "" : xxh3_hex(hashes.data(), hashes.size());
}

ParityRecord record_run(Engine& engine, Workload work, bool slots, const std::function<bool()>& stop) {
  ParityRecord record;
  record.forwards.emplace_back();
  if (slots)
    engine.on_slots([&](const Engine::SlotOutputs& s) {
      record.forwards.back().slots.push_back(
          {s.layer, s.columns, {s.ids.begin(), s.ids.end()}, {s.values.begin(), s.values.end()}});
    });
  work.after_forward = [&](std::span<const int32_t> drawn) {
    ParityRecord::Forward& f = record.forwards.back();
    f.drawn.assign(drawn.begin(), drawn.end());
    if (!drawn.empty()) f.logits = engine.to_host(engine.drawn_logits());
    record.forwards.emplace_back();
  };
  record.stopped = run_workload(engine, work, stop).stopped;
  engine.on_slots(nullptr);
  record.forwards.pop_back();
  return record;
}

std::optional<ParityDifference> first_difference(const ParityRecord& a, const ParityRecord& b) {
  const size_t n = std::min(a.forwards.size(), b.forwards.size());
  for (size_t i = 0; i < n; ++i) {
    const ParityRecord::Forward &x = a.forwards[i], &y = b.forwards[i];
    const auto at = [&](ParityDifference d) {
      d.forward = static_cast<int64_t>(i);
      return d;
    };
    // Where one run kept no expert outputs there is nothing to compare.
    for (size_t l = 0; l < std::min(x.slots.size(), y.slots.size()); ++l)
      if (const auto d = slots_difference(x.slots[l], y.slots[l])) return at(*d);
    ParityDifference d;
    if (const int64_t e = first_other(x.logits, y.logits); e >= 0) {
      const int64_t vocabulary = static_cast<int64_t>(x.logits.size() / std::max<size_t>(1, x.drawn.size()));
      d.what = "logit";
      if (vocabulary > 0) d.row = e / vocabulary, d.element = e % vocabulary;
      d.a = value_at(x.logits, e), d.b = value_at(y.logits, e);
      return at(d);
    }
    if (const int64_t e = first_other(x.drawn, y.drawn); e >= 0) {
      d.what = "token", d.row = e;
      d.a = value_at(x.drawn, e), d.b = value_at(y.drawn, e);
      return at(d);
    }
  }
  if (a.forwards.size() == b.forwards.size()) return std::nullopt;
  ParityDifference d;
  d.what = "number of forwards", d.forward = static_cast<int64_t>(n);
  d.a = static_cast<double>(a.forwards.size()), d.b = static_cast<double>(b.forwards.size());
  return d;
}

std::string ParityDifference::text() const {
  std::string out = fmt::format("{} at forward {}", what, forward);
  const auto add = [&](const char* name, int64_t value) {
    if (value >= 0) out += fmt::format(", {} {}", name, value);
  };
  add("layer", layer), add("row", row), add("slot", slot), add("expert", expert), add("element", element);
  return out + fmt::format(": {:.9g} and {:.9g}", a, b);
}

}  // namespace fnx
