// Linear layers y = x W^T + b over packed weights: arguments, weight types, and the order of every sum.
//
// Packing. Output features (rows of W) are grouped in panels of kPanelRows. Inside a panel the rows are interleaved,
// so that one vector load reads the same k (or pair, or quad of k) of many rows, and a panel is one contiguous
// stream. The last panel is padded with zero rows.
//
// Order of summation. Each output is one lane of one accumulator. Float types add over k (bf16: pairs of k; with AMX
// blocks of 32) in rising order; quantised types add each 32-block's exact integer sum, scaled, in rising order of
// blocks. Neither depends on the number of rows of x, the row's place among them, or the number of threads: tiling
// splits M and N only, and where K is cut for the cache the accumulators are stored and reloaded unchanged. So results
// are bitwise batch-invariant (for one instruction-set level).
#pragma once

#include <cstdint>

#include "runtime/common.h"
#include "runtime/op.h"

namespace headrace {

constexpr int kPanelRows = 32;

// The storage type of a weight. args.py has the same numbers.
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
  // The types with group scales: see groups.h.
  kInt4Groups = 11,
  kInt8Groups = 12,
  kFloat4Groups = 13,
  kE4M3Groups = 14,
};
constexpr int kWeightTypes = 15;
constexpr int32_t kNoZeros = -1;

// The functions that multiply by weights of one type: for a linear layer, for a stack of experts (see experts.h), and
// the parts of these that deltas.cpp uses (see driver.h).
struct Tiles {
  int32_t max_rows;  // of `tile` and `half`
  void (*linear)(const struct LinearArgs& args, const Step& step, int thread, int num_threads);
  void (*experts)(struct StackRun& run, const Step& step, int thread, int num_threads);
  bool (*usable)(const struct LinearArgs& args);
  void (*prepare)(const struct LinearArgs& args, const char* row, char* to);
  // One tile, and one of a half panel (see float.h); null for types that factors of adapters cannot have.
  void (*tile)(int num_rows, const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums,
               int64_t sums_stride, bool add, struct Ahead ahead);
  void (*half)(int num_rows, const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums,
               int64_t sums_stride, bool add, struct Ahead ahead);
};

// How the inputs of weights with group scales are quantised. kNone: two int8 parts per block of 32. kToken and
// kShiftedToken: int8 with a scale per row, and for the latter a zero point too. kStatic: int8 with the given scale and
// zero point. kGroups: int8 with a scale per row and group of weights. args.py has the same numbers.
enum class InputRounding : int32_t { kNone = 0, kToken = 1, kShiftedToken = 2, kStatic = 3, kGroups = 4 };

// A weight [n, k] in packed form.
struct PackedWeight {
  const void* data;  // 64-byte aligned
  int64_t n;
  int64_t k;
  WeightType type;
  // 1, or 2 for a gated pair: rows [0, n/2) are the gate and [n/2, n) the up projection, packed as alternating panels
  // (gate panel j, up panel j, ...), so that one thread computes both halves of an output.
  int32_t fan;
  // The result of hr_tiles. For a quantised type its code is in a separate library: it takes as long to compile as all
  // the rest, and most models do not need it.
  const Tiles* tiles;
  // The fields from here on are for types with group scales only.
  const int32_t* order;  // [k]: the column of x that column i of the codes multiplies, or null for the same column
  int64_t group;         // weights along k that share a scale: 16, or a multiple of 32
  DType scale_type;
  int32_t zero_type;  // a DType, or kNoZeros
  // For kInt4Groups and kInt8Groups: how x is to be rounded to int8, x ~ scale * (q - zero).
  InputRounding rounding;
  float input_scale, input_zero;  // for kStatic
};

enum class Activation : int32_t { kNone = 0, kSilu = 1, kGeluTanh = 2, kGelu = 3, kRelu = 4, kRelu2 = 5,
  kClampedSilu = 6 /* of a gate alone */, kSigmoid = 7, kSiluTo7 = 8, kSiluTo16 = 9,
  kNormalCdf = 10, kSiluBelow10 = 11, kSoftplus2 = 12 /* log2(1 + 2^x) */,
  kSoftplus = 13 };

