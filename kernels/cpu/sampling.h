// From logits to tokens: greedy, or temperature, min_p, top_k and top_p and a draw by the Gumbel-max trick.
//
// The choices of the reference (kernels/reference/sampling.py), to the token: tokens rank by logit, highest first, and equal logits by
// id, lowest first; min_p, top_k and top_p each keep a beginning of that order; the noise of a token is a pure function
// of (seed, position, token id).
#pragma once

#include "linear.h"

namespace headrace {

struct SampleArgs {
  float* logits;  // [rows, stride]; left as they are, but for what masks forbid, which becomes -inf
  int64_t stride;
  int64_t vocab_size;
  int64_t num_rows;          // with Rows::kFixed
  const float* temperature;  // [rows]; 0: greedy, and the other four are not read
  const int64_t* top_k;      // [rows]; 0: all
  const double* top_p;       // [rows]; 1: all
  const double* min_p;       // [rows]; 0: all
  const uint64_t* seeds;     // [rows]
  const int64_t* positions;  // [rows] of the token that is being sampled, prompt included
  int32_t* token_ids;        // [rows]; where `best` is not finite they mean nothing
  float* best;               // [rows] the highest logit; NaN if there is any
  // [num_threads] bests of parts of rows, and [num_threads, vocab_size] candidates, of sizes that
  // hr_sample_workspace_bytes gives.
  char* workspace;
  Rows rows;
  // [num_threads, highest_rows] or null: where a step with only_highest has its rows of logits' highest.
  const LaneHighest* highest;
  int64_t highest_rows;
  const int32_t* is_masked;  // [rows] 0 or 1
  const int32_t* masks;      // [rows, ceil(vocab_size / 32)]: bit t % 32 of word t / 32 is set where token t may be
};

void sample(const void* args, const Step& step, int thread, int num_threads);

}  // namespace headrace
