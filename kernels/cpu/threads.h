// A pool of threads of our own, and the barrier of a parallel region.
//
// Why not OpenMP: libgomp's threads either spin without bound (two engines then fight for the cores, and an idle
// engine burns them) or sleep at every barrier (tens of microseconds, ~150 times a step); torch brings its own
// libgomp into the process, whose setting would be shared; and a region cannot be told apart from a program of
// ops. Here a waiter spins for a bounded time and then sleeps in a futex, so that a barrier costs a few hundred
// nanoseconds when all cores are ours, and an idle pool costs nothing.
#pragma once

#include <cstdint>

namespace headrace {

struct Step;

// The threads of one region. Every wait is: spin `spin_us`, then sleep until woken.
class Team {
 public:
  Team(int num_threads, int spin_us);
  int size() const { return num_threads_; }

  // All threads arrive; none leaves before the last arrived. Writes before it are seen after it.
  // The last to arrive opens the gate by moving `generation_` on, which is also what the others sleep on.
  void barrier() {
    if (num_threads_ == 1) return;
    const uint32_t generation = __atomic_load_n(&generation_, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&arrived_, 1, __ATOMIC_ACQ_REL) == static_cast<uint32_t>(num_threads_)) {
      __atomic_store_n(&arrived_, 0u, __ATOMIC_RELAXED);
      open_gate(generation + 1);
    } else {
      wait_gate(generation);
    }
  }

  // Sleeps until `word` is no longer `old`. A waker must use wake() after it changed the word.
  void wait_while(const uint32_t* word, uint32_t old, uint32_t* sleepers) const;
  static void wake(uint32_t* word, uint32_t* sleepers);

 private:
  void open_gate(uint32_t generation);
  void wait_gate(uint32_t generation);

  // Each on its own cache line: arrivals must not disturb those who poll the generation.
  alignas(64) uint32_t arrived_ = 0;
  alignas(64) uint32_t generation_ = 0;
  alignas(64) uint32_t sleepers_ = 0;
  int num_threads_;
  uint64_t spin_ticks_;
};

// A body runs once on every thread of a region.
using Body = void (*)(void* context, Team& team, int thread, int num_threads);

// Thread 0 of a region is the caller; the pool owns the other num_threads - 1. Regions of one pool run one after
// another (callers queue). After a fork the child's pool starts its threads anew on first use.
class Pool {
 public:
  // cpus: [num_threads] where to pin each thread but the caller's own (index 0 is not used), or null: no pinning.
  static Pool* create(int num_threads, const int32_t* cpus, int spin_us);
  virtual void run(Body body, void* context) = 0;
  // A region of one thread, the caller's; the others sleep on.
  virtual void run_alone(Body body, void* context) = 0;
  // Scratch of at least these sizes, kept and grown; must not be called inside a region.
  virtual bool reserve(int64_t shared_bytes, int64_t per_thread_bytes) = 0;
  virtual void lend_scratch(Step& step) const = 0;
  virtual int size() const = 0;
  virtual ~Pool() = default;
};

}  // namespace headrace
