// One thread's share of attention: a sequence of units, each of them one tile of keys for a few query rows. While a
// unit is computed, the keys and values of the next are prefetched: their blocks are scattered in memory, and each is
// too short for the hardware to detect a stream.
//
// A unit's first key is a multiple of kWeightKeys from the start of its tile, even if a window or chunk hides some before it: a
// key's place in every sum does not depend on what is hidden.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention/attention.h"
#include "attention/softmax.h"
#include "attention/stage.h"

namespace headrace {

constexpr int kTileRows = 48;  // wanted query rows of an item, enough to make reading the keys worthwhile

struct Shape {
  int group;            // query heads per KV head
  int tokens_per_item;
  int rows;             // the most query rows of an item
  int padded;           // head_dim rounded up to whole vectors
  int values;           // value_dim rounded up to whole vectors

  int64_t partial_floats() const { return values + 2; }  // a row's output, largest score and sum
};

inline Shape shape_of(const AttentionArgs& args) {
  const int group = args.source.num_heads / args.source.cache.num_kv_heads;
  const int tokens = std::max(1, kTileRows / group);
  const int padded = round_up_to(args.source.cache.head_dim, kLanes), values = round_up_to(args.value_dim, kLanes);
  return {group, tokens, tokens * group, padded, values};
}

inline int first_visible(int position, const AttentionArgs& args) {
  if (args.chunk > 0) return std::max(0, (position / args.chunk - args.chunks_before) * args.chunk);
  return args.window > 0 ? std::max(0, position - args.window + 1) : 0;
}

// The factor of the scores of the token at `position`, which keeps attention sharp in long contexts.
inline float growth_of(int position, const AttentionArgs& args) {
  if (args.grow_after <= 0 || position <= args.grow_after) return 1.0f;
  return std::log(static_cast<float>(position)) / std::log(static_cast<float>(args.grow_after));
}

// The tokens of a sequence that others attend to.
inline int num_keys_of(const Step& step, int64_t seq) {
  return step.key_lens == nullptr ? step.seq_lens[seq] : step.key_lens[seq];
}

// One more than the last position that the token at `position` sees in a context of `length` tokens.
inline int end_visible(int position, int length, const AttentionArgs& args) {
  if (args.both_sides == 0) return position + 1;
  return args.window > 0 ? std::min(length, position + args.window) : length;
}

inline char* head_at(const void* base, int64_t row, int64_t stride, int head, const RotaryArgs& args) {
  return const_cast<char*>(row_at(base, row, stride, args.type)) + head * args.cache.head_dim * size_of(args.type);
}

// Some tokens of one sequence and the query heads of one KV head.
struct Item {
  int64_t seq;
  int64_t first_row;  // the item's first row of the step
  int tokens;
  int first_position;
  int end_key;  // one more than the last position that any of these tokens sees
  int kv_head;
  int first_tile, end_tile;  // the tiles that these tokens see
};

// One tile of an item. Without partials one thread computes all tiles of an item in order. With partials several
// threads compute them into `partials` [tiles, rows, partial_floats], and the last to finish merges all.
struct Unit {
  Item item;
  int tile;
  float* partials;     // or null
  uint32_t* finished;  // with partials: the number of finished tiles of the item
};

// Where a unit's keys and values are.
struct Places {
  int base;    // position of the first key; keys that no row sees are skipped in steps of kWeightKeys
  int count;   // number of keys
  int groups;  // number of groups, the last may be partial
  const char* runs[2 * kTileGroups];  // in a cache in groups: the groups of keys, then those of values

