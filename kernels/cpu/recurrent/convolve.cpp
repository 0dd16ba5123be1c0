// Short convolutions. Threads divide the channels, and each keeps the last inputs of kLanes channels in registers.
#include "linear/driver.h"
#include "recurrent/states.h"

namespace headrace {
namespace {

// The channels [at, at + count), count <= kLanes, of rows of values; lanes beyond are zeros.
struct Channels {
  int64_t at;
  int count;

  Floats load(const void* row, int64_t offset, DType type) const {
    if (count == kLanes) return load_vector(row, offset + at, type);
    Floats values = {};
    for (int i = 0; i < count; ++i) values[i] = load_one(row, offset + at + i, type);
    return values;
  }
  Floats load(const float* row) const { return load(row, 0, DType::kF32); }
  void store(void* row, DType type, Floats values) const {
    if (count == kLanes) return store_vector(row, at, type, values);
    for (int i = 0; i < count; ++i) store_one(row, at + i, type, values[i]);
  }
};

void convolve_channels(const ConvolveArgs& args, const Step& step, const StateSequence& sequence, Channels own) {
  const StateStep& states = *args.states;
  const int past = args.width - 1;
  Floats weights[kMostConvolveWidth], history[kMostConvolveWidth] = {};
  for (int tap = 0; tap <= past; ++tap) weights[tap] = own.load(args.weight + tap * args.channels);
  const Floats bias = args.bias != nullptr ? own.load(args.bias) : Floats{};
  if (sequence.source != nullptr)
    for (int i = 0; i < past; ++i) history[i] = own.load(args.history.at(sequence.source, i));
  const auto passed = [&](int64_t inputs) {
    sequence.stores(states, inputs, [&](const int32_t* pages) {
      for (int i = 0; i < past; ++i) own.store(args.history.at(pages, i), DType::kF32, history[i]);
    });
  };
  const auto take = [&](Floats input, int64_t inputs) {
    for (int i = 0; i + 1 < past; ++i) history[i] = history[i + 1];
    if (past > 0) history[past - 1] = input;
    passed(inputs);
  };
  passed(0);
  for (int64_t i = 0; i < sequence.replayed; ++i) take(own.load(args.drafted.at(sequence.row, i)), i + 1);
  for (int64_t i = 0; i < sequence.count; ++i) {
    const void* x = row_at(args.x, sequence.first + i, args.x_stride, args.x_type);
    Floats input = own.load(x, args.gated != 0 ? 2 * args.channels : 0, args.x_type);
    if (args.gated != 0) input *= own.load(x, 0, args.x_type);
    Floats sum = {};
    for (int tap = 0; tap < past; ++tap) sum = fused(weights[tap], history[tap], sum);
    sum = fused(weights[past], input, sum);
    if (args.bias != nullptr) sum += bias;
    sum = activate(args.activation, sum);
    if (args.gated != 0) sum *= own.load(x, args.channels, args.x_type);
    own.store(row_at(args.out, sequence.first + i, args.out_stride, args.out_type), args.out_type, sum);
    const int64_t inputs = sequence.replayed + i + 1;
    if (inputs > sequence.commit) own.store(args.drafted.at(sequence.row, inputs - sequence.commit - 1), DType::kF32, input);
    take(input, inputs);
  }
}

}  // namespace

void convolve(const void* raw, const Step& step, int thread, int num_threads) {
  const ConvolveArgs& args = *static_cast<const ConvolveArgs*>(raw);
  const Range mine = split(args.channels, thread, num_threads, kLanes);
  for (int64_t seq = 0; seq < step.num_seqs; ++seq) {
    const StateSequence sequence(*args.states, step, seq);
    for (int64_t at = mine.begin; at < mine.end; at += kLanes)
      convolve_channels(args, step, sequence, {at, static_cast<int>(std::min<int64_t>(kLanes, mine.end - at))});
  }
}

}  // namespace headrace

using namespace headrace;

HR_EXPORT void hr_op_convolve(const void* args, const Step& step, int thread, int num_threads) {
  convolve(args, step, thread, num_threads);
}
