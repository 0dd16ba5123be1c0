// The int8 dot product: each 32-bit lane adds four products of an unsigned byte (a weight's code) and a signed byte
// (an activation in [-127, 127]). All versions are exact, so they agree to the bit.
#pragma once

#include "runtime/common.h"

namespace headrace {

typedef uint8_t Bytes __attribute__((vector_size(4 * kLanes)));

inline Bytes load_bytes(const void* from) {
  Bytes result;
  std::memcpy(&result, from, sizeof(result));
  return result;
}

// Rounds to nearest integers, ties to even. Intrinsics keep the compiler from merging it with a multiplication.
inline Ints nearest_integers(Floats value) {
#if defined(HEADRACE_AVX512)
  return reinterpret_cast<Ints>(_mm512_cvtps_epi32(reinterpret_cast<__m512>(value)));
#elif defined(__AVX2__)
  return reinterpret_cast<Ints>(_mm256_cvtps_epi32(reinterpret_cast<__m256>(value)));
#elif defined(__SSE2__)
  return reinterpret_cast<Ints>(__builtin_ia32_cvtps2dq(value));
#elif defined(__aarch64__)
  return reinterpret_cast<Ints>(vcvtnq_s32_f32(reinterpret_cast<float32x4_t>(value)));
#else
  Ints result;
  for (int i = 0; i < kLanes; ++i) result[i] = static_cast<int32_t>(lrintf(value[i]));
  return result;
#endif
}

// kCodeBits: bits of a code, which limit the intermediate sums of some versions.
template <int kCodeBits>
inline Ints dot_quads(Ints sums, Bytes codes, Bytes x) {
#if defined(HEADRACE_AVX512) && defined(__AVX512VNNI__)
  return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(codes),
                                                    reinterpret_cast<__m512i>(x)));
#elif defined(HEADRACE_AVX512)
  const __m512i c = reinterpret_cast<__m512i>(codes), q = reinterpret_cast<__m512i>(x), one = _mm512_set1_epi16(1);
  const auto add = [&](__m512i to, __m512i part) {
    return _mm512_add_epi32(to, _mm512_madd_epi16(_mm512_maddubs_epi16(part, q), one));
  };
  if (kCodeBits < 8) return reinterpret_cast<Ints>(add(reinterpret_cast<__m512i>(sums), c));
  // maddubs adds two products in 16 bits. Each code is split into two halves, so that 2 * 128 * 127 fits.
  const __m512i half = _mm512_and_si512(_mm512_srli_epi16(c, 1), _mm512_set1_epi8(0x7f));
  return reinterpret_cast<Ints>(add(add(reinterpret_cast<__m512i>(sums), half), _mm512_sub_epi8(c, half)));
#elif defined(__AVX2__)
  const __m256i c = reinterpret_cast<__m256i>(codes), q = reinterpret_cast<__m256i>(x), one = _mm256_set1_epi16(1);
  const auto add = [&](__m256i to, __m256i part) {
    return _mm256_add_epi32(to, _mm256_madd_epi16(_mm256_maddubs_epi16(part, q), one));
  };
  if (kCodeBits < 8) return reinterpret_cast<Ints>(add(reinterpret_cast<__m256i>(sums), c));
  const __m256i half = _mm256_and_si256(_mm256_srli_epi16(c, 1), _mm256_set1_epi8(0x7f));
  return reinterpret_cast<Ints>(add(add(reinterpret_cast<__m256i>(sums), half), _mm256_sub_epi8(c, half)));
#elif defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)
  return reinterpret_cast<Ints>(vusdotq_s32(reinterpret_cast<int32x4_t>(sums), reinterpret_cast<uint8x16_t>(codes),
                                            reinterpret_cast<int8x16_t>(x)));
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
  const int8x16_t q = reinterpret_cast<int8x16_t>(x);
  int32x4_t to = reinterpret_cast<int32x4_t>(sums);
  if (kCodeBits < 8) return reinterpret_cast<Ints>(vdotq_s32(to, reinterpret_cast<int8x16_t>(codes), q));
  // An 8-bit code as a signed byte is 128 too small; 128 is added as two times 64.
  to = vdotq_s32(to, reinterpret_cast<int8x16_t>(codes ^ static_cast<uint8_t>(0x80)), q);
  return reinterpret_cast<Ints>(vdotq_s32(vdotq_s32(to, vdupq_n_s8(64), q), vdupq_n_s8(64), q));
#else
  for (int j = 0; j < 4; ++j)
    sums += ((reinterpret_cast<Ints>(codes) >> (8 * j)) & 0xff) * (reinterpret_cast<Ints>(x) << (24 - 8 * j) >> 24);
  return sums;
#endif
}

// A quad of x in all lanes.
inline __attribute__((always_inline)) Bytes quad_of(const int8_t* x) {
  int32_t bits;
  std::memcpy(&bits, x, sizeof(bits));
  return reinterpret_cast<Bytes>(all_lanes(bits));
}

// Adds the products of kCount consecutive quads.
template <int kCodeBits, int kCount>
inline __attribute__((always_inline)) Ints dot_run(Ints sums, const Bytes* codes, const int8_t* x) {
#if defined(__AVX2__) && !defined(HEADRACE_AVX512)
  // Several products of small codes fit 16 bits; adding them before widening takes half the instructions.
  constexpr int kFit = 32767 / (2 * 127 * ((1 << kCodeBits) - 1));
  if constexpr (kFit > 1) {
    constexpr int kEach = kFit < kCount ? kFit : kCount;
    static_assert(kCount % kEach == 0, "no quad is left out");
#pragma GCC unroll 8
    for (int first = 0; first < kCount; first += kEach) {
      __m256i narrow = _mm256_setzero_si256();
#pragma GCC unroll 8
      for (int g = first; g - first < kEach; ++g) {
        const __m256i quad = reinterpret_cast<__m256i>(quad_of(x + 4 * g));
        narrow = _mm256_add_epi16(narrow, _mm256_maddubs_epi16(reinterpret_cast<__m256i>(codes[g]), quad));
      }
      sums += reinterpret_cast<Ints>(_mm256_madd_epi16(narrow, _mm256_set1_epi16(1)));
    }
    return sums;
  }
#endif
#pragma GCC unroll 8
  for (int g = 0; g < kCount; ++g) sums = dot_quads<kCodeBits>(sums, codes[g], quad_of(x + 4 * g));
  return sums;
}

}  // namespace headrace
