#include "libcore/receipt/receipt.h"

#include <cmath>

#include "kernels/error.h"
#include "libcore/measure/statistics.h"

namespace fnx {
namespace {

bool compare(double a, const std::string& comparator, double b) {
  if (comparator == "<=") return a <= b;
  if (comparator == ">=") return a >= b;
  if (comparator == "==") return a == b;
  if (comparator == "<") return a < b;
  if (comparator == ">") return a > b;
  throw Error(ErrorKind::Internal, "gate comparator '" + comparator + "' is not one of <= >= == < >");
}

Json finite_or_null(double value) { return std::isfinite(value) ? Json(value) : Json(); }

}  // namespace

void Receipt::add_subject(const std::string& role, const std::string& name, uint64_t bytes,
                          const std::optional<Json>& fingerprint) {
  Json subject{{"role", role}, {"name", name}, {"bytes", bytes}};
  if (fingerprint) subject["fingerprint"] = *fingerprint;
  subjects.push_back(std::move(subject));
}

void Receipt::set_effective(const std::string& name, Json value, const std::string& source) {
  effective[name] = Json{{"value", std::move(value)}, {"source", source}};
}

void Receipt::add_series(const std::string& name, const std::string& unit, const std::string& phase,
                         const std::vector<double>& samples) {
  Json raw = Json::array();
  std::vector<double> finite;
  for (double s : samples) {
    raw.push_back(finite_or_null(s));
    if (std::isfinite(s)) finite.push_back(s);
  }
  const bool sound = !finite.empty() && finite.size() == samples.size();
  Json series{{"name", name}, {"unit", unit}, {"phase", phase}, {"samples", std::move(raw)}};
  series["median"] = sound ? Json(percentile(finite, 50)) : Json();
  series["p05"] = sound ? Json(percentile(finite, 5)) : Json();
  series["p95"] = sound ? Json(percentile(finite, 95)) : Json();
  if (!sound) series["reason"] = samples.empty() ? "no samples" : "a sample is not finite";
  measurements.push_back(std::move(series));
}

bool Receipt::add_gate(const std::string& name, double observed, const std::string& comparator, double limit,
                       const std::string& unit) {
  const bool finite = std::isfinite(observed) && std::isfinite(limit);
  const bool pass = compare(observed, comparator, limit) && finite;
  Json gate{{"name", name}};
  gate["observed"] = finite_or_null(observed);
  gate["comparator"] = comparator;
  gate["limit"] = finite_or_null(limit);
  gate["unit"] = unit;
  gate["outcome"] = pass ? "pass" : "fail";
  if (!finite) gate["reason"] = "not finite";
  gates.push_back(std::move(gate));
  return pass;
}

void Receipt::add_gate_not_run(const std::string& name, const std::string& comparator, double limit,
                               const std::string& unit, const std::string& reason) {
  compare(0, comparator, limit);
  Json gate{{"name", name}};
  gate["observed"] = Json();
  gate["comparator"] = comparator;
  gate["limit"] = finite_or_null(limit);
  gate["unit"] = unit;
  gate["outcome"] = "not_run";
  gate["reason"] = reason;
  gates.push_back(std::move(gate));
}

void Receipt::add_not_run(const std::string& what, const std::string& reason) {
  not_run.push_back(Json{{"what", what}, {"reason", reason}});
}

Json make_fingerprint(const std::string& kind, const std::string& algorithm, const std::string& digest, bool cached) {
  return Json{{"kind", kind}, {"algorithm", algorithm}, {"digest", digest}, {"origin", cached ? "cached" : "computed"}};
}

bool Receipt::any_gate_failed() const {
  for (const Json& gate : gates)
    if (gate.at("outcome") == "fail") return true;
  return false;
}

}  // namespace fnx
