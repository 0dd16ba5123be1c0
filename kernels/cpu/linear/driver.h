// The loops around the tiles: they divide a linear layer among threads, block it for the caches, prepare activations
// and write results. A Kernel implements the product for one weight type:
//
//   kMaxRows                      the most rows of x in one tile
//   prepared_bytes(k)             bytes of a prepared row of activations
//   usable(args)                  whether tiles can read x in place, without preparation
//   prepare(args, row, to)        converts one row of x to the prepared form
//   panel_bytes(w), block_k(k)    bytes of a packed panel; the part of K in one pass (all of it, or a multiple of the
//                                 tile's steps)
//   block_offset(k), x_offset(k)  byte offset of position k of K in a panel, and in a prepared row
//   tile<kRows>(x, x_bytes, panel, k, sums, sums_stride, add, ahead)
//                                 sums [kRows, kPanelRows] (+)= x [kRows, k] times the panel
//
// A Kernel with kTails has tile_with_tail(num_rows, ..., tail), too, which adds what adapters add (DeltaTail), and in
// the place of tile<kRows> block_tile(num_rows, ...).
#pragma once

#include "linear/deltas.h"
#include "linear/linear.h"

namespace headrace {

// With at most this many rows every thread prepares all of x itself, which is cheaper than a barrier.
constexpr int64_t kPrepareAloneRows = 16;
// The share of a core's second-level cache for a block of activations.
constexpr int64_t kActivationBlockBytes = 384 * 1024;

constexpr int64_t kAheadBytes = 8192;

// The memory that a tile prefetches while it computes.
//
// If only one tile reads a panel, it prefetches the panel itself, kAheadBytes (found by measurement) before use. If
// several tiles read a panel, the first two prefetch one half each of the next panel, so that memory and arithmetic
// always overlap; the others prefetch nothing.
struct Ahead {
  const char* from;
  int64_t halves;  // half bytes to prefetch per byte of panel read; 0 requests the same line each time, which is cheap

