// Linear layers over 8-bit integers with group scales: a separate unit, so that types compile in parallel.
#include "experts_driver.h"
#include "groups_tile.h"

namespace headrace {

const Tiles* tiles_of_int8_groups() { return &kTilesOf<GroupedIntegers<WeightType::kInt8Groups>>; }

}  // namespace headrace
