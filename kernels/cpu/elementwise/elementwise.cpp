// The ops of elementwise.h. Rows are divided among threads, computed in float and rounded once.
#include "elementwise/elementwise.h"

#include <algorithm>

#include "linear/driver.h"

namespace headrace {
namespace {

// The longest row of a norm, enough for any model; program.py and ops.py refuse longer rows.
constexpr int64_t kMostRowValues = 32768;

Range rows_of(Rows rows, int64_t fixed, const Step& step, int thread, int num_threads) {
  return split(step.rows(rows, fixed), thread, num_threads);
}

}  // namespace

void load_values(const void* from, DType type, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_floats(to + i, load_vector(from, i, type));
  for (; i < count; ++i) to[i] = load_one(from, i, type);
}

void store_values(const float* from, DType type, int64_t count, void* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_vector(to, i, type, load_floats(from + i));
  for (; i < count; ++i) store_one(to, i, type, from[i]);
}

void norm_values(NormKind kind, const float* from, int64_t count, const float* weight, const float* bias, float eps,
                 float* to) {
  // The last partial vector is read from a copy that is padded with zeros.
  const int64_t whole = count / kLanes * kLanes;
  alignas(64) float tail[kLanes] = {};
  std::copy(from + whole, from + count, tail);
  const auto at = [&](int64_t i) { return load_floats(i < whole ? from + i : tail); };
  const float size = static_cast<float>(count);
  float mean = 0.0f;
  if (kind == NormKind::kLayer) mean = sum_over(count, at) / size;
  const float variance = sum_over(count, [&](int64_t i) {
    const Floats centred = at(i) - mean;
    return centred * centred;
  }) / size;
  const float scale = 1.0f / std::sqrt(variance + eps);
  int64_t i = 0;
  for (; i < whole; i += kLanes) {
    Floats value = (load_floats(from + i) - mean) * scale;
    if (weight != nullptr) value *= load_floats(weight + i);
    if (bias != nullptr) value += load_floats(bias + i);
    store_floats(to + i, value);
  }
  for (; i < count; ++i) {
    float value = (from[i] - mean) * scale;
    if (weight != nullptr) value *= weight[i];
    if (bias != nullptr) value += bias[i];
    to[i] = value;
  }
}

void norm(const void* raw, const Step& step, int thread, int num_threads) {
  const NormArgs& args = *static_cast<const NormArgs*>(raw);
  alignas(64) float row_values[kMostRowValues];
  const bool own = args.output_thread_stride != 0;
  const int64_t groups = std::max(1, args.groups);
  const Range rows = own ? Range{0, step.rows(args.rows, args.num_rows)}
                         : rows_of(args.rows, args.num_rows, step, thread, num_threads);
  char* output = static_cast<char*>(args.output) + (own ? thread * args.output_thread_stride : 0);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const void* input = row_at(args.input, row, args.input_stride, args.input_type);
    const float* values = row_values;
    if (args.input_type == DType::kF32 && args.residual == nullptr)
      values = static_cast<const float*>(input);
    else
      load_values(input, args.input_type, args.size, row_values);
    if (args.residual != nullptr) {
      char* residual = row_at(args.residual, row, args.residual_stride, args.residual_type);
      for (int64_t i = 0; i < args.size; ++i) row_values[i] += load_one(residual, i, args.residual_type);
      store_values(row_values, args.residual_type, args.size, residual);
      // The norm is that of the rounded sum.
      if (args.residual_type != DType::kF32) load_values(residual, args.residual_type, args.size, row_values);
    }
    const int64_t count = args.size / groups;
    for (int64_t at = 0; at < args.size; at += count)
      norm_values(args.kind, values + at, count, args.weight != nullptr ? args.weight + at : nullptr,
                  args.bias != nullptr ? args.bias + at : nullptr, args.eps, row_values + at);
    char* to = row_at(output, row, args.output_stride, args.output_type);
    if (args.add_to_output != 0)
      for (int64_t i = 0; i < args.size; ++i) row_values[i] += load_one(to, i, args.output_type);
    if (args.factor != 1.0f)
      for (int64_t i = 0; i < args.size; ++i) row_values[i] *= args.factor;
    store_values(row_values, args.output_type, args.size, to);
  }
}