  const char* const* end() const { return runs + 2 * groups; }
};

// The work memory of one thread. Rows are padded to whole vectors.
template <class T>
struct Scratch {
  T* queries;              // [rows, padded]
  T* made;                 // [kTileGroups][kGroupKeys * padded]: converted keys, later converted values
  T* rows;                 // [kGroupKeys, padded], for a cache in rows
  T* weights;              // [rows, kTileKeys]
  float* scores;           // [rows, kTileKeys]
  float* tile_output;      // [rows, values]
  float* output;           // [rows, values]
  float* row;              // [padded]
  float* key_scales;       // [kTileKeys]
  float* value_scales;     // [kTileKeys]
  float* keep;             // [rows in whole vectors]
  float* take;             // the same
  RowStates tile_states;   // the same
  RowStates states;        // the same
  const T** groups;        // [kTileGroups]
  Places* places;          // [2]: of the current unit and of the next
};

template <class Part>
void take(char*& from, int64_t count, Part*& part) {
  part = reinterpret_cast<Part*>(from);
  from += (count * static_cast<int64_t>(sizeof(Part)) + 63) / 64 * 64;
}

// Divides the memory from `from` on among the fields of the scratch, and returns its end.
template <class T>
char* lay_out(const Shape& shape, char* from, Scratch<T>& scratch) {
  const int64_t rows = shape.rows, padded = shape.padded;
  take(from, rows * padded, scratch.queries);
  take(from, padded * kTileKeys, scratch.made);
  take(from, padded * kGroupKeys, scratch.rows);
  take(from, rows * kTileKeys, scratch.weights);
  take(from, rows * kTileKeys, scratch.scores);
  take(from, rows * shape.values, scratch.tile_output);
  take(from, rows * shape.values, scratch.output);
  take(from, padded, scratch.row);
  take(from, int64_t{kTileKeys}, scratch.key_scales);
  take(from, int64_t{kTileKeys}, scratch.value_scales);
  const int64_t vector_rows = round_up_to(shape.rows, kLanes);
  take(from, vector_rows, scratch.keep);
  take(from, vector_rows, scratch.take);
  for (RowStates* states : {&scratch.tile_states, &scratch.states}) {
    take(from, vector_rows, states->largest);
    take(from, vector_rows, states->sums);
  }
  take(from, int64_t{kTileGroups}, scratch.groups);
  take(from, int64_t{2}, scratch.places);
  return from;
}

inline bool is_stored_as(CacheType type, const float*) { return type == CacheType::kFloat; }
inline bool is_stored_as(CacheType type, const Bf16*) { return type == CacheType::kBf16; }

constexpr int kRowSteps = 4;  // steps of prefetching while a row's query or weights are computed

template <class T>
class Worker {
 public:
  Worker(const AttentionArgs& args, const Step& step, int thread)
      : args_(args), cache_(args.source.cache), step_(step), shape_(shape_of(args)) {
    lay_out(shape_, step.thread_scratch(thread), scratch_);
    // Initialises also the rows that pad the last vector: they are merged like the others, but never read.
    reset(scratch_.tile_states);
    row_bytes_ = cache_.head_dim * bytes_of(cache_.type);
    places_ = scratch_.places;
    places_->groups = 0;
    next_places_ = scratch_.places + 1;
  }

  // Takes the next unit, and computes the one before it.
  void feed(const Unit& unit) {
    locate(unit, *next_places_);
    // At least one step per pair of dimensions and of keys, more with many rows.
    fetch_ = fetch_of(*next_places_, (shape_.padded + places_->groups * kGroupKeys) / kPairs<T>);
    if (has_pending_) compute(pending_);
    fetch_.finish();
    std::swap(places_, next_places_);
    pending_ = unit;
    has_pending_ = true;
  }

  // Computes the last unit.
  void finish() {
    fetch_ = {};
    if (has_pending_) compute(pending_);
    has_pending_ = false;
  }

 private:
  // Computes the pending unit, whose keys are at places_, while those of the next are prefetched.
  void compute(const Unit& unit) {
    const Item& item = unit.item;
    const int rows = item.tokens * shape_.group;
    const bool split = unit.partials != nullptr;
    if (split || unit.tile == item.first_tile) {
      prepare(item, !split || unit.tile == item.end_tile - 1);
      reset(rows);
      if (!split) join_sinks(item);
    }
    compute_tile(item, !split);
    if (split ? leave_partial(unit, rows) : unit.tile == item.end_tile - 1) write_output(item);
  }

