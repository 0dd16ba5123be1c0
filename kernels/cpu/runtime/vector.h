// Float vectors of the machine's width, and functions of them that attention, norms, activations and sampling share.
// They use the compiler's vector extensions, so that the same source serves AVX-512, AVX2 and NEON; intrinsics appear
// only for operations without a portable form.
//
// Every function is a fixed sequence of IEEE operations per lane: a result never depends on the number of threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace headrace {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define HEADRACE_AVX512 1
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef float UnalignedFloats __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef int32_t UnalignedInts __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint16_t UnalignedHalves __attribute__((vector_size(2 * kLanes), aligned(2)));

inline Floats load_floats(const float* from) { return *reinterpret_cast<const UnalignedFloats*>(from); }
inline void store_floats(float* to, Floats value) { *reinterpret_cast<UnalignedFloats*>(to) = value; }
inline Ints load_ints(const int32_t* from) { return *reinterpret_cast<const UnalignedInts*>(from); }
inline void store_ints(int32_t* to, Ints value) { *reinterpret_cast<UnalignedInts*>(to) = value; }
// A value less 0 is that value, -0 too, so that no instruction but the broadcast is left.
inline Floats all_lanes(float value) { return value - Floats{}; }
inline Ints all_lanes(int32_t value) { return Ints{} + value; }

inline Ints lane_numbers() {
  Ints lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

inline Floats choose(Ints mask, Floats if_set, Floats if_clear) { return mask ? if_set : if_clear; }
// Return the second operand if either is NaN or both are equal, as the instructions do.
inline Floats larger(Floats a, Floats b) {
#if defined(HEADRACE_AVX512)
  return reinterpret_cast<Floats>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Floats>(_mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
  return a > b ? a : b;
#endif
}

inline Floats smaller(Floats a, Floats b) {
#if defined(HEADRACE_AVX512)
  return reinterpret_cast<Floats>(_mm512_min_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Floats>(_mm256_min_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
  return a < b ? a : b;
#endif
}

inline Floats square_root(Floats value) {
#if defined(HEADRACE_AVX512)
  return reinterpret_cast<Floats>(_mm512_sqrt_ps(reinterpret_cast<__m512>(value)));
#elif defined(__AVX2__)
  return reinterpret_cast<Floats>(_mm256_sqrt_ps(reinterpret_cast<__m256>(value)));
#else
  for (int i = 0; i < kLanes; ++i) value[i] = std::sqrt(value[i]);
  return value;
#endif
}

inline float largest_lane(Floats value) {
#if defined(HEADRACE_AVX512)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(value));
#else
  float largest = value[0];
  for (int i = 1; i < kLanes; ++i) largest = value[i] > largest ? value[i] : largest;
  return largest;
#endif
}

inline float sum_of_lanes(Floats value) {
#if defined(HEADRACE_AVX512)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(value));
#else
  float halves[kLanes];
  store_floats(halves, value);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) halves[i] += halves[i + width];
  return halves[0];
#endif
}

// bf16 is the upper half of a float; rounding to nearest even, NaN kept quiet.
inline float float_of_bf16(uint16_t value) {
  uint32_t bits = uint32_t{value} << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline uint16_t bf16_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline Floats load_bf16(const uint16_t* from) {
  Halves raw = *reinterpret_cast<const UnalignedHalves*>(from);
#if defined(HEADRACE_AVX512)
  return reinterpret_cast<Floats>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(raw)), 16));
#else
  return reinterpret_cast<Floats>(__builtin_convertvector(raw, Ints) << 16);
#endif
}

inline void store_bf16(uint16_t* to, Floats value) {
#if defined(HEADRACE_AVX512) && defined(__AVX512BF16__)
  __m256bh rounded = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(value));
  std::memcpy(to, &rounded, sizeof(rounded));
#else
  typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
  Bits bits = reinterpret_cast<Bits>(value);
  Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  Bits is_nan = reinterpret_cast<Bits>((bits & 0x7fffffffu) > 0x7f800000u);
  rounded = (is_nan & ((bits >> 16) | 0x40)) | (~is_nan & rounded);
  *reinterpret_cast<UnalignedHalves*>(to) = __builtin_convertvector(rounded, Halves);
#endif
}

inline Floats round_to_integer(Floats value) {
#if defined(HEADRACE_AVX512)
  return reinterpret_cast<Floats>(
      _mm512_roundscale_ps(reinterpret_cast<__m512>(value), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  // Adding 1.5 * 2^23 leaves no fraction bits. Correct for |value| < 2^22, far beyond what exponential() needs.
  volatile float shift = 12582912.0f;
  float held = shift;
  return (value + held) - held;
#endif
}

inline Floats times_power_of_two(Floats value, Floats exponent) {
#if defined(HEADRACE_AVX512)
  return reinterpret_cast<Floats>(
      _mm512_scalef_ps(reinterpret_cast<__m512>(value), reinterpret_cast<__m512>(exponent)));
#else
  // In two steps, so that exponents down to -252 and up to 254 pass through normal factors.
  Ints whole = __builtin_convertvector(exponent, Ints);
  Ints half = whole >> 1;
  Floats first = reinterpret_cast<Floats>((half + 127) << 23);
  Floats second = reinterpret_cast<Floats>((whole - half + 127) << 23);
  return value * first * second;
#endif
}

// a * b + c with one rounding if the machine supports it. Explicit, so that the compiler does not fuse only one of two
// expressions that must agree bitwise.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(HEADRACE_AVX512)
  return reinterpret_cast<Floats>(_mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b),
                                                  reinterpret_cast<__m512>(c)));
