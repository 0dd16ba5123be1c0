// The seam of the CPU kernels: an op is a function that runs inside a parallel region that is already open.
//
//   void op(const void* args, const Step& step, int thread, int num_threads)
//
// What every op must keep:
//  - All threads of the region call it with the same `args` and `step`. It splits its work among them by
//    (thread, num_threads) alone, so that a run repeats exactly; it never opens a region and never allocates.
//  - What it computes for a row does not depend on num_threads or on the other rows.
//  - It returns without a closing barrier. Whoever runs a list of ops puts a barrier between an op and the first
//    one that reads what it wrote (or overwrites what it reads).
//  - It may call step.team->barrier() in its middle, the same number of times on every thread.
//  - It may write its own thread_scratch freely. Before it writes shared_scratch it calls barrier(), because a
//    thread of the op before may still be reading there.
//  - Its arguments were validated when they were made; here there is nothing left to refuse.
//
// Args are plain C structures made once (ctypes mirrors them); what changes from step to step is in Step.
#pragma once

#include <cstddef>
#include <cstdint>

#include "threads.h"

#define HR_EXPORT extern "C" __attribute__((visibility("default")))

namespace headrace {

// Which count of Step is the number of rows that an op works on.
enum class Rows : int32_t {
  kFixed = 0,   // the op's own constant
  kTokens = 1,  // step.num_tokens
  kLogits = 2,  // step.num_logits
  kSeqs = 3,    // step.num_seqs
};

// One step of the model over a batch. Pointers belong to the caller and outlive the region.
struct Step {
  Team* team;            // filled in by the pool when the region opens
  char* shared_scratch;  // [shared_scratch_bytes], 64-byte aligned, filled in by the pool
  char* scratch;         // [num_threads, scratch_stride], 64-byte aligned, filled in by the pool
  int64_t shared_scratch_bytes;
  int64_t scratch_stride;

  int64_t num_tokens;  // rows of the hidden states
  int64_t num_seqs;
  int64_t num_logits;  // rows that need logits

  const int32_t* token_ids;     // [num_tokens]
  const int32_t* positions;     // [num_tokens]
  const int64_t* slot_mapping;  // [num_tokens] cache slot of each token; negative: do not write
  const int32_t* query_start;   // [num_seqs + 1] first row of each sequence
  const int32_t* seq_lens;      // [num_seqs] tokens of context, the step's own included
  const int32_t* block_table;   // [num_seqs, block_table_stride]
  int64_t block_table_stride;
  const int32_t* logits_rows;  // [num_logits] row of the hidden states of each row of logits
  int64_t single_tokens;       // 1: every sequence computes exactly one token (a program finds it out)
  int64_t only_highest;        // 1: of rows of logits nothing but the highest is wanted; they need not be written

  char* thread_scratch(int thread) const { return scratch + thread * scratch_stride; }

  int64_t rows(Rows which, int64_t fixed) const {
    switch (which) {
      case Rows::kTokens: return num_tokens;
      case Rows::kLogits: return num_logits;
      case Rows::kSeqs: return num_seqs;
      default: return fixed;
    }
  }
};

using OpFn = void (*)(const void* args, const Step& step, int thread, int num_threads);

// The half-open part of [0, count) that belongs to `thread`, in multiples of `grain` (the last may be short).
struct Range {
  int64_t begin, end;
};

inline Range split(int64_t count, int thread, int num_threads, int64_t grain = 1) {
  const int64_t grains = (count + grain - 1) / grain;
  const int64_t each = grains / num_threads, extra = grains % num_threads;
  const int64_t first = thread * each + (thread < extra ? thread : extra);
  const int64_t last = first + each + (thread < extra ? 1 : 0);
  const int64_t begin = first * grain, end = last * grain;
  return {begin < count ? begin : count, end < count ? end : count};
}

}  // namespace headrace
