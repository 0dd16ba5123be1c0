// The arithmetic of one attention tile: a few query rows against up to kTileKeys keys of one sequence and KV head.
//
// Both products of attention are the same small matrix product, C[rows, n] = A[rows, k] B[k, n], with A broadcast from
// row-major memory and B packed so that one vector holds kLanes columns. In bf16 a vector holds pairs along k, as the
// bf16 dot product wants them:
//
//   scores:  A = queries [rows, head_dim],  B = keys^T, packed [head_dim / 2][keys][2]
//   output:  A = weights [rows, keys],      B = values, packed [keys / 2][head_dim][2]
//
// Each element of C is one chain of multiply-adds along k, whatever the number of rows: a row's result does not
// depend on the rows beside it. That is what makes attention independent of batch, chunking and threads.
#pragma once

#include <type_traits>

#include "elementwise_vector.h"

namespace headrace {

// Keys of one tile, counted from the start of the context. Never depends on batch or threads: partial results are
// merged tile by tile in this division always.
constexpr int kTileKeys = 128;

#if defined(HEADRACE_AVX512) && defined(__AVX512BF16__)
#define HEADRACE_BF16_DOT 1
#elif defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HEADRACE_BF16_DOT 1
#endif

using Bf16 = uint16_t;

// Rows that will be needed soon, fetched into the second-level cache a few at a time, spread evenly over other work:
// more at once than a core's buffers for misses hold would stop it.
struct Fetch {
  const char* const* next;
  const char* const* end;
  int64_t row_bytes;

  void take(int rows) {
    for (; rows > 0 && next != end; --rows, ++next)
      for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(*next + at, 0, 2);
  }
};

// How many values along k one lane of a packed vector holds.
template <class T>
constexpr int kPairs = sizeof(T) == 2 ? 2 : 1;

inline int round_up_to(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

inline Floats multiply_add(Floats sum, const float* a, const float* b) {
  return fused(all_lanes(*a), load_floats(b), sum);
}

#if defined(HEADRACE_BF16_DOT)
inline Floats multiply_add(Floats sum, const Bf16* a, const Bf16* b) {
  int32_t pair;
  std::memcpy(&pair, a, 4);
#if defined(HEADRACE_AVX512)
  __m512i columns = _mm512_loadu_si512(b);
  return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), (__m512bh)_mm512_set1_epi32(pair),
                                                   (__m512bh)columns));
#else
  bfloat16x8_t columns = vreinterpretq_bf16_u16(vld1q_u16(b));
  return reinterpret_cast<Floats>(vbfdotq_f32(reinterpret_cast<float32x4_t>(sum),
                                              vreinterpretq_bf16_s32(vdupq_n_s32(pair)), columns));
#endif
}
#endif

// A block of kRows x (kVectors * kLanes) results held in registers.
// Never inlined, for its loop needs every register; and unrolled by hand, or the sums would lie in memory.
template <class T, int kRows, int kVectors>
__attribute__((noinline)) void product_block(const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t steps,
                                             float* c, int64_t c_stride, Fetch& fetch) {
  Floats sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[row][v] = Floats{};
  Fetch ahead = fetch;
  // A base for each three rows: then every address is base + {0, 1, 2} * a_stride, which one instruction can form.
  const T* const middle = a + (kRows > 3 ? 3 : 0) * a_stride;
  const int64_t to_middle = middle - a;
  for (const T* const end = a + steps * kPairs<T>; a != end; a += kPairs<T>, b += b_stride) {
    ahead.take(2);
    const T* const bases[2] = {a, a + to_middle};
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        sums[row][v] = multiply_add(sums[row][v], bases[row / 3] + row % 3 * a_stride, b + v * kLanes * kPairs<T>);
  }
  fetch = ahead;
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store_floats(c + row * c_stride + v * kLanes, sums[row][v]);
}