  // Converts the queries to T. In a fused decode step it also writes the token's key and value, which the last tile
  // reads.
  void prepare(const Item& item, bool has_last_tile) {
    const RotaryArgs& source = args_.source;
    const bool fused = fuses_decode(source, step_);
    const int head_dim = cache_.head_dim;
    T* to = scratch_.queries;
    for (int token = 0; token < item.tokens; ++token) {
      for (int g = 0; g < shape_.group; ++g, to += shape_.padded) {
        const int64_t row = item.first_row + token;
        const int head = item.kv_head * shape_.group + g;
        for (int i = 0; i < kRowSteps; ++i) fetch_.step();
        const void* from = head_at(source.query, row, source.query_stride, head, source);
        if (fused) prepare_query(source, step_, row, head, scratch_.row);
        if (fused)
          convert_row(scratch_.row, DType::kF32, head_dim, 1.0f, to, type_of(to));
        else
          convert_row(from, source.type, head_dim, 1.0f, to, type_of(to));
        std::fill(to + head_dim, to + shape_.padded, T{});
      }
    }
    if (fused && has_last_tile && source.key != nullptr)
      write_key_value(source, step_, item.first_row, item.kv_head, scratch_.row);
  }

  void reset(int rows) {
    std::fill_n(scratch_.output, rows * shape_.values, 0.0f);
    reset(scratch_.states);
  }

  void reset(const RowStates& states) {
    const int rows = round_up_to(shape_.rows, kLanes);
    std::fill_n(states.largest, rows, -kInfinity);
    std::fill_n(states.sums, rows, 0.0f);
  }

  // Computes every row's softmax over the tile at places_, merged into the item's output if `joined`, else left in
  // tile_states and tile_output.
  void compute_tile(const Item& item, bool joined) {
    const int rows = item.tokens * shape_.group, padded = shape_.padded, length = num_keys_of(step_, item.seq);
    score_product(scratch_.queries, padded, rows, key_groups(item), places_->groups, padded / kPairs<T>,
                  scratch_.scores, fetch_);

    const ScoreRule whole = rule_for(item);
    ScoreRule rule = whole;
    const int keys = round_up_to(places_->count, kWeightKeys);
    for (int token = 0, row = 0; token < item.tokens; ++token) {
      const int position = item.first_position + token;
      const Sight sight(std::max(0, first_visible(position, args_) - places_->base),
                        std::min(places_->count, end_visible(position, length, args_) - places_->base));
      const float growth = growth_of(position, args_);  // of capped scores: both the scale and the cap grow
      rule.scale = whole.scale * growth;
      rule.soft_cap = whole.soft_cap * growth;
      for (int g = 0; g < shape_.group; ++g, ++row) {
        for (int i = 0; i < kRowSteps; ++i) fetch_.step();
        if (args_.alibi != nullptr) {
          rule.slope = args_.alibi[item.kv_head * shape_.group + g];
          rule.root = args_.alibi_root != 0;
          rule.distance = static_cast<float>(places_->base - position);
        }
        if (args_.distance_bias != nullptr)
          rule.bias = args_.distance_bias + (item.kv_head * shape_.group + g) * args_.bias_stride +
                      args_.bias_stride / 2 + places_->base - position;
        float* const scores = scratch_.scores + row * kTileKeys;
        const float largest = scratch_.tile_states.largest[row] = score_row(scores, sight, rule);
        scratch_.tile_states.sums[row] =
            weigh_row(scores, keys, sight, rule, largest, scratch_.weights + row * kTileKeys);
      }
    }

    if (joined) merge_states(scratch_.states, scratch_.tile_states, rows, scratch_.keep, scratch_.take);
    const Factors factors = joined ? Factors{scratch_.keep, scratch_.take} : Factors{nullptr, nullptr};
    value_product(scratch_.weights, rows, value_groups(item), places_->groups, shape_.values,
                  joined ? scratch_.output : scratch_.tile_output, factors, fetch_);
  }