  const char* at(int64_t bytes_passed) const { return from + advance(bytes_passed); }
  int64_t advance(int64_t bytes_passed) const { return bytes_passed * halves / 2; }
};

// panel_bytes: what each tile reads; to_next: the distance to what the same tiles read next.
inline Ahead ahead_of(const char* panel, int64_t panel_bytes, int64_t to_next, int64_t tile, int64_t num_tiles) {
  if (num_tiles == 1) return {panel + kAheadBytes, 2};
  if (tile < 2) return {panel + to_next + tile * (panel_bytes / 2), 1};
  return {panel, 0};
}

// Prefetches into the second-level cache; the distance is too long for the first level, which the hardware fills in
// time.
//
// Tiles of few rows read each byte once, at the speed of memory. For them the prefetch is non-temporal and does not
// evict other data from the second level, above all the interpreter's: the interpreter's part of a step, which was
// dominated by cache misses, takes a quarter less time, and steps of two rows take a fifth less themselves. But some
// processors (Granite Rapids) read memory at a third of their speed that way, which `hr_streams_well` finds out.
extern __attribute__((visibility("hidden"))) bool streams_weights;

template <bool kFewRows>
inline void prefetch(const char* address) {
  if (kFewRows && streams_weights)
    __builtin_prefetch(address, 0, 0);
  else
    __builtin_prefetch(address, 0, 2);
}

struct Prepared {
  const char* base;
  int64_t row_bytes;
};

inline const char* row_of_x(const LinearArgs& args, int thread, int64_t row) {
  return static_cast<const char*>(args.x) + thread * args.x_thread_stride +
         row * args.x_stride * size_of(args.x_dtype);
}

template <class Kernel>
Prepared prepare_rows(const LinearArgs& args, const Step& step, int64_t rows, int thread, int num_threads) {
  if (Kernel::usable(args))
    return {row_of_x(args, thread, 0), args.x_stride * size_of(args.x_dtype)};
  const int64_t row_bytes = Kernel::prepared_bytes(args.weight.k);
  if (rows <= kPrepareAloneRows) {
    char* own = step.thread_scratch(thread);
    for (int64_t row = 0; row < rows; ++row)
      Kernel::prepare(args, row_of_x(args, thread, row), own + row * row_bytes);
    return {own, row_bytes};
  }
  step.team->barrier();
  const Range mine = split(rows, thread, num_threads);
  for (int64_t row = mine.begin; row < mine.end; ++row)
    Kernel::prepare(args, row_of_x(args, thread, row), step.shared_scratch + row * row_bytes);
  step.team->barrier();
  return {step.shared_scratch, row_bytes};
}

inline Floats silu(Floats value) { return value / (1.0f + exponential<true>(-value)); }

inline Floats activate(Activation activation, Floats value) {
  switch (activation) {
    case Activation::kSilu: return silu(value);
    case Activation::kSiluTo7: return smaller(silu(value), all_lanes(7.0f));
    case Activation::kSiluTo16: return smaller(silu(value), all_lanes(16.0f));
    case Activation::kSiluBelow10: return silu(smaller(value, all_lanes(10.0f)));
    case Activation::kGeluTanh: {
      const Floats inner = value * 0.7978845608f * (1.0f + 0.044715f * value * value);
      return 0.5f * value * (1.0f + hyperbolic_tangent(inner));
    }
    case Activation::kNormalCdf: return 0.5f * (1.0f + error_function(value * 0.70710678f));
    case Activation::kGelu: return 0.5f * value * (1.0f + error_function(value * 0.70710678f));
    case Activation::kRelu: return larger(value, all_lanes(0.0f));
    case Activation::kRelu2: {
      const Floats positive = larger(value, all_lanes(0.0f));
      return positive * positive;
    }
    case Activation::kSigmoid: return 1.0f / (1.0f + exponential<true>(-value));
    case Activation::kSoftplus: return softplus(value);
    case Activation::kSoftplus2: return softplus(value * 0.6931471806f) * 1.4426950409f;
    default: return value;
  }
}

inline Floats within(Floats value, float most) { return larger(smaller(value, all_lanes(most)), all_lanes(-most)); }

// The up projection as an activated gate is multiplied with it.
inline Floats limited(Activation activation, Floats up) {
  switch (activation) {
    case Activation::kSiluTo7: return within(up, 7.0f);
    case Activation::kSiluTo16: return within(up, 16.0f);
    case Activation::kSiluBelow10: return within(up, 10.0f);
    default: return up;
  }
}

// The product of an activated gate and the up projection.
inline Floats activate_gated(Activation activation, Floats gate, Floats up) {
  if (activation != Activation::kClampedSilu) return activate(activation, gate) * limited(activation, up);
  gate = smaller(gate, all_lanes(7.0f));  // gpt-oss
  up = within(up, 7.0f);
  return gate / (1.0f + exponential<true>(-1.702f * gate)) * (up + 1.0f);
}

// Writes the sums of one tile, [kRows, fan, kPanelRows], to the output: bias, activation, gate, residual, conversion.
void write_tile(const LinearArgs& args, const float* sums, int64_t sums_stride, int64_t first_row, int num_rows,
                int64_t unit);

inline LaneHighest nothing_yet() {
  LaneHighest nothing = {};
  for (float& value : nothing.values) value = -__builtin_inff();
  return nothing;
}

// Updates the rows' highest values with the sums of one tile, [kRows, kPanelRows], in place of writing the output.
void keep_highest(const LinearArgs& args, const float* sums, int64_t sums_stride, LaneHighest* rows, int num_rows,
                  int64_t unit);

// highest: the entry of row 0, or null to write the output. deltas: what is still to be added, or null.
inline void finish_tile(const LinearArgs& args, const DeltaRun* deltas, float* sums, int64_t sums_stride,
                        LaneHighest* highest, int64_t first_row, int num_rows, int64_t unit) {
  if (deltas) deltas->add(*deltas, sums, sums_stride, first_row, num_rows, unit);
  if (highest)
    keep_highest(args, sums, sums_stride, highest + first_row, num_rows, unit);
  else
    write_tile(args, sums, sums_stride, first_row, num_rows, unit);
}

// The least rows of a tile whose results are requested while it computes.
constexpr int kLeastRequested = 4;

// Requests the memory that `write_tile` is going to write and add to. Storing to it would wait for each line: of large
// products of few k that was a fifth of the time. Inlined, since GCC takes a function that only prefetches for one that
// does nothing, and leaves out its calls.
inline __attribute__((always_inline)) void request_results(const LinearArgs& args, const LaneHighest* highest,
                                                           int64_t first_row, int num_rows, int64_t unit) {
  if (highest || args.add_to || num_rows < kLeastRequested) return;
  const auto request = [&](const void* base, int64_t stride, DType dtype) __attribute__((always_inline)) {
    const int64_t size = size_of(dtype), bytes = kPanelRows * size;
    const char* line = static_cast<const char*>(base) + (first_row * stride + unit * kPanelRows) * size;
    for (int row = 0; row < num_rows; ++row, line += stride * size)
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(line + at, 0, 2);
  };
  request(args.out, args.out_stride, args.out_dtype);
  if (args.residual && args.residual != args.out) request(args.residual, args.residual_stride, args.residual_dtype);
}

// Kernel::kTails, or false.
template <class Kernel>
constexpr auto has_tails(int) -> decltype(Kernel::kTails) {
  return Kernel::kTails;
}
template <class Kernel>
constexpr bool has_tails(...) {
  return false;
}

template <class Kernel, int kRows>
inline void call_tile(int num_rows, const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums,
                      int64_t sums_stride, bool add, Ahead ahead) {
  if constexpr (has_tails<Kernel>(0)) {
    Kernel::block_tile(num_rows, x, x_bytes, panel, k, sums, sums_stride, add, ahead);
  } else if (num_rows == kRows) {
    Kernel::template tile<kRows>(x, x_bytes, panel, k, sums, sums_stride, add, ahead);
  } else if constexpr (kRows > 1) {
    call_tile<Kernel, kRows - 1>(num_rows, x, x_bytes, panel, k, sums, sums_stride, add, ahead);
  }
}

// `call_tile` for any number of rows, kRows at a time.
template <class Kernel, int kRows>
inline void call_tiles(int num_rows, const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums,
                       int64_t sums_stride, bool add, Ahead ahead) {
  for (int row = 0; row < num_rows; row += kRows)
    call_tile<Kernel, kRows>(num_rows - row < kRows ? num_rows - row : kRows, x + row * x_bytes, x_bytes, panel, k,
                             sums + row * sums_stride, sums_stride, add, ahead);
}

// Divides rows [begin, end) into tiles of nearly equal size, at most kMaxRows: each(row, num_rows, tile, num_tiles).
template <int kMaxRows, class Each>
inline void for_each_tile(int64_t begin, int64_t end, Each each) {
  const int64_t tiles = (end - begin + kMaxRows - 1) / kMaxRows;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const Range rows = split(end - begin, static_cast<int>(tile), static_cast<int>(tiles));
    each(begin + rows.begin, static_cast<int>(rows.end - rows.begin), tile, tiles);
  }
}

