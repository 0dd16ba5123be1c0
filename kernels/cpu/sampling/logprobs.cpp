#include <cmath>

#include "sampling/ranking.h"
#include "sampling/sampling.h"

namespace headrace {
namespace {

int64_t count_above(const float* logits, int64_t vocab_size, float value) {
  int64_t count = 0, token = 0;
  for (; token + kLanes <= vocab_size; token += kLanes)
    count += __builtin_popcount(lanes_above(load_floats(logits + token), all_lanes(value)));
  for (; token < vocab_size; ++token) count += logits[token] > value;
  return count;
}

void report(const LogprobArgs& args, int64_t row, Candidate* found) {
  const Plain values = {args.logits + row * args.stride};
  const float highest = highest_of(values.logits, {0, args.vocab_size}).logit;
  const double log_total = std::log(total_weight(values, args.vocab_size, highest, [](Floats, Floats) {}, [] {}));
  const float log_sum = static_cast<float>(static_cast<double>(highest) + log_total);
  const int64_t own = args.own[row], begin = row * (1 + args.num_top);
  const float own_value = values.one(own);
  args.token_ids[begin] = static_cast<int32_t>(own);
  args.logprobs[begin] = own_value - log_sum;
  args.ranks[row] = static_cast<int32_t>(1 + count_above(values.logits, args.vocab_size, own_value));
  if (!args.num_top) return;
  const int64_t count = first_ranked(values, args.vocab_size, args.num_top, found);
  std::sort(found, found + count, ranks_before);
  for (int64_t i = 0; i < count; ++i) {
    args.token_ids[begin + 1 + i] = found[i].token;
    args.logprobs[begin + 1 + i] = found[i].value - log_sum;
  }
}

}  // namespace
}  // namespace headrace

using namespace headrace;

HR_EXPORT void hr_op_token_logprobs(const void* raw, const Step&, int thread, int num_threads) {
  const LogprobArgs& args = *static_cast<const LogprobArgs*>(raw);
  Candidate* candidates = static_cast<Candidate*>(args.workspace);
  const Range mine = split(args.num_rows, thread, num_threads);
  for (int64_t row = mine.begin; row < mine.end; ++row) report(args, row, candidates + thread * args.vocab_size);
}
