#include "libcore/engine/snapshot_file.h"

#include <fmt/format.h>

#include <cstring>

#include "kernels/error.h"
#include "libcore/format/sealed_file.h"
#include "libcore/receipt/private_file.h"

namespace fnx {

namespace {
constexpr SealedFormat kFormat{"fnxsnap\n", 1, "snapshot"};

Json owner_json(const SnapshotOwner& o) {
  return {{"checkpoint", o.checkpoint},
          {"backend", o.backend},
          {"kv_dtype", dtype_name(o.kv_dtype)},
          {"draft_head", o.draft_head}};
}
}  // namespace

void write_snapshot(const std::filesystem::path& file, const SnapshotOwner& owner, const Snapshot& snapshot) {
  Json header = owner_json(owner);
  header["tokens"] = snapshot.tokens.size();
  std::string body(snapshot.bytes(), 0);
  const size_t ids = snapshot.tokens.size() * sizeof(int32_t);
  std::memcpy(body.data(), snapshot.tokens.data(), ids);
  std::memcpy(body.data() + ids, snapshot.states.data(), snapshot.states.size());
  write_private_file_atomic(file, seal(kFormat, header, body));
}

Snapshot read_snapshot(const std::filesystem::path& file, const SnapshotOwner& owner) {
  const SealedFile sealed = unseal(kFormat, file);
  const Json here = owner_json(owner);
  for (const auto& [key, value] : here.items())
    if (!sealed.header.contains(key) || sealed.header[key] != value)
      throw Error(ErrorKind::Input,
                  fmt::format("{}: a snapshot of another run: its {} is {}, here it is {}", file.string(), key,
                              sealed.header.contains(key) ? sealed.header[key].dump() : "absent", value.dump()));
  const Json& count = sealed.header.value("tokens", Json());
  const size_t tokens = count.is_number_unsigned() ? count.get<size_t>() : 0;
  if (tokens == 0 || tokens > sealed.body.size() / sizeof(int32_t))
    throw Error(ErrorKind::Input, fmt::format("{}: a snapshot without its tokens", file.string()));
  Snapshot out;
  out.tokens.resize(tokens);
  const size_t ids = tokens * sizeof(int32_t);
  std::memcpy(out.tokens.data(), sealed.body.data(), ids);
  const auto* states = reinterpret_cast<const std::byte*>(sealed.body.data()) + ids;
  out.states.assign(states, states + (sealed.body.size() - ids));
  return out;
}

}  // namespace fnx
