#include "runtime/threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include <new>

#include "runtime/amx.h"
#include "runtime/op.h"

namespace headrace {
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
    release_shapes();
    // The caller must not return (and free the context) while a worker is still inside the body.
    team_.barrier();
    pthread_mutex_unlock(&mutex_);
  }

  void run_alone(Body body, void* context) override {
    Team alone(1, 0);
    pthread_mutex_lock(&mutex_);
    body(context, alone, 0, 1);
    release_shapes();
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

  // Whole pages, so that no two threads' scratch shares a page or, with first-touch placement, a memory node.
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

  // Only the forking thread exists in the child. Locks may be held and counters inconsistent, so all are reset.
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
      // If the mask cannot be set (the CPU went offline), the system places the thread.
      cpu_set_t mask;
      CPU_ZERO(&mask);
      CPU_SET(self->cpu, &mask);
      sched_setaffinity(0, sizeof(mask), &mask);
    }
    self->pool->serve(self->thread);
    return nullptr;
  }

  void serve(int thread) {
    // Every region increments the ticket and ends with a barrier, so no worker can miss one.
    for (uint32_t ticket = 0;; ++ticket) {
      team_.wait_while(&ticket_, ticket, &idle_);
      if (body_ == nullptr) return;
      body_(context_, team_, thread, num_threads_);
      release_shapes();
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

// Null if the system refuses threads or memory.
HR_EXPORT Pool* hr_pool_create(int num_threads, const int32_t* cpus, int spin_us) {
  return Pool::create(num_threads, cpus, spin_us);
}

HR_EXPORT void hr_pool_destroy(Pool* pool) { delete pool; }

// 0, or -1 if the system refuses the memory.
HR_EXPORT int hr_pool_reserve(Pool* pool, int64_t shared_bytes, int64_t per_thread_bytes) {
  return pool->reserve(shared_bytes, per_thread_bytes) ? 0 : -1;
}

// Runs one op in its own region, for tests and for use op by op. `step` is only read; null stands for a step without
// rows, for ops whose number of rows is fixed.
HR_EXPORT void hr_pool_run_op(Pool* pool, OpFn op, const void* args, const Step* step) {
  OneOp one = {op, args, step ? *step : Step{}};
  pool->lend_scratch(one.step);
  pool->run(
      [](void* context, Team& team, int thread, int num_threads) {
        // A copy per thread with the region's team, since threads only read the shared `one`.
        Step step = static_cast<OneOp*>(context)->step;
        step.team = &team;
        static_cast<OneOp*>(context)->op(static_cast<OneOp*>(context)->args, step, thread, num_threads);
      },
      &one);
}

// Runs `count` barriers, to measure the cost of one.
HR_EXPORT void hr_pool_barriers(Pool* pool, int64_t count) {
  pool->run(
      [](void* context, Team& team, int, int) {
        for (int64_t i = *static_cast<int64_t*>(context); i > 0; --i) team.barrier();
      },
      &count);
}
