// Paged attention on a CPU.
//
// The context is cut into tiles of kTileKeys keys, counted from its start. A work item is a few tokens of one sequence
// with all query heads of one KV head, so that grouped heads share each read of a key. One thread computes all tiles
// that these tokens see; only if few long sequences would leave threads idle, several threads compute one tile each. A
// row's tiles are always computed separately and merged in order (the online softmax of Milakov and Gimelshein 2018),
// so a result is bitwise independent of the division of work: threads, batch and chunks of the prompt.
#include "attention/attention.h"

#include <algorithm>

#include "attention/worker.h"
#include "attention/latent_expanded.h"

namespace headrace {
namespace {

constexpr int64_t kReadingRows = 8;       // reading a group of keys costs about as much as this many query rows
constexpr int64_t kCounterBytes = 16384;  // workspace for counters of finished tiles of split (sequence, KV head)
constexpr int64_t kEnoughItems = 6;       // items per thread that balance the work without splitting sequences

// The division of a step's work among threads. It follows from the step's shape and is the same on every thread.
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

  // Feeds the worker the items whose estimated work begins in this thread's share, in order.
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
        for (int tile = item.first_tile; tile < item.end_tile; ++tile) {
          // A whole item goes to the thread in whose share it begins; of a split item, each tile does.
          const bool mine = begin <= done && done < end;
          if (split) {
            auto* finished = reinterpret_cast<uint32_t*>(args_.workspace) + unit;
            if (mine) worker.feed({item, tile, reinterpret_cast<float*>(partials), finished});
            done += each / tiles;
          } else if (mine) {
            worker.feed({item, tile, nullptr, nullptr});
          }
        }
        if (split) {
          partials += bytes;
          ++unit;
        } else {
          done += each;
        }
      }
    });
    worker.finish();
  }

 private:
  int64_t cost(const Item& item) const {
    const int first = first_visible(item.first_position, args_) / kGroupKeys;
    return ((item.end_key - 1) / kGroupKeys + 1 - first) * (kReadingRows + item.tokens * shape_.group);
  }

  // Calls visit(item) for each item of KV head 0, in the order of the step.
  template <class Visit>
  void for_each_group(Visit visit) const {
    // In a fused decode step every row has to write its key and value.
    const bool all = args_.only_logits == 0 || fuses_decode(args_.source, step_) || step_.num_logits == step_.num_tokens;
    for (int64_t seq = 0; seq < step_.num_seqs; ++seq) {
      const int first = step_.query_start[seq], end = step_.query_start[seq + 1];
      const bool is_long = args_.most_tokens > 0 && end - first > args_.most_tokens;
      if (is_long && !is_adapted(step_, args_.never_skipped, end - 1)) continue;
      const int past = step_.seq_lens[seq] - (end - first);
      for (int row = first; row < end; row += shape_.tokens_per_item) {
        Item item = {seq, row, std::min(shape_.tokens_per_item, end - row), past + row - first, 0, 0, 0, 0};
        // At least one key, although none of these tokens may see any (see `key_lens`).
        item.end_key = std::max(end_visible(item.first_position + item.tokens - 1, num_keys_of(step_, seq), args_),
                                first_visible(item.first_position, args_) + 1);
        item.first_tile = first_visible(item.first_position, args_) / kTileKeys;
        item.end_tile = (item.end_key - 1) / kTileKeys + 1;
        if (all || is_wanted(item)) visit(item);
      }
    }
  }

  bool is_wanted(const Item& item) const {
    const int32_t* rows = step_.logits_rows;
    return std::any_of(rows, rows + step_.num_logits, [&](int32_t row) {
      return item.first_row <= row && row < item.first_row + item.tokens;
    });
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

void rotate(const RotaryArgs& args, const Step& step, int64_t row, float* to) {
  const int half = args.rotary_half;
  const int64_t at = (args.by_token != 0 ? row : step.positions[row]) * int64_t{half};
  const float *cos = args.cos + at, *sin = args.sin + at;
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Floats first = load_floats(to + i), second = load_floats(to + half + i);
    const Floats c = load_floats(cos + i), s = load_floats(sin + i);
    store_floats(to + i, first * c - second * s);
    store_floats(to + half + i, second * c + first * s);
  }
  for (; i < half; ++i) {
    const float first = to[i], second = to[half + i];
    to[i] = first * cos[i] - second * sin[i];
    to[half + i] = second * cos[i] + first * sin[i];
  }
}

// Converts one head to float and clips it.
void load_head(const RotaryArgs& args, const void* from, float* to) {
  const int head_dim = args.cache.head_dim;
  load_values(from, args.type, head_dim, to);
  if (args.clip <= 0.0f) return;
  for (int i = 0; i < head_dim; ++i) to[i] = std::min(std::max(to[i], -args.clip), args.clip);
}

