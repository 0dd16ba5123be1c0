// Measures the machine's limits with the threads that run the kernels: the speed of reading memory, and multiply-adds
// per second of the vector units. Benchmarks report shares of these limits.
#include <sys/mman.h>
#include <time.h>

#include "linear/float.h"
#include "linear/quant_dot.h"

namespace headrace {
namespace {

struct ReadArgs {
  const void* data;
  int64_t bytes;
  uint64_t* sums;  // [num_threads], so that the reads are not optimised away
};

enum class Arithmetic : int32_t { kF32 = 0, kBF16Pairs = 1, kInt8Quads = 2 };

struct ArithmeticArgs {
  int64_t rounds;
  float* results;    // [num_threads, kLanes], so that the arithmetic is not optimised away
  const float* ones;  // [2, kLanes] values the compiler cannot know
  Arithmetic kind;
};

// Enough independent sums to hide an instruction's latency on every known machine, and few enough for the registers.
#if defined(HEADRACE_AVX512) || defined(__aarch64__)
constexpr int kChains = 24;
#else
constexpr int kChains = 12;
#endif

template <class Vector, class Multiply>
Floats run_chains(int64_t rounds, Vector one, Multiply multiply) {
  Vector chains[kChains], different = {};
  for (int i = 0; i < kChains; ++i) chains[i] = different += one;  // the compiler would merge equal chains
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) chains[i] = multiply(chains[i]);
  }
  Vector sum = {};
  for (int i = 0; i < kChains; ++i) sum += chains[i];
  return reinterpret_cast<Floats>(sum);
}

#if defined(HEADRACE_AMX)
// Each round multiplies two blocks of x by two of weights.
void run_blocks(int64_t rounds) {
  set_shapes(2 * kBlockRows);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}
#endif

typedef uint64_t StreamLine __attribute__((vector_size(64), aligned(8)));

// More than a core's second-level cache, and some milliseconds.
constexpr int64_t kStreamBytes = 8 << 20;
constexpr int kStreamRounds = 3;

int64_t thread_ns() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<int64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// The least time in which a thread reads all of `data` with prefetches of the kind.
template <int kLocality>
int64_t reading_ns(const char* data, StreamLine* sum) {
  const int64_t begin = thread_ns();
  for (int64_t at = 0; at < kStreamBytes; at += 64) {
    __builtin_prefetch(data + at + kAheadBytes, 0, kLocality);
    *sum += *reinterpret_cast<const StreamLine*>(data + at);
  }
  return thread_ns() - begin;
}

bool streams_well() {
  void* room = mmap(nullptr, kStreamBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) return true;
  std::memset(room, 1, kStreamBytes);
  const char* data = static_cast<const char*>(room);
  volatile StreamLine kept = {};
  StreamLine sum = {};
  int64_t past = INT64_MAX, into = INT64_MAX;  // the second-level cache
  for (int round = 0; round < kStreamRounds; ++round) {
    const int64_t one = reading_ns<0>(data, &sum), other = reading_ns<2>(data, &sum);
    if (one < past) past = one;
    if (other < into) into = other;
  }
  kept = sum;
  munmap(room, kStreamBytes);
  return past <= into + into / 4;
}

}  // namespace
}  // namespace headrace

using namespace headrace;

// Whether reading memory with non-temporal prefetches takes at most a quarter longer than with others here. Measured
// once in a process.
HR_EXPORT int32_t hr_streams_well() {
  static const bool measured = streams_well();
  return measured;
}

HR_EXPORT void hr_op_read(const void* raw, const Step&, int thread, int num_threads) {
  const auto& args = *static_cast<const ReadArgs*>(raw);
  const Range mine = split(args.bytes, thread, num_threads, 4096);
  const char* data = static_cast<const char*>(args.data);
  StreamLine sum[4] = {};
  for (int64_t at = mine.begin; at + 256 <= mine.end; at += 256) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      prefetch<true>(data + at + kAheadBytes + 64 * i);
      sum[i] += *reinterpret_cast<const StreamLine*>(data + at + 64 * i);
    }
  }
  args.sums[thread] = (sum[0] + sum[1] + sum[2] + sum[3])[0];
}

// Each round of each thread does hr_arithmetic_per_round multiply-adds.
HR_EXPORT void hr_op_arithmetic(const void* raw, const Step&, int thread, int) {
  const auto& args = *static_cast<const ArithmeticArgs*>(raw);
  const Floats a = load_floats(args.ones), b = load_floats(args.ones + kLanes);
  Floats sum = {};
  switch (args.kind) {
    case Arithmetic::kF32: sum = run_chains(args.rounds, a, [&](Floats c) { return fused(a, b, c); }); break;
#if defined(HEADRACE_AMX)
    case Arithmetic::kBF16Pairs: run_blocks(args.rounds); break;
#elif defined(HEADRACE_BF16_DOT)
    case Arithmetic::kBF16Pairs: sum = run_chains(args.rounds, a, [&](Floats c) { return dot_pairs(c, a, b); }); break;
#endif
    default:
      sum = run_chains(args.rounds, reinterpret_cast<Ints>(a), [&](Ints c) {
        return dot_quads<4>(c, reinterpret_cast<Bytes>(a), reinterpret_cast<Bytes>(b));
      });
  }
  store_floats(args.results + thread * kLanes, sum);
}

// Multiply-adds of one round on one thread; 0 if the instruction-set level has no such instruction.
HR_EXPORT int64_t hr_arithmetic_per_round(int32_t kind) {
  switch (static_cast<Arithmetic>(kind)) {
    case Arithmetic::kF32: return kChains * kLanes;
#if defined(HEADRACE_AMX)
    case Arithmetic::kBF16Pairs: return 2 * 2 * kBlockRows * kBlockRows * kBlockK;
#elif defined(HEADRACE_BF16_DOT)
    case Arithmetic::kBF16Pairs: return kChains * kLanes * 2;
#endif
    case Arithmetic::kInt8Quads: return kChains * kLanes * 4;
    default: return 0;
  }
}
