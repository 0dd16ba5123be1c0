// The expanded form of latent attention. A part of the work is one head of many tokens of a sequence. It goes through
// the context tile by tile: the cached vectors of a tile are multiplied into this head's keys and values, and all
// queries of the part attend to them while they are in the second-level cache. The memory needed therefore depends
// neither on the context nor on the number of heads, and computing a tile costs little compared with its use by so many
// queries.
//
// Tiles, their order and every chain of sums do not depend on the division into parts: a row's result depends neither
// on threads nor batch, nor on the number of tokens that its sequence computes, once it is at least least_tokens.
//
// Included by attention.cpp, whose products it shares, since these take long to compile.
#pragma once

#include <algorithm>

#include "attention/softmax.h"
#include "attention/stage.h"
#include "attention/worker.h"
#include "attention/latent.h"
#include "linear/deltas.h"

namespace headrace {

constexpr int kMostPartRows = 21 * kTileRows;  // most queries of a part: their outputs fit the second-level cache
constexpr int kLeastPartRows = 5 * kTileRows;
constexpr int64_t kPartsOfThread = 4;  // wanted parts per thread, to balance the work

struct ExpandedSizes {
  int head_dim, padded;   // of a query or key; rounded up to whole vectors
  int rotated;            // the last dimensions of a head, which are rotated
  int compressed;         // the first part of a cached vector, from which keys and values are computed
  int value_dim, values;  // of a value; rounded up to whole groups

  explicit ExpandedSizes(const LatentExpandedArgs& args)
      : head_dim(args.latent.nope_dim + 2 * args.latent.rotary_half),
        padded(round_up_to(head_dim, kLanes)),
        rotated(2 * args.latent.rotary_half),
        compressed(args.latent.cache.head_dim - rotated),
        value_dim(args.value_dim),
        values(round_up_to(args.value_dim, kGroupKeys)) {}
};

template <class T>
struct ExpandedScratch {
  T* queries;        // [rows, padded]
  T* rows;           // [kTileKeys, vector_dim]: the cached vectors of a tile
  T* compressed;     // the same without the rotated part, in groups of keys
  T* keys;           // [kTileGroups][padded * kGroupKeys]
  T* values;         // [kTileGroups][kGroupKeys * values]
  T* weights;        // [kTileRows, kTileKeys]
  float* made;       // [nope_dim or kTileKeys, kTileKeys]: products before rounding
  float* scores;     // [kTileRows, kTileKeys]
  float* output;     // [rows, values]
  float* row;        // [vector_dim]
  float* keep;       // [kTileRows]
  float* take;
  RowStates tile_states;  // [kTileRows]
  RowStates states;       // [rows]
};

template <class T>
char* lay_out(const LatentExpandedArgs& args, char* from, ExpandedScratch<T>& scratch) {
  const ExpandedSizes sizes(args);
  const int64_t rows = kMostPartRows, vector_dim = round_up_to(args.latent.cache.head_dim, kLanes);
  take(from, rows * sizes.padded, scratch.queries);
  take(from, kTileKeys * vector_dim, scratch.rows);
  take(from, int64_t{kTileKeys} * sizes.compressed, scratch.compressed);
  take(from, int64_t{kTileKeys} * sizes.padded, scratch.keys);
  take(from, int64_t{kTileKeys} * sizes.values, scratch.values);
  take(from, int64_t{kTileRows} * kTileKeys, scratch.weights);
  take(from, int64_t{std::max<int>(args.latent.nope_dim, kTileKeys)} * kTileKeys, scratch.made);
  take(from, int64_t{kTileRows} * kTileKeys, scratch.scores);
  take(from, rows * sizes.values, scratch.output);
  take(from, vector_dim, scratch.row);
  take(from, int64_t{kTileRows}, scratch.keep);
  take(from, int64_t{kTileRows}, scratch.take);
  take(from, int64_t{kTileRows}, scratch.tile_states.largest);
  take(from, int64_t{kTileRows}, scratch.tile_states.sums);
  take(from, rows, scratch.states.largest);
  take(from, rows, scratch.states.sums);
  return from;
}

inline void store_as(float value, float* to) { *to = value; }
inline void store_as(float value, Bf16* to) { *to = bf16_of_float(value); }

// One head of some tokens of one sequence.
struct LatentPart {
  int64_t seq;
  int64_t first_row;  // the part's first row of the step
  int rows;
  int first_position;
  int head;

  int end_position() const { return first_position + rows; }
};

template <class T>
class Expander {
 public:
  Expander(const LatentExpandedArgs& args, const Step& step, int thread)
      : args_(args), cache_(args.latent.cache), step_(step), sizes_(args) {
    lay_out(args, step.thread_scratch(thread), scratch_);
    std::fill_n(scratch_.tile_states.largest, kTileRows, -kInfinity);
    std::fill_n(scratch_.tile_states.sums, kTileRows, 0.0f);
  }

