#include "sampling/sampling.h"

#include <cmath>

#include "sampling/ranking.h"

namespace headrace {
namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

typedef uint64_t Words __attribute__((vector_size(4 * kLanes)));
constexpr int kWords = kLanes / 2;

// SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014), for one word or a vector of words.
template <class Word>
inline Word mix(Word z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

inline uint64_t row_key(uint64_t seed, int64_t position) {
  return mix(seed + kGolden * (static_cast<uint64_t>(position) + 1));
}

inline double noise(uint64_t key, int64_t token) {
  const uint64_t word = mix(key + kGolden * (static_cast<uint64_t>(token) + 1));
  const double uniform = (static_cast<double>(word >> 12) + 0.5) * 0x1p-52;
  return -std::log(-std::log(uniform));
}

// The token with the highest score in a part of a row; of equals the first.
struct Best {
  double score;
  int64_t token;
};

constexpr float kNoChance = -37.0f;  // below the logarithm of 2^-53, which is the least value of 1 - u

// 1 - u of the words of kLanes tokens, rounded down to 24 bits.
inline Floats less_than_one(Words first, Words second) {
  first = ~first >> 40;
  second = ~second >> 40;
#if defined(HEADRACE_AVX512)
  const __m256i low = _mm512_cvtepi64_epi32(reinterpret_cast<__m512i>(first));
  const __m256i high = _mm512_cvtepi64_epi32(reinterpret_cast<__m512i>(second));
  const Ints bits = reinterpret_cast<Ints>(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
#else
  Ints bits;
  for (int lane = 0; lane < kWords; ++lane) {
    bits[lane] = static_cast<int32_t>(first[lane]);
    bits[kWords + lane] = static_cast<int32_t>(second[lane]);
  }
#endif
  return __builtin_convertvector(bits, Floats) * 0x1p-24f;
}

inline void keep_higher(Best& best, Best other) {
  if (other.score > best.score || (other.score == best.score && other.token < best.token)) best = other;
}

// The exact score of the likeliest token, a good start of a draw.
Best start_of_draw(const Tempered& values, uint64_t key, int64_t token) {
  return {static_cast<double>(values.one(token)) + noise(key, token), token};
}

inline void keep_higher(Highest& best, Highest other) {
  if (is_nan(best.logit)) return;
  if (is_nan(other.logit) || other.logit > best.logit) best = other;
}

// The best score in `part` of a row, of the tokens that rank up to `last`. start: the exact score of one of them.
//
// With u the token's uniform number, -log(-log u) > d requires u > exp(-e^-d) >= 1 - e^-d, that is 1 - u < e^-d. So the
// two exact logarithms are needed only for tokens with 1 - u < e^(tempered - best so far), up to rounding.
Best draw_ranked(const Tempered& values, uint64_t key, Range part, Candidate last, Best start) {
  Best best = start;
  float limit = static_cast<float>(best.score);
  int64_t token = part.begin;
  const auto consider = [&](int64_t candidate) {
    const float value = values.one(candidate);
    if (ranks_before(last, {value, static_cast<int32_t>(candidate)})) return;
    keep_higher(best, {static_cast<double>(value) + noise(key, candidate), candidate});
    limit = static_cast<float>(best.score);
  };
  Words offsets;
  for (int lane = 0; lane < kWords; ++lane) offsets[lane] = static_cast<uint64_t>(lane + 1) * kGolden;
  const float no_chance = std::max(last.value, limit + kNoChance);  // the limit only rises
  for (; token + kLanes <= part.end; token += kLanes) {
    const Floats value = values.lanes(token);
    if (lanes_above(all_lanes(no_chance), value) == kAllLanes) continue;
    // The bound is raised by one part in a thousand, far more than all rounding here.
    const Floats bound = exponential<true>(value - limit) * 1.001f;
    const uint64_t base = key + kGolden * static_cast<uint64_t>(token);
    const Floats rest = less_than_one(mix(offsets + base), mix(offsets + (base + kGolden * kWords)));
    for (uint32_t lanes = lanes_above(bound, rest); lanes; lanes &= lanes - 1) consider(token + __builtin_ctz(lanes));
  }
  for (; token < part.end; ++token) consider(token);
  return best;
}

constexpr Candidate kNoLast = {-__builtin_inff(), INT32_MAX};

struct Truncation {
  int64_t top_k;
  double top_p, min_p;
};

constexpr float kGaps[] = {1.0f, 2.0f, 3.0f, 4.0f, 6.0f, 8.0f, 12.0f, 16.0f};
constexpr int kNumGaps = sizeof(kGaps) / sizeof(float);

// The weights e^(value - first) of a row: of all tokens, and of those less than each of kGaps below the first.
struct Masses {
  double total, within[kNumGaps];
};

// `within` is without the last few tokens, so that it is a lower bound.
Masses masses_of(const Tempered& values, int64_t vocab_size, float first) {
  Masses found = {};
  Floats runs[kNumGaps] = {};
  const auto add = [&](Floats ahead, Floats weight) {
    if (!lanes_above(ahead, all_lanes(-kGaps[kNumGaps - 1]))) return;
#pragma GCC unroll 8
    for (int gap = 0; gap < kNumGaps; ++gap) runs[gap] += choose(ahead > -kGaps[gap], weight, Floats{});
  };
  const auto end_run = [&] {
    for (int gap = 0; gap < kNumGaps; ++gap) {
      found.within[gap] += static_cast<double>(sum_of_lanes(runs[gap]));
      runs[gap] = Floats{};
    }
  };
  found.total = total_weight(values, vocab_size, first, add, end_run);
  return found;
}

// Moves the fewest tokens that rank first and have this mass to the front of `found`. Returns their number.
template <class Weight>
int64_t first_of_mass(Candidate* found, int64_t count, double mass, Weight weight) {
  int64_t begin = 0, end = count;  // the last token that is kept is in [begin, end), with `mass` from `begin` on
  while (end - begin > 32) {
    const int64_t middle = begin + (end - begin) / 2;
    std::nth_element(found + begin, found + middle, found + end, ranks_before);
    double half = 0.0;
    for (int64_t i = begin; i < middle; ++i) half += weight(found[i]);
    if (half >= mass) {
      end = middle;
    } else {
      begin = middle;
      mass -= half;
    }
  }
  std::sort(found + begin, found + end, ranks_before);
  for (; begin < end; ++begin) {
    mass -= weight(found[begin]);
    if (mass <= 0.0) return begin + 1;
  }
  return end;
}

// Moves the tokens that truncation keeps to the front of `found`, in no order, and returns their number.
int64_t truncate(const Tempered& values, int64_t vocab_size, float first, const Truncation& rule, Candidate* found) {
  const auto weight = [&](const Candidate& each) {
    return std::exp(static_cast<double>(each.value) - static_cast<double>(first));
  };
  int64_t count;
  double whole = 0.0;
  const bool by_mass = rule.top_k <= 0 && rule.min_p <= 0.0;
  if (rule.top_k > 0) {
    count = first_ranked(values, vocab_size, std::min(rule.top_k, vocab_size), found);
  } else if (!by_mass) {
    count = gather(values, vocab_size, static_cast<float>(first + std::log(rule.min_p) - 0.01), found);
  } else {
    const Masses masses = masses_of(values, vocab_size, first);
    whole = masses.total;
    int gap = 0;
    while (gap < kNumGaps && masses.within[gap] < rule.top_p * whole * (1.0 + 1e-5)) ++gap;
    count = gather(values, vocab_size, gap < kNumGaps ? first - kGaps[gap] : -__builtin_inff(), found);
  }
  if (rule.min_p > 0.0)
    count = std::partition(found, found + count, [&](const Candidate& each) { return weight(each) >= rule.min_p; }) -
            found;
  if (rule.top_p >= 1.0) return count;
  if (!by_mass)
    for (int64_t i = 0; i < count; ++i) whole += weight(found[i]);
  return first_of_mass(found, count, rule.top_p * whole, weight);
}

// With at most this many, each one's noise is computed.
constexpr int64_t kFewCandidates = 256;

Best draw_truncated(const SampleArgs& args, int64_t row, Highest highest, Candidate* found) {
  const Tempered values = {args.logits + row * args.stride, args.temperature[row]};
  const Truncation rule = {args.top_k[row], args.top_p[row], args.min_p[row]};
  const int64_t kept = truncate(values, args.vocab_size, values.one(highest.token), rule, found);
  const uint64_t key = row_key(args.seeds[row], args.positions[row]);
  if (kept > kFewCandidates) {
    const auto [likeliest, last] = std::minmax_element(found, found + kept, ranks_before);
    return draw_ranked(values, key, {0, args.vocab_size}, *last, start_of_draw(values, key, likeliest->token));
  }
  Best best = {-__builtin_inf(), 0};
  for (int64_t i = 0; i < kept; ++i)
    keep_higher(best, {static_cast<double>(found[i].value) + noise(key, found[i].token), found[i].token});
  return best;
}

inline bool truncates(const SampleArgs& args, int64_t row) {
  return args.top_k[row] > 0 || args.top_p[row] < 1.0 || args.min_p[row] > 0.0;
}

inline bool draws(const SampleArgs& args, int64_t row, float highest) {
  return args.temperature[row] > 0.0f && std::isfinite(highest);
}

Best draw_part(const SampleArgs& args, int64_t row, Highest highest, Range part) {
  const Tempered values = {args.logits + row * args.stride, args.temperature[row]};
  const uint64_t key = row_key(args.seeds[row], args.positions[row]);
  return draw_ranked(values, key, part, kNoLast, start_of_draw(values, key, highest.token));
}

// The result of one part of a row, on a separate cache line.
struct alignas(64) PartResult {
  Highest highest;
  Best best;
};

Candidate* candidates_of(const SampleArgs& args, int thread, int num_threads) {
  return reinterpret_cast<Candidate*>(args.workspace + num_threads * sizeof(PartResult)) + thread * args.vocab_size;
}

// Sets tokens that the row's mask forbids to -inf. NaN and +inf stay, so that a broken row is detected.
void mask_part(const SampleArgs& args, int64_t row, Range part) {
  if (!args.is_masked[row]) return;
  const int32_t* words = args.masks + row * ((args.vocab_size + 31) / 32);
  float* logits = args.logits + row * args.stride;
  const Ints lanes = lane_numbers();
  int64_t token = part.begin;
  for (; token + kLanes <= part.end; token += kLanes) {  // parts begin at a multiple of kLanes, which divides 32
    const Ints word = all_lanes(words[token / 32]);
    const Floats value = load_floats(logits + token);
    const Ints stays = ((word >> (lanes + static_cast<int32_t>(token % 32)) & 1) != 0) | ~(value < __builtin_inff());
    store_floats(logits + token, choose(stays, value, all_lanes(-__builtin_inff())));
  }
  for (; token < part.end; ++token) {
    const bool stays = ((words[token / 32] >> (token % 32)) & 1) || !(logits[token] < __builtin_inff());
    if (!stays) logits[token] = -__builtin_inff();
  }
}

void choose_alone(const SampleArgs& args, int64_t row, Candidate* found) {
  mask_part(args, row, {0, args.vocab_size});
  const Highest highest = highest_of(args.logits + row * args.stride, {0, args.vocab_size});
  args.best[row] = highest.logit;
  int64_t token = highest.token;
  if (draws(args, row, highest.logit))
    token = truncates(args, row) ? draw_truncated(args, row, highest, found).token
                                 : draw_part(args, row, highest, {0, args.vocab_size}).token;
  args.token_ids[row] = static_cast<int32_t>(token);
}

// All threads sample one row, each from a part of the vocabulary; used for fewer rows than threads.
void choose_together(const SampleArgs& args, const Step& step, int64_t row, int thread, int num_threads) {
  PartResult* parts = reinterpret_cast<PartResult*>(args.workspace);
  const Range mine = split(args.vocab_size, thread, num_threads, kLanes);
  mask_part(args, row, mine);
  parts[thread].highest = highest_of(args.logits + row * args.stride, mine);
  step.team->barrier();
  Highest highest = parts[0].highest;
  for (int i = 1; i < num_threads; ++i) keep_higher(highest, parts[i].highest);
  const bool drawn = draws(args, row, highest.logit);
  Best best = {0.0, highest.token};
  if (drawn && truncates(args, row)) {
    if (thread == 0) best = draw_truncated(args, row, highest, candidates_of(args, 0, num_threads));
  } else if (drawn) {
    parts[thread].best = draw_part(args, row, highest, mine);
    step.team->barrier();
    best = parts[0].best;
    for (int i = 1; i < num_threads; ++i) keep_higher(best, parts[i].best);
  }
  if (thread == 0) {
    args.best[row] = highest.logit;
    args.token_ids[row] = static_cast<int32_t>(best.token);
  }
  step.team->barrier();  // before the next row overwrites the parts
}

// Chooses the token from the highest values that the projection kept. All rows are greedy in such a step.
void choose_kept(const SampleArgs& args, int64_t row, int num_threads) {
  Highest highest = {-__builtin_inff(), 0};
  for (int thread = 0; thread < num_threads; ++thread) {
    const LaneHighest& kept = args.highest[thread * args.highest_rows + row];
    for (int lane = 0; lane < kPanelRows; ++lane) {
      const Highest found = {kept.values[lane], kept.columns[lane]};
      if (found.logit == highest.logit)  // lanes are in no order of tokens
        highest.token = std::min(highest.token, found.token);
      else
        keep_higher(highest, found);
    }
  }
  args.best[row] = highest.logit;
  args.token_ids[row] = static_cast<int32_t>(highest.token);
}

}  // namespace

void sample(const void* raw, const Step& step, int thread, int num_threads) {
  const SampleArgs& args = *static_cast<const SampleArgs*>(raw);
  const int64_t rows = step.rows(args.rows, args.num_rows);
  if (step.only_highest && args.highest) {
    const Range mine = split(rows, thread, num_threads);
    for (int64_t row = mine.begin; row < mine.end; ++row) choose_kept(args, row, num_threads);
    return;
  }
  if (rows < num_threads) {
    for (int64_t row = 0; row < rows; ++row) choose_together(args, step, row, thread, num_threads);
    return;
  }
  const Range mine = split(rows, thread, num_threads);
  for (int64_t row = mine.begin; row < mine.end; ++row)
    choose_alone(args, row, candidates_of(args, thread, num_threads));
}

}  // namespace headrace

using namespace headrace;

HR_EXPORT void hr_op_sample(const void* args, const Step& step, int thread, int num_threads) {
  sample(args, step, thread, num_threads);
}

HR_EXPORT int64_t hr_sample_workspace_bytes(int64_t vocab_size, int num_threads) {
  return num_threads * (static_cast<int64_t>(sizeof(PartResult)) + vocab_size * static_cast<int64_t>(sizeof(Candidate)));
}
