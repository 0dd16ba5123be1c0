// Linear attention with states that decay. Threads divide the heads of all sequences. A head's tokens are computed in
// chunks: queries, keys, values and decays are prepared once per chunk, and each tile of the state's columns then stays
// in the first cache for all its tokens.
#include "linear/driver.h"
#include "recurrent/states.h"

namespace headrace {
namespace {

constexpr int kLinearTokens = 32;  // of a chunk
constexpr int kLinearVectors = 4;     // vectors of a row of the state

// A thread's scratch.
struct LinearRoom {
  int64_t keys, columns;             // key_dim and value_dim in whole vectors
  float* state;                      // [key_dim, columns]
  float *query, *key, *share, *fade;  // [kLinearTokens, keys]: what remains of a row of the state, and that times the key
  float *value, *result;             // [kLinearTokens, columns]

  LinearRoom(char* from, int64_t key_dim, int64_t value_dim) : keys(padded(key_dim)), columns(padded(value_dim)) {
    state = reinterpret_cast<float*>(from);
    query = state + keys * columns;
    key = query + kLinearTokens * keys;
    share = key + kLinearTokens * keys;
    fade = share + kLinearTokens * keys;
    value = fade + kLinearTokens * keys;
    result = value + kLinearTokens * columns;
  }
  static int64_t bytes(int64_t key_dim, int64_t value_dim) {
    const int64_t keys = padded(key_dim), columns = padded(value_dim);
    return 4 * (keys * columns + kLinearTokens * (4 * keys + 2 * columns));
  }
};

// x / |x|; lanes beyond `count` are zeros.
void make_unit(float* x, int64_t count) {
  Floats sum = {};
  for (int64_t at = 0; at < count; at += kLanes) sum = fused(load_floats(x + at), load_floats(x + at), sum);
  const float inverse = 1.0f / std::sqrt(sum_of_lanes(sum) + 1e-6f);
  for (int64_t at = 0; at < count; at += kLanes) store_floats(x + at, load_floats(x + at) * inverse);
}

struct LinearHead {
  const LinearAttentionArgs& args;
  const LinearRoom& room;
  int64_t head;
  float* state;         // [key_dim, room.columns]: in the scratch, or a sequence's own pages
  float rates[kLinearTokens];

  void load(const void* from, DType type, int64_t first, int64_t count, float* to) const {
    load_values(static_cast<const char*>(from) + first * size_of(type), type, count, to);
    std::fill(to + count, to + padded(count), 0.0f);
  }

  // Prepares the inputs [begin, begin + count) of a sequence.
  void prepare(const StateSequence& sequence, int64_t begin, int64_t count) {
    const int64_t keys = args.num_key_heads * args.key_dim, values = args.num_heads * args.value_dim;
    const int64_t key_head = args.key_of_head[head];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t input = begin + i, token = sequence.first + input - sequence.replayed;
      const void* mixed;
      const float *decays, *rate;
      DType type = args.mixed_type;
      if (input < sequence.replayed) {
        const float* drafted = args.drafted.at(sequence.row, input);
        mixed = drafted, type = DType::kF32;
        decays = drafted + 2 * keys + values;
        rate = decays + args.num_heads * args.decay_columns;
      } else {
        mixed = row_at(args.mixed, token, args.mixed_stride, type);
        decays = args.decays + token * args.decays_stride;
        rate = args.rates + token * args.rates_stride;
      }
      float *query = room.query + i * room.keys, *key = room.key + i * room.keys;
      load(mixed, type, key_head * args.key_dim, args.key_dim, query);
      load(mixed, type, keys + key_head * args.key_dim, args.key_dim, key);
      load(mixed, type, 2 * keys + head * args.value_dim, args.value_dim, room.value + i * room.columns);
      if (args.unit_keys != 0) make_unit(query, args.key_dim), make_unit(key, args.key_dim);
      for (int64_t at = 0; at < args.key_dim; at += kLanes) store_floats(query + at, load_floats(query + at) * args.scale);
      fade(decays, i);
      if (args.correction != 0.0f) rates[i] = args.correction / (1.0f + std::exp(-rate[head]));
    }
  }