  void run(const LatentPart& part) {
    read_queries(part);
    const int padded_rows = round_up_to(part.rows, kLanes);
    std::fill_n(scratch_.output, int64_t{part.rows} * sizes_.values, 0.0f);
    std::fill_n(scratch_.states.largest, padded_rows, -kInfinity);
    std::fill_n(scratch_.states.sums, padded_rows, 0.0f);
    for (int start = 0; start < part.end_position(); start += kTileKeys) {
      const int count = std::min(kTileKeys, part.end_position() - start);
      make_tile(part, start, count);
      // Queries at positions before the tile do not see it.
      const int first = std::max(0, start - part.first_position) / kTileRows * kTileRows;
      for (int row = first; row < part.rows; row += kTileRows)
        attend(part, row, std::min(kTileRows, part.rows - row), start, count);
    }
    for (int row = 0; row < part.rows; ++row) {
      char* const to = row_at(args_.output, part.first_row + row, args_.output_stride, args_.output_type) +
                       int64_t{part.head} * sizes_.value_dim * size_of(args_.output_type);
      convert_row(scratch_.output + int64_t{row} * sizes_.values, DType::kF32, sizes_.value_dim,
                  1.0f / scratch_.states.sums[row], to, args_.output_type);
    }
  }

 private:
  void read_queries(const LatentPart& part) {
    const LatentArgs& latent = args_.latent;
    T* to = scratch_.queries;
    for (int row = 0; row < part.rows; ++row, to += sizes_.padded) {
      const int64_t at = part.first_row + row;
      const float* plain = latent.query + at * latent.query_stride + int64_t{part.head} * sizes_.head_dim;
      const float* rotated =
          latent.absorbed + at * latent.absorbed_stride + int64_t{part.head} * cache_.head_dim + sizes_.compressed;
      convert_row(plain, DType::kF32, latent.nope_dim, 1.0f, to, type_of(to));
      convert_row(rotated, DType::kF32, sizes_.rotated, 1.0f, to + latent.nope_dim, type_of(to));
      std::fill(to + sizes_.head_dim, to + sizes_.padded, T{});
    }
  }

  // Computes this head's keys and values of the tokens [start, start + count) of the context, padded with zeros.
  void make_tile(const LatentPart& part, int start, int count) {
    constexpr int kPair = kPairs<T>;
    const int vector_dim = cache_.head_dim, nope_dim = args_.latent.nope_dim, compressed = sizes_.compressed;
    groups_ = round_up_to(count, kGroupKeys) / kGroupKeys;
    for (int key = 0; key < groups_ * kGroupKeys; ++key) {
      T* const row = scratch_.rows + int64_t{key} * vector_dim;
      if (key < count)
        read_row(part, start + key, row);
      else
        std::fill_n(row, vector_dim, T{});
    }

    const T* groups[kTileGroups];
    for (int group = 0; group < groups_; ++group) {
      T* to = scratch_.compressed + int64_t{group} * kGroupKeys * compressed;
      groups[group] = to;
      const T* const rows = scratch_.rows + int64_t{group} * kGroupKeys * vector_dim;
      for (int i = 0; i < compressed; i += kPair)
        for (int key = 0; key < kGroupKeys; ++key, to += kPair)
          std::memcpy(to, rows + int64_t{key} * vector_dim + i, sizeof(T) * kPair);
    }
    const T* const key_weights = static_cast<const T*>(args_.keys) + part.head * args_.keys_stride;
    score_product(key_weights, compressed, nope_dim, groups, groups_, compressed / kPair, scratch_.made, fetch_);
    for (int group = 0; group < groups_; ++group) {
      T* const to = scratch_.keys + int64_t{group} * kGroupKeys * sizes_.padded;
      for (int dim = 0; dim < sizes_.padded; ++dim)
        for (int key = 0; key < kGroupKeys; ++key) {
          T* const place = to + (dim / kPair * kGroupKeys + key) * kPair + dim % kPair;
          const int of_tile = group * kGroupKeys + key;
          if (dim < nope_dim)
            store_as(scratch_.made[int64_t{dim} * kTileKeys + of_tile], place);
          else
            *place = dim < sizes_.head_dim ? scratch_.rows[int64_t{of_tile} * vector_dim + compressed + dim - nope_dim] : T{};
        }
    }

    const int64_t group_elements = int64_t{compressed} * kGroupKeys;
    const T* const value_weights = static_cast<const T*>(args_.values) + part.head * (sizes_.values / kGroupKeys) * group_elements;
    for (int first = 0; first < sizes_.values; first += kTileKeys) {
      const int columns = std::min(kTileKeys, sizes_.values - first);
      for (int group = 0; group < columns / kGroupKeys; ++group)
        groups[group] = value_weights + (first / kGroupKeys + group) * group_elements;
      score_product(scratch_.rows, vector_dim, groups_ * kGroupKeys, groups, columns / kGroupKeys, compressed / kPair,
                    scratch_.made, fetch_);
      for (int key = 0; key < groups_ * kGroupKeys; ++key) {
        T* const to = scratch_.values + int64_t{key / kPair} * sizes_.values * kPair + first * kPair + key % kPair;
        for (int i = 0; i < columns; ++i) store_as(scratch_.made[int64_t{key} * kTileKeys + i], to + i * kPair);
      }
    }
  }