void activation_multiply(const void* raw, const Step& step, int thread, int num_threads) {
  const ActivationArgs& args = *static_cast<const ActivationArgs*>(raw);
  const Range rows = rows_of(args.rows, args.num_rows, step, thread, num_threads);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const void* gate = row_at(args.gate, row, args.gate_stride, args.input_type);
    const void* up = args.up != nullptr ? row_at(args.up, row, args.gate_stride, args.input_type) : nullptr;
    void* to = row_at(args.output, row, args.output_stride, args.output_type);
    int64_t i = 0;
    for (; i + kLanes <= args.size; i += kLanes) {
      const Floats value = load_vector(gate, i, args.input_type);
      store_vector(to, i, args.output_type, up == nullptr ? activate(args.kind, value)
                   : activate_gated(args.kind, value, load_vector(up, i, args.input_type)));
    }
    for (; i < args.size; ++i) {
      const Floats value = all_lanes(load_one(gate, i, args.input_type));
      store_one(to, i, args.output_type, up == nullptr ? activate(args.kind, value)[0]
                : activate_gated(args.kind, value, all_lanes(load_one(up, i, args.input_type)))[0]);
    }
  }
}

Floats xielu_of(const XieluArgs& args, Floats x) {
  const Floats bounded = larger(smaller(x, all_lanes(args.most)), all_lanes(-100.0f));
  const Floats below = (exponential_less_one(bounded) - x) * args.below;
  return choose(x > 0.0f, x * x * args.above, below) + x * args.linear;
}

void xielu(const void* raw, const Step& step, int thread, int num_threads) {
  const XieluArgs& args = *static_cast<const XieluArgs*>(raw);
  const int64_t rows = step.rows(args.rows, 0);
  // Divided by columns, so that threads share even the one row of a decode step.
  const Range columns = split(args.size, thread, num_threads, kLanes);
  for (int64_t row = 0; row < rows; ++row) {
    const void* from = row_at(args.input, row, args.input_stride, args.input_type);
    void* to = row_at(args.output, row, args.output_stride, args.output_type);
    int64_t i = columns.begin;
    for (; i + kLanes <= columns.end; i += kLanes)
      store_vector(to, i, args.output_type, xielu_of(args, load_vector(from, i, args.input_type)));
    for (; i < columns.end; ++i)
      store_one(to, i, args.output_type, xielu_of(args, all_lanes(load_one(from, i, args.input_type)))[0]);
  }
}

void embedding(const void* raw, const Step& step, int thread, int num_threads) {
  const EmbeddingArgs& args = *static_cast<const EmbeddingArgs*>(raw);
  const int32_t* const numbers = args.by_type != 0 ? step.token_types : step.positions;
  const Range rows = split(step.num_tokens, thread, num_threads);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    if (args.table != nullptr && step.token_ids[row] == kGivenRow) continue;
    char* to = row_at(args.output, row, args.output_stride, args.output_type);
    const void* token = args.table != nullptr
                            ? row_at(args.table, step.token_ids[row], args.table_stride, args.table_type)
                            : nullptr;
    const void* learned = args.positions != nullptr
                              ? row_at(args.positions, numbers[row] + args.position_offset,
                                       args.positions_stride, args.positions_type)
                              : nullptr;
    for (int64_t i = 0; i < args.size; ++i) {
      float value = token != nullptr ? load_one(token, i, args.table_type) * args.scale
                                     : load_one(to, i, args.output_type);
      if (learned != nullptr) value += load_one(learned, i, args.positions_type);
      store_one(to, i, args.output_type, value);
    }
  }
}

void add(const void* raw, const Step& step, int thread, int num_threads) {
  const AddArgs& args = *static_cast<const AddArgs*>(raw);
  const Range rows = rows_of(args.rows, args.num_rows, step, thread, num_threads);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const void* from = row_at(args.input, row, args.input_stride, args.input_type);
    void* to = row_at(args.output, row, args.output_stride, args.output_type);
    for (int64_t i = 0; i < args.size; ++i)
      store_one(to, i, args.output_type,
                load_one(to, i, args.output_type) + load_one(from, i, args.input_type) * args.scale);
  }
}

void scale_rows(const void* raw, const Step& step, int thread, int num_threads) {
  const ScaleRowsArgs& args = *static_cast<const ScaleRowsArgs*>(raw);
  const Range rows = split(step.num_tokens, thread, num_threads);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const float factor = args.factors[step.positions[row]];
    if (factor == 1.0f) continue;  // as in short contexts
    void* values = row_at(args.values, row, args.stride, args.type);
    for (int64_t i = 0; i < args.size; ++i)
      store_one(values, i, args.type, load_one(values, i, args.type) * factor);
  }
}

void gather(const void* raw, const Step& step, int thread, int num_threads) {
  const GatherArgs& args = *static_cast<const GatherArgs*>(raw);
  const bool own = args.output_thread_stride != 0;
  const Range rows = own ? Range{0, step.num_logits} : split(step.num_logits, thread, num_threads);
  char* output = static_cast<char*>(args.output) + thread * args.output_thread_stride;
  for (int64_t row = rows.begin; row < rows.end; ++row)
    std::memcpy(output + row * args.output_stride,
                static_cast<const char*>(args.input) + step.logits_rows[row] * args.input_stride,
                static_cast<size_t>(args.row_bytes));
}

