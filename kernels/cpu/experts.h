// Mixtures of experts: routing, and the experts' gated MLPs over packed weights.
//
// Rows are sorted by expert, each thread for itself: that costs less than to wait for one that does it. Then for every
// expert that some row chose, first activation(x Wgate^T) * (x Wup^T) of its rows, then (behind a barrier) the product
// with Wdown, added to the output times the routing weight. An expert that no row chose is not read.
//
// Order of the sum. Each thread has output columns of its own and takes the experts in rising order, so a row's result
// is the sum over its experts by rising number: no two threads add to the same value, and neither the other rows nor
// the number of threads make a difference, to the bit.
#pragma once

#include "linear.h"

namespace headrace {

enum class Scoring : int32_t { kSoftmax = 0, kSigmoid = 1, kSparsemixer = 2 };

// Arguments of hr_op_route, which needs 20 (num_experts + kLanes) bytes of thread scratch.
struct RouteArgs {
  const void* logits;  // [rows, num_experts]
  const float* bias;   // [num_experts], added to scores to choose by, or null
  int32_t* expert_ids;  // [rows, top_k], best first
  float* weights;       // [rows, top_k]
  int64_t logits_stride;  // elements
  int64_t num_experts;
  int64_t top_k;
  int64_t num_groups;     // of neighbours; experts come from the best groups_chosen of them
  int64_t groups_chosen;  // by the sum of each one's group_best best scores
  int64_t group_best;
  // Of each expert its copies' numbers among a rank's own, -1 for a copy of another rank's: [num_experts, most_replicas],
  // of which the first replicas[expert] count. Null: the rank has all, under their own numbers.
  const int32_t* places;
  const int32_t* replicas;  // [num_experts]
  int64_t most_replicas;
  int64_t fixed_rows;  // with Rows::kFixed
  Rows rows;
  DType logits_dtype;
  Scoring scoring;
  int32_t renormalise;
  float scale;
  float margin;  // of kSparsemixer
};

// Arguments of hr_op_experts.
struct ExpertsArgs {
  const PackedWeight* gate_up;  // [num_experts], fan 2
  const PackedWeight* down;     // [num_experts], fan 1; each stack is of one type and shape
  const float* gate_up_bias;    // [num_experts, n of a gated pair] or null
  const float* down_bias;       // [num_experts, n] or null
  const void* x;                // [rows, x_stride]
  int64_t x_stride;             // elements
  int64_t x_thread_stride;      // bytes from thread to thread where each made its own copy of x; 0: shared
  const int32_t* expert_ids;    // [rows, top_k]; what is no expert's number adds nothing
  const float* weights;         // [rows, top_k]
  void* inner;                  // [pass_rows, inner size]: what is between the two products
  float* out;                   // [rows, out_stride]; not x
  int64_t out_stride;           // elements
  int64_t* experts_read;        // counts the experts that were read, over all steps
  int64_t* loads;               // [num_experts] counts the rows of each, over all steps; or null
  int64_t num_experts;
  int64_t top_k;
  // How many pairs of a row and an expert are taken through both products before the next: memory for activations is
  // bounded, and weights are read once for each pass that has rows of theirs.
  int64_t pass_rows;
  int64_t fixed_rows;  // with Rows::kFixed
  Rows rows;
  DType x_dtype;
  DType inner_dtype;
  Activation activation;
  int32_t add_to_out;  // 1: out is added to; 0: it is overwritten
};

}  // namespace headrace
