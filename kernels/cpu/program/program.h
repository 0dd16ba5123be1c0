// A program: the ops of a whole step, run in one parallel region.
//
// The builder of a program (program.py) places the barriers: one precedes an op that reads what another thread wrote
// since the last barrier, or overwrites what another thread may still read.
#pragma once

#include "runtime/op.h"

namespace headrace {

struct ProgramOp {
  OpFn run;
  const void* args;
  int32_t barrier_before;
  // 1: a step in which every sequence computes one token skips this op and its barrier.
  int32_t skipped_when_single;
};

struct Program {
  const ProgramOp* ops;
  int64_t first;
  int64_t end;
  // Null, or [num_threads][number of ops][2] ticks summed over runs: waiting at the barrier, and in the op.
  uint64_t* ticks;
  int64_t ticks_per_thread;  // elements
  int64_t vocab_size;        // token ids must be below it; 0: no op reads them
  int64_t position_limit;    // positions must be below it; 0: no op reads them
  // The calling thread runs steps of at most this many tokens alone: they take less time than gathering all threads at
  // every barrier on a machine that other processes use too.
  int64_t alone_rows;
};

}  // namespace headrace
