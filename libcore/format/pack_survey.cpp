#include "libcore/format/pack_survey.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <set>

#include "kernels/error.h"
#include "libcore/format/exl3_linear.h"
#include "libcore/format/float_values.h"
#include "libcore/format/model_config.h"

namespace fnx {
namespace {

constexpr size_t kListedRefusals = 16;

// Splits "a.b.suh" into "a.b" and "suh".
std::pair<std::string_view, std::string_view> split_name(std::string_view name) {
  const size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return {"", name};
  return {name.substr(0, dot), name.substr(dot + 1)};
}

bool is_part(std::string_view suffix) {
  for (const char* part : {"suh", "svh", "su", "sv", "mul1", "mcg"})
    if (suffix == part) return true;
  return false;
}

class Survey {
 public:
  explicit Survey(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  PackSurvey take() {
    out_.problems = checkpoint_.problems();
    for (const TensorInfo& t : checkpoint_.tensors()) {
      const Role role = role_of(t.name);
      RoleTotal& total = out_.roles[static_cast<size_t>(role)];
      total.tensors += 1;
      total.bytes += t.bytes;
      out_.tensors += 1;
      out_.bytes += t.bytes;
      add(t, role);
    }
    for (auto& [key, family] : families_) out_.families.push_back(std::move(family));
    std::sort(out_.families.begin(), out_.families.end(), [](const PackFamily& a, const PackFamily& b) {
      return a.role != b.role ? a.role < b.role : a.name < b.name;
    });
    finish_norms();
    finish_problems();
    return std::move(out_);
  }

 private:
  void add(const TensorInfo& t, Role role) {
    const auto [prefix, suffix] = split_name(t.name);
    if (suffix == "trellis" && prefix.find("ngram_embedding") != std::string_view::npos)
      return add_table(t, prefix, role);
    if (suffix == "trellis") return add_layer(t, prefix, role);
    if (is_part(suffix) || suffix == "bias") {
      if (checkpoint_.find(std::string(prefix) + ".trellis")) return;
      if (suffix != "bias") refusals_.push_back(fmt::format("{} stands without {}.trellis", t.name, prefix));
    }
    PackFamily& family = at(family_name(t.name), role, t.dtype_text, t.shape);
    family.count += 1;
    family.bytes += t.bytes;
    family.weights += static_cast<uint64_t>(t.elements());
  }

  PackFamily& at(const std::string& name, Role role, const std::string& form, const std::vector<int64_t>& shape) {
    PackFamily& family = families_[fmt::format("{} {} [{}]", name, form, fmt::join(shape, ","))];
    family.name = name;
    family.role = role;
    family.form = form;
    family.shape = shape;
    return family;
  }

  void add_layer(const TensorInfo& t, std::string_view prefix, Role role) {
    try {
      const LinearInfo layer = describe_linear(checkpoint_, prefix).value();
      PackFamily& family = at(family_name(prefix), role, exl3::codebook_name(layer.codebook), {layer.out, layer.in});
      family.quantized = true;
      family.count += 1;
      family.bytes += layer.bytes;
      family.weights += static_cast<uint64_t>(layer.in * layer.out);
      family.widths[layer.half_bits] += 1;
      family.packed_signs += layer.packed_signs;
      family.biases += layer.bias;
    } catch (const Error& error) {
      refusals_.push_back(error.what());
      at(family_name(t.name), role, t.dtype_text, t.shape).count += 1;
      at(family_name(t.name), role, t.dtype_text, t.shape).bytes += t.bytes;
    }
  }

  // Rows of 1 + 10 * bits words of 160 values; the shards of one table make one family.
  void add_table(const TensorInfo& t, std::string_view prefix, Role role) {
    const int64_t words = t.shape.size() == 2 ? t.shape[1] : 0;
    if (words < 11 || (words - 1) % 10 != 0) {
      refusals_.push_back(
          fmt::format("{}: shape [{}] where [rows, 1 + 10*bits] is needed", t.name, fmt::join(t.shape, ", ")));
      return;
    }
    const int64_t dim = 160;
    PackFamily& family = families_[fmt::format("{} table {}", family_name(prefix), words)];
    if (family.count == 0) family.shape = {0, dim};
    family.name = family_name(prefix);
    family.role = role;
    family.form = "mul1 rows";
    family.quantized = true;
    family.count += 1;
    family.bytes += t.bytes;
    family.shape[0] += t.shape[0];
    family.weights += static_cast<uint64_t>(t.shape[0] * dim);
    family.widths[static_cast<int>((words - 1) / 5)] += 1;
    const auto [table, shard] = split_name(prefix);
    int64_t number = 0;
    if (shard.starts_with("shard_") &&
        std::from_chars(shard.data() + 6, shard.data() + shard.size(), number).ec == std::errc())
      shards_[std::string(table)].insert(number);
  }

  void finish_norms() {
    try {
      out_.norms = survey_norms(checkpoint_);
    } catch (const Error& error) {
      refusals_.push_back(error.what());
    }
    for (const NormFamily& norm : out_.norms)
      if (std::isnan(norm.mean)) out_.problems.push_back(fmt::format("{} holds NaN or nothing", norm.name));
    for (std::string& problem : raw_norm_problems(out_.norms)) out_.problems.push_back(std::move(problem));
  }

  void finish_problems() {
    for (const auto& [table, numbers] : shards_)
      for (int64_t i = 0; i < *numbers.rbegin(); ++i)
        if (!numbers.contains(i)) refusals_.push_back(fmt::format("{}.shard_{}.trellis is missing", table, i));
    const size_t listed = std::min(refusals_.size(), kListedRefusals);
    out_.problems.insert(out_.problems.end(), refusals_.begin(), refusals_.begin() + static_cast<ptrdiff_t>(listed));
    if (refusals_.size() > listed)
      out_.problems.push_back(fmt::format("and {} more tensors or layers like these", refusals_.size() - listed));
    std::error_code error;
    const std::filesystem::path config = checkpoint_.folder() / "config.json";
    if (!std::filesystem::exists(config, error) || !out_.has_text()) return;
    try {
      ModelConfig::load(config);
    } catch (const Error& problem) {
      out_.problems.push_back(problem.what());
    }
  }

  const Checkpoint& checkpoint_;
  PackSurvey out_;
  std::map<std::string, PackFamily> families_;
  std::map<std::string, std::set<int64_t>> shards_;  // numbers seen, by table
  std::vector<std::string> refusals_;
};

double bits(const std::vector<PackFamily>& families, bool experts_only) {
  uint64_t bytes = 0, weights = 0;
  for (const PackFamily& f : families) {
    if (!f.quantized || f.role == Role::NgramTable || (experts_only && f.role != Role::Experts)) continue;
    bytes += f.bytes;
    weights += f.weights;
  }
  return weights ? 8.0 * static_cast<double>(bytes) / static_cast<double>(weights) : 0;
}

}  // namespace

double PackFamily::mean_bits() const {
  uint64_t layers = 0, half_bits = 0;
  for (const auto& [width, n] : widths) {
    layers += n;
    half_bits += static_cast<uint64_t>(width) * n;
  }
  return layers ? static_cast<double>(half_bits) / 2 / static_cast<double>(layers) : 0;
}

bool PackSurvey::has_text() const {
  for (int r = 0; r < kRoles; ++r)
    if (is_text(static_cast<Role>(r)) && roles[static_cast<size_t>(r)].tensors > 0) return true;
  return false;
}

const char* norm_group_name(NormGroup group) { return group == NormGroup::Trunk ? "trunk" : "draft head"; }

NormGroup norm_group(const NormFamily& norm) {
  return role_of(norm.name) == Role::Mtp ? NormGroup::DraftHead : NormGroup::Trunk;
}

double centred_norm_mean(const std::vector<NormFamily>& norms, NormGroup group) {
  double sum = 0;
  int families = 0;
  for (const NormFamily& norm : norms) {
    if (!norm.centred || norm_group(norm) != group) continue;
    sum += norm.mean;
    families += 1;
  }
  return families ? sum / families : 0;
}

std::vector<std::string> raw_norm_problems(const std::vector<NormFamily>& norms) {
  std::vector<std::string> out;
  for (NormGroup group : {NormGroup::Trunk, NormGroup::DraftHead}) {
    const double mean = centred_norm_mean(norms, group);
    if (!(mean > kCentredNormLimit)) continue;
    std::vector<std::string> names;
    for (const NormFamily& norm : norms)
      if (norm.centred && norm_group(norm) == group && norm.mean > kCentredNormLimit)
        names.push_back(fmt::format("{} ({:.3f})", norm.name, norm.mean));
    out.push_back(fmt::format("norms of the {} average {:.3f}: stored around 1 where the model adds 1 itself: {}",
                              norm_group_name(group), mean, fmt::join(names, ", ")));
  }
  return out;
}

std::vector<NormFamily> survey_norms(const TensorSource& source) {
  std::map<std::string, NormFamily> families;
  for (const TensorInfo& t : source.tensors()) {
    if (!is_norm_weight(t.name) || !is_text(role_of(t.name))) continue;
    NormFamily& norm = families[family_name(t.name)];
    norm.centred = is_centred_norm(t.name);
    for (float value : float_values(source, t)) norm.mean += value;  // the sum until below
    norm.tensors += 1;
    norm.elements += static_cast<uint64_t>(t.elements());
  }
  std::vector<NormFamily> out;
  for (auto& [name, norm] : families) {
    norm.name = name;
    norm.mean =
        norm.elements ? norm.mean / static_cast<double>(norm.elements) : std::numeric_limits<double>::quiet_NaN();
    out.push_back(std::move(norm));
  }
  return out;
}

double PackSurvey::quantized_bits() const { return bits(families, false); }
double PackSurvey::expert_bits() const { return bits(families, true); }

PackSurvey survey_pack(const Checkpoint& checkpoint) { return Survey(checkpoint).take(); }

}  // namespace fnx
