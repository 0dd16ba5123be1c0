// Linear layers over integers of 4 bits whose inputs are rounded to int8 too: a unit of its own, as groups_4.cpp is.
#include "experts_driver.h"
#include "groups_rounded.h"

namespace headrace {

const Tiles* tiles_of_rounded_int4() { return &kTilesOf<RoundedIntegers<WeightType::kInt4Groups>>; }

}  // namespace headrace
