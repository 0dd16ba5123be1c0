// Packs unquantised weights, and unpacks single rows.
#include "linear/float.h"

namespace headrace {
namespace {

void put_weight(char* to, int64_t index, WeightType type, float value) {
  store_one(to, index, static_cast<DType>(type), value);
}

int64_t index_in_panel(WeightType type, int64_t k, int row) {
  if (type == WeightType::kBF16) return (k / 2 * kPanelRows + row) * 2 + k % 2;
  return k * kPanelRows + row;
}

}  // namespace

static_assert(static_cast<int>(WeightType::kF32) == static_cast<int>(DType::kF32), "put_weight relies on it");
static_assert(static_cast<int>(WeightType::kBF16) == static_cast<int>(DType::kBF16), "put_weight relies on it");
static_assert(static_cast<int>(WeightType::kF16) == static_cast<int>(DType::kF16), "put_weight relies on it");

int64_t float_panel_bytes(WeightType type, int64_t k) {
  switch (type) {
    case WeightType::kF32: return FloatKernel<WeightType::kF32>::bytes_of_panel(k);
    case WeightType::kF16: return FloatKernel<WeightType::kF16>::bytes_of_panel(k);
    case WeightType::kBF16: return FloatKernel<WeightType::kBF16>::bytes_of_panel(k);
    default: return 0;
  }
}

int64_t float_prepared_bytes(WeightType type, int64_t k) {
  switch (type) {
    case WeightType::kF32: return FloatKernel<WeightType::kF32>::prepared_bytes(k);
    case WeightType::kF16: return FloatKernel<WeightType::kF16>::prepared_bytes(k);
    case WeightType::kBF16: return FloatKernel<WeightType::kBF16>::prepared_bytes(k);
    default: return 0;
  }
}

void pack_float_panels(const PackedWeight& w, const void* source, int64_t source_stride, DType source_dtype,
                       void* packed, Range panels) {
  const int64_t bytes = float_panel_bytes(w.type, w.k);
  const bool same = static_cast<int>(source_dtype) == static_cast<int>(w.type);
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    char* to = static_cast<char*>(packed) + panel * bytes;
    std::memset(to, 0, static_cast<size_t>(bytes));
    for (int row = 0; row < kPanelRows; ++row) {
      const int64_t from_row = source_row(w, panel, row);
      if (from_row < 0) continue;
      const char* from = static_cast<const char*>(source) + from_row * source_stride * size_of(source_dtype);
      if (same && w.type != WeightType::kF32) {  // copies the bits without converting to float
        const auto* bits = reinterpret_cast<const uint16_t*>(from);
        for (int64_t k = 0; k < w.k; ++k) reinterpret_cast<uint16_t*>(to)[index_in_panel(w.type, k, row)] = bits[k];
      } else {
        for (int64_t k = 0; k < w.k; ++k)
          put_weight(to, index_in_panel(w.type, k, row), w.type, load_one(from, k, source_dtype));
      }
    }
  }
}

void unpack_float_row(const PackedWeight& w, int64_t row, float* out) {
  int64_t panel;
  int in_panel;
  place_of_row(w, row, &panel, &in_panel);
  const char* from = static_cast<const char*>(w.data) + panel * float_panel_bytes(w.type, w.k);
  for (int64_t k = 0; k < w.k; ++k)
    out[k] = load_one(from, index_in_panel(w.type, k, in_panel), static_cast<DType>(w.type));
}

}  // namespace headrace
