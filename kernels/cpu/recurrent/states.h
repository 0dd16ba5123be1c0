// States of sequences in pages, and what a step does with them. kernels/reference/states.py describes both.
//
//   inputs     | replayed drafts | tokens | drafts |    the first from `drafted`, the others from x
//   state      source .................. pages          drafts are computed on top of it, and kept in `drafted`
#pragma once

#include <algorithm>

#include "elementwise/elementwise.h"
#include "runtime/op.h"

namespace headrace {

// What changes from step to step; the owner keeps it at one address. Arrays are of the step's sequences.
struct StateStep {
  const int32_t* rows;        // which row of `drafted` a sequence has
  const int32_t* pages;       // [num_seqs, pages_per_state] own pages
  const int32_t* sources;     // [num_seqs, pages_per_state] where the state is read
  const int32_t* has_source;  // 0: the state is zeros
  const int32_t* replayed;    // accepted drafts of the step before
  const int32_t* committed;   // tokens of this step before its drafts
  const int32_t* snapshot_sequences;  // [num_snapshots] ascending
  const int32_t* snapshot_ends;       // [num_snapshots] stored after so many inputs
  const int32_t* snapshot_pages;      // [num_snapshots, pages_per_state]
  int64_t num_snapshots;
  int64_t pages_per_state;
};

// Where a layer's state lies: unit u begins at element offset[u] of the page[u]th page of a sequence.
struct StateUnits {
  char* memory;  // [num_pages, page_elements] of `type`
  int64_t page_elements;
  const int64_t* page;
  const int64_t* offset;
  DType type;

  char* at(const int32_t* pages, int64_t unit, int64_t element = 0) const {
    return memory + (pages[page[unit]] * page_elements + offset[unit] + element) * size_of(type);
  }
  // Elements [first, first + count) of a unit, as floats.
  void read(const int32_t* pages, int64_t unit, int64_t first, int64_t count, float* to) const {
    load_values(at(pages, unit, first), type, count, to);
  }
  void write(const int32_t* pages, int64_t unit, int64_t first, int64_t count, const float* from) const {
    store_values(from, type, count, at(pages, unit, first));
  }
};

// The inputs of drafts, by row and draft.
struct Drafted {
  float* values;
  int64_t row_stride;    // elements
  int64_t draft_stride;  // elements

  float* at(int64_t row, int64_t draft) const { return values + row * row_stride + draft * draft_stride; }
};

// One sequence in a step.
struct StateSequence {
  int64_t row, first, count;  // tokens [first, first + count) of the step
  int64_t replayed, commit;   // the state is stored in `pages` after `commit` inputs
  const int32_t *pages, *source;
  int64_t snapshot, last_snapshot;

  StateSequence(const StateStep& states, const Step& step, int64_t seq)
      : row(states.rows[seq]),
        first(step.query_start[seq]),
        count(step.query_start[seq + 1] - first),
        replayed(states.replayed[seq]),
        commit(replayed + states.committed[seq]),
        pages(states.pages + seq * states.pages_per_state),
        source(states.has_source[seq] != 0 ? states.sources + seq * states.pages_per_state : nullptr) {
    const int32_t *begin = states.snapshot_sequences, *end = begin + states.num_snapshots;
    snapshot = std::lower_bound(begin, end, static_cast<int32_t>(seq)) - begin;
    last_snapshot = std::upper_bound(begin + snapshot, end, static_cast<int32_t>(seq)) - begin;
  }

  int64_t inputs() const { return replayed + count; }

  // After how many inputs, more than `passed`, the state is stored next; inputs() if it is not.
  int64_t next_store(const StateStep& states, int64_t passed) const {
    int64_t next = commit > passed ? commit : inputs();
    for (int64_t i = snapshot; i < last_snapshot; ++i)
      if (states.snapshot_ends[i] > passed) return std::min<int64_t>(next, states.snapshot_ends[i]);
    return next;
  }

