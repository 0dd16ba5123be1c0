#include "runtime/collectives.h"

#include <errno.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstring>

namespace headrace {
namespace {

constexpr long kNapNs = 100'000'000;  // between checks of whether the awaited process is alive
constexpr int64_t kChunkBytes = 1 << 20;

int64_t clock_us() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000} + now.tv_nsec / 1000;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

inline bool reached(const Line& line, uint32_t target, int order) {
  return static_cast<int32_t>(__atomic_load_n(&line.count, order) - target) >= 0;
}

bool end_with(Peer& peer, Outcome outcome, int32_t culprit) {
  peer.outcome = outcome;
  peer.culprit = culprit;
  return false;
}

// False if a rank has failed or the owner of the line is gone. A process that is not reaped yet counts as alive; its
// parent then reports the failure.
bool still_hopeful(Peer& peer, const Line& line) {
  const uint32_t failed = __atomic_load_n(&peer.header->failed, __ATOMIC_ACQUIRE);
  if (failed != 0) return end_with(peer, Outcome::kFailed, static_cast<int32_t>(failed) - 1);
  const int32_t pid = __atomic_load_n(&line.pid, __ATOMIC_RELAXED);
  if (pid != 0 && kill(pid, 0) != 0 && errno == ESRCH) return end_with(peer, Outcome::kGone, pid);
  return true;
}

// The sleeper counts itself in `sleepers` before it reads the count again; raise_to changes the count before it reads
// `sleepers`. All four are sequentially consistent, so at least one of the two sees the other.
bool wait_for(Peer& peer, Line& line, uint32_t target) {
  if (peer.outcome != Outcome::kGood) return false;
  for (int spin = 0; spin < 64; ++spin) {
    if (reached(line, target, __ATOMIC_ACQUIRE)) return true;
    relax();
  }
  const int64_t begin_us = clock_us();
  do {
    for (int spin = 0; spin < 32; ++spin) {
      if (reached(line, target, __ATOMIC_ACQUIRE)) return true;
      relax();
    }
  } while (clock_us() - begin_us < peer.spin_us);
  bool hopeful = true;
  __atomic_add_fetch(&line.sleepers, 1, __ATOMIC_SEQ_CST);
  while (hopeful && !reached(line, target, __ATOMIC_SEQ_CST)) {
    const uint32_t seen = __atomic_load_n(&line.count, __ATOMIC_SEQ_CST);
    if (static_cast<int32_t>(seen - target) >= 0) break;
    const timespec nap = {0, kNapNs};
    // Not FUTEX_WAIT_PRIVATE, since the word is shared between processes.
    const long slept = syscall(SYS_futex, &line.count, FUTEX_WAIT, seen, &nap, nullptr, 0);
    if (slept != 0 && errno == ETIMEDOUT) {
      hopeful = still_hopeful(peer, line);
      if (hopeful && clock_us() - begin_us > peer.deadline_ms * 1000)
        hopeful = end_with(peer, Outcome::kLate, __atomic_load_n(&line.pid, __ATOMIC_RELAXED));
    }
  }
  __atomic_sub_fetch(&line.sleepers, 1, __ATOMIC_SEQ_CST);
  return hopeful;
}

void raise_to(Line& line, uint32_t count) {
  __atomic_store_n(&line.count, count, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&line.sleepers, __ATOMIC_SEQ_CST) != 0)
    syscall(SYS_futex, &line.count, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

bool meet(Group& group) {
  const uint32_t count = ++group.count;
  raise_to(group.lines[group.rank], count);
  for (int rank = 0; rank < group.size; ++rank)
    if (rank != group.rank && !wait_for(*group.peer, group.lines[rank], count)) return false;
  return true;
}

// Thread 0 takes part in the barrier of ranks for all threads of this rank. Since these have just passed a barrier of
// the team, their writes are visible to other ranks afterwards.
void meet_as_team(Group& group, const Step& step, int thread) {
  if (thread == 0) meet(group);
  step.team->barrier();
}

// out[i] = the sum over ranks of parts[rank][i], in order of rank.
void add_parts(const char* parts, int64_t part_bytes, int ranks, DType type, int64_t begin, int64_t end, void* out) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    Floats sum = load_vector(parts, i, type);
    for (int rank = 1; rank < ranks; ++rank) sum += load_vector(parts + rank * part_bytes, i, type);
    store_vector(out, i, type, sum);
  }
  for (; i < end; ++i) {
    float sum = load_one(parts, i, type);
    for (int rank = 1; rank < ranks; ++rank) sum += load_one(parts + rank * part_bytes, i, type);
    store_one(out, i, type, sum);
  }
}

char* part_of(const Group& group, uint32_t turn, int rank) {
  return group.parts + (turn * group.size + rank) * group.part_bytes;
}

void sum_row(const RankSumArgs& args, int64_t row, int64_t begin, int64_t end) {
  const float* parts = args.parts + row * args.columns;
  const int64_t to = row * args.out_stride;
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    Floats sum = load_floats(parts + i);
    for (int rank = 1; rank < args.group->size; ++rank) sum += load_floats(parts + rank * args.part_stride + i);
    if (args.add != 0) sum += load_vector(args.out, to + i, args.out_dtype);
    store_vector(args.out, to + i, args.out_dtype, sum);
  }
  for (; i < end; ++i) {
    float sum = parts[i];
    for (int rank = 1; rank < args.group->size; ++rank) sum += parts[rank * args.part_stride + i];
    if (args.add != 0) sum += load_one(args.out, to + i, args.out_dtype);
    store_one(args.out, to + i, args.out_dtype, sum);
  }
}

}  // namespace
}  // namespace headrace

