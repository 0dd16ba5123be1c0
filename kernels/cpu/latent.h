// Latent attention (DeepSeek-V2, section 2.1): the pass before it. All heads share one vector per token, which the cache
// keeps: a compressed part, then a rotated key. Queries meet it as it is, once what would make keys of the compressed
// part has been applied to them (linear layers do that); attention's values are the compressed part.
#pragma once

#include "attention_cache.h"
#include "op.h"

namespace headrace {

// The largest vector of a token.
constexpr int kMostLatentDim = 1024;

struct LatentArgs {
  const float* query;   // [num_tokens, query_stride]: of each head nope_dim values, then 2 rotary_half to be rotated
  float* absorbed;      // [num_tokens, absorbed_stride]: of each head cache.head_dim, whose last 2 rotary_half are made here
  const float* latent;  // [num_tokens, latent_stride]: cache.head_dim values, whose last 2 rotary_half are to be rotated
  int64_t query_stride;
  int64_t absorbed_stride;
  int64_t latent_stride;
  const float* cos;  // [positions, rotary_half]
  const float* sin;
  KvCache cache;  // in rows, of one head; its values are its keys
  int32_t num_heads;
  int32_t nope_dim;
  int32_t rotary_half;
  int32_t interleaved;  // 1: dimensions 2i and 2i + 1 are a pair, else i and i + rotary_half; what is left has the latter
};

// The expanded form, of sequences that compute many tokens at once: each head's keys and values are made of the context
// a tile at a time, and many queries read each. Attention of the absorbed form leaves these sequences out.
struct LatentExpandedArgs {
  LatentArgs latent;   // whose pass came before: queries, of which `absorbed` has the rotated part, and the cache
  const void* keys;    // [num_heads, nope_dim, compressed] of what attention multiplies (hr_latent_weight_bytes)
  const void* values;  // [num_heads, value_dim / kGroupKeys, compressed / pair, kGroupKeys, pair] of the same
  int64_t keys_stride;  // elements from head to head
  void* output;        // [num_tokens, output_stride]: num_heads heads of value_dim
  int64_t output_stride;
  float scale;
  int32_t value_dim;
  int32_t least_tokens;  // of a sequence that this form is for
  DType output_type;
};

void latent_write(const void* args, const Step& step, int thread, int num_threads);
void latent_expanded(const void* args, const Step& step, int thread, int num_threads);

}  // namespace headrace
