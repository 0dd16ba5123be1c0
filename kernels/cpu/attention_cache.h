// The rows of a paged KV cache: where they lie, how a float row is stored and how it is read back.
//
// One layer's keys (and values alike) are [num_blocks, num_kv_heads, block_size, head_dim] in the storage dtype.
// int8 and e4m3 rows carry a scale: either one for the layer (key_scale, value_scale) or one per row, made when the
// row is written, in [num_blocks, num_kv_heads, block_size] float.
#pragma once

#include "common.h"

namespace headrace {

enum class CacheType : int32_t { kFloat = 0, kBf16 = 1, kHalf = 2, kInt8 = 3, kE4m3 = 4 };

struct KvCache {
  void* keys;
  void* values;
  float* key_scales;    // per row, or null: key_scale holds for all
  float* value_scales;  // per row, or null
  float key_scale;
  float value_scale;
  CacheType type;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
};

// The largest head that the kernels take.
constexpr int kMostHeadDim = 256;

// int8 and e4m3 rows are stored divided by a scale.
inline bool is_scaled(CacheType type) { return type == CacheType::kInt8 || type == CacheType::kE4m3; }

inline int64_t bytes_of(CacheType type) {
  return type == CacheType::kFloat ? 4 : (type == CacheType::kBf16 || type == CacheType::kHalf) ? 2 : 1;
}

// Row number in [num_blocks, num_kv_heads, block_size] of the token at `slot` = block * block_size + offset.
inline int64_t cache_row(const KvCache& cache, int64_t slot, int head) {
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  return (block * cache.num_kv_heads + head) * cache.block_size + offset;
}

// e4m3 (no infinities, largest 448), read as float bits with the exponent off by 2^120.
inline float float_of_e4m3(uint8_t code) {
  const uint32_t bits = (code & 0x7fu) << 20;
  float value;
  std::memcpy(&value, &bits, 4);
  value *= 1.329227995784916e36f;
  return code & 0x80u ? -value : value;
}

// To nearest even, saturating at 448 (a NaN becomes 448 too: the cache never holds one that others could read).
inline uint8_t e4m3_of_float(float value) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  float magnitude = std::fabs(value);
  if (!(magnitude < 448.0f)) magnitude = 448.0f;
  if (magnitude < 0.015625f) return static_cast<uint8_t>(sign | static_cast<uint8_t>(std::nearbyint(magnitude * 512.0f)));
  uint32_t bits;
  std::memcpy(&bits, &magnitude, 4);
  return static_cast<uint8_t>(sign | (((bits + 0x7ffffu + ((bits >> 20) & 1)) >> 20) - (120u << 3)));
}

inline float largest_magnitude(const float* row, int count) {
  float largest = 0.0f;
  for (int i = 0; i < count; ++i) largest = std::fmax(largest, std::fabs(row[i]));
  return largest;
}

// Stores one head's row at cache row `index`, with a scale of its own where the cache keeps them.
inline void write_cache_row(const KvCache& cache, void* rows, float* scales, float layer_scale, int64_t index,
                            const float* from) {
  const int count = cache.head_dim;
  char* to = static_cast<char*>(rows) + index * count * bytes_of(cache.type);
  float scale = layer_scale;
  if (scales != nullptr && is_scaled(cache.type)) {
    const float largest = largest_magnitude(from, count);
    scale = largest > 0.0f ? largest / (cache.type == CacheType::kInt8 ? 127.0f : 448.0f) : 1.0f;
    scales[index] = scale;
  }
  const float inverse = 1.0f / scale;
  switch (cache.type) {
    case CacheType::kFloat: std::memcpy(to, from, sizeof(float) * static_cast<size_t>(count)); break;
    case CacheType::kBf16:
    case CacheType::kHalf: {
      const DType type = cache.type == CacheType::kBf16 ? DType::kBF16 : DType::kF16;
      int i = 0;
      for (; i + kLanes <= count; i += kLanes) store_vector(to, i, type, load_floats(from + i));
      for (; i < count; ++i) store_one(to, i, type, from[i]);
      break;
    }
    case CacheType::kInt8:
      for (int i = 0; i < count; ++i)
        reinterpret_cast<int8_t*>(to)[i] =
            static_cast<int8_t>(std::fmax(-127.0f, std::fmin(127.0f, std::nearbyint(from[i] * inverse))));
      break;
    case CacheType::kE4m3:
      for (int i = 0; i < count; ++i) reinterpret_cast<uint8_t*>(to)[i] = e4m3_of_float(from[i] * inverse);
      break;
  }
}

// Widens one row, without its scale: every int8 and e4m3 value is exact in bf16 too.
inline void read_cache_row(CacheType type, const char* from, int count, float* to) {
  switch (type) {
    case CacheType::kFloat: std::memcpy(to, from, sizeof(float) * static_cast<size_t>(count)); break;
    case CacheType::kBf16:
      for (int i = 0; i < count; ++i) to[i] = float_of_bf16(reinterpret_cast<const uint16_t*>(from)[i]);
      break;
    case CacheType::kHalf:
      for (int i = 0; i < count; ++i) to[i] = float_of_f16(reinterpret_cast<const uint16_t*>(from)[i]);
      break;
    case CacheType::kInt8:
      for (int i = 0; i < count; ++i) to[i] = reinterpret_cast<const int8_t*>(from)[i];
      break;
    case CacheType::kE4m3:
      for (int i = 0; i < count; ++i) to[i] = float_of_e4m3(reinterpret_cast<const uint8_t*>(from)[i]);
      break;
  }
}

}  // namespace headrace
