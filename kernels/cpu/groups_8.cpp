// Linear layers over integers of 8 bits with group scales: a unit of its own, so that the types compile side by side.
#include "experts_driver.h"
#include "groups_tile.h"

namespace headrace {

const Tiles* tiles_of_int8_groups() { return &kTilesOf<GroupedIntegers<WeightType::kInt8Groups>>; }

}  // namespace headrace