using namespace headrace;

// Makes the calling process the owner of the line.
HR_EXPORT void hr_line_own(Line* line) { __atomic_store_n(&line->pid, getpid(), __ATOMIC_RELAXED); }

// Waits until the line's count is at least `target`. Returns 1, or 0 with the reason in peer->outcome.
HR_EXPORT int hr_line_wait(Peer* peer, Line* line, uint32_t target) { return wait_for(*peer, *line, target) ? 1 : 0; }

HR_EXPORT int hr_line_reached(const Line* line, uint32_t target) { return reached(*line, target, __ATOMIC_ACQUIRE); }

HR_EXPORT void hr_line_raise(Line* line, uint32_t count) { raise_to(*line, count); }

HR_EXPORT int hr_group_meet(Group* group) { return meet(*group) ? 1 : 0; }

// All-reduce: replaces values[count] by their sum over the ranks, in chunks that fit a core's cache.
HR_EXPORT int hr_group_sum(Group* group, void* values, int64_t count, int32_t type) {
  const DType dtype = static_cast<DType>(type);
  const int64_t most = (group->part_bytes < kChunkBytes ? group->part_bytes : kChunkBytes) / size_of(dtype);
  for (int64_t first = 0; first < count; first += most) {
    const int64_t taken = count - first < most ? count - first : most;
    char* chunk = static_cast<char*>(values) + first * size_of(dtype);
    std::memcpy(part_of(*group, group->turn, group->rank), chunk, static_cast<size_t>(taken * size_of(dtype)));
    if (!meet(*group)) return 0;
    add_parts(part_of(*group, group->turn, 0), group->part_bytes, group->size, dtype, 0, taken, chunk);
    group->turn ^= 1;
  }
  return 1;
}

// All-gather: out [rows, size * row_bytes] = each rank's values [rows, row_bytes] side by side.
HR_EXPORT int hr_group_gather(Group* group, const void* values, int64_t rows, int64_t row_bytes, void* out) {
  const int64_t most = group->part_bytes / row_bytes > 0 ? group->part_bytes / row_bytes : 1;
  const int64_t piece = row_bytes < group->part_bytes ? row_bytes : group->part_bytes;
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t taken = rows - first < most ? rows - first : most;
    // A row longer than a part is sent in pieces.
    for (int64_t at = 0; at < row_bytes; at += piece) {
      const int64_t width = row_bytes - at < piece ? row_bytes - at : piece;
      const char* from = static_cast<const char*>(values) + first * row_bytes + at;
      char* mine = part_of(*group, group->turn, group->rank);
      for (int64_t row = 0; row < taken; ++row) std::memcpy(mine + row * width, from + row * row_bytes, width);
      if (!meet(*group)) return 0;
      for (int rank = 0; rank < group->size; ++rank) {
        const char* part = part_of(*group, group->turn, rank);
        char* to = static_cast<char*>(out) + (first * group->size + rank) * row_bytes + at;
        for (int64_t row = 0; row < taken; ++row)
          std::memcpy(to + row * group->size * row_bytes, part + row * width, width);
      }
      group->turn ^= 1;
    }
  }
  return 1;
}

// This op and the two below need a barrier before them. The builder adds it, since they read what an earlier op wrote.
HR_EXPORT void hr_op_rank_sum(const void* raw, const Step& step, int thread, int num_threads) {
  const auto& args = *static_cast<const RankSumArgs*>(raw);
  meet_as_team(*args.group, step, thread);
  const int64_t rows = step.rows(args.rows, 0);
  // With few rows the columns are divided, so that all threads share even one row of a decode step.
  if (rows < num_threads) {
    const Range columns = split(args.columns, thread, num_threads, kLanes);
    for (int64_t row = 0; row < rows; ++row) sum_row(args, row, columns.begin, columns.end);
    return;
  }
  const Range mine = split(rows, thread, num_threads);
  for (int64_t row = mine.begin; row < mine.end; ++row) sum_row(args, row, 0, args.columns);
}

// Ends with a barrier of the ranks, after which the shared memory may be written again.
HR_EXPORT void hr_op_rank_gather(const void* raw, const Step& step, int thread, int num_threads) {
  const auto& args = *static_cast<const RankGatherArgs*>(raw);
  meet_as_team(*args.group, step, thread);
  const Range columns = split(args.columns, thread, num_threads, kLanes);
  const int64_t rows = step.rows(args.rows, 0);
  for (int64_t row = 0; row < rows; ++row)
    std::memcpy(args.out + row * args.columns + columns.begin, args.shared + row * args.columns + columns.begin,
                static_cast<size_t>(columns.end - columns.begin) * 4);
  step.team->barrier();
  meet_as_team(*args.group, step, thread);
}

// A barrier of the ranks.
HR_EXPORT void hr_op_rank_meet(const void* raw, const Step& step, int thread, int) {
  meet_as_team(**static_cast<Group* const*>(raw), step, thread);
}

// For a test that compares the ctypes mirrors with these structures.
HR_EXPORT int64_t hr_sizeof_rank_group() { return sizeof(Group); }
HR_EXPORT int64_t hr_sizeof_rank_peer() { return sizeof(Peer); }
HR_EXPORT int64_t hr_sizeof_rank_sum_args() { return sizeof(RankSumArgs); }
HR_EXPORT int64_t hr_sizeof_rank_gather_args() { return sizeof(RankGatherArgs); }