// `call_tile`, for `Tiles`.
template <class Kernel>
void run_tile(int num_rows, const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums,
              int64_t sums_stride, bool add, Ahead ahead) {
  call_tile<Kernel, Kernel::kMaxRows>(num_rows, x, x_bytes, panel, k, sums, sums_stride, add, ahead);
}

// `run_tile` of Kernel::Halves, if there are any.
template <class Kernel>
constexpr auto half_tile(int) -> decltype(&run_tile<typename Kernel::Halves>) {
  return run_tile<typename Kernel::Halves>;
}
template <class Kernel>
constexpr decltype(Tiles::half) half_tile(...) {
  return nullptr;
}

// What adapters add to a tile: tails for the tile's own products, and what is to be added after them, or null.
struct TileDeltas {
  DeltaTail tails[2];
  const DeltaRun* after;
};

template <class Kernel>
inline TileDeltas deltas_of(const LinearArgs& args, int64_t row, int num_rows, int64_t unit) {
  TileDeltas found = {{}, args.deltas};
  if constexpr (has_tails<Kernel>(0)) {
    if (args.deltas && Kernel::takes_tails(args) && args.deltas->tails(*args.deltas, row, num_rows, unit, found.tails))
      found.after = nullptr;
  }
  return found;
}

// `call_tile` for the last values of k, and what the tail adds. With `after` there is none.
template <class Kernel>
inline void call_last_tile(int num_rows, const char* x, int64_t x_bytes, const char* panel, int64_t k, float* sums,
                           int64_t sums_stride, bool add, Ahead ahead, const TileDeltas& deltas, int64_t f) {
  if constexpr (has_tails<Kernel>(0)) {
    if (!deltas.after && deltas.tails[f].k > 0) {
      Kernel::tile_with_tail(num_rows, x, x_bytes, panel, k, sums, sums_stride, add, ahead, deltas.tails[f]);
      return;
    }
  }
  call_tile<Kernel, Kernel::kMaxRows>(num_rows, x, x_bytes, panel, k, sums, sums_stride, add, ahead);
}

