// Tiles of unquantised weights. A panel is [k, kPanelRows] values for fp32 and fp16, and [k/2, kPanelRows, 2] for
// bf16 (an odd k is padded with a zero), the format of the bf16 dot-product instructions: each lane adds the products
// of a pair of k to its fp32 sum.
#pragma once

#include "runtime/amx.h"
#include "linear/driver.h"

namespace headrace {

constexpr int kPanelVectors = kPanelRows / kLanes;

#if defined(HEADRACE_AVX512) && defined(__AVX512BF16__)
#define HEADRACE_BF16_DOT 1
#elif defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HEADRACE_BF16_DOT 1
#endif

// Rows of a tile: as many as the vector registers hold, with kPanelVectors accumulators each and room for the
// weights. AVX-512 has 32 registers, AVX2 16 and NEON 32 small ones.
#if defined(HEADRACE_AVX512)
constexpr int kTileRows = 12;
#elif defined(__aarch64__)
constexpr int kTileRows = 3;
#else
constexpr int kTileRows = 2;
#endif

// Larger panels are read in several passes over K, so that the part in use stays in the second-level cache.
constexpr int64_t kPanelBlockBytes = 256 * 1024;

inline int64_t limited_k(int64_t k, int64_t bytes_per_k) {
  const int64_t most = kPanelBlockBytes / bytes_per_k / 2 * 2;
  return k <= most ? k : most;
}

#if defined(HEADRACE_BF16_DOT)
// sums += both products of each lane's pair.
inline Floats dot_pairs(Floats sums, Floats weights, Floats pair) {
#if defined(HEADRACE_AVX512)
  return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sums), reinterpret_cast<__m512bh>(weights),
                                                   reinterpret_cast<__m512bh>(pair)));
#else
  return reinterpret_cast<Floats>(vbfdotq_f32(reinterpret_cast<float32x4_t>(sums),
                                              reinterpret_cast<bfloat16x8_t>(weights),
                                              reinterpret_cast<bfloat16x8_t>(pair)));
#endif
}
#endif

#if defined(HEADRACE_AMX)
constexpr int kBlockK = 32;

inline void prefetch_lines(const char* from, int64_t bytes, bool few_rows) {
  for (int64_t line = 0; line < bytes; line += 64) {
    if (few_rows)
      prefetch<true>(from + line);
    else
      prefetch<false>(from + line);
  }
}

