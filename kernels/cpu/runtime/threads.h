// A thread pool, and the barrier of a parallel region.
//
// Why not OpenMP: threads of libgomp either spin without bound (two engines then compete for the cores, and an idle
// engine keeps them busy) or sleep at every barrier (tens of microseconds, ~150 times a step). Torch loads its own
// libgomp into the process, whose settings would be shared. And OpenMP cannot run a list of ops in one region. Here a
// waiting thread spins for a bounded time and then sleeps in a futex: a barrier costs a few hundred nanoseconds if the
// process has its cores to itself, and an idle pool costs nothing.
#pragma once

#include <cstdint>

namespace headrace {

struct Step;

// The threads of one region. Every wait spins for `spin_us` and then sleeps until it is woken.
class Team {
 public:
  Team(int num_threads, int spin_us);
  int size() const { return num_threads_; }

  // No thread leaves before all have arrived. Writes before the barrier are visible after it. The last to arrive
  // increments `generation_`, the word that the others sleep on.
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

  // Waits until `word` is no longer `old`. Whoever changes the word must call wake() afterwards.
  void wait_while(const uint32_t* word, uint32_t old, uint32_t* sleepers) const;
  static void wake(uint32_t* word, uint32_t* sleepers);

 private:
  void open_gate(uint32_t generation);
  void wait_gate(uint32_t generation);

  // Separate cache lines, so that arrivals do not disturb the threads that poll the generation.
  alignas(64) uint32_t arrived_ = 0;
  alignas(64) uint32_t generation_ = 0;
  alignas(64) uint32_t sleepers_ = 0;
  int num_threads_;
  uint64_t spin_ticks_;
};

// The function that every thread of a region runs once.
using Body = void (*)(void* context, Team& team, int thread, int num_threads);

// Thread 0 of a region is the caller's; the pool owns the other num_threads - 1. Regions of one pool run one after
// another (callers queue). After a fork, the child's pool restarts its threads on first use.
class Pool {
 public:
  // cpus: [num_threads] the CPU to pin each thread to, without the caller's (index 0 is unused); null: no pinning.
  static Pool* create(int num_threads, const int32_t* cpus, int spin_us);
  virtual void run(Body body, void* context) = 0;
  // A region of the caller's thread only; the others stay asleep.
  virtual void run_alone(Body body, void* context) = 0;
  // Grows the scratch to at least these sizes. Must not be called inside a region.
  virtual bool reserve(int64_t shared_bytes, int64_t per_thread_bytes) = 0;
  virtual void lend_scratch(Step& step) const = 0;
  virtual int size() const = 0;
  virtual ~Pool() = default;
};

}  // namespace headrace
