// One thread's share of an attention: a stream of units, each one tile of keys for a few query rows. While a unit is
// computed, the keys and values of the next are fetched: their blocks lie all over memory, each too short for the
// hardware to see a stream.
#pragma once

#include <algorithm>

#include "attention.h"
#include "attention_softmax.h"

namespace headrace {

constexpr int kTileRows = 48;  // query rows of one item, about: enough to pay for packing the keys

struct Shape {
  int group;            // query heads of a KV head
  int tokens_per_item;
  int rows;             // most query rows of an item
  int padded;           // head_dim in whole vectors

  int64_t partial_floats() const { return padded + 2; }  // a row's output, largest score and sum
};

inline Shape shape_of(const AttentionArgs& args) {
  const int group = args.source.num_heads / args.source.cache.num_kv_heads;
  const int tokens = std::max(1, kTileRows / group);
  return {group, tokens, tokens * group, round_up_to(args.source.cache.head_dim, kLanes)};
}

inline int first_visible(int position, int window) { return window > 0 ? std::max(0, position - window + 1) : 0; }

inline char* head_at(const void* base, int64_t row, int64_t stride, int head, const RotaryArgs& args) {
  return const_cast<char*>(row_at(base, row, stride, args.type)) + head * args.cache.head_dim * size_of(args.type);
}

// Some tokens of one sequence and the query heads of one KV head.
struct Item {
  int64_t seq;
  int64_t first_row;  // of the step
  int tokens;
  int first_position;
  int kv_head;
  int first_tile, end_tile;  // what these tokens see

  int last_position() const { return first_position + tokens - 1; }
};

// One tile of an item. Without partials, an item's units follow one another on one thread. With them its tiles are
// done by whoever has the time, into `partials` [tiles, rows, partial_floats], and the last to finish merges all.
struct Unit {
  Item item;
  int tile;
  float* partials;     // or null
  uint32_t* finished;  // tiles done, of a unit with partials
};

// Where the rows of a unit's keys and values are.
struct Places {
  int base;   // the first key's position: whole vectors of keys that no row may see are left out
  int count;  // keys that are there
  int keys;   // count in whole vectors
  const char* rows[2 * kTileKeys];  // of the keys, then of the values, `keys` each; beyond `count` they are zeros

  const char* const* key_rows() const { return rows; }
  const char* const* value_rows() const { return rows + keys; }
};

// What one thread keeps while it works. Rows are padded to whole vectors.
template <class T>
struct Scratch {
  T* queries;             // [rows, padded]
  T* keys;                // [padded / kPairs][kTileKeys][kPairs]
  T* values;              // [kTileKeys / kPairs][padded][kPairs]
  T* staging;             // [kTileKeys, padded], where the storage type is not T
  T* weights;             // [rows, kTileKeys]
  char* zeros;            // [4 padded]
  float* scores;          // [rows, kTileKeys]
  float* tile_output;     // [rows, padded]
  float* output;          // [rows, padded]
  float* row;             // [padded]
  float* key_scales;      // [kTileKeys]
  float* value_scales;    // [kTileKeys]
  RowStates tile_states;  // [rows in whole vectors]
  RowStates states;       // the same
  const T** staged;       // [kTileKeys]
  Places* places;         // [2]: of the unit that is computed, and of the next
};

template <class Part>
void take(char*& from, int64_t count, Part*& part) {
  part = reinterpret_cast<Part*>(from);
  from += (count * static_cast<int64_t>(sizeof(Part)) + 63) / 64 * 64;
}

// Lays the scratch out from `from` on and returns where it ends.
template <class T>
char* lay_out(const Shape& shape, char* from, Scratch<T>& scratch) {
  const int64_t rows = shape.rows, padded = shape.padded;
  take(from, rows * padded, scratch.queries);
  take(from, padded * kTileKeys, scratch.keys);
  take(from, padded * kTileKeys, scratch.values);
  take(from, padded * kTileKeys, scratch.staging);
  take(from, rows * kTileKeys, scratch.weights);
  take(from, 4 * padded, scratch.zeros);
  take(from, rows * kTileKeys, scratch.scores);
  take(from, rows * padded, scratch.tile_output);
  take(from, rows * padded, scratch.output);
  take(from, padded, scratch.row);
  take(from, int64_t{kTileKeys}, scratch.key_scales);
  take(from, int64_t{kTileKeys}, scratch.value_scales);
  for (RowStates* states : {&scratch.tile_states, &scratch.states}) {
    take(from, round_up_to(shape.rows, kLanes), states->largest);
    take(from, round_up_to(shape.rows, kLanes), states->sums);
  }
  take(from, int64_t{kTileKeys}, scratch.staged);
  take(from, int64_t{2}, scratch.places);
  return from;
}

inline void store_row(float* to, const float* from, int count) { std::copy(from, from + count, to); }
inline void store_row(Bf16* to, const float* from, int count) {
  for (int i = 0; i < count; i += kLanes) store_bf16(to + i, load_floats(from + i));
}

inline bool is_stored_as(CacheType type, const float*) { return type == CacheType::kFloat; }
inline bool is_stored_as(CacheType type, const Bf16*) { return type == CacheType::kBf16; }

template <class T>
class Worker {
 public:
  Worker(const AttentionArgs& args, const Step& step, int thread)
      : args_(args), cache_(args.source.cache), step_(step), shape_(shape_of(args)) {
    lay_out(shape_, step.thread_scratch(thread), scratch_);
    std::fill_n(scratch_.zeros, 4 * shape_.padded, 0);
    // Rows that fill the last vector up are merged with the others; nothing reads them.
    reset(scratch_.tile_states);
    row_bytes_ = cache_.head_dim * bytes_of(cache_.type);
    places_ = scratch_.places;
    next_places_ = scratch_.places + 1;
  }

