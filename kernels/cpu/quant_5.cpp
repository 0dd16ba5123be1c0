// Linear layers over 5-bit weights of GGUF: a separate unit, so that types compile in parallel.
#include "experts_driver.h"
#include "quant_tile.h"

namespace headrace {

const Tiles* tiles_of_5_bits(WeightType type) {
  switch (type) {
    case WeightType::kQ5_0: return &kTilesOf<QuantKernel<WeightType::kQ5_0>>;
    case WeightType::kQ5_1: return &kTilesOf<QuantKernel<WeightType::kQ5_1>>;
    default: return &kTilesOf<QuantKernel<WeightType::kQ5_K>>;
  }
}

}  // namespace headrace
