// fnx-fingerprint: hashes that identify a checkpoint, and their comparison with an earlier receipt.
#include <fmt/format.h>

#include <map>
#include <optional>

#include "kernels/error.h"
#include "libcore/base/path_text.h"
#include "libcore/cli/tool.h"
#include "libcore/format/fingerprint.h"
#include "libcore/format/json_text.h"
#include "libcore/format/synthetic_source.h"

namespace {

using fnx::Error, fnx::ErrorKind, fnx::Fingerprint, fnx::Json;

struct Options {
  std::string model, verify, format = "table";
  bool advisory = false, sha256 = false, per_tensor = false, no_cache = false;
};

std::string text_of(const Json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_string() ? it->get<std::string>() : "";
}

// What an earlier receipt says; texts are empty where it says nothing.
struct Reference {
  std::string kind = "full", digest;
  std::map<std::string, std::string> families, tensors;
};

std::map<std::string, std::string> digests(const Json& result, const char* key) {
  std::map<std::string, std::string> out;
  if (const auto list = result.find(key); list != result.end() && list->is_array())
    for (const Json& entry : *list)
      if (entry.is_object()) out[text_of(entry, "name")] = text_of(entry, "digest");
  return out;
}

Reference load_reference(const std::string& path) {
  const Json receipt = fnx::read_json(path);
  if (!receipt.is_object() || !receipt.contains("schema") || !receipt["schema"].is_object() ||
      text_of(receipt["schema"], "name") != "fnx.receipt")
    throw Error(ErrorKind::Input, path + ": is no fnx receipt");
  if (!text_of(receipt["schema"], "version").starts_with("1."))
    throw Error(ErrorKind::Input, path + ": its receipt schema is newer than 1.x, which this build reads");
  Reference out;
  const auto result = receipt.find("result");
  if (result != receipt.end() && result->is_object() && !text_of(*result, "digest").empty()) {
    out = {text_of(*result, "kind"), text_of(*result, "digest"), digests(*result, "families"),
           digests(*result, "tensor_digests")};
  } else if (const auto subjects = receipt.find("subjects"); subjects != receipt.end() && subjects->is_array()) {
    for (const Json& subject : *subjects) {
      if (!subject.is_object() || text_of(subject, "role") != "checkpoint" || !subject.contains("fingerprint"))
        continue;
      out.kind = text_of(subject["fingerprint"], "kind");
      out.digest = text_of(subject["fingerprint"], "digest");
    }
  }
  if (out.kind != "full" && out.kind != "advisory")
    throw Error(ErrorKind::Input, path + ": its fingerprint is of kind '" + out.kind + "', not full or advisory");
  return out;
}

// One line for each name whose digests differ or that one side lacks.
void compare(const std::map<std::string, std::string>& before, const std::map<std::string, std::string>& now,
             const char* what, Json& differences) {
  const auto add = [&](const char* how, const std::string& name) {
    differences.push_back(Json{{"comparison", how}, {"what", what}, {"name", name}});
  };
  for (const auto& [name, digest] : before) {
    const auto it = now.find(name);
    if (it == now.end())
      add("absent now", name);
    else if (digest.empty())
      add("unverified", name);
    else if (it->second != digest)
      add("different", name);
  }
  for (const auto& [name, digest] : now)
    if (!before.contains(name)) add("new", name);
}

Json compare_all(const Reference& reference, const Fingerprint& now) {
  Json differences = Json::array();
  if (reference.digest.empty()) {
    differences.push_back(Json{{"comparison", "unverified"}, {"what", "checkpoint"}, {"name", "no digest in receipt"}});
    return differences;
  }
  if (reference.digest != now.digest)
    differences.push_back(Json{{"comparison", "different"}, {"what", "checkpoint"}, {"name", reference.kind}});
  std::map<std::string, std::string> families, tensors;
  for (const fnx::FamilyDigest& f : now.families) families[f.name] = f.digest;
  for (const fnx::TensorDigest& t : now.details) tensors[t.name] = t.digest;
  if (!reference.families.empty()) compare(reference.families, families, "family", differences);
  if (!reference.tensors.empty()) compare(reference.tensors, tensors, "tensor", differences);
  return differences;
}

Json make_result(const Fingerprint& print) {
  Json out = Json::object();
  out["kind"] = fnx::fingerprint_kind_name(print.kind);
  out["algorithm"] = "xxh3-128";
  out["digest"] = print.digest;
  out["tensors"] = print.tensors;
  out["bytes"] = print.bytes;
  out["families"] = Json::array();
  for (const fnx::FamilyDigest& f : print.families)
    out["families"].push_back(Json{{"name", f.name}, {"tensors", f.tensors}, {"bytes", f.bytes}, {"digest", f.digest}});
  if (print.details.empty()) return out;
  out["tensor_digests"] = Json::array();
  for (const fnx::TensorDigest& t : print.details)
    out["tensor_digests"].push_back(Json{{"name", t.name}, {"digest", t.digest}});
  return out;
}

std::string table(const Json& result, bool cached) {
  std::string out = fmt::format("{} {}  {} tensors, {} bytes, {}\n", result["kind"].get<std::string>(),
                                result["digest"].get<std::string>(), result["tensors"].get<uint64_t>(),
                                result["bytes"].get<uint64_t>(), cached ? "cached" : "computed");
  for (const Json& f : result["families"])
    out += fmt::format("{}  {:>7} {:>14}  {}\n", f["digest"].get<std::string>(), f["tensors"].get<uint64_t>(),
                       f["bytes"].get<uint64_t>(), f["name"].get<std::string>());
  if (result.contains("tensor_digests"))
    for (const Json& t : result["tensor_digests"])
      out += fmt::format("{}  {}\n", t["digest"].get<std::string>(), t["name"].get<std::string>());
  if (result.contains("files"))
    for (const Json& f : result["files"])
      out += fmt::format("{}  {}\n", f["sha256"].get<std::string>(), f["name"].get<std::string>());
  if (result.contains("differences")) {
    for (const Json& d : result["differences"])
      out += fmt::format("{}: {} {}\n", d["comparison"].get<std::string>(), d["what"].get<std::string>(),
                         d["name"].get<std::string>());
    if (result["differences"].empty()) out += "equal\n";
  }
  return out;
}

void run(const Options& options, fnx::ToolRun& tool) {
  std::optional<Reference> reference;
  if (!options.verify.empty()) reference = load_reference(options.verify);
  fnx::need_folder(options.model);
  const fnx::Checkpoint checkpoint(options.model);

  fnx::FingerprintOptions how;
  // A comparison proves something only when the bytes were read.
  how.cache = !options.no_cache && !reference;
  how.per_tensor = options.per_tensor || (reference && !reference->tensors.empty());
  how.stopping = [&] { return tool.stopping(); };
  how.progress = [&](uint64_t done, uint64_t total) { tool.progress("hashing", done, total); };
  const bool advisory = reference ? reference->kind == "advisory" : options.advisory;
  const Fingerprint print =
      fnx::fingerprint(checkpoint, advisory ? fnx::FingerprintKind::Advisory : fnx::FingerprintKind::Full, how);

  fnx::Receipt& receipt = tool.receipt();
  receipt.result = make_result(print);
  receipt.add_subject("checkpoint", fnx::bare_name(options.model), checkpoint.file_bytes(), print.subject());
  receipt.set_effective("origin", print.cached ? "cached" : "computed", print.cached ? "cache" : "files");
  receipt.evidence["tensors_hashed"] = print.cached ? uint64_t{0} : print.tensors;
  if (options.sha256) {
    const std::vector<std::string> hashes = fnx::sha256_of_files(checkpoint, how);
    Json files = Json::array();
    for (size_t i = 0; i < hashes.size(); ++i)
      files.push_back(
          Json{{"name", checkpoint.files()[i].name}, {"bytes", checkpoint.files()[i].bytes}, {"sha256", hashes[i]}});
    receipt.result["files"] = std::move(files);
  } else {
    receipt.add_not_run("SHA-256 of files", "asked for by --sha256");
  }
  if (advisory) receipt.add_not_run("bytes of most tensors", "an advisory fingerprint reads samples");
  if (reference) {
    receipt.result["differences"] = compare_all(*reference, print);
    receipt.add_gate("differences", static_cast<double>(receipt.result["differences"].size()), "==", 0, "differences");
  }
  tool.print(options.format == "json" ? receipt.result.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"
                                      : table(receipt.result, print.cached));
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const fnx::ToolInfo info{
      "fnx-fingerprint",
      "Hashes that identify a checkpoint, and their comparison with an earlier receipt.",
      {"fnx-fingerprint --model PACK --receipt pack.json", "fnx-fingerprint --model COPY --verify pack.json",
       "fnx-fingerprint --model PACK --advisory"}};
  return fnx::run_tool(
      argc, argv, info,
      [&](CLI::App& app) {
        app.add_option("--model", options.model, "Checkpoint folder")->required()->type_name("DIR");
        auto* advisory = app.add_flag("--advisory", options.advisory,
                                      "Hash config, index and samples of the experts: seconds in place of minutes");
        app.add_option("--verify", options.verify, "Read all bytes again and compare with this receipt")
            ->type_name("RECEIPT")
            ->excludes(advisory);
        app.add_flag("--tensors", options.per_tensor, "Also list every tensor's digest")->excludes(advisory);
        app.add_flag("--sha256", options.sha256, "Also the SHA-256 of every tensor file");
        app.add_flag("--no-cache", options.no_cache, "Neither look into the user's cache folder nor write there");
        app.add_option("--format", options.format, "Form of the output")->check(CLI::IsMember({"table", "json"}));
      },
      [&](fnx::ToolRun& tool) { run(options, tool); });
}
