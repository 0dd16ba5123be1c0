// The entry point of the library for GGUF's block types.
#include "quant.h"

using namespace headrace;

// The tiles of a quantised type, for PackedWeight.tiles.
HR_EXPORT const Tiles* hr_packed_tiles(int32_t number) {
  const auto type = static_cast<WeightType>(number);
  switch (layout_of(type).bits) {
    case 4: return tiles_of_4_bits(type);
    case 5: return tiles_of_5_bits(type);
    default: return tiles_of_6_and_8_bits(type);
  }
}
