// The ops of mixtures of experts: see experts.h.
#include "experts/driver.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace headrace {
namespace {

float largest_of(const float* values, int64_t count) {
  float largest = values[0];
  for (int64_t i = 1; i < count; ++i) largest = values[i] > largest ? values[i] : largest;
  return largest;
}

// The scores of a row of logits, both [count]; `scores` is written up to the next whole vector.
void score(Scoring scoring, const float* logits, int64_t count, float* scores) {
  if (scoring == Scoring::kSqrtSoftplus) {
    for (int64_t i = 0; i < count; ++i)
      scores[i] = std::sqrt(logits[i] > 20.0f ? logits[i] : std::log1p(std::exp(logits[i])));
    return;
  }
  const bool is_softmax = scoring == Scoring::kSoftmax;
  const float largest = is_softmax ? largest_of(logits, count) : 0.0f;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats logit = load_floats(logits + i);
    const Floats score = is_softmax ? exponential<true>(logit - largest) : 1.0f / (1.0f + exponential<true>(-logit));
    store_floats(scores + i, score);
  }
  if (!is_softmax) return;
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += scores[i];
  for (int64_t i = 0; i < count; ++i) scores[i] /= sum;
}

// The weights of kSparsemixer, as in `route_experts` of kernels/reference/moe.py. best: [top_k], highest logit first.
void share_by_sparsemixer(const RouteArgs& args, const float* logits, const int32_t* best, float* weights) {
  for (int64_t slot = 0; slot < args.top_k; ++slot) {
    const float own = logits[best[slot]];
    float sum = 0.0f;
    for (int64_t i = 0; i < args.num_experts; ++i) {
      if (std::find(best, best + slot, static_cast<int32_t>(i)) != best + slot) continue;
      const float distance = (own - logits[i]) / std::max(std::abs(logits[i]), own);
      if (!(distance > args.margin)) sum += std::exp(logits[i] - own);
    }
    weights[slot] = 1.0f / sum;
  }
}

// The indices of the highest `top_k` keys, highest first, and of equal ones the lower index first.
void choose_best(const float* keys, int64_t count, int64_t top_k, int32_t* best) {
  int64_t chosen = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (chosen == top_k && !(keys[i] > keys[best[top_k - 1]])) continue;
    int64_t at = chosen < top_k ? chosen++ : top_k - 1;
    for (; at > 0 && keys[i] > keys[best[at - 1]]; --at) best[at] = best[at - 1];
    best[at] = static_cast<int32_t>(i);
  }
}

// Sets the keys of experts outside the best groups to -inf. worth: [num_groups] and best: work memory.
void leave_best_groups(const RouteArgs& args, float* keys, float* worth, int32_t* best) {
  const float lowest = -std::numeric_limits<float>::infinity();
  const int64_t size = args.num_experts / args.num_groups;
  for (int64_t group = 0; group < args.num_groups; ++group) {
    choose_best(keys + group * size, size, args.group_best, best);
    worth[group] = 0.0f;
    for (int64_t i = 0; i < args.group_best; ++i) worth[group] += keys[group * size + best[i]];
  }
  choose_best(worth, args.num_groups, args.groups_chosen, best);
  for (int64_t group = 0; group < args.num_groups; ++group)
    if (std::find(best, best + args.groups_chosen, static_cast<int32_t>(group)) == best + args.groups_chosen)
      std::fill(keys + group * size, keys + (group + 1) * size, lowest);
}

// Offsets of the parts of the op's scratch, and its sizes, for a number of rows.
struct ExpertsScratch {
  int64_t shared_inner, shared_bytes;
  int64_t own_inner, stack, starts, rows, scales, deltas, own_bytes;
};

ExpertsScratch scratch_of(const ExpertsArgs& args, int64_t rows) {
  const PackedWeight &gate_up = args.gate_up[0], &down = args.down[0];
  const int64_t x_bytes = prepared_row_bytes(gate_up);
  const int64_t inner_bytes = prepared_row_bytes(down);
  const int64_t pairs = rows * args.top_k, in_pass = pairs < args.pass_rows ? pairs : args.pass_rows;
  ExpertsScratch at;
  at.shared_inner = rows > kPrepareAloneRows ? rows * x_bytes : 0;
  at.shared_bytes = at.shared_inner + (in_pass > kPrepareAloneRows ? in_pass * inner_bytes : 0);
  at.own_inner = kPrepareAloneRows * x_bytes;
  at.stack = at.own_inner + kPrepareAloneRows * inner_bytes;
  const int64_t first = stack_scratch(gate_up), second = stack_scratch(down);
  at.starts = at.stack + (first > second ? first : second);
  at.rows = at.starts + whole_lines(2 * (args.num_experts + 1) * 4);
  at.scales = at.rows + whole_lines(pairs * 4);
  at.deltas = at.scales + whole_lines(pairs * 4);
  const int64_t k = gate_up.k > down.k ? gate_up.k : down.k;
  at.own_bytes = at.deltas + (args.gate_up_site ? stack_delta_bytes(args.delta_uses, args.delta_width, k) : 0);
  return at;
}