  // What remains of the state in token i.
  void fade(const float* decays, int64_t i) const {
    const float rate = args.decay[head], *key = room.key + i * room.keys;
    float *share = room.share + i * room.keys, *fade = room.fade + i * room.keys;
    const int64_t columns = args.decay_columns, first = head * columns;
    if (columns <= 1) {
      const float step = columns == 0 ? 1.0f : decays[first] + args.decay_bias[first];
      const float logarithm = args.decay_floor != 0.0f ? args.decay_floor / (1.0f + std::exp(rate * step))
                              : columns == 0           ? rate
                                                       : rate * softplus(step);
      std::fill(share, share + args.key_dim, std::exp(logarithm));
    } else {
      for (int64_t c = 0; c < columns; c += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, columns - c));
        const Floats bias = load_lanes(args.decay_bias, first + c, lanes, DType::kF32);
        const Floats step = load_lanes(decays, first + c, lanes, DType::kF32) + bias;
        const Floats logarithm = args.decay_floor != 0.0f ? args.decay_floor / (1.0f + exponential<true>(rate * step))
                                                          : rate * softplus(step);
        store_floats(share + c, exponential<true>(logarithm));
      }
    }
    for (int64_t c = 0; c < args.key_dim; ++c) fade[c] = share[c] * key[c];
  }

  // `count` tokens of kWidth vectors of the state's columns, from column `at` on.
  template <int kWidth>
  void tile(int64_t at, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      const float *query = room.query + i * room.keys, *key = room.key + i * room.keys;
      const float *share = room.share + i * room.keys, *fade = room.fade + i * room.keys;
      Floats added[kWidth], even[kWidth] = {}, odd[kWidth] = {};
#pragma GCC unroll 4
      for (int v = 0; v < kWidth; ++v) added[v] = load_floats(room.value + i * room.columns + at + v * kLanes);
      if (args.correction != 0.0f) {
        const float* from = state + at;
        int64_t row = 0;
        for (; row + 2 <= args.key_dim; row += 2, from += 2 * room.columns) {
          const Floats first = all_lanes(fade[row]), second = all_lanes(fade[row + 1]);
#pragma GCC unroll 4
          for (int v = 0; v < kWidth; ++v) {
            even[v] = fused(load_floats(from + v * kLanes), first, even[v]);
            odd[v] = fused(load_floats(from + room.columns + v * kLanes), second, odd[v]);
          }
        }
        if (row < args.key_dim)
          for (int v = 0; v < kWidth; ++v) even[v] = fused(load_floats(from + v * kLanes), all_lanes(fade[row]), even[v]);
#pragma GCC unroll 4
        for (int v = 0; v < kWidth; ++v) added[v] = (added[v] - (even[v] + odd[v])) * rates[i], even[v] = odd[v] = Floats{};
      }
      float* held = state + at;
      int64_t row = 0;
      for (; row + 2 <= args.key_dim; row += 2, held += 2 * room.columns) {
        pass<kWidth>(held, share[row], key[row], query[row], added, even);
        pass<kWidth>(held + room.columns, share[row + 1], key[row + 1], query[row + 1], added, odd);
      }
      if (row < args.key_dim) pass<kWidth>(held, share[row], key[row], query[row], added, even);
#pragma GCC unroll 4
      for (int v = 0; v < kWidth; ++v) store_floats(room.result + i * room.columns + at + v * kLanes, even[v] + odd[v]);
    }
  }

  // One row of the state: held = share * held + key * added, and sum += query * held.
  template <int kWidth>
  static void pass(float* held, float share, float key, float query, const Floats* added, Floats* sum) {
    const Floats remains = all_lanes(share), keys = all_lanes(key), queries = all_lanes(query);
#pragma GCC unroll 4
    for (int v = 0; v < kWidth; ++v) {
      const Floats value = fused(keys, added[v], load_floats(held + v * kLanes) * remains);
      store_floats(held + v * kLanes, value);
      sum[v] = fused(value, queries, sum[v]);
    }
  }

  void finish(const StateSequence& sequence, int64_t begin, int64_t count) const {
    for (int64_t i = std::max<int64_t>(0, sequence.replayed - begin); i < count; ++i) {
      const int64_t token = sequence.first + begin + i - sequence.replayed;
      char* out = row_at(args.out, token, args.out_stride, args.out_type);
      store_values(room.result + i * room.columns, args.out_type, args.value_dim,
                   out + head * args.value_dim * size_of(args.out_type));
    }
  }

  void read(const int32_t* pages) const {
    if (pages == nullptr) return std::fill(room.state, room.state + args.key_dim * room.columns, 0.0f);
    for (int64_t row = 0; row < args.key_dim; ++row) {
      float* to = room.state + row * room.columns;
      args.state.read(pages, head, row * args.value_dim, args.value_dim, to);
      std::fill(to + args.value_dim, to + room.columns, 0.0f);
    }
  }

  void write(const int32_t* pages) const {
    if (args.state.at(pages, head) == reinterpret_cast<char*>(state)) return;
    for (int64_t row = 0; row < args.key_dim; ++row)
      args.state.write(pages, head, row * args.value_dim, args.value_dim, state + row * room.columns);
  }

  // Whether the state can be computed where it lies: it is read from the sequence's own pages and stored there at the end.
  bool is_in_place(const StateSequence& sequence) const {
    return args.state.type == DType::kF32 && room.columns == args.value_dim && sequence.commit == sequence.inputs() && sequence.source != nullptr &&
           args.state.at(sequence.source, head) == args.state.at(sequence.pages, head);
  }

  void run(const StateSequence& sequence) {
    const StateStep& states = *args.states;
    const auto stored = [&](int64_t passed) {
      sequence.stores(states, passed, [&](const int32_t* pages) { write(pages); });
    };
    const bool in_place = is_in_place(sequence);
    state = in_place ? reinterpret_cast<float*>(args.state.at(sequence.pages, head)) : room.state;
    if (!in_place) read(sequence.source);
    stored(0);
    for (int64_t begin = 0; begin < sequence.inputs();) {
      const int64_t count = std::min<int64_t>(kLinearTokens, sequence.next_store(states, begin) - begin);
      prepare(sequence, begin, count);
      int64_t at = 0;
      for (; at + kLinearVectors * kLanes <= room.columns; at += kLinearVectors * kLanes) tile<kLinearVectors>(at, count);
      for (; at < room.columns; at += kLanes) tile<1>(at, count);
      finish(sequence, begin, count);
      begin += count;
      stored(begin);
    }
  }
};

