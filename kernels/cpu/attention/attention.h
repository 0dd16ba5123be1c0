// Paged attention, and the pass before it: q/k norm, rotary embedding and the cache write.
#pragma once

#include "attention/cache.h"
#include "elementwise/elementwise.h"
#include "runtime/op.h"

namespace headrace {

// Arguments of the pass before attention. Attention reads its queries and cache from them too.
struct RotaryArgs {
  void* query;        // [num_tokens, query_stride]: num_heads heads of head_dim; clipped, normed and rotated in place
  // [num_tokens, key_stride]: cache.num_kv_heads heads; null: another layer writes the cache, or none does
  const void* key;
  const void* value;  // [num_tokens, value_stride]; may be the keys
  int64_t query_stride;
  int64_t key_stride;
  int64_t value_stride;
  const float* query_norm;  // [head_dim], any constant offset already added; null: no norm
  const float* key_norm;    // [head_dim] or null
  const float* value_norm;  // [head_dim] or null: values as they are, clipped
  const float* query_norm_bias;  // [head_dim], of layer norms; or null
  const float* key_norm_bias;
  const float* cos;         // [positions, rotary_half], or with by_token [num_tokens, rotary_half]; null: no rotary
  const float* sin;
  KvCache cache;
  float clip;  // largest magnitude of queries, keys and values; 0: no limit
  float norm_eps;
  NormKind norm_kind;
  int32_t norm_last;  // 1: the norms follow the rotation
  int32_t num_heads;
  int32_t rotary_half;  // pairs i, i + rotary_half are rotated (Su et al. 2021, in the halves layout)
  int32_t by_token;
  DType type;           // of query, key and value
  int32_t fuse_decode;  // 1: in a step of single tokens, attention does this pass itself
};

struct AttentionArgs {
  RotaryArgs source;  // queries and cache, and keys and values for a fused decode step
  void* output;       // [num_tokens, output_stride]: num_heads heads of value_dim
  int64_t output_stride;
  const float* sinks;  // [num_heads]: attention sinks, the score of an extra key whose value is 0; or null
  // [num_sinks, cache.num_kv_heads, head_dim]: keys and values that every token sees before those of its context, as
  // they are multiplied; or null
  const float* sink_keys;
  const float* sink_values;
  const float* alibi;  // [num_heads]: ALiBi slopes: a score loses slope * distance of key and query; or null
  // [num_heads, bias_stride], or null: the element at bias_stride / 2 + (key position - query position) is added to a
  // score. Up to kBiasPadding elements beyond those of the largest distances are read.
  const float* distance_bias;
  int64_t bias_stride;
  char* workspace;  // zeroed once by its owner; attention ops with a barrier between them may share it
  int64_t workspace_bytes;
  float scale;
  float soft_cap;  // 0: none
  int32_t window;  // a token attends to tokens that are less than `window` away; 0: to all
  int32_t both_sides;  // 1: a token attends also to the tokens after it, all of which are in the cache
  int32_t value_dim;  // the cache's head_dim, or less if a value is the first part of its key (latent attention)
  int32_t most_tokens;  // sequences that compute more tokens are skipped; 0: no limit
  DType output_type;
  // 1: only the rows in step.logits_rows need to be computed; all keys and values are still written.
  int32_t only_logits;
  int32_t alibi_root;  // 1: a score loses slope * the root of the distance
  // Tokens of a chunk: a token attends to its own and to this many chunks before it, in the place of a window; 0: none.
  int32_t chunk;
  int32_t chunks_before;
  int32_t num_sinks;  // rows of sink_keys
  int32_t grow_after;  // the scores of tokens at later positions grow (see growth_of); 0: none do
  // Slots of adapters, or null: sequences with an adapter in them are not skipped, however many tokens they compute.
  const struct Delta* const* never_skipped;
};

constexpr int kBiasPadding = 64;

// Whether attention does the pass before it itself. If every sequence computes one token, this saves the op and a
// barrier.
inline bool fuses_decode(const RotaryArgs& args, const Step& step) {
  return args.fuse_decode != 0 && step.single_tokens != 0;
}

void rotary_and_cache_write(const void* args, const Step& step, int thread, int num_threads);
void attention(const void* args, const Step& step, int thread, int num_threads);

// Whether attention over a cache of this type multiplies in bf16 instead of float.
bool multiplies_bf16(CacheType type);

// Clips, normalises and rotates a query head of `row` into to[head_dim].
void prepare_query(const RotaryArgs& args, const Step& step, int64_t row, int head, float* to);
// Writes the key and value of one KV head of `row` into the cache. `work` holds head_dim floats.
void write_key_value(const RotaryArgs& args, const Step& step, int64_t row, int kv_head, float* work);

}  // namespace headrace
