// Ops on several rows of hidden values of each token (alternating updates: Baykal et al. 2023), and sparse gates. Rows
// of a token lie side by side. Divided by columns, so that threads share even the one token of a decode step.
#pragma once

#include "elementwise/elementwise.h"

namespace headrace {

// output[r] = input[r] + sum over s of shares[r * count + s] * input[s]
struct MixRowsArgs {
  const float* input;   // [rows, input_stride]: count rows of size
  const float* shares;  // [rows, shares_stride]
  float* output;        // [rows, output_stride]; not the input
  int64_t input_stride;
  int64_t shares_stride;
  int64_t output_stride;
  int64_t size;
  int64_t count;
  Rows rows;
};

// output[r] = (computed - input[active]) * (shares[r] + 1) + input[r]
struct CorrectRowsArgs {
  const float* input;     // [rows, input_stride]: count rows of size
  const float* computed;  // [rows, computed_stride]
  const float* shares;    // [rows, shares_stride]
  float* output;          // [rows, output_stride]; not the input
  int64_t input_stride;
  int64_t computed_stride;
  int64_t shares_stride;
  int64_t output_stride;
  int64_t size;
  int64_t count;
  int64_t active;
  Rows rows;
};

// output[r] = input[r] with the mean square of the pattern, or, with adds, the mean of these and of the pattern
struct LikeRowsArgs {
  const float* input;    // [rows, input_stride]: count rows of size
  const float* pattern;  // [rows, pattern_stride]
  float* output;         // [rows, output_stride]
  int64_t input_stride;
  int64_t pattern_stride;
  int64_t output_stride;
  int64_t size;
  int64_t count;
  float least;  // of the mean square of the input, by which is divided
  int32_t adds;
  Rows rows;
};

// output = activation(gate's part above mean + cutoff * standard deviation of its row) * up
struct SparseGateArgs {
  const float* gate;  // [rows, gate_stride]
  const float* up;    // [rows, up_stride]
  void* output;       // [rows, output_stride]
  int64_t gate_stride;
  int64_t up_stride;
  int64_t output_stride;
  int64_t size;
  float cutoff;
  Rows rows;
  Activation activation;
  DType output_type;
};

// output = input * factors
struct ScaleColumnsArgs {
  const float* input;    // [rows, input_stride]
  const float* factors;  // [size]
  float* output;         // [rows, output_stride]
  int64_t input_stride;
  int64_t output_stride;
  int64_t size;
  Rows rows;
};

}  // namespace headrace
