// The ops of linear layers: dispatch by weight type, the writing of results, packing, and the look-up of rows.
#include "linear_driver.h"

namespace headrace {

namespace {

// A whole panel's columns, whose residual (if any) is fp32.
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
      Floats value = activate(args.activation, load_floats(sums + v * kLanes) + bias[v]);
      if (kGated) value = value * (load_floats(sums + kPanelRows + v * kLanes) + up_bias[v]);
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

}  // namespace

void write_tile(const LinearArgs& args, const float* sums, int64_t sums_stride, int64_t first_row, int num_rows,
                int64_t unit) {
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
      value = activate(args.activation, value);
      if (gated) value = value * up;
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
      if (i + kLanes > count)  // the panel's filling is no result
        value = choose(lane_numbers() < all_lanes(static_cast<int32_t>(count - i)), value, all_lanes(-__builtin_inff()));
      const Floats most = load_floats(kept.values + i);
      const Ints is_higher = (value > most) | (value != value);
      const Ints columns = load_ints(kept.columns + i), here = lane_numbers() + static_cast<int32_t>(first + i);
      store_floats(kept.values + i, choose(is_higher, value, most));
      store_ints(kept.columns + i, is_higher ? here : columns);
    }
  }
}

namespace {

// Arguments of hr_op_pack: source [n, k] (quantised: n rows of GGUF blocks) into weight.data.
struct PackArgs {
  PackedWeight weight;
  const void* source;
  int64_t source_stride;  // elements; bytes for a quantised weight
  void* packed;           // [hr_linear_bytes]
  DType source_dtype;
};

// Arguments of hr_op_embed: out[i] = W[ids[i]], exactly (then rounded to out_dtype), times `scale`.
struct EmbedArgs {
  PackedWeight weight;
  const int32_t* ids;  // [rows], or null: the step's token_ids. Each was checked to be one of the whole table's.
  void* out;           // [rows, k]
  int64_t out_stride;  // elements
  DType out_dtype;
  Rows rows;
  int64_t fixed_rows;
  int64_t first_id;  // of W's first row; ids of rows that W does not have become zeros: another rank has them
  float scale;
};

}  // namespace
}  // namespace headrace

using namespace headrace;

HR_EXPORT void hr_op_linear(const void* raw, const Step& step, int thread, int num_threads) {
  const auto& args = *static_cast<const LinearArgs*>(raw);
  switch (args.weight.type) {
    case WeightType::kF32: return linear_f32(args, step, thread, num_threads);
    case WeightType::kF16: return linear_f16(args, step, thread, num_threads);
    case WeightType::kBF16: return linear_bf16(args, step, thread, num_threads);
    default: return linear_quant(args, step, thread, num_threads);
  }
}

HR_EXPORT void hr_op_pack(const void* raw, const Step&, int thread, int num_threads) {
  const auto& args = *static_cast<const PackArgs*>(raw);
  const Range mine = split(panels_of(args.weight), thread, num_threads);
  if (is_quantised(args.weight.type))
    pack_quant_panels(args.weight, args.source, args.source_stride, args.packed, mine);
  else
    pack_float_panels(args.weight, args.source, args.source_stride, args.source_dtype, args.packed, mine);
}

// Needs k floats of per-thread scratch.
HR_EXPORT void hr_op_embed(const void* raw, const Step& step, int thread, int num_threads) {
  const auto& args = *static_cast<const EmbedArgs*>(raw);
  const int64_t rows = step.rows(args.rows, args.fixed_rows), k = args.weight.k;
  const int32_t* ids = args.ids ? args.ids : step.token_ids;
  float* values = reinterpret_cast<float*>(step.thread_scratch(thread));
  const Range mine = split(rows, thread, num_threads);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    const int64_t id = ids[row] - args.first_id;
    if (id < 0 || id >= args.weight.n)
      std::memset(values, 0, static_cast<size_t>(k) * sizeof(float));
    else if (is_quantised(args.weight.type))
      unpack_quant_row(args.weight, id, values);
    else
      unpack_float_row(args.weight, id, values);
    const int64_t at = row * args.out_stride, whole = k / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes)
      store_vector(args.out, at + i, args.out_dtype, load_floats(values + i) * args.scale);
    for (int64_t i = whole; i < k; ++i) store_one(args.out, at + i, args.out_dtype, values[i] * args.scale);
  }
}

// Bytes of a weight in packed form; 0 when the type does not have this k.
HR_EXPORT int64_t hr_linear_bytes(const PackedWeight* weight) {
  return panels_of(*weight) * panel_bytes(weight->type, weight->k);
}

// What hr_op_linear needs for up to max_rows rows, whatever the types of x and out.
HR_EXPORT void hr_linear_scratch(const PackedWeight* weight, int64_t max_rows, ScratchNeed* need) {
  const int64_t row_bytes = prepared_row_bytes(weight->type, weight->k);
  const int64_t block_rows = max_rows < kMaxBlockRows ? max_rows : kMaxBlockRows;
  need->shared_bytes = max_rows > kPrepareAloneRows ? max_rows * row_bytes : 0;
  need->per_thread_bytes = kPrepareAloneRows * row_bytes + block_rows * weight->fan * kPanelRows * 4;
}

// So that a test can hold the ctypes mirrors to these structures.
HR_EXPORT int64_t hr_sizeof_linear_args() { return sizeof(LinearArgs); }
HR_EXPORT int64_t hr_sizeof_embed_args() { return sizeof(EmbedArgs); }
HR_EXPORT int64_t hr_sizeof_pack_args() { return sizeof(PackArgs); }
HR_EXPORT int64_t hr_sizeof_step() { return sizeof(Step); }
