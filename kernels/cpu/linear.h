// Linear layers y = x W^T + b over packed weights: arguments, weight types, and the order of every sum.
//
// Packing. Output features (rows of W) are grouped in panels of kPanelRows; inside a panel the rows are interleaved,
// so that one vector load brings the same k (or pair, or quad of k) of many rows, and a panel is one contiguous
// stream. The last panel is filled with zero rows.
//
// Order of summation. Each output is one lane of one accumulator. Float types add over k (bf16: pairs of k) in rising
// order; quantised types add each 32-block's exact integer sum, scaled, in rising order of blocks. Neither depends
// on the number of rows of x, the row's place among them, or the number of threads: tiling splits M and N only, and
// where K is cut for the cache the accumulators are stored and loaded as they are. So results are batch-invariant
// to the bit (for one instruction-set level).
#pragma once

#include <cstdint>

#include "common.h"
#include "op.h"

namespace headrace {

constexpr int kPanelRows = 32;

// How a weight is stored. The numbers are known to linear.py.
enum class WeightType : int32_t {
  kF32 = 0,
  kBF16 = 1,
  kF16 = 2,
  kQ4_0 = 3,
  kQ4_1 = 4,
  kQ5_0 = 5,
  kQ5_1 = 6,
  kQ8_0 = 7,
  kQ4_K = 8,
  kQ5_K = 9,
  kQ6_K = 10,
  // Of other checkpoints: see groups.h.
  kInt4Groups = 11,
  kInt8Groups = 12,
  kFloat4Groups = 13,
  kE4M3Groups = 14,
};
constexpr int kWeightTypes = 15;
constexpr int32_t kNoZeros = -1;

// What multiplies by the weights of a type: linear layers, and one stack of experts (see experts.h).
struct Tiles {
  void (*linear)(const struct LinearArgs& args, const Step& step, int thread, int num_threads);
  void (*experts)(struct StackRun& run, const Step& step, int thread, int num_threads);
};

// kNone: two int8 parts by blocks of 32. kToken and kShiftedToken: each row with a scale of its own, the latter with a
// zero point too. The numbers are known to linear.py.
enum class InputRounding : int32_t { kNone = 0, kToken = 1, kShiftedToken = 2, kStatic = 3 };

// A weight [n, k] in packed form.
struct PackedWeight {
  const void* data;  // 64-byte aligned
  int64_t n;
  int64_t k;
  WeightType type;
  // 1, or 2 for a gated pair: rows [0, n/2) are the gate and [n/2, n) the up projection, packed as alternating panels
  // (gate panel j, up panel j, ...), so that one thread has both halves of an output at hand.
  int32_t fan;
  // Of a quantised type, what hr_packed_tiles or hr_grouped_tiles has for it: its tiles are in a library of their own,
  // for they take the compiler as long as all the rest, and most models need none. Null for the float types.
  const Tiles* tiles;
  // Of a type with group scales, else unused.
  const int32_t* order;  // [k]: the column of x that meets column i of the codes, or null for x as it is
  int64_t group;         // weights along k that share a scale: 16, or a multiple of 32
  DType scale_type;
  int32_t zero_type;  // a DType, or kNoZeros
  // Of kInt4Groups and kInt8Groups: how x is rounded to int8, x ~ scale * (q - zero), as the checkpoint means it.
  InputRounding rounding;
  float input_scale, input_zero;  // of kStatic
};

enum class Activation : int32_t { kNone = 0, kSilu = 1, kGeluTanh = 2, kGelu = 3, kRelu = 4, kRelu2 = 5,
  kClampedSilu = 6 /* of a gate alone */ };

// What a thread has seen of a row of results: lane i has the highest of columns i, i + kPanelRows, ..., of equals the
// first, and NaN if there is any.
struct LaneHighest {
  float values[kPanelRows];
  int32_t columns[kPanelRows];
};

// y = act(x W^T + bias) [+ residual]; for fan 2: y = act(x Wgate^T + bias) * (x Wup^T + bias), of n/2 columns.
// x is rounded to bf16 for bf16 weights, and to two int8 parts by blocks of 32 for quantised weights, unless their
// InputRounding says otherwise.
struct LinearArgs {
  PackedWeight weight;
  const void* x;            // [rows, k]
  int64_t x_stride;         // elements from row to row
  int64_t x_thread_stride;  // bytes from thread to thread where each made its own copy of x; 0: shared
  const float* bias;        // [n] or null
  const void* residual;     // [rows, columns] or null; may be out itself
  int64_t residual_stride;  // elements
  void* out;                // [rows, columns]
  int64_t out_stride;       // elements
  DType x_dtype, residual_dtype, out_dtype;
  Activation activation;
  Rows rows;           // which count of the step is the number of rows
  int64_t fixed_rows;  // for Rows::kFixed
  // [num_threads, highest_rows] or null: what a step with only_highest gets in place of out. Only for a plain product
  // of fan 1, without bias, activation and residual, into fp32.
  LaneHighest* highest;
  int64_t highest_rows;
  // Null, or for each row of the result the row of `out` (fp32) that it is added to, times its scale. Only for a
  // product of fan 1, without activation and residual.
  const int32_t* add_to;
  const float* scales;
};

// Scratch that hr_op_linear needs for at most `max_rows` rows.
struct ScratchNeed {
  int64_t shared_bytes, per_thread_bytes;
};

inline int64_t panels_of(const PackedWeight& w) {
  return w.fan * ((w.n / w.fan + kPanelRows - 1) / kPanelRows);
}

// The row of W that is row `row` of panel `panel`, or -1 for filling.
inline int64_t source_row(const PackedWeight& w, int64_t panel, int row) {
  const int64_t half = w.n / w.fan, index = panel / w.fan * kPanelRows + row;
  return index < half ? (panel % w.fan) * half + index : -1;
}

// Where row `row` of W is: its panel, and its row in the panel.
inline void place_of_row(const PackedWeight& w, int64_t row, int64_t* panel, int* row_in_panel) {
  const int64_t half = w.n / w.fan, part = row / half, index = row % half;
  *panel = index / kPanelRows * w.fan + part;
  *row_in_panel = static_cast<int>(index % kPanelRows);
}

// Bytes of a panel; 0 for a k that the type does not have.
int64_t float_panel_bytes(WeightType type, int64_t k);
int64_t quant_panel_bytes(WeightType type, int64_t k);

// Bytes of a row of activations in the form that the type's tiles read.
int64_t float_prepared_bytes(WeightType type, int64_t k);
int64_t quant_prepared_bytes(WeightType type, int64_t k);

inline bool is_quantised(WeightType type) { return type >= WeightType::kQ4_0; }
inline bool is_grouped(WeightType type) { return type >= WeightType::kInt4Groups; }
int64_t panel_bytes(const PackedWeight& w);
int64_t prepared_row_bytes(const PackedWeight& w);

// The given panels are written from `source` ([n, k] row-major; quantised: rows of GGUF blocks).
void pack_float_panels(const PackedWeight& w, const void* source, int64_t source_stride, DType source_dtype,
                       void* packed, Range panels);
void pack_quant_panels(const PackedWeight& w, const void* source, int64_t source_stride, void* packed, Range panels);

// What a weight with group scales is packed from; all is in rows of W, and `groups` is k / group.
struct GroupSource {
  const void* codes;   // [n, stride] bytes: 4 bits: two codes in a byte, the first in its low half; 8 bits: one
  int64_t stride;
  const void* scales;  // [n, groups] of scale_type
  const void* zeros;   // [n, groups] of zero_type, or null
  const float* table;  // [16], of kFloat4Groups
};
void pack_grouped_panels(const PackedWeight& w, const GroupSource& source, void* packed, Range panels);

// Row `row` of W as exact floats [k].
void unpack_float_row(const PackedWeight& w, int64_t row, float* out);
void unpack_quant_row(const PackedWeight& w, int64_t row, float* out);
void unpack_grouped_row(const PackedWeight& w, int64_t row, float* out);

const Tiles* tiles_of_f32();
const Tiles* tiles_of_f16();
const Tiles* tiles_of_bf16();

inline const Tiles* tiles_of(const PackedWeight& w) {
  switch (w.type) {
    case WeightType::kF32: return tiles_of_f32();
    case WeightType::kF16: return tiles_of_f16();
    case WeightType::kBF16: return tiles_of_bf16();
    default: return w.tiles;
  }
}

}  // namespace headrace
