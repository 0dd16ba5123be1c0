// Linear layers over 4-bit weights of GGUF: a separate unit, so that types compile in parallel.
#include "experts_driver.h"
#include "quant_tile.h"

namespace headrace {

const Tiles* tiles_of_4_bits(WeightType type) {
  switch (type) {
    case WeightType::kQ4_0: return &kTilesOf<QuantKernel<WeightType::kQ4_0>>;
    case WeightType::kQ4_1: return &kTilesOf<QuantKernel<WeightType::kQ4_1>>;
    default: return &kTilesOf<QuantKernel<WeightType::kQ4_K>>;
  }
}

}  // namespace headrace
