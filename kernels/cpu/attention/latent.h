// Latent attention (DeepSeek-V2, section 2.1): the pass before it, and its expanded form. The cache stores one vector
// per token, shared by all heads: a compressed part, then a rotated key. In the absorbed form linear layers apply the
// key projection to the queries, which then attend to the cached vectors directly; the values are the compressed part.
#pragma once

#include "attention/cache.h"
#include "runtime/op.h"

namespace headrace {

// The largest size of a token's vector.
constexpr int kMostLatentDim = 1024;

struct LatentArgs {
  const float* query;   // [num_tokens, query_stride]: per head nope_dim values, then 2 rotary_half to rotate
  float* absorbed;      // [num_tokens, absorbed_stride]: cache.head_dim per head; writes the last 2 rotary_half
  const float* latent;  // [num_tokens, latent_stride]: cache.head_dim values, the last 2 rotary_half to rotate
  int64_t query_stride;
  int64_t absorbed_stride;
  int64_t latent_stride;
  const float* cos;  // [positions, rotary_half]
  const float* sin;
  KvCache cache;  // of one head, in rows; values are the same memory as keys
  int32_t num_heads;
  int32_t nope_dim;
  int32_t rotary_half;
  int32_t interleaved;  // 1: rotates pairs 2i, 2i + 1, else i, i + rotary_half; results are in the latter order
};

// The expanded form, for sequences that compute many tokens at once: each head's keys and values are computed from the
// context tile by tile, and many queries read each tile. Attention in the absorbed form skips these sequences.
struct LatentExpandedArgs {
  LatentArgs latent;   // the arguments of the pass before: queries (`absorbed` has the rotated part) and the cache
  const void* keys;    // [num_heads, nope_dim, compressed] in the type of hr_latent_weight_bytes
  const void* values;  // [num_heads, value_dim / kGroupKeys, compressed / pair, kGroupKeys, pair] in the same type
  int64_t keys_stride;  // elements from head to head
  void* output;        // [num_tokens, output_stride]: num_heads heads of value_dim
  int64_t output_stride;
  float scale;
  int32_t value_dim;
  int32_t least_tokens;  // sequences that compute fewer tokens are skipped
  DType output_type;
  const struct Delta* const* skipped;  // slots of adapters, or null: sequences with an adapter in them are skipped
};

void latent_write(const void* args, const Step& step, int thread, int num_threads);
void latent_expanded(const void* args, const Step& step, int thread, int num_threads);

}  // namespace headrace
