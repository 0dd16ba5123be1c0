// Linear layers over integers of 8 bits whose inputs are rounded to int8 too: a unit of its own, as groups_8.cpp is.
#include "experts_driver.h"
#include "groups_rounded.h"

namespace headrace {

const Tiles* tiles_of_rounded_int8() { return &kTilesOf<RoundedIntegers<WeightType::kInt8Groups>>; }

}  // namespace headrace
