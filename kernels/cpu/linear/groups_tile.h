// Tiles of weights with group scales: see groups.h for the layout and the arithmetic.
#pragma once

#include "linear/groups.h"
#include "linear/quant_tile.h"

namespace headrace {

// A tile's walk along K of a panel: the scales and zeros of the current group, and the current block of codes.
struct GroupWalk {
  const GroupHead& head;
  const char* next;
  const char* meta = nullptr;
  int64_t blocks_left = 0;

  explicit GroupWalk(const char* panel)
      : head(*reinterpret_cast<const GroupHead*>(panel)), next(panel + kHeadBytes) {}

  // Advances to the next block and returns its codes.
  const char* step(int64_t code_bytes) {
    if (blocks_left == 0) {
      meta = next;
      next += head.meta_bytes;
      blocks_left = head.group_blocks;
    }
    --blocks_left;
    const char* codes = next;
    next += code_bytes;
    return codes;
  }

  // The scales of kLanes rows. part: the half of a block, for groups of 16.
  Floats scale(int group, int part) const {
    return load_vector(meta, part * kPanelRows + group * kLanes, head.scale_type);
  }

  // The zero points of kLanes rows, for integer types, whose groups are whole blocks.
  Floats zero(int group) const {
    return load_vector(meta + kPanelRows * size_of(head.scale_type), group * kLanes,
                       static_cast<DType>(head.zero_type));
  }
};

struct GroupedBase {
  static int64_t panel_bytes(const PackedWeight& w) { return grouped_panel_bytes(w); }
  static int64_t block_k(int64_t k) { return k; }
  static int64_t block_offset(int64_t) { return 0; }
  static int64_t x_offset(int64_t) { return 0; }
};

// A panel of integers (see quant_blocks.h).
template <WeightType kType, bool kZeros>
struct IntegerPanel : GroupWalk {
  static constexpr int kBits = bits_of(kType), kSums = 1, kBlockBytes = group_code_bytes(kType);
  static constexpr int kOffset = kZeros ? 0 : 1 << (kBits - 1);
  static constexpr bool kMinimum = kZeros;

  using GroupWalk::GroupWalk;

  inline __attribute__((always_inline)) const char* step() { return GroupWalk::step(kBlockBytes); }

  static inline __attribute__((always_inline)) void unpack(const char* block, int group, Bytes (&codes)[kQuads]) {
    unpack_quads<kBits>(block + group * kLanes * 4, codes);
  }

  inline __attribute__((always_inline)) BlockScales<1> scales(const char*, int group) const {
    const Floats own = scale(group, 0);
    return {{own}, kZeros ? -own * zero(group) : Floats{}};
  }
};

template <WeightType kType>
struct GroupedIntegers : GroupedBase {
  static constexpr int kMaxRows = kQuantTileRows;
  static constexpr int kBits = bits_of(kType);

  static int64_t prepared_bytes(int64_t k) { return bytes_of_blocks(k); }
  static bool usable(const LinearArgs&) { return false; }

  static void prepare(const LinearArgs& args, const char* from, char* to) {
    const int32_t* order = args.weight.order;
    const int offset = args.weight.zero_type == kNoZeros ? 1 << (kBits - 1) : 0;
    const auto quantise = [&](int64_t block, QuantParts& parts, QuantFactors& factors) __attribute__((always_inline)) {
      if (!order) {
        quantise_block(from, block * kBlock, args.x_dtype, offset, false, parts, factors);
        return;
      }
      float values[kBlock];
      for (int i = 0; i < kBlock; ++i) values[i] = load_one(from, order[block * kBlock + i], args.x_dtype);
      quantise_block(values, 0, DType::kF32, offset, false, parts, factors);
    };
    prepare_blocks(to, args.weight.k, quantise);
  }

  template <int kRows>
  static void tile(const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums, int64_t sums_stride,
                   bool, Ahead ahead) {
    if (reinterpret_cast<const GroupHead*>(panel)->zero_type == kNoZeros)
      multiply_parts<IntegerPanel<kType, false>>(kRows, x, x_bytes, panel, k, sums, sums_stride, ahead);
    else
      multiply_parts<IntegerPanel<kType, true>>(kRows, x, x_bytes, panel, k, sums, sums_stride, ahead);
  }
};

// Expands codes to the weights of kLanes rows at each k of a block, without their scales.
template <WeightType kType>
struct FloatCodes;

template <>
struct FloatCodes<WeightType::kFloat4Groups> {
  // The factor of scales that makes up for the expansion.
  static constexpr float kUnit = 1.0f;
  Floats table[16 / kLanes];

