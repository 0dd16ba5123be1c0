// The ops of rows.h.
#include "elementwise/rows.h"

#include <algorithm>

#include "linear/driver.h"

namespace headrace {
namespace {

// Calls visit(i, lanes) for the columns of [0, size) of this thread: whole vectors, then single values.
template <class Vectors, class Single>
void by_columns(int64_t size, int thread, int num_threads, Vectors vectors, Single single) {
  const Range columns = split(size, thread, num_threads, kLanes);
  int64_t i = columns.begin;
  for (; i + kLanes <= columns.end; i += kLanes) vectors(i);
  for (; i < columns.end; ++i) single(i);
}

// Values [i, i + kLanes) of a row, with zeros beyond its end.
Floats row_vector(const float* row, int64_t i, int64_t size) {
  if (i + kLanes <= size) return load_floats(row + i);
  alignas(64) float tail[kLanes] = {};
  std::copy(row + i, row + size, tail);
  return load_floats(tail);
}

float mean_square(const float* row, int64_t size) {
  return sum_over(size, [&](int64_t i) {
    const Floats values = row_vector(row, i, size);
    return values * values;
  }) / static_cast<float>(size);
}

// to = (or, with adds, +=) from * factor, in this thread's columns
void scale_row(const float* from, float factor, int64_t size, bool adds, float* to, int thread, int num_threads) {
  by_columns(
      size, thread, num_threads,
      [&](int64_t i) {
        const Floats scaled = load_floats(from + i) * factor;
        store_floats(to + i, adds ? load_floats(to + i) + scaled : scaled);
      },
      [&](int64_t i) { to[i] = adds ? to[i] + from[i] * factor : from[i] * factor; });
}

void mix_rows(const MixRowsArgs& args, const Step& step, int thread, int num_threads) {
  const int64_t rows = step.rows(args.rows, 0), size = args.size, count = args.count;
  for (int64_t row = 0; row < rows; ++row) {
    const float *from = args.input + row * args.input_stride, *shares = args.shares + row * args.shares_stride;
    float* const to = args.output + row * args.output_stride;
    for (int64_t r = 0; r < count; ++r) {
      const auto mixed = [&](auto load, int64_t i) {
        auto sum = load(from + r * size + i);
        for (int64_t s = 0; s < count; ++s) sum += load(from + s * size + i) * shares[r * count + s];
        return sum;
      };
      by_columns(
          size, thread, num_threads,
          [&](int64_t i) { store_floats(to + r * size + i, mixed([](const float* at) { return load_floats(at); }, i)); },
          [&](int64_t i) { to[r * size + i] = mixed([](const float* at) { return *at; }, i); });
    }
  }
}

void correct_rows(const CorrectRowsArgs& args, const Step& step, int thread, int num_threads) {
  const int64_t rows = step.rows(args.rows, 0), size = args.size;
  for (int64_t row = 0; row < rows; ++row) {
    const float *from = args.input + row * args.input_stride, *active = from + args.active * size;
    const float *computed = args.computed + row * args.computed_stride, *shares = args.shares + row * args.shares_stride;
    float* const to = args.output + row * args.output_stride;
    for (int64_t r = 0; r < args.count; ++r) {
      const float share = shares[r] + 1.0f;
      const auto corrected = [&](auto load, int64_t i) {
        return (load(computed + i) - load(active + i)) * share + load(from + r * size + i);
      };
      by_columns(
          size, thread, num_threads,
          [&](int64_t i) {
            store_floats(to + r * size + i, corrected([](const float* at) { return load_floats(at); }, i));
          },
          [&](int64_t i) { to[r * size + i] = corrected([](const float* at) { return *at; }, i); });
    }
  }
}

void like_rows(const LikeRowsArgs& args, const Step& step, int thread, int num_threads) {
  const int64_t rows = step.rows(args.rows, 0), size = args.size;
  for (int64_t row = 0; row < rows; ++row) {
    const float *from = args.input + row * args.input_stride, *pattern = args.pattern + row * args.pattern_stride;
    float* const to = args.output + row * args.output_stride;
    const float wanted = std::sqrt(mean_square(pattern, size)), share = 1.0f / static_cast<float>(args.count + 1);
    if (args.adds != 0) scale_row(pattern, share, size, false, to, thread, num_threads);
    for (int64_t r = 0; r < args.count; ++r, from += size) {
      const float own = mean_square(from, size);
      const float factor = wanted / std::sqrt(own > args.least ? own : args.least);
      if (args.adds != 0)
        scale_row(from, factor * share, size, true, to, thread, num_threads);
      else
        scale_row(from, factor, size, false, to + r * size, thread, num_threads);
    }
  }
}

void sparse_gate(const SparseGateArgs& args, const Step& step, int thread, int num_threads) {
  const int64_t rows = step.rows(args.rows, 0), size = args.size;
  for (int64_t row = 0; row < rows; ++row) {
    const float *gate = args.gate + row * args.gate_stride, *up = args.up + row * args.up_stride;
    void* const to = row_at(args.output, row, args.output_stride, args.output_type);
    const float mean = sum_over(size, [&](int64_t i) { return row_vector(gate, i, size); }) / static_cast<float>(size);
    const float variance = sum_over(size, [&](int64_t i) {
      const Floats centred = row_vector(gate, i, size) - mean;
      return centred * centred;
    }) / static_cast<float>(size);
    const float lowest = mean + args.cutoff * std::sqrt(variance);
    const auto gated = [&](Floats value, Floats factor) {
      return activate_gated(args.activation, larger(value - lowest, Floats{}), factor);
    };
    by_columns(
        size, thread, num_threads,
        [&](int64_t i) { store_vector(to, i, args.output_type, gated(load_floats(gate + i), load_floats(up + i))); },
        [&](int64_t i) { store_one(to, i, args.output_type, gated(all_lanes(gate[i]), all_lanes(up[i]))[0]); });
  }
}

void scale_columns(const ScaleColumnsArgs& args, const Step& step, int thread, int num_threads) {
  const int64_t rows = step.rows(args.rows, 0);
  for (int64_t row = 0; row < rows; ++row) {
    const float* const from = args.input + row * args.input_stride;
    float* const to = args.output + row * args.output_stride;
    by_columns(
        args.size, thread, num_threads,
        [&](int64_t i) { store_floats(to + i, load_floats(from + i) * load_floats(args.factors + i)); },
        [&](int64_t i) { to[i] = from[i] * args.factors[i]; });
  }
}

}  // namespace
}  // namespace headrace

using namespace headrace;

HR_EXPORT void hr_op_mix_rows(const void* args, const Step& step, int thread, int num_threads) {
  mix_rows(*static_cast<const MixRowsArgs*>(args), step, thread, num_threads);
}

HR_EXPORT void hr_op_correct_rows(const void* args, const Step& step, int thread, int num_threads) {
  correct_rows(*static_cast<const CorrectRowsArgs*>(args), step, thread, num_threads);
}

HR_EXPORT void hr_op_like_rows(const void* args, const Step& step, int thread, int num_threads) {
  like_rows(*static_cast<const LikeRowsArgs*>(args), step, thread, num_threads);
}

HR_EXPORT void hr_op_sparse_gate(const void* args, const Step& step, int thread, int num_threads) {
  sparse_gate(*static_cast<const SparseGateArgs*>(args), step, thread, num_threads);
}

HR_EXPORT void hr_op_scale_columns(const void* args, const Step& step, int thread, int num_threads) {
  scale_columns(*static_cast<const ScaleColumnsArgs*>(args), step, thread, num_threads);
}
