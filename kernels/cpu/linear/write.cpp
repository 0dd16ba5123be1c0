// Writes the results of linear layers, and holds what tiles share. A separate unit, since all libraries of the kernels
// (see build.py) contain it.
#include "linear/driver.h"

namespace headrace {

bool streams_weights = true;

namespace {

// Writes all columns of a panel; the residual, if any, is fp32.
template <bool kGated, DType kOut>
void write_whole_tile(const LinearArgs& args, const float* sums, int64_t sums_stride, int64_t first_row, int num_rows,
                      int64_t first) {
  constexpr int kVectors = kPanelRows / kLanes;
  const int64_t columns = args.weight.n / args.weight.fan;
  const float* residual = static_cast<const float*>(args.residual);
  if (residual) residual += first_row * args.residual_stride + first;
  Floats bias[kVectors] = {}, up_bias[kVectors] = {};
  if (args.bias) {
    for (int v = 0; v < kVectors; ++v) {
      bias[v] = load_floats(args.bias + first + v * kLanes);
      if (kGated) up_bias[v] = load_floats(args.bias + columns + first + v * kLanes);
    }
  }
  int64_t out_at = first_row * args.out_stride + first;
  for (int row = 0; row < num_rows; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      Floats value = load_floats(sums + v * kLanes) + bias[v];
      if constexpr (kGated)
        value = activate_gated(args.activation, value, load_floats(sums + kPanelRows + v * kLanes) + up_bias[v]);
      else if (args.activation != Activation::kNone)
        value = activate(args.activation, value);
      if (residual) value = value + load_floats(residual + v * kLanes);
      store_vector(args.out, out_at + v * kLanes, kOut, value);
    }
    sums += sums_stride;
    out_at += args.out_stride;
    if (residual) residual += args.residual_stride;
  }
}

template <bool kGated>
void write_whole_tile(const LinearArgs& args, const float* sums, int64_t sums_stride, int64_t first_row, int num_rows,
                      int64_t first) {
  const auto write = args.out_dtype == DType::kF32    ? write_whole_tile<kGated, DType::kF32>
                     : args.out_dtype == DType::kBF16 ? write_whole_tile<kGated, DType::kBF16>
                                                      : write_whole_tile<kGated, DType::kF16>;
  write(args, sums, sums_stride, first_row, num_rows, first);
}

// out[add_to[row]] += (sums + bias) * scale for each row. Every column is one lane of one multiply-add, so that a
// result does not depend on where its panel ends.
void add_tile(const LinearArgs& args, const float* sums, int64_t sums_stride, int64_t first_row, int num_rows,
              int64_t unit) {
  const int64_t first = unit * kPanelRows;
  const int64_t count = args.weight.n - first < kPanelRows ? args.weight.n - first : kPanelRows;
  for (int row = 0; row < num_rows; ++row) {
    const Floats scale = all_lanes(args.scales[first_row + row]);
    float* to = static_cast<float*>(args.out) + args.add_to[first_row + row] * args.out_stride + first;
    for (int64_t i = 0; i < count; i += kLanes) {
      Floats value = load_floats(sums + row * sums_stride + i);
      if (i + kLanes <= count) {
        if (args.bias) value = value + load_floats(args.bias + first + i);
        store_floats(to + i, fused(value, scale, load_floats(to + i)));
        continue;
      }
      alignas(64) float line[kLanes] = {};
      if (args.bias) {
        std::memcpy(line, args.bias + first + i, static_cast<size_t>(count - i) * sizeof(float));
        value = value + load_floats(line);
      }
      std::memcpy(line, to + i, static_cast<size_t>(count - i) * sizeof(float));
      store_floats(line, fused(value, scale, load_floats(line)));
      std::memcpy(to + i, line, static_cast<size_t>(count - i) * sizeof(float));
    }
  }
}

}  // namespace

void write_tile(const LinearArgs& args, const float* sums, int64_t sums_stride, int64_t first_row, int num_rows,
                int64_t unit) {
  if (args.add_to) return add_tile(args, sums, sums_stride, first_row, num_rows, unit);
  const int64_t columns = args.weight.n / args.weight.fan, first = unit * kPanelRows;
  const int64_t count = columns - first < kPanelRows ? columns - first : kPanelRows;
  const bool gated = args.weight.fan == 2;
  if (count == kPanelRows && (!args.residual || args.residual_dtype == DType::kF32))
    return (gated ? write_whole_tile<true> : write_whole_tile<false>)(args, sums, sums_stride, first_row, num_rows,
                                                                      first);
  for (int row = 0; row < num_rows; ++row) {
    const float* from = sums + row * sums_stride;
    alignas(64) float line[kPanelRows];
    for (int i = 0; i < kPanelRows; i += kLanes) {
      Floats value = load_floats(from + i);
      Floats up = gated ? load_floats(from + kPanelRows + i) : Floats{};
      if (args.bias) {
        alignas(64) float bias[kLanes] = {}, up_bias[kLanes] = {};
        for (int j = 0; j < kLanes && i + j < count; ++j) {
          bias[j] = args.bias[first + i + j];
          if (gated) up_bias[j] = args.bias[columns + first + i + j];
        }
        value = value + load_floats(bias);
        up = up + load_floats(up_bias);
      }
      value = gated ? activate_gated(args.activation, value, up) : activate(args.activation, value);
      store_floats(line + i, value);
    }
    const int64_t out_at = (first_row + row) * args.out_stride + first;
    const int64_t residual_at = (first_row + row) * args.residual_stride + first;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      Floats value = load_floats(line + i);
      if (args.residual) value = value + load_vector(args.residual, residual_at + i, args.residual_dtype);
      store_vector(args.out, out_at + i, args.out_dtype, value);
    }
    for (; i < count; ++i) {
      float value = line[i];
      if (args.residual) value += load_one(args.residual, residual_at + i, args.residual_dtype);
      store_one(args.out, out_at + i, args.out_dtype, value);
    }
  }
}

void keep_highest(const LinearArgs& args, const float* sums, int64_t sums_stride, LaneHighest* rows, int num_rows,
                  int64_t unit) {
  const int64_t first = unit * kPanelRows, count = args.weight.n - first;
  for (int row = 0; row < num_rows; ++row) {
    LaneHighest& kept = rows[row];
    for (int i = 0; i < kPanelRows; i += kLanes) {
      Floats value = load_floats(sums + row * sums_stride + i);
      if (i + kLanes > count)  // leaves out the panel's padding
        value =
            choose(lane_numbers() < all_lanes(static_cast<int32_t>(count - i)), value, all_lanes(-__builtin_inff()));
      const Floats most = load_floats(kept.values + i);
      const Ints is_higher = (value > most) | (value != value);
      const Ints columns = load_ints(kept.columns + i), here = lane_numbers() + static_cast<int32_t>(first + i);
      store_floats(kept.values + i, choose(is_higher, value, most));
      store_ints(kept.columns + i, is_higher ? here : columns);
    }
  }
}

}  // namespace headrace

// Whether tiles of few rows are to prefetch weights past the second-level cache.
HR_EXPORT void hr_stream_weights(int32_t value) { headrace::streams_weights = value != 0; }
