// The entry point of the library for weights with group scales.
#include "groups.h"

using namespace headrace;

// The tiles of a type, for PackedWeight.tiles. rounded: whether the weight has an InputRounding.
HR_EXPORT const Tiles* hr_grouped_tiles(int32_t number, int32_t rounded) {
  const auto type = static_cast<WeightType>(number);
  if (rounded) return type == WeightType::kInt4Groups ? tiles_of_rounded_int4() : tiles_of_rounded_int8();
  switch (type) {
    case WeightType::kInt4Groups: return tiles_of_int4_groups();
    case WeightType::kInt8Groups: return tiles_of_int8_groups();
    case WeightType::kFloat4Groups: return tiles_of_float4_groups();
    default: return tiles_of_e4m3_groups();
  }
}
