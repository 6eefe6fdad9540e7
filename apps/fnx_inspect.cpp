// fnx-inspect: what a checkpoint folder holds, from its headers.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/error.h"
#include "libcore/base/path_text.h"
#include "libcore/cli/plan_options.h"
#include "libcore/cli/tool.h"
#include "libcore/format/pack_survey.h"
#include "libcore/format/synthetic_source.h"

namespace {

using fnx::Json, fnx::PackFamily, fnx::PackSurvey;

struct Options {
  std::string model, format = "table";
  bool json = false, tensors = false;
  fnx::PlanOptions plan;
};

std::string shape_text(const std::vector<int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

std::string bytes_text(uint64_t bytes) {
  const double b = static_cast<double>(bytes);
  if (bytes >= uint64_t{1} << 30) return fmt::format("{:.2f} GiB", b / (uint64_t{1} << 30));
  if (bytes >= uint64_t{1} << 20) return fmt::format("{:.2f} MiB", b / (1 << 20));
  if (bytes >= uint64_t{1} << 10) return fmt::format("{:.2f} KiB", b / (1 << 10));
  return fmt::format("{} B", bytes);
}

// "6", "3.5", or with counts where they differ: "3:606 4:162".
std::string widths_text(const PackFamily& f) {
  std::string out;
  for (const auto& [half_bits, layers] : f.widths) {
    if (!out.empty()) out += ' ';
    out += half_bits % 2 ? fmt::format("{}.5", half_bits / 2) : std::to_string(half_bits / 2);
    if (f.widths.size() > 1) out += fmt::format(":{}", layers);
  }
  return out;
}

// Printable for a terminal: control characters become '?'.
std::string clean(std::string text) {
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 32 || c == 127) c = '?';
  return text;
}

std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string out = "\"";
  for (char c : text) out += c == '"' ? std::string("\"\"") : std::string(1, c);
  return out + "\"";
}

Json make_result(const fnx::Checkpoint& checkpoint, const PackSurvey& survey) {
  Json out = Json::object();
  out["tensors"] = survey.tensors;
  out["bytes"] = survey.bytes;
  out["quantized_bits_per_weight"] = survey.quantized_bits();
  out["expert_bits_per_weight"] = survey.expert_bits();
  out["roles"] = Json::array();
  for (int r = 0; r < fnx::kRoles; ++r) {
    const fnx::RoleTotal& total = survey.roles[static_cast<size_t>(r)];
    if (total.tensors > 0)
      out["roles"].push_back(Json{
          {"role", fnx::role_name(static_cast<fnx::Role>(r))}, {"tensors", total.tensors}, {"bytes", total.bytes}});
  }
  out["families"] = Json::array();
  for (const PackFamily& f : survey.families) {
    Json family{{"name", f.name}, {"role", fnx::role_name(f.role)}, {"count", f.count}};
    family["shape"] = f.shape;
    family["form"] = f.form;
    family["widths"] = Json::array();
    for (const auto& [half_bits, layers] : f.widths)
      family["widths"].push_back(Json{{"bits", half_bits / 2.0}, {"count", layers}});
    family["packed_signs"] = f.packed_signs;
    family["biases"] = f.biases;
    family["bytes"] = f.bytes;
    out["families"].push_back(std::move(family));
  }
  out["norms"] = Json::array();
  for (const fnx::NormFamily& n : survey.norms)
    out["norms"].push_back(Json{{"name", n.name}, {"centred", n.centred}, {"tensors", n.tensors}, {"mean", n.mean}});
  out["centred_norm_means"] = Json{{"trunk", fnx::centred_norm_mean(survey.norms, fnx::NormGroup::Trunk)},
                                   {"draft_head", fnx::centred_norm_mean(survey.norms, fnx::NormGroup::DraftHead)}};
  out["files"] = Json::array();
  for (const fnx::SourceFile& f : checkpoint.files())
    out["files"].push_back(Json{{"name", f.name}, {"bytes", f.bytes}, {"in_index", f.in_index}});
  out["problems"] = survey.problems;
  return out;
}

void print_table(const fnx::Checkpoint& checkpoint, const PackSurvey& survey, fnx::ToolRun& tool) {
  constexpr std::string_view kTrunk = "model.language_model.";
  const auto short_name = [&](const std::string& name) {
    return clean(name.starts_with(kTrunk) ? name.substr(kTrunk.size()) : name);
  };
  std::string out =
      fmt::format("{} tensors, {} in {} files", survey.tensors, bytes_text(survey.bytes), checkpoint.files().size());
  out += fmt::format("; bits per weight: quantized layers {:.3f}, experts {:.3f}\n\n", survey.quantized_bits(),
                     survey.expert_bits());
  size_t width = 0;
  for (const PackFamily& f : survey.families) width = std::max(width, short_name(f.name).size());
  out += fmt::format("{:<{}} {:>6}  {:<17} {:<10} {:<14} {:>12}\n", "family (without model.language_model.)", width,
                     "count", "[out, in]", "form", "bits", "size");
  for (const PackFamily& f : survey.families)
    out += fmt::format("{:<{}} {:>6}  {:<17} {:<10} {:<14} {:>12}\n", short_name(f.name), width, f.count,
                       shape_text(f.shape), clean(f.form), widths_text(f), bytes_text(f.bytes));
  out += "\npart\n";
  for (int r = 0; r < fnx::kRoles; ++r) {
    const fnx::RoleTotal& total = survey.roles[static_cast<size_t>(r)];
    if (total.tensors == 0) continue;
    out += fmt::format("  {:<17} {:>7} tensors {:>12}\n", fnx::role_name(static_cast<fnx::Role>(r)), total.tensors,
                       bytes_text(total.bytes));
  }
  out += fmt::format("\nnorm means; centred ones together: trunk {:.4f}, draft head {:.4f}\n",
                     fnx::centred_norm_mean(survey.norms, fnx::NormGroup::Trunk),
                     fnx::centred_norm_mean(survey.norms, fnx::NormGroup::DraftHead));
  for (const fnx::NormFamily& n : survey.norms)
    out += fmt::format("  {:<{}} {:>4} tensors {:>8.4f}{}\n", short_name(n.name), width, n.tensors, n.mean,
                       n.centred ? "" : "  not centred");
  out += "\nfiles\n";
  for (const fnx::SourceFile& f : checkpoint.files())
    out += fmt::format("  {} {}{}\n", clean(f.name), bytes_text(f.bytes), f.in_index ? "" : "  side file");
  if (!survey.problems.empty()) out += "\nproblems\n";
  for (const std::string& problem : survey.problems) out += "  " + clean(problem) + "\n";
  tool.print(out);
}

