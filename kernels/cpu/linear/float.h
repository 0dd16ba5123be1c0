// Tiles of unquantised weights. A panel is [k, kPanelRows] values for fp32 and fp16, and [k/2, kPanelRows, 2] for
// bf16 (an odd k is padded with a zero), the format of the bf16 dot-product instructions: each lane adds the products
// of a pair of k to its fp32 sum.
#pragma once

#include "linear/amx.h"
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

// sums [num_rows, kVectors * 16] (+)= x times the panel, of bf16, for a k that is a multiple of kBlockK. The processor
// adds up the first ones of a block's pairs, the second ones, and both to the sums.
template <int kVectors>
void multiply_blocks(int num_rows, const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums,
                     int64_t sums_stride, bool add, Ahead ahead) {
  const int below = num_rows - kBlockRows;  // rows of the second block
  set_shapes(num_rows);
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
  constexpr int64_t kRowBytes = kVectors * 64, kBytes = kBlockK / 2 * kRowBytes;
  const char* next = ahead.from;
  const int64_t advance = ahead.advance(kBytes);
  const bool is_few = 4 * num_rows <= kTileRows;
  for (int64_t at = 0; at < k; at += kBlockK, panel += kBytes, next += advance) {
    for (int64_t line = 0; line < advance; line += 64) {
      if (is_few)
        prefetch<true>(next + line);
      else
        prefetch<false>(next + line);
    }
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
  _tile_release();
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
#if defined(HEADRACE_AMX)
    if constexpr (kBlocks) {
      const int64_t whole = k / kBlockK * kBlockK, bytes = whole * kVectors * kLanes * kWeightBytes;
      if (whole) multiply_blocks<kVectors>(kRows, x, x_bytes, panel, whole, sums, sums_stride, add, ahead);
      if (whole == k) return;
      ahead.from += ahead.advance(bytes);
      call_tiles<Vectors<kVectors>, kTileRows>(kRows, x + x_offset(whole), x_bytes, panel + bytes, k - whole, sums,
                                               sums_stride, add || whole, ahead);
      return;
    }
#endif
    if constexpr (!kBlocks) vector_tile<kRows, kVectors>(x, x_bytes, panel, k, sums, sums_stride, add, ahead);
  }

  // `tile` in vector registers.
  template <int kVectors>
  struct Vectors {
    template <int kRows>
    static void tile(const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums, int64_t sums_stride,
                     bool add, Ahead ahead) {
      vector_tile<kRows, kVectors>(x, x_bytes, panel, k, sums, sums_stride, add, ahead);
    }
  };

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

    template <int kRows>
    static void tile(const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums, int64_t sums_stride,
                     bool add, Ahead ahead) {
      FloatKernel::tile<kRows, kPanelVectors / 2>(x, x_bytes, panel, k, sums, sums_stride, add, ahead);
    }
  };
};

}  // namespace headrace
