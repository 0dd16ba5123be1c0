// The arithmetic of one attention tile: a few query rows against up to kTileKeys keys of one sequence and KV head, in
// groups of kGroupKeys keys anywhere in memory.
//
// Both products of attention are small matrix products C[rows, n] = A[rows, k] B[k, n]. A is broadcast from row-major
// memory, and B is stored so that one vector holds kLanes columns. In bf16 a vector holds pairs along k, as the bf16
// dot product needs them:
//
//   scores:  A = queries [rows, head_dim],  B = keys^T, by groups [head_dim / 2][kGroupKeys][2]
//   output:  A = weights [rows, keys],      B = values, by groups [kGroupKeys / 2][head_dim][2]
//
// Each element of C is one chain of multiply-adds along k for any number of rows. A row's result therefore does not
// depend on the other rows, which makes attention independent of batch, chunks and threads. With AMX the chain is of
// whole blocks of pairs, likewise for any number of rows (`blocks.h`).
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention/cache.h"
#include "runtime/amx.h"

namespace headrace {

// Keys of one tile, counted from the start of the context. Partial results are always merged tile by tile, whatever the
// batch and threads.
constexpr int kTileKeys = 128;
constexpr int kTileGroups = kTileKeys / kGroupKeys;

#if defined(HEADRACE_AVX512) && defined(__AVX512BF16__)
#define HEADRACE_BF16_DOT 1
#elif defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HEADRACE_BF16_DOT 1
#endif

using Bf16 = uint16_t;

// Prefetches runs of memory into the second-level cache, a few lines at each step of other work: more at once than a
// core's miss buffers hold would stall it, and fewer would leave memory idle.
class Fetch {
 public:
  Fetch() = default;
  // run_bytes is a multiple of kStepBytes; a step fetches kStepBytes or a power-of-two part of it. steps: the expected
  // number of calls of step().
  Fetch(const char* const* first, const char* const* end, int64_t run_bytes, int64_t steps)
      : next_(first), end_(end), run_bytes_(run_bytes) {
    const int64_t each = (end - first) * run_bytes / std::max(int64_t{1}, steps);
    while (step_bytes_ < each && step_bytes_ < kStepBytes) step_bytes_ *= 2;
    next_run();
  }

  void step() {
    if (at_ == nullptr) return;
    const char* const stop = at_ + step_bytes_;
    for (; at_ != stop; at_ += 64) __builtin_prefetch(at_, 0, 2);
    if (at_ == run_end_) next_run();
  }

  void finish() {
    while (at_ != nullptr) step();
  }

 private:
  static constexpr int64_t kStepBytes = 256;

  void next_run() {
    at_ = next_ == end_ ? nullptr : *next_++;
    run_end_ = at_ + run_bytes_;
  }

  const char* at_ = nullptr;  // null: done
  const char* run_end_ = nullptr;
  const char* const* next_ = nullptr;
  const char* const* end_ = nullptr;
  int64_t run_bytes_ = 0;
  int64_t step_bytes_ = 64;
};

// Values along k in one lane of a packed vector.
template <class T>
constexpr int kPairs = sizeof(T) == 2 ? 2 : 1;

constexpr int round_up_to(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Broadcasts a value of A, or a pair, to all lanes.
inline Floats spread_one(const float* a) { return all_lanes(*a); }
inline Floats multiply_add(Floats sum, Floats a, const float* b) { return fused(a, load_floats(b), sum); }

#if defined(HEADRACE_BF16_DOT)
inline Floats spread_one(const Bf16* a) {
  int32_t pair;
  std::memcpy(&pair, a, 4);
  return reinterpret_cast<Floats>(all_lanes(pair));
}

inline Floats multiply_add(Floats sum, Floats a, const Bf16* b) {
#if defined(HEADRACE_AVX512)
  const __m512i columns = _mm512_loadu_si512(b);
  return reinterpret_cast<Floats>(
      _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), (__m512bh)reinterpret_cast<__m512i>(a), (__m512bh)columns));
#else
  const bfloat16x8_t columns = vreinterpretq_bf16_u16(vld1q_u16(b));
  return reinterpret_cast<Floats>(vbfdotq_f32(
      reinterpret_cast<float32x4_t>(sum), vreinterpretq_bf16_f32(reinterpret_cast<float32x4_t>(a)), columns));
#endif
}
#endif

