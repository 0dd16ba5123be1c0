#include "program/program.h"

#include <cstring>

#include "attention/attention.h"
#include "elementwise/elementwise.h"
#include "elementwise/rows.h"
#include "experts/experts.h"
#include "attention/latent.h"
#include "recurrent/states.h"
#include "sampling/sampling.h"

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

// Whether all numbers are in [least, limit); least is 0 or kGivenRow. As an unsigned integer, a negative number is large.
bool all_below(const int32_t* numbers, int64_t count, int64_t limit, int32_t least = 0) {
  const uint32_t shift = static_cast<uint32_t>(-least);
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t number = static_cast<uint32_t>(numbers[i]) + shift;
    largest = number > largest ? number : largest;
  }
  return count == 0 || largest < limit + shift;
}

// Why a step is refused: it would read outside an array. run.py has the same numbers.
enum class Refusal : int { kNone = 0, kTokenId = 1, kPosition = 2, kLogitsRow = 3 };

Refusal check(const Program& program, const Step& step) {
  if (program.vocab_size > 0 && !all_below(step.token_ids, step.num_tokens, program.vocab_size, kGivenRow))
    return Refusal::kTokenId;
  if (program.position_limit > 0 && !all_below(step.positions, step.num_tokens, program.position_limit))
    return Refusal::kPosition;
  return all_below(step.logits_rows, step.num_logits, step.num_tokens) ? Refusal::kNone : Refusal::kLogitsRow;
}

}  // namespace
}  // namespace headrace

using namespace headrace;

// Runs the step and returns 0, or returns a Refusal and runs nothing.
HR_EXPORT int hr_program_run(Pool* pool, const Program* program, const Step* step) {
  const Refusal refusal = check(*program, *step);
  if (refusal != Refusal::kNone) return static_cast<int>(refusal);
  Run run = {program, *step};
  run.step.single_tokens = has_single_tokens(*step);
  pool->lend_scratch(run.step);
  const Body body = [](void* context, Team& team, int thread, int num_threads) {
    const Run& run = *static_cast<const Run*>(context);
    Step step = run.step;  // a copy per thread with the region's team, since threads only read the shared `run`
    step.team = &team;
    (run.program->ticks != nullptr ? run_ops_timed : run_ops)(*run.program, step, thread, num_threads);
  };
  if (step->num_tokens <= program->alone_rows)
    pool->run_alone(body, &run);
  else
    pool->run(body, &run);
  return 0;
}

HR_EXPORT uint64_t hr_ticks_now() { return ticks_now(); }

// The size of a structure that Python mirrors, for a test of the mirrors; -1 for an unknown name.
HR_EXPORT int64_t hr_size_of(const char* name) {
  const struct {
    const char* name;
    size_t size;
  } known[] = {
      {"KvCacheC", sizeof(KvCache)},         {"RotaryArgs", sizeof(RotaryArgs)},
      {"AttentionArgs", sizeof(AttentionArgs)}, {"NormArgs", sizeof(NormArgs)},
      {"ActivationArgs", sizeof(ActivationArgs)}, {"EmbeddingArgs", sizeof(EmbeddingArgs)},
      {"AddArgs", sizeof(AddArgs)},          {"GatherArgs", sizeof(GatherArgs)},
      {"CopyArgs", sizeof(CopyArgs)},         {"ScaleRowsArgs", sizeof(ScaleRowsArgs)},
      {"XieluArgs", sizeof(XieluArgs)},
      {"MixRowsArgs", sizeof(MixRowsArgs)},   {"CorrectRowsArgs", sizeof(CorrectRowsArgs)},
      {"LikeRowsArgs", sizeof(LikeRowsArgs)}, {"SparseGateArgs", sizeof(SparseGateArgs)},
      {"ScaleColumnsArgs", sizeof(ScaleColumnsArgs)},
      {"RouteArgs", sizeof(RouteArgs)},      {"ExpertsArgs", sizeof(ExpertsArgs)},
      {"SoftCapArgs", sizeof(SoftCapArgs)},  {"SampleArgs", sizeof(SampleArgs)},
      {"LogprobArgs", sizeof(LogprobArgs)},
      {"LatentArgs", sizeof(LatentArgs)},    {"ProgramOp", sizeof(ProgramOp)},
      {"LatentExpandedArgs", sizeof(LatentExpandedArgs)},
      {"StateStepC", sizeof(StateStep)},     {"StateUnitsC", sizeof(StateUnits)},
      {"DraftedC", sizeof(Drafted)},         {"ConvolveArgs", sizeof(ConvolveArgs)},
      {"ScanArgs", sizeof(ScanArgs)},         {"LinearAttentionArgs", sizeof(LinearAttentionArgs)},
      {"SelectiveArgs", sizeof(SelectiveArgs)},  {"GatedNormArgs", sizeof(GatedNormArgs)},
      {"GatedLruArgs", sizeof(GatedLruArgs)},
      {"ProgramC", sizeof(Program)},         {"RowAdaptersC", sizeof(RowAdapters)},
      {"DeltaC", sizeof(Delta)},             {"DeltaSiteC", sizeof(DeltaSite)},
      {"DeltaPanelC", sizeof(DeltaPanel)},   {"EmbedDeltaC", sizeof(EmbedDelta)},
      {"EmbedDeltasArgs", sizeof(EmbedDeltasArgs)},
      {"Step", sizeof(Step)},
  };
  for (const auto& each : known)
    if (std::strcmp(each.name, name) == 0) return static_cast<int64_t>(each.size);
  return -1;
}
