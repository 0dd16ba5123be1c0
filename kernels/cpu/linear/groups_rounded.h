// Tiles of 4-bit and 8-bit integer weights with 8-bit activations, for W4A8 and W8A8 checkpoints and for encoders that
// are quantised as they load. See groups.h for the layouts of weights and activations.
//
// For a group, with w = scale * (code - m), m the weights' zero point, and x = step * (q - zero):
//   sum w x = scale * step * (sum code q - m sum q  -  zero * sum (code - m))
// The integer sums are exact. They are scaled and added in fp32 in rising order of groups. A step of a group is part of
// its scale; one of all of a row is a factor of the whole sum.
#pragma once

#include "runtime/amx.h"
#include "linear/groups.h"
#include "linear/groups_tile.h"
#include "linear/driver.h"
#include "linear/quant_dot.h"

namespace headrace {

// One quad of kLanes rows of a panel, and the accumulator of its products.
#if defined(__AVX2__) && !defined(HEADRACE_AVX512)
struct RoundedDot {
  struct Codes {
    __m256i rows[2];  // four rows each, in 16 bits
  };
  struct Sum {
    __m256i rows[2] = {};  // [4 rows, 2]: sums over the first two and over the last two of each quad
  };

  static inline __attribute__((always_inline)) Codes of(Bytes codes) {
    const auto all = reinterpret_cast<__m256i>(codes);
    return {{_mm256_cvtepu8_epi16(_mm256_castsi256_si128(all)),
             _mm256_cvtepu8_epi16(_mm256_extracti128_si256(all, 1))}};
  }

  template <int kBits>
  static inline __attribute__((always_inline)) void add(Sum& sum, const Codes& codes, const Rounded* x) {
    int64_t bits;
    std::memcpy(&bits, x, sizeof(bits));
    const __m256i quad = _mm256_set1_epi64x(bits);
    for (int part = 0; part < 2; ++part)
      sum.rows[part] = _mm256_add_epi32(sum.rows[part], _mm256_madd_epi16(codes.rows[part], quad));
  }

  static Ints total(const Sum& sum) {
    const __m256i pairs = _mm256_hadd_epi32(sum.rows[0], sum.rows[1]);  // rows 0 1 4 5, 2 3 6 7
    return reinterpret_cast<Ints>(_mm256_permute4x64_epi64(pairs, 0xd8));
  }
};
constexpr int kRoundedTileRows = 4;
constexpr int kRoundedGroups = 1;
#else
struct RoundedDot {
  typedef Bytes Codes;
  typedef Ints Sum;

  static inline __attribute__((always_inline)) Codes of(Bytes codes) { return codes; }

  template <int kBits>
  static inline __attribute__((always_inline)) void add(Sum& sum, Codes codes, const Rounded* x) {
    sum = dot_quads<kBits>(sum, codes, quad_of(x));
  }

  static Ints total(Sum sum) { return sum; }
};
#if defined(HEADRACE_AVX512)
constexpr int kRoundedTileRows = 12;
constexpr int kRoundedGroups = 2;
#else
constexpr int kRoundedTileRows = 4;
constexpr int kRoundedGroups = 2;
#endif
#endif

// Steps between 0 and a token's largest magnitude. Codes go from -128 to 127, so it would be 127.5; but then a negative
// largest value would lie between two codes, decided by the last bit of a quotient. With slightly more it is -128.
constexpr float kTokenSteps = 127.50003f;

template <WeightType kType>
struct RoundedIntegers : GroupedBase {
  static constexpr int kBits = bits_of(kType);
#if defined(HEADRACE_AMX)
  static constexpr bool kBlocks = kBits == 8;
#else
  static constexpr bool kBlocks = false;
#endif
  static constexpr int kMaxRows = kBlocks ? 2 * kBlockRows : kRoundedTileRows;
  static constexpr int32_t kMiddle = 1 << (kBits - 1);
  // A line of a block has one quad of each row of a panel; for 4 bits two, the second 4 quads after the first.
  static constexpr int kLineBytes = kPanelRows * 4;
  static constexpr int kLines = group_code_bytes(kType) / kLineBytes;
  static constexpr int kHalves = kQuads / kLines;

  // The codes of kLanes rows of a line: one quad, or two for 4 bits.
  static inline __attribute__((always_inline)) void load_quads(const char* from, Bytes (&codes)[kHalves]) {
    codes[0] = load_bytes(from);
    if constexpr (kHalves == 2) {
      codes[1] = (codes[0] >> 4) & 0x0f;
      codes[0] &= 0x0f;
    }
  }

  static int64_t prepared_bytes(int64_t k) { return rounded_row_bytes(k); }
  static bool usable(const LinearArgs&) { return false; }

