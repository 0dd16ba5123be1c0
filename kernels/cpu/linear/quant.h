// The packed form of GGUF's block types, and of the activations that they are multiplied by.
//
// A panel holds kPanelRows = 32 rows; along K it is cut into blocks of 32 weights (GGUF's own blocks, or the sub-blocks
// of a 256-block). Codes of a block are stored in quads: four consecutive k of a row, which the int8 dot-product
// instructions add into one lane. Bytes of a block of the panel, in this order (all parts are multiples of 64 bytes, so
// that vector loads never cross a cache line):
//
//   super   every 8th block of a 256-type: d fp16 [32], then dmin fp16 [32] for types with a minimum
//   scales  32-types: d fp16 [32], then m fp16 [32] for types with a minimum
//           Q4_K, Q5_K: scale uint8 [32], min uint8 [32] (6 bits each);  Q6_K: scale int8 [2, 32] of k < 16, k >= 16
//   high    5 bits: [32, 4] bytes, bit g of byte (row, j) is bit 4 of the code of k = 4 g + j
//           6 bits: [2, 32, 4] bytes, bits 2g and 2g + 1 of byte (part, row, j) are bits 4, 5 of k = 16 part + 4 g + j
//   low     4 to 6 bits: [4, 32, 4] bytes, byte (g, row, j): low nibble of k = 4 g + j, high nibble of k = 16 + 4 g + j
//           8 bits: [8, 32, 4] bytes, the signed code plus 128
//
// Packing is lossless and keeps the size of the file (except Q4_K and Q5_K, whose 6-bit scales take 8 bits: +2.8% and
// +2.3%).
//
// A weight is scale * (code - offset) - minimum, with codes unsigned. Then for a block, with x = d q:
//   sum w x = scale * d * (sum code q - offset * sum q) - minimum * d * sum q,   both sums exact in int32:
//   of 32 products below 2^8 2^15, whose sum is below 2^28.
#pragma once

#include "linear/linear.h"

namespace headrace {

constexpr int kBlock = 32;
constexpr int kSuperBlocks = 8;  // blocks of a 256-block

struct QuantLayout {
  int bits;
  int offset;        // subtracted from a code
  bool minimum;      // m is added (32-types) or dmin * min subtracted (256-types)
  bool super;        // a 256-type
  int file_bytes;    // of a GGUF block (of 32 or 256)
  constexpr bool two_scales() const { return super && !minimum; }  // Q6_K: a scale for each 16 weights
  constexpr int super_bytes() const { return super ? (minimum ? 128 : 64) : 0; }
  constexpr int scale_bytes() const { return super ? 64 : (minimum ? 128 : 64); }
  constexpr int high_bytes() const { return bits == 5 ? 128 : bits == 6 ? 256 : 0; }
  constexpr int low_bytes() const { return bits == 8 ? 1024 : 512; }
  constexpr int block_bytes() const { return scale_bytes() + high_bytes() + low_bytes(); }
  constexpr int file_block() const { return super ? kBlock * kSuperBlocks : kBlock; }

  // The offset of block `block` (of its scales), and of its super part.
  constexpr int64_t block_at(int64_t block) const {
    return block * block_bytes() + (super ? (block / kSuperBlocks + 1) * super_bytes() : 0);
  }
  constexpr int64_t super_at(int64_t block) const {
    return block / kSuperBlocks * (super_bytes() + kSuperBlocks * block_bytes());
  }
  constexpr int64_t panel_bytes(int64_t k) const {
    const int64_t blocks = k / kBlock;
    return k % file_block() ? 0 : blocks * block_bytes() + (super ? blocks / kSuperBlocks * super_bytes() : 0);
  }
};

constexpr QuantLayout layout_of(WeightType type) {
  switch (type) {
    case WeightType::kQ4_0: return {4, 8, false, false, 18};
    case WeightType::kQ4_1: return {4, 0, true, false, 20};
    case WeightType::kQ5_0: return {5, 16, false, false, 22};
    case WeightType::kQ5_1: return {5, 0, true, false, 24};
    case WeightType::kQ8_0: return {8, 128, false, false, 34};
    case WeightType::kQ4_K: return {4, 0, true, true, 144};
    case WeightType::kQ5_K: return {5, 0, true, true, 176};
    default: return {6, 32, false, true, 210};  // Q6_K
  }
}

// A block of activations in two int8 parts, x = step * q with q = 256 high + low: 16 bits, since rounding to 8 bits
// would be by far the largest error, and with small batches the second dot product is hidden by memory time. A row of
// activations has the parts of all of its blocks, and after them their factors.
struct QuantParts {
  int8_t high[kBlock];
  int8_t low[kBlock];  // in [-127, 127], as is `high`
};
static_assert(sizeof(QuantParts) == 64, "a cache line");

struct QuantFactors {
  float step;
  float step_sum;      // step * sum of q, to multiply by the minimum
  int32_t correct[2];  // -offset * sum of q: of the block (and [1] is 0), or of its two halves for Q6_K
};
// Where the factors of a row begin.
inline int64_t factors_at(int64_t k) { return k / kBlock * static_cast<int64_t>(sizeof(QuantParts)); }

// Bytes of a row of activations.
inline int64_t bytes_of_blocks(int64_t k) {
  return (factors_at(k) + k / kBlock * static_cast<int64_t>(sizeof(QuantFactors)) + 63) / 64 * 64;
}

}  // namespace headrace