  // Takes the next unit, and computes the one before it.
  void feed(const Unit& unit) {
    locate(unit, *next_places_);
    if (has_pending_)
      compute(pending_, next_places_);
    else
      fetch_of(next_places_).take(2 * kTileKeys);
    std::swap(places_, next_places_);
    pending_ = unit;
    has_pending_ = true;
  }

  // Computes the last unit.
  void finish() {
    if (has_pending_) compute(pending_, nullptr);
    has_pending_ = false;
  }

 private:
  // The pending unit, whose rows are at places_, while the rows of `next` are fetched.
  void compute(const Unit& unit, const Places* next) {
    const Item& item = unit.item;
    const int rows = item.tokens * shape_.group, padded = shape_.padded;
    const bool split = unit.partials != nullptr;
    if (split || unit.tile == item.first_tile) {
      prepare(item, !split || unit.tile == item.end_tile - 1);
      reset(rows);
    }
    compute_tile(item, next);
    if (split) {
      if (!leave_partial(unit, rows)) return;
    } else {
      merge_tile(scratch_.states, scratch_.output, scratch_.tile_states, scratch_.tile_output, padded, rows, padded);
      if (unit.tile != item.end_tile - 1) return;
    }
    write_output(item);
  }

  // Queries in T. In a fused decode step also the token's own key and value, which the last tile then reads.
  void prepare(const Item& item, bool has_last_tile) {
    const RotaryArgs& source = args_.source;
    const bool fused = fuses_decode(source, step_);
    std::fill_n(scratch_.row, shape_.padded, 0.0f);
    T* to = scratch_.queries;
    for (int token = 0; token < item.tokens; ++token) {
      for (int g = 0; g < shape_.group; ++g, to += shape_.padded) {
        const int64_t row = item.first_row + token;
        const int head = item.kv_head * shape_.group + g;
        if (fused)
          prepare_query(source, step_, row, head, scratch_.row);
        else
          load_values(head_at(source.query, row, source.query_stride, head, source), source.type, cache_.head_dim,
                      scratch_.row);
        store_row(to, scratch_.row, shape_.padded);
      }
    }
    if (fused && has_last_tile) write_key_value(source, step_, item.first_row, item.kv_head, scratch_.row);
  }

