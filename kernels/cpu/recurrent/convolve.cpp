// Short convolutions. Threads divide the channels; each keeps the last inputs of its own in its scratch, a row for each,
// so that a token's inputs and result are read and written in order of memory.
#include "linear/driver.h"
#include "recurrent/states.h"

namespace headrace {
namespace {

// A thread's channels of one sequence.
struct Channels {
  const ConvolveArgs& args;
  const StateSequence& sequence;
  Range own;
  int num_past;
  float* past[kMostConvolveWidth];  // [num_past] rows of [channels]: the last inputs, the oldest first

  void copy(const float* from, float* to) const { std::copy(from + own.begin, from + own.end, to + own.begin); }

  // The oldest input has made room for the newest.
  void taken(int64_t inputs) {
    std::rotate(past, past + std::min(1, num_past), past + num_past);
    passed(inputs);
  }

  void passed(int64_t inputs) const {
    sequence.stores(*args.states, inputs, [&](const int32_t* pages) {
      for (int i = 0; i < num_past; ++i)
        args.history.write(pages, i, own.begin, own.end - own.begin, past[i] + own.begin);
    });
  }

  // The result of a token, whose input takes the place of the oldest.
  void compute(int64_t token) const {
    const DType type = args.x_type;
    const void* x = row_at(args.x, token, args.x_stride, type);
    void* out = row_at(args.out, token, args.out_stride, args.out_type);
    for (int64_t at = own.begin; at < own.end; at += kLanes) {
      const int count = static_cast<int>(std::min<int64_t>(kLanes, own.end - at));
      Floats input = load_lanes(x, at + (args.gated != 0 ? 2 * args.channels : 0), count, type);
      if (args.gated != 0) input *= load_lanes(x, at, count, type);
      Floats sum = {};
      for (int tap = 0; tap <= num_past; ++tap) {
        const Floats tapped = tap < num_past ? load_lanes(past[tap], at, count, DType::kF32) : input;
        sum = fused(load_lanes(args.weight + tap * args.channels, at, count, DType::kF32), tapped, sum);
      }
      if (args.bias != nullptr) sum += load_lanes(args.bias, at, count, DType::kF32);
      sum = activate(args.activation, sum);
      if (args.gated != 0) sum *= load_lanes(x, at + args.channels, count, type);
      store_lanes(out, at, count, args.out_type, sum);
      store_lanes(past[0], at, count, DType::kF32, input);
    }
  }

  void run() {
    for (int i = 0; i < num_past; ++i) {
      if (sequence.source != nullptr)
        args.history.read(sequence.source, i, own.begin, own.end - own.begin, past[i] + own.begin);
      else
        std::fill(past[i] + own.begin, past[i] + own.end, 0.0f);
    }
    passed(0);
    for (int64_t i = 0; i < sequence.replayed; ++i) {
      copy(args.drafted.at(sequence.row, i), past[0]);
      taken(i + 1);
    }
    for (int64_t i = 0; i < sequence.count; ++i) {
      compute(sequence.first + i);
      const int64_t inputs = sequence.replayed + i + 1;
      if (inputs > sequence.commit) copy(past[0], args.drafted.at(sequence.row, inputs - sequence.commit - 1));
      taken(inputs);
    }
  }
};

}  // namespace

void convolve(const void* raw, const Step& step, int thread, int num_threads) {
  const ConvolveArgs& args = *static_cast<const ConvolveArgs*>(raw);
  float* scratch = reinterpret_cast<float*>(step.thread_scratch(thread));
  for (int64_t seq = 0; seq < step.num_seqs; ++seq) {
    const StateSequence sequence(*args.states, step, seq);
    Channels channels = {args, sequence, split(args.channels, thread, num_threads, kLanes), args.width - 1, {scratch}};
    for (int i = 1; i < channels.num_past; ++i) channels.past[i] = scratch + i * args.channels;
    channels.run();
  }
}

}  // namespace headrace

using namespace headrace;

// Needs width * channels floats of per-thread scratch.
HR_EXPORT void hr_op_convolve(const void* args, const Step& step, int thread, int num_threads) {
  convolve(args, step, thread, num_threads);
}