template <class T, int kVectors>
inline void product_columns(const T* a, int a_stride, int rows, const T* b, int b_stride, int steps, float* c,
                            int c_stride, Fetch& fetch) {
  // Sums, columns and one broadcast must fit the registers: 32 of them, or 16 under AVX2.
  constexpr int kMostRows = kLanes == 8 ? (kVectors > 2 ? 3 : 6) : (kVectors > 4 ? 3 : 6);
  int row = 0;
  for (; row + kMostRows <= rows; row += kMostRows)
    product_block<T, kMostRows, kVectors>(a + row * a_stride, a_stride, b, b_stride, steps, c + row * c_stride,
                                          c_stride, fetch);
  a += row * a_stride;
  c += row * c_stride;
  switch (rows - row) {
    case 5: product_block<T, (kMostRows > 5 ? 5 : 1), kVectors>(a, a_stride, b, b_stride, steps, c, c_stride, fetch); break;
    case 4: product_block<T, (kMostRows > 4 ? 4 : 1), kVectors>(a, a_stride, b, b_stride, steps, c, c_stride, fetch); break;
    case 3: product_block<T, (kMostRows > 3 ? 3 : 1), kVectors>(a, a_stride, b, b_stride, steps, c, c_stride, fetch); break;
    case 2: product_block<T, 2, kVectors>(a, a_stride, b, b_stride, steps, c, c_stride, fetch); break;
    case 1: product_block<T, 1, kVectors>(a, a_stride, b, b_stride, steps, c, c_stride, fetch); break;
    default: break;
  }
}

// C[rows, columns] = A[rows, steps * kPairs] B. `columns` is a multiple of kLanes; b_stride counts elements of T from
// one step of B to the next.
template <class T>
inline void product(const T* a, int a_stride, int rows, const T* b, int b_stride, int steps, int columns, float* c,
                    int c_stride, Fetch& fetch) {
  int column = 0;
  if (rows <= 3)  // few rows: more columns at once, or the chain of each sum would leave the multipliers idle
    for (; column + 8 * kLanes <= columns; column += 8 * kLanes)
      product_columns<T, 8>(a, a_stride, rows, b + column * kPairs<T>, b_stride, steps, c + column, c_stride, fetch);
  for (; column + 4 * kLanes <= columns; column += 4 * kLanes)
    product_columns<T, 4>(a, a_stride, rows, b + column * kPairs<T>, b_stride, steps, c + column, c_stride, fetch);
  for (; column + 2 * kLanes <= columns; column += 2 * kLanes)
    product_columns<T, 2>(a, a_stride, rows, b + column * kPairs<T>, b_stride, steps, c + column, c_stride, fetch);
  for (; column < columns; column += kLanes)
    product_columns<T, 1>(a, a_stride, rows, b + column * kPairs<T>, b_stride, steps, c + column, c_stride, fetch);
}

#if defined(HEADRACE_AVX512)
// 16 rows of up to 16 words each become 16 columns: to[word * to_stride + row].
inline void transpose_words_block(const uint32_t* const* rows, int first, int words, uint32_t* to, int to_stride) {
  const __mmask16 mask = static_cast<__mmask16>(words >= 16 ? 0xffff : (1 << words) - 1);
  __m512i r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi32(mask, rows[i] + first);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // r[4 g + c] holds, in 128-bit lane l, word 4 l + c of rows 4 g .. 4 g + 3.
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    t[8 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
  }
  for (int c = 0; c < 4; ++c) {
    r[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0x88);
    r[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0xdd);
    r[4 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0x88);
    r[12 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0xdd);
  }
  for (int i = 0; i < words && i < 16; ++i) _mm512_storeu_si512(to + i * to_stride, r[i]);
}
#elif defined(__AVX2__)
inline void transpose_words_block(const uint32_t* const* rows, int first, int words, uint32_t* to, int to_stride) {
  const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(words), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  __m256i r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_maskload_epi32(reinterpret_cast<const int*>(rows[i] + first), mask);
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm256_permute2x128_si256(r[c], r[4 + c], 0x20);
    t[4 + c] = _mm256_permute2x128_si256(r[c], r[4 + c], 0x31);
  }
  for (int i = 0; i < words && i < 8; ++i)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i * to_stride), t[i]);
}
#else
inline void transpose_words_block(const uint32_t* const* rows, int first, int words, uint32_t* to, int to_stride) {
  for (int word = 0; word < words && word < kLanes; ++word)
    for (int row = 0; row < kLanes; ++row) to[word * to_stride + row] = rows[row][first + word];
}
#endif

