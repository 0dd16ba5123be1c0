// Products of quantised weights with inputs in two int8 parts (see quant.h), for all layouts of panels. A Panel knows
// one:
//
//   kBits, kSums        bits of a code; sums of a block that have a scale of their own: 1, or 2 of 16 values each
//   kOffset             what is subtracted from codes, by way of the inputs' `correct`
//   kMinimum            whether there is a minimum
//   kBlockBytes         of a block's codes, and of its scales where each block has its own
//   next                what `step` has not passed
//   step()              advances to the next block, and returns it
//   unpack(block, ...)  the codes of kLanes rows of a block, as kQuads vectors of unsigned bytes
//   scales(block, ...)  their scales
#pragma once

#include <type_traits>

#include "runtime/amx.h"
#include "linear/driver.h"
#include "linear/quant.h"
#include "linear/quant_dot.h"

namespace headrace {

// Rows of x in a tile in vector registers.
#if defined(HEADRACE_AVX512)
constexpr int kVectorTileRows = 8;
#else
constexpr int kVectorTileRows = 2;
#endif
#if defined(HEADRACE_AMX)
constexpr int kQuantTileRows = 2 * kBlockRows;
#else
constexpr int kQuantTileRows = kVectorTileRows;
#endif

constexpr int kQuads = kBlock / 4;

// Groups of kLanes rows in a panel.
constexpr int kGroups = kPanelRows / kLanes;

// Of kLanes rows.
template <int kSums>
struct BlockScales {
  Floats scale[kSums];
  Floats minimum;  // added per unit of x
};

template <bool kFewRows>
inline void prefetch_block(const Ahead& ahead, int64_t passed, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) prefetch<kFewRows>(ahead.at(passed) + line);
}

// The codes of kLanes rows of a block of 4 bits (the low ones of longer codes) or 8, in quads a line of the panel apart.
template <int kBits>
inline __attribute__((always_inline)) void unpack_quads(const char* from, Bytes (&codes)[kQuads]) {
  constexpr int kLine = kPanelRows * 4;
  if constexpr (kBits == 8) {
#pragma GCC unroll 8
    for (int g = 0; g < kQuads; ++g) codes[g] = load_bytes(from + g * kLine);
  } else {
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      const Bytes both = load_bytes(from + g * kLine);
      codes[g] = both & 0x0f;
      codes[g + 4] = (both >> 4) & 0x0f;
    }
  }
}

// Adds a block's products with the high and the low parts of x, the low ones corrected.
inline __attribute__((always_inline)) Floats add_scaled(Floats total, Ints high, Ints low, Floats step, Floats scale) {
  return fused(__builtin_convertvector(low + (high << 8), Floats) * step, scale, total);
}

// In vector registers.
template <class Panel>
struct VectorTiles {
  template <int kRows>
  static void tile(const char* x, int64_t x_bytes, const char* from, int64_t k, float* sums, int64_t sums_stride, bool,
                   Ahead ahead) {
    Floats total[kRows][kGroups] = {};
    const QuantParts* parts[kRows];
    for (int row = 0; row < kRows; ++row) parts[row] = reinterpret_cast<const QuantParts*>(x + row * x_bytes);
    const int64_t factors = factors_at(k);
    Panel panel(from);
    for (int64_t b = 0; b < k / kBlock; ++b) {
      constexpr bool kFewRows = 4 * kRows <= kVectorTileRows;
      const char *before = panel.next, *block = panel.step();
      if (block != before) prefetch_block<kFewRows>(ahead, before - from, block - before);
#pragma GCC unroll 18
      for (int line = 0; line < Panel::kBlockBytes / 64; ++line)
        prefetch<kFewRows>(ahead.at(block - from) + 64 * line);
#pragma GCC unroll 8
      for (int group = 0; group < kGroups; ++group) {
        Bytes codes[kQuads];
        panel.unpack(block, group, codes);
        const BlockScales<Panel::kSums> scales = panel.scales(block, group);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const auto* of_row = reinterpret_cast<const QuantFactors*>(x + row * x_bytes + factors);
          total[row][group] = multiply(total[row][group], parts[row][b], of_row[b], codes, scales);
        }
      }
    }
    for (int row = 0; row < kRows; ++row)
      for (int group = 0; group < kGroups; ++group)
        store_floats(sums + row * sums_stride + group * kLanes, total[row][group]);
  }

  static inline __attribute__((always_inline)) Floats multiply(Floats total, const QuantParts& x,
                                                               const QuantFactors& factors,
                                                               const Bytes (&codes)[kQuads],
                                                               const BlockScales<Panel::kSums>& scales) {
    // Without this barrier the compiler keeps the broadcast quads of all rows for the next group, and spills them.
    asm volatile("" ::: "memory");
    const Floats step = all_lanes(factors.step);
    constexpr int kCount = kQuads / Panel::kSums;
#pragma GCC unroll 2
    for (int sum = 0; sum < Panel::kSums; ++sum) {
      const Bytes* own = codes + sum * kCount;
      const Ints high = dot_run<Panel::kBits, kCount>(Ints{}, own, x.high + 4 * sum * kCount);
      const Ints start = Panel::kOffset ? all_lanes(factors.correct[sum]) : Ints{};
      const Ints low = dot_run<Panel::kBits, kCount>(start, own, x.low + 4 * sum * kCount);
      total = add_scaled(total, high, low, step, scales.scale[sum]);
    }
    if constexpr (Panel::kMinimum) total = fused(all_lanes(factors.step_sum), scales.minimum, total);
    return total;
  }
};

