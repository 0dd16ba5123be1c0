// Mixtures of experts: routing, and the experts' gated MLPs over packed weights.
//
// Every thread sorts the rows by expert itself, which costs less than waiting for one thread to do it. For every expert
// that some row chose, activation(x Wgate^T) * (x Wup^T) of its rows is computed first; then, after a barrier, the
// product with Wdown is multiplied by the routing weight and added to the output. An expert that no row chose is not
// read.
//
// Order of the sum. Each thread owns a range of output columns and goes through the experts in rising order, so that a
// row's result is the sum over its experts by rising index. No two threads add to the same value, and the result is
// bitwise independent of the other rows and of the number of threads.
#pragma once

#include "linear/linear.h"

namespace headrace {

enum class Scoring : int32_t { kSoftmax = 0, kSigmoid = 1, kSparsemixer = 2, kSqrtSoftplus = 3 };

// Arguments of hr_op_route, which needs 20 (num_experts + kLanes) bytes of thread scratch.
struct RouteArgs {
  const void* logits;  // [rows, num_experts]
  const float* bias;   // [num_experts], added to the scores for the choice only, or null
  const float* factors;  // [num_experts], multiply the weights of chosen experts, or null
  int32_t* expert_ids;  // [rows, top_k], best first
  float* weights;       // [rows, top_k]
  int64_t logits_stride;  // elements
  int64_t num_experts;
  int64_t top_k;
  int64_t num_groups;     // groups of consecutive experts
  int64_t groups_chosen;  // experts are chosen only from the best groups_chosen groups
  int64_t group_best;     // a group's score is the sum of the highest group_best scores of its experts
  // [num_experts, most_replicas]: for each replica of an expert its local index on this rank, or -1 if another rank has
  // it; only the first replicas[expert] are valid. Null: the rank has all experts, under the router's ids.
  const int32_t* places;
  const int32_t* replicas;  // [num_experts]
  int64_t most_replicas;
  int64_t fixed_rows;  // with Rows::kFixed
  Rows rows;
  DType logits_dtype;
  Scoring scoring;
  int32_t renormalise;
  float scale;
  float margin;  // for kSparsemixer
};

// Arguments of hr_op_experts.
struct ExpertsArgs {
  const PackedWeight* gate_up;  // [num_experts], fan 2
  const PackedWeight* down;     // [num_experts], fan 1; each stack is of one type and shape
  const float* gate_up_bias;    // [num_experts, n of a gated pair] or null
  const float* down_bias;       // [num_experts, n] or null
  const void* x;                // [rows, x_stride]
  int64_t x_stride;             // elements
  int64_t x_thread_stride;      // bytes between the threads' own copies of x; 0: one shared x
  const int32_t* expert_ids;    // [rows, top_k]; ids outside [0, num_experts) add nothing
  const float* weights;         // [rows, top_k]
  void* inner;                  // [pass_rows, inner size]: activations between the two products
  float* out;                   // [rows, out_stride]; not x
  int64_t out_stride;           // elements
  int64_t* experts_read;        // counter of experts read, over all steps
  int64_t* loads;               // [num_experts] counters of the rows of each expert, over all steps; or null
  int64_t num_experts;
  int64_t top_k;
  // The number of (row, expert) pairs that one pass takes through both products. It bounds the memory for activations;
  // an expert's weights are read once in each pass that has rows of it.
  int64_t pass_rows;
  int64_t fixed_rows;  // with Rows::kFixed
  Rows rows;
  DType x_dtype;
  DType inner_dtype;
  Activation activation;
  int32_t add_to_out;  // 1: the result is added to out; 0: it overwrites out
  // Null: no adapters change the experts.
  const DeltaSite* gate_up_site;
  const DeltaSite* down_site;
  int64_t delta_uses;   // the most adapters of a row
  int64_t delta_width;  // the most columns of their y
};

}  // namespace headrace
