// What adapters add to linear layers (LoRA: Hu et al. 2021, arXiv 2106.09685). For a row of x with an adapter,
//
//   x W^T   becomes   x W^T + scale * ((x A^T) B^T + bias)
//
// before the layer's bias, activation and residual, so that gated pairs, residuals and quantised weights need nothing
// of their own. Adapters are in slots. The op first computes y = scale * x A^T for all rows with adapters (`shrink`:
// the rows of a slot together, one A at a time), and after a barrier the products, where the sums of each tile of
// W are extended by those of y with the same outputs' rows of B before they are written (`expand`; where a tile's rows
// have one adapter, some kernels do so within its registers: `tails`). Rows without an adapter are not touched, and a
// row's result does not depend on the others.
//
// A and B are packed in panels as W is, A in half panels. The panels of B are those of W, output for output. A linear
// layer of several matrices has one A with the rows of all of them, and each panel of B reads only the columns of y
// that its outputs depend on.
#pragma once

#include <cstdint>

#include "runtime/common.h"
#include "runtime/op.h"

namespace headrace {

enum class WeightType : int32_t;
struct Tiles;

// The adapters of the rows of a step, or of its rows of logits. A pair is a row and a slot. Pairs are sorted by slot,
// and those of a slot by row. No row has the same slot twice.
struct RowAdapters {
  const int32_t* starts;   // [num_slots + 1]: pairs starts[i] .. starts[i + 1] - 1 are of slots[i]
  const int32_t* slots;    // [num_slots]
  const int32_t* rows;     // [num_pairs]
  const int32_t* slot_of;  // [num_pairs]
  const float* scales;     // [num_pairs]
  const int32_t* pair_of;  // [most_used, num_rows]: the row's pairs in the request's order, or -1
  int64_t num_slots;
  int64_t most_used;
  int64_t num_rows;
};

// The rows of B of one panel of W.
struct DeltaPanel {
  const char* data;
  int32_t begin;  // the first column of y
  int32_t count;  // columns of y; 0: nothing is added
};

// One slot's part of one weight.
struct Delta {
  const char* a;             // half panels of A [width, k]; null with `replaces`
  const DeltaPanel* panels;  // [panels of W], or null: the weight stays as it is
  const float* bias;         // [panels of W, kPanelRows] or null
  // [panels of W, kPanelRows] or null: what the whole product is multiplied by (DoRA: Liu et al. 2024, arXiv
  // 2402.09353); the sum is then s + scale * ((magnitude - 1) s + magnitude * delta), where s is x W^T.
  const float* magnitude;
  int64_t width;     // columns of y
  int32_t replaces;  // 1: B is another W, [n, k], and y is x itself: the sum becomes s + scale * (x B^T - s)
};

// Whether a row of the step has an adapter that changes a weight with these slots.
inline bool is_adapted(const Step& step, const Delta* const* slots, int64_t row) {
  if (!step.adapters || !slots) return false;
  const RowAdapters& rows = step.adapters[0];
  for (int64_t use = 0; use < rows.most_used; ++use) {
    const int32_t pair = rows.pair_of[use * rows.num_rows + row];
    if (pair >= 0 && slots[rows.slot_of[pair]]) return true;
  }
  return false;
}

struct DeltaSite {
  const Delta* const* slots;  // by slot: of each weight of a stack, or of the one weight; null: they stay as they are
  char* y;             // [pairs, columns]: two of these alternate, since threads may still be reading the last
  const Tiles* tiles;  // of A and B, which have one float type
  WeightType type;
};

// Rows of an adapter's A or B, and where they are packed: panels of [k, rows] values or, of bf16, [k/2, rows, 2].
struct FactorRows {
  const void* from;  // [num_rows, k], rows `stride` values apart
  char* to;          // zeros
  const int64_t* order;  // [num_places]: the row in each place, or -1; null: row i is in place i
  int64_t num_rows, num_places, k, stride;
  float scale;  // of the values
  DType from_type, type;
  int32_t panel_rows;
};

// All that adapters add to a tile of one panel: the tile's rows of y, `y_bytes` apart, of k values each, times a panel
// of B.
struct DeltaTail {
  const char* y;
  int64_t y_bytes;
  const char* panel;
  int64_t k;  // 0: nothing is added
};

// The adapters of one run of a layer.
struct DeltaRun {
  void (*add)(const DeltaRun& run, float* sums, int64_t sums_stride, int64_t first_row, int num_rows, int64_t unit);
  // Whether `add` would add to a tile no more than one product for each panel of the unit, as where all rows have one
  // adapter; tails [fan]: these.
  bool (*tails)(const DeltaRun& run, int64_t first_row, int num_rows, int64_t unit, DeltaTail* tails);
  // Prefetches what `add` will read for a unit of W: its panels of B are short, and far apart in memory. part: of
  // `parts` calls between which the unit is multiplied, since memory has only so many requests under way.
  void (*fetch)(const DeltaRun& run, int64_t unit, int64_t part, int64_t parts);
  const DeltaSite* site;
  const RowAdapters* rows;
  int64_t y_bytes;  // from row to row of y
  int64_t fan;
  int64_t weight;  // index in the stack
  DType y_type;    // what tiles of the site's type read without preparation
};

// The adapters of a stack of experts, on one thread: y is computed for each block of an expert's rows by every thread
// that multiplies them, which costs less than waiting, as each expert has few.
constexpr int64_t kStackRows = 64;  // most rows of such a block

struct StackDeltas {
  // Prepares the additions to pairs [begin, end) of an expert; null if there are none.
  const DeltaRun* (*begin)(StackDeltas& deltas, const struct StackRun& run, int64_t expert, int64_t begin, int64_t end,
                           int thread);
  const DeltaSite* site;
  const RowAdapters* rows;
  char* scratch;  // [stack_delta_bytes]
  DeltaSite own;
  RowAdapters paired;  // of the block's rows
  DeltaRun run;
};

StackDeltas stack_deltas(const DeltaSite* site, const RowAdapters* rows, char* scratch);

// Scratch of a thread. width: the most columns of y; k: of x.
int64_t stack_delta_bytes(int64_t most_used, int64_t width, int64_t k);

// One slot's part of a table of token embeddings: rank columns of A and B, or whole rows in the place of the table's.
struct EmbedDelta {
  const float* a;     // [vocab_size, rank]
  const float* b;     // [rank, width]
  const float* rows;  // [vocab_size, width] or null
  int64_t rank;
};

// Arguments of hr_op_embed_deltas, which changes embeddings in place and needs 2 width floats of thread scratch.
struct EmbedDeltasArgs {
  const EmbedDelta* const* slots;  // null: the table stays as it is
  void* out;                       // [num_tokens, out_stride]: embeddings times `scale`
  int64_t out_stride;              // elements
  int64_t width;
  DType out_dtype;
  float scale;
};

// hr_op_linear in a step with adapters. Needs kActivationBlockBytes or kLeastGathered rows of x, and kMaxBlockRows rows
// of sums, in thread scratch.
void linear_with_deltas(const struct LinearArgs& args, const Step& step, int thread, int num_threads);

}  // namespace headrace
