// The layout of a paged KV cache, and the conversion and writing of its rows.
//
// One layer's keys, and likewise its values, are [num_blocks, num_kv_heads, block_size, head_dim] in the storage dtype:
// as plain rows, or in groups of kGroupKeys keys in the order in which attention multiplies them, so that a step packs
// nothing and reads each group as one contiguous run. Elements of one or two bytes are stored in pairs (pair = 2),
// floats singly (pair = 1):
//
//   a group of keys:    [head_dim / pair][kGroupKeys][pair]    the pair is of neighbouring dimensions
//   a group of values:  [kGroupKeys / pair][head_dim][pair]    the pair is of neighbouring keys
//
// A group takes the place of its rows, so that blocks are contiguous and equally large in both layouts. int8, e4m3 and
// e5m2 caches have scales: one for the layer (key_scale, value_scale), one per head (key_heads, value_heads), or one
// per row (key_scales, value_scales), [num_blocks, num_kv_heads, block_size] float, computed when the row is written;
// the scales of neighbouring blocks are scales_skip floats apart.
#pragma once

#include "runtime/common.h"

namespace headrace {

enum class CacheType : int32_t { kFloat = 0, kBf16 = 1, kHalf = 2, kInt8 = 3, kE4m3 = 4, kE5m2 = 5 };
enum class CacheLayout : int32_t { kRows = 0, kGroups = 1 };

// Keys of a group. In a cache in groups, block_size and head_dim are multiples of it.
constexpr int kGroupKeys = 16;

struct KvCache {
  void* keys;
  void* values;
  float* key_scales;    // per row, or null
  float* value_scales;  // per row, or null
  const float* key_heads;    // [num_kv_heads], or null: key_scale for all heads
  const float* value_heads;  // [num_kv_heads], or null
  float key_scale;
  float value_scale;
  CacheType type;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  CacheLayout layout;
  int64_t scales_skip;    // floats from the end of a block's scales to the next block's
  int64_t slots_offset;   // where this layer's slots begin in Step::slot_mapping, in elements
  int64_t tables_offset;  // where its block tables begin in Step::block_table, in elements
};

// The largest head_dim that the kernels support.
constexpr int kMostHeadDim = 512;

// Whether stored elements are divided by a scale.
inline bool is_scaled(CacheType type) { return type >= CacheType::kInt8; }

// The largest magnitude of a scaled type.
inline float largest_stored(CacheType type) {
  return type == CacheType::kInt8 ? 127.0f : type == CacheType::kE4m3 ? 448.0f : 57344.0f;
}

// The scale of a head's keys or values, in a cache without scales per row.
inline float scale_of_head(const KvCache& cache, bool is_key, int64_t head) {
  const float* const heads = is_key ? cache.key_heads : cache.value_heads;
  if (heads != nullptr) return heads[head];
  return is_key ? cache.key_scale : cache.value_scale;
}

inline int64_t bytes_of(CacheType type) {
  return type == CacheType::kFloat ? 4 : (type == CacheType::kBf16 || type == CacheType::kHalf) ? 2 : 1;
}

// Row number in [num_blocks, num_kv_heads, block_size] of the token at `slot` = block * block_size + offset.
inline int64_t cache_row(const KvCache& cache, int64_t slot, int head) {
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  return (block * cache.num_kv_heads + head) * cache.block_size + offset;
}

// Where the scale of row `index` is in the scales per row.
inline int64_t scale_of_row(const KvCache& cache, int64_t index) {
  if (cache.scales_skip == 0) return index;
  return index + index / (int64_t{cache.num_kv_heads} * cache.block_size) * cache.scales_skip;
}

// The format of an 8-bit float: e4m3 (no infinities), or e5m2, which is the upper byte of an fp16.
template <CacheType kType>
struct Fp8 {
  static_assert(kType == CacheType::kE4m3 || kType == CacheType::kE5m2);
  static constexpr int kMantissa = kType == CacheType::kE4m3 ? 3 : 2;
  static constexpr int kShift = 23 - kMantissa;                          // to the mantissa's place in a float
  static constexpr int kOffset = kType == CacheType::kE4m3 ? 120 : 112;  // difference of the exponents' biases
  static constexpr float kScale = float(1ull << (kOffset / 2)) * float(1ull << (kOffset / 2));
  static constexpr float kSmallestNormal = 1.0f / float(1u << (126 - kOffset));
  static constexpr float kSubnormals = float(1u << (kMantissa + 126 - kOffset));  // steps of subnormals in 1
};

// The code of values that are not finite, without its sign. No finite value has it, since they saturate below it.
constexpr uint8_t kNotFinite = 0x7f;

template <CacheType kType>
inline float float_of_fp8(uint8_t code) {
  if ((code & 0x7fu) == kNotFinite) return std::numeric_limits<float>::quiet_NaN();
  const uint32_t bits = (code & 0x7fu) << Fp8<kType>::kShift;
  float value;
  std::memcpy(&value, &bits, 4);
  value *= Fp8<kType>::kScale;
  return code & 0x80u ? -value : value;
}

// Rounds to nearest even and saturates. Infinities and NaN become kNotFinite, so that whatever reads them is not finite
// either, and its request ends as it does with a cache of floats.
template <CacheType kType>
inline uint8_t fp8_of_float(float value) {
  using Format = Fp8<kType>;
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  float magnitude = std::fabs(value);
  if (!(magnitude <= std::numeric_limits<float>::max())) return kNotFinite;
  if (magnitude > largest_stored(kType)) magnitude = largest_stored(kType);
  if (magnitude < Format::kSmallestNormal)
    return static_cast<uint8_t>(sign | static_cast<uint8_t>(std::nearbyint(magnitude * Format::kSubnormals)));
  uint32_t bits;
  std::memcpy(&bits, &magnitude, 4);
  constexpr int kShift = Format::kShift;
  const uint32_t rounded = (bits + ((1u << (kShift - 1)) - 1) + ((bits >> kShift) & 1)) >> kShift;
  return static_cast<uint8_t>(sign | (rounded - (uint32_t(Format::kOffset) << Format::kMantissa)));
}

inline Floats magnitude(Floats value) { return larger(value, -value); }

// The largest magnitude of a row; NaN if not all of its values are finite.
inline float largest_magnitude(const float* row, int count) {
  Floats largest = {}, zeros = {};  // a finite value times 0 is 0, and any other one is NaN
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats values = load_floats(row + i);
    largest = larger(largest, magnitude(values));
    zeros += values * 0.0f;
  }
  float found = largest_lane(largest), zero = sum_of_lanes(zeros);
  for (; i < count; ++i) {
    found = std::fmax(found, std::fabs(row[i]));
    zero += row[i] * 0.0f;
  }
  return found + zero;
}

