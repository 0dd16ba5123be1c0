// The products of one attention tile in the tile registers of AMX: blocks of up to 16 rows and 64 columns. Of the pairs
// along k, the processor adds up the first products of kBlockPairs pairs (of queries and keys) or of a group's pairs (of
// weights and values), their second ones, and both to the element's sum, for any number of rows and columns.
#pragma once

#include "attention/tile.h"

#if defined(HEADRACE_AMX)
namespace headrace {

constexpr int kColumnsAtOnce = 4 * kBlockRows;
constexpr int kGroupPairs = kGroupKeys / kPairs<Bf16>;
constexpr int kFetchSteps = 2;  // steps of prefetching beside the product of a block

// Registers 0 to 3: sums; 4 and 5: queries and keys; 6 and 7: weights and values.
inline void set_block_shapes(int num_rows) {
  TileShapes shapes;
  for (const int of_rows : {0, 1, 2, 3, 4, 6}) shapes.rows[of_rows] = static_cast<uint8_t>(num_rows);
  shapes.row_bytes[6] = 4 * kGroupPairs;
  shapes.rows[5] = kBlockPairs;
  shapes.rows[7] = kGroupPairs;
  load_shapes(shapes);
}

inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

inline void store_sums(float* to, int64_t stride, int num_blocks) {
  _tile_stored(0, to, 4 * stride);
  if (num_blocks > 1) _tile_stored(1, to + kBlockRows, 4 * stride);
  if (num_blocks > 2) _tile_stored(2, to + 2 * kBlockRows, 4 * stride);
  if (num_blocks > 3) _tile_stored(3, to + 3 * kBlockRows, 4 * stride);
}

// Calls run(first row, number of rows) for at most kBlockRows at a time, with the shapes set for them.
template <class Run>
inline void by_blocks(int rows, Run run) {
  for (int row = 0; row < rows; row += kBlockRows) {
    const int num_rows = std::min(kBlockRows, rows - row);
    set_block_shapes(num_rows);
    run(row, num_rows);
  }
}

// `score_product` of steps that are a multiple of kBlockPairs.
inline void score_blocks(const Bf16* queries, int stride, int rows, const Bf16* const* groups, int num_groups, int steps,
                         float* scores, Fetch& fetch) {
  constexpr int kStep = kGroupKeys * kPairs<Bf16>;  // elements of a group per step
  by_blocks(rows, [&](int row, int) {
    for (int group = 0; group < num_groups; group += 4) {
      const int blocks = std::min(4, num_groups - group);
      const Bf16* const* const keys = groups + group;
      clear_sums();
      for (int step = 0; step < steps; step += kBlockPairs) {
        for (int i = 0; i < kFetchSteps * blocks; ++i) fetch.step();
        _tile_loadd(4, queries + row * stride + step * kPairs<Bf16>, int64_t{stride} * 2);
        _tile_loadd(5, keys[0] + step * kStep, kStep * 2);
        _tile_dpbf16ps(0, 4, 5);
        if (blocks == 1) continue;
        _tile_loadd(5, keys[1] + step * kStep, kStep * 2);
        _tile_dpbf16ps(1, 4, 5);
        if (blocks == 2) continue;
        _tile_loadd(5, keys[2] + step * kStep, kStep * 2);
        _tile_dpbf16ps(2, 4, 5);
        if (blocks == 3) continue;
        _tile_loadd(5, keys[3] + step * kStep, kStep * 2);
        _tile_dpbf16ps(3, 4, 5);
      }
      store_sums(scores + row * kTileKeys + group * kGroupKeys, kTileKeys, blocks);
    }
  });
}

inline void value_blocks(const Bf16* weights, int rows, const Bf16* const* groups, int num_groups, int padded,
                         float* output, Factors factors, Fetch& fetch) {
  constexpr int kBlock = kBlockRows * kPairs<Bf16>;  // elements of a row of values in a block
  const int64_t bytes = int64_t{padded} * 4;
  alignas(64) float made[kBlockRows * kColumnsAtOnce];
  by_blocks(rows, [&](int row, int num_rows) {
    for (int column = 0; column < padded; column += kColumnsAtOnce) {
      const int blocks = std::min(kColumnsAtOnce, padded - column) / kBlockRows;
      clear_sums();
      for (int group = 0; group < num_groups; ++group) {
        for (int i = 0; i < kFetchSteps * blocks; ++i) fetch.step();
        const Bf16* const values = groups[group] + column * kPairs<Bf16>;
        _tile_loadd(6, weights + row * kTileKeys + group * kGroupKeys, kTileKeys * 2);
        _tile_loadd(7, values, bytes);
        _tile_dpbf16ps(0, 6, 7);
        if (blocks == 1) continue;
        _tile_loadd(7, values + kBlock, bytes);
        _tile_dpbf16ps(1, 6, 7);
        if (blocks == 2) continue;
        _tile_loadd(7, values + 2 * kBlock, bytes);
        _tile_dpbf16ps(2, 6, 7);
        if (blocks == 3) continue;
        _tile_loadd(7, values + 3 * kBlock, bytes);
        _tile_dpbf16ps(3, 6, 7);
      }
      float* const to = output + row * padded + column;
      if (factors.keep == nullptr) {
        store_sums(to, padded, blocks);
        continue;
      }
      store_sums(made, kColumnsAtOnce, blocks);
      for (int i = 0; i < num_rows; ++i)
        for (int lane = 0; lane < blocks * kBlockRows; lane += kLanes) {
          float* const place = to + i * padded + lane;
          store_floats(place, join(load_floats(place), factors.keep[row + i],
                                   load_floats(made + i * kColumnsAtOnce + lane), factors.take[row + i]));
        }
    }
  });
}

}  // namespace headrace
#endif
