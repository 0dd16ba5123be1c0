// Linear layers with fp16 weights: a unit of its own, so that the types compile side by side.
#include "experts_driver.h"
#include "linear_float.h"

namespace headrace {

const Tiles* tiles_of_f16() { return &kTilesOf<FloatKernel<WeightType::kF16>>; }

}  // namespace headrace
