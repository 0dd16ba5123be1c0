// The softmax of attention over one tile of keys at a time, and the merging of tiles. Scores are in base 2: a weight is
// 2^(score - largest), with log2(e) in the scale of scores, which takes the fewest operations per score.
#pragma once

#include <algorithm>

#include "attention/tile.h"

namespace headrace {

constexpr float kLog2E = 1.44269504f;

// The number of weights that are computed and added together, counted from the start of a tile.
constexpr int kWeightKeys = 2 * kLanes > kGroupKeys ? 2 * kLanes : kGroupKeys;
constexpr float kInfinity = __builtin_inff();

// How the scores of a tile follow from the products of queries and keys.
struct ScoreRule {
  float scale;
  float soft_cap;             // 0: none
  const float* key_scales;    // [keys], or null
  const float* value_scales;  // [keys], or null
  float slope = 0.0f;         // ALiBi: slope * |key position - query position| is subtracted
  float distance = 0.0f;      // key position - query position of the tile's first key
  const float* bias = nullptr;  // [keys]: added to the scores, or null
  bool root = false;            // slope * the root of that magnitude is subtracted instead

  // Scores are the products times a positive scale, so their order is that of the products.
  bool is_plain() const {
    return soft_cap == 0.0f && key_scales == nullptr && slope == 0.0f && bias == nullptr && scale > 0.0f;
  }
  // The factor from the results of score_row to scores in base 2.
  float power_scale() const { return is_plain() ? scale * kLog2E : 1.0f; }
};

// For each row its largest score (base 2) and the sum of 2^(score - largest); -inf and 0 before the first key.
struct RowStates {
  float* largest;  // [rows in whole vectors]
  float* sums;     // [rows in whole vectors]
};

// The visible keys [first, end) of a row, rounded outwards to whole steps of two vectors: [low, high).
struct Sight {
  int first, end, low, high;

  Sight(int first, int end)
      : first(first), end(end), low(first / (2 * kLanes) * (2 * kLanes)), high(round_up_to(end, 2 * kLanes)) {
    if (end <= first) low = high = 0;
  }
  bool is_edge(int key) const { return key < first || key + kLanes > end; }
  Floats only_seen(int key, Floats value, float otherwise) const {
    const Ints number = lane_numbers() + key;
    return choose((number >= first) & (number < end), value, all_lanes(otherwise));
  }
};

// Returns the largest visible score. If the rule is not plain, the products are replaced by the scores.
inline float score_row(float* scores, const Sight& sight, const ScoreRule& rule) {
  const bool plain = rule.is_plain();
  Floats most = all_lanes(-kInfinity);
  for (int key = sight.low; key < sight.high; key += kLanes) {
    Floats score = load_floats(scores + key);
    if (!plain) {
      score *= rule.scale;
      if (rule.key_scales != nullptr) score *= load_floats(rule.key_scales + key);
      if (rule.soft_cap != 0.0f) score = hyperbolic_tangent(score / rule.soft_cap) * rule.soft_cap;
      if (rule.slope != 0.0f) {
        const Floats distance = magnitude(__builtin_convertvector(lane_numbers() + key, Floats) + rule.distance);
        score -= rule.slope * (rule.root ? square_root(distance) : distance);
      }
      if (rule.bias != nullptr) score += load_floats(rule.bias + key);
      score *= kLog2E;
      store_floats(scores + key, score);
    }
    if (sight.is_edge(key)) score = sight.only_seen(key, score, -kInfinity);
    most = larger(most, score);
  }
  return plain ? largest_lane(most) * rule.power_scale() : largest_lane(most);
}

// 2^x for x <= 0, including -infinity. A relative error of 8e-5 is allowed, since it is rounded to bf16 (2^-9).
inline Floats weight_of(Floats x, const Bf16*) {
#if defined(HEADRACE_AVX512)
  // 2^f for f in [0, 1) by the polynomial of least relative error. scalef rounds x down itself, and the reduction of
  // an infinity is 0.
  const Floats f = reinterpret_cast<Floats>(
      _mm512_reduce_ps(reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  Floats p = fused(f, all_lanes(0.0780244595f), all_lanes(0.2260672453f));
  p = fused(p, f, all_lanes(0.6958335096f));
  p = fused(p, f, all_lanes(0.9999252200f));
  return times_power_of_two(p, x);
#else
  return power_of_two<false>(x);
#endif
}

inline Floats weight_of(Floats x, const float*) { return power_of_two<true>(x); }

// Stores weights, and adds them up as they were rounded: then they add up to one, and rounding does not shrink the
// output.
template <class T>
struct Weights {
  Floats sum = {};

  void add(Floats first, Floats second, T* to) {
    if constexpr (sizeof(T) == 4) {
      store_floats(to, first);
      store_floats(to + kLanes, second);
      sum += first + second;
    } else {
      store_bf16(to, first);
      store_bf16(to + kLanes, second);
      sum += load_bf16(to) + load_bf16(to + kLanes);
    }
  }
};

#if defined(HEADRACE_AVX512) && defined(HEADRACE_BF16_DOT)
template <>
struct Weights<Bf16> {
  Floats sum = {};

  void add(Floats first, Floats second, Bf16* to) {
    const __m512bh both = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first));
    std::memcpy(to, &both, sizeof(both));
    sum = reinterpret_cast<Floats>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), both, (__m512bh)_mm512_set1_epi16(0x3f80)));
  }
};
#endif