  // Merges the softmax over the sinks' keys and values into the item's states and output, before any tile.
  void join_sinks(const Item& item) {
    const int rows = item.tokens * shape_.group;
    const bool scaled = is_scaled(cache_.type) && cache_.value_scales == nullptr;
    const float value_factor = scaled ? 1.0f / scale_of_head(cache_, false, item.kv_head) : 1.0f;
    const ScoreRule rule = {args_.scale, args_.soft_cap, nullptr, nullptr};
    Fetch none;
    for (int first = 0; first < args_.num_sinks; first += kTileKeys) {
      const int count = std::min(kTileKeys, args_.num_sinks - first);
      const int groups = round_up_to(count, kGroupKeys) / kGroupKeys;
      for (int group = 0; group < groups; ++group) {
        T* const made = scratch_.made + group * group_size();
        scratch_.groups[group] = made;
        group_keys(sink_rows(item, args_.sink_keys, first + group * kGroupKeys, 1.0f), shape_.padded, made);
      }
      score_product(scratch_.queries, shape_.padded, rows, scratch_.groups, groups, shape_.padded / kPairs<T>,
                    scratch_.scores, none);
      const Sight sight(0, count);
      for (int row = 0; row < rows; ++row) {
        float* const scores = scratch_.scores + row * kTileKeys;
        const float largest = scratch_.tile_states.largest[row] = score_row(scores, sight, rule);
        scratch_.tile_states.sums[row] = weigh_row(scores, round_up_to(count, kWeightKeys), sight, rule, largest,
                                                   scratch_.weights + row * kTileKeys);
      }
      merge_states(scratch_.states, scratch_.tile_states, rows, scratch_.keep, scratch_.take);
      for (int group = 0; group < groups; ++group)
        group_values(sink_rows(item, args_.sink_values, first + group * kGroupKeys, value_factor), shape_.padded,
                     shape_.values, scratch_.made + group * group_size());
      value_product(scratch_.weights, rows, scratch_.groups, groups, shape_.values, scratch_.output,
                    Factors{scratch_.keep, scratch_.take}, none);
    }
  }

  // A group of the sinks' rows times a factor, [kGroupKeys, padded], with zeros beyond the last.
  const T* sink_rows(const Item& item, const float* from, int first, float factor) {
    const int count = std::min(kGroupKeys, args_.num_sinks - first);
    std::fill_n(scratch_.rows, group_size(), T{});
    for (int row = 0; row < count; ++row)
      convert_row(from + (int64_t{first + row} * cache_.num_kv_heads + item.kv_head) * cache_.head_dim, DType::kF32,
                  cache_.head_dim, factor, scratch_.rows + row * shape_.padded, type_of(scratch_.rows));
    return scratch_.rows;
  }

  // Stores a tile's result in the partials. The thread that finishes the last tile of the item merges all in order, and
  // gets true.
  bool leave_partial(const Unit& unit, int rows) {
    const int tiles = unit.item.end_tile - unit.item.first_tile, values = shape_.values;
    const int64_t stride = shape_.partial_floats();
    float* to = unit.partials + (unit.tile - unit.item.first_tile) * rows * stride;
    for (int row = 0; row < rows; ++row, to += stride) {
      std::copy_n(scratch_.tile_output + row * values, values, to);
      to[values] = scratch_.tile_states.largest[row];
      to[values + 1] = scratch_.tile_states.sums[row];
    }
    if (__atomic_add_fetch(unit.finished, 1, __ATOMIC_ACQ_REL) != static_cast<uint32_t>(tiles)) return false;
    __atomic_store_n(unit.finished, 0u, __ATOMIC_RELAXED);  // for the next op, which runs after a barrier
    join_sinks(unit.item);
    const float* from = unit.partials;
    for (int tile = 0; tile < tiles; ++tile, from += rows * stride) {
      for (int row = 0; row < rows; ++row) {
        scratch_.tile_states.largest[row] = from[row * stride + values];
        scratch_.tile_states.sums[row] = from[row * stride + values + 1];
      }
      merge_states(scratch_.states, scratch_.tile_states, rows, scratch_.keep, scratch_.take);
      for (int row = 0; row < rows; ++row) {
        float* const to = scratch_.output + row * values;
        for (int i = 0; i < values; i += kLanes)
          store_floats(to + i, join(load_floats(to + i), scratch_.keep[row], load_floats(from + row * stride + i),
                                    scratch_.take[row]));
      }
    }
    return true;
  }

