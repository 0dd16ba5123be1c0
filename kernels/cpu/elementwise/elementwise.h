// Ops on rows or single values: norms, activations, embeddings, additions, gathering rows and soft caps.
#pragma once

#include "runtime/common.h"
#include "linear/linear.h"

namespace headrace {

inline char* row_at(void* base, int64_t row, int64_t stride, DType type) {
  return static_cast<char*>(base) + row * stride * size_of(type);
}
inline const char* row_at(const void* base, int64_t row, int64_t stride, DType type) {
  return static_cast<const char*>(base) + row * stride * size_of(type);
}

// Widens `count` values. `from` and `to` may be the same memory only if the type is float.
void load_values(const void* from, DType type, int64_t count, float* to);
// Rounds `count` values to nearest even.
void store_values(const float* from, DType type, int64_t count, void* to);

// The sum of f(i .. i + kLanes) over a row, by vectors in two chains; the tail is padded with zeros by `load`.
template <class Term>
inline float sum_over(int64_t count, Term term) {
  Floats even = {}, odd = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    even += term(i);
    odd += term(i + kLanes);
  }
  if (i + kLanes <= count) {
    even += term(i);
    i += kLanes;
  }
  float tail = 0.0f;
  if (i < count) {
    const Floats last = term(i);
    for (int64_t lane = 0; lane < count - i; ++lane) tail += last[lane];
  }
  return sum_of_lanes(even + odd) + tail;
}

enum class NormKind : int32_t { kRms = 0, kLayer = 1 };

// to = norm(from) * weight + bias, in float; weight and bias may be null. `from` and `to` may be the same.
void norm_values(NormKind kind, const float* from, int64_t count, const float* weight, const float* bias, float eps,
                 float* to);

struct NormArgs {
  const void* input;     // [rows, input_stride]
  void* residual;        // [rows, residual_stride] or null: added to the input; the sum is written back to it
  void* output;          // [rows, output_stride]; may be the input
  const float* weight;   // [size], any constant offset already added; or null
  const float* bias;     // [size] or null
  int64_t input_stride;
  int64_t residual_stride;
  int64_t output_stride;
  int64_t output_thread_stride;  // bytes between the threads' own copies of the output; 0: one shared output
  int64_t size;
  int64_t num_rows;      // with Rows::kFixed
  Rows rows;
  int32_t add_to_output;  // 1: output += norm(...)
  NormKind kind;
  DType input_type;
  DType residual_type;
  DType output_type;
  float eps;
  float factor;  // of what is stored
  int32_t groups;  // of columns, each of which is normed by itself; 0 or 1: all columns are
};

struct ActivationArgs {
  const void* gate;  // [rows, gate_stride]
  const void* up;    // [rows, gate_stride], multiplied by the activated gate; null: the activation alone
  void* output;      // [rows, output_stride]
  int64_t gate_stride;
  int64_t output_stride;
  int64_t size;
  int64_t num_rows;  // with Rows::kFixed
  Rows rows;
  Activation kind;
  DType input_type;
  DType output_type;
};

// xIELU (Huang and Schlag 2024): linear x + above x^2 for x > 0, else linear x + below (e^min(x, most) - 1 - x)
struct XieluArgs {
  const void* input;  // [rows, input_stride]
  void* output;       // [rows, output_stride]
  int64_t input_stride;
  int64_t output_stride;
  int64_t size;
  Rows rows;
  DType input_type;
  DType output_type;
  float above;
  float below;
  float linear;
  float most;
};

struct EmbeddingArgs {
  const void* table;      // [vocab, table_stride] dense rows; null: only `positions` is added to the output
  const void* positions;  // [max_positions, positions_stride] learned positions, or null
  void* output;           // [num_tokens, output_stride]
  int64_t table_stride;
  int64_t positions_stride;
  int64_t output_stride;
  int64_t size;
  int64_t position_offset;  // row of the learned table for position 0
  int64_t by_type;          // 1: `positions` has a row for each token type instead
  float scale;              // factor of the table's rows
  DType table_type;
  DType positions_type;
  DType output_type;
};

struct AddArgs {
  const void* input;  // [rows, input_stride]
  void* output;       // [rows, output_stride] += input * scale
  int64_t input_stride;
  int64_t output_stride;
  int64_t size;
  int64_t num_rows;  // with Rows::kFixed
  Rows rows;
  DType input_type;
  DType output_type;
  float scale;
};

// Row i of the output = row step.logits_rows[i] of the input.
struct GatherArgs {
  const void* input;             // [num_tokens, input_stride]
  void* output;                  // [num_logits, output_stride]
  int64_t input_stride;          // bytes, as are the fields below
  int64_t output_stride;
  int64_t output_thread_stride;  // between the threads' own copies of the output; 0: one shared output
  int64_t row_bytes;
};

// output = input, of which each thread may have its own copy
struct CopyArgs {
  const void* input;  // [rows, input_stride]
  void* output;       // [rows, output_stride]
  int64_t input_stride;  // bytes, as are the fields below
  int64_t output_stride;
  int64_t input_thread_stride;  // between the threads' own copies of the input; 0: one shared input
  int64_t row_bytes;
  Rows rows;
};

// values *= factors[position], in place
struct ScaleRowsArgs {
  void* values;          // [num_tokens, stride]
  const float* factors;  // [positions]
  int64_t stride;
  int64_t size;
  DType type;
};

// values = cap * tanh(values / cap), in place
struct SoftCapArgs {
  float* values;  // [rows, stride]
  int64_t stride;
  int64_t size;
  int64_t num_rows;  // with Rows::kFixed
  Rows rows;
  float cap;
};

// output = RMS norm of each group of columns * weight, unless weight is null, * activation(gate), unless gate is null
struct GatedNormArgs {
  const void* input;    // [rows, input_stride]
  const void* gate;     // [rows, gate_stride] or null
  const float* weight;  // [size], or [group] where weight_stride is 0; or null
  void* output;         // [rows, output_stride]
  int64_t input_stride;
  int64_t gate_stride;
  int64_t output_stride;
  int64_t size;
  int64_t group;          // columns
  int64_t weight_stride;  // from a group's weights to those of the next
  Rows rows;
  Activation activation;
  DType input_type;
  DType gate_type;
  DType output_type;
  float eps;
  int32_t gate_per_group;  // 1: each group of columns has one gate
};

void norm(const void* args, const Step& step, int thread, int num_threads);
void activation_multiply(const void* args, const Step& step, int thread, int num_threads);
void embedding(const void* args, const Step& step, int thread, int num_threads);
void add(const void* args, const Step& step, int thread, int num_threads);
void gather(const void* args, const Step& step, int thread, int num_threads);
void copy(const void* args, const Step& step, int thread, int num_threads);
void gated_norm(const void* args, const Step& step, int thread, int num_threads);
void soft_cap(const void* args, const Step& step, int thread, int num_threads);

}  // namespace headrace
