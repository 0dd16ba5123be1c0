// Linear layers with fp16 weights.
#include "experts_driver.h"
#include "linear_float.h"

namespace headrace {

const Tiles* tiles_of_f16() { return &kTilesOf<FloatKernel<WeightType::kF16>>; }

}  // namespace headrace