Pairs sort_pairs(const ExpertsArgs& args, int64_t num_rows, const ExpertsScratch& at, char* own) {
  const auto num_experts = static_cast<uint32_t>(args.num_experts);
  auto* starts = reinterpret_cast<int32_t*>(own + at.starts);
  int32_t* next = starts + num_experts + 1;
  auto* rows = reinterpret_cast<int32_t*>(own + at.rows);
  auto* scales = reinterpret_cast<float*>(own + at.scales);
  std::memset(starts, 0, (num_experts + 1) * sizeof(int32_t));
  const int64_t count = num_rows * args.top_k;
  for (int64_t i = 0; i < count; ++i) {
    const auto expert = static_cast<uint32_t>(args.expert_ids[i]);
    if (expert < num_experts) ++starts[expert + 1];
  }
  for (uint32_t expert = 0; expert < num_experts; ++expert) {
    next[expert] = starts[expert];
    starts[expert + 1] += starts[expert];
  }
  for (int64_t i = 0; i < count; ++i) {
    const auto expert = static_cast<uint32_t>(args.expert_ids[i]);
    if (expert >= num_experts) continue;
    const int32_t place = next[expert]++;
    rows[place] = static_cast<int32_t>(i / args.top_k);
    scales[place] = args.weights[i];
  }
  return {starts, rows, scales};
}

// The pass that begins at a pair: as many whole experts as fit, or a part of one that does not fit.
Range next_pass(const Pairs& pairs, int64_t num_experts, int64_t begin, int64_t most) {
  int64_t end = begin;
  for (int64_t expert = 0; expert < num_experts && pairs.starts[expert + 1] <= begin + most; ++expert)
    if (pairs.starts[expert + 1] > end) end = pairs.starts[expert + 1];
  const int64_t all = pairs.starts[num_experts];
  if (end == begin) end = begin + most < all ? begin + most : all;
  return {begin, end};
}

void clear_own_columns(const ExpertsArgs& args, int64_t rows, int thread, int num_threads) {
  const Range columns = split(args.down[0].n, thread, num_threads, kPanelRows);
  for (int64_t row = 0; row < rows; ++row)
    std::memset(args.out + row * args.out_stride + columns.begin, 0,
                static_cast<size_t>(columns.end - columns.begin) * sizeof(float));
}

void count_read(const ExpertsArgs& args, const Pairs& pairs) {
  for (int64_t expert = 0; expert < args.num_experts; ++expert)
    *args.experts_read += pairs.starts[expert + 1] > pairs.starts[expert];
  if (!args.loads) return;
  for (int64_t expert = 0; expert < args.num_experts; ++expert)
    args.loads[expert] += pairs.starts[expert + 1] - pairs.starts[expert];
}

// The key that chooses a row's replicas: kernels/expert_places.py:replica_keys, or the row's index if it is no token.
uint32_t replica_key(const RouteArgs& args, const Step& step, int64_t row) {
  if (args.rows != Rows::kTokens && args.rows != Rows::kLogits) return static_cast<uint32_t>(row);
  const int64_t token = args.rows == Rows::kLogits ? step.logits_rows[row] : row;
  const auto id = static_cast<uint32_t>(step.token_ids[token]), position = static_cast<uint32_t>(step.positions[token]);
  return (id * 2654435761u + position * 2246822519u) >> 16;
}

int32_t place_of(const RouteArgs& args, int32_t expert, uint32_t key) {
  const uint32_t replica = (key + static_cast<uint32_t>(expert)) % static_cast<uint32_t>(args.replicas[expert]);
  return args.places[expert * args.most_replicas + replica];
}

StackRun first_stack(const ExpertsArgs& args, int64_t rows, const Pairs& pairs, char* scratch) {
  StackRun run = {};
  run.experts = args.gate_up;
  run.biases = args.gate_up_bias;
  run.num_experts = args.num_experts;
  run.num_rows = rows;
  run.pairs = pairs;
  run.scratch = scratch;
  run.gathers = true;
  run.linear.x = args.x;
  run.linear.x_stride = args.x_stride;
  run.linear.x_thread_stride = args.x_thread_stride;
  run.linear.x_dtype = args.x_dtype;
  run.linear.out = args.inner;
  run.linear.out_stride = args.down[0].k;
  run.linear.out_dtype = args.inner_dtype;
  run.linear.activation = args.activation;
  return run;
}

StackRun second_stack(const ExpertsArgs& args, const Pairs& pairs, char* scratch) {
  StackRun run = {};
  run.experts = args.down;
  run.biases = args.down_bias;
  run.num_experts = args.num_experts;
  run.pairs = pairs;
  run.scratch = scratch;
  run.linear.x = args.inner;
  run.linear.x_stride = args.down[0].k;
  run.linear.x_dtype = args.inner_dtype;
  run.linear.out = args.out;
  run.linear.out_stride = args.out_stride;
  return run;
}

}  // namespace
}  // namespace headrace