  static const Rounded* codes_of(const char* row) { return reinterpret_cast<const Rounded*>(row + sizeof(RoundedRow)); }
  static const int32_t* corrections_of(const char* row, int64_t k) {
    return reinterpret_cast<const int32_t*>(row + sizeof(RoundedRow) + bytes_of_rounded(k));
  }
  static const float* steps_of(const char* row, int64_t k) {
    return reinterpret_cast<const float*>(corrections_of(row, k) + k / kBlock);
  }

  // The step and zero of a row or a group, from the least and the largest of 0 and its values.
  static RoundedRow rounding_of(const PackedWeight& w, float least, float most) {
    RoundedRow row = {};
    row.step = w.input_scale;
    row.zero = w.input_zero;
    if (w.rounding == InputRounding::kStatic) return row;
    const bool shifted = w.rounding == InputRounding::kShiftedToken;
    row.step = shifted ? (most - least) / 255.0f : (most > -least ? most : -least) / kTokenSteps;
    if (!(row.step > 0.0f)) row.step = 1.0f;  // all values are zero, or too small for a step
    if (shifted) {
      const float zero = nearest_integers(all_lanes(-128.0f - least / row.step))[0];
      row.zero = zero < -128.0f ? -128.0f : zero > 127.0f ? 127.0f : zero;
    }
    return row;
  }

  static void prepare(const LinearArgs& args, const char* from, char* to) {
    const PackedWeight& w = args.weight;
    const auto value = [&](int64_t i) __attribute__((always_inline)) {
      if (!w.order) return load_vector(from, i, args.x_dtype);
      Floats gathered;
      for (int lane = 0; lane < kLanes; ++lane) gathered[lane] = load_one(from, w.order[i + lane], args.x_dtype);
      return gathered;
    };
    const auto rounding = [&](int64_t begin, int64_t end) __attribute__((always_inline)) {
      Floats most = {}, least = {};
      for (int64_t i = begin; i < end; i += kLanes) {
        most = larger(most, value(i));
        least = smaller(least, value(i));
      }
      return rounding_of(w, -largest_lane(-least), largest_lane(most));
    };
    const bool by_group = w.rounding == InputRounding::kGroups;
    RoundedRow row = {};
    row.step = 1.0f;
    if (!by_group) row = rounding(0, w.rounding == InputRounding::kStatic ? 0 : w.k);
    auto* codes = reinterpret_cast<Rounded*>(to + sizeof(row));
    auto* corrections = reinterpret_cast<int32_t*>(to + sizeof(row) + bytes_of_rounded(w.k));
    auto* steps = reinterpret_cast<float*>(corrections + w.k / kBlock);
    const int32_t each = w.zero_type == kNoZeros ? kMiddle : 1;
    typedef Rounded Small __attribute__((vector_size(sizeof(Rounded) * kLanes)));
    const Floats step = all_lanes(row.step);
    Floats zeros = {};  // a finite value times 0 is 0, and any other one is NaN, which its code would hide
    for (int64_t group = 0; group < w.k / w.group; ++group) {
      Ints sum = {};
      steps[group] = by_group ? rounding(group * w.group, (group + 1) * w.group).step : 1.0f;
      const Floats inverse = all_lanes(1.0f / steps[group]);
      for (int64_t i = group * w.group; i < (group + 1) * w.group; i += kLanes) {
        // Divided, shifted, clamped and rounded, as `InputRounding.of` does.
        const Floats shifted = by_group ? value(i) * inverse : value(i) / step + row.zero;
        zeros += value(i) * 0.0f;
        const Floats kept = larger(smaller(shifted, all_lanes(127.0f)), all_lanes(-128.0f));
        const Ints q = nearest_integers(kept);
        sum += q;
        const Small small = __builtin_convertvector(q, Small);
        std::memcpy(codes + i, &small, sizeof(small));
      }
      int32_t total = 0;
      for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
      corrections[group] = each * total;
    }
    row.step += sum_of_lanes(zeros);
    std::memcpy(to, &row, sizeof(row));
  }

  // The zero points of kLanes rows of the group whose scales are at `meta`, for weights that have zero points.
  static Floats zeros_of(const GroupHead& head, const char* meta, int first) {
    return load_vector(meta + kPanelRows * size_of(head.scale_type), first, static_cast<DType>(head.zero_type));
  }