  void locate(const Unit& unit, Places& places) const {
    const Item& item = unit.item;
    const int tile_start = unit.tile * kTileKeys;
    const int hidden = std::max(0, first_visible(item.first_position, args_) - tile_start);
    places.base = tile_start + hidden / kWeightKeys * kWeightKeys;
    places.count = std::min(tile_start + kTileKeys, item.end_key) - places.base;
    places.groups = round_up_to(places.count, kGroupKeys) / kGroupKeys;
    if (cache_.layout != CacheLayout::kGroups) return;
    for (int group = 0; group < places.groups; ++group) {
      const int64_t index = row_of(item, places.base + group * kGroupKeys);
      places.runs[group] = static_cast<const char*>(cache_.keys) + index * row_bytes_;
      places.runs[places.groups + group] = static_cast<const char*>(cache_.values) + index * row_bytes_;
      const int64_t scale = scale_of_row(cache_, index);
      if (cache_.key_scales != nullptr) __builtin_prefetch(cache_.key_scales + scale);
      if (cache_.value_scales != nullptr) __builtin_prefetch(cache_.value_scales + scale);
    }
  }

  // The cache row of a position.
  int64_t row_of(const Item& item, int position) const {
    const int32_t* const table = step_.block_table + cache_.tables_offset + item.seq * step_.block_table_stride;
    const int64_t block = table[position / cache_.block_size];
    return (block * cache_.num_kv_heads + item.kv_head) * cache_.block_size + position % cache_.block_size;
  }

  Fetch fetch_of(const Places& places, int64_t steps) const {
    if (cache_.layout != CacheLayout::kGroups) return {};
    return {places.runs, places.end(), kGroupKeys * row_bytes_, steps};
  }

  // The groups of keys of the tile at places_: in place if they are stored as T, else converted.
  const T* const* key_groups(const Item& item) {
    for (int group = 0; group < places_->groups; ++group) {
      T* const made = scratch_.made + group * group_size();
      scratch_.groups[group] = made;
      if (cache_.layout == CacheLayout::kRows)
        group_keys(rows_of(item, cache_.keys, group), shape_.padded, made);
      else if (is_stored_as(cache_.type, made))
        scratch_.groups[group] = reinterpret_cast<const T*>(places_->runs[group]);
      else
        widen_group(cache_.type, places_->runs[group], cache_.head_dim / 2, kGroupKeys, made);
    }
    return scratch_.groups;
  }

  // The groups of values, converted in the memory of the keys.
  const T* const* value_groups(const Item& item) {
    const int hidden = num_hidden(item);
    for (int group = 0; group < places_->groups; ++group) {
      T* const made = scratch_.made + group * group_size();
      scratch_.groups[group] = made;
      if ((group + 1) * kGroupKeys <= hidden) {
        std::fill_n(made, group_size(), T{});
        continue;
      }
      if (cache_.layout == CacheLayout::kRows) {
        group_values(rows_of(item, cache_.values, group), shape_.padded, shape_.values, made);
        continue;
      }
      // Slots beyond the last key may hold anything. Their scores are never used, but a value that is NaN would spoil
      // the sum even with a weight of 0.
      const int count = keys_of(group);
      const char* const run = places_->runs[places_->groups + group];
      if (is_stored_as(cache_.type, made) && count == kGroupKeys) {
        scratch_.groups[group] = reinterpret_cast<const T*>(run);
      } else {
        widen_group(cache_.type, run, kGroupKeys / 2, cache_.head_dim, made);
        clear_values(made, shape_.padded, count);
      }
    }
    return scratch_.groups;
  }

  // The number of the tile's first keys that a window or chunk hides from all of an item's tokens. Their blocks may belong to
  // another sequence by now and hold NaN, which a weight of 0 would not hide; so they are not read.
  int num_hidden(const Item& item) const {
    return std::max(0, first_visible(item.first_position, args_) - places_->base);
  }