#if defined(HEADRACE_AMX)
// The number of a tile register is part of an instruction.
#define HEADRACE_PRODUCT(sums, x, codes)        \
  do {                                          \
    _tile_zero(sums);                           \
    if constexpr (Panel::kOffset != 0)          \
      _tile_dpbssd(sums, x, codes);             \
    else                                        \
      _tile_dpbsud(sums, x, codes);             \
  } while (false)

// In tile registers, of up to two blocks of rows. Sums of integers are exact, so results are those of `VectorTiles`.
//
// Some blocks are multiplied before their products are scaled: as many as the first-level cache holds beside x, and for
// one block of rows twice as many. Totals are loaded and stored once for all of them.
template <class Panel>
struct RegisterTiles {
  static_assert(Panel::kSums == 1, "a block has one scale");
  static constexpr int kMost = 4;
  static constexpr int kLineBytes = 4 * kPanelRows, kCodeBytes = kQuads * kLineBytes;
  // Of a block of rows.
  struct Products {
    int32_t high[kBlockRows][kPanelRows], low[kBlockRows][kPanelRows];
  };
  // Of some blocks.
  struct Weights {
    char codes[kMost][kCodeBytes];
    BlockScales<1> scales[kMost][kGroups];
    int count;
  };

  static __attribute__((noinline)) void tile(int num_rows, const char* x, int64_t x_bytes, const char* from, int64_t k,
                                             float* sums, int64_t sums_stride, Ahead ahead) {
    alignas(64) Products products[kMost];  // of each block, by blocks of rows
    alignas(64) Weights weights[2];
    Panel panel(from);
    // Two blocks of rows have the same number of them, and of an odd number one is in both.
    const int halves = num_rows > kBlockRows ? 2 : 1, rows = (num_rows + halves - 1) / halves;
    const int chunk = kMost / halves;
    const int64_t blocks = k / kBlock;
    const char* factors = x + factors_at(k);
    set_rows(rows, rows, kBlock);  // of the high and of the low parts
    read(panel, from, ahead, blocks < chunk ? blocks : chunk, weights[0]);
    for (int64_t first = 0, number = 0; first < blocks; first += chunk, ++number) {
      const Weights& now = weights[number % 2];
      multiply(x + first * static_cast<int64_t>(sizeof(QuantParts)), x_bytes, now, halves, num_rows - rows, products);
      // Before the products are scaled: tiles cannot be loaded until the stores of vectors have reached the cache.
      const int64_t left = blocks - first - chunk;
      if (left > 0) read(panel, from, ahead, left < chunk ? left : chunk, weights[(number + 1) % 2]);
      const char* of_x = factors + first * static_cast<int64_t>(sizeof(QuantFactors));
#pragma GCC unroll 2
      for (int group = 0; group < kGroups; ++group)
        for (int half = 0; half < halves; ++half) {
          const int begin = half ? num_rows - rows : 0;
          int row = half ? rows : 0;
          const auto scale = [&](auto count) __attribute__((always_inline)) {
            add<count>(products + half, halves, row - begin, now, group, of_x + row * x_bytes, x_bytes, first > 0,
                       sums + row * sums_stride + group * kLanes, sums_stride);
            row += count;
          };
          while (row + 8 <= begin + rows) scale(std::integral_constant<int, 8>());
          while (row < begin + rows) scale(std::integral_constant<int, 1>());
        }
    }
  }

