#include "libcore/format/norm_families.h"

#include <cctype>
#include <map>
#include <numeric>

#include "libcore/format/float_values.h"

namespace fnx {

namespace {

std::string without_numbers(std::string_view name) {
  std::string out;
  for (size_t i = 0; i < name.size(); ++i) {
    const bool digit = std::isdigit(static_cast<unsigned char>(name[i])) != 0;
    const bool whole = digit && (i == 0 || name[i - 1] == '.' || out.back() == 'N');
    if (!whole)
      out += name[i];
    else if (out.empty() || out.back() != 'N')
      out += 'N';
  }
  return out;
}

bool is_text_norm(const TensorInfo& t) {
  const std::string_view name = t.name;
  if (!name.ends_with(".weight") || name.find("visual") != name.npos) return false;
  const std::string_view owner = name.substr(0, name.size() - 7);
  const bool floating = t.dtype && (*t.dtype == DType::F16 || *t.dtype == DType::BF16 || *t.dtype == DType::F32);
  return floating && owner.substr(owner.rfind('.') + 1).find("norm") != name.npos;
}

}  // namespace

std::vector<NormFamily> norm_families(const TensorSource& source) {
  std::map<std::string, std::pair<NormFamily, int64_t>> families;  // with the number of elements
  for (const TensorInfo& t : source.tensors()) {
    if (!is_text_norm(t)) continue;
    auto& [family, count] = families[without_numbers(t.name)];
    const std::vector<float> values = float_values(source, t);
    family.mean += std::accumulate(values.begin(), values.end(), 0.0);
    family.example = t.name;
    ++family.tensors;
    count += static_cast<int64_t>(values.size());
  }
  std::vector<NormFamily> out;
  for (auto& [name, entry] : families) {
    NormFamily& f = entry.first;
    f.name = name;
    if (entry.second > 0) f.mean /= static_cast<double>(entry.second);
    f.centred = !f.name.ends_with(".linear_attn.norm.weight");
    f.mixer = f.name.find("hyper_connection_mixer.") != std::string::npos;
    out.push_back(f);
  }
  return out;
}

}  // namespace fnx