  int64_t group_size() const { return int64_t{kGroupKeys} * shape_.padded; }
  int keys_of(int group) const { return std::min(kGroupKeys, places_->count - group * kGroupKeys); }

  // The rows of a group [kGroupKeys, padded] from a cache in rows, with zeros for missing and hidden keys.
  const T* rows_of(const Item& item, const void* from, int group) {
    const int64_t padded = shape_.padded;
    const int count = keys_of(group);
    const int hidden = std::clamp(num_hidden(item) - group * kGroupKeys, 0, count);
    std::fill_n(scratch_.rows, hidden * padded, T{});
    for (int key = hidden; key < count; ++key) {
      const int64_t index = row_of(item, places_->base + group * kGroupKeys + key);
      widen_row(cache_.type, static_cast<const char*>(from) + index * row_bytes_, cache_.head_dim, shape_.padded,
                scratch_.rows + key * padded);
    }
    std::fill_n(scratch_.rows + count * padded, (kGroupKeys - count) * padded, T{});
    return scratch_.rows;
  }

  ScoreRule rule_for(const Item& item) {
    ScoreRule rule = {args_.scale, args_.soft_cap, nullptr, nullptr};
    if (!is_scaled(cache_.type)) return rule;
    if (cache_.key_scales == nullptr) rule.scale *= scale_of_head(cache_, true, item.kv_head);
    if (cache_.key_scales != nullptr) rule.key_scales = scales_of(item, cache_.key_scales, scratch_.key_scales);
    if (cache_.value_scales != nullptr) rule.value_scales = scales_of(item, cache_.value_scales, scratch_.value_scales);
    return rule;
  }

  // The scales of the tile at places_, with zeros for missing and hidden keys.
  const float* scales_of(const Item& item, const float* from, float* to) const {
    if (cache_.layout == CacheLayout::kGroups)
      for (int key = 0; key < places_->count; key += kGroupKeys)
        std::memcpy(to + key, from + scale_of_row(cache_, row_of(item, places_->base + key)), sizeof(float) * kGroupKeys);
    else
      for (int key = 0; key < places_->count; ++key) to[key] = from[scale_of_row(cache_, row_of(item, places_->base + key))];
    std::fill_n(to, std::min(num_hidden(item), places_->count), 0.0f);
    std::fill(to + places_->count, to + kTileKeys, 0.0f);
    return to;
  }

  // The factor that normalises an output row: 1 / (sum of weights, with that of the sink if there is one).
  float share_of(int row, int head) const {
    const float sum = scratch_.states.sums[row];
    if (args_.sinks == nullptr) return sum > 0.0f ? 1.0f / sum : 0.0f;
    // Scores are in base 2. Both terms are divided by the larger of them, so that neither overflows.
    const float beyond = args_.sinks[head] * kLog2E - scratch_.states.largest[row];
    const float less = std::exp2(-std::fabs(beyond));
    return beyond > 0.0f ? less / (sum * less + 1.0f) : 1.0f / (sum + less);
  }

  void write_output(const Item& item) {
    const int value_dim = args_.value_dim;
    const bool scaled = is_scaled(cache_.type) && cache_.value_scales == nullptr;
    const float value_scale = scaled ? scale_of_head(cache_, false, item.kv_head) : 1.0f;
    for (int row = 0; row < item.tokens * shape_.group; ++row) {
      const int head = item.kv_head * shape_.group + row % shape_.group;
      void* to = row_at(args_.output, item.first_row + row / shape_.group, args_.output_stride, args_.output_type) +
                 head * value_dim * size_of(args_.output_type);
      convert_row(scratch_.output + row * shape_.values, DType::kF32, value_dim, value_scale * share_of(row, head), to,
                  args_.output_type);
    }
  }

  const AttentionArgs& args_;
  const KvCache& cache_;
  const Step& step_;
  Shape shape_;
  int64_t row_bytes_;
  Scratch<T> scratch_;
  Places* places_;
  Places* next_places_;
  Unit pending_;
  bool has_pending_ = false;
  Fetch fetch_;  // prefetches the next unit
};

}  // namespace headrace