  // Reads the next `count` blocks. Codes are signed, if there is an offset.
  static inline __attribute__((always_inline)) void read(Panel& panel, const char* from, Ahead ahead, int64_t count,
                                                         Weights& to) {
    to.count = static_cast<int>(count);
    for (int i = 0; i < to.count; ++i) {
      const char *before = panel.next, *block = panel.step();
      prefetch_block<false>(ahead, before - from, ahead.advance(panel.next - before));
#pragma GCC unroll 2
      for (int group = 0; group < kGroups; ++group) {
        to.scales[i][group] = panel.scales(block, group);
        Bytes codes[kQuads];
        panel.unpack(block, group, codes);
#pragma GCC unroll 8
        for (int quad = 0; quad < kQuads; ++quad) {
          const Bytes code = codes[quad] - static_cast<uint8_t>(Panel::kOffset);
          std::memcpy(to.codes[i] + quad * kLineBytes + group * 4 * kLanes, &code, sizeof(code));
        }
      }
    }
  }

  // Tiles are stored while others are multiplied: those with the last products when the next ones are computed.
  static inline __attribute__((always_inline)) void multiply(const char* x, int64_t x_bytes, const Weights& weights,
                                                             int halves, int second, Products* products) {
    Products* before = products;
    for (int i = 0; i < weights.count; ++i) {
      _tile_loadd(6, weights.codes[i], kLineBytes);
      _tile_loadd(7, weights.codes[i] + 64, kLineBytes);
      for (int half = 0; half < halves; ++half) {
        const char* parts = x + i * static_cast<int64_t>(sizeof(QuantParts)) + half * second * x_bytes;
        Products* now = products + i * halves + half;
        _tile_loadd(4, parts, x_bytes);
        HEADRACE_PRODUCT(0, 4, 6);
        _tile_stored(1, before->high[0] + 16, kLineBytes);
        HEADRACE_PRODUCT(1, 4, 7);
        _tile_stored(2, before->low[0], kLineBytes);
        _tile_loadd(5, parts + kBlock, x_bytes);
        HEADRACE_PRODUCT(2, 5, 6);
        _tile_stored(3, before->low[0] + 16, kLineBytes);
        HEADRACE_PRODUCT(3, 5, 7);
        _tile_stored(0, now->high[0], kLineBytes);
        before = now;
      }
    }
    _tile_stored(1, before->high[0] + 16, kLineBytes);
    _tile_stored(2, before->low[0], kLineBytes);
    _tile_stored(3, before->low[0] + 16, kLineBytes);
  }

  // Adds the scaled products of kCount rows, from `row` of their block on, to the sums.
  template <int kCount>
  static inline __attribute__((always_inline)) void add(const Products* products, int halves, int row,
                                                        const Weights& weights, int group, const char* factors,
                                                        int64_t x_bytes, bool adds, float* sums, int64_t sums_stride) {
    Floats total[kCount];
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) total[i] = adds ? load_floats(sums + i * sums_stride) : Floats{};
    for (int block = 0; block < weights.count; ++block) {
      const BlockScales<1> scales = weights.scales[block][group];
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i) {
        const auto& of_row = reinterpret_cast<const QuantFactors*>(factors + i * x_bytes)[block];
        const Products& own = products[block * halves];
        const Ints high = load_ints(own.high[row + i] + group * kLanes);
        const Ints low = load_ints(own.low[row + i] + group * kLanes);
        total[i] = add_scaled(total[i], high, low, all_lanes(of_row.step), scales.scale[0]);
        if constexpr (Panel::kMinimum) total[i] = fused(all_lanes(of_row.step_sum), scales.minimum, total[i]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) store_floats(sums + i * sums_stride, total[i]);
  }
};
#undef HEADRACE_PRODUCT

// With fewer, what does not depend on their number takes longer than the products of all in vector registers.
constexpr int kLeastRegisterRows = 12;
#endif

// sums [num_rows, kPanelRows] = x times the panel, of up to kQuantTileRows rows.
template <class Panel>
void multiply_parts(int num_rows, const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums,
                    int64_t sums_stride, Ahead ahead) {
#if defined(HEADRACE_AMX)
  // Blocks with two scales have twice the products to add, which takes longer than vector registers do.
  if constexpr (Panel::kSums == 1) {
    if (num_rows >= kLeastRegisterRows) {
      RegisterTiles<Panel>::tile(num_rows, x, x_bytes, panel, k, sums, sums_stride, ahead);
      return;
    }
  }
#endif
  call_tiles<VectorTiles<Panel>, kVectorTileRows>(num_rows, x, x_bytes, panel, k, sums, sums_stride, false, ahead);
}

}  // namespace headrace
