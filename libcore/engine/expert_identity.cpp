#include "libcore/engine/expert_identity.h"

#include <fmt/format.h>

#include "kernels/error.h"
#include "libcore/format/tensor_names.h"

namespace fnx {

namespace {

// The one list of the integers: written, read and compared by it.
struct Field {
  const char* key;
  int64_t ExpertIdentity::*member;
  int64_t low, high;
};
constexpr Field kFields[] = {{"world", &ExpertIdentity::world, 1, 1 << 16},
                             {"rank", &ExpertIdentity::rank, 0, (1 << 16) - 1},
                             {"layers", &ExpertIdentity::layers, 1, 1 << 16},
                             {"draft_layers", &ExpertIdentity::draft_layers, 0, 1 << 8},
                             {"experts", &ExpertIdentity::experts, 1, 1 << 16},
                             {"experts_per_token", &ExpertIdentity::experts_per_token, 1, 1 << 16}};

}  // namespace

ExpertIdentity ExpertIdentity::of(const ModelConfig& c, const std::string& checkpoint) {
  ExpertIdentity out;
  out.checkpoint = checkpoint;
  out.layers = c.layers(), out.draft_layers = c.mtp_layers;
  out.experts = c.experts, out.experts_per_token = c.experts_per_token;
  return out;
}

void ExpertIdentity::write(Json& header) const {
  header["checkpoint"] = checkpoint;
  for (const Field& f : kFields) header[f.key] = this->*f.member;
}

int64_t header_integer(const Json& header, const char* key, int64_t low, int64_t high, const std::string& file) {
  const auto it = header.find(key);
  if (it == header.end() || !it->is_number_integer() || (it->is_number_unsigned() && it->get<uint64_t>() > INT64_MAX) ||
      it->get<int64_t>() < low || it->get<int64_t>() > high)
    throw Error(ErrorKind::Input, fmt::format("{}: its header's {} is {}, an integer in {} to {} belongs there", file,
                                              key, it == header.end() ? "absent" : it->dump(), low, high));
  return it->get<int64_t>();
}

ExpertIdentity ExpertIdentity::read(const Json& header, const std::string& file) {
  ExpertIdentity out;
  for (const Field& f : kFields) out.*f.member = header_integer(header, f.key, f.low, f.high, file);
  if (out.rank >= out.world)
    throw Error(ErrorKind::Input, fmt::format("{}: rank {} in a world of {}", file, out.rank, out.world));
  const auto it = header.find("checkpoint");
  if (it == header.end() || !it->is_string())
    throw Error(ErrorKind::Input, fmt::format("{}: its header names no checkpoint", file));
  out.checkpoint = *it;
  return out;
}

std::string ExpertIdentity::difference(const ExpertIdentity& wanted) const {
  std::string out;
  if (checkpoint != wanted.checkpoint)
    out += fmt::format("checkpoint {}, not {}", checkpoint.substr(0, 32), wanted.checkpoint.substr(0, 32));
  for (const Field& f : kFields)
    if (this->*f.member != wanted.*f.member)
      out += fmt::format("{}{} {}, not {}", out.empty() ? "" : "; ", f.key, this->*f.member, wanted.*f.member);
  return out;
}

std::vector<uint32_t> expert_copy_bytes(const TensorSource& source, const ModelConfig& c) {
  std::vector<uint32_t> out;
  for (int64_t l = 0; l < c.layers() + c.mtp_layers; ++l) {
    const std::string layer = l < c.layers() ? fmt::format("{}.layers.{}", text_root(source), l)
                                             : fmt::format("mtp.layers.{}", l - c.layers());
    for (int64_t e = 0; e < c.experts; ++e) {
      uint64_t bytes = 0;
      for (const char* part : {"gate_proj", "up_proj", "down_proj"})
        for (const char* form : {"trellis", "weight"})
          if (const TensorInfo* t = source.find(fmt::format("{}.mlp.experts.{}.{}.{}", layer, e, part, form)))
            bytes += t->bytes;
      out.push_back(static_cast<uint32_t>(bytes));
    }
  }
  return out;
}

}  // namespace fnx
