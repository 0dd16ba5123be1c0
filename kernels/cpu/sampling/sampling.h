// Sampling: greedy, or with temperature, min_p, top_k and top_p by the Gumbel-max trick.
//
// It chooses exactly the tokens of the reference (kernels/reference/sampling.py). Tokens are ranked by logit, highest
// first, and equal logits by id, lowest first; min_p, top_k and top_p each keep the first tokens of that order; the
// noise of a token is a pure function of (seed, position, token id).
#pragma once

#include "linear/linear.h"

namespace headrace {

struct SampleArgs {
  float* logits;  // [rows, stride]; not modified, except that masks set forbidden tokens to -inf
  int64_t stride;
  int64_t vocab_size;
  int64_t num_rows;          // with Rows::kFixed
  const float* temperature;  // [rows]; 0: greedy, and the other four are not read
  const int64_t* top_k;      // [rows]; 0: all
  const double* top_p;       // [rows]; 1: all
  const double* min_p;       // [rows]; 0: all
  const uint64_t* seeds;     // [rows]
  const int64_t* positions;  // [rows] the position of the token to be sampled, prompt included
  int32_t* token_ids;        // [rows]; meaningless where `best` is not finite
  float* best;               // [rows] the highest logit; NaN if the row contains a NaN
  // hr_sample_workspace_bytes: [num_threads] results of parts of rows, and [num_threads, vocab_size] candidates.
  char* workspace;
  Rows rows;
  // [num_threads, highest_rows] or null: read in place of the logits in a step with only_highest.
  const LaneHighest* highest;
  int64_t highest_rows;
  const int32_t* is_masked;  // [rows] 0 or 1
  const int32_t* masks;      // [rows, ceil(vocab_size / 32)]: bit t % 32 of word t / 32 is set if token t is allowed
};

// The arguments of `hr_op_token_logprobs`.
struct LogprobArgs {
  const float* logits;  // [num_rows, stride], without NaN
  int64_t stride;
  int64_t vocab_size;
  int64_t num_rows;
  const int64_t* own;  // [num_rows] a token of each row
  int64_t num_top;
  int32_t* token_ids;     // [num_rows, 1 + num_top] the row's own, and the num_top likeliest
  float* logprobs;        // [num_rows, 1 + num_top]
  int32_t* ranks;         // [num_rows] of the own one, from 1
  void* workspace;        // [num_threads, vocab_size] of 8 bytes
};

void sample(const void* args, const Step& step, int thread, int num_threads);

}  // namespace headrace
