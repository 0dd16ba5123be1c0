// Collectives between the ranks of one host: counts in shared memory, awaited by a short spin and then a futex.
//
// A count only rises (modulo 2^32). Its only writer writes the data before it raises the count, and readers read the
// data after they have seen it raised. There are no locks.
//
//   rank 0   write part  ->  count = 7  ->  wait until every count >= 7  ->  read all parts
//   rank 1   write part  ->  count = 7  ->        (the same)
//
// There are two sets of parts, called turns, that are used alternately. A rank writes a turn again only after a later
// barrier, which every rank reaches after reading that turn. So one barrier per sum is enough.
//
// A wait ends when the count is reached, when the header reports a failed rank, when the awaited process is gone, or at
// its deadline. A failure stays in `Peer::outcome`, and later waits return at once.
#pragma once

#include "runtime/common.h"
#include "runtime/op.h"

namespace headrace {

// The count of one rank, or of one side of a pipe: a cache line of the shared memory.
struct alignas(64) Line {
  uint32_t count;
  uint32_t sleepers;
  int32_t pid;  // the owner's process; 0 until it has attached
};

// The first page of the shared memory.
struct Header {
  uint32_t reserved[2];
  uint32_t failed;  // 0, or 1 + the rank that failed
  uint32_t pad;
  uint64_t store_port;  // of the torch.distributed store, where gloo is used; 0 until it listens
};

enum class Outcome : int32_t { kGood = 0, kFailed = 1, kGone = 2, kLate = 3 };

// The limits of this rank's waits, and how the last one ended. In the rank's own memory; used by one thread at a time.
struct Peer {
  const Header* header;
  int64_t deadline_ms;
  int32_t spin_us;
  Outcome outcome;
  int32_t culprit;  // kFailed: the failed rank; kGone and kLate: the process that was awaited
};

// The ranks of a pipeline stage, as seen by one of them.
struct Group {
  Peer* peer;
  Line* lines;  // [size], in order of rank
  char* parts;  // [2][size][part_bytes]
  int64_t part_bytes;
  int32_t rank, size;
  uint32_t count;  // barriers passed
  uint32_t turn;   // the turn of parts that the next sum or gather outside programs uses
};

// out[rows, columns] (or, with add, +)= the sum of the ranks' parts of one turn, in order of rank.
struct RankSumArgs {
  Group* group;
  const float* parts;  // [size] slots of part_stride floats, each [rows, columns]
  int64_t part_stride;
  void* out;
  int64_t out_stride;  // elements
  int64_t columns;
  DType out_dtype;
  Rows rows;
  int32_t add;  // 1: the sum is added to `out`
};

// out[rows, columns] = shared[rows, columns], in which every rank has written its own columns.
struct RankGatherArgs {
  Group* group;
  const float* shared;
  float* out;
  int64_t columns;
  Rows rows;
};

}  // namespace headrace
