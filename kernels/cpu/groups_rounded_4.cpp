// Linear layers over 4-bit integers with int8 inputs: a separate unit, so that types compile in parallel.
#include "experts_driver.h"
#include "groups_rounded.h"

namespace headrace {

const Tiles* tiles_of_rounded_int4() { return &kTilesOf<RoundedIntegers<WeightType::kInt4Groups>>; }

}  // namespace headrace
