// What a profile says, as the flat records that fnx-expert-profile prints and keeps.
#pragma once

#include <vector>

#include "libcore/engine/expert_profile.h"

namespace fnx {

// Identity, decay and runs.
void describe(const ExpertProfile& profile, Json& result);

// One object a layer: choices, experts used, share of the choices that the hottest eighth, quarter and half took, and
// the eight hottest experts.
Json show_rows(const ExpertProfile& profile);

// One object a layer: how many of the `lines` hottest experts the two have in common, and half the sum of absolute
// differences of their shares (0 equal, 1 disjoint). Throws Input for other shapes, Usage for lines out of range.
Json diff_rows(const ExpertProfile& a, const ExpertProfile& b, int64_t lines);

// One object a pool size and layer: the experts of a warm start in the order of their copies, and their share.
Json warm_rows(const ExpertProfile& profile, const std::vector<int64_t>& lines);

// Counts as [layers][experts]: what a heat map is drawn from; and as one object a count.
Json count_matrix(const ExpertProfile& profile);
Json count_rows(const Json& matrix, int64_t trunk_layers);

}  // namespace fnx
