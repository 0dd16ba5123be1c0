// Tiles of integers of 8 bits that meet activations of 8 bits: what checkpoints of W8A8 mean. See groups.h for both
// layouts.
//
// For a group, with w = scale * (code - 128) and x = step * (q - zero):
//   sum w x = scale * step * (sum code q - 128 sum q  -  zero * sum (code - 128))
// The sums of integers are exact; scaled, they are added in fp32 in rising order of groups.
#pragma once

#include "groups.h"
#include "groups_tile.h"
#include "linear_driver.h"
#include "quant_dot.h"

namespace headrace {

// One quad of kLanes rows of a panel, and what adds up its products.
#if defined(__AVX2__) && !defined(HEADRACE_AVX512)
struct RoundedDot {
  struct Codes {
    __m256i rows[2];  // of four rows each, as 16 bits
  };
  struct Sum {
    __m256i rows[2] = {};  // [4, 2]: of a row, of the first two and of the last two of each quad
  };

  static inline __attribute__((always_inline)) Codes load(const char* from) {
    const auto* at = reinterpret_cast<const __m128i*>(from);
    return {{_mm256_cvtepu8_epi16(_mm_loadu_si128(at)), _mm256_cvtepu8_epi16(_mm_loadu_si128(at + 1))}};
  }

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

  static inline __attribute__((always_inline)) Codes load(const char* from) { return load_bytes(from); }