void copy(const void* raw, const Step& step, int thread, int num_threads) {
  const CopyArgs& args = *static_cast<const CopyArgs*>(raw);
  const Range rows = rows_of(args.rows, 0, step, thread, num_threads);
  const char* input = static_cast<const char*>(args.input) + thread * args.input_thread_stride;
  for (int64_t row = rows.begin; row < rows.end; ++row)
    std::memcpy(static_cast<char*>(args.output) + row * args.output_stride, input + row * args.input_stride,
                static_cast<size_t>(args.row_bytes));
}

void gated_norm(const void* raw, const Step& step, int thread, int num_threads) {
  const GatedNormArgs& args = *static_cast<const GatedNormArgs*>(raw);
  alignas(64) float values[kMostRowValues];
  alignas(64) float gates[kMostRowValues];
  // Divided by groups, so that threads share even the one row of a decode step.
  const int64_t groups = args.size / args.group, rows = step.rows(args.rows, 0);
  const Range mine = split(rows * groups, thread, num_threads);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const int64_t row = i / groups, group = i % groups, first = group * args.group, count = args.group;
    const char* input = row_at(args.input, row, args.input_stride, args.input_type);
    load_values(input + first * size_of(args.input_type), args.input_type, count, values);
    if (args.weight != nullptr)
      norm_values(NormKind::kRms, values, count, args.weight + group * args.weight_stride, nullptr, args.eps, values);
    if (args.gate != nullptr) {
      const char* gate = row_at(args.gate, row, args.gate_stride, args.gate_type);
      if (args.gate_per_group != 0)
        std::fill(gates, gates + count, load_one(gate, group, args.gate_type));
      else
        load_values(gate + first * size_of(args.gate_type), args.gate_type, count, gates);
      std::fill(gates + count, gates + (count + kLanes - 1) / kLanes * kLanes, 0.0f);
      for (int64_t at = 0; at < count; at += kLanes) {
        const Floats activated = activate(args.activation, load_floats(gates + at));
        store_floats(values + at, load_floats(values + at) * activated);
      }
    }
    char* output = row_at(args.output, row, args.output_stride, args.output_type);
    store_values(values, args.output_type, count, output + first * size_of(args.output_type));
  }
}

void soft_cap(const void* raw, const Step& step, int thread, int num_threads) {
  const SoftCapArgs& args = *static_cast<const SoftCapArgs*>(raw);
  const int64_t rows = step.rows(args.rows, args.num_rows);
  // Divided by columns, so that threads share even the one row of a decode step.
  const Range columns = split(args.size, thread, num_threads, kLanes);
  for (int64_t row = 0; row < rows; ++row) {
    float* values = args.values + row * args.stride;
    int64_t i = columns.begin;
    for (; i + kLanes <= columns.end; i += kLanes)
      store_floats(values + i, hyperbolic_tangent(load_floats(values + i) / args.cap) * args.cap);
    for (; i < columns.end; ++i) values[i] = hyperbolic_tangent(all_lanes(values[i] / args.cap))[0] * args.cap;
  }
}

}  // namespace headrace

using namespace headrace;

HR_EXPORT void hr_op_norm(const void* args, const Step& step, int thread, int num_threads) {
  norm(args, step, thread, num_threads);
}

HR_EXPORT void hr_op_activation_multiply(const void* args, const Step& step, int thread, int num_threads) {
  activation_multiply(args, step, thread, num_threads);
}

HR_EXPORT void hr_op_xielu(const void* args, const Step& step, int thread, int num_threads) {
  xielu(args, step, thread, num_threads);
}

HR_EXPORT void hr_op_embedding(const void* args, const Step& step, int thread, int num_threads) {
  embedding(args, step, thread, num_threads);
}

HR_EXPORT void hr_op_add(const void* args, const Step& step, int thread, int num_threads) {
  add(args, step, thread, num_threads);
}

HR_EXPORT void hr_op_scale_rows(const void* args, const Step& step, int thread, int num_threads) {
  scale_rows(args, step, thread, num_threads);
}

HR_EXPORT void hr_op_gather(const void* args, const Step& step, int thread, int num_threads) {
  gather(args, step, thread, num_threads);
}

HR_EXPORT void hr_op_copy(const void* args, const Step& step, int thread, int num_threads) {
  copy(args, step, thread, num_threads);
}

HR_EXPORT void hr_op_gated_norm(const void* args, const Step& step, int thread, int num_threads) {
  gated_norm(args, step, thread, num_threads);
}

HR_EXPORT void hr_op_soft_cap(const void* args, const Step& step, int thread, int num_threads) {
  soft_cap(args, step, thread, num_threads);
}
