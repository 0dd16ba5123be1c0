#include "sampling/sampling.h"

#include <algorithm>
#include <cmath>

#include "runtime/vector.h"

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

// The lanes where a > b, as bits.
inline uint32_t lanes_above(Floats a, Floats b) {
#if defined(HEADRACE_AVX512)
  return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), _CMP_GT_OQ);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(
      _mm256_movemask_ps(_mm256_cmp_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), _CMP_GT_OQ)));
#else
  const Ints above = a > b;
  uint32_t lanes = 0;
  for (int lane = 0; lane < kLanes; ++lane) lanes |= static_cast<uint32_t>(above[lane] & 1) << lane;
  return lanes;
#endif
}

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

struct Highest {
  float logit;  // NaN if the part contains a NaN
  int64_t token;
};

inline bool is_nan(float value) { return value != value; }

inline void keep_higher(Best& best, Best other) {
  if (other.score > best.score || (other.score == best.score && other.token < best.token)) best = other;
}

inline void keep_higher(Highest& best, Highest other) {
  if (is_nan(best.logit)) return;
  if (is_nan(other.logit) || other.logit > best.logit) best = other;
}

// The highest logit of a part. Parts are merged in rising order of tokens, so that the first of equals is kept.
Highest highest_of(const float* logits, Range part) {
  Floats most = all_lanes(-__builtin_inff());
  Ints strange = {};
  int64_t i = part.begin;
  for (; i + kLanes <= part.end; i += kLanes) {
    const Floats value = load_floats(logits + i);
    strange |= value != value;
    most = larger(value, most);
  }
  float highest = largest_lane(most);
  bool has_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) has_nan |= strange[lane] != 0;
  for (; i < part.end; ++i) {
    has_nan |= is_nan(logits[i]);
    if (logits[i] > highest) highest = logits[i];
  }
  for (i = part.begin; i < part.end; ++i)
    if (has_nan ? is_nan(logits[i]) : logits[i] == highest) return {logits[i], i};
  return {highest, part.begin};  // an empty part
}

// The best score in `part` of a row that is not truncated (softmax of logit / temperature). start: the exact score of
// some token.
//
// With u the token's uniform number, -log(-log u) > d requires u > exp(-e^-d) >= 1 - e^-d, that is 1 - u < e^-d. So the
// two exact logarithms are needed only for tokens with 1 - u < e^(tempered - best so far), up to rounding.
Best draw_from_all(const float* logits, float temperature, uint64_t key, Range part, Best start) {
  Best best = start;
  float limit = static_cast<float>(best.score);
  int64_t token = part.begin;
  const auto consider = [&](int64_t candidate) {
    const double tempered = static_cast<double>(logits[candidate] / temperature);
    keep_higher(best, {tempered + noise(key, candidate), candidate});
    limit = static_cast<float>(best.score);
  };
  Words offsets;
  for (int lane = 0; lane < kWords; ++lane) offsets[lane] = static_cast<uint64_t>(lane + 1) * kGolden;
  for (; token + kLanes <= part.end; token += kLanes) {
    const Floats ahead = load_floats(logits + token) / temperature - limit;
    if (!lanes_above(ahead, all_lanes(kNoChance))) continue;
    // The bound is raised by one part in a thousand, far more than all rounding here.
    const Floats bound = exponential<true>(ahead) * 1.001f;
    const uint64_t base = key + kGolden * static_cast<uint64_t>(token);
    const Floats rest = less_than_one(mix(offsets + base), mix(offsets + (base + kGolden * kWords)));
    for (uint32_t lanes = lanes_above(bound, rest); lanes; lanes &= lanes - 1) consider(token + __builtin_ctz(lanes));
  }
  for (; token < part.end; ++token) consider(token);
  return best;
}

struct Candidate {
  float value;  // logit / temperature
  int32_t token;
};

inline bool ranks_before(const Candidate& a, const Candidate& b) {
  return a.value != b.value ? a.value > b.value : a.token < b.token;
}

struct Truncation {
  int64_t top_k;
  double top_p, min_p;
};

// Writes all tokens with a value of at least `least` to `found`, in rising order of ids. Returns their number.
int64_t gather(const float* logits, int64_t vocab_size, float temperature, float least, Candidate* found) {
  int64_t count = 0, i = 0;
  const auto keep = [&](int64_t token) {
    const float value = logits[token] / temperature;
    if (value >= least) found[count++] = {value, static_cast<int32_t>(token)};
  };
  for (; i + kLanes <= vocab_size; i += kLanes) {
    const Floats value = load_floats(logits + i) / temperature;
    if (largest_lane(value) >= least)
      for (int lane = 0; lane < kLanes; ++lane) keep(i + lane);
  }
  for (; i < vocab_size; ++i) keep(i);
  return count;
}

