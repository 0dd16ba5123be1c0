// Linear layers over integers of 4 bits with group scales: a unit of its own, so that the types compile side by side.
#include "experts_driver.h"
#include "groups_tile.h"

namespace headrace {

const Tiles* tiles_of_int4_groups() { return &kTilesOf<GroupedIntegers<WeightType::kInt4Groups>>; }

}  // namespace headrace