  // The sum of the weights of each row of a panel, which is the product with an input of ones.
  static __attribute__((noinline)) void sums_of_weights(const char* panel, int64_t k, float* sums) {
    const GroupHead& head = *reinterpret_cast<const GroupHead*>(panel);
    const char* next = panel + kHeadBytes;
    Floats total[kGroups] = {};
    for (int64_t b = 0; b < k / kBlock; b += head.group_blocks) {
      const char* meta = next;
      next += head.meta_bytes;
      Ints sum[kGroups] = {};
      for (int block = 0; block < head.group_blocks; ++block, next += group_code_bytes(kType))
        for (int line = 0; line < kLines; ++line)
          for (int group = 0; group < kGroups; ++group) {
            Bytes codes[kHalves];
            load_quads(next + line * kLineBytes + group * kLanes * 4, codes);
            for (int half = 0; half < kHalves; ++half)
              sum[group] = dot_quads<kBits>(sum[group], codes[half], reinterpret_cast<Bytes>(all_lanes(0x01010101)));
          }
      const int32_t count = head.group_blocks * kBlock;
      for (int group = 0; group < kGroups; ++group) {
        Floats value;
        if (head.zero_type == kNoZeros)
          value = __builtin_convertvector(sum[group] - count * kMiddle, Floats);
        else
          value = __builtin_convertvector(sum[group], Floats) -
                  zeros_of(head, meta, group * kLanes) * all_lanes(static_cast<float>(count));
        total[group] = fused(value, load_vector(meta, group * kLanes, head.scale_type), total[group]);
      }
    }
    for (int group = 0; group < kGroups; ++group) store_floats(sums + group * kLanes, total[group]);
  }

  // The products of kRoundedGroups * kLanes rows of a panel, from group `first` on: as many sums as fit the registers.
  template <int kRows, bool kAsks>
  static inline __attribute__((always_inline)) void columns(const char* x, int64_t x_bytes, const char* panel,
                                                            int64_t k, int first, float* sums, int64_t sums_stride,
                                                            Ahead ahead) {
    const GroupHead& head = *reinterpret_cast<const GroupHead*>(panel);
    const bool has_zeros = head.zero_type != kNoZeros;
    const char* next = panel + kHeadBytes;
    Floats total[kRows][kRoundedGroups] = {};
    const Rounded* codes[kRows];
    for (int row = 0; row < kRows; ++row) codes[row] = codes_of(x + row * x_bytes);
    int64_t at = 0, group_number = 0;
    for (; at < k; ++group_number) {
      const char* meta = next;
      next += head.meta_bytes;
      RoundedDot::Sum sum[kRows][kRoundedGroups] = {};
      for (int block = 0; block < head.group_blocks; ++block) {
        constexpr int64_t kBytes = group_code_bytes(kType);
        if (kAsks) prefetch_block<(4 * kRows <= kRoundedTileRows)>(ahead, next - panel, kBytes);
#pragma GCC unroll 8
        for (int line = 0; line < kLines; ++line) {
          Bytes quads[kRoundedGroups][kHalves];
#pragma GCC unroll 4
          for (int group = 0; group < kRoundedGroups; ++group)
            load_quads(next + line * kLineBytes + (first + group) * kLanes * 4, quads[group]);
#pragma GCC unroll 2
          for (int half = 0; half < kHalves; ++half) {
            RoundedDot::Codes weights[kRoundedGroups];
#pragma GCC unroll 4
            for (int group = 0; group < kRoundedGroups; ++group) weights[group] = RoundedDot::of(quads[group][half]);
#pragma GCC unroll 12
            for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
              for (int group = 0; group < kRoundedGroups; ++group)
                RoundedDot::template add<kBits>(sum[row][group], weights[group],
                                                codes[row] + at + 4 * (line + half * kLines));
          }
        }
        at += kBlock;
        next += kBytes;
      }
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const int32_t correction = corrections_of(x + row * x_bytes, k)[group_number];
        const Floats step = all_lanes(steps_of(x + row * x_bytes, k)[group_number]);
#pragma GCC unroll 4
        for (int group = 0; group < kRoundedGroups; ++group) {
          const int lane = (first + group) * kLanes;
          const Ints products = RoundedDot::total(sum[row][group]);
          Floats value;
          if (!has_zeros)
            value = __builtin_convertvector(products - correction, Floats);
          else
            value = __builtin_convertvector(products, Floats) -
                    zeros_of(head, meta, lane) * all_lanes(static_cast<float>(correction));
          total[row][group] = fused(value, load_vector(meta, lane, head.scale_type) * step, total[row][group]);
        }
      }
    }
    for (int row = 0; row < kRows; ++row)
      for (int group = 0; group < kRoundedGroups; ++group)
        store_floats(sums + row * sums_stride + (first + group) * kLanes, total[row][group]);
  }

#if defined(HEADRACE_AMX)
  // With fewer, what each group costs besides takes longer than vector registers do.
  static int least_rows(const char* panel) {
    return reinterpret_cast<const GroupHead*>(panel)->group_blocks % 2 == 0 ? 5 : 16;
  }