// Keeps the inputs of the step's drafts.
void keep_drafts(const LinearAttentionArgs& args, const Step& step, int thread, int num_threads) {
  const int64_t mixed = 2 * args.num_key_heads * args.key_dim + args.num_heads * args.value_dim;
  const Range mine = split(step.num_seqs, thread, num_threads);
  for (int64_t seq = mine.begin; seq < mine.end; ++seq) {
    const StateSequence sequence(*args.states, step, seq);
    for (int64_t i = sequence.commit - sequence.replayed; i < sequence.count; ++i) {
      float* to = args.drafted.at(sequence.row, i - (sequence.commit - sequence.replayed));
      const int64_t token = sequence.first + i;
      load_values(row_at(args.mixed, token, args.mixed_stride, args.mixed_type), args.mixed_type, mixed, to);
      const int64_t decays = args.num_heads * args.decay_columns;
      if (args.decays != nullptr) std::copy_n(args.decays + token * args.decays_stride, decays, to + mixed);
      if (args.rates != nullptr) std::copy_n(args.rates + token * args.rates_stride, args.num_heads, to + mixed + decays);
    }
  }
}

}  // namespace

int64_t linear_attention_scratch_bytes(int64_t key_dim, int64_t value_dim) { return LinearRoom::bytes(key_dim, value_dim); }

void linear_attention(const void* raw, const Step& step, int thread, int num_threads) {
  const LinearAttentionArgs& args = *static_cast<const LinearAttentionArgs*>(raw);
  const LinearRoom room(step.thread_scratch(thread), args.key_dim, args.value_dim);
  LinearHead head = {args, room, 0, room.state, {}};
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

HR_EXPORT void hr_op_linear_attention(const void* args, const Step& step, int thread, int num_threads) {
  linear_attention(args, step, thread, num_threads);
}

HR_EXPORT int64_t hr_linear_attention_scratch_bytes(int64_t key_dim, int64_t value_dim) {
  return linear_attention_scratch_bytes(key_dim, value_dim);
}