  explicit FloatCodes(const GroupHead& head) { std::memcpy(table, head.table, sizeof(head.table)); }

  template <class Each>
  inline __attribute__((always_inline)) void each(const char* block, int group, Each take) const {
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      const Ints packed = reinterpret_cast<Ints>(load_bytes(block + g * kPanelRows * 4 + group * kLanes * 4));
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        take(4 * g + j, look_up(packed >> (8 * j)));
        take(16 + 4 * g + j, look_up(packed >> (8 * j + 4)));
      }
    }
  }

  inline __attribute__((always_inline)) Floats look_up(Ints index) const {
#if defined(HEADRACE_AVX512)
    return reinterpret_cast<Floats>(
        _mm512_permutexvar_ps(reinterpret_cast<__m512i>(index), reinterpret_cast<__m512>(table[0])));
#else
    Floats result;
    const auto* values = reinterpret_cast<const float*>(table);
    for (int i = 0; i < kLanes; ++i) result[i] = values[index[i] & 15];
    return result;
#endif
  }
};

template <>
struct FloatCodes<WeightType::kE4M3Groups> {
  static constexpr float kUnit = 256.0f;  // the bits of an e4m3 in an fp16 have exactly 1/256 of its value

  explicit FloatCodes(const GroupHead&) {}

  template <class Each>
  inline __attribute__((always_inline)) void each(const char* block, int group, Each take) const {
#pragma GCC unroll 4
    for (int k = 0; k < kBlock; ++k) take(k, expand(block + k * kPanelRows + group * kLanes));
  }

  static inline __attribute__((always_inline)) Floats expand(const char* from) {
#if defined(HEADRACE_AVX512)
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(short(0xbfff)));
    return reinterpret_cast<Floats>(_mm512_cvtph_ps(half));
#else
    uint16_t halves[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const auto code = static_cast<uint8_t>(from[i]);
      halves[i] = static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7);
    }
    return load_f16(halves);
#endif
  }
};

template <WeightType kType>
struct GroupedFloats : GroupedBase {
  static constexpr int kMaxRows = kVectorTileRows;

  static int64_t prepared_bytes(int64_t k) { return (4 * k + 63) / 64 * 64; }
  static bool usable(const LinearArgs& args) { return args.x_dtype == DType::kF32 && !args.weight.order; }

  static void prepare(const LinearArgs& args, const char* from, char* to) {
    auto* values = reinterpret_cast<float*>(to);
    const int32_t* order = args.weight.order;
    for (int64_t i = 0; i < args.weight.k; ++i) values[i] = load_one(from, order ? order[i] : i, args.x_dtype);
  }

  template <int kRows>
  static void tile(const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums, int64_t sums_stride,
                   bool, Ahead ahead) {
    Floats total[kRows][kGroups] = {};
    const float* rows[kRows];
    for (int row = 0; row < kRows; ++row) rows[row] = reinterpret_cast<const float*>(x + row * x_bytes);
    GroupWalk walk(panel);
    const FloatCodes<kType> codes(walk.head);
    const Floats unit = all_lanes(FloatCodes<kType>::kUnit);
    for (int64_t b = 0; b < k / kBlock; ++b) {
      const char* before = walk.next;
      const char* block = walk.step(group_code_bytes(kType));
      prefetch_block<(4 * kRows <= kMaxRows)>(ahead, before - panel, walk.next - before);
      for (int group = 0; group < kGroups; ++group) {
        Floats part[kRows][2] = {};
        codes.each(block, group, [&](int at, Floats weight) __attribute__((always_inline)) {
#pragma GCC unroll 8
          for (int row = 0; row < kRows; ++row)
            part[row][at / 16] = fused(all_lanes(rows[row][b * kBlock + at]), weight, part[row][at / 16]);
        });
        const Floats first = walk.scale(group, 0) * unit;
        const Floats second = walk.head.parts == 2 ? walk.scale(group, 1) * unit : first;
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row)
          total[row][group] = fused(part[row][1], second, fused(part[row][0], first, total[row][group]));
      }
    }
    for (int row = 0; row < kRows; ++row)
      for (int group = 0; group < kGroups; ++group)
        store_floats(sums + row * sums_stride + group * kLanes, total[row][group]);
  }
};

}  // namespace headrace
