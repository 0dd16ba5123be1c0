// Element types, and conversions of fp16 beside those of bf16 and fp32 in vector.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "runtime/vector.h"

namespace headrace {

// Types of activations, outputs and unquantised weights. linear/args.py has the same numbers.
enum class DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

inline int64_t size_of(DType type) { return type == DType::kF32 ? 4 : 2; }

// fp16 to fp32: exact, including subnormals and infinities.
inline float float_of_f16(uint16_t value) {
#if defined(__F16C__)
  return _cvtsh_ss(value);
#elif defined(__aarch64__)
  __fp16 half;
  std::memcpy(&half, &value, 2);
  return half;
#else
  const uint32_t sign = uint32_t{value & 0x8000u} << 16, magnitude = value & 0x7fffu;
  float result;
  if (magnitude < 0x0400u) {  // a subnormal is its mantissa times 2^-24
    result = static_cast<float>(magnitude) * 0x1p-24f;
    uint32_t bits;
    std::memcpy(&bits, &result, 4);
    bits |= sign;
    std::memcpy(&result, &bits, 4);
    return result;
  }
  const uint32_t exponent = magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u;
  const uint32_t bits = sign | ((magnitude << 13) + exponent);
  std::memcpy(&result, &bits, 4);
  return result;
#endif
}

// Rounds to nearest even.
inline uint16_t f16_of_float(float value) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(value, 0));
#elif defined(__aarch64__)
  __fp16 half = static_cast<__fp16>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
#else
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7e00u;
  if (bits >= 0x477ff000u) return sign | 0x7c00u;  // rounds to 65536 or above
  if (bits < 0x38800000u) {                        // below 2^-14: an addition in hardware rounds at 2^-24
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;  // the last place of a float in [0.5, 1) is 2^-24
    std::memcpy(&bits, &magnitude, 4);
    return sign | static_cast<uint16_t>(bits - 0x3f000000u);
  }
  return sign | static_cast<uint16_t>((bits - 0x38000000u + 0x0fffu + ((bits >> 13) & 1)) >> 13);
#endif
}

inline Floats load_f16(const uint16_t* from) {
#if defined(HEADRACE_AVX512)
  return reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__AVX2__) && defined(__F16C__)
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__aarch64__)
  return reinterpret_cast<Floats>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))));
#else
  Floats result;
  for (int i = 0; i < kLanes; ++i) result[i] = float_of_f16(from[i]);
  return result;
#endif
}

inline void store_f16(uint16_t* to, Floats value) {
  for (int i = 0; i < kLanes; ++i) to[i] = f16_of_float(value[i]);
}

inline float load_one(const void* from, int64_t index, DType type) {
  switch (type) {
    case DType::kBF16: return float_of_bf16(static_cast<const uint16_t*>(from)[index]);
    case DType::kF16: return float_of_f16(static_cast<const uint16_t*>(from)[index]);
    default: return static_cast<const float*>(from)[index];
  }
}

inline void store_one(void* to, int64_t index, DType type, float value) {
  switch (type) {
    case DType::kBF16: static_cast<uint16_t*>(to)[index] = bf16_of_float(value); break;
    case DType::kF16: static_cast<uint16_t*>(to)[index] = f16_of_float(value); break;
    default: static_cast<float*>(to)[index] = value;
  }
}

inline Floats load_vector(const void* from, int64_t index, DType type) {
  switch (type) {
    case DType::kBF16: return load_bf16(static_cast<const uint16_t*>(from) + index);
    case DType::kF16: return load_f16(static_cast<const uint16_t*>(from) + index);
    default: return load_floats(static_cast<const float*>(from) + index);
  }
}

inline void store_vector(void* to, int64_t index, DType type, Floats value) {
  switch (type) {
    case DType::kBF16: store_bf16(static_cast<uint16_t*>(to) + index, value); break;
    case DType::kF16: store_f16(static_cast<uint16_t*>(to) + index, value); break;
    default: store_floats(static_cast<float*>(to) + index, value);
  }
}

}  // namespace headrace
