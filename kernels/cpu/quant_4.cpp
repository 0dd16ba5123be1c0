// Linear layers over 4-bit weights: a unit of its own, so that the types compile side by side.
#include "quant_tile.h"

namespace headrace {

LinearFn linear_of_4_bits(WeightType type) {
  switch (type) {
    case WeightType::kQ4_0: return run_linear<QuantKernel<WeightType::kQ4_0>>;
    case WeightType::kQ4_1: return run_linear<QuantKernel<WeightType::kQ4_1>>;
    default: return run_linear<QuantKernel<WeightType::kQ4_K>>;
  }
}

}  // namespace headrace