// The sum of e^(value - first) over the row.
double total_weight(const float* logits, int64_t vocab_size, float temperature, float first) {
  double total = 0.0;
  int64_t i = 0;
  for (; i + kLanes <= vocab_size;) {
    // Short runs are summed in float and the runs in double, so that errors stay near 2^-24 of a run.
    Floats run = {};
    for (int step = 0; step < 16 && i + kLanes <= vocab_size; ++step, i += kLanes)
      run += exponential<true>(load_floats(logits + i) / temperature - first);
    total += static_cast<double>(sum_of_lanes(run));
  }
  for (; i < vocab_size; ++i) total += std::exp(static_cast<double>(logits[i] / temperature) - static_cast<double>(first));
  return total;
}

// Sorts the tokens that truncation keeps to the front of `found`, and returns their number.
int64_t truncate(const float* logits, int64_t vocab_size, float temperature, float first, const Truncation& rule,
                 Candidate* found) {
  const bool by_mass = rule.top_k <= 0 && rule.min_p <= 0.0;
  const double total = by_mass ? total_weight(logits, vocab_size, temperature, first) : 0.0;
  const int64_t most = rule.top_k > 0 ? std::min(rule.top_k, vocab_size) : vocab_size;
  // The threshold is lowered until the tokens above it certainly include all that are kept.
  const double widest = rule.min_p > 0.0 ? 0.01 - std::log(rule.min_p) : __builtin_inf();
  int64_t count = 0;
  for (double gap = 1.0;; gap = gap < 32.0 ? gap + 1.0 : gap * 2.0) {
    const bool all = gap > 1e6;
    const float least = all ? -__builtin_inff() : static_cast<float>(static_cast<double>(first) - std::min(gap, widest));
    count = gather(logits, vocab_size, temperature, least, found);
    if (all || count == vocab_size || gap >= widest || (rule.top_k > 0 && count >= most)) break;
    if (!by_mass) continue;
    double mass = 0.0;
    for (int64_t i = 0; i < count; ++i) mass += std::exp(static_cast<double>(found[i].value) - first);
    if (mass >= rule.top_p * total * (1.0 + 1e-6)) break;
  }
  int64_t limit = std::min(count, most);
  if (limit < count) std::nth_element(found, found + limit, found + count, ranks_before);
  std::sort(found, found + limit, ranks_before);
  const auto weight = [&](int64_t i) { return std::exp(static_cast<double>(found[i].value) - static_cast<double>(first)); };
  if (rule.min_p > 0.0) {
    int64_t passing = 0;
    while (passing < limit && weight(passing) >= rule.min_p) ++passing;
    limit = passing;
  }
  if (rule.top_p >= 1.0) return limit;
  double whole = total;
  if (!by_mass) {
    whole = 0.0;
    for (int64_t i = 0; i < limit; ++i) whole += weight(i);
  }
  double mass = 0.0;
  for (int64_t i = 0; i < limit; ++i) {
    mass += weight(i);
    if (mass >= rule.top_p * whole) return i + 1;
  }
  return limit;
}

Best draw_truncated(const SampleArgs& args, int64_t row, float highest, Candidate* found) {
  const float* logits = args.logits + row * args.stride;
  const float temperature = args.temperature[row];
  const Truncation rule = {args.top_k[row], args.top_p[row], args.min_p[row]};
  const int64_t kept = truncate(logits, args.vocab_size, temperature, highest / temperature, rule, found);
  const uint64_t key = row_key(args.seeds[row], args.positions[row]);
  Best best = {-__builtin_inf(), 0};
  for (int64_t i = 0; i < kept; ++i) {
    const double score = static_cast<double>(found[i].value) + noise(key, found[i].token);
    if (score > best.score) best = {score, found[i].token};
  }
  return best;
}

inline bool truncates(const SampleArgs& args, int64_t row) {
  return args.top_k[row] > 0 || args.top_p[row] < 1.0 || args.min_p[row] > 0.0;
}

inline bool draws(const SampleArgs& args, int64_t row, float highest) {
  return args.temperature[row] > 0.0f && std::isfinite(highest);
}

// The exact score of the likeliest token, a good start for draw_from_all.
Best start_of_draw(const SampleArgs& args, int64_t row, Highest highest) {
  const uint64_t key = row_key(args.seeds[row], args.positions[row]);
  const double tempered = static_cast<double>(highest.logit / args.temperature[row]);
  return {tempered + noise(key, highest.token), highest.token};
}

Best draw_part(const SampleArgs& args, int64_t row, Highest highest, Range part) {
  return draw_from_all(args.logits + row * args.stride, args.temperature[row],
                       row_key(args.seeds[row], args.positions[row]), part, start_of_draw(args, row, highest));
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
    token = truncates(args, row) ? draw_truncated(args, row, highest.logit, found).token
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
    if (thread == 0) best = draw_truncated(args, row, highest.logit, candidates_of(args, 0, num_threads));
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