// One step along k: adds to kRows x kVectors sums.
template <class T, int kRows, int kVectors, class Column>
inline __attribute__((always_inline)) void multiply_step(Floats (&sums)[kRows][kVectors], const T* a, const T* middle,
                                                         int64_t a_stride, Column column) {
  // One base per three rows: every address is then base + {0, 1, 2} * a_stride, which one instruction can form.
  const T* const bases[2] = {a, middle};
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    const Floats value = spread_one(bases[row / 3] + row % 3 * a_stride);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[row][v] = multiply_add(sums[row][v], value, column(v));
  }
}

constexpr int kVectorsOfGroup = kGroupKeys / kLanes;

// scores [kRows, kGroups * kGroupKeys] of queries [kRows, steps * kPairs] and groups of keys.
// Never inlined, since its loop needs every register; unrolled explicitly, or the sums would be kept in memory.
template <class T, int kRows, int kGroups>
__attribute__((noinline)) void score_block(const T* a, int64_t a_stride, const T* const* groups, int64_t steps,
                                           float* c, Fetch& fetch) {
  constexpr int kVectors = kGroups * kVectorsOfGroup;
  Floats sums[kRows][kVectors] = {};
  const T* b[kGroups];
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; ++g) b[g] = groups[g];
  Fetch ahead = fetch;
  const T* middle = a + (kRows > 3 ? 3 : 0) * a_stride;
  for (int64_t at = 0; at < steps * kGroupKeys * kPairs<T>; at += kGroupKeys * kPairs<T>) {
    ahead.step();
    multiply_step<T>(sums, a, middle, a_stride, [&](int v) {
      return b[v / kVectorsOfGroup] + at + v % kVectorsOfGroup * kLanes * kPairs<T>;
    });
    a += kPairs<T>;
    middle += kPairs<T>;
  }
  fetch = ahead;
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store_floats(c + row * kTileKeys + v * kLanes, sums[row][v]);
}

// How a tile's output is merged into a row's: to = to * keep + new * take. Without factors it overwrites the row's.
struct Factors {
  const float* keep;  // [rows], or null
  const float* take;

  Factors from(int row) const { return keep == nullptr ? *this : Factors{keep + row, take + row}; }
};

inline Floats join(Floats before, float keep, Floats added, float take) {
  return fused(before, all_lanes(keep), added * all_lanes(take));
}

// output [kRows, kVectors * kLanes] of weights [kRows, kTileKeys] and these columns of the groups of values.
template <class T, int kRows, int kVectors>
__attribute__((noinline)) void value_block(const T* weights, const T* const* groups, int num_groups, int64_t column,
                                           int64_t padded, float* c, Factors factors, Fetch& fetch) {
  Floats sums[kRows][kVectors] = {};
  Fetch ahead = fetch;
  const T* a = weights;
  const T* middle = weights + (kRows > 3 ? 3 : 0) * kTileKeys;
  for (int g = 0; g < num_groups; ++g) {
    const T* b = groups[g] + column * kPairs<T>;
    for (int step = 0; step < kGroupKeys / kPairs<T>; ++step) {
      ahead.step();
      multiply_step<T>(sums, a, middle, kTileKeys, [&](int v) { return b + v * kLanes * kPairs<T>; });
      a += kPairs<T>;
      middle += kPairs<T>;
      b += padded * kPairs<T>;
    }
  }
  fetch = ahead;
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* const to = c + row * padded + v * kLanes;
      Floats made = sums[row][v];
      if (factors.keep != nullptr) made = join(load_floats(to), factors.keep[row], made, factors.take[row]);
      store_floats(to, made);
    }
  }
}