// The highest results of one row that a thread has computed: lane i has the highest of columns i, i + kPanelRows, ...
// (of equals the first), and NaN if there is any.
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
  int64_t x_thread_stride;  // bytes between the threads' own copies of x; 0: one shared x
  const float* bias;        // [n] or null
  const void* residual;     // [rows, columns] or null; may be out itself
  int64_t residual_stride;  // elements
  void* out;                // [rows, columns]
  int64_t out_stride;       // elements
  DType x_dtype, residual_dtype, out_dtype;
  Activation activation;
  Rows rows;           // the number of rows
  int64_t fixed_rows;  // for Rows::kFixed
  // [num_threads, highest_rows] or null: the result of a step with only_highest, in place of out. Only for a product of
  // fan 1 into fp32, without bias, activation and residual.
  LaneHighest* highest;
  int64_t highest_rows;
  // Null, or for each row of the result the row of `out` (fp32) that it is added to, times the row's scale. Only for a
  // product of fan 1, without activation and residual.
  const int32_t* add_to;
  const float* scales;
  // What adapters add to the sums, before bias and activation: see deltas.h. Null: none can.
  const struct DeltaSite* site;
  // Null in the arguments of an op, which sets it in its own copy for a step with adapters.
  const struct DeltaRun* deltas;
};

// Scratch that an op needs, as hr_linear_scratch and hr_experts_scratch return it.
struct ScratchNeed {
  int64_t shared_bytes, per_thread_bytes;
};

inline int64_t panels_of(const PackedWeight& w) {
  return w.fan * ((w.n / w.fan + kPanelRows - 1) / kPanelRows);
}

// The row of W that is row `row` of panel `panel`, or -1 for padding.
inline int64_t source_row(const PackedWeight& w, int64_t panel, int row) {
  const int64_t half = w.n / w.fan, index = panel / w.fan * kPanelRows + row;
  return index < half ? (panel % w.fan) * half + index : -1;
}

// The panel of row `row` of W, and its row in that panel.
inline void place_of_row(const PackedWeight& w, int64_t row, int64_t* panel, int* row_in_panel) {
  const int64_t half = w.n / w.fan, part = row / half, index = row % half;
  *panel = index / kPanelRows * w.fan + part;
  *row_in_panel = static_cast<int>(index % kPanelRows);
}

// Bytes of a panel; 0 for a k that the type does not support.
int64_t float_panel_bytes(WeightType type, int64_t k);
int64_t quant_panel_bytes(WeightType type, int64_t k);

// Bytes of a row of activations in the form that tiles of the type read.
int64_t float_prepared_bytes(WeightType type, int64_t k);
int64_t quant_prepared_bytes(WeightType type, int64_t k);

inline bool is_quantised(WeightType type) { return type >= WeightType::kQ4_0; }
inline bool is_grouped(WeightType type) { return type >= WeightType::kInt4Groups; }
int64_t panel_bytes(const PackedWeight& w);
int64_t prepared_row_bytes(const PackedWeight& w);

// Packs the given panels from `source` ([n, k] row-major; quantised: rows of GGUF blocks).
void pack_float_panels(const PackedWeight& w, const void* source, int64_t source_stride, DType source_dtype,
                       void* packed, Range panels);
void pack_quant_panels(const PackedWeight& w, const void* source, int64_t source_stride, void* packed, Range panels);

// The source of a weight with group scales, in rows of W; `groups` is k / group.
struct GroupSource {
  const void* codes;   // [n, stride] bytes; 4 bits: two codes per byte, the first in the low half; 8 bits: one
  int64_t stride;
  const void* scales;  // [n, groups] of scale_type
  const void* zeros;   // [n, groups] of zero_type, or null
  const float* table;  // [16], for kFloat4Groups
};
void pack_grouped_panels(const PackedWeight& w, const GroupSource& source, void* packed, Range panels);

// Dequantises row `row` of W exactly: [k].
void unpack_float_row(const PackedWeight& w, int64_t row, float* out);
void unpack_quant_row(const PackedWeight& w, int64_t row, float* out);
void unpack_grouped_row(const PackedWeight& w, int64_t row, float* out);

}  // namespace headrace
