// Tiles of GGUF's block types: see quant.h for the layout and the arithmetic.
#pragma once

#include "linear/quant_blocks.h"

namespace headrace {

// kLanes small integers as floats.
template <class Integer>
inline Floats load_integers(const char* from) {
  typedef Integer Small __attribute__((vector_size(sizeof(Integer) * kLanes)));
  Small values;
  std::memcpy(&values, from, sizeof(values));
#if defined(HEADRACE_AVX512)
  // Two compilers translate the generic conversion lane by lane.
  const __m128i bytes = reinterpret_cast<__m128i>(values);
  const __m512i wide = Integer(-1) < 0 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
  return reinterpret_cast<Floats>(_mm512_cvtepi32_ps(wide));
#else
  return __builtin_convertvector(__builtin_convertvector(values, Ints), Floats);
#endif
}

// Quantises 32 values of x. offset: the value subtracted from each code; two_scales: each half of a block has a scale.
// If not all of them are finite, the step is NaN, so that products with the block are: codes would hide it.
inline __attribute__((always_inline)) void quantise_block(const void* x, int64_t at, DType dtype, int offset,
                                                          bool two_scales, QuantParts& parts, QuantFactors& factors) {
  constexpr int kParts = kBlock / kLanes;
  Floats values[kParts], most = {}, zeros = {};  // a finite value times 0 is 0, and any other one is NaN
  for (int i = 0; i < kParts; ++i) {
    values[i] = load_vector(x, at + i * kLanes, dtype);
    most = larger(most, larger(values[i], -values[i]));
    zeros += values[i] * 0.0f;
  }
  const float largest = largest_lane(most);
  const float step = largest / (127.0f * 256.0f) + sum_of_lanes(zeros);
  // A subnormal step has no usable inverse; such a block becomes zero.
  const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
  typedef int8_t Small __attribute__((vector_size(kLanes)));
  Ints sums[2] = {};
  for (int i = 0; i < kParts; ++i) {
    const Floats scaled = values[i] * inverse;
    const Ints high = nearest_integers(scaled);
    const Floats rest = (scaled - __builtin_convertvector(high, Floats)) * 256.0f;
    const Ints low = nearest_integers(larger(smaller(rest, all_lanes(127.0f)), all_lanes(-127.0f)));
    const Small small_high = __builtin_convertvector(high, Small), small_low = __builtin_convertvector(low, Small);
    std::memcpy(parts.high + i * kLanes, &small_high, sizeof(small_high));
    std::memcpy(parts.low + i * kLanes, &small_low, sizeof(small_low));
    sums[i * 2 / kParts] += (high << 8) + low;
  }
  int32_t halves[2] = {};
  for (int half = 0; half < 2; ++half)
    for (int lane = 0; lane < kLanes; ++lane) halves[half] += sums[half][lane];
  factors.step = step;
  factors.step_sum = step * static_cast<float>(halves[0] + halves[1]);
  factors.correct[0] = -offset * (two_scales ? halves[0] : halves[0] + halves[1]);
  factors.correct[1] = two_scales ? -offset * halves[1] : 0;
}

// Fills a row of activations: quantise(block, parts, factors).
template <class Quantise>
inline __attribute__((always_inline)) void prepare_blocks(char* to, int64_t k, Quantise quantise) {
  auto* parts = reinterpret_cast<QuantParts*>(to);
  auto* factors = reinterpret_cast<QuantFactors*>(to + factors_at(k));
  for (int64_t block = 0; block < k / kBlock; ++block) quantise(block, parts[block], factors[block]);
}

// A panel of a block type (see quant_blocks.h).
template <WeightType kType>
struct QuantPanel {
  static constexpr QuantLayout kLayout = layout_of(kType);
  static constexpr int kBits = kLayout.bits, kSums = kLayout.two_scales() ? 2 : 1;
  static constexpr int kBlockBytes = kLayout.block_bytes();
  static constexpr int kOffset = kLayout.offset;
  static constexpr bool kMinimum = kLayout.minimum;
  const char *next, *super = nullptr;
  int64_t number = 0;

  explicit QuantPanel(const char* from) : next(from) {}

  inline __attribute__((always_inline)) const char* step() {
    if (kLayout.super && number++ % kSuperBlocks == 0) {
      super = next;
      next += kLayout.super_bytes();
    }
    const char* block = next;
    next += kBlockBytes;
    return block;
  }

  static inline __attribute__((always_inline)) void unpack(const char* block, int group, Bytes (&codes)[kQuads]) {
    const char* high = block + kLayout.scale_bytes() + group * kLanes * 4;
    unpack_quads<kBits>(high + kLayout.high_bytes(), codes);
    if constexpr (kBits == 5) {
      const Bytes bits = load_bytes(high);
#pragma GCC unroll 8
      for (int g = 0; g < kQuads; ++g) codes[g] |= (g < 4 ? bits << (4 - g) : bits >> (g - 4)) & 0x10;
    }
    if constexpr (kBits == 6) {
      constexpr int kLine = kPanelRows * 4;  // bytes of one quad of every row
#pragma GCC unroll 2
      for (int part = 0; part < 2; ++part) {
        const Bytes bits = load_bytes(high + part * kLine);
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) codes[part * 4 + g] |= (g < 2 ? bits << (4 - 2 * g) : bits >> (2 * g - 4)) & 0x30;
      }
    }
  }

  inline __attribute__((always_inline)) BlockScales<kSums> scales(const char* block, int group) const {
    BlockScales<kSums> result = {};
    const int rows = group * kLanes;
    const auto* half = reinterpret_cast<const uint16_t*>(kLayout.super ? super : block);
    const Floats d = load_f16(half + rows);
    if constexpr (!kLayout.super) {
      result.scale[0] = d;
      if constexpr (kMinimum) result.minimum = load_f16(half + kPanelRows + rows);
    } else if constexpr (kMinimum) {
      result.scale[0] = d * load_integers<uint8_t>(block + rows);
      result.minimum = -load_f16(half + kPanelRows + rows) * load_integers<uint8_t>(block + kPanelRows + rows);
    } else {
      for (int sum = 0; sum < kSums; ++sum)
        result.scale[sum] = d * load_integers<int8_t>(block + sum * kPanelRows + rows);
    }
    return result;
  }
};

template <WeightType kType>
struct QuantKernel {
  static constexpr QuantLayout kLayout = layout_of(kType);
  static constexpr int kMaxRows = kQuantTileRows;

  static int64_t panel_bytes(const PackedWeight& w) { return kLayout.panel_bytes(w.k); }
  // A panel of 32 rows of up to 8 bits stays in the second-level cache for any K that models have.
  static int64_t block_k(int64_t k) { return k; }
  static int64_t block_offset(int64_t) { return 0; }
  static int64_t x_offset(int64_t) { return 0; }
  static int64_t prepared_bytes(int64_t k) { return bytes_of_blocks(k); }
  static bool usable(const LinearArgs&) { return false; }

  static void prepare(const LinearArgs& args, const char* from, char* to) {
    const auto quantise = [&](int64_t block, QuantParts& parts, QuantFactors& factors) __attribute__((always_inline)) {
      quantise_block(from, block * kBlock, args.x_dtype, kLayout.offset, kLayout.two_scales(), parts, factors);
    };
    prepare_blocks(to, args.weight.k, quantise);
  }

  template <int kRows>
  static void tile(const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums, int64_t sums_stride,
                   bool, Ahead ahead) {
    multiply_parts<QuantPanel<kType>>(kRows, x, x_bytes, panel, k, sums, sums_stride, ahead);
  }
};

}  // namespace headrace
