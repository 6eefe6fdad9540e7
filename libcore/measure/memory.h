// Memory of this process.
#pragma once

#include <cstdint>

namespace fnx {

// Most resident memory since the last reset, or since the start where the system does not let it be reset.
uint64_t peak_rss_bytes();
void reset_peak_rss();

}  // namespace fnx
