// What a tensor's name says: its family and its part of the model.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fnx {

class TensorSource;

// Parts of a checkpoint, in the order in which they are listed.
enum class Role : uint8_t {
  Embedding,
  Gdn,
  Attention,
  Experts,
  SharedExpert,
  Router,
  HyperConnection,
  Ple,
  NgramTable,
  Head,
  Mtp,
  Vision,
  Other
};
inline constexpr int kRoles = static_cast<int>(Role::Other) + 1;

const char* role_name(Role role);
Role role_of(std::string_view tensor_name);

// False for vision tensors and for names that no part of the text model has.
inline bool is_text(Role role) { return role != Role::Vision && role != Role::Other; }

// The name with layer, expert and shard numbers replaced by `*`.
std::string family_name(std::string_view tensor_name);

// True for the weights of norms: "....q_norm.weight", "....ple.norm_key.weight". `centred` tells whether the model
// multiplies by 1 + weight.
bool is_norm_weight(std::string_view tensor_name);
bool is_centred_norm(std::string_view tensor_name);

// Where the trunk's names begin: "model.language_model", or "model" in text-only conversions.
std::string text_root(const TensorSource& source);

}  // namespace fnx