// The least values of k between two requests for the memory of adapters, if a unit has one tile. Memory has only so
// many requests under way, and a tile waits while there are more.
template <class Kernel>
constexpr int64_t kDeltaCut = half_tile<Kernel>(0) ? 256 : INT64_MAX;
constexpr int64_t kSlotsAtOnce = 4;  // whose memory is requested together

// `run_unit` for one tile.
template <class Kernel>
void run_unit_in_parts(const LinearArgs& args, const Prepared& x, int64_t unit, int64_t begin, int64_t end,
                       LaneHighest* highest) {
  const int64_t k = args.weight.k, fan = args.weight.fan, panel_bytes = Kernel::panel_bytes(args.weight);
  const int64_t wanted = (args.deltas->rows->num_slots + kSlotsAtOnce - 1) / kSlotsAtOnce;
  const int64_t most = (k + kDeltaCut<Kernel> - 1) / kDeltaCut<Kernel>, parts = wanted < most ? wanted : most;
  const int64_t cut = (k + parts * kDeltaCut<Kernel> - 1) / (parts * kDeltaCut<Kernel>) * kDeltaCut<Kernel>;
  const int num_rows = static_cast<int>(end - begin);
  const TileDeltas deltas = deltas_of<Kernel>(args, begin, num_rows, unit);
  alignas(64) float sums[Kernel::kMaxRows * 2 * kPanelRows];
  for (int64_t part = 0; part < fan * parts; ++part) {
    const int64_t f = part / parts, first = part % parts * cut;
    const int64_t size = k - first < cut ? k - first : cut;
    const char* block = static_cast<const char*>(args.weight.data) + (unit * fan + f) * panel_bytes +
                        Kernel::block_offset(first);
    args.deltas->fetch(*args.deltas, unit, part, fan * parts);
    if (size > 0)
      call_last_tile<Kernel>(num_rows, x.base + begin * x.row_bytes + Kernel::x_offset(first), x.row_bytes, block, size,
                             sums + f * kPanelRows, fan * kPanelRows, first > 0, ahead_of(block, 0, 0, 0, 1),
                             first + size == k ? deltas : TileDeltas{}, f);
  }
  finish_tile(args, deltas.after, sums, fan * kPanelRows, highest, begin, num_rows, unit);
}

