// Linear layers with bf16 weights.
#include "experts_driver.h"
#include "linear_float.h"

namespace headrace {

const Tiles* tiles_of_bf16() { return &kTilesOf<FloatKernel<WeightType::kBF16>>; }

}  // namespace headrace
