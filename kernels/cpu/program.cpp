#include "program.h"

#include <cstring>

#include "attention.h"
#include "elementwise.h"
#include "sampling.h"

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <time.h>
#endif

namespace headrace {
namespace {

struct Run {
  const Program* program;
  Step step;
};

inline uint64_t ticks_now() {
#if defined(__x86_64__)
  return __rdtsc();
#else
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
#endif
}

bool has_single_tokens(const Step& step) {
  if (step.num_tokens != step.num_seqs) return false;
  for (int64_t seq = 0; seq < step.num_seqs; ++seq)
    if (step.query_start[seq] != seq) return false;
  return true;
}

void run_ops(const Program& program, const Step& step, int thread, int num_threads) {
  const bool single = step.single_tokens != 0;
  for (int64_t i = program.first; i < program.end; ++i) {
    const ProgramOp& op = program.ops[i];
    if (single && op.skipped_when_single != 0) continue;
    if (op.barrier_before != 0) step.team->barrier();
    op.run(op.args, step, thread, num_threads);
  }
}

void run_ops_timed(const Program& program, const Step& step, int thread, int num_threads) {
  const bool single = step.single_tokens != 0;
  uint64_t* ticks = program.ticks + thread * program.ticks_per_thread;
  for (int64_t i = program.first; i < program.end; ++i) {
    const ProgramOp& op = program.ops[i];
    if (single && op.skipped_when_single != 0) continue;
    const uint64_t before = ticks_now();
    if (op.barrier_before != 0) step.team->barrier();
    const uint64_t begin = ticks_now();
    op.run(op.args, step, thread, num_threads);
    ticks[2 * i] += begin - before;
    ticks[2 * i + 1] += ticks_now() - begin;
  }
}

}  // namespace
}  // namespace headrace

using namespace headrace;

HR_EXPORT void hr_program_run(Pool* pool, const Program* program, const Step* step) {
  Run run = {program, *step};
  run.step.single_tokens = has_single_tokens(*step);
  pool->lend_scratch(run.step);
  pool->run(
      [](void* context, Team& team, int thread, int num_threads) {
        const Run& run = *static_cast<const Run*>(context);
        Step step = run.step;  // a copy per thread: the team is the region's, and `run` stays read-only
        step.team = &team;
        (run.program->ticks != nullptr ? run_ops_timed : run_ops)(*run.program, step, thread, num_threads);
      },
      &run);
}

HR_EXPORT uint64_t hr_ticks_now() { return ticks_now(); }

// The size of a structure that Python mirrors, so that a mirror that went wrong is found; -1 for an unknown name.
HR_EXPORT int64_t hr_size_of(const char* name) {
  const struct {
    const char* name;
    size_t size;
  } known[] = {
      {"KvCacheC", sizeof(KvCache)},         {"RotaryArgs", sizeof(RotaryArgs)},
      {"AttentionArgs", sizeof(AttentionArgs)}, {"NormArgs", sizeof(NormArgs)},
      {"ActivationArgs", sizeof(ActivationArgs)}, {"EmbeddingArgs", sizeof(EmbeddingArgs)},
      {"AddArgs", sizeof(AddArgs)},          {"SoftCapArgs", sizeof(SoftCapArgs)},
      {"SampleArgs", sizeof(SampleArgs)},    {"ProgramOp", sizeof(ProgramOp)},
      {"ProgramC", sizeof(Program)},         {"Step", sizeof(Step)},
  };
  for (const auto& each : known)
    if (std::strcmp(each.name, name) == 0) return static_cast<int64_t>(each.size);
  return -1;
}
