// Packs GGUF blocks, and unpacks single rows. The formats are those of ggml; gguf/quants.py of the gguf package is the
// reference for their meaning.
#include "linear/quant.h"

namespace headrace {
namespace {

// One block of 32 weights of one row with the fields of the file, one code per byte.
struct Block {
  uint8_t codes[kBlock];
  uint16_t d, m;      // fp16 bits; for 256-types those of the whole 256-block
  uint8_t scale[2];   // 256-types: the block's scale and min (Q6_K: the scales of its halves)
};

uint16_t read_u16(const uint8_t* from) {
  uint16_t value;
  std::memcpy(&value, from, 2);
  return value;
}

void read_nibbles(const uint8_t* from, uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = from[i] & 15;
    codes[16 + i] = from[i] >> 4;
  }
}

// Q4_0, Q4_1, Q5_0, Q5_1: d, [m], [a fifth bit of each weight], nibbles. Q8_0: d, signed bytes.
void read_small_block(WeightType type, const uint8_t* from, Block* block) {
  const QuantLayout layout = layout_of(type);
  block->d = read_u16(from);
  from += 2;
  if (layout.minimum) {
    block->m = read_u16(from);
    from += 2;
  }
  if (layout.bits == 8) {
    for (int i = 0; i < kBlock; ++i) block->codes[i] = from[i] ^ 0x80;
    return;
  }
  if (layout.bits == 4) return read_nibbles(from, block->codes);
  uint32_t high;
  std::memcpy(&high, from, 4);
  read_nibbles(from + 4, block->codes);
  for (int i = 0; i < kBlock; ++i) block->codes[i] |= (high >> i & 1) << 4;
}

// Q4_K, Q5_K: d, dmin, 12 bytes of 6-bit scales and mins, [fifth bits], nibbles of two sub-blocks in 32 bytes.
void read_k_block(WeightType type, const uint8_t* from, int sub, Block* block) {
  const bool five = layout_of(type).bits == 5;
  const uint8_t *scales = from + 4, *high = from + 16, *low = from + (five ? 48 : 16) + sub / 2 * 32;
  block->d = read_u16(from);
  block->m = read_u16(from + 2);
  if (sub < 4) {
    block->scale[0] = scales[sub] & 63;
    block->scale[1] = scales[sub + 4] & 63;
  } else {
    block->scale[0] = static_cast<uint8_t>((scales[sub + 4] & 15) | (scales[sub - 4] >> 6 << 4));
    block->scale[1] = static_cast<uint8_t>((scales[sub + 4] >> 4) | (scales[sub] >> 6 << 4));
  }
  for (int i = 0; i < kBlock; ++i) {
    block->codes[i] = sub % 2 ? low[i] >> 4 : low[i] & 15;
    if (five) block->codes[i] |= (high[i] >> sub & 1) << 4;
  }
}

// Q6_K: 128 bytes of nibbles, 64 of two-bit parts, 16 signed scales, d. Each half of the 256 has four blocks of 32.
void read_q6_block(const uint8_t* from, int sub, Block* block) {
  const int half = sub / 4, quarter = sub % 4;
  const uint8_t *low = from + 64 * half + 32 * (quarter % 2), *high = from + 128 + 32 * half;
  for (int i = 0; i < kBlock; ++i) {
    const int nibble = quarter < 2 ? low[i] & 15 : low[i] >> 4;
    block->codes[i] = static_cast<uint8_t>(nibble | (high[i] >> 2 * quarter & 3) << 4);
  }
  block->scale[0] = from[192 + 2 * sub];
  block->scale[1] = from[192 + 2 * sub + 1];
  block->d = read_u16(from + 208);
  block->m = 0;
}

void read_block(WeightType type, const uint8_t* row, int64_t index, Block* block) {
  const QuantLayout layout = layout_of(type);
  if (!layout.super) return read_small_block(type, row + index * layout.file_bytes, block);
  const uint8_t* from = row + index / kSuperBlocks * layout.file_bytes;
  const int sub = static_cast<int>(index % kSuperBlocks);
  return layout.two_scales() ? read_q6_block(from, sub, block) : read_k_block(type, from, sub, block);
}

void put_codes(const QuantLayout& layout, const uint8_t* codes, int row, uint8_t* high, uint8_t* low) {
  constexpr int kLine = kPanelRows * 4;
  high += row * 4;
  low += row * 4;
  for (int g = 0; g < 8; ++g)
    for (int j = 0; j < 4; ++j) {
      const uint8_t code = codes[4 * g + j];
      if (layout.bits == 8) {
        low[g * kLine + j] = code;
        continue;
      }
      low[g % 4 * kLine + j] |= static_cast<uint8_t>((code & 15) << (g < 4 ? 0 : 4));
      if (layout.bits == 5) high[j] |= static_cast<uint8_t>((code >> 4) << g);
      if (layout.bits == 6) high[g / 4 * kLine + j] |= static_cast<uint8_t>((code >> 4) << 2 * (g % 4));
    }
}

uint8_t get_code(const QuantLayout& layout, const uint8_t* high, const uint8_t* low, int row, int k) {
  constexpr int kLine = kPanelRows * 4;
  const int g = k / 4, at = row * 4 + k % 4;
  if (layout.bits == 8) return low[g * kLine + at];
  int code = low[g % 4 * kLine + at] >> (g < 4 ? 0 : 4) & 15;
  if (layout.bits == 5) code |= (high[at] >> g & 1) << 4;
  if (layout.bits == 6) code |= (high[g / 4 * kLine + at] >> 2 * (g % 4) & 3) << 4;
  return static_cast<uint8_t>(code);
}

void pack_block(const QuantLayout& layout, const Block& block, int row, uint8_t* super, uint8_t* to) {
  auto* halves = reinterpret_cast<uint16_t*>(layout.super ? super : to);
  halves[row] = block.d;
  if (layout.minimum) halves[kPanelRows + row] = block.m;
  if (layout.super) {
    to[row] = block.scale[0];
    to[kPanelRows + row] = block.scale[1];
  }
  uint8_t* high = to + layout.scale_bytes();
  put_codes(layout, block.codes, row, high, high + layout.high_bytes());
}

}  // namespace