// sums [num_rows, kVectors * 16] (+)= x times the panel, of bf16, for a k that is a multiple of kBlockK, or less. The
// processor adds up the first ones of a block's pairs, the second ones, and both to the sums.
template <int kVectors>
void multiply_blocks(int num_rows, const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums,
                     int64_t sums_stride, bool add, Ahead ahead) {
  const int below = num_rows - kBlockRows;  // rows of the second block
  const int64_t block_k = k < kBlockK ? (k + 1) / 2 * 2 : kBlockK;
  set_shapes(num_rows, static_cast<int>(2 * block_k));
  const int64_t stride = sums_stride * 4;
  float* const second = sums + kBlockRows * sums_stride;
  if (add) {
    _tile_loadd(0, sums, stride);
    if constexpr (kVectors == 2) _tile_loadd(1, sums + 16, stride);
    if (below > 0) {
      _tile_loadd(2, second, stride);
      if constexpr (kVectors == 2) _tile_loadd(3, second + 16, stride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (below > 0) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  constexpr int64_t kRowBytes = kVectors * 64;
  const int64_t bytes = block_k / 2 * kRowBytes;
  const char* next = ahead.from;
  const int64_t advance = ahead.advance(bytes);
  const bool is_few = 4 * num_rows <= kTileRows;
  for (int64_t at = 0; at < k; at += kBlockK, panel += bytes, next += advance) {
    prefetch_lines(next, advance, is_few);
    _tile_loadd(6, panel, kRowBytes);
    _tile_loadd(4, x + 2 * at, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kVectors == 2) {
      _tile_loadd(7, panel + 64, kRowBytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (below > 0) {
      _tile_loadd(5, x + kBlockRows * x_bytes + 2 * at, x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kVectors == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, stride);
  if constexpr (kVectors == 2) _tile_stored(1, sums + 16, stride);
  if (below > 0) {
    _tile_stored(2, second, stride);
    if constexpr (kVectors == 2) _tile_stored(3, second + 16, stride);
  }
}

// Zero for what is below the normal numbers.
inline Floats flushed(Floats value) {
  const __m512 own = reinterpret_cast<__m512>(value), sign = _mm512_set1_ps(-0.0f);
  const __mmask16 small = _mm512_cmp_ps_mask(_mm512_andnot_ps(sign, own), _mm512_set1_ps(1.17549435e-38f), _CMP_LT_OQ);
  return reinterpret_cast<Floats>(_mm512_mask_and_ps(own, small, own, sign));
}

// Of so few rows the product with one short block takes less time in vector registers.
constexpr int kFewRows = 4;

// `multiply_blocks` for one row and a k of less than kBlockK, in vector registers, with the same result: what the
// processor defines of its dot products is the same, and so is flushing numbers below the normal ones to zero. Products
// with the other of a pair are -0, which changes no sum.
template <int kVectors>
inline void multiply_block(const char* x, const char* panel, int64_t k, float* sums, bool add) {
  const int64_t pairs = (k + 1) / 2;
  alignas(64) int32_t firsts[kBlockK / 2], seconds[kBlockK / 2];
  const __m512i row = _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << pairs) - 1), x);
  const __m512i low = _mm512_set1_epi32(0xffff), zeros = _mm512_set1_epi32(static_cast<int32_t>(0x80008000u));
  _mm512_store_si512(firsts, _mm512_and_si512(row, low));
  _mm512_store_si512(seconds, _mm512_andnot_si512(low, row));
  Floats first[kVectors] = {}, second[kVectors] = {};
  for (int64_t pair = 0; pair < pairs; ++pair, panel += kVectors * 64) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const __m512i weights = _mm512_load_si512(panel + v * 64);
      const __m512i even = _mm512_ternarylogic_epi32(weights, zeros, low, 0xe4);  // low ? weights : zeros
      const __m512i odd = _mm512_ternarylogic_epi32(zeros, weights, low, 0xe4);
      const auto of_first = reinterpret_cast<Floats>(all_lanes(firsts[pair]));
      const auto of_second = reinterpret_cast<Floats>(all_lanes(seconds[pair]));
      first[v] = dot_pairs(first[v], reinterpret_cast<Floats>(even), of_first);
      second[v] = dot_pairs(second[v], reinterpret_cast<Floats>(odd), of_second);
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    const Floats before = add ? load_floats(sums + v * kLanes) : Floats{};
    store_floats(sums + v * kLanes, flushed(before + flushed(first[v] + second[v])));
  }
}

// As `multiply_blocks<2>`, for a k that is a multiple of kBlockK, and then the tail's product, within the registers.
// The rows' second block ends with the last row: with fewer than 32 rows it has some of the first block's, whose sums
// are the same.
inline void multiply_with_tail(int num_rows, const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums,
                               int64_t sums_stride, bool add, Ahead ahead, const DeltaTail& tail) {
  const int64_t whole = tail.k / kBlockK * kBlockK, rest = (tail.k - whole + 1) / 2 * 2;
  const bool has_second = num_rows > kBlockRows;
  const int64_t below = has_second ? num_rows - kBlockRows : 0;  // the second block's first row
  set_shapes_with_tail(has_second ? kBlockRows : num_rows, static_cast<int>(rest ? 2 * rest : 2 * kBlockK));
  const int64_t stride = sums_stride * 4;
  float* const second = sums + below * sums_stride;
  if (add) {
    _tile_loadd(0, sums, stride);
    _tile_loadd(1, sums + 16, stride);
    if (has_second) {
      _tile_loadd(2, second, stride);
      _tile_loadd(3, second + 16, stride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  constexpr int64_t kRowBytes = 128, kBytes = kBlockK / 2 * kRowBytes;
  const auto block = [&](const char* x, int64_t x_bytes, const char* panel) __attribute__((always_inline)) {
    _tile_loadd(4, x, x_bytes);
    _tile_loadd(6, panel, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    if (has_second) {
      _tile_loadd(4, x + below * x_bytes, x_bytes);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(6, panel + 64, kRowBytes);
      _tile_dpbf16ps(3, 4, 6);
      _tile_loadd(4, x, x_bytes);
      _tile_dpbf16ps(1, 4, 6);
    } else {
      _tile_loadd(6, panel + 64, kRowBytes);
      _tile_dpbf16ps(1, 4, 6);
    }
  };
  const char* next = ahead.from;
  const int64_t advance = ahead.advance(kBytes);
  const bool is_few = 4 * num_rows <= kTileRows;
  for (int64_t at = 0; at < k; at += kBlockK, panel += kBytes, next += advance) {
    prefetch_lines(next, advance, is_few);
    block(x + 2 * at, x_bytes, panel);
  }
  for (int64_t at = 0; at < whole; at += kBlockK) block(tail.y + 2 * at, tail.y_bytes, tail.panel + at / 2 * kRowBytes);
  if (rest) {
    const char *y = tail.y + 2 * whole, *b = tail.panel + whole / 2 * kRowBytes;
    _tile_loadd(5, y, tail.y_bytes);
    _tile_loadd(7, b, kRowBytes);
    _tile_dpbf16ps(0, 5, 7);
    if (has_second) {
      _tile_loadd(5, y + below * tail.y_bytes, tail.y_bytes);
      _tile_dpbf16ps(2, 5, 7);
      _tile_loadd(7, b + 64, kRowBytes);
      _tile_dpbf16ps(3, 5, 7);
      _tile_loadd(5, y, tail.y_bytes);
      _tile_dpbf16ps(1, 5, 7);
    } else {
      _tile_loadd(7, b + 64, kRowBytes);
      _tile_dpbf16ps(1, 5, 7);
    }
  }
  _tile_stored(0, sums, stride);
  _tile_stored(1, sums + 16, stride);
  if (has_second) {
    _tile_stored(2, second, stride);
    _tile_stored(3, second + 16, stride);
  }
}
#endif

// The kernel of one float type. It reads kStepK values of k per step.
template <WeightType kType>
struct FloatKernel {
  static constexpr bool kPairs = kType == WeightType::kBF16;
#if defined(HEADRACE_AMX)
  static constexpr bool kBlocks = kPairs;
#else
  static constexpr bool kBlocks = false;
#endif
  static constexpr bool kTails = kBlocks;
  static constexpr int kMaxRows = kBlocks ? 2 * kBlockRows : kTileRows;
#if defined(HEADRACE_BF16_DOT)
  static constexpr bool kDot = kPairs;
#else
  static constexpr bool kDot = false;
#endif
  static constexpr int kStepK = kPairs ? 2 : 1;
  static constexpr int kWeightBytes = kType == WeightType::kF32 ? 4 : 2;
  static constexpr int kXBytes = kDot ? 2 : 4;

  static int64_t padded(int64_t k) { return (k + kStepK - 1) / kStepK * kStepK; }
  static int64_t bytes_of_panel(int64_t k) { return padded(k) * kPanelRows * kWeightBytes; }
  static int64_t panel_bytes(const PackedWeight& w) { return bytes_of_panel(w.k); }
  static int64_t block_k(int64_t k) { return limited_k(k, kPanelRows * kWeightBytes); }
  static int64_t block_offset(int64_t k) { return k * kPanelRows * kWeightBytes; }
  static int64_t x_offset(int64_t k) { return k * kXBytes; }
  static int64_t prepared_bytes(int64_t k) { return (padded(k) * kXBytes + 63) / 64 * 64; }

  static bool usable(const LinearArgs& args) {
    if (args.weight.k % kStepK != 0) return false;
    return kDot ? args.x_dtype == DType::kBF16 : (!kPairs && args.x_dtype == DType::kF32);
  }

  static void prepare(const LinearArgs& args, const char* from, char* to) {
    const int64_t k = args.weight.k, whole = k / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) put(to, i, load_vector(from, i, args.x_dtype));
    for (int64_t i = whole; i < k; ++i) put(to, i, load_one(from, i, args.x_dtype));
    for (int64_t i = k; i < padded(k); ++i) put(to, i, 0.0f);
  }

  static void put(char* to, int64_t i, Floats value) {
    if (kPairs) {
      uint16_t rounded[kLanes];
      store_bf16(rounded, value);
      if (kDot) {
        std::memcpy(to + 2 * i, rounded, sizeof(rounded));
        return;
      }
      value = load_bf16(rounded);
    }
    store_floats(reinterpret_cast<float*>(to) + i, value);
  }

  static void put(char* to, int64_t i, float value) {
    const uint16_t rounded = bf16_of_float(value);
    if (kDot)
      reinterpret_cast<uint16_t*>(to)[i] = rounded;
    else
      reinterpret_cast<float*>(to)[i] = kPairs ? float_of_bf16(rounded) : value;
  }

  // One step: multiplies kStepK values of k of the panel by those of each row.
  template <int kRows, int kVectors>
  static inline __attribute__((always_inline)) void step(Floats (&sums)[kRows][kVectors], const char* w,
                                                         const char* const (&x)[(kRows + 2) / 3], int64_t x_bytes,
                                                         int64_t at) {
    Floats weights[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const char* from = w + v * kLanes * kStepK * kWeightBytes;
      if constexpr (kType == WeightType::kF16)
        weights[v] = load_f16(reinterpret_cast<const uint16_t*>(from));
      else
        weights[v] = load_floats(reinterpret_cast<const float*>(from));
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const float* from = reinterpret_cast<const float*>(x[row / 3] + (row % 3) * x_bytes + at);
#if defined(HEADRACE_BF16_DOT)
      if constexpr (kDot) {
        float pair;
        std::memcpy(&pair, from, 4);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v)
          sums[row][v] = dot_pairs(sums[row][v], weights[v], all_lanes_bits(pair));
        continue;
      }
#endif
      if constexpr (kPairs) {
        // The second of a pair first, as the dot-product instruction does.
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v)
          sums[row][v] = fused(high_half(weights[v]), all_lanes(from[1]), sums[row][v]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v)
          sums[row][v] = fused(low_half(weights[v]), all_lanes(from[0]), sums[row][v]);
      } else {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[row][v] = fused(weights[v], all_lanes(from[0]), sums[row][v]);
      }
    }
  }

  // Copies bits; an operation on floats could change a pair of bf16 that looks like a signalling NaN or a subnormal.
  static Floats all_lanes_bits(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, 4);
    return reinterpret_cast<Floats>(all_lanes(bits));
  }
  static Floats high_half(Floats pairs) {
    return reinterpret_cast<Floats>(reinterpret_cast<Ints>(pairs) & static_cast<int32_t>(0xffff0000u));
  }
  static Floats low_half(Floats pairs) { return reinterpret_cast<Floats>(reinterpret_cast<Ints>(pairs) << 16); }

  template <int kRows, int kVectors = kPanelVectors>
  static void tile(const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums, int64_t sums_stride,
                   bool add, Ahead ahead) {
    vector_tile<kRows, kVectors>(x, x_bytes, panel, k, sums, sums_stride, add, ahead);
  }

#if defined(HEADRACE_AMX)
  // `tile` of any number of rows.
  template <int kVectors = kPanelVectors>
  static void block_tile(int num_rows, const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums,
                         int64_t sums_stride, bool add, Ahead ahead) {
    const int64_t whole = k / kBlockK * kBlockK, bytes = whole * kVectors * kLanes * kWeightBytes;
    if (whole) multiply_blocks<kVectors>(num_rows, x, x_bytes, panel, whole, sums, sums_stride, add, ahead);
    if (whole == k) return;
    ahead.from += ahead.advance(bytes);
    x += x_offset(whole);
    if (num_rows > kFewRows) {
      multiply_blocks<kVectors>(num_rows, x, x_bytes, panel + bytes, k - whole, sums, sums_stride, add || whole, ahead);
      return;
    }
    for (int row = 0; row < num_rows; ++row)
      multiply_block<kVectors>(x + row * x_bytes, panel + bytes, k - whole, sums + row * sums_stride, add || whole);
  }

  static bool takes_tails(const LinearArgs& args) {
    return args.weight.k % kBlockK == 0 && args.deltas->site->type == kType;
  }
  static void tile_with_tail(int num_rows, const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums,
                             int64_t sums_stride, bool add, Ahead ahead, const DeltaTail& tail) {
    multiply_with_tail(num_rows, x, x_bytes, panel, k, sums, sums_stride, add, ahead, tail);
  }
#endif

  // Never inlined: its loop needs all registers of both kinds, for vectors and for addresses.
  template <int kRows, int kVectors>
  static __attribute__((noinline)) void vector_tile(const char* x, int64_t x_bytes, const char* panel, int64_t k,
                                                    float* sums, int64_t sums_stride, bool add, Ahead ahead) {
    Floats total[kRows][kVectors];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        total[row][v] = add ? load_floats(sums + row * sums_stride + v * kLanes) : Floats{};
    // One base per three rows: every address is then base + {0, 1, 2} * x_bytes, which one instruction can form.
    const char* bases[(kRows + 2) / 3];
#pragma GCC unroll 8
    for (int group = 0; group < (kRows + 2) / 3; ++group) bases[group] = x + 3 * group * x_bytes;
    const int64_t steps = (k + kStepK - 1) / kStepK;
    constexpr int64_t kBytes = kVectors * kLanes * kStepK * kWeightBytes;
    // A pointer that advances by a constant: anything more in this loop costs a twentieth of its speed.
    const char* next = ahead.from;
    const int64_t advance = ahead.advance(kBytes);
    for (int64_t i = 0; i < steps; ++i, panel += kBytes, next += advance) {
#pragma GCC unroll 4
      for (int64_t line = 0; line < kBytes; line += 64) prefetch<(4 * kRows <= kTileRows)>(next + line);
      step<kRows, kVectors>(total, panel, bases, x_bytes, i * kStepK * kXBytes);
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store_floats(sums + row * sums_stride + v * kLanes, total[row][v]);
  }

  // Tiles of half panels, for factors of few rows.
  struct Halves {
    static constexpr int kMaxRows = FloatKernel::kMaxRows;
    static constexpr bool kTails = FloatKernel::kTails;

    template <int kRows>
    static void tile(const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums, int64_t sums_stride,
                     bool add, Ahead ahead) {
      FloatKernel::tile<kRows, kPanelVectors / 2>(x, x_bytes, panel, k, sums, sums_stride, add, ahead);
    }
#if defined(HEADRACE_AMX)
    static void block_tile(int num_rows, const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums,
                           int64_t sums_stride, bool add, Ahead ahead) {
      FloatKernel::block_tile<kPanelVectors / 2>(num_rows, x, x_bytes, panel, k, sums, sums_stride, add, ahead);
    }
#endif
  };
};

}  // namespace headrace