#elif defined(__AVX2__) && defined(__FMA__)
  return reinterpret_cast<Floats>(_mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b),
                                                  reinterpret_cast<__m256>(c)));
#elif defined(__aarch64__)
  return reinterpret_cast<Floats>(vfmaq_f32(reinterpret_cast<float32x4_t>(c), reinterpret_cast<float32x4_t>(a),
                                            reinterpret_cast<float32x4_t>(b)));
#else
  return a * b + c;
#endif
}

// x = (n + f) ln 2 with integer n and f in [-1/2, 1/2]. log2(e) is split into two parts, so that f is exact to 2^-30
// even for large |x|.
struct PowerOfTwo {
  Floats n;
  Floats f;
};

inline PowerOfTwo split_power(Floats x) {
  const Floats log2_e = all_lanes(1.44269502e+0f), log2_e_rest = all_lanes(1.925963033e-8f);
  Floats n = round_to_integer(x * log2_e);
  return {n, fused(x, log2_e_rest, fused(x, log2_e, -n))};
}

// (2^f - 1) / f, interpolated at Chebyshev nodes of [-1/2, 1/2]: the relative error of 2^f is under 6e-9, or under 8e-6
// for results that are rounded to bf16 (2^-8) anyway.
template <bool kPrecise>
inline Floats power_slope(Floats f) {
  Floats p;
  if (kPrecise) {
    p = fused(f, all_lanes(0.0001545316295f), all_lanes(0.001339086336f));
    p = fused(p, f, all_lanes(0.009618082557f));
    p = fused(p, f, all_lanes(0.05550357114f));
    p = fused(p, f, all_lanes(0.2402265076f));
    p = fused(p, f, all_lanes(0.693147188f));
  } else {
    p = fused(f, all_lanes(0.009656710289f), all_lanes(0.05583828295f));
    p = fused(p, f, all_lanes(0.240225301f));
    p = fused(p, f, all_lanes(0.6931367339f));
  }
  return p;
}

template <bool kPrecise>
inline Floats power_less_one(Floats f) {
  return power_slope<kPrecise>(f) * f;
}

// 2^x for x up to 127, or -infinity (0).
template <bool kPrecise>
inline Floats power_of_two(Floats x) {
#if defined(HEADRACE_AVX512)
  // The reduction of an infinity is 0.
  const Floats f = reinterpret_cast<Floats>(
      _mm512_reduce_ps(reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  const Floats n = x - f;
#else
  x = larger(x, all_lanes(-250.0f));
  const Floats n = round_to_integer(x), f = x - n;
#endif
  return times_power_of_two(fused(power_slope<kPrecise>(f), f, all_lanes(1.0f)), n);
}

// e^x. Below -110 the result is exactly 0, so that a masked score of -infinity has weight 0; above 88.7 it is infinity.
template <bool kPrecise>
inline Floats exponential(Floats x) {
  Floats bounded = larger(smaller(x, all_lanes(100.0f)), all_lanes(-120.0f));
  PowerOfTwo power = split_power(bounded);
  return times_power_of_two(power_less_one<kPrecise>(power.f) + 1.0f, power.n);
}

// ln(1 + e^x): max(x, 0) + ln(1 + e^-|x|), whose logarithm is 2 artanh(y / (2 + y)) for y = e^-|x|, as a series.
inline Floats softplus(Floats x) {
  const Floats zero = {}, y = exponential<true>(-larger(x, -x)), s = y / (2.0f + y), square = s * s;
  Floats sum = all_lanes(1.0f / 17.0f);
  for (int odd = 15; odd >= 1; odd -= 2) sum = fused(sum, square, all_lanes(1.0f / static_cast<float>(odd)));
  return larger(x, zero) + 2.0f * s * sum;
}

// e^x - 1 for x from -100 to 80, formed as 2^n (2^f - 1) + (2^n - 1) to keep its precision near 0.
inline Floats exponential_less_one(Floats x) {
  PowerOfTwo power = split_power(x);
  Floats scale = times_power_of_two(all_lanes(1.0f), power.n);
  return fused(scale, power_less_one<true>(power.f), scale - 1.0f);
}

// tanh x = m / (m + 2) with m = e^(2x) - 1
inline Floats hyperbolic_tangent(Floats x) {
  Floats bounded = larger(smaller(x, all_lanes(10.0f)), all_lanes(-10.0f));
  Floats m = exponential_less_one(bounded + bounded);
  return m / (m + 2.0f);
}

// erf x = x P(x^2) / Q(x^2), fitted to a relative error under 2e-8 for |x| < 3.92, where erf x rounds to 1; with the
// rounding of its steps the absolute error is under 4e-7.
inline Floats error_function(Floats x) {
  const Floats most = all_lanes(3.92f), one = all_lanes(1.0f);
  const Floats bounded = larger(smaller(x, most), -most), t = bounded * bounded;
  Floats p = fused(t, all_lanes(2.05003849e-06f), all_lanes(0.000284871374f));
  p = fused(p, t, all_lanes(0.00376539291f));
  p = fused(p, t, all_lanes(0.0527480179f));
  p = fused(p, t, all_lanes(0.190402103f));
  p = fused(p, t, all_lanes(1.12837915f));
  Floats q = fused(t, all_lanes(3.80906162e-05f), all_lanes(0.00116246928f));
  q = fused(q, t, all_lanes(0.0149687756f));
  q = fused(q, t, all_lanes(0.114107191f));
  q = fused(q, t, all_lanes(0.502072213f));
  q = fused(q, t, one);
  const Floats found = bounded * p / q;
  return choose(x >= most, one, choose(x <= -most, -one, found));
}

}  // namespace headrace
