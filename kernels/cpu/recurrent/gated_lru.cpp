// Real-gated linear recurrences. Threads divide the heads, whose channels their gates mix; a head's matrices serve one
// sequence after another.
#include "linear/driver.h"
#include "recurrent/states.h"

namespace headrace {
namespace {

constexpr int kGatedTokens = 4;  // at a time

inline Floats square_root(Floats values) {
  Floats roots;
  for (int i = 0; i < kLanes; ++i) roots[i] = std::sqrt(values[i]);
  return roots;
}

// The channels of one head of one sequence.
struct GatedHead {
  const GatedLruArgs& args;
  const StateSequence& sequence;
  int64_t head, first;  // channel
  float* state;         // [head_dim]

  const float* input(int64_t i) const {
    if (i < sequence.replayed) return args.drafted.at(sequence.row, i) + first;
    return args.x + (sequence.first + i - sequence.replayed) * args.x_stride + first;
  }

  // The inputs [begin, begin + kCount) in the channels [at, at + count) of the head.
  template <int kCount>
  void take(int64_t begin, int64_t at, int count) const {
    const auto lanes = [&](const float* from) { return load_lanes(from, at, count, DType::kF32); };
    const float* x[kCount];
    Floats gates[kCount], decays[kCount];
    for (int i = 0; i < kCount; ++i) {
      x[i] = input(begin + i);
      gates[i] = lanes(args.input_bias + first);
      decays[i] = lanes(args.recurrence_bias + first);
    }
    for (int64_t k = 0; k < args.head_dim; ++k) {
      const int64_t row = (first + k) * args.head_dim;
      const Floats input = lanes(args.input_weight + row), recurrence = lanes(args.recurrence_weight + row);
      for (int i = 0; i < kCount; ++i) {
        gates[i] = fused(all_lanes(x[i][k]), input, gates[i]);
        decays[i] = fused(all_lanes(x[i][k]), recurrence, decays[i]);
      }
    }
    const Floats rates = lanes(args.rates + first);
    Floats held = lanes(state);
    for (int i = 0; i < kCount; ++i) {
      const Floats logarithm = rates * activate(Activation::kSigmoid, decays[i]);
      Floats added = lanes(x[i]) * activate(Activation::kSigmoid, gates[i]);
      // Nothing has decayed before a sequence's first token.
      if (sequence.source != nullptr || begin + i > 0)
        added *= square_root(1.0f - exponential<true>(logarithm + logarithm));
      held = fused(exponential<true>(logarithm), held, added);
      if (begin + i < sequence.replayed) continue;
      void* out = row_at(args.out, sequence.first + begin + i - sequence.replayed, args.out_stride, args.out_type);
      store_lanes(out, first + at, count, args.out_type, held);
    }
    store_lanes(state, at, count, DType::kF32, held);
  }

  template <int kCount>
  void take_all(int64_t begin) const {
    for (int64_t at = 0; at < args.head_dim; at += kLanes)
      take<kCount>(begin, at, static_cast<int>(std::min<int64_t>(kLanes, args.head_dim - at)));
  }

  void run() const {
    const StateStep& states = *args.states;
    const auto stored = [&](int64_t passed) {
      sequence.stores(states, passed,
                      [&](const int32_t* pages) { args.state.write(pages, head, 0, args.head_dim, state); });
    };
    if (sequence.source != nullptr)
      args.state.read(sequence.source, head, 0, args.head_dim, state);
    else
      std::fill(state, state + args.head_dim, 0.0f);
    stored(0);
    for (int64_t begin = 0; begin < sequence.inputs();) {
      const int64_t end = sequence.next_store(states, begin);
      for (; begin + kGatedTokens <= end; begin += kGatedTokens) take_all<kGatedTokens>(begin);
      for (; begin < end; ++begin) take_all<1>(begin);
      stored(end);
    }
    const int64_t drafts = sequence.commit - sequence.replayed;
    for (int64_t i = drafts; i < sequence.count; ++i)
      std::copy_n(args.x + (sequence.first + i) * args.x_stride + first, args.head_dim,
                  args.drafted.at(sequence.row, i - drafts) + first);
  }
};

}  // namespace

void gated_lru(const void* raw, const Step& step, int thread, int num_threads) {
  const GatedLruArgs& args = *static_cast<const GatedLruArgs*>(raw);
  float* state = reinterpret_cast<float*>(step.thread_scratch(thread));
  const Range mine = split(args.num_heads * step.num_seqs, thread, num_threads);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const StateSequence sequence(*args.states, step, i % step.num_seqs);
    const int64_t head = i / step.num_seqs;
    GatedHead{args, sequence, head, head * args.head_dim, state}.run();
  }
}

}  // namespace headrace

using namespace headrace;

// Needs head_dim floats of per-thread scratch.
HR_EXPORT void hr_op_gated_lru(const void* args, const Step& step, int thread, int num_threads) {
  gated_lru(args, step, thread, num_threads);
}