void print_csv(const PackSurvey& survey, fnx::ToolRun& tool) {
  std::string out = "family,role,count,shape,form,bits,bytes\n";
  for (const PackFamily& f : survey.families)
    out += fmt::format("{},{},{},{},{},{},{}\n", csv_field(f.name), fnx::role_name(f.role), f.count,
                       csv_field(shape_text(f.shape)), csv_field(f.form), widths_text(f), f.bytes);
  tool.print(out);
}

// Every tensor, in file order; json is one object a line.
void print_tensors(const fnx::Checkpoint& checkpoint, const std::string& format, fnx::ToolRun& tool) {
  std::string out = format == "csv" ? "name,dtype,shape,file,offset,bytes\n" : "";
  for (const fnx::TensorInfo& t : checkpoint.tensors()) {
    const std::string& file = checkpoint.files()[t.file].name;
    if (format == "json") {
      const Json line{{"name", t.name}, {"dtype", t.dtype_text}, {"shape", t.shape},
                      {"file", file},   {"offset", t.offset},    {"bytes", t.bytes}};
      out += line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
    } else if (format == "csv") {
      out += fmt::format("{},{},{},{},{},{}\n", csv_field(t.name), csv_field(t.dtype_text),
                         csv_field(shape_text(t.shape)), csv_field(file), t.offset, t.bytes);
    } else {
      out += fmt::format("{} {} {} {} {} {}\n", clean(t.name), clean(t.dtype_text), shape_text(t.shape), clean(file),
                         t.offset, t.bytes);
    }
    if (out.size() < (1 << 20)) continue;
    tool.print(out);
    out.clear();
    if (tool.stopping()) return;
  }
  tool.print(out);
}

void run(const Options& options, fnx::ToolRun& tool) {
  const std::string format = options.json ? "json" : options.format;
  if (options.plan.plan) return fnx::run_plan(options.plan, options.model, format, tool);
  fnx::need_folder(options.model);
  const fnx::Checkpoint checkpoint(options.model, {.strict = false});
  const PackSurvey survey = fnx::survey_pack(checkpoint);

  fnx::Receipt& receipt = tool.receipt();
  receipt.add_subject("checkpoint", fnx::bare_name(options.model), checkpoint.file_bytes());
  receipt.result = make_result(checkpoint, survey);
  receipt.add_not_run("tensor data", "only headers, codebook markers and norm weights are read; see fnx-fingerprint");
  if (!survey.has_text())
    throw fnx::Error(
        fnx::ErrorKind::Input,
        fmt::format("{} holds no language tensors: {} tensors, {} of them vision; give the folder of a "
                    "qwen4_exp checkpoint's text part",
                    options.model, survey.tensors, survey.roles[static_cast<size_t>(fnx::Role::Vision)].tensors));
  if (options.tensors)
    print_tensors(checkpoint, format, tool);
  else if (format == "json")
    tool.print(receipt.result.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  else if (format == "csv")
    print_csv(survey, tool);
  else
    print_table(checkpoint, survey, tool);
  receipt.add_gate("pack_problems", static_cast<double>(survey.problems.size()), "==", 0, "problems");
  if (!survey.problems.empty() && (options.tensors || format != "table"))
    for (const std::string& problem : survey.problems) tool.info("problem: " + problem);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const fnx::ToolInfo info{
      "fnx-inspect",
      "What a checkpoint folder holds: families, widths, codebooks, norm means, problems. Reads headers only.",
      {"fnx-inspect --model PACK", "fnx-inspect --model PACK --plan --vram 16GiB --ram 64GiB",
       "fnx-inspect --model PACK --tensors --format csv > tensors.csv"}};
  return fnx::run_tool(
      argc, argv, info,
      [&](CLI::App& app) {
        app.add_option("--model", options.model, "Checkpoint folder, or with --plan also synth:NAME,...")
            ->required()
            ->type_name("DIR");
        auto* tensors = app.add_flag("--tensors", options.tensors, "List every tensor; as json one object a line");
        auto* format = app.add_option("--format", options.format, "Form of the output")
                           ->check(CLI::IsMember({"table", "json", "csv"}));
        app.add_flag("--json", options.json, "Same as --format json")->excludes(format);
        options.plan.add(app);
        tensors->excludes("--plan");
      },
      [&](fnx::ToolRun& tool) { run(options, tool); });
}