  void reset(int rows) {
    std::fill_n(scratch_.output, rows * shape_.padded, 0.0f);
    reset(scratch_.states);
  }

  void reset(const RowStates& states) {
    const int rows = round_up_to(shape_.rows, kLanes);
    std::fill_n(states.largest, rows, -kInfinity);
    std::fill_n(states.sums, rows, 0.0f);
  }

  // Every row's softmax over the tile at places_, into tile_states and tile_output.
  void compute_tile(const Item& item, const Places* next) {
    const int rows = item.tokens * shape_.group, padded = shape_.padded, head_dim = cache_.head_dim;
    const int keys = places_->keys, steps = round_up_to(head_dim, kPairs<T>) / kPairs<T>;
    Fetch fetch = fetch_of(next);
    pack_keys(typed(places_->key_rows()), keys, steps * kPairs<T>, scratch_.keys, fetch);
    product(scratch_.queries, padded, rows, scratch_.keys, keys * kPairs<T>, steps, keys, scratch_.scores, kTileKeys,
            fetch);

    const ScoreRule rule = rule_for(item);
    for (int token = 0, row = 0; token < item.tokens; ++token) {
      const int position = item.first_position + token;
      const Sight sight(std::max(0, first_visible(position, args_.window) - places_->base),
                        std::min(keys, position + 1 - places_->base), keys);
      for (int g = 0; g < shape_.group; ++g, ++row) {
        fetch.take(8);
        float* const scores = scratch_.scores + row * kTileKeys;
        const float largest = scratch_.tile_states.largest[row] = score_row(scores, sight, rule);
        scratch_.tile_states.sums[row] =
            weigh_row(scores, keys, sight, rule, largest, scratch_.weights + row * kTileKeys);
      }
    }

    const T* const* value_rows = typed(places_->value_rows());
    if (!direct_values(scratch_.weights, kTileKeys, rows, value_rows, keys, head_dim, scratch_.tile_output, padded,
                       fetch)) {
      pack_values(value_rows, keys, head_dim, padded, scratch_.values);
      product(scratch_.weights, kTileKeys, rows, scratch_.values, padded * kPairs<T>, keys / kPairs<T>, padded,
              scratch_.tile_output, padded, fetch);
    }
    fetch.take(2 * kTileKeys);  // what is left
  }

  // True for the thread that finished the item's last tile: it has merged all of them, in order.
  bool leave_partial(const Unit& unit, int rows) {
    const int tiles = unit.item.end_tile - unit.item.first_tile, padded = shape_.padded;
    const int64_t stride = shape_.partial_floats();
    float* to = unit.partials + (unit.tile - unit.item.first_tile) * rows * stride;
    for (int row = 0; row < rows; ++row, to += stride) {
      std::copy_n(scratch_.tile_output + row * padded, padded, to);
      to[padded] = scratch_.tile_states.largest[row];
      to[padded + 1] = scratch_.tile_states.sums[row];
    }
    if (__atomic_add_fetch(unit.finished, 1, __ATOMIC_ACQ_REL) != static_cast<uint32_t>(tiles)) return false;
    __atomic_store_n(unit.finished, 0u, __ATOMIC_RELAXED);  // ready for the next op, which a barrier parts from this
    const float* from = unit.partials;
    for (int tile = 0; tile < tiles; ++tile, from += rows * stride) {
      for (int row = 0; row < rows; ++row) {
        scratch_.tile_states.largest[row] = from[row * stride + padded];
        scratch_.tile_states.sums[row] = from[row * stride + padded + 1];
      }
      merge_tile(scratch_.states, scratch_.output, scratch_.tile_states, from, static_cast<int>(stride), rows, padded);
    }
    return true;
  }

