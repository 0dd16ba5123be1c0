// Packs weights with group scales, and unpacks single rows.
#include "linear/groups.h"

namespace headrace {
namespace {

// The offset of group `group` in a panel, where its scales begin.
int64_t group_at(const GroupHead& head, WeightType type, int64_t group) {
  return kHeadBytes + group * (head.meta_bytes + head.group_blocks * group_code_bytes(type));
}

// The byte of the code of (k within a block, row), and the shift of its bits.
struct CodePlace {
  int64_t byte;
  int shift;
};

CodePlace place_of(WeightType type, int k, int row) {
  if (bits_of(type) == 4) return {(k % 16 / 4 * kPanelRows + row) * 4 + k % 4, k < 16 ? 0 : 4};
  if (has_integers(type)) return {(k / 4 * kPanelRows + row) * 4 + k % 4, 0};
  return {k * kPanelRows + row, 0};
}

void copy_elements(char* to, const char* from, int64_t count, int64_t size, int64_t stride) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * stride, from + i * size, static_cast<size_t>(size));
}

// The bits of an e4m3, moved into an fp16, have 1/256 of its value.
float float_of_e4m3(uint8_t code) {
  return float_of_f16(static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7)) * 256.0f;
}

}  // namespace

void pack_grouped_panels(const PackedWeight& w, const GroupSource& source, void* packed, Range panels) {
  GroupHead head = head_of(w);
  if (source.table) std::memcpy(head.table, source.table, sizeof(head.table));
  const int64_t bytes = grouped_panel_bytes(w), groups = w.k / (head.group_blocks * kBlock);
  const int64_t scale_size = size_of(w.scale_type), codes_of_group = head.group_blocks * kBlock;
  const int64_t zero_size = w.zero_type == kNoZeros ? 0 : size_of(static_cast<DType>(w.zero_type));
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    char* to = static_cast<char*>(packed) + panel * bytes;
    std::memset(to, 0, static_cast<size_t>(bytes));  // padding rows have scales of 0
    std::memcpy(to, &head, sizeof(head));
    for (int row = 0; row < kPanelRows; ++row) {
      const int64_t from_row = source_row(w, panel, row);
      if (from_row < 0) continue;
      const auto* codes = static_cast<const uint8_t*>(source.codes) + from_row * source.stride;
      for (int64_t group = 0; group < groups; ++group) {
        char* meta = to + group_at(head, w.type, group);
        const int64_t at = (from_row * groups + group) * head.parts;
        copy_elements(meta + row * scale_size, static_cast<const char*>(source.scales) + at * scale_size, head.parts,
                      scale_size, kPanelRows * scale_size);
        if (zero_size)
          copy_elements(meta + head.parts * kPanelRows * scale_size + row * zero_size,
                        static_cast<const char*>(source.zeros) + at * zero_size, head.parts, zero_size,
                        kPanelRows * zero_size);
        auto* block = reinterpret_cast<uint8_t*>(meta + head.meta_bytes);
        for (int64_t i = 0; i < codes_of_group; ++i) {
          const int64_t k = group * codes_of_group + i;
          const uint8_t code = bits_of(w.type) == 4 ? codes[k / 2] >> (k % 2 * 4) & 15 : codes[k];
          const CodePlace place = place_of(w.type, static_cast<int>(i % kBlock), row);
          block[i / kBlock * group_code_bytes(w.type) + place.byte] |= static_cast<uint8_t>(code << place.shift);
        }
      }
    }
  }
}

void unpack_grouped_row(const PackedWeight& w, int64_t row, float* out) {
  int64_t panel;
  int at;
  place_of_row(w, row, &panel, &at);
  const char* base = static_cast<const char*>(w.data) + panel * grouped_panel_bytes(w);
  GroupHead head;
  std::memcpy(&head, base, sizeof(head));
  const int64_t codes_of_group = head.group_blocks * kBlock;
  for (int64_t k = 0; k < w.k; ++k) {
    const char* meta = base + group_at(head, w.type, k / codes_of_group);
    const int64_t in_group = k % codes_of_group, part = head.parts == 2 ? in_group / 16 : 0;
    const CodePlace place = place_of(w.type, static_cast<int>(k % kBlock), at);
    const char* block = meta + head.meta_bytes + in_group / kBlock * group_code_bytes(w.type);
    int code = static_cast<uint8_t>(block[place.byte]) >> place.shift;
    if (bits_of(w.type) == 4) code &= 15;
    const float scale = load_one(meta, part * kPanelRows + at, head.scale_type);
    float value;
    if (has_integers(w.type)) {
      float zero = bits_of(w.type) == 4 ? 8.0f : 128.0f;
      if (head.zero_type != kNoZeros)
        zero = load_one(meta + head.parts * kPanelRows * size_of(head.scale_type), part * kPanelRows + at,
                        static_cast<DType>(head.zero_type));
      value = static_cast<float>(code) - zero;
    } else {
      value = w.type == WeightType::kFloat4Groups ? head.table[code] : float_of_e4m3(static_cast<uint8_t>(code));
    }
    out[w.order ? w.order[k] : k] = scale * value;
  }
}

}  // namespace headrace
