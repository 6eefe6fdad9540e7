#include "libcore/format/tensor_names.h"

#include <algorithm>
#include <cctype>

#include "libcore/format/tensor_source.h"

namespace fnx {
namespace {

bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

bool all_digits(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c); });
}

// The component before a final ".weight"; empty when the name ends otherwise.
std::string_view weight_owner(std::string_view name) {
  if (!name.ends_with(".weight")) return {};
  name.remove_suffix(7);
  const size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? name : name.substr(dot + 1);
}

}  // namespace

const char* role_name(Role role) {
  switch (role) {
    case Role::Embedding:
      return "embedding";
    case Role::Gdn:
      return "gdn";
    case Role::Attention:
      return "attention";
    case Role::Experts:
      return "experts";
    case Role::SharedExpert:
      return "shared_expert";
    case Role::Router:
      return "router";
    case Role::HyperConnection:
      return "hyper_connection";
    case Role::Ple:
      return "ple";
    case Role::NgramTable:
      return "ngram_table";
    case Role::Head:
      return "head";
    case Role::Mtp:
      return "mtp";
    case Role::Vision:
      return "vision";
    case Role::Other:
      return "other";
  }
  return "?";
}

Role role_of(std::string_view name) {
  if (name.starts_with("mtp.")) return Role::Mtp;
  if (name.starts_with("lm_head.")) return Role::Head;
  if (name.starts_with("model.visual.") || name.starts_with("visual.")) return Role::Vision;
  if (name.starts_with("model.")) name.remove_prefix(6);
  if (name.starts_with("language_model.")) name.remove_prefix(15);
  if (name.starts_with("embed_tokens.")) return Role::Embedding;
  if (contains(name, "hyper_connection")) return Role::HyperConnection;
  if (!name.starts_with("layers.")) return Role::Other;
  if (contains(name, ".ngram_embedding.")) return Role::NgramTable;
  if (contains(name, ".ple.")) return Role::Ple;
  if (contains(name, ".linear_attn.")) return Role::Gdn;
  if (contains(name, ".self_attn.")) return Role::Attention;
  if (contains(name, ".mlp.experts.")) return Role::Experts;
  if (contains(name, ".mlp.shared_expert.")) return Role::SharedExpert;
  if (contains(name, ".mlp.gate.") || contains(name, ".mlp.shared_expert_gate.")) return Role::Router;
  return Role::Other;
}

std::string family_name(std::string_view name) {
  std::string out;
  out.reserve(name.size());
  for (size_t start = 0; start <= name.size();) {
    const size_t dot = std::min(name.find('.', start), name.size());
    const std::string_view part = name.substr(start, dot - start);
    if (start > 0) out += '.';
    if (all_digits(part)) {
      out += '*';
    } else if (part.starts_with("shard_") && all_digits(part.substr(6))) {
      out += "shard_*";
    } else {
      out += part;
    }
    start = dot + 1;
  }
  return out;
}

bool is_norm_weight(std::string_view name) { return contains(weight_owner(name), "norm"); }

bool is_centred_norm(std::string_view name) {
  return is_norm_weight(name) && !name.ends_with(".linear_attn.norm.weight");
}

std::string text_root(const TensorSource& source) {
  const bool nested =
      source.find("model.language_model.embed_tokens.weight") || !source.find("model.embed_tokens.weight");
  return nested ? "model.language_model" : "model";
}

}  // namespace fnx