  // Beyond the keys that are there, where a slot may hold anything, the rows are zeros.
  void locate(const Unit& unit, Places& places) const {
    const Item& item = unit.item;
    const int tile_start = unit.tile * kTileKeys;
    // A vector's place in the tile stays the same whatever is left out, and with it the order of every sum.
    const int hidden = std::max(0, first_visible(item.first_position, args_.window) - tile_start);
    places.base = tile_start + hidden / kLanes * kLanes;
    places.count = std::min(tile_start + kTileKeys, item.last_position() + 1) - places.base;
    places.keys = round_up_to(places.count, kLanes);
    for_each_row(item, places.base, places.count, [&](int key, int64_t index) {
      places.rows[key] = static_cast<const char*>(cache_.keys) + index * row_bytes_;
      places.rows[places.keys + key] = static_cast<const char*>(cache_.values) + index * row_bytes_;
    });
    for (int key = places.count; key < places.keys; ++key)
      places.rows[key] = places.rows[places.keys + key] = scratch_.zeros;
  }

  // visit(key, row of the cache) for keys [base, base + count) of the item's sequence.
  template <class Visit>
  void for_each_row(const Item& item, int base, int count, Visit visit) const {
    const int32_t* blocks = step_.block_table + item.seq * step_.block_table_stride;
    int block = base / cache_.block_size, offset = base % cache_.block_size;
    for (int key = 0; key < count; ++block, offset = 0) {
      const int64_t first = (int64_t{blocks[block]} * cache_.num_kv_heads + item.kv_head) * cache_.block_size;
      const int end = std::min(cache_.block_size, offset + count - key);
      for (; offset < end; ++offset, ++key) visit(key, first + offset);
    }
  }

  Fetch fetch_of(const Places* places) const {
    if (places == nullptr) return {nullptr, nullptr, 0};
    return {places->rows, places->rows + 2 * places->keys, row_bytes_};
  }

  // Rows as values of T: where they lie, or widened into the staging room, which the next call overwrites.
  const T* const* typed(const char* const* rows) {
    if (is_stored_as(cache_.type, scratch_.staging)) return reinterpret_cast<const T* const*>(rows);
    std::fill_n(scratch_.row, shape_.padded, 0.0f);
    for (int key = 0; key < places_->keys; ++key) {
      T* to = scratch_.staging + key * shape_.padded;
      read_cache_row(cache_.type, rows[key], cache_.head_dim, scratch_.row);
      store_row(to, scratch_.row, shape_.padded);
      scratch_.staged[key] = to;
    }
    return scratch_.staged;
  }

  ScoreRule rule_for(const Item& item) {
    ScoreRule rule = {args_.scale, args_.soft_cap, nullptr, nullptr};
    if (!is_scaled(cache_.type)) return rule;
    if (cache_.key_scales == nullptr) rule.scale *= cache_.key_scale;
    if (cache_.key_scales != nullptr) rule.key_scales = scratch_.key_scales;
    if (cache_.value_scales != nullptr) rule.value_scales = scratch_.value_scales;
    for_each_row(item, places_->base, places_->count, [&](int key, int64_t index) {
      if (rule.key_scales != nullptr) scratch_.key_scales[key] = cache_.key_scales[index];
      if (rule.value_scales != nullptr) scratch_.value_scales[key] = cache_.value_scales[index];
    });
    for (int key = places_->count; key < places_->keys; ++key)
      scratch_.key_scales[key] = scratch_.value_scales[key] = 0.0f;
    return rule;
  }

  void write_output(const Item& item) {
    const int head_dim = cache_.head_dim;
    const bool scaled = is_scaled(cache_.type) && cache_.value_scales == nullptr;
    const float value_scale = scaled ? cache_.value_scale : 1.0f;
    for (int row = 0; row < item.tokens * shape_.group; ++row) {
      float* from = scratch_.output + row * shape_.padded;
      const float factor = value_scale / scratch_.states.sums[row];
      for (int i = 0; i < shape_.padded; i += kLanes) store_floats(from + i, load_floats(from + i) * factor);
      restore_columns(scratch_.queries, head_dim, from);
      const int head = item.kv_head * shape_.group + row % shape_.group;
      store_values(from, args_.output_type, head_dim,
                   row_at(args_.output, item.first_row + row / shape_.group, args_.output_stride, args_.output_type) +
                       head * head_dim * size_of(args_.output_type));
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
};

}  // namespace headrace
