// Linear layers with fp32 weights: a unit of its own, so that the types compile side by side.
#include "experts_driver.h"
#include "linear_float.h"

namespace headrace {

const Tiles* tiles_of_f32() { return &kTilesOf<FloatKernel<WeightType::kF32>>; }

}  // namespace headrace
