// Paged attention, and the pass before it: q/k norm, rotary embedding and the write into the cache.
#pragma once

#include "attention_cache.h"
#include "elementwise.h"
#include "op.h"

namespace headrace {

// How a token's query, key and value are made ready.
struct RotaryArgs {
  void* query;        // [num_tokens, query_stride]: num_heads heads of head_dim; normed and rotated in place
  const void* key;    // [num_tokens, key_stride]: cache.num_kv_heads heads (0: there are queries alone)
  const void* value;  // [num_tokens, value_stride]
  int64_t query_stride;
  int64_t key_stride;
  int64_t value_stride;
  const float* query_norm;  // [head_dim], any constant offset already added; null: no norm
  const float* key_norm;    // [head_dim] or null
  const float* cos;         // [positions, rotary_half], by position or (by_token) by row of the step; null: no rotary
  const float* sin;
  KvCache cache;
  float norm_eps;
  int32_t num_heads;
  int32_t rotary_half;  // pairs i, i + rotary_half are rotated (Su et al. 2021, in the halves layout)
  int32_t by_token;
  DType type;           // of query, key and value
  int32_t fuse_decode;  // 1: a step of single tokens leaves this pass to the attention that reads the same args
};

struct AttentionArgs {
  RotaryArgs source;  // where queries lie, and the cache
  void* output;       // [num_tokens, output_stride]: num_heads heads of value_dim
  int64_t output_stride;
  const float* sinks;  // [num_heads]: of each the score of a key that is not there, which takes its share; or null
  const float* alibi;  // [num_heads]: what a score loses for each token between the two; or null
  char* workspace;  // zeroed once by its owner, then kept; shared by attentions that a barrier parts
  int64_t workspace_bytes;
  float scale;
  float soft_cap;  // 0: none
  int32_t window;  // a token sees itself and the window - 1 before it; 0: all
  int32_t value_dim;  // what a value has of its row: the cache's head_dim, or less where keys and values are one (latent)
  int32_t most_tokens;  // sequences that compute more tokens are left out; 0: none is
  DType output_type;
  // 1: nothing but the rows in step.logits_rows need be computed; all keys and values are still written.
  int32_t only_logits;
};

// Every sequence computes one token: attention makes its queries and cache rows itself, and the pass before it (and
// the barrier between) is not needed.
inline bool fuses_decode(const RotaryArgs& args, const Step& step) {
  return args.fuse_decode != 0 && step.single_tokens != 0;
}

void rotary_and_cache_write(const void* args, const Step& step, int thread, int num_threads);
void attention(const void* args, const Step& step, int thread, int num_threads);

// Whether attention over a cache of this type multiplies bf16, and not floats.
bool multiplies_bf16(CacheType type);

// A query head of `row`, normalised and rotated, into to[head_dim].
void prepare_query(const RotaryArgs& args, const Step& step, int64_t row, int head, float* to);
// The key and value of one KV head of `row`, into the cache. `work` holds head_dim floats.
void write_key_value(const RotaryArgs& args, const Step& step, int64_t row, int kv_head, float* work);

}  // namespace headrace
