// What the host gives a forward, put together in one block and sent in one copy.
#pragma once

#include <array>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <span>

#include "kernels/ops.h"

namespace fnx {

// One array: where the host writes it and where it arrives.
struct Staged {
  View host, device;

  template <class T>
  void fill(const T* from, size_t count) const {
    if (count > 0) std::memcpy(host.data, from, count * sizeof(T));
  }
};

// The position of every row of the lanes, in order.
inline void fill_positions(const Staged& to, std::span<const Lane> lanes) {
  auto* p = to.host.as<int32_t>();
  for (const Lane& lane : lanes)
    for (int32_t i = 0; i < lane.rows; ++i) *p++ = lane.start + i;
}

// Two host blocks take turns, so that one may be written while the other is still being copied.
class Staging {
 public:
  explicit Staging(Backend& backend) : backend_(backend) {}

  // Starts a block. Waits until its copy before last is done.
  void begin();
  // The next array of the block. Before allocate() it has no memory, only a shape.
  Staged place(DType dtype, std::initializer_list<int64_t> dims);
  // Makes blocks as long as the longest that was placed.
  void allocate();
  // Copies the block in stream order.
  void send(Stream& stream);

 private:
  struct Block {
    Buffer memory;
    std::unique_ptr<Event> copied;
  };
  Backend& backend_;
  std::array<Block, 2> blocks_;
  Buffer device_;
  size_t now_ = 0, used_ = 0, most_ = 0;
};

}  // namespace fnx
