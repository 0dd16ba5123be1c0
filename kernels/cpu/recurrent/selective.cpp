// Selective scans. Threads divide the channels; the states of a vector of channels stay in the first cache for all
// tokens of a sequence.
#include "linear/driver.h"
#include "recurrent/states.h"

namespace headrace {
namespace {

// A vector of channels of one sequence.
struct SelectiveChannels {
  const SelectiveArgs& args;
  const StateSequence& sequence;
  Floats* held;  // [state_size]
  int64_t at;
  int count;

  Floats lanes(const float* from, int64_t row) const { return load_lanes(from + row, at, count, DType::kF32); }

  void passed(int64_t inputs) const {
    sequence.stores(*args.states, inputs, [&](const int32_t* pages) {
      for (int64_t n = 0; n < args.state_size; ++n) store_lanes(args.state.at(pages, n), at, count, args.state.type, held[n]);
    });
  }

  // One input of the sequence; returns h C + skip * x.
  Floats take(const float* x, const float* steps, const float* shared) const {
    const Floats value = lanes(x, 0), step = softplus(lanes(steps, 0)), added = step * value;
    Floats sum = lanes(args.skip, 0) * value;
    for (int64_t n = 0; n < args.state_size; ++n) {
      const Floats share = exponential<true>(step * lanes(args.decay, n * args.channels));
      held[n] = fused(added, all_lanes(shared[n]), share * held[n]);
      sum = fused(held[n], all_lanes(shared[args.state_size + n]), sum);
    }
    return sum;
  }

  void run() const {
    for (int64_t n = 0; n < args.state_size; ++n)
      held[n] = sequence.source != nullptr
                    ? load_lanes(args.state.at(sequence.source, n), at, count, args.state.type)
                    : Floats{};
    passed(0);
    for (int64_t i = 0; i < sequence.inputs(); ++i) {
      if (i < sequence.replayed) {
        const float* x = args.drafted.at(sequence.row, i);
        take(x, x + args.channels, x + 2 * args.channels);
      } else {
        const int64_t token = sequence.first + i - sequence.replayed;
        const Floats result = take(args.x + token * args.x_stride, args.steps + token * args.steps_stride,
                                   args.shared + token * args.shared_stride);
        const Floats gate = activate(Activation::kSilu, lanes(args.gate, token * args.gate_stride));
        store_lanes(row_at(args.out, token, args.out_stride, args.out_type), at, count, args.out_type, result * gate);
      }
      passed(i + 1);
    }
  }
};

// Keeps the inputs of the step's drafts.
void keep_drafts(const SelectiveArgs& args, const Step& step, int thread, int num_threads) {
  const Range mine = split(step.num_seqs, thread, num_threads);
  for (int64_t seq = mine.begin; seq < mine.end; ++seq) {
    const StateSequence sequence(*args.states, step, seq);
    const int64_t first = sequence.commit - sequence.replayed;
    for (int64_t i = first; i < sequence.count; ++i) {
      float* to = args.drafted.at(sequence.row, i - first);
      const int64_t token = sequence.first + i;
      std::copy_n(args.x + token * args.x_stride, args.channels, to);
      std::copy_n(args.steps + token * args.steps_stride, args.channels, to + args.channels);
      std::copy_n(args.shared + token * args.shared_stride, 2 * args.state_size, to + 2 * args.channels);
    }
  }
}

}  // namespace

void selective_scan(const void* raw, const Step& step, int thread, int num_threads) {
  const SelectiveArgs& args = *static_cast<const SelectiveArgs*>(raw);
  Floats* held = reinterpret_cast<Floats*>(step.thread_scratch(thread));
  const Range own = split(args.channels, thread, num_threads, kLanes);
  int64_t committed = 0;
  for (int64_t seq = 0; seq < step.num_seqs; ++seq) {
    const StateSequence sequence(*args.states, step, seq);
    committed += args.states->committed[seq];
    for (int64_t at = own.begin; at < own.end; at += kLanes) {
      const int count = static_cast<int>(std::min<int64_t>(kLanes, own.end - at));
      SelectiveChannels{args, sequence, held, at, count}.run();
    }
  }
  if (committed == step.num_tokens) return;
  step.team->barrier();  // other channels may still read the drafts that are replayed
  keep_drafts(args, step, thread, num_threads);
}

}  // namespace headrace

using namespace headrace;

// Needs state_size vectors of per-thread scratch.
HR_EXPORT void hr_op_selective_scan(const void* args, const Step& step, int thread, int num_threads) {
  selective_scan(args, step, thread, num_threads);
}
