// Linear layers over 8-bit floats with group scales: a separate unit, so that types compile in parallel.
#include "experts_driver.h"
#include "groups_tile.h"

namespace headrace {

const Tiles* tiles_of_e4m3_groups() { return &kTilesOf<GroupedFloats<WeightType::kE4M3Groups>>; }

}  // namespace headrace
