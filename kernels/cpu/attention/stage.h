// Converts stored keys and values to the groups that attention multiplies. T is float, or bf16 if the CPU has bf16
// products. Groups already stored in this form are read in place; the functions here convert the others.
//
//   keys:    [padded / kPairs][kGroupKeys][kPairs]
//   values:  [kGroupKeys / kPairs][padded][kPairs], padded from value_dim
#pragma once

#include <array>

#include "attention/tile.h"

namespace headrace {

// The bf16 bits of number * 2^exponent, for an integer of at most 8 bits.
constexpr uint16_t bf16_bits(unsigned number, int exponent) {
  if (number == 0) return 0;
  int top = 7;
  while ((number >> top) == 0) --top;
  return static_cast<uint16_t>((static_cast<unsigned>(127 + exponent + top) << 7) | ((number << (7 - top)) & 0x7f));
}

template <CacheType kType>
constexpr uint16_t bf16_bits_of_byte(unsigned code) {
  if constexpr (kType == CacheType::kInt8) {
    return bf16_bits(code, 0);
  } else {
    constexpr int kMantissa = Fp8<kType>::kMantissa, kSmallest = Fp8<kType>::kOffset - 126 - kMantissa;
    if (code == kNotFinite) return 0x7fc0;
    const unsigned exponent = code >> kMantissa, mantissa = code & ((1u << kMantissa) - 1);
    return exponent == 0 ? bf16_bits(mantissa, kSmallest)
                         : bf16_bits((1u << kMantissa) + mantissa, static_cast<int>(exponent) - 1 + kSmallest);
  }
}

// The low and high bytes of the bf16 values of codes 0 .. 127.
struct ByteTable {
  std::array<uint8_t, 128> low, high;
};

template <CacheType kType>
constexpr ByteTable byte_table() {
  ByteTable table = {};
  for (unsigned code = 0; code < 128; ++code) {
    const uint16_t bits = bf16_bits_of_byte<kType>(code);
    table.low[code] = static_cast<uint8_t>(bits & 0xff);
    table.high[code] = static_cast<uint8_t>(bits >> 8);
  }
  return table;
}

// Converts kLanes one-byte elements to floats, without their scale.
template <CacheType kType>
inline Floats float_of_byte(Ints byte) {
  if constexpr (kType == CacheType::kInt8) {
    return __builtin_convertvector((byte << 24) >> 24, Floats);
  } else {
    const Ints code = byte & 0x7f, not_finite = (code == kNotFinite) & 0x7fc00000;
    const Floats magnitude = reinterpret_cast<Floats>(code << Fp8<kType>::kShift) * Fp8<kType>::kScale;
    return reinterpret_cast<Floats>(reinterpret_cast<Ints>(magnitude) | not_finite | ((byte & 0x80) << 24));
  }
}

inline Floats float_of_bf16(Ints word) { return reinterpret_cast<Floats>(word << 16); }

inline Floats float_of_f16(Ints word) {
  alignas(64) uint16_t halves[kLanes];
  *reinterpret_cast<UnalignedHalves*>(halves) = __builtin_convertvector(word, Halves);
  return load_f16(halves);
}

// Splits each row of pairs [rows][words] into two rows of floats: the first elements of the pairs, and the second.
template <int kPairBytes, class Widen>
inline void part_pairs(const char* from, int rows, int words, float* to, int to_stride, Widen widen) {
  constexpr int kBits = 4 * kPairBytes, kMask = (1 << kBits) - 1;
  for (int row = 0; row < rows; ++row, from += int64_t{words} * kPairBytes, to += 2 * to_stride) {
    for (int i = 0; i < words; i += kLanes) {
      Ints pair;
      if constexpr (kPairBytes == 4)
        pair = load_ints(reinterpret_cast<const int32_t*>(from) + i);
      else
        pair = __builtin_convertvector(*reinterpret_cast<const UnalignedHalves*>(from + int64_t{i} * 2), Ints);
      store_floats(to + i, widen(pair & kMask));
      store_floats(to + to_stride + i, widen((pair >> kBits) & kMask));
    }
  }
}

// Converts a stored group of [rows][words] pairs, of keys or values, to [2 * rows][words] floats.
inline void widen_group(CacheType type, const char* from, int rows, int words, float* to) {
  switch (type) {
    case CacheType::kBf16: return part_pairs<4>(from, rows, words, to, words, [](Ints x) { return float_of_bf16(x); });
    case CacheType::kHalf: return part_pairs<4>(from, rows, words, to, words, [](Ints x) { return float_of_f16(x); });
    case CacheType::kInt8: return part_pairs<2>(from, rows, words, to, words, float_of_byte<CacheType::kInt8>);
    case CacheType::kE4m3: return part_pairs<2>(from, rows, words, to, words, float_of_byte<CacheType::kE4m3>);
    case CacheType::kE5m2: return part_pairs<2>(from, rows, words, to, words, float_of_byte<CacheType::kE5m2>);
    default: std::memcpy(to, from, sizeof(float) * 2 * static_cast<size_t>(rows * words));
  }
}

// Converts one-byte elements to bf16, which is exact; pairs stay together.
template <CacheType kType>
inline void widen_bytes(const char* from, int count, Bf16* to) {
  int i = 0;
#if defined(HEADRACE_AVX512) && defined(__AVX512VBMI__)
  static constexpr ByteTable kTable = byte_table<kType>();
  const __m512i low_0 = _mm512_loadu_si512(kTable.low.data()), low_1 = _mm512_loadu_si512(kTable.low.data() + 64);
  const __m512i high_0 = _mm512_loadu_si512(kTable.high.data()), high_1 = _mm512_loadu_si512(kTable.high.data() + 64);
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), sign = _mm512_set1_epi8(-128);
  for (; i + 64 <= count; i += 64) {
    const __m512i codes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from + i));
    const __m512i index = kType == CacheType::kInt8 ? _mm512_abs_epi8(codes) : codes;  // look-ups use the low 7 bits
    const __m512i low = _mm512_permutex2var_epi8(low_0, index, low_1);
    const __m512i high = _mm512_permutex2var_epi8(high_0, index, high_1);
    const __m512i with_sign = _mm512_ternarylogic_epi32(high, codes, sign, 0xf8);  // high | (codes & sign)
    _mm512_storeu_si512(to + i, _mm512_unpacklo_epi8(low, with_sign));
    _mm512_storeu_si512(to + i + 32, _mm512_unpackhi_epi8(low, with_sign));
  }
