#include "libcore/engine/expert_trace.h"

#include <fmt/format.h>

#include <cstring>

#include "kernels/error.h"
#include "libcore/format/sealed_file.h"

namespace fnx {

namespace {

constexpr SealedFormat kFormat{"fnxtrac\n", 1, "routing trace"};

template <class T>
void append(std::string& body, T value) {
  body.append(reinterpret_cast<const char*>(&value), sizeof value);
}

}  // namespace

TraceRecorder::TraceRecorder(const ExpertIdentity& identity, std::span<const uint32_t> copy_bytes)
    : identity_(identity), body_(reinterpret_cast<const char*>(copy_bytes.data()), copy_bytes.size_bytes()) {}

void TraceRecorder::add(int64_t layer, std::span<const int32_t> ids) {
  const auto rows = static_cast<uint32_t>(static_cast<int64_t>(ids.size()) / identity_.experts_per_token);
  const bool new_forward = layer == 0, forward_done = last_layer_ < 0 || last_layer_ >= identity_.layers - 1;
  if (new_forward ? !forward_done : layer != last_layer_ + 1 || layer >= identity_.all_layers())
    throw Error(ErrorKind::Internal, fmt::format("routing of layer {} after layer {}", layer, last_layer_));
  if (new_forward) {
    ++forwards_;
    rows_at_ = body_.size();
    append(body_, rows);
    append(body_, uint32_t{0});
  }
  if (layer == identity_.layers) std::memcpy(body_.data() + rows_at_ + sizeof rows, &rows, sizeof rows);
  last_layer_ = layer;
  for (const int32_t id : ids) append(body_, static_cast<uint16_t>(id));
}

void TraceRecorder::save(const std::filesystem::path& file) const {
  if (last_layer_ >= 0 && last_layer_ < identity_.layers - 1)
    throw Error(ErrorKind::Internal, fmt::format("a trace that ends after layer {}", last_layer_));
  Json header = Json::object();
  identity_.write(header);
  header["forwards"] = forwards_;
  write_file_atomic(file, seal(kFormat, header, body_));
}

RoutingTrace RoutingTrace::load(const std::filesystem::path& file) {
  const SealedFile sealed = unseal(kFormat, file);
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorKind::Input, fmt::format("{}: {}", file.string(), why));
  };
  RoutingTrace t;
  t.identity = ExpertIdentity::read(sealed.header, file.string());
  t.digest = sealed.digest;
  const auto forwards = header_integer(sealed.header, "forwards", 0, INT64_MAX, file.string());
  const ExpertIdentity& id = t.identity;
  std::string_view body = sealed.body;
  const auto take = [&](void* to, uint64_t bytes) {
    if (bytes > body.size()) refuse(fmt::format("its body ends within forward {} of {}", t.forwards.size(), forwards));
    std::memcpy(to, body.data(), bytes);
    body.remove_prefix(bytes);
  };
  if (static_cast<uint64_t>(id.all_layers() * id.experts) > body.size() / sizeof(uint32_t))
    refuse("its body is too short for the experts' sizes");
  t.copy_bytes.resize(static_cast<size_t>(id.all_layers() * id.experts));
  take(t.copy_bytes.data(), t.copy_bytes.size() * sizeof(uint32_t));
  for (int64_t f = 0; f < forwards; ++f) {
    uint32_t rows[2];
    take(rows, sizeof rows);
    t.forwards.push_back({rows[0], rows[1], t.ids.size()});
    const uint64_t count =
        static_cast<uint64_t>(id.experts_per_token) *
        (static_cast<uint64_t>(id.layers) * rows[0] + static_cast<uint64_t>(id.draft_layers) * rows[1]);
    if (count > body.size() / sizeof(uint16_t))
      refuse(fmt::format("its body ends within forward {} of {}", f, forwards));
    t.ids.resize(t.ids.size() + count);
    take(t.ids.data() + t.forwards.back().first, count * sizeof(uint16_t));
  }
  if (!body.empty()) refuse(fmt::format("{} bytes after its {} forwards", body.size(), forwards));
  for (const uint16_t e : t.ids)
    if (e >= id.experts) refuse(fmt::format("names expert {} of {}", e, id.experts));
  return t;
}

std::vector<int32_t> RoutingTrace::layer(const Forward& f, int64_t l) const {
  const int64_t k = identity.experts_per_token, trunk = identity.layers;
  const int64_t rows = l < trunk ? f.rows : f.draft_rows;
  const int64_t first =
      static_cast<int64_t>(f.first) + k * (l < trunk ? l * rows : trunk * f.rows + (l - trunk) * rows);
  return {ids.begin() + first, ids.begin() + first + rows * k};
}

int64_t RoutingTrace::rows() const {
  int64_t n = 0;
  for (const Forward& f : forwards) n += f.rows;
  return n;
}

}  // namespace fnx