  // Reads the cached vector of a token and applies its scale.
  void read_row(const LatentPart& part, int position, T* to) {
    const int32_t* const table = step_.block_table + cache_.tables_offset + part.seq * step_.block_table_stride;
    const int64_t index = int64_t{table[position / cache_.block_size]} * cache_.block_size + position % cache_.block_size;
    const char* const from = static_cast<const char*>(cache_.keys) + index * cache_.head_dim * bytes_of(cache_.type);
    if (!is_scaled(cache_.type)) return widen_row(cache_.type, from, cache_.head_dim, cache_.head_dim, to);
    widen_row(cache_.type, from, cache_.head_dim, cache_.head_dim, scratch_.row);
    const float scale = cache_.key_scales != nullptr ? cache_.key_scales[scale_of_row(cache_, index)] : cache_.key_scale;
    convert_row(scratch_.row, DType::kF32, cache_.head_dim, scale, to, type_of(to));
  }

  // Rows [first, first + rows) of the part attend to the tile.
  void attend(const LatentPart& part, int first, int rows, int start, int count) {
    const T* keys[kTileGroups];
    const T* values[kTileGroups];
    for (int group = 0; group < groups_; ++group) {
      keys[group] = scratch_.keys + int64_t{group} * kGroupKeys * sizes_.padded;
      values[group] = scratch_.values + int64_t{group} * kGroupKeys * sizes_.values;
    }
    score_product(scratch_.queries + int64_t{first} * sizes_.padded, sizes_.padded, rows, keys, groups_,
                  sizes_.padded / kPairs<T>, scratch_.scores, fetch_);
    const ScoreRule rule = {args_.scale, 0.0f, nullptr, nullptr, 0.0f, 0.0f};
    const int weighed = round_up_to(count, kWeightKeys);
    for (int row = 0; row < rows; ++row) {
      const Sight sight(0, std::min(count, part.first_position + first + row + 1 - start));
      float* const scores = scratch_.scores + row * kTileKeys;
      const float largest = scratch_.tile_states.largest[row] = score_row(scores, sight, rule);
      scratch_.tile_states.sums[row] = weigh_row(scores, weighed, sight, rule, largest, scratch_.weights + row * kTileKeys);
    }
    const RowStates states = {scratch_.states.largest + first, scratch_.states.sums + first};
    merge_states(states, scratch_.tile_states, rows, scratch_.keep, scratch_.take);
    value_product(scratch_.weights, rows, values, groups_, sizes_.values, scratch_.output + int64_t{first} * sizes_.values,
                  Factors{scratch_.keep, scratch_.take}, fetch_);
  }

  const LatentExpandedArgs& args_;
  const KvCache& cache_;
  const Step& step_;
  ExpandedSizes sizes_;
  ExpandedScratch<T> scratch_;
  int groups_ = 0;  // groups of the current tile
  Fetch fetch_;     // empty: tiles are computed in scratch and need no prefetch
};

// Runs the parts whose estimated work begins in this thread's share.
template <class T>
void run_expanded(const LatentExpandedArgs& args, const Step& step, int thread, int num_threads) {
  const int heads = args.latent.num_heads;
  int64_t tokens = 0;
  const auto for_each_sequence = [&](auto visit) {
    for (int64_t seq = 0; seq < step.num_seqs; ++seq) {
      const int count = step.query_start[seq + 1] - step.query_start[seq];
      const bool is_skipped = count < args.least_tokens || is_adapted(step, args.skipped, step.query_start[seq + 1] - 1);
      if (!is_skipped) visit(seq, count);
    }
  };
  for_each_sequence([&](int64_t, int count) { tokens += count; });
  if (tokens == 0) return;
  const int64_t wanted = tokens * heads / (num_threads * kPartsOfThread) / kTileRows * kTileRows;
  const int most = static_cast<int>(std::clamp(wanted, int64_t{kLeastPartRows}, int64_t{kMostPartRows}));
  const ExpandedSizes sizes(args);
  const int64_t making = int64_t{sizes.compressed} * (args.latent.nope_dim + sizes.values);
  const int64_t using_it = sizes.padded + sizes.values;

  const auto for_each_part = [&](auto visit) {
    for_each_sequence([&](int64_t seq, int count) {
      const int first_row = step.query_start[seq], past = step.seq_lens[seq] - count;
      for (int head = 0; head < heads; ++head)
        for (int row = 0; row < count; row += most) {
          const LatentPart part = {seq, first_row + row, std::min(most, count - row), past + row, head};
          visit(part, part.end_position() * (making + part.rows * using_it));
        }
    });
  };
  int64_t total = 0, done = 0;
  for_each_part([&](const LatentPart&, int64_t cost) { total += cost; });
  const int64_t begin = total / num_threads * thread, end = thread + 1 == num_threads ? total : total / num_threads * (thread + 1);
  Expander<T> expander(args, step, thread);
  for_each_part([&](const LatentPart& part, int64_t cost) {
    if (begin <= done && done < end) expander.run(part);
    done += cost;
  });
}

}  // namespace headrace
