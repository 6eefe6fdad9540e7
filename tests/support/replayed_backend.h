// The cpu backend with graphs: what is called in a capture is noted, and a launch calls it again with the same
// addresses, reading lanes from their table as kernels do. So a round that is replayed with what it did not record
// shows here, without a GPU.
#pragma once

#include <memory>

#include "kernels/ops.h"

namespace fnx::test {

std::unique_ptr<Backend> make_replayed_backend(const CpuOptions& options);

}  // namespace fnx::test
