// Linear layers with fp32 weights.
#include "experts_driver.h"
#include "linear_float.h"

namespace headrace {

const Tiles* tiles_of_f32() { return &kTilesOf<FloatKernel<WeightType::kF32>>; }

}  // namespace headrace