// weights[keys] = 2^(score - largest) from the results of score_row, 0 for keys that are not visible. Returns the sum
// of the weights. `keys` is a multiple of kWeightKeys.
template <class T>
inline float weigh_row(const float* scores, int keys, const Sight& sight, const ScoreRule& rule, float largest,
                       T* weights) {
  constexpr int kStep = 2 * kLanes;
  std::fill_n(weights, sight.low, T{});
  if (sight.high < keys) std::fill(weights + sight.high, weights + keys, T{});
  const Floats scale = all_lanes(rule.power_scale()), less = all_lanes(-largest);
  const auto weigh = [&](int key) {
    const Floats weight = weight_of(fused(load_floats(scores + key), scale, less), weights);
    return sight.is_edge(key) ? sight.only_seen(key, weight, 0.0f) : weight;
  };
  Weights<T> stored;
  Floats exact = {};  // before values' scales
  for (int key = sight.low; key < sight.high; key += kStep) {
    Floats first = weigh(key), second = weigh(key + kLanes);
    if (rule.value_scales != nullptr) {
      exact += first + second;
      first *= load_floats(rule.value_scales + key);
      second *= load_floats(rule.value_scales + key + kLanes);
    }
    stored.add(first, second, weights + key);
  }
  return sum_of_lanes(rule.value_scales != nullptr ? exact : stored.sum);
}

// Merges a tile's states into the rows' running ones, and computes the factors that merge their outputs: keep and take
// are [rows in whole vectors]. Always called tile by tile in the order of the context. A row's result does not depend
// on the other rows.
inline void merge_states(const RowStates& states, const RowStates& tile, int rows, float* keep, float* take) {
  const Floats none = all_lanes(-kInfinity);
  for (int row = 0; row < rows; row += kLanes) {
    const Floats before = load_floats(states.largest + row), new_one = load_floats(tile.largest + row);
    const Floats largest = larger(before, new_one);
    const Floats kept = choose(before == none, Floats{}, power_of_two<true>(before - largest));
    const Floats taken = choose(new_one == none, Floats{}, power_of_two<true>(new_one - largest));
    store_floats(keep + row, kept);
    store_floats(take + row, taken);
    store_floats(states.largest + row, largest);
    store_floats(states.sums + row, fused(load_floats(states.sums + row), kept, load_floats(tile.sums + row) * taken));
  }
}

}  // namespace headrace
