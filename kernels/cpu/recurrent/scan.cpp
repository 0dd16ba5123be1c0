// Mamba 2's recurrence. Threads divide the heads of all sequences. A head's tokens are computed in chunks: what the rows
// of the state share is prepared once per chunk, and each row of the state then stays in registers for all its tokens.
#include "linear/driver.h"
#include "recurrent/states.h"

namespace headrace {
namespace {

constexpr int kChunk = 32;   // tokens
constexpr int kVectors = 4;  // of a row, in registers at a time
constexpr int kRows = 2;     // of the state, in registers at a time

// A thread's scratch.
struct Room {
  float* state;   // [head_dim, padded state_size]
  float *b, *c;   // [kChunk, padded state_size]
  float* x;       // [kChunk, padded head_dim]: times the step
  float* result;  // [kChunk, padded head_dim]
  Floats* sums;   // [kChunk, kRows]

  Room(char* scratch, int64_t head_dim, int64_t state_size) {
    const int64_t rows = padded(head_dim), columns = padded(state_size);
    sums = reinterpret_cast<Floats*>(scratch);
    state = reinterpret_cast<float*>(sums + kChunk * kRows);
    b = state + rows * columns;
    c = b + kChunk * columns;
    x = c + kChunk * columns;
    result = x + kChunk * rows;
  }
  static int64_t bytes(int64_t head_dim, int64_t state_size) {
    const int64_t rows = padded(head_dim), columns = padded(state_size);
    return static_cast<int64_t>(sizeof(Floats)) * kChunk * kRows + 4 * (rows * columns + 2 * kChunk * (columns + rows));
  }
};

struct Head {
  const ScanArgs& args;
  const Room& room;
  int64_t head, columns;
  float shares[kChunk];  // what remains of the state in each token

  // Prepares the inputs [begin, begin + count) of a sequence.
  void prepare(const StateSequence& sequence, int64_t begin, int64_t count) {
    const int64_t inner = args.num_heads * args.head_dim, shared = args.num_groups * args.state_size;
    const int64_t group = head / (args.num_heads / args.num_groups);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t input = begin + i, token = sequence.first + input - sequence.replayed;
      const float *mixed, *steps;
      if (input < sequence.replayed) {
        mixed = args.drafted.at(sequence.row, input);
        steps = mixed + inner + 2 * shared;
      } else {
        mixed = args.mixed + token * args.mixed_stride;
        steps = args.steps + token * args.steps_stride;
      }
      const float step = std::min(std::max(softplus(steps[head] + args.step_bias[head]), args.least_step), args.most_step);
      shares[i] = std::exp(step * args.decay[head]);
      const float* x = mixed + head * args.head_dim;
      for (int64_t p = 0; p < args.head_dim; ++p) room.x[i * padded(args.head_dim) + p] = step * x[p];
      const float* b = mixed + inner + group * args.state_size;
      copy(b, room.b + i * columns);
      copy(b + shared, room.c + i * columns);
    }
  }

  void copy(const float* from, float* to) const {
    std::memcpy(to, from, sizeof(float) * static_cast<size_t>(args.state_size));
    std::fill(to + args.state_size, to + columns, 0.0f);
  }

  // `count` tokens of the state's rows [row, row + kCount): result = h C.
  template <int kCount>
  void rows(int64_t row, int64_t count) const {
    const int64_t stride = padded(args.head_dim);
    for (int64_t i = 0; i < count * kCount; ++i) room.sums[i] = Floats{};
    int64_t at = 0;
    for (; at + kVectors * kLanes <= columns; at += kVectors * kLanes) part<kCount, kVectors>(row, at, count);
    for (; at < columns; at += kLanes) part<kCount, 1>(row, at, count);
    for (int64_t i = 0; i < count; ++i)
      for (int r = 0; r < kCount; ++r) room.result[i * stride + row + r] = sum_of_lanes(room.sums[i * kCount + r]);
  }

  template <int kCount, int kWidth>
  void part(int64_t row, int64_t at, int64_t count) const {
    const int64_t stride = padded(args.head_dim);
    Floats held[kCount][kWidth];
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kWidth; ++v) held[r][v] = load_floats(room.state + (row + r) * columns + at + v * kLanes);
    for (int64_t i = 0; i < count; ++i) {
      const float* x = room.x + i * stride + row;
      const float *b = room.b + i * columns + at, *c = room.c + i * columns + at;
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r) {
        Floats sum = room.sums[i * kCount + r];
#pragma GCC unroll 4
        for (int v = 0; v < kWidth; ++v) {
          const Floats share = held[r][v] * shares[i];
          held[r][v] = fused(all_lanes(x[r]), load_floats(b + v * kLanes), share);
          sum = fused(held[r][v], load_floats(c + v * kLanes), sum);
        }
        room.sums[i * kCount + r] = sum;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kWidth; ++v) store_floats(room.state + (row + r) * columns + at + v * kLanes, held[r][v]);
  }

