"""The number and placement of the CPU kernels' threads, and the pool that runs them.

The default is one thread per physical core of those that this process may use; `OMP_NUM_THREADS` or the caller can set
another number. It never exceeds the affinity mask or the cgroup's CPU quota. A process that holds the lock file of
each of its cores owns them, and pins its threads. A second engine on the same cores does not get the locks and does
not pin, so that the system's scheduler shares the cores.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.ipc.process.trusted_files import UntrustedFileError, trusted_folder, warn_of
from headrace.kernels.cpu.build import Library

SPIN_US = 20
"""How long a thread spins while it waits for other threads or the next step, before it sleeps. Longer spinning gained
nothing measurable on cores that the process owns, and cost a quarter of the throughput beside an HTTP server and its
client."""


class Step(ctypes.Structure):
    """Mirror of `Step` in op.h. The pool sets the first five fields; the caller sets those that its ops read."""

    _fields_ = (
        ("team", ctypes.c_void_p),
        ("shared_scratch", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("shared_scratch_bytes", ctypes.c_int64),
        ("scratch_stride", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_seqs", ctypes.c_int64),
        ("num_logits", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("token_types", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("key_lens", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
        ("logits_rows", ctypes.c_void_p),
        ("single_tokens", ctypes.c_int64),
        ("only_highest", ctypes.c_int64),
        ("adapters", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class ThreadPlan:
    """The number and placement of a pool's threads, with the reason in a sentence."""

    num_threads: int
    cpus: tuple[int, ...]
    """The CPU that each thread is pinned to; empty if threads are not pinned."""
    spin_us: int
    reason: str


def plan(num_threads: int | None = None, *, owned: bool = False) -> ThreadPlan:
    """Decides the number and placement of threads. num_threads: the number asked for; owned: whether this process owns
    its cores."""
    allowed = sorted(os.sched_getaffinity(0))
    cores = one_cpu_per_core(allowed)
    quota = cpu_quota()
    most = min(len(allowed), math.ceil(quota)) if quota is not None else len(allowed)
    asked = num_threads or _omp_num_threads()
    if asked:
        count, reason = min(asked, most), f"{asked} asked for, {most} allowed by affinity and cgroup"
    else:
        count, reason = min(len(cores), most), f"{len(cores)} physical cores, {most} allowed by affinity and cgroup"
    pinned = owned and count <= len(cores)
    return ThreadPlan(
        num_threads=count,
        cpus=tuple(cores[:count]) if pinned else (),
        spin_us=SPIN_US,
        reason=reason + ("; the cores are this process's own" if owned else "; the cores may be shared"),
    )


def one_cpu_per_core(cpus: list[int]) -> list[int]:
    """The first CPU of each physical core among `cpus`, since hardware threads share their core's vector units."""
    seen: set[str] = set()
    first = []
    for cpu in cpus:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            core = path.read_text(encoding="ascii").strip()
        except OSError:
            core = str(cpu)
        if core not in seen:
            seen.add(core)
            first.append(cpu)
    return first


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The CPU time that the cgroup (v2 or v1) grants, in CPUs, or None for no limit."""
    with suppress(OSError, ValueError, IndexError):
        limit, period = (root / "cpu.max").read_text(encoding="ascii").split()[:2]
        return None if limit == "max" else max(int(limit) / int(period), 0.01)
    with suppress(OSError, ValueError, ZeroDivisionError):
        limit_us = int((root / "cpu" / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        period_us = int((root / "cpu" / "cpu.cfs_period_us").read_text(encoding="ascii"))
        return None if limit_us <= 0 else limit_us / period_us
    return None


def _omp_num_threads() -> int | None:
    # OpenMP allows a list, one number per nesting level; regions here are not nested.
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def claim_cpus(cpus: list[int], folder: Path | None = None) -> list[int] | None:
    """Locks one file per CPU; returns the open files, or None if another process holds any of the locks.

    The system releases the locks when the files are closed or the process ends, however it ends.
    """
    held: list[int] = []
    try:
        folder = trusted_folder(folder or Path(tempfile.gettempdir()) / f"headrace-cpus-{os.getuid()}")
        for cpu in cpus:
            held.append(os.open(folder / f"{cpu}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, UntrustedFileError):
            warn_of(str(error), "The threads of the CPU kernels are not pinned to cores.")
        for file in held:
            os.close(file)
        return None
    return held


class ThreadPool:
    """Threads that run ops of one library. Owns the threads, their scratch and the CPU locks until `close` or garbage
    collection."""

    def __init__(self, library: Library, num_threads: int | None = None, *, locks: Path | None = None) -> None:
        """Starts the threads. Raises RuntimeError if the system refuses them. locks: the folder of the CPU locks."""
        self.library = library
        held = claim_cpus(sorted(os.sched_getaffinity(0)), locks)
        self.plan = plan(num_threads, owned=held is not None)
        self.dll = dll = library.dll
        dll.hr_pool_create.restype = ctypes.c_void_p
        dll.hr_pool_create.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
        dll.hr_pool_destroy.argtypes = [ctypes.c_void_p]
        dll.hr_pool_reserve.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        dll.hr_pool_run_op.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        dll.hr_pool_barriers.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        cpus = (ctypes.c_int32 * self.num_threads)(*self.plan.cpus) if self.plan.cpus else None
        self.handle: int = dll.hr_pool_create(self.num_threads, cpus, self.plan.spin_us) or 0
        self._end = weakref.finalize(self, _end_pool, dll, self.handle, held or [])
        if not self.handle:
            self._end()
            raise RuntimeError(f"The system refused {self.num_threads} threads for the CPU kernels.")

    @property
    def num_threads(self) -> int:
        """Threads of a parallel region, including the caller's."""
        return self.plan.num_threads

    def reserve(self, shared_bytes: int, per_thread_bytes: int) -> None:
        """Grows the scratch memory of ops to at least these sizes. Raises MemoryError."""
        if self.dll.hr_pool_reserve(self.handle, shared_bytes, per_thread_bytes) != 0:
            raise MemoryError(f"No memory for {shared_bytes + per_thread_bytes * self.num_threads} bytes of scratch.")

    def run_op(self, op: str | Callable[..., object], args: ctypes.Structure, step: Step | None = None) -> None:
        """Runs one op, given by its C name or function, in its own parallel region, without the interpreter lock."""
        function = getattr(self.dll, op) if isinstance(op, str) else op
        self.dll.hr_pool_run_op(self.handle, function, ctypes.byref(args), ctypes.byref(step) if step else None)

    def run_barriers(self, count: int) -> None:
        """Runs `count` barriers and nothing else, to measure the cost of one."""
        self.dll.hr_pool_barriers(self.handle, count)

    def close(self) -> None:
        """Ends the threads. No region may be running, and none may be started afterwards."""
        self._end()
        self.handle = 0


def _end_pool(dll: ctypes.CDLL, handle: int, held: list[int]) -> None:
    if handle:
        dll.hr_pool_destroy(handle)
    for file in held:
        os.close(file)
