// How the ranks of one host talk: counts in shared memory, waited for by a short spin and then a futex.
//
// A count only rises (modulo 2^32). Whoever raises it wrote the data that it stands for before; whoever saw it raised
// reads that data after. There are no locks: a count has one writer.
//
//   rank 0   write part  ->  count = 7  ->  wait until every count >= 7  ->  read all parts
//   rank 1   write part  ->  count = 7  ->        (the same)
//
// Parts lie in two turns that are used alternately: a rank writes a turn again only after a barrier that every rank
// reached when it had read that turn. So one barrier a sum is enough.
//
// Every wait ends: when the count is reached, when the header says that a rank failed, when a process that is waited
// for is gone, or at its deadline. What happened stays in `Peer::outcome`, and nothing waits after that.
#pragma once

#include "common.h"
#include "op.h"

namespace headrace {

// One rank's count, or one side's of a pipe: a cache line of the shared memory.
struct alignas(64) Line {
  uint32_t count;
  uint32_t sleepers;
  int32_t pid;  // 0 until its owner has come
};

// The first page of the shared memory.
struct Header {
  uint32_t reserved[2];
  uint32_t failed;  // 0, or 1 + the rank that failed
  uint32_t pad;
  uint64_t store_port;  // of the torch.distributed store, where gloo is used; 0 until it listens
};

enum class Outcome : int32_t { kGood = 0, kFailed = 1, kGone = 2, kLate = 3 };

// How this rank waits, and what became of it. In this rank's own memory; used by one thread at a time.
struct Peer {
  const Header* header;
  int64_t deadline_ms;
  int32_t spin_us;
  Outcome outcome;
  int32_t culprit;  // kFailed: its rank; kGone: its process
};

// A stage's ranks, as one of them sees them.
struct Group {
  Peer* peer;
  Line* lines;  // [size], in order of rank
  char* parts;  // [2][size][part_bytes]
  int64_t part_bytes;
  int32_t rank, size;
  uint32_t count;  // barriers passed
  uint32_t turn;   // of the parts, in sums that are no part of a program
};

// out[rows, columns] (+)= the sum of the ranks' parts of one turn, added in order of rank.
struct RankSumArgs {
  Group* group;
  const float* parts;  // [size] slots of part_stride floats, each [rows, columns]
  int64_t part_stride;
  void* out;
  int64_t out_stride;  // elements
  int64_t columns;
  DType out_dtype;
  Rows rows;
  int32_t add;  // 1: to what is in `out`
};

// out[rows, columns] = shared[rows, columns], into which every rank has written its columns.
struct RankGatherArgs {
  Group* group;
  const float* shared;
  float* out;
  int64_t columns;
  Rows rows;
};

}  // namespace headrace
