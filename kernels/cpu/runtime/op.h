// The interface of the CPU kernels. An op is a function that runs inside a parallel region that is already open:
//
//   void op(const void* args, const Step& step, int thread, int num_threads)
//
// Invariants of every op:
//  - All threads of the region call it with the same `args` and `step`. It divides its work among them by
//    (thread, num_threads) alone, so that runs repeat exactly. It never opens a region and never allocates.
//  - Its result for a row does not depend on num_threads or on the other rows.
//  - It returns without a closing barrier. The caller of several ops puts a barrier between an op and the first later
//    one that reads what it wrote, or overwrites what it reads.
//  - It may call step.team->barrier() itself, the same number of times on every thread.
//  - It may write its own thread_scratch freely. It calls barrier() before it writes shared_scratch, which threads
//    still in the previous op may be reading.
//  - Its arguments were validated when they were constructed, so it refuses nothing.
//
// Args are plain C structures, made once and mirrored in ctypes. Step holds what changes from step to step.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/threads.h"

#define HR_EXPORT extern "C" __attribute__((visibility("default")))

namespace headrace {

// The number of rows that an op works on: a constant, or a count of Step.
enum class Rows : int32_t {
  kFixed = 0,   // the op's own constant
  kTokens = 1,  // step.num_tokens
  kLogits = 2,  // step.num_logits
  kSeqs = 3,    // step.num_seqs
};

// In the place of a token id: the row of the embedding's output has been written before the step, and stays as it is.
constexpr int32_t kGivenRow = -1;

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

  const int32_t* token_ids;     // [num_tokens]; kGivenRow: see there
  const int32_t* positions;     // [num_tokens]
  const int32_t* token_types;   // [num_tokens]: 1 in the second text of a pair
  const int64_t* slot_mapping;  // [num_tokens] cache slot of each token; negative: do not write
  const int32_t* query_start;   // [num_seqs + 1] first row of each sequence
  const int32_t* seq_lens;      // [num_seqs] tokens of context, including those of the step
  const int32_t* key_lens;      // [num_seqs] how many of these all tokens attend to, if to both sides; null: all
  const int32_t* block_table;   // [num_seqs, block_table_stride]
  int64_t block_table_stride;
  const int32_t* logits_rows;  // [num_logits] row of the hidden states of each row of logits
  int64_t single_tokens;       // 1: every sequence computes exactly one token (set by hr_program_run)
  int64_t only_highest;        // 1: only the highest logit of each row is needed; logits need not be written
  // [2]: the adapters of the tokens, and of the rows of logits; null if no row has any. See linear/deltas.h.
  const struct RowAdapters* adapters;

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
