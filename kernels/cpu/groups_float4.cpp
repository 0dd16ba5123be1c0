// Linear layers over 4-bit codes of a table of floats with group scales: a unit of its own, so that the types compile side by side.
#include "experts_driver.h"
#include "groups_tile.h"

namespace headrace {

const Tiles* tiles_of_float4_groups() { return &kTilesOf<GroupedFloats<WeightType::kFloat4Groups>>; }

}  // namespace headrace