// rows[keys] of `dim` values each -> packed [dim / kPairs][keys][kPairs]; `keys` is a multiple of kLanes, dim even.
template <class T>
inline void pack_keys(const T* const* rows, int keys, int dim, T* packed, Fetch& fetch) {
  const int words = dim / kPairs<T>;
  for (int key = 0; key < keys; key += kLanes) {
    fetch.take(kLanes * 9 / 16);
    for (int word = 0; word < words; word += kLanes)
      transpose_words_block(reinterpret_cast<const uint32_t* const*>(rows + key), word,
                            words - word, reinterpret_cast<uint32_t*>(packed) + word * keys + key, keys);
  }
}

// rows[keys] of `dim` values each -> packed [keys / kPairs][padded][kPairs], zeros beyond dim; `keys` is even. The
// order of columns is the packing's own; `restore_columns` undoes it in the result.
inline void pack_values(const float* const* rows, int keys, int dim, int padded, float* packed) {
  for (int key = 0; key < keys; ++key, packed += padded) {
    std::memcpy(packed, rows[key], sizeof(float) * static_cast<size_t>(dim));
    for (int i = dim; i < padded; ++i) packed[i] = 0.0f;
  }
}

inline void pack_values(const Bf16* const* rows, int keys, int dim, int padded, Bf16* packed) {
  for (int key = 0; key < keys; key += 2, packed += 2 * padded) {
    const Bf16 *first = rows[key], *second = rows[key + 1];
    int i = 0;
#if defined(HEADRACE_AVX512)
    for (; i + 32 <= dim; i += 32) {
      // Interleaving within 128-bit parts is far cheaper than across them.
      __m512i a = _mm512_loadu_si512(first + i), b = _mm512_loadu_si512(second + i);
      _mm512_storeu_si512(packed + 2 * i, _mm512_unpacklo_epi16(a, b));
      _mm512_storeu_si512(packed + 2 * i + 32, _mm512_unpackhi_epi16(a, b));
    }
#endif
    for (; i < dim; ++i) {
      packed[2 * i] = first[i];
      packed[2 * i + 1] = second[i];
    }
    for (; i < padded; ++i) packed[2 * i] = packed[2 * i + 1] = 0;
  }
}

// A block of kRows x (kVectors * kLanes) of weights [rows, keys] times values that are read where they lie, in the
// order of sums (and of columns) that `product` over packed values has. For few rows packing would cost more.
template <int kRows, int kVectors>
inline void value_block(const float* weights, int stride, const float* const* rows, int keys, int column, float* c,
                        int c_stride, Fetch& fetch) {
  Floats sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[row][v] = Floats{};
  for (int key = 0; key < keys; ++key) {
    fetch.take(1);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Floats value = load_floats(rows[key] + column + v * kLanes);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row)
        sums[row][v] = fused(all_lanes(weights[row * stride + key]), value, sums[row][v]);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store_floats(c + row * c_stride + column + v * kLanes, sums[row][v]);
}