// Calls run(number of rows, first row) with compile-time numbers of at most kMost.
template <int kMost, class Run>
inline void by_rows(int num_rows, Run run) {
  int row = 0;
  for (; row + kMost <= num_rows; row += kMost) run(std::integral_constant<int, kMost>{}, row);
  switch (num_rows - row) {
    case 5: run(std::integral_constant<int, (kMost > 5 ? 5 : 1)>{}, row); break;
    case 4: run(std::integral_constant<int, (kMost > 4 ? 4 : 1)>{}, row); break;
    case 3: run(std::integral_constant<int, (kMost > 3 ? 3 : 1)>{}, row); break;
    case 2: run(std::integral_constant<int, 2>{}, row); break;
    case 1: run(std::integral_constant<int, 1>{}, row); break;
    default: break;
  }
}

// Sums, columns and one broadcast must fit the registers: 32, or 16 with AVX2.
constexpr int rows_at_once(int vectors) { return vectors > (kLanes == 8 ? 2 : 4) ? 3 : 6; }

#if defined(HEADRACE_AMX)
inline void score_blocks(const Bf16* queries, int stride, int rows, const Bf16* const* groups, int num_groups, int steps,
                         float* scores, Fetch& fetch);
inline void value_blocks(const Bf16* weights, int rows, const Bf16* const* groups, int num_groups, int padded,
                         float* output, Factors factors, Fetch& fetch);
#endif

// scores [rows, kTileKeys] of queries [rows, stride] and num_groups groups of keys.
template <class T>
inline void score_product(const T* queries, int stride, int rows, const T* const* groups, int num_groups, int steps,
                          float* scores, Fetch& fetch) {
#if defined(HEADRACE_AMX)
  if constexpr (sizeof(T) == 2)
    if (steps % kBlockPairs == 0) return score_blocks(queries, stride, rows, groups, num_groups, steps, scores, fetch);
#endif
  int group = 0;
  const auto run = [&](auto groups_tag) {
    constexpr int kGroups = decltype(groups_tag)::value;
    for (; group + kGroups <= num_groups; group += kGroups)
      by_rows<rows_at_once(kGroups * kVectorsOfGroup)>(rows, [&](auto rows_tag, int row) {
        score_block<T, decltype(rows_tag)::value, kGroups>(queries + row * stride, stride, groups + group, steps,
                                                           scores + row * kTileKeys + group * kGroupKeys, fetch);
      });
  };
  if constexpr (kLanes == 16) {
    // Few rows: as many columns at once as possible, since the latency of a few chains would leave multipliers idle.
    if (rows <= 3) {
      run(std::integral_constant<int, 8>{});
      run(std::integral_constant<int, 7>{});
      run(std::integral_constant<int, 6>{});
      run(std::integral_constant<int, 5>{});
    }
    run(std::integral_constant<int, 4>{});
    if (rows <= 3) run(std::integral_constant<int, 3>{});
    run(std::integral_constant<int, 2>{});
  }
  run(std::integral_constant<int, 1>{});
}

// output [rows, padded] of weights [rows, kTileKeys] and num_groups groups of values.
template <class T>
inline void value_product(const T* weights, int rows, const T* const* groups, int num_groups, int padded, float* output,
                          Factors factors, Fetch& fetch) {
#if defined(HEADRACE_AMX)
  if constexpr (sizeof(T) == 2)
    return value_blocks(weights, rows, groups, num_groups, padded, output, factors, fetch);
#endif
  int column = 0;
  const auto run = [&](auto vectors_tag) {
    constexpr int kVectors = decltype(vectors_tag)::value;
    for (; column + kVectors * kLanes <= padded; column += kVectors * kLanes)
      by_rows<rows_at_once(kVectors)>(rows, [&](auto rows_tag, int row) {
        value_block<T, decltype(rows_tag)::value, kVectors>(weights + row * kTileKeys, groups, num_groups, column,
                                                            padded, output + row * padded + column, factors.from(row),
                                                            fetch);
      });
  };
  if (kLanes == 16 && rows <= 3) run(std::integral_constant<int, 8>{});
  run(std::integral_constant<int, 4>{});
  run(std::integral_constant<int, 2>{});
  run(std::integral_constant<int, 1>{});
}

}  // namespace headrace

#include "attention/blocks.h"