  // Calls each(pages) for all pages that take the state after `passed` inputs.
  template <class Each>
  void stores(const StateStep& states, int64_t passed, Each each) const {
    for (int64_t i = snapshot; i < last_snapshot; ++i)
      if (states.snapshot_ends[i] == passed) each(states.snapshot_pages + i * states.pages_per_state);
    if (passed == commit) each(pages);
  }
};

constexpr int kMostConvolveWidth = 16;

// Arguments of hr_op_convolve: see reference.states.convolve.
struct ConvolveArgs {
  const StateStep* states;
  StateUnits history;  // unit i: the input width - 1 - i tokens before, [channels]
  Drafted drafted;
  const void* x;        // [num_tokens, x_stride]: inputs, or if gated b, c and x side by side
  const float* weight;  // [width, channels], the oldest input's first
  const float* bias;    // [channels] or null
  void* out;            // [num_tokens, out_stride]
  int64_t x_stride;     // elements, as is out_stride
  int64_t out_stride;
  int64_t channels;
  int32_t width;
  int32_t gated;
  Activation activation;  // of the sum
  DType x_type;
  DType out_type;
};

// Arguments of hr_op_scan: see reference.states.scan.
struct ScanArgs {
  const StateStep* states;
  StateUnits state;  // unit i: head i, [head_dim, state_size]
  Drafted drafted;   // x, B, C and steps, as in mixed
  const float* mixed;  // [num_tokens, mixed_stride]: each head's x, each group's B, each group's C
  const float* steps;  // [num_tokens, steps_stride]
  const float* gate;   // [num_tokens, gate_stride]
  void* out;           // [num_tokens, out_stride]
  const float* decay;      // [num_heads], negative
  const float* skip;       // [num_heads]
  const float* step_bias;  // [num_heads]
  int64_t mixed_stride, steps_stride, gate_stride, out_stride;  // elements
  int64_t num_heads, head_dim, state_size, num_groups;
  float least_step, most_step;
  DType out_type;
};

// Arguments of hr_op_linear_attention: see reference.linear_attention.
struct LinearAttentionArgs {
  const StateStep* states;
  StateUnits state;     // unit i: value head i, [key_dim, value_dim]
  Drafted drafted;      // mixed, decays and rates
  const void* mixed;    // [num_tokens, mixed_stride]: each key head's query, each one's key, each head's value
  const float* decays;  // [num_tokens, decays_stride], or null: a head's decay is the same for all tokens
  const float* rates;   // [num_tokens, rates_stride], or null: values are not corrected
  void* out;            // [num_tokens, out_stride]
  const int64_t* key_of_head;  // [num_heads]
  const float* decay;          // [num_heads], negative
  const float* decay_bias;     // [num_heads * decay_columns]
  int64_t mixed_stride, decays_stride, rates_stride, out_stride;  // elements
  int64_t num_heads, num_key_heads, key_dim, value_dim;
  int64_t decay_columns;  // of a head: 0, 1 or key_dim
  float correction, scale;
  float decay_floor;  // 0: a decay's logarithm has none
  int32_t unit_keys;
  DType mixed_type;
  DType out_type;
};

// Arguments of hr_op_selective_scan: see reference.selective.selective_scan.
struct SelectiveArgs {
  const StateStep* states;
  StateUnits state;  // unit n: value n of the state of each channel, [channels]
  Drafted drafted;   // x, steps, shared
  const float* x;       // [num_tokens, x_stride]
  const float* steps;   // [num_tokens, steps_stride]
  const float* shared;  // [num_tokens, shared_stride]: B, then C
  const float* gate;    // [num_tokens, gate_stride]
  void* out;            // [num_tokens, out_stride]
  const float* decay;   // [state_size, channels], negative
  const float* skip;    // [channels]
  int64_t x_stride, steps_stride, shared_stride, gate_stride, out_stride;  // elements
  int64_t channels, state_size;
  DType out_type;
};

// Arguments of hr_op_gated_lru: see reference.gated_lru.
struct GatedLruArgs {
  const StateStep* states;
  StateUnits state;  // unit i: head i, [head_dim]
  Drafted drafted;   // x
  const float* x;    // [num_tokens, x_stride]
  void* out;         // [num_tokens, out_stride]
  const float* rates;                                   // [channels]: a channel's logarithm of what remains at a gate of 1
  const float *input_weight, *input_bias;               // [num_heads, head_dim, head_dim] and [channels]
  const float *recurrence_weight, *recurrence_bias;
  int64_t x_stride, out_stride;  // elements
  int64_t num_heads, head_dim;
  DType out_type;
};

// Bytes of thread scratch that hr_op_linear_attention needs.
int64_t linear_attention_scratch_bytes(int64_t key_dim, int64_t value_dim);

// Bytes of thread scratch that hr_op_scan needs.
int64_t scan_scratch_bytes(int64_t head_dim, int64_t state_size);

void convolve(const void* args, const Step& step, int thread, int num_threads);
void scan(const void* args, const Step& step, int thread, int num_threads);
void selective_scan(const void* args, const Step& step, int thread, int num_threads);
void linear_attention(const void* args, const Step& step, int thread, int num_threads);
void gated_lru(const void* args, const Step& step, int thread, int num_threads);

inline int64_t padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Lanes [0, count) of a vector, count <= kLanes; lanes beyond are zeros.
inline Floats load_lanes(const void* from, int64_t at, int count, DType type) {
  if (count == kLanes) return load_vector(from, at, type);
  Floats values = {};
  for (int i = 0; i < count; ++i) values[i] = load_one(from, at + i, type);
  return values;
}
inline void store_lanes(void* to, int64_t at, int count, DType type, Floats values) {
  if (count == kLanes) return store_vector(to, at, type, values);
  for (int i = 0; i < count; ++i) store_one(to, at + i, type, values[i]);
}

// ln(1 + e^x), which is x for large x.
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace headrace
