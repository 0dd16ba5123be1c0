// Paged attention on a CPU.
//
// The context is cut into tiles of kTileKeys keys, counted from its start. A work item is a few tokens of one sequence
// with all query heads of one KV head (so that grouped heads share each read of a key), over either all tiles that
// these tokens see, or, when a lone long sequence would leave threads idle, over one of them. A row's tiles are always
// computed apart and merged in order (the online softmax of Milakov and Gimelshein 2018), so a result is the same to
// the bit whichever way the work was cut: by threads, by batch, or by the chunks of its prompt.
#include "attention.h"

#include <algorithm>

#include "attention_tile.h"

namespace headrace {
namespace {

constexpr int kTileRows = 48;             // query rows of one item, about: enough to pay for packing the keys
constexpr int64_t kPackingRows = 8;       // packing a tile costs about as much as this many query rows
constexpr int64_t kCounterBytes = 16384;  // of the workspace: finished tiles of each split (sequence, KV head)
constexpr int64_t kEnoughItems = 6;       // for each thread: the work is balanced without splitting sequences

struct Shape {
  int group;            // query heads of a KV head
  int tokens_per_item;
  int rows;             // most query rows of an item
  int padded;           // head_dim in whole vectors

  int64_t partial_floats() const { return padded + 2; }  // a row's output, largest score and sum
};

Shape shape_of(const AttentionArgs& args) {
  const int group = args.source.num_heads / args.source.cache.num_kv_heads;
  const int tokens = std::max(1, kTileRows / group);
  return {group, tokens, tokens * group, round_up_to(args.source.cache.head_dim, kLanes)};
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

inline int first_visible(int position, int window) { return window > 0 ? std::max(0, position - window + 1) : 0; }

inline char* head_at(const void* base, int64_t row, int64_t stride, int head, const RotaryArgs& args) {
  return const_cast<char*>(row_at(base, row, stride, args.type)) + head * args.cache.head_dim * size_of(args.type);
}

// What one thread keeps while it works on an item. Rows are padded to whole vectors.
template <class T>
struct Scratch {
  T* queries;           // [rows, padded]
  T* keys;              // [padded / kPairs][kTileKeys][kPairs]
  T* values;            // [kTileKeys / kPairs][padded][kPairs]
  T* staging;           // [kTileKeys, padded], where the storage type is not T
  T* weights;           // [rows, kTileKeys]
  T* zeros;             // [padded]
  float* scores;        // [rows, kTileKeys]
  float* tile_output;   // [rows, padded]
  float* output;        // [rows, padded]
  float* row;           // [padded]
  float* key_scales;    // [kTileKeys]
  float* value_scales;  // [kTileKeys]
  RowState* tile_states;  // [rows]
  RowState* states;       // [rows]
  const T** places;       // [kTileKeys]
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
  take(from, padded, scratch.zeros);
  take(from, rows * kTileKeys, scratch.scores);
  take(from, rows * padded, scratch.tile_output);
  take(from, rows * padded, scratch.output);
  take(from, padded, scratch.row);
  take(from, int64_t{kTileKeys}, scratch.key_scales);
  take(from, int64_t{kTileKeys}, scratch.value_scales);
  take(from, rows, scratch.tile_states);
  take(from, rows, scratch.states);
  take(from, int64_t{kTileKeys}, scratch.places);
  return from;
}

inline void store_row(float* to, const float* from, int count) { std::copy(from, from + count, to); }
inline void store_row(Bf16* to, const float* from, int count) {
  for (int i = 0; i < count; i += kLanes) store_bf16(to + i, load_floats(from + i));
}

inline bool is_stored_as(CacheType type, const float*) { return type == CacheType::kFloat; }
inline bool is_stored_as(CacheType type, const Bf16*) { return type == CacheType::kBf16; }

// The work of one thread on one attention op.
template <class T>
class Worker {
 public:
  Worker(const AttentionArgs& args, const Step& step, int thread)
      : args_(args), cache_(args.source.cache), step_(step), shape_(shape_of(args)) {
    lay_out(shape_, step.thread_scratch(thread), scratch_);
    std::fill(scratch_.zeros, scratch_.zeros + shape_.padded, T{});
  }

  // All tiles of an item, then its output.
  void run(const Item& item) {
    prepare(item, item.first_tile, true);
    const int rows = item.tokens * shape_.group;
    reset(rows);
    for (int tile = item.first_tile; tile < item.end_tile; ++tile) {
      compute_tile(item, tile);
      for (int row = 0; row < rows; ++row)
        merge_row(scratch_.states[row], scratch_.output + row * shape_.padded, scratch_.tile_states[row],
                  scratch_.tile_output + row * shape_.padded, shape_.padded);
    }
    write_output(item);
  }

  // One tile of a split item into `partials`, [tiles, rows, partial_floats]; whoever finishes the last tile merges all.
  void run_split(const Item& item, int tile, float* partials, uint32_t* finished) {
    prepare(item, tile, tile == item.end_tile - 1);
    compute_tile(item, tile);
    const int rows = item.tokens * shape_.group, tiles = item.end_tile - item.first_tile;
    const int64_t stride = shape_.partial_floats();
    float* to = partials + (tile - item.first_tile) * rows * stride;
    for (int row = 0; row < rows; ++row, to += stride) {
      std::copy_n(scratch_.tile_output + row * shape_.padded, shape_.padded, to);
      to[shape_.padded] = scratch_.tile_states[row].largest;
      to[shape_.padded + 1] = scratch_.tile_states[row].sum;
    }
    if (__atomic_add_fetch(finished, 1, __ATOMIC_ACQ_REL) != static_cast<uint32_t>(tiles)) return;
    __atomic_store_n(finished, 0u, __ATOMIC_RELAXED);  // ready for the next op, which a barrier parts from this one
    reset(rows);
    for (const float* from = partials; from != partials + tiles * rows * stride; from += rows * stride)
      for (int row = 0; row < rows; ++row) {
        const float* partial = from + row * stride;
        merge_row(scratch_.states[row], scratch_.output + row * shape_.padded,
                  {partial[shape_.padded], partial[shape_.padded + 1]}, partial, shape_.padded);
      }
    write_output(item);
  }

 private:
  // Queries in T. In a fused decode step also the token's own key and value, which the last tile then reads.
  void prepare(const Item& item, int tile, bool has_last_tile) {
    const int base = tile * kTileKeys;
    prefetch(item, cache_.keys, base, std::min(kTileKeys, item.last_position() + 1 - base));
    const RotaryArgs& source = args_.source;
    const bool fused = fuses_decode(source, step_);
    const int head_dim = cache_.head_dim;
    std::fill(scratch_.row, scratch_.row + shape_.padded, 0.0f);
    T* to = scratch_.queries;
    for (int token = 0; token < item.tokens; ++token) {
      for (int g = 0; g < shape_.group; ++g, to += shape_.padded) {
        const int64_t row = item.first_row + token;
        const int head = item.kv_head * shape_.group + g;
        if (fused)
          prepare_query(source, step_, row, head, scratch_.row);
        else
          load_values(head_at(source.query, row, source.query_stride, head, source), source.type, head_dim,
                      scratch_.row);
        store_row(to, scratch_.row, shape_.padded);
      }
    }
    if (fused && has_last_tile) write_key_value(source, step_, item.first_row, item.kv_head, scratch_.row);
  }

  void reset(int rows) {
    std::fill(scratch_.output, scratch_.output + rows * shape_.padded, 0.0f);
    std::fill(scratch_.states, scratch_.states + rows, RowState{-__builtin_inff(), 0.0f});
  }

  // Every row's softmax over one tile, into tile_states and tile_output.
  void compute_tile(const Item& item, int tile) {
    const int rows = item.tokens * shape_.group, padded = shape_.padded;
    // Whole vectors of keys that no row may see are left out; a vector's place in the tile stays the same, and
    // with it the order of every sum.
    const int tile_start = tile * kTileKeys;
    const int hidden = std::max(0, first_visible(item.first_position, args_.window) - tile_start);
    const int base = tile_start + hidden / kLanes * kLanes;
    const int count = std::min(tile_start + kTileKeys, item.last_position() + 1) - base;
    const int keys = round_up_to(count, kLanes);

    prefetch(item, cache_.values, base, count);
    locate(item, cache_.keys, base, count, keys);
    pack_keys(scratch_.places, keys, round_up_to(cache_.head_dim, kPairs<T>), scratch_.keys);
    product(scratch_.queries, padded, rows, scratch_.keys, keys * kPairs<T>,
            round_up_to(cache_.head_dim, kPairs<T>) / kPairs<T>, keys, scratch_.scores, kTileKeys);

    const ScoreRule rule = rule_for(item, base, count, keys);
    for (int row = 0; row < rows; ++row) {
      const int position = item.first_position + row / shape_.group;
      const int first = std::max(0, first_visible(position, args_.window) - base);
      const int end = std::min(keys, position + 1 - base);
      scratch_.tile_states[row] = weigh_row(scratch_.scores + row * kTileKeys, keys, first, end, rule,
                                            scratch_.weights + row * kTileKeys);
    }

    const int next = tile_start + kTileKeys, left = item.last_position() + 1 - next;
    if (left > 0) prefetch(item, cache_.keys, next, std::min(left, kTileKeys));
    locate(item, cache_.values, base, count, keys);
    if (direct_values(scratch_.weights, kTileKeys, rows, scratch_.places, keys, cache_.head_dim, scratch_.tile_output,
                      padded))
      return;
    pack_values(scratch_.places, keys, cache_.head_dim, padded, scratch_.values);
    product(scratch_.weights, kTileKeys, rows, scratch_.values, padded * kPairs<T>, keys / kPairs<T>, padded,
            scratch_.tile_output, padded);
  }

  // Points `places` at the rows of keys [base, base + count), widened to T where they are stored otherwise; beyond
  // them, where a slot may hold anything, at zeros.
  void locate(const Item& item, const void* stored, int base, int count, int keys) {
    const int64_t row_bytes = cache_.head_dim * bytes_of(cache_.type);
    const bool direct = is_stored_as(cache_.type, scratch_.staging);
    for_each_row(item, base, count, [&](int key, int64_t index) {
      const char* from = static_cast<const char*>(stored) + index * row_bytes;
      if (direct) {
        scratch_.places[key] = reinterpret_cast<const T*>(from);
        return;
      }
      T* to = scratch_.staging + key * shape_.padded;
      std::fill(scratch_.row + cache_.head_dim, scratch_.row + shape_.padded, 0.0f);
      read_cache_row(cache_.type, from, cache_.head_dim, scratch_.row);
      store_row(to, scratch_.row, shape_.padded);
      scratch_.places[key] = to;
    });
    for (int key = count; key < keys; ++key) scratch_.places[key] = scratch_.zeros;
  }

  // Rows lie in blocks all over memory, each too short for the hardware to see a stream.
  void prefetch(const Item& item, const void* stored, int base, int count) const {
    const int64_t row_bytes = cache_.head_dim * bytes_of(cache_.type);
    for_each_row(item, base, count, [&](int, int64_t index) {
      const char* from = static_cast<const char*>(stored) + index * row_bytes;
      for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(from + at, 0, 2);  // second-level cache
    });
  }

  // visit(key, row of the cache) for keys [base, base + count) of the item's sequence.
  template <class Visit>
  void for_each_row(const Item& item, int base, int count, Visit visit) const {
    const int32_t* blocks = step_.block_table + item.seq * step_.block_table_stride;
    int block = base / cache_.block_size, offset = base % cache_.block_size;
    for (int key = 0; key < count; ++block, offset = 0) {
      const int64_t first = (int64_t{blocks[block]} * cache_.num_kv_heads + item.kv_head) * cache_.block_size;
      for (; offset < cache_.block_size && key < count; ++offset, ++key) visit(key, first + offset);
    }
  }

  ScoreRule rule_for(const Item& item, int base, int count, int keys) {
    ScoreRule rule = {args_.scale, args_.soft_cap, nullptr, nullptr};
    if (!is_scaled(cache_.type)) return rule;
    if (cache_.key_scales != nullptr) rule.key_scales = scratch_.key_scales;
    if (cache_.value_scales != nullptr) rule.value_scales = scratch_.value_scales;
    if (cache_.key_scales == nullptr) rule.scale *= cache_.key_scale;
    for_each_row(item, base, count, [&](int key, int64_t index) {
      if (rule.key_scales != nullptr) scratch_.key_scales[key] = cache_.key_scales[index];
      if (rule.value_scales != nullptr) scratch_.value_scales[key] = cache_.value_scales[index];
    });
    for (int key = count; key < keys; ++key) scratch_.key_scales[key] = scratch_.value_scales[key] = 0.0f;
    return rule;
  }

  void write_output(const Item& item) {
    const int head_dim = cache_.head_dim;
    const bool scaled = is_scaled(cache_.type) && cache_.value_scales == nullptr;
    const float value_scale = scaled ? cache_.value_scale : 1.0f;
    for (int row = 0; row < item.tokens * shape_.group; ++row) {
      float* from = scratch_.output + row * shape_.padded;
      const float factor = value_scale / scratch_.states[row].sum;
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
  Scratch<T> scratch_;
};

// The division of a step's work: the same on every thread, from the step's shape alone.
class Division {
 public:
  Division(const AttentionArgs& args, const Step& step, int num_threads)
      : args_(args), step_(step), shape_(shape_of(args)), heads_(args.source.cache.num_kv_heads) {
    int64_t items = 0;
    for_each_group([&](const Item& group) {
      items += heads_;
      total_ += heads_ * cost(group);
    });
    may_split_ = num_threads > 1 && items < kEnoughItems * num_threads;
  }

  // The items whose work begins in this thread's share, in order.
  template <class T>
  void run_share(Worker<T>& worker, int thread, int num_threads) {
    const int64_t begin = total_ * thread / num_threads, end = total_ * (thread + 1) / num_threads;
    int64_t done = 0, unit = 0;
    char* partials = args_.workspace + kCounterBytes;
    for_each_group([&](Item item) {
      const int64_t each = cost(item);
      const int tiles = item.end_tile - item.first_tile;
      const int64_t bytes = int64_t{tiles} * item.tokens * shape_.group * shape_.partial_floats() * 4;
      const bool split = may_split_ && tiles > 1 &&
                         partials + bytes * heads_ <= args_.workspace + args_.workspace_bytes &&
                         (unit + heads_) * 4 <= kCounterBytes;
      for (item.kv_head = 0; item.kv_head < heads_; ++item.kv_head) {
        if (!split) {
          if (begin <= done && done < end) worker.run(item);
          done += each;
          continue;
        }
        for (int tile = item.first_tile; tile < item.end_tile; ++tile, done += each / tiles)
          if (begin <= done && done < end)
            worker.run_split(item, tile, reinterpret_cast<float*>(partials),
                             reinterpret_cast<uint32_t*>(args_.workspace) + unit);
        partials += bytes;
        ++unit;
      }
    });
  }

 private:
  int64_t cost(const Item& item) const {
    return (item.end_tile - item.first_tile) * (kPackingRows + item.tokens * shape_.group);
  }

  // visit(item) for every few tokens of every sequence, in the order of the step; its kv_head is 0.
  template <class Visit>
  void for_each_group(Visit visit) const {
    for (int64_t seq = 0; seq < step_.num_seqs; ++seq) {
      const int first = step_.query_start[seq], end = step_.query_start[seq + 1];
      const int past = step_.seq_lens[seq] - (end - first);
      for (int row = first; row < end; row += shape_.tokens_per_item) {
        Item item = {seq, row, std::min(shape_.tokens_per_item, end - row), past + row - first, 0, 0, 0};
        item.first_tile = first_visible(item.first_position, args_.window) / kTileKeys;
        item.end_tile = item.last_position() / kTileKeys + 1;
        visit(item);
      }
    }
  }

  const AttentionArgs& args_;
  const Step& step_;
  Shape shape_;
  int heads_;
  int64_t total_ = 0;
  bool may_split_ = false;
};

template <class T>
void run(const AttentionArgs& args, const Step& step, int thread, int num_threads) {
  Worker<T> worker(args, step, thread);
  Division(args, step, num_threads).run_share(worker, thread, num_threads);
}

// One head widened, normalised and rotated into to[head_dim].
void prepare_head(const RotaryArgs& args, const Step& step, int64_t row, const void* from, const float* norm,
                  float* to) {
  const int head_dim = args.cache.head_dim, half = args.rotary_half;
  load_values(from, args.type, head_dim, to);
  if (norm != nullptr) norm_values(NormKind::kRms, to, head_dim, norm, nullptr, args.norm_eps, to);
  if (args.cos == nullptr) return;
  const int64_t at = (args.by_token != 0 ? row : step.positions[row]) * int64_t{half};
  const float *cos = args.cos + at, *sin = args.sin + at;
  for (int i = 0; i < half; ++i) {
    const float first = to[i], second = to[half + i];
    to[i] = first * cos[i] - second * sin[i];
    to[half + i] = second * cos[i] + first * sin[i];
  }
}

}  // namespace

void prepare_query(const RotaryArgs& args, const Step& step, int64_t row, int head, float* to) {
  prepare_head(args, step, row, head_at(args.query, row, args.query_stride, head, args), args.query_norm, to);
}

void write_key_value(const RotaryArgs& args, const Step& step, int64_t row, int kv_head, float* work) {
  const KvCache& cache = args.cache;
  const int64_t slot = step.slot_mapping[row];
  if (slot < 0) return;
  const int64_t index = cache_row(cache, slot, kv_head);
  prepare_head(args, step, row, head_at(args.key, row, args.key_stride, kv_head, args), args.key_norm, work);
  write_cache_row(cache, cache.keys, cache.key_scales, cache.key_scale, index, work);
  load_values(head_at(args.value, row, args.value_stride, kv_head, args), args.type, cache.head_dim, work);
  write_cache_row(cache, cache.values, cache.value_scales, cache.value_scale, index, work);
}

void rotary_and_cache_write(const void* raw, const Step& step, int thread, int num_threads) {
  const RotaryArgs& args = *static_cast<const RotaryArgs*>(raw);
  if (fuses_decode(args, step)) return;
  const int heads = args.query_norm != nullptr || args.cos != nullptr ? args.num_heads : 0;
  alignas(64) float work[kMostHeadDim];
  const Range rows = split(step.num_tokens, thread, num_threads);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    for (int head = 0; head < heads; ++head) {
      prepare_query(args, step, row, head, work);
      store_values(work, args.type, args.cache.head_dim, head_at(args.query, row, args.query_stride, head, args));
    }
    for (int head = 0; head < args.cache.num_kv_heads; ++head) write_key_value(args, step, row, head, work);
  }
}

void attention(const void* raw, const Step& step, int thread, int num_threads) {
  const AttentionArgs& args = *static_cast<const AttentionArgs*>(raw);
#if defined(HEADRACE_BF16_DOT)
  // Every value stored in one byte is exact in bf16 too; fp16 ones are not.
  const CacheType type = args.source.cache.type;
  if (type == CacheType::kBf16 || is_scaled(type)) return run<Bf16>(args, step, thread, num_threads);
#endif
  run<float>(args, step, thread, num_threads);
}

}  // namespace headrace

using namespace headrace;

HR_EXPORT void hr_op_rotary_and_cache_write(const void* args, const Step& step, int thread, int num_threads) {
  rotary_and_cache_write(args, step, thread, num_threads);
}

HR_EXPORT void hr_op_attention(const void* args, const Step& step, int thread, int num_threads) {
  attention(args, step, thread, num_threads);
}

// Bytes of thread scratch that hr_op_attention needs.
HR_EXPORT int64_t hr_attention_scratch_bytes(const AttentionArgs* args) {
  Scratch<float> scratch;  // at least as large as that of any other type
  return lay_out(shape_of(*args), nullptr, scratch) - static_cast<char*>(nullptr);
}
