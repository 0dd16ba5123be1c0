// Linear layers over 6-bit and 8-bit weights of GGUF: a separate unit, so that types compile in parallel.
#include "experts_driver.h"
#include "quant_tile.h"

namespace headrace {

const Tiles* tiles_of_6_and_8_bits(WeightType type) {
  switch (type) {
    case WeightType::kQ8_0: return &kTilesOf<QuantKernel<WeightType::kQ8_0>>;
    default: return &kTilesOf<QuantKernel<WeightType::kQ6_K>>;
  }
}

}  // namespace headrace