  static inline __attribute__((always_inline)) void add(Sum& sum, Codes codes, const Rounded* x) {
    sum = dot_quads<8>(sum, codes, quad_of(x));
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

// Steps between 0 and a token's largest magnitude: 127.5, for codes go from -128 to 127. Where the largest is negative
// that is the border between two codes, which the last bit of a quotient would decide; this makes it -128.
constexpr float kTokenSteps = 127.50003f;

struct RoundedIntegers : GroupedBase {
  static constexpr int kMaxRows = kRoundedTileRows;

  static int64_t prepared_bytes(int64_t k) { return rounded_row_bytes(k); }
  static bool usable(const LinearArgs&) { return false; }

  static const Rounded* codes_of(const char* row) { return reinterpret_cast<const Rounded*>(row + sizeof(RoundedRow)); }
  static const int32_t* corrections_of(const char* row, int64_t k) {
    return reinterpret_cast<const int32_t*>(row + sizeof(RoundedRow) + bytes_of_rounded(k));
  }

  // Step and zero of a row, by the least and the largest of its values and 0.
  static RoundedRow rounding_of(const PackedWeight& w, float least, float most) {
    RoundedRow row = {};
    row.step = w.input_scale;
    row.zero = w.input_zero;
    if (w.rounding == InputRounding::kStatic) return row;
    const bool shifted = w.rounding == InputRounding::kShiftedToken;
    row.step = shifted ? (most - least) / 255.0f : (most > -least ? most : -least) / kTokenSteps;
    if (!(row.step > 0.0f)) row.step = 1.0f;  // nothing but zeros, or what is too small for a step
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
    Floats most = {}, least = {};
    if (w.rounding != InputRounding::kStatic)
      for (int64_t i = 0; i < w.k; i += kLanes) {
        most = larger(most, value(i));
        least = smaller(least, value(i));
      }
    const RoundedRow row = rounding_of(w, -largest_lane(-least), largest_lane(most));
    std::memcpy(to, &row, sizeof(row));
    auto* codes = reinterpret_cast<Rounded*>(to + sizeof(row));
    auto* corrections = reinterpret_cast<int32_t*>(to + sizeof(row) + bytes_of_rounded(w.k));
    typedef Rounded Small __attribute__((vector_size(sizeof(Rounded) * kLanes)));
    const Floats step = all_lanes(row.step);
    for (int64_t group = 0; group < w.k / w.group; ++group) {
      Ints sum = {};
      for (int64_t i = group * w.group; i < (group + 1) * w.group; i += kLanes) {
        // As the tool does it: divided, rounded, shifted, and then kept in 8 bits.
        const Floats shifted = value(i) / step + row.zero;
        const Floats kept = larger(smaller(shifted, all_lanes(127.0f)), all_lanes(-128.0f));
        const Ints q = nearest_integers(kept);
        sum += q;
        const Small small = __builtin_convertvector(q, Small);
        std::memcpy(codes + i, &small, sizeof(small));
      }
      int32_t total = 0;
      for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
      corrections[group] = 128 * total;
    }
  }

  // Of each row of a panel, what its codes less 128 add up to, scaled: what an input that is 1 everywhere would give.
  static __attribute__((noinline)) void sums_of_weights(const char* panel, int64_t k, float* sums) {
    const GroupHead& head = *reinterpret_cast<const GroupHead*>(panel);
    const char* next = panel + kHeadBytes;
    Floats total[kGroups] = {};
    for (int64_t b = 0; b < k / kBlock; b += head.group_blocks) {
      const char* meta = next;
      next += head.meta_bytes;
      Ints sum[kGroups] = {};
      for (int block = 0; block < head.group_blocks; ++block, next += group_code_bytes(WeightType::kInt8Groups))
        for (int g = 0; g < kQuads; ++g)
          for (int group = 0; group < kGroups; ++group)
            sum[group] = dot_quads<8>(sum[group], load_bytes(next + (g * kPanelRows + group * kLanes) * 4),
                                      reinterpret_cast<Bytes>(all_lanes(0x01010101)));
      for (int group = 0; group < kGroups; ++group)
        total[group] = fused(__builtin_convertvector(sum[group] - head.group_blocks * kBlock * 128, Floats),
                             load_vector(meta, group * kLanes, head.scale_type), total[group]);
    }
    for (int group = 0; group < kGroups; ++group) store_floats(sums + group * kLanes, total[group]);
  }

  // kRoundedGroups * kLanes rows of a panel, from group `first`: as many as registers hold the sums of.
  template <int kRows, bool kAsks>
  static inline __attribute__((always_inline)) void columns(const char* x, int64_t x_bytes, const char* panel,
                                                            int64_t k, int first, float* sums, int64_t sums_stride,
                                                            Ahead ahead) {
    const GroupHead& head = *reinterpret_cast<const GroupHead*>(panel);
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
        constexpr int64_t kBytes = group_code_bytes(WeightType::kInt8Groups);
        if (kAsks) prefetch_block<(4 * kRows <= kMaxRows)>(ahead, next - panel, kBytes);
#pragma GCC unroll 8
        for (int g = 0; g < kQuads; ++g) {
          RoundedDot::Codes weights[kRoundedGroups];
#pragma GCC unroll 4
          for (int group = 0; group < kRoundedGroups; ++group)
            weights[group] = RoundedDot::load(next + (g * kPanelRows + (first + group) * kLanes) * 4);
#pragma GCC unroll 12
          for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
            for (int group = 0; group < kRoundedGroups; ++group)
              RoundedDot::add(sum[row][group], weights[group], codes[row] + at + 4 * g);
        }
        at += kBlock;
        next += kBytes;
      }
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const int32_t correction = corrections_of(x + row * x_bytes, k)[group_number];
#pragma GCC unroll 4
        for (int group = 0; group < kRoundedGroups; ++group)
          total[row][group] = fused(__builtin_convertvector(RoundedDot::total(sum[row][group]) - correction, Floats),
                                    load_vector(meta, (first + group) * kLanes, head.scale_type), total[row][group]);
      }
    }
    for (int row = 0; row < kRows; ++row)
      for (int group = 0; group < kRoundedGroups; ++group)
        store_floats(sums + row * sums_stride + (first + group) * kLanes, total[row][group]);
  }

  template <int kRows>
  static __attribute__((noinline)) void tile(const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums,
                                             int64_t sums_stride, bool, Ahead ahead) {
    columns<kRows, true>(x, x_bytes, panel, k, 0, sums, sums_stride, ahead);
    for (int first = kRoundedGroups; first < kGroups; first += kRoundedGroups)
      columns<kRows, false>(x, x_bytes, panel, k, first, sums, sums_stride, ahead);
    alignas(64) float of_ones[kPanelRows];
    bool has_sums = false;
    for (int row = 0; row < kRows; ++row) {
      const auto& rounding = *reinterpret_cast<const RoundedRow*>(x + row * x_bytes);
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