int64_t quant_panel_bytes(WeightType type, int64_t k) { return layout_of(type).panel_bytes(k); }

int64_t quant_prepared_bytes(WeightType, int64_t k) { return bytes_of_blocks(k); }

void pack_quant_panels(const PackedWeight& w, const void* source, int64_t source_stride, void* packed, Range panels) {
  const QuantLayout layout = layout_of(w.type);
  const int64_t bytes = layout.panel_bytes(w.k);
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    uint8_t* to = static_cast<uint8_t*>(packed) + panel * bytes;
    std::memset(to, 0, static_cast<size_t>(bytes));  // padding rows have scales of 0, and put_codes only sets bits
    for (int row = 0; row < kPanelRows; ++row) {
      const int64_t from_row = source_row(w, panel, row);
      if (from_row < 0) continue;
      const uint8_t* from = static_cast<const uint8_t*>(source) + from_row * source_stride;
      for (int64_t index = 0; index < w.k / kBlock; ++index) {
        Block block;
        read_block(w.type, from, index, &block);
        pack_block(layout, block, row, to + layout.super_at(index), to + layout.block_at(index));
      }
    }
  }
}

void unpack_quant_row(const PackedWeight& w, int64_t row, float* out) {
  const QuantLayout layout = layout_of(w.type);
  int64_t panel;
  int at;
  place_of_row(w, row, &panel, &at);
  const uint8_t* base = static_cast<const uint8_t*>(w.data) + panel * layout.panel_bytes(w.k);
  for (int64_t index = 0; index < w.k / kBlock; ++index) {
    const uint8_t *super = base + layout.super_at(index), *block = base + layout.block_at(index);
    const auto* halves = reinterpret_cast<const uint16_t*>(layout.super ? super : block);
    float scale[2], minimum = layout.minimum ? float_of_f16(halves[kPanelRows + at]) : 0.0f;
    scale[0] = scale[1] = float_of_f16(halves[at]);
    if (layout.two_scales()) {
      scale[0] *= static_cast<float>(static_cast<int8_t>(block[at]));
      scale[1] *= static_cast<float>(static_cast<int8_t>(block[kPanelRows + at]));
    } else if (layout.super) {
      scale[0] = scale[1] = scale[0] * block[at];
      minimum = -minimum * block[kPanelRows + at];
    }
    const uint8_t* high = block + layout.scale_bytes();
    for (int i = 0; i < kBlock; ++i) {
      const int code = get_code(layout, high, high + layout.high_bytes(), at, i);
      out[index * kBlock + i] = scale[i / 16] * static_cast<float>(code - layout.offset) + minimum;
    }
  }
}

}  // namespace headrace