// Multiplies rows [begin, end) of x by one unit (fan panels).
template <class Kernel>
void run_unit(const LinearArgs& args, const Prepared& x, int64_t unit, int64_t begin, int64_t end, float* sums,
              LaneHighest* highest) {
  const int64_t k = args.weight.k, fan = args.weight.fan, panel_bytes = Kernel::panel_bytes(args.weight);
  const int64_t block_k = Kernel::block_k(k), sums_stride = fan * kPanelRows;
  const char* panels = static_cast<const char*>(args.weight.data) + unit * fan * panel_bytes;
  if (args.deltas && end - begin <= Kernel::kMaxRows && kDeltaCut<Kernel> < k) {
    run_unit_in_parts<Kernel>(args, x, unit, begin, end, highest);
    return;
  }
  if (args.deltas) args.deltas->fetch(*args.deltas, unit, 0, 1);
  if (block_k >= k) {
    // Every tile reads both panels of a gated pair, so that the next pair is prefetched.
    for_each_tile<Kernel::kMaxRows>(begin, end, [&](int64_t row, int num_rows, int64_t tile, int64_t tiles) {
      alignas(64) float buffer[Kernel::kMaxRows * 2 * kPanelRows];
      request_results(args, highest, row, num_rows, unit);
      const TileDeltas deltas = deltas_of<Kernel>(args, row, num_rows, unit);
      for (int64_t f = 0; f < fan; ++f) {
        const char* panel = panels + f * panel_bytes;
        const Ahead ahead = ahead_of(panel, panel_bytes, fan * panel_bytes, tile, tiles);
        call_last_tile<Kernel>(num_rows, x.base + row * x.row_bytes, x.row_bytes, panel, k, buffer + f * kPanelRows,
                               sums_stride, false, ahead, deltas, f);
      }
      finish_tile(args, deltas.after, buffer, sums_stride, highest, row, num_rows, unit);
    });
    return;
  }
  for (int64_t f = 0; f < fan; ++f)
    for (int64_t first = 0; first < k; first += block_k) {
      const int64_t size = k - first < block_k ? k - first : block_k;
      const char* block = panels + f * panel_bytes + Kernel::block_offset(first);
      const int64_t block_bytes = Kernel::block_offset(size);
      for_each_tile<Kernel::kMaxRows>(begin, end, [&](int64_t row, int num_rows, int64_t tile, int64_t tiles) {
        const bool is_last = first + size == k;
        if (is_last && f == 0) request_results(args, highest, row, num_rows, unit);
        const TileDeltas deltas = is_last ? deltas_of<Kernel>(args, row, num_rows, unit) : TileDeltas{};
        call_last_tile<Kernel>(num_rows, x.base + row * x.row_bytes + Kernel::x_offset(first), x.row_bytes, block, size,
                               sums + (row - begin) * sums_stride + f * kPanelRows, sums_stride, first > 0,
                               ahead_of(block, block_bytes, block_bytes, tile, tiles), deltas, f);
      });
    }
  for_each_tile<Kernel::kMaxRows>(begin, end, [&](int64_t row, int num_rows, int64_t, int64_t) {
    const TileDeltas deltas = deltas_of<Kernel>(args, row, num_rows, unit);
    finish_tile(args, deltas.after, sums + (row - begin) * sums_stride, sums_stride, highest, row, num_rows, unit);
  });
}

// Rows of x in a block, which goes through all panels before the next block: as many as fit the cache.
inline int64_t rows_per_block(int64_t rows, int64_t row_bytes, int64_t units, int num_threads, int max_rows) {
  int64_t fit = kActivationBlockBytes / row_bytes;
  if (fit < 4 * max_rows) fit = 4 * max_rows;
  int64_t blocks = (rows + fit - 1) / fit;
  // More blocks if there are too few panels for all threads, as long as each block reuses a panel often enough.
  while (blocks * units < 4 * num_threads && rows / (blocks + 1) >= 2 * max_rows) ++blocks;
  return (rows + blocks - 1) / blocks;
}

constexpr int64_t kMaxBlockRows = 1024;

template <class Kernel>
void run_linear(const LinearArgs& args, const Step& step, int thread, int num_threads) {
  const int64_t rows = step.rows(args.rows, args.fixed_rows);
  if (rows <= 0) return;
  const Prepared x = prepare_rows<Kernel>(args, step, rows, thread, num_threads);
  const int64_t units = panels_of(args.weight) / args.weight.fan;
  const int64_t row_bytes = Kernel::prepared_bytes(args.weight.k);
  int64_t block_rows = rows_per_block(rows, row_bytes, units, num_threads, Kernel::kMaxRows);
  if (block_rows > kMaxBlockRows) block_rows = kMaxBlockRows;
  const int64_t blocks = (rows + block_rows - 1) / block_rows;
  // After the rows that this thread may have prepared itself.
  float* sums = reinterpret_cast<float*>(step.thread_scratch(thread) + kPrepareAloneRows * row_bytes);
  LaneHighest* highest = step.only_highest ? args.highest : nullptr;
  if (highest) {
    highest += thread * args.highest_rows;
    for (int64_t row = 0; row < rows; ++row) highest[row] = nothing_yet();
  }
  const Range mine = split(blocks * units, thread, num_threads);
  for (int64_t task = mine.begin; task < mine.end; ++task) {
    const int64_t block = task / units, begin = block * block_rows;
    const int64_t end = begin + block_rows < rows ? begin + block_rows : rows;
    run_unit<Kernel>(args, x, task % units, begin, end, sums, highest);
  }
}

}  // namespace headrace