// Converts one head to float, clips, normalises and rotates it into to[head_dim].
void prepare_head(const RotaryArgs& args, const Step& step, int64_t row, const void* from, const float* norm,
                  const float* bias, float* to) {
  const int head_dim = args.cache.head_dim;
  const auto normalise = [&] { norm_values(args.norm_kind, to, head_dim, norm, bias, args.norm_eps, to); };
  load_head(args, from, to);
  if (norm != nullptr && args.norm_last == 0) normalise();
  if (args.cos != nullptr) rotate(args, step, row, to);
  if (norm != nullptr && args.norm_last != 0) normalise();
}

}  // namespace

void prepare_query(const RotaryArgs& args, const Step& step, int64_t row, int head, float* to) {
  const void* from = head_at(args.query, row, args.query_stride, head, args);
  prepare_head(args, step, row, from, args.query_norm, args.query_norm_bias, to);
}

void write_key_value(const RotaryArgs& args, const Step& step, int64_t row, int kv_head, float* work) {
  const KvCache& cache = args.cache;
  const int64_t slot = step.slot_mapping[cache.slots_offset + row];
  if (slot < 0) return;
  const int64_t index = cache_row(cache, slot, kv_head);
  const void* from = head_at(args.key, row, args.key_stride, kv_head, args);
  prepare_head(args, step, row, from, args.key_norm, args.key_norm_bias, work);
  write_cache_row(cache, true, index, work);
  load_head(args, head_at(args.value, row, args.value_stride, kv_head, args), work);
  if (args.value_norm != nullptr)
    norm_values(args.norm_kind, work, cache.head_dim, args.value_norm, nullptr, args.norm_eps, work);
  write_cache_row(cache, false, index, work);
}

void rotary_and_cache_write(const void* raw, const Step& step, int thread, int num_threads) {
  const RotaryArgs& args = *static_cast<const RotaryArgs*>(raw);
  if (fuses_decode(args, step)) return;
  const bool changes_queries = args.query_norm != nullptr || args.cos != nullptr || args.clip > 0.0f;
  const int heads = changes_queries ? args.num_heads : 0;
  alignas(64) float work[kMostHeadDim];
  const Range rows = split(step.num_tokens, thread, num_threads);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    for (int head = 0; head < heads; ++head) {
      prepare_query(args, step, row, head, work);
      store_values(work, args.type, args.cache.head_dim, head_at(args.query, row, args.query_stride, head, args));
    }
    if (args.key == nullptr) continue;
    for (int head = 0; head < args.cache.num_kv_heads; ++head) write_key_value(args, step, row, head, work);
  }
}

// One-byte elements are exact in bf16; fp16 elements are not.
bool multiplies_bf16(CacheType type) {
#if defined(HEADRACE_BF16_DOT)
  return type == CacheType::kBf16 || is_scaled(type);
#else
  (void)type;
  return false;
#endif
}

void attention(const void* raw, const Step& step, int thread, int num_threads) {
  const AttentionArgs& args = *static_cast<const AttentionArgs*>(raw);
#if defined(HEADRACE_BF16_DOT)
  if (multiplies_bf16(args.source.cache.type)) return run<Bf16>(args, step, thread, num_threads);
#endif
  run<float>(args, step, thread, num_threads);
}

void latent_expanded(const void* raw, const Step& step, int thread, int num_threads) {
  const LatentExpandedArgs& args = *static_cast<const LatentExpandedArgs*>(raw);
#if defined(HEADRACE_BF16_DOT)
  if (multiplies_bf16(args.latent.cache.type)) return run_expanded<Bf16>(args, step, thread, num_threads);
#endif
  run_expanded<float>(args, step, thread, num_threads);
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

HR_EXPORT void hr_op_latent_expanded(const void* args, const Step& step, int thread, int num_threads) {
  latent_expanded(args, step, thread, num_threads);
}

// Bytes of an element of LatentExpandedArgs' keys and values for a cache of this type: 2 is bf16, 4 float.
HR_EXPORT int64_t hr_latent_weight_bytes(int32_t cache_type) {
  return multiplies_bf16(static_cast<CacheType>(cache_type)) ? 2 : 4;
}

// Bytes of thread scratch that hr_op_latent_expanded needs.
HR_EXPORT int64_t hr_latent_expanded_scratch_bytes(const LatentExpandedArgs* args) {
  ExpandedScratch<float> scratch;  // at least as large as that of any other type
  return lay_out(*args, nullptr, scratch) - static_cast<char*>(nullptr);
}