#if defined(HEADRACE_AVX512) && defined(HEADRACE_BF16_DOT)
template <int kRows, int kVectors>
inline void value_block(const Bf16* weights, int stride, const Bf16* const* rows, int keys, int column, float* c,
                        int c_stride, Fetch& fetch) {
  static_assert(kVectors % 2 == 0, "columns are interleaved by 32");
  __m512 sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[row][v] = _mm512_setzero_ps();
  for (int key = 0; key < keys; key += 2) {
    fetch.take(1 + (key >> 1 & 1));
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v += 2) {
      const __m512i first = _mm512_loadu_si512(rows[key] + column + v * 16);
      const __m512i second = _mm512_loadu_si512(rows[key + 1] + column + v * 16);
      const __m512i low = _mm512_unpacklo_epi16(first, second), high = _mm512_unpackhi_epi16(first, second);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        int32_t pair;
        std::memcpy(&pair, weights + row * stride + key, 4);
        sums[row][v] = _mm512_dpbf16_ps(sums[row][v], (__m512bh)_mm512_set1_epi32(pair), (__m512bh)low);
        sums[row][v + 1] = _mm512_dpbf16_ps(sums[row][v + 1], (__m512bh)_mm512_set1_epi32(pair), (__m512bh)high);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(c + row * c_stride + column + v * 16, sums[row][v]);
}

// Columns of one step of the direct product over values of this type; 0: there is none.
template <class T>
constexpr int kDirectColumns = 32;
#else
template <class T>
constexpr int kDirectColumns = sizeof(T) == 4 ? kLanes : 0;
#endif

constexpr int kMostDirectRows = 6;

// True when it computed C[rows, dim] = weights [rows, keys] times the values at `places`; false when rows or dim are
// not what it is for.
template <class T>
inline bool direct_values(const T* weights, int stride, int num_rows, const T* const* places, int keys, int dim,
                          float* c, int c_stride, Fetch& fetch) {
  constexpr int kStep = kDirectColumns<T>;
  if constexpr (kStep == 0) {
    return false;
  } else {
    constexpr int kWide = kLanes == 8 ? 2 : 4, kNarrow = kStep / kLanes;
    if (num_rows > kMostDirectRows || dim % kStep != 0) return false;
    int column = 0;
    const auto run = [&](auto rows_tag) {
      constexpr int kRows = decltype(rows_tag)::value;
      for (; column + kWide * kLanes <= dim; column += kWide * kLanes)
        value_block<kRows, kWide>(weights, stride, places, keys, column, c, c_stride, fetch);
      for (; column < dim; column += kNarrow * kLanes)
        value_block<kRows, kNarrow>(weights, stride, places, keys, column, c, c_stride, fetch);
    };
    switch (num_rows) {
      case 1: run(std::integral_constant<int, 1>{}); break;
      case 2: run(std::integral_constant<int, 2>{}); break;
      case 3: run(std::integral_constant<int, 3>{}); break;
      case 4: run(std::integral_constant<int, 4>{}); break;
      case 5: run(std::integral_constant<int, 5>{}); break;
      default: run(std::integral_constant<int, 6>{}); break;
    }
    return true;
  }
}

inline void restore_columns(const float*, int, float*) {}

// Of 32 columns pack_values puts four from each eight into the first vector and the other four into the second.
inline void restore_columns(const Bf16*, int dim, float* row) {
#if defined(HEADRACE_AVX512)
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int i = 0; i + 32 <= dim; i += 32) {
    const __m512 low = _mm512_loadu_ps(row + i), high = _mm512_loadu_ps(row + i + 16);
    _mm512_storeu_ps(row + i, _mm512_permutex2var_ps(low, first, high));
    _mm512_storeu_ps(row + i + 16, _mm512_permutex2var_ps(low, second, high));
  }
#else
  (void)dim, (void)row;
#endif
}

inline void store_weights(float* to, Floats value) { store_floats(to, value); }
inline void store_weights(Bf16* to, Floats value) { store_bf16(to, value); }
inline Floats load_weights(const float* from) { return load_floats(from); }
inline Floats load_weights(const Bf16* from) { return load_bf16(from); }

}  // namespace headrace
