#include "threads.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <new>

#include "op.h"

namespace headrace {
namespace {

// A wait may start in a state where no wake-up is due any more (its caller rechecks), but a lost wake-up would
// hang the engine; waking by itself once in a while turns such a bug into a slow step.
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

// The sleeper announces itself and only then looks at the word again; the waker changes the word and only then
// looks for sleepers. Both are sequentially consistent, so at least one of them sees the other.
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

namespace {

class ThreadPool final : public Pool {
 public:
  ThreadPool(int num_threads, const int32_t* cpus, int spin_us)
      : team_(num_threads, spin_us), spin_us_(spin_us), num_threads_(num_threads) {
    pthread_mutex_init(&mutex_, nullptr);
    workers_ = new (std::nothrow) Worker[num_threads];
    for (int i = 0; workers_ && i < num_threads; ++i) workers_[i] = {this, i, cpus ? cpus[i] : -1, {}};
    owner_pid_ = getpid();
    started_ = workers_ && start();
  }

  ~ThreadPool() override {
    if (owner_pid_ == getpid() && workers_) stop();
    delete[] workers_;
    free(shared_);
    free(per_thread_);
    pthread_mutex_destroy(&mutex_);
  }

  bool started() const { return started_; }
  int size() const override { return num_threads_; }

  void run(Body body, void* context) override {
    if (owner_pid_ != getpid()) restart_after_fork();
    pthread_mutex_lock(&mutex_);
    body_ = body;
    context_ = context;
    if (num_threads_ > 1) {
      __atomic_add_fetch(&ticket_, 1, __ATOMIC_SEQ_CST);
      Team::wake(&ticket_, &idle_);
    }
    body(context, team_, 0, num_threads_);
    // The caller must not return (and free the context) while a worker is still inside the body.
    team_.barrier();
    pthread_mutex_unlock(&mutex_);
  }

  void run_alone(Body body, void* context) override {
    Team alone(1, 0);
    pthread_mutex_lock(&mutex_);
    body(context, alone, 0, 1);
    pthread_mutex_unlock(&mutex_);
  }

  bool reserve(int64_t shared_bytes, int64_t per_thread_bytes) override {
    pthread_mutex_lock(&mutex_);
    bool ok = true;
    if (shared_bytes > shared_bytes_) {
      shared_bytes = round_up(shared_bytes);
      ok = renew(shared_, shared_bytes) && ok;
      shared_bytes_ = ok ? shared_bytes : 0;
    }
    if (per_thread_bytes > stride_) {
      per_thread_bytes = round_up(per_thread_bytes);
      const bool grown = renew(per_thread_, per_thread_bytes * num_threads_);
      stride_ = grown ? per_thread_bytes : 0;
      ok = ok && grown;
    }
    pthread_mutex_unlock(&mutex_);
    return ok;
  }

  void lend_scratch(Step& step) const override {
    step.shared_scratch = shared_;
    step.shared_scratch_bytes = shared_bytes_;
    step.scratch = per_thread_;
    step.scratch_stride = stride_;
  }

 private:
  struct Worker {
    ThreadPool* pool;
    int thread;
    int cpu;
    pthread_t handle;
  };