#endif
  for (; i < count; ++i) {
    const uint8_t code = static_cast<uint8_t>(from[i]);
    if constexpr (kType == CacheType::kInt8)
      to[i] = bf16_of_float(static_cast<float>(static_cast<int8_t>(code)));
    else
      to[i] = bf16_of_float(float_of_fp8<kType>(code));
  }
}

inline void widen_group(CacheType type, const char* from, int rows, int words, Bf16* to) {
  const int count = 2 * rows * words;
  switch (type) {
    case CacheType::kInt8: return widen_bytes<CacheType::kInt8>(from, count, to);
    case CacheType::kE4m3: return widen_bytes<CacheType::kE4m3>(from, count, to);
    case CacheType::kE5m2: return widen_bytes<CacheType::kE5m2>(from, count, to);
    default: std::memcpy(to, from, sizeof(Bf16) * static_cast<size_t>(count));
  }
}

// Converts one stored row to T, without its scale, and pads it with zeros.
inline void widen_row(CacheType type, const char* from, int count, int padded, float* to) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(from);
  switch (type) {
    case CacheType::kFloat: std::memcpy(to, from, sizeof(float) * static_cast<size_t>(count)); break;
    case CacheType::kBf16: load_values(from, DType::kBF16, count, to); break;
    case CacheType::kHalf: load_values(from, DType::kF16, count, to); break;
    case CacheType::kInt8:
      for (int i = 0; i < count; ++i) to[i] = static_cast<int8_t>(bytes[i]);
      break;
    case CacheType::kE4m3:
      for (int i = 0; i < count; ++i) to[i] = float_of_fp8<CacheType::kE4m3>(bytes[i]);
      break;
    case CacheType::kE5m2:
      for (int i = 0; i < count; ++i) to[i] = float_of_fp8<CacheType::kE5m2>(bytes[i]);
      break;
  }
  for (int i = count; i < padded; ++i) to[i] = 0.0f;
}

inline void widen_row(CacheType type, const char* from, int count, int padded, Bf16* to) {
  switch (type) {
    case CacheType::kInt8: widen_bytes<CacheType::kInt8>(from, count, to); break;
    case CacheType::kE4m3: widen_bytes<CacheType::kE4m3>(from, count, to); break;
    case CacheType::kE5m2: widen_bytes<CacheType::kE5m2>(from, count, to); break;
    default: std::memcpy(to, from, sizeof(Bf16) * static_cast<size_t>(count));
  }
  for (int i = count; i < padded; ++i) to[i] = 0;
}

// rows [kGroupKeys][padded] -> a group of keys.
template <class T>
inline void group_keys(const T* rows, int padded, T* group) {
  constexpr int kPair = kPairs<T>;
  for (int i = 0; i < padded / kPair; ++i)
    for (int key = 0; key < kGroupKeys; ++key, group += kPair)
      std::memcpy(group, rows + key * padded + i * kPair, sizeof(T) * kPair);
}

// rows [kGroupKeys][padded] -> a group of values, of the first `values` elements of each row.
template <class T>
inline void group_values(const T* rows, int padded, int values, T* group) {
  constexpr int kPair = kPairs<T>;
  for (int key = 0; key < kGroupKeys; key += kPair, group += kPair * values)
    for (int i = 0; i < values; ++i)
      for (int of = 0; of < kPair; ++of) group[i * kPair + of] = rows[(key + of) * padded + i];
}

// Sets the values of keys [count, kGroupKeys) to zero: their weights are 0, but stale memory may hold NaN.
template <class T>
inline void clear_values(T* group, int padded, int count) {
  constexpr int kPair = kPairs<T>;
  if (count % kPair != 0)
    for (int i = 0; i < padded; ++i) group[count / kPair * padded * kPair + i * kPair + 1] = 0;
  const int whole = round_up_to(count, kPair);
  std::fill_n(group + whole * padded, (kGroupKeys - whole) * padded, T{});
}

constexpr DType type_of(const float*) { return DType::kF32; }
constexpr DType type_of(const Bf16*) { return DType::kBF16; }

// Converts `count` values from one type to another and multiplies them by a factor.
inline void convert_row(const void* from, DType type, int count, float factor, void* to, DType to_type) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) store_vector(to, i, to_type, load_vector(from, i, type) * factor);
  for (; i < count; ++i) store_one(to, i, to_type, load_one(from, i, type) * factor);
}

}  // namespace headrace
