// The tile registers of AMX: products of blocks of 16 rows and 16 columns, at many times the speed of vectors.
#pragma once

#include "runtime/vector.h"

#if defined(HEADRACE_AVX512) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && !defined(HEADRACE_NO_AMX)
#define HEADRACE_AMX 1
#endif

namespace headrace {

// Rows and columns of a block. A tile of panels has up to two by two.
constexpr int kBlockRows = 16;
// The most pairs of bf16 along k of a block.
constexpr int kBlockPairs = 16;

#if defined(HEADRACE_AMX)
// What the registers hold: 0 to 3 sums, 4 and 5 x, 6 and 7 weights; in memory as the instruction set describes it.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Sets the shapes unless they are set already: that takes as long as a dozen products. They stay until the region ends
// (`release_shapes`), so that a thread that multiplies tile after tile of the same shapes sets them once.
inline void load_shapes(const TileShapes& shapes) {
  TileShapes present;
  _tile_storeconfig(&present);
  // GCC 12 takes only the first bytes for read and written, and may drop the stores of others; nor does it know what
  // tiles read.
  asm volatile("" : : "r"(&shapes), "r"(&present) : "memory");
  const __m512i wanted = _mm512_load_si512(&shapes), loaded = _mm512_load_si512(&present);
  if (_mm512_cmpneq_epi64_mask(wanted, loaded) != 0) _tile_loadconfig(&shapes);
}

// For products of `rows` rows of x in register 4 and `others` in register 5, by blocks of at most 64 bytes of each.
inline void set_rows(int rows, int others, int x_bytes = 64) {
  TileShapes shapes;
  shapes.row_bytes[4] = shapes.row_bytes[5] = static_cast<uint16_t>(x_bytes);
  shapes.rows[6] = shapes.rows[7] = static_cast<uint8_t>(x_bytes / 4);
  shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = static_cast<uint8_t>(rows);
  shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = static_cast<uint8_t>(others);
  load_shapes(shapes);
}

// For the products of blocks of num_rows rows, at most 16, with weights of 64 bytes of x (4: x, 6: weights) and then
// with ones of tail_bytes (5 and 7).
inline void set_shapes_with_tail(int num_rows, int tail_bytes) {
  TileShapes shapes;
  for (int i = 0; i < 6; ++i) shapes.rows[i] = static_cast<uint8_t>(num_rows);
  shapes.row_bytes[5] = static_cast<uint16_t>(tail_bytes);
  shapes.rows[7] = static_cast<uint8_t>(tail_bytes / 4);
  load_shapes(shapes);
}

// For up to 32 rows of x, the first 16 in register 4.
inline void set_shapes(int num_rows, int x_bytes = 64) {
  const int below = num_rows - kBlockRows;
  set_rows(below < 0 ? num_rows : kBlockRows, below > 0 ? below : kBlockRows, x_bytes);
}
#endif

// At the end of a thread's work: registers with contents would be saved whenever the system switches threads.
inline void release_shapes() {
#if defined(HEADRACE_AMX)
  _tile_release();
#endif
}

}  // namespace headrace
