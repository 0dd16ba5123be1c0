// The packed form of checkpoints' quantised weights: codes of 4 or 8 bits, with a scale for each group along K.
//
//   w = scale * (code - zero)            integer types; without zeros, `zero` is the middle of the codes, 8 or 128
//   w = scale * value(code)              float types: a table of 16 values, or e4m3
//
// A panel holds kPanelRows = 32 rows, cut along K in blocks of 32 as in quant.h. Bytes of a panel, in this order (all
// parts are multiples of 64 bytes):
//
//   head    GroupHead: the parameters that tiles need
//   then for each group (a block has two groups of 16, which count as one here):
//   scales  [32] of scale_type; [2, 32] for groups of 16
//   zeros   the same shape of zero_type, if there are zeros
//   codes   for each block of the group:
//           4 bits: [4, 32, 4] bytes, byte (g, row, j): low nibble of k = 4 g + j, high nibble of k = 16 + 4 g + j
//           integers of 8 bits: [8, 32, 4] bytes, the code of k = 4 g + j
//           floats of 8 bits: [32, 32] bytes, the code of (k, row)
//
// Integers are multiplied by activations in two int8 parts, as GGUF's types are, or in one if that is asked for (see
// groups_rounded.h). Floats are expanded exactly and multiplied by fp32.
#pragma once

#include "linear/linear.h"
#include "linear/quant.h"

namespace headrace {

constexpr int64_t kHeadBytes = 128;

struct GroupHead {
  int32_t group_blocks;  // blocks that share a scale
  int32_t parts;         // 2 for groups of 16, else 1
  DType scale_type;
  int32_t zero_type;  // a DType, or kNoZeros
  int32_t meta_bytes;  // bytes of the scales and zeros of a group
  int32_t unused[11];
  float table[16];
};
static_assert(sizeof(GroupHead) == kHeadBytes, "tiles rely on it");

constexpr int bits_of(WeightType type) {
  return type == WeightType::kInt4Groups || type == WeightType::kFloat4Groups ? 4 : 8;
}
constexpr bool has_integers(WeightType type) {
  return type == WeightType::kInt4Groups || type == WeightType::kInt8Groups;
}
constexpr int64_t group_code_bytes(WeightType type) { return bits_of(type) * kBlock * kPanelRows / 8; }

inline GroupHead head_of(const PackedWeight& w) {
  GroupHead head = {};
  head.parts = w.group < kBlock ? 2 : 1;
  head.group_blocks = w.group < kBlock ? 1 : static_cast<int32_t>(w.group / kBlock);
  head.scale_type = w.scale_type;
  head.zero_type = w.zero_type;
  int64_t each = size_of(w.scale_type);
  if (w.zero_type != kNoZeros) each += size_of(static_cast<DType>(w.zero_type));
  head.meta_bytes = static_cast<int32_t>(each * kPanelRows * head.parts);
  return head;
}

// 0 for a k that is not a whole number of groups and blocks.
inline int64_t grouped_panel_bytes(const PackedWeight& w) {
  const GroupHead head = head_of(w);
  const int64_t blocks = w.k / kBlock;
  if (w.k % kBlock || w.group < 16 || (w.group > 16 && w.group % kBlock) || blocks % head.group_blocks) return 0;
  return kHeadBytes + blocks / head.group_blocks * head.meta_bytes + blocks * group_code_bytes(w.type);
}

// The head of a row of activations that is rounded to int8, x ~ step * (q - zero). After it come q [k] as Rounded, for
// each group of the weight a correction (the sum of its q, times the middle of the codes if the weight has no zero
// points), and for each group the step of its inputs: 1 unless they have their own, and then `step` is 1.
struct RoundedRow {
  float step, zero;
  int32_t unused[14];
};
static_assert(sizeof(RoundedRow) == 64, "q is aligned");

// AVX2 multiplies 16-bit operands exactly, but 8-bit ones only if sums of two products stay below 2^15.
#if defined(__AVX2__) && !defined(HEADRACE_AVX512)
typedef int16_t Rounded;
#else
typedef int8_t Rounded;
#endif

inline int64_t bytes_of_rounded(int64_t k) { return (k * static_cast<int64_t>(sizeof(Rounded)) + 63) / 64 * 64; }
inline int64_t rounded_row_bytes(int64_t k) {
  return static_cast<int64_t>(sizeof(RoundedRow)) + bytes_of_rounded(k) + (2 * (k / kBlock) * 4 + 63) / 64 * 64;
}

inline int64_t grouped_prepared_bytes(const PackedWeight& w) {
  if (w.rounding != InputRounding::kNone) return rounded_row_bytes(w.k);
  return has_integers(w.type) ? bytes_of_blocks(w.k) : (4 * w.k + 63) / 64 * 64;
}

}  // namespace headrace
