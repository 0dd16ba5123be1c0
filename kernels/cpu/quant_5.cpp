// Linear layers over 5-bit weights: a unit of its own, so that the types compile side by side.
#include "quant_tile.h"

namespace headrace {

LinearFn linear_of_5_bits(WeightType type) {
  switch (type) {
    case WeightType::kQ5_0: return run_linear<QuantKernel<WeightType::kQ5_0>>;
    case WeightType::kQ5_1: return run_linear<QuantKernel<WeightType::kQ5_1>>;
    default: return run_linear<QuantKernel<WeightType::kQ5_K>>;
  }
}

}  // namespace headrace