using namespace headrace;

HR_EXPORT void hr_op_route(const void* raw, const Step& step, int thread, int num_threads) {
  const auto& args = *static_cast<const RouteArgs*>(raw);
  const int64_t count = args.num_experts, padded = (count + kLanes - 1) / kLanes * kLanes;
  float* logits = reinterpret_cast<float*>(step.thread_scratch(thread));
  float *scores = logits + padded, *sums = scores + padded, *worth = sums + padded;
  const bool is_grouped = args.num_groups > 1;
  for (int64_t i = count; i < padded; ++i) logits[i] = 0.0f;
  const Range mine = split(step.rows(args.rows, args.fixed_rows), thread, num_threads);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    for (int64_t i = 0; i < count; ++i)
      logits[i] = load_one(args.logits, row * args.logits_stride + i, args.logits_dtype);
    const bool is_sparsemixer = args.scoring == Scoring::kSparsemixer;
    if (!is_sparsemixer) score(args.scoring, logits, count, scores);
    if (args.bias || is_grouped)
      for (int64_t i = 0; i < count; ++i) sums[i] = scores[i] + (args.bias ? args.bias[i] : 0.0f);
    if (is_grouped) leave_best_groups(args, sums, worth, reinterpret_cast<int32_t*>(worth + padded));
    int32_t* best = args.expert_ids + row * args.top_k;
    float* weights = args.weights + row * args.top_k;
    choose_best(args.bias || is_grouped ? sums : logits, count, args.top_k, best);
    if (is_sparsemixer)
      share_by_sparsemixer(args, logits, best, weights);
    else
      for (int64_t slot = 0; slot < args.top_k; ++slot) weights[slot] = scores[best[slot]];
    float sum = 0.0f;
    for (int64_t slot = 0; slot < args.top_k; ++slot) sum += weights[slot];
    const float divisor = args.renormalise == 0 ? 1.0f : sum > 1e-20f ? sum : 1e-20f;
    for (int64_t slot = 0; slot < args.top_k; ++slot) {
      weights[slot] = weights[slot] / divisor * args.scale;
      if (args.factors) weights[slot] *= args.factors[best[slot]];
    }
    if (!args.places) continue;
    const uint32_t key = replica_key(args, step, row);
    for (int64_t slot = 0; slot < args.top_k; ++slot) best[slot] = place_of(args, best[slot], key);
  }
}

HR_EXPORT void hr_op_experts(const void* raw, const Step& step, int thread, int num_threads) {
  const auto& args = *static_cast<const ExpertsArgs*>(raw);
  const int64_t rows = step.rows(args.rows, args.fixed_rows);
  if (rows <= 0) return;
  const ExpertsScratch at = scratch_of(args, rows);
  char* own = step.thread_scratch(thread);
  const Pairs pairs = sort_pairs(args, rows, at, own);
  if (thread == 0) count_read(args, pairs);
  if (args.add_to_out == 0) clear_own_columns(args, rows, thread, num_threads);
  Step inner_step = step;
  inner_step.shared_scratch += at.shared_inner;
  inner_step.scratch += at.own_inner;
  StackRun first = first_stack(args, rows, pairs, own + at.stack);
  StackRun second = second_stack(args, pairs, own + at.stack);
  StackDeltas first_deltas, second_deltas;
  if (step.adapters && args.gate_up_site) {
    const RowAdapters* adapters = step.adapters + (args.rows == Rows::kLogits ? 1 : 0);
    first_deltas = stack_deltas(args.gate_up_site, adapters, own + at.deltas);
    second_deltas = stack_deltas(args.down_site, adapters, own + at.deltas);
    first.deltas = &first_deltas;
    second.deltas = &second_deltas;
  }
  const int64_t all = pairs.starts[args.num_experts];
  for (int64_t begin = 0; begin < all;) {
    first.pass = second.pass = next_pass(pairs, args.num_experts, begin, args.pass_rows);
    args.gate_up[0].tiles->experts(first, step, thread, num_threads);
    step.team->barrier();  // `inner` is written
    second.num_rows = second.pass.end - second.pass.begin;
    second.x.base = nullptr;
    args.down[0].tiles->experts(second, inner_step, thread, num_threads);
    begin = first.pass.end;
    if (begin < all) step.team->barrier();  // `inner` is read
  }
}

// The scratch of hr_op_experts for up to max_rows rows.
HR_EXPORT void hr_experts_scratch(const ExpertsArgs* args, int64_t max_rows, ScratchNeed* need) {
  const ExpertsScratch at = scratch_of(*args, max_rows);
  need->shared_bytes = at.shared_bytes;
  need->per_thread_bytes = at.own_bytes;
}
