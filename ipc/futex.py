"""Sleeping on a word of shared memory (Linux's futex), and the memory fence that goes with it.

A process that waits for a word to change says so (a flag of its own), then sleeps for as long as the word keeps the
value it has seen; the one that changes the word wakes it. Neither may miss the other, which takes a fence on both
sides between the store and the load that follows it:

    waiter                               changer
      flag = 1                             word = new
      fence                                fence
      word still old?  sleep(word, old)    flag set?  wake(word)
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading

_SYS_FUTEX = {"x86_64": 202, "ppc64le": 221, "s390x": 238}.get(platform.machine(), 98)
"""98 is its number on every architecture with the kernel's generic table: aarch64, riscv64, loongarch64."""
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # not the private kind: the word is shared between processes
_EVERYBODY = (1 << 31) - 1
_syscall = ctypes.CDLL(None, use_errno=True).syscall  # releases the interpreter lock meanwhile
_syscall.restype = ctypes.c_long
_syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
]


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def futex_wait(address: int, seen: int, timeout_s: float | None) -> None:
    """Sleeps until woken or `timeout_s` has passed; returns at once if the u32 at `address` is not `seen`.

    May also return early, as when a signal came: the caller looks again. Raises OSError where there are no futexes.
    """
    timeout = None
    if timeout_s is not None:
        seconds = int(timeout_s)
        timeout = ctypes.byref(_Timespec(seconds, int((timeout_s - seconds) * 1e9)))
    if _syscall(_SYS_FUTEX, address, _FUTEX_WAIT, seen, timeout, None, 0) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(code, os.strerror(code))


def futex_wake(address: int) -> None:
    """Wakes every thread and process that sleeps on the word at `address`."""
    _syscall(_SYS_FUTEX, address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)


class Fence:
    """`fence()` orders all memory accesses before it before all after it, for every process that shares the memory.

    Python has no such primitive. Letting go of a lock and taking it again is one: a locked instruction on x86, and on
    ARM a store-release followed by a load-acquire of the same word, which ARMv8 keeps in order.
    """

    __slots__ = ("_acquire", "_release")

    def __init__(self) -> None:
        lock = threading.Lock()
        self._acquire, self._release = lock.acquire, lock.release
        self._acquire()

    def __call__(self) -> None:
        self._release()
        self._acquire()
