#include "libcore/engine/staging.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/error.h"

namespace fnx {

void Staging::begin() {
  now_ = 1 - now_;
  used_ = 0;
  if (blocks_[now_].copied) blocks_[now_].copied->wait();
}

Staged Staging::place(DType dtype, std::initializer_list<int64_t> dims) {
  View v{nullptr, dtype, Space::Host, 0, {}};
  for (int64_t d : dims) v.shape[v.rank++] = d;
  const size_t at = used_, bytes = v.bytes();
  used_ = (at + bytes + 63) / 64 * 64;
  most_ = std::max(most_, used_);
  Staged s{v, v};
  if (device_.bytes() == 0) return s;
  if (at + bytes > device_.bytes())
    throw Error(ErrorKind::Internal, fmt::format("{} bytes of inputs, {} were allocated for the largest forward",
                                                 at + bytes, device_.bytes()));
  s.host.data = blocks_[now_].memory.view(DType::U8, {0}).data + at;
  s.device.data = device_.view(DType::U8, {0}).data + at;
  s.device.space = device_.space();
  return s;
}

void Staging::allocate() {
  for (Block& b : blocks_) {
    b.memory = backend_.allocate(most_, Space::Host);
    b.copied = backend_.make_event();
  }
  device_ = backend_.allocate(most_, Space::Device);
}

void Staging::send(Stream& stream) {
  const View to = device_.view(DType::U8, {static_cast<int64_t>(used_)});
  backend_.copy(stream, to, blocks_[now_].memory.view(DType::U8, {static_cast<int64_t>(used_)}));
  backend_.record(stream, *blocks_[now_].copied);
}

}  // namespace fnx