  // Whole pages, so that two threads' scratch never shares a page (nor, with first touch, a memory node).
  static int64_t round_up(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

  static bool renew(char*& area, int64_t bytes) {
    free(area);
    area = static_cast<char*>(aligned_alloc(4096, static_cast<size_t>(bytes)));
    return area != nullptr;
  }

  bool start() {
    for (int i = 1; i < num_threads_; ++i) {
      if (pthread_create(&workers_[i].handle, nullptr, &ThreadPool::main, &workers_[i]) != 0) {
        num_threads_ = i;  // stop() joins those that started
        return false;
      }
    }
    return true;
  }

  void stop() {
    body_ = nullptr;
    __atomic_add_fetch(&ticket_, 1, __ATOMIC_SEQ_CST);
    Team::wake(&ticket_, &idle_);
    for (int i = 1; i < num_threads_; ++i) pthread_join(workers_[i].handle, nullptr);
  }

  // Only the forking thread lives on in the child: locks may be held and counters half-way, so all begin anew.
  void restart_after_fork() {
    pthread_mutex_init(&mutex_, nullptr);
    new (&team_) Team(num_threads_, spin_us_);
    ticket_ = 0;
    idle_ = 0;
    owner_pid_ = getpid();
    if (!start()) abort();
  }

  static void* main(void* argument) {
    Worker* self = static_cast<Worker*>(argument);
    if (self->cpu >= 0) {
      // A mask that cannot be set (the CPU went away) leaves the thread where the system puts it.
      cpu_set_t mask;
      CPU_ZERO(&mask);
      CPU_SET(self->cpu, &mask);
      sched_setaffinity(0, sizeof(mask), &mask);
    }
    self->pool->serve(self->thread);
    return nullptr;
  }

  void serve(int thread) {
    // Every region moves the ticket by one and ends with a barrier, so no worker can miss one.
    for (uint32_t ticket = 0;; ++ticket) {
      team_.wait_while(&ticket_, ticket, &idle_);
      if (body_ == nullptr) return;
      body_(context_, team_, thread, num_threads_);
      team_.barrier();
    }
  }

  Team team_;
  alignas(64) uint32_t ticket_ = 0;
  alignas(64) uint32_t idle_ = 0;
  Body body_ = nullptr;
  void* context_ = nullptr;
  int spin_us_;
  int num_threads_;
  bool started_ = false;
  pid_t owner_pid_ = 0;
  pthread_mutex_t mutex_;
  Worker* workers_ = nullptr;
  char* shared_ = nullptr;
  char* per_thread_ = nullptr;
  int64_t shared_bytes_ = 0;
  int64_t stride_ = 0;
};

struct OneOp {
  OpFn op;
  const void* args;
  Step step;
};

}  // namespace

Pool* Pool::create(int num_threads, const int32_t* cpus, int spin_us) {
  auto* pool = new (std::nothrow) ThreadPool(num_threads, cpus, spin_us);
  if (pool && !pool->started()) {
    delete pool;
    return nullptr;
  }
  return pool;
}

}  // namespace headrace

using headrace::OneOp;
using headrace::OpFn;
using headrace::Pool;
using headrace::Step;
using headrace::Team;

// Null when threads or memory are refused by the system.
HR_EXPORT Pool* hr_pool_create(int num_threads, const int32_t* cpus, int spin_us) {
  return Pool::create(num_threads, cpus, spin_us);
}

HR_EXPORT void hr_pool_destroy(Pool* pool) { delete pool; }

// 0, or -1 when the memory is refused.
HR_EXPORT int hr_pool_reserve(Pool* pool, int64_t shared_bytes, int64_t per_thread_bytes) {
  return pool->reserve(shared_bytes, per_thread_bytes) ? 0 : -1;
}

// One op in a region of its own: the entry of every op for tests and for use op by op. `step` is read only; a null
// one stands for a step without rows, for ops whose row count is fixed.
HR_EXPORT void hr_pool_run_op(Pool* pool, OpFn op, const void* args, const Step* step) {
  OneOp one = {op, args, step ? *step : Step{}};
  pool->lend_scratch(one.step);
  pool->run(
      [](void* context, Team& team, int thread, int num_threads) {
        // A copy per thread: the team is the region's, and `one` stays read-only while it is shared.
        Step step = static_cast<OneOp*>(context)->step;
        step.team = &team;
        static_cast<OneOp*>(context)->op(static_cast<OneOp*>(context)->args, step, thread, num_threads);
      },
      &one);
}

// `count` barriers, for measuring what one costs.
HR_EXPORT void hr_pool_barriers(Pool* pool, int64_t count) {
  pool->run(
      [](void* context, Team& team, int, int) {
        for (int64_t i = *static_cast<int64_t*>(context); i > 0; --i) team.barrier();
      },
      &count);
}
