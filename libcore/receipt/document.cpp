#include "libcore/receipt/document.h"

#include <cmath>

namespace fnx {
namespace {

constexpr int64_t kExactInteger = int64_t{1} << 53;  // beyond it readers that use doubles round

// Makes a value safe for every JSON reader; returns false when it was not a finite number.
bool make_safe(Json& value) {
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    value = Json();
    return false;
  }
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(kExactInteger)) {
    value = std::to_string(value.get<uint64_t>());
  } else if (value.is_number_integer() && !value.is_number_unsigned() &&
             (value.get<int64_t>() > kExactInteger || value.get<int64_t>() < -kExactInteger)) {
    value = std::to_string(value.get<int64_t>());
  } else if (value.is_array()) {
    for (Json& element : value) make_safe(element);
  } else if (value.is_object()) {
    std::vector<std::string> missing;
    for (auto& [key, element] : value.items())
      if (!make_safe(element)) missing.push_back(key);
    for (const std::string& key : missing) value[key + "_reason"] = "not finite";
  } else if (value.is_discarded() || value.is_binary()) {
    value = Json();
  }
  return true;
}

Json safe(Json value) {
  make_safe(value);
  return value;
}

}  // namespace

Json make_document(const FrameBlocks& frame, const Receipt& receipt, const RunRecord& run) {
  Json out = Json::object();
  out["schema"] = Json{{"name", kReceiptSchema}, {"version", kReceiptVersion}};
  out["tool"] = frame.tool;
  out["invocation"] = frame.invocation;
  out["subjects"] = safe(receipt.subjects);
  out["platform"] = frame.platform;
  out["requested"] = frame.requested;
  out["effective"] = safe(receipt.effective);
  out["evidence"] = safe(receipt.evidence);
  out["result"] = safe(receipt.result);
  if (run.outcome == "passed" || run.outcome == "failed") {
    const std::string bytes = canonical_json(out["result"]);
    out["result_digest"] = xxh3_hex(bytes.data(), bytes.size());
  } else {
    out["result_digest"] = Json();
  }
  out["measurements"] = safe(receipt.measurements);
  out["gates"] = safe(receipt.gates);
  out["not_run"] = safe(receipt.not_run);
  Json record = Json::object();
  record["start_utc"] = run.start_utc;
  record["wall_s"] = run.wall_s;
  record["user_s"] = run.user_s;
  record["system_s"] = run.system_s;
  record["peak_rss_bytes"] = run.peak_rss_bytes;
  record["outcome"] = run.outcome;
  record["exit_code"] = run.exit_code ? Json(*run.exit_code) : Json();
  record["error"] = run.error ? Json(*run.error) : Json();
  out["run"] = std::move(record);
  return out;
}

std::string canonical_json(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

std::string pretty_json(const Json& value) { return value.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"; }

}  // namespace fnx