// Converts a float row to the storage type: to[count].
inline void store_cache_row(CacheType type, const float* from, int count, float inverse_scale, void* to) {
  switch (type) {
    case CacheType::kFloat: std::memcpy(to, from, sizeof(float) * static_cast<size_t>(count)); break;
    case CacheType::kBf16:
    case CacheType::kHalf: {
      const DType stored = type == CacheType::kBf16 ? DType::kBF16 : DType::kF16;
      int i = 0;
      for (; i + kLanes <= count; i += kLanes) store_vector(to, i, stored, load_floats(from + i));
      for (; i < count; ++i) store_one(to, i, stored, from[i]);
      break;
    }
    case CacheType::kInt8: {
      typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1)));
      const auto rounded = [&](Floats value) {
        const Floats whole = round_to_integer(value * inverse_scale);
        return __builtin_convertvector(larger(smaller(whole, all_lanes(127.0f)), all_lanes(-127.0f)), Ints);
      };
      int8_t* const bytes = static_cast<int8_t*>(to);
      int i = 0;
      for (; i + kLanes <= count; i += kLanes)
        *reinterpret_cast<Bytes*>(bytes + i) = __builtin_convertvector(rounded(load_floats(from + i)), Bytes);
      for (; i < count; ++i) bytes[i] = static_cast<int8_t>(rounded(all_lanes(from[i]))[0]);
      break;
    }
    case CacheType::kE4m3:
      for (int i = 0; i < count; ++i) static_cast<uint8_t*>(to)[i] = fp8_of_float<CacheType::kE4m3>(from[i] * inverse_scale);
      break;
    case CacheType::kE5m2:
      for (int i = 0; i < count; ++i) static_cast<uint8_t*>(to)[i] = fp8_of_float<CacheType::kE5m2>(from[i] * inverse_scale);
      break;
  }
}

// Scatters a stored row of Units into its group: unit i is written `step` units after unit i - 1.
template <class Unit>
inline void spread(const char* from, int units, char* to, int64_t step) {
  constexpr int64_t kBytes = sizeof(Unit);
  for (int i = 0; i < units; ++i) std::memcpy(to + i * step * kBytes, from + i * kBytes, sizeof(Unit));
}

template <class Unit>
inline void spread_row(const char* from, int head_dim, bool is_key, int pair, int key, char* group) {
  struct Pair {
    Unit units[2];
  };
  if (is_key) {
    if (pair == 2)
      spread<Pair>(from, head_dim / 2, group + key * static_cast<int64_t>(sizeof(Pair)), kGroupKeys);
    else
      spread<Unit>(from, head_dim, group + key * static_cast<int64_t>(sizeof(Unit)), kGroupKeys);
  } else {
    const int64_t first = int64_t{key / pair} * head_dim * pair + key % pair;
    spread<Unit>(from, head_dim, group + first * static_cast<int64_t>(sizeof(Unit)), pair);
  }
}

// Stores one head's key or value at cache row `index`, and its scale if the cache has scales per row. No byte of
// another row is written, so that threads may write neighbouring rows at once.
inline void write_cache_row(const KvCache& cache, bool is_key, int64_t index, const float* from) {
  float* scales = is_key ? cache.key_scales : cache.value_scales;
  float scale = scale_of_head(cache, is_key, index / cache.block_size % cache.num_kv_heads);
  if (scales != nullptr && is_scaled(cache.type)) {
    const float largest = largest_magnitude(from, cache.head_dim);
    scale = largest == 0.0f ? 1.0f : largest / largest_stored(cache.type);  // NaN makes what reads the row NaN
    scales[scale_of_row(cache, index)] = scale;
  }
  const int64_t bytes = bytes_of(cache.type), row_bytes = cache.head_dim * bytes;
  char* const rows = static_cast<char*>(is_key ? cache.keys : cache.values);
  if (cache.layout == CacheLayout::kRows)
    return store_cache_row(cache.type, from, cache.head_dim, 1.0f / scale, rows + index * row_bytes);
  alignas(64) char stored[kMostHeadDim * sizeof(float)];
  store_cache_row(cache.type, from, cache.head_dim, 1.0f / scale, stored);
  // Blocks consist of whole groups, so a group begins at each multiple of kGroupKeys rows.
  const int key = static_cast<int>(index % kGroupKeys);
  char* const group = rows + (index - key) * row_bytes;
  switch (bytes) {
    case 1: spread_row<uint8_t>(stored, cache.head_dim, is_key, 2, key, group); break;
    case 2: spread_row<uint16_t>(stored, cache.head_dim, is_key, 2, key, group); break;
    default: spread_row<float>(stored, cache.head_dim, is_key, 1, key, group); break;
  }
}

}  // namespace headrace