  // Results of the tokens among the inputs [begin, begin + count): (h C + skip x) silu(gate).
  void finish(const StateSequence& sequence, int64_t begin, int64_t count) const {
    const int64_t stride = padded(args.head_dim), first = head * args.head_dim;
    for (int64_t i = std::max<int64_t>(0, sequence.replayed - begin); i < count; ++i) {
      const int64_t token = sequence.first + begin + i - sequence.replayed;
      const float* x = args.mixed + token * args.mixed_stride + first;
      const float* gate = args.gate + token * args.gate_stride + first;
      float* result = room.result + i * stride;
      for (int64_t p = 0; p < args.head_dim; p += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, args.head_dim - p));
        Floats input = {}, gated = {};
        std::memcpy(&input, x + p, sizeof(float) * static_cast<size_t>(lanes));
        std::memcpy(&gated, gate + p, sizeof(float) * static_cast<size_t>(lanes));
        const Floats sum = fused(all_lanes(args.skip[head]), input, load_floats(result + p));
        store_floats(result + p, sum * activate(Activation::kSilu, gated));
      }
      char* out = row_at(args.out, token, args.out_stride, args.out_type) + first * size_of(args.out_type);
      store_values(result, args.out_type, args.head_dim, out);
    }
  }

  void read(const int32_t* pages) const {
    if (pages == nullptr) return std::fill(room.state, room.state + args.head_dim * columns, 0.0f);
    for (int64_t p = 0; p < args.head_dim; ++p) {
      float* row = room.state + p * columns;
      args.state.read(pages, head, p * args.state_size, args.state_size, row);
      std::fill(row + args.state_size, row + columns, 0.0f);
    }
  }

  void write(const int32_t* pages) const {
    for (int64_t p = 0; p < args.head_dim; ++p)
      args.state.write(pages, head, p * args.state_size, args.state_size, room.state + p * columns);
  }

  void run(const StateSequence& sequence) {
    const StateStep& states = *args.states;
    const auto stored = [&](int64_t passed) {
      sequence.stores(states, passed, [&](const int32_t* pages) { write(pages); });
    };
    read(sequence.source);
    stored(0);
    for (int64_t begin = 0; begin < sequence.inputs();) {
      const int64_t count = std::min<int64_t>(kChunk, sequence.next_store(states, begin) - begin);
      prepare(sequence, begin, count);
      int64_t row = 0;
      for (; row + kRows <= args.head_dim; row += kRows) rows<kRows>(row, count);
      for (; row < args.head_dim; ++row) rows<1>(row, count);
      finish(sequence, begin, count);
      begin += count;
      stored(begin);
    }
  }
};

// Keeps the inputs of the step's drafts.
void keep_drafts(const ScanArgs& args, const Step& step, int thread, int num_threads) {
  const int64_t mixed = args.num_heads * args.head_dim + 2 * args.num_groups * args.state_size;
  const Range mine = split(step.num_seqs, thread, num_threads);
  for (int64_t seq = mine.begin; seq < mine.end; ++seq) {
    const StateSequence sequence(*args.states, step, seq);
    for (int64_t i = sequence.commit - sequence.replayed; i < sequence.count; ++i) {
      float* to = args.drafted.at(sequence.row, i - (sequence.commit - sequence.replayed));
      const int64_t token = sequence.first + i;
      std::copy_n(args.mixed + token * args.mixed_stride, mixed, to);
      std::copy_n(args.steps + token * args.steps_stride, args.num_heads, to + mixed);
    }
  }
}

}  // namespace

int64_t scan_scratch_bytes(int64_t head_dim, int64_t state_size) { return Room::bytes(head_dim, state_size); }

void scan(const void* raw, const Step& step, int thread, int num_threads) {
  const ScanArgs& args = *static_cast<const ScanArgs*>(raw);
  const Room room(step.thread_scratch(thread), args.head_dim, args.state_size);
  Head head = {args, room, 0, padded(args.state_size), {}};
  const Range mine = split(step.num_seqs * args.num_heads, thread, num_threads);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    head.head = i % args.num_heads;
    head.run(StateSequence(*args.states, step, i / args.num_heads));
  }
  int64_t committed = 0;
  for (int64_t seq = 0; seq < step.num_seqs; ++seq) committed += args.states->committed[seq];
  if (committed == step.num_tokens) return;
  step.team->barrier();  // other heads may still read the drafts that are replayed
  keep_drafts(args, step, thread, num_threads);
}

}  // namespace headrace

using namespace headrace;

HR_EXPORT void hr_op_scan(const void* args, const Step& step, int thread, int num_threads) {
  scan(args, step, thread, num_threads);
}

HR_EXPORT int64_t hr_scan_scratch_bytes(int64_t head_dim, int64_t state_size) {
  return scan_scratch_bytes(head_dim, state_size);
}
