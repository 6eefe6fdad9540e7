// A backend that runs every operation on a device and, from the same inputs, on the cpu backend, and notes how far the
// outputs lie apart.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/ops.h"

namespace fnx::test {

struct ComparedOperation {
  std::string name;     // "linear [640, 256] x 3"
  int64_t call = 0;     // of all operations of the backend, from 0
  double distance = 0;  // ||device - cpu|| / ||cpu||; for ids the share that differs
};

class ComparedBackend : public Backend {
 public:
  virtual std::vector<ComparedOperation>& operations() = 0;
};

// Both outlive it.
std::unique_ptr<ComparedBackend> make_compared_backend(Backend& device, Backend& cpu);

}  // namespace fnx::test
