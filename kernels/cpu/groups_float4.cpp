// Linear layers over 4-bit codes for a table of floats, with group scales: a separate unit, so that types compile in
// parallel.
#include "experts_driver.h"
#include "groups_tile.h"

namespace headrace {

const Tiles* tiles_of_float4_groups() { return &kTilesOf<GroupedFloats<WeightType::kFloat4Groups>>; }

}  // namespace headrace
