// A program: the ops of a whole step, run in one parallel region.
//
// Whoever makes a program decides where barriers stand (an op that reads what another thread wrote since the last one,
// or overwrites what another thread may still read, has one before it); here they are only obeyed.
#pragma once

#include "op.h"

namespace headrace {

struct ProgramOp {
  OpFn run;
  const void* args;
  int32_t barrier_before;
  // 1: a step in which every sequence computes one token does without this op and its barrier.
  int32_t skipped_when_single;
};

struct Program {
  const ProgramOp* ops;
  int64_t first;
  int64_t end;
  // Null, or [num_threads][number of ops][2] ticks added up over runs: waiting at the barrier, and working.
  uint64_t* ticks;
  int64_t ticks_per_thread;  // elements
  int64_t vocab_size;        // what token ids and positions must be below; 0: nothing reads them
  int64_t position_limit;
  // Steps of up to this many tokens and rows of logits are run by the calling thread alone: they take less time than
  // it costs, with other processes about, to get all threads together at every barrier.
  int64_t alone_rows;
};

}  // namespace headrace