  // As `columns`, of the whole panel.
  static void blocks(int num_rows, const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums,
                     int64_t sums_stride, Ahead ahead) {
    const GroupHead& head = *reinterpret_cast<const GroupHead*>(panel);
    const bool has_zeros = head.zero_type != kNoZeros, is_tall = num_rows > kBlockRows;
    const char* next = panel + kHeadBytes;
    const char *codes = reinterpret_cast<const char*>(codes_of(x)), *below = codes + kBlockRows * x_bytes;
    constexpr int64_t kRowBytes = 4 * kPanelRows, kProductBytes = 4 * kPanelRows;
    const int step_blocks = head.group_blocks % 2 == 0 ? 2 : 1;
    const int64_t step_k = step_blocks * kBlock, bytes = step_k * kPanelRows;
    alignas(64) int32_t products[2 * kBlockRows * kPanelRows];
    set_shapes(num_rows, static_cast<int>(step_k));
    int64_t at = 0;
    for (int64_t group_number = 0; at < k; ++group_number) {
      const char* meta = next;
      next += head.meta_bytes;
      _tile_zero(0);
      _tile_zero(1);
      if (is_tall) {
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int block = 0; block < head.group_blocks; block += step_blocks, at += step_k, next += bytes) {
        for (int64_t line = 0; line < ahead.advance(bytes); line += 64) prefetch<false>(ahead.at(next - panel) + line);
        _tile_loadd(6, next, kRowBytes);
        _tile_loadd(7, next + 64, kRowBytes);
        _tile_loadd(4, codes + at, x_bytes);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        if (is_tall) {
          _tile_loadd(5, below + at, x_bytes);
          _tile_dpbsud(2, 5, 6);
          _tile_dpbsud(3, 5, 7);
        }
      }
      _tile_stored(0, products, kProductBytes);
      _tile_stored(1, products + 16, kProductBytes);
      if (is_tall) {
        _tile_stored(2, products + kBlockRows * kPanelRows, kProductBytes);
        _tile_stored(3, products + kBlockRows * kPanelRows + 16, kProductBytes);
      }
      for (int group = 0; group < kGroups; ++group) {
        const int lane = group * kLanes;
        const Floats scales = load_vector(meta, lane, head.scale_type);
        const Floats zeros = has_zeros ? zeros_of(head, meta, lane) : Floats{};
        for (int row = 0; row < num_rows; ++row) {
          const int32_t correction = corrections_of(x + row * x_bytes, k)[group_number];
          const Floats step = all_lanes(steps_of(x + row * x_bytes, k)[group_number]);
          const Ints product = load_ints(products + row * kPanelRows + lane);
          const Floats value =
              has_zeros ? __builtin_convertvector(product, Floats) - zeros * all_lanes(static_cast<float>(correction))
                        : __builtin_convertvector(product - correction, Floats);
          float* total = sums + row * sums_stride + lane;
          store_floats(total, fused(value, scales * step, group_number ? load_floats(total) : Floats{}));
        }
      }
    }
  }
#endif

  // In vector registers.
  struct Vectors {
    template <int kRows>
    static __attribute__((noinline)) void tile(const char* x, int64_t x_bytes, const char* panel, int64_t k,
                                               float* sums, int64_t sums_stride, bool, Ahead ahead) {
      columns<kRows, true>(x, x_bytes, panel, k, 0, sums, sums_stride, ahead);
      for (int first = kRoundedGroups; first < kGroups; first += kRoundedGroups)
        columns<kRows, false>(x, x_bytes, panel, k, first, sums, sums_stride, ahead);
    }
  };

  static void products(int num_rows, const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums,
                       int64_t sums_stride, Ahead ahead) {
#if defined(HEADRACE_AMX)
    if (kBlocks && num_rows >= least_rows(panel)) {
      blocks(num_rows, x, x_bytes, panel, k, sums, sums_stride, ahead);
      return;
    }
#endif
    call_tiles<Vectors, kRoundedTileRows>(num_rows, x, x_bytes, panel, k, sums, sums_stride, false, ahead);
  }

  template <int kRows>
  static __attribute__((noinline)) void tile(const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums,
                                             int64_t sums_stride, bool, Ahead ahead) {
    products(kRows, x, x_bytes, panel, k, sums, sums_stride, ahead);
    alignas(64) float of_ones[kPanelRows];
    bool has_sums = false;
    for (int row = 0; row < kRows; ++row) {
      const auto& rounding = *reinterpret_cast<const RoundedRow*>(x + row * x_bytes);
      if (rounding.zero == 0.0f && rounding.step == 1.0f) continue;  // groups have steps of their own
      if (rounding.zero != 0.0f && !has_sums) {
        sums_of_weights(panel, k, of_ones);
        has_sums = true;
      }
      float* own = sums + row * sums_stride;
      for (int group = 0; group < kGroups; ++group) {
        Floats value = load_floats(own + group * kLanes);
        if (rounding.zero != 0.0f) value = value - load_floats(of_ones + group * kLanes) * rounding.zero;
        store_floats(own + group * kLanes, value * rounding.step);
      }
    }
  }
};

}  // namespace headrace
