// Linear layers with bf16 weights: a unit of its own, so that the types compile side by side.
#include "experts_driver.h"
#include "linear_float.h"

namespace headrace {

const Tiles* tiles_of_bf16() { return &kTilesOf<FloatKernel<WeightType::kBF16>>; }

}  // namespace headrace
