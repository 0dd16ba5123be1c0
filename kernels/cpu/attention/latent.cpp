#include "attention/latent.h"

namespace headrace {
namespace {

// Rotates [2 * rotary_half] values; the first elements of all pairs come before the second ones.
void rotate(const LatentArgs& args, const float* cos, const float* sin, const float* from, float* to) {
  const int half = args.rotary_half, step = args.interleaved != 0 ? 2 : 1, second_at = args.interleaved != 0 ? 1 : half;
  for (int i = 0; i < half; ++i) {
    const float first = from[i * step], second = from[i * step + second_at];
    to[i] = first * cos[i] - second * sin[i];
    to[half + i] = second * cos[i] + first * sin[i];
  }
}

}  // namespace

void latent_write(const void* raw, const Step& step, int thread, int num_threads) {
  const LatentArgs& args = *static_cast<const LatentArgs*>(raw);
  const int dim = args.cache.head_dim, rotated = 2 * args.rotary_half, compressed = dim - rotated;
  alignas(64) float work[kMostLatentDim];
  const Range rows = split(step.num_tokens, thread, num_threads);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t at = step.positions[row] * int64_t{args.rotary_half};
    const float *cos = args.cos + at, *sin = args.sin + at;
    const float* query = args.query + row * args.query_stride + args.nope_dim;
    float* absorbed = args.absorbed + row * args.absorbed_stride + compressed;
    for (int head = 0; head < args.num_heads; ++head, query += args.nope_dim + rotated, absorbed += dim)
      rotate(args, cos, sin, query, absorbed);
    const int64_t slot = step.slot_mapping[args.cache.slots_offset + row];
    if (slot < 0) continue;
    const float* latent = args.latent + row * args.latent_stride;
    std::memcpy(work, latent, sizeof(float) * static_cast<size_t>(compressed));
    rotate(args, cos, sin, latent + compressed, work + compressed);
    write_cache_row(args.cache, true, cache_row(args.cache, slot, 0), work);
  }
}

}  // namespace headrace

using namespace headrace;

HR_EXPORT void hr_op_latent_write(const void* args, const Step& step, int thread, int num_threads) {
  latent_write(args, step, thread, num_threads);
}
