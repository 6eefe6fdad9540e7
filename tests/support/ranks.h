// Ranks that are threads of the test.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "libcore/dist/communicator.h"

namespace fnx::test {

// Runs `work` on a thread a rank; a rank ends with its work, and tells the others why when that threw. What each threw.
std::vector<std::optional<Error>> run_ranks(int world, const std::function<void(Communicator&)>& work);

}  // namespace fnx::test
