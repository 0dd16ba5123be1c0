// Tokens in their order of rank: by value, highest first, and equal values by id, lowest first. No value is NaN.
#pragma once

#include <algorithm>

#include "runtime/op.h"
#include "runtime/vector.h"

namespace headrace {

struct Candidate {
  float value;
  int32_t token;
};

inline bool ranks_before(const Candidate& a, const Candidate& b) {
  return a.value != b.value ? a.value > b.value : a.token < b.token;
}

// The lanes where a > b, as bits.
inline uint32_t lanes_above(Floats a, Floats b) {
#if defined(HEADRACE_AVX512)
  return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), _CMP_GT_OQ);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(
      _mm256_movemask_ps(_mm256_cmp_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), _CMP_GT_OQ)));
#else
  const Ints above = a > b;
  uint32_t lanes = 0;
  for (int lane = 0; lane < kLanes; ++lane) lanes |= static_cast<uint32_t>(above[lane] & 1) << lane;
  return lanes;
#endif
}

constexpr uint32_t kAllLanes = (uint32_t{1} << kLanes) - 1;

// The logits of a row divided by its temperature, kLanes from `token` on, or one.
struct Tempered {
  const float* logits;
  float temperature;

  Floats lanes(int64_t token) const { return load_floats(logits + token) / temperature; }
  float one(int64_t token) const { return logits[token] / temperature; }
};

// The logits of a row.
struct Plain {
  const float* logits;

  Floats lanes(int64_t token) const { return load_floats(logits + token); }
  float one(int64_t token) const { return logits[token]; }
};

// Appends the tokens of these lanes, whose values begin at `token`.
inline int64_t append_lanes(Floats values, uint32_t lanes, int64_t token, Candidate* found, int64_t held) {
  alignas(64) float each[kLanes];
  store_floats(each, values);
  for (; lanes; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    found[held++] = {each[lane], static_cast<int32_t>(token + lane)};
  }
  return held;
}

// Writes the tokens with a value of at least `least` to `found` [vocab_size]. Returns their number.
template <class Values>
int64_t gather(const Values& values, int64_t vocab_size, float least, Candidate* found) {
  int64_t held = 0, token = 0;
  for (; token + kLanes <= vocab_size; token += kLanes) {
    const Floats lanes = values.lanes(token);
    const uint32_t below = lanes_above(all_lanes(least), lanes);
    if (below != kAllLanes) held = append_lanes(lanes, ~below & kAllLanes, token, found, held);
  }
  for (; token < vocab_size; ++token)
    if (values.one(token) >= least) found[held++] = {values.one(token), static_cast<int32_t>(token)};
  return held;
}

// Writes the `count` tokens ranked first, or all, to the front of `found` [vocab_size], in no order. Returns their
// number. Tokens above the lowest of the best so far are collected, and cut to `count` when there are twice as many.
template <class Values>
int64_t first_ranked(const Values& values, int64_t vocab_size, int64_t count, Candidate* found) {
  const int64_t most = 2 * count + 4 * kLanes;
  const bool cuts = most + 2 * kLanes <= vocab_size;
  bool is_cut = false;
  float least = 0.0f;
  int64_t held = 0, token = 0;
  const auto cut = [&] {
    std::nth_element(found, found + count - 1, found + held, ranks_before);
    held = count;
    least = found[count - 1].value;
    is_cut = true;
  };
  for (; token + kLanes <= vocab_size; token += kLanes) {
    const Floats lanes = values.lanes(token);
    // Of equal values those found before have the lower ids.
    const uint32_t better = is_cut ? lanes_above(lanes, all_lanes(least)) : kAllLanes;
    if (!better) continue;
    held = append_lanes(lanes, better, token, found, held);
    if (cuts && held > most) cut();
  }
  for (; token < vocab_size; ++token)
    if (!is_cut || values.one(token) > least) found[held++] = {values.one(token), static_cast<int32_t>(token)};
  if (held > count) cut();
  return held;
}

// The sum of e^(value - first) over the row. Short runs are summed in float and the runs in double, so that errors stay
// near 2^-24 of a run. each(value - first, weight): called for each vector; end_run(): after the vectors of a run.
template <class Values, class Each, class EndRun>
double total_weight(const Values& values, int64_t vocab_size, float first, Each each, EndRun end_run) {
  double total = 0.0;
  int64_t token = 0;
  while (token + kLanes <= vocab_size) {
    Floats run = {};
    for (int step = 0; step < 16 && token + kLanes <= vocab_size; ++step, token += kLanes) {
      const Floats ahead = values.lanes(token) - first, weight = exponential<true>(ahead);
      run += weight;
      each(ahead, weight);
    }
    total += static_cast<double>(sum_of_lanes(run));
    end_run();
  }
  for (; token < vocab_size; ++token) total += std::exp(static_cast<double>(values.one(token)) - static_cast<double>(first));
  return total;
}

inline bool is_nan(float value) { return value != value; }

struct Highest {
  float logit;  // NaN if the part contains a NaN
  int64_t token;
};

// The highest logit of a part of a row; of equals the first, so parts are merged in rising order of tokens.
// Inlined, it takes an eighth longer, as its callers hold much else in registers.
inline __attribute__((noinline)) Highest highest_of(const float* logits, Range part) {
  Floats most = all_lanes(-__builtin_inff());
  Ints strange = {};
  int64_t i = part.begin;
  for (; i + kLanes <= part.end; i += kLanes) {
    const Floats value = load_floats(logits + i);
    strange |= value != value;
    most = larger(value, most);
  }
  float highest = largest_lane(most);
  bool has_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) has_nan |= strange[lane] != 0;
  for (; i < part.end; ++i) {
    has_nan |= is_nan(logits[i]);
    if (logits[i] > highest) highest = logits[i];
  }
  for (i = part.begin; i < part.end; ++i)
    if (has_nan ? is_nan(logits[i]) : logits[i] == highest) return {logits[i], i};
  return {highest, part.begin};  // an empty part
}

}  // namespace headrace
