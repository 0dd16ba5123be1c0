// Linear layers over 4-bit integers with group scales: a separate unit, so that types compile in parallel.
#include "experts_driver.h"
#include "groups_tile.h"

namespace headrace {

const Tiles* tiles_of_int4_groups() { return &kTilesOf<GroupedIntegers<WeightType::kInt4Groups>>; }

}  // namespace headrace
