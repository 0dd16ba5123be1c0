// The softmax of attention, a tile of keys at a time, and how tiles are merged. Scores are carried in powers of two: a
// weight is 2^(score - largest), with log2(e) in the scale of scores, which leaves the fewest operations for each.
#pragma once

#include <algorithm>

#include "attention_tile.h"

namespace headrace {

constexpr float kLog2E = 1.44269504f;
constexpr float kInfinity = __builtin_inff();

// How the scores of a tile are made from the products of queries and keys.
struct ScoreRule {
  float scale;
  float soft_cap;             // 0: none
  const float* key_scales;    // [keys], or null
  const float* value_scales;  // [keys], or null

  // The order of scores is that of the products, and one multiplication makes them.
  bool is_plain() const { return soft_cap == 0.0f && key_scales == nullptr && scale > 0.0f; }
  // Of what score_row leaves, to powers of two.
  float power_scale() const { return is_plain() ? scale * kLog2E : 1.0f; }
};

// Of each row: its largest score (in powers of two), and the sum of 2^(score - largest). No key seen yet: -inf, 0.
struct RowStates {
  float* largest;  // [rows in whole vectors]
  float* sums;     // [rows in whole vectors]
};

// The keys [first, end) that a row sees, in whole vectors from `low` to `high`.
struct Sight {
  int first, end, low, high;

  Sight(int first, int end, int keys)
      : first(first), end(end), low(first / kLanes * kLanes), high(std::min(keys, round_up_to(end, kLanes))) {
    if (end <= first) low = high = 0;
  }
  bool is_edge(int key) const { return key < first || key + kLanes > end; }
  Floats only_seen(int key, Floats value, float otherwise) const {
    const Ints number = lane_numbers() + key;
    return choose((number >= first) & (number < end), value, all_lanes(otherwise));
  }
};

// The largest score in sight. Where the rule is not plain, the scores take the place of the products.
inline float score_row(float* scores, const Sight& sight, const ScoreRule& rule) {
  const bool plain = rule.is_plain();
  Floats most = all_lanes(-kInfinity);
  for (int key = sight.low; key < sight.high; key += kLanes) {
    Floats score = load_floats(scores + key);
    if (!plain) {
      score *= rule.scale;
      if (rule.key_scales != nullptr) score *= load_floats(rule.key_scales + key);
      if (rule.soft_cap != 0.0f) score = hyperbolic_tangent(score / rule.soft_cap) * rule.soft_cap;
      score *= kLog2E;
      store_floats(scores + key, score);
    }
    if (sight.is_edge(key)) score = sight.only_seen(key, score, -kInfinity);
    most = larger(most, score);
  }
  return plain ? largest_lane(most) * rule.power_scale() : largest_lane(most);
}

// The sum of weights as they were rounded, so that they add up to one and rounding does not shrink the output.
template <class T>
struct WeightSum {
  Floats sum = {};
  void add(const T* weights) { sum += load_weights(weights); }
  float total() const { return sum_of_lanes(sum); }
};

#if defined(HEADRACE_AVX512) && defined(HEADRACE_BF16_DOT)
template <>
struct WeightSum<Bf16> {
  __m256 sum = {};
  void add(const Bf16* weights) {
    const __m256i rounded = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights));
    sum = _mm256_dpbf16_ps(sum, (__m256bh)rounded, (__m256bh)_mm256_set1_epi16(0x3f80));
  }
  float total() const { return _mm512_reduce_add_ps(_mm512_zextps256_ps512(sum)); }
};
#endif

// What score_row left [keys] -> weights[keys] = 2^(score - largest), 0 out of sight; returns the sum of weights.
template <class T>
inline float weigh_row(const float* scores, int keys, const Sight& sight, const ScoreRule& rule, float largest,
                       T* weights) {
  for (int key = 0; key < sight.low; key += kLanes) store_weights(weights + key, Floats{});
  for (int key = sight.high; key < keys; key += kLanes) store_weights(weights + key, Floats{});
  const Floats scale = all_lanes(rule.power_scale()), less = all_lanes(-largest);
  if (rule.value_scales != nullptr) {
    Floats sum = {};
    for (int key = sight.low; key < sight.high; key += kLanes) {
      Floats weight = power_of_two<sizeof(T) == 4>(fused(load_floats(scores + key), scale, less));
      if (sight.is_edge(key)) weight = sight.only_seen(key, weight, 0.0f);
      sum += weight;
      store_weights(weights + key, weight * load_floats(rule.value_scales + key));
    }
    return sum_of_lanes(sum);
  }
  WeightSum<T> sum;
  for (int key = sight.low; key < sight.high; key += kLanes) {
    Floats weight = power_of_two<sizeof(T) == 4>(fused(load_floats(scores + key), scale, less));
    if (sight.is_edge(key)) weight = sight.only_seen(key, weight, 0.0f);
    store_weights(weights + key, weight);
    sum.add(weights + key);
  }
  return sum.total();
}

// Adds a tile's outcome to the rows' running one: output [rows, padded], tile_output [rows, tile_stride]. Always called
// tile by tile in the order of the context; a row's result does not depend on the rows beside it.
inline void merge_tile(const RowStates& states, float* output, const RowStates& tile, const float* tile_output,
                       int tile_stride, int rows, int padded) {
  const Floats none = all_lanes(-kInfinity);
  alignas(64) float keep[kLanes], take[kLanes];
  for (int first = 0; first < rows; first += kLanes) {
    const Floats before = load_floats(states.largest + first), new_one = load_floats(tile.largest + first);
    const Floats largest = larger(before, new_one);
    const Floats kept = choose(before == none, Floats{}, power_of_two<true>(before - largest));
    const Floats taken = choose(new_one == none, Floats{}, power_of_two<true>(new_one - largest));
    store_floats(keep, kept);
    store_floats(take, taken);
    store_floats(states.largest + first, largest);
    store_floats(states.sums + first,
                 fused(load_floats(states.sums + first), kept, load_floats(tile.sums + first) * taken));
    for (int row = first; row < rows && row < first + kLanes; ++row) {
      if (tile.largest[row] == -kInfinity) continue;
      float* to = output + row * padded;
      const float* from = tile_output + row * tile_stride;
      if (keep[row - first] == 0.0f && take[row - first] == 1.0f) {
        std::memcpy(to, from, sizeof(float) * static_cast<size_t>(padded));
        continue;
      }
      const Floats factor = all_lanes(keep[row - first]), new_factor = all_lanes(take[row - first]);
      for (int i = 0; i < padded; i += kLanes)
        store_floats(to + i, fused(load_floats(to + i), factor, load_floats(from + i) * new_factor));
    }
  }
}

}  // namespace headrace
