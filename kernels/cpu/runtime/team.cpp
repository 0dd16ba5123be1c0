// The barrier of a region, and waiting on a word of memory. A separate unit, since all libraries of the kernels (see
// build.py) contain it.
#include "runtime/threads.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace headrace {
namespace {

// The longest sleep. Callers check the word again after it, so that a lost wake-up, which would be a bug, slows a step
// down instead of hanging the engine.
constexpr long kFutexNapNs = 100'000'000;

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

inline uint64_t now_ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t ticks;
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#else
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(t.tv_nsec);
#endif
}

uint64_t measure_ticks_per_us() {
  timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  const uint64_t first = now_ticks();
  int64_t ns;
  do {
    clock_gettime(CLOCK_MONOTONIC, &end);
    ns = (end.tv_sec - begin.tv_sec) * 1'000'000'000ll + (end.tv_nsec - begin.tv_nsec);
  } while (ns < 200'000);
  const uint64_t ticks = (now_ticks() - first) * 1000 / static_cast<uint64_t>(ns);
  return ticks ? ticks : 1;
}

uint64_t ticks_per_us() {
  static const uint64_t ticks = measure_ticks_per_us();
  return ticks;
}

void futex_wait(const uint32_t* word, uint32_t expected) {
  const timespec nap = {0, kFutexNapNs};
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, &nap, nullptr, 0);
}

void futex_wake_all(uint32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }

}  // namespace

Team::Team(int num_threads, int spin_us)
    : num_threads_(num_threads), spin_ticks_(static_cast<uint64_t>(spin_us) * ticks_per_us()) {}

// The sleeper counts itself in `sleepers` before it reads the word again; the waker changes the word before it reads
// `sleepers`. All four are sequentially consistent, so at least one of the two sees the other.
void Team::wait_while(const uint32_t* word, uint32_t old, uint32_t* sleepers) const {
  for (int spin = 0; spin < 64; ++spin) {
    if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != old) return;
    pause_briefly();
  }
  const uint64_t begin = now_ticks();
  do {
    for (int spin = 0; spin < 16; ++spin) {
      if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != old) return;
      pause_briefly();
    }
  } while (now_ticks() - begin < spin_ticks_);
  __atomic_add_fetch(sleepers, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(word, __ATOMIC_SEQ_CST) == old) futex_wait(word, old);
  __atomic_sub_fetch(sleepers, 1, __ATOMIC_SEQ_CST);
}

void Team::wake(uint32_t* word, uint32_t* sleepers) {
  if (__atomic_load_n(sleepers, __ATOMIC_SEQ_CST) != 0) futex_wake_all(word);
}

void Team::open_gate(uint32_t generation) {
  __atomic_store_n(&generation_, generation, __ATOMIC_SEQ_CST);
  wake(&generation_, &sleepers_);
}

void Team::wait_gate(uint32_t generation) { wait_while(&generation_, generation, &sleepers_); }

}  // namespace headrace
