// The geometries that synthetic models can have, and how one is named.
#pragma once

#include <nlohmann/json.hpp>

#include "libcore/format/pack_layout.h"
#include "libcore/format/synthetic_source.h"

namespace fnx {

// config.json of the specification's model.
nlohmann::ordered_json synthetic_config(const SyntheticSpec& spec);
PackWidths synthetic_widths(const SyntheticSpec& spec);

}  // namespace fnx
