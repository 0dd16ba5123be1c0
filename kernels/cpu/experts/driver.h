// The loops of a stack of experts around the tiles of linear/driver.h.
#pragma once

#include "experts/experts.h"
#include "linear/driver.h"

namespace headrace {

// The fewest rows that are gathered at a time for one expert, enough for whole tiles of any type; more if the cache
// holds them.
constexpr int64_t kLeastGathered = 48;

inline int64_t gathered_rows(int64_t row_bytes) {
  const int64_t fit = kActivationBlockBytes / row_bytes;
  return fit < kLeastGathered ? kLeastGathered : fit < kMaxBlockRows ? fit : kMaxBlockRows;
}

inline int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Bytes of StackRun.scratch: gathered rows, and the sums of a block if K is cut.
inline int64_t stack_scratch(const PackedWeight& w) {
  int64_t row_bytes = prepared_row_bytes(w);
  if (row_bytes < 4 * w.k) row_bytes = whole_lines(4 * w.k);
  const int64_t gathered = kLeastGathered * row_bytes;
  return (gathered < kActivationBlockBytes ? kActivationBlockBytes : gathered) + kMaxBlockRows * w.fan * kPanelRows * 4;
}

// The (row, expert) pairs in order of experts, and for each expert in order of rows.
struct Pairs {
  const int32_t* starts;  // [num_experts + 1]: expert e has pairs starts[e] .. starts[e + 1] - 1
  const int32_t* rows;    // each pair's row of x and out
  const float* scales;    // each pair's routing weight
};

// The arguments of Tiles::experts: one stack of matrices in one pass, on one thread.
struct StackRun {
  const PackedWeight* experts;
  const float* biases;  // [num_experts, n] or null
  int64_t num_experts;
  LinearArgs linear;  // without weight and bias; x and out begin at row 0, or at the first pair of the pass
  int64_t num_rows;   // rows of x
  Pairs pairs;
  Range pass;  // the pairs of the pass
  Prepared x;  // base null: not prepared yet
  char* scratch;
  // True for the first stack: x has the step's rows, and out one row per pair. Otherwise x has one row per pair, whose
  // result is added to the step's row.
  bool gathers;
  StackDeltas* deltas;  // null: none
};

// The rows of x of pairs [begin, end) one after another: in place if they already are contiguous, else copied.
inline Prepared gather_rows(const StackRun& run, int64_t begin, int64_t end, int64_t bytes, int64_t pitch) {
  const Prepared& x = run.x;
  if (!run.gathers) return {x.base + (begin - run.pass.begin) * x.row_bytes, x.row_bytes};
  const int32_t* rows = run.pairs.rows + begin;
  const int64_t count = end - begin;
  if (rows[count - 1] - rows[0] == count - 1) return {x.base + rows[0] * x.row_bytes, x.row_bytes};
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(run.scratch + i * pitch, x.base + rows[i] * x.row_bytes, static_cast<size_t>(bytes));
  return {run.scratch, pitch};
}

template <class Kernel>
void run_stack(StackRun& run, const Step& step, int thread, int num_threads) {
  LinearArgs args = run.linear;
  args.weight = run.experts[0];
  if (!run.x.base) run.x = prepare_rows<Kernel>(args, step, run.num_rows, thread, num_threads);
  const int64_t bytes = Kernel::usable(args) ? args.weight.k * size_of(args.x_dtype) : run.x.row_bytes;
  const int64_t pitch = whole_lines(bytes);
  const int64_t most_rows = run.deltas && kStackRows < gathered_rows(pitch) ? kStackRows : gathered_rows(pitch);
  const int64_t units = panels_of(args.weight) / args.weight.fan;
  float* sums = reinterpret_cast<float*>(run.scratch + most_rows * pitch);
  // In the first stack the threads with one unit more rotate from expert to expert; in the second each thread must keep
  // its own columns.
  const int turn = run.gathers ? static_cast<int>(units % num_threads) : 0;
  int first_thread = 0;
  for (int64_t expert = 0; expert < run.num_experts; ++expert) {
    Range pairs = {run.pairs.starts[expert], run.pairs.starts[expert + 1]};
    if (pairs.begin < run.pass.begin) pairs.begin = run.pass.begin;
    if (pairs.end > run.pass.end) pairs.end = run.pass.end;
    if (pairs.begin >= pairs.end) continue;
    const Range mine = split(units, (thread + num_threads - first_thread) % num_threads, num_threads);
    first_thread = (first_thread + turn) % num_threads;
    args.weight = run.experts[expert];
    args.bias = run.biases ? run.biases + expert * args.weight.n : nullptr;
    const int64_t count = pairs.end - pairs.begin, blocks = (count + most_rows - 1) / most_rows;
    for (int64_t block = 0; block < blocks && mine.begin < mine.end; ++block) {
      const Range rows = split(count, static_cast<int>(block), static_cast<int>(blocks));
      const int64_t begin = pairs.begin + rows.begin, end = pairs.begin + rows.end;
      const Prepared x = gather_rows(run, begin, end, bytes, pitch);
      if (run.gathers) {
        args.out = static_cast<char*>(run.linear.out) +
                   (begin - run.pass.begin) * args.out_stride * size_of(args.out_dtype);
      } else {
        args.add_to = run.pairs.rows + begin;
        args.scales = run.pairs.scales + begin;
      }
      if (run.deltas) args.deltas = run.deltas->begin(*run.deltas, run, expert, begin, end, thread);
      for (int64_t unit = mine.begin; unit < mine.end; ++unit)
        run_unit<Kernel>(args, x, unit, 0, end - begin, sums, nullptr);
    }
  }
}

template <class Kernel>
constexpr Tiles kTilesOf = {Kernel::kMaxRows, run_linear<Kernel>, run_stack<Kernel>,    Kernel::usable,
                            Kernel::prepare,  run_tile<Kernel>,   half_tile<Kernel>(0)};

}  // namespace headrace
