"""Sleeping on a word of shared memory (Linux's futex), and the memory fence that this needs.

A process that waits for a word to change sets a flag, then sleeps while the word has the value it has seen; the process
that changes the word wakes it. Neither may miss the other, which takes a fence on both sides between the store and the
load that follows it:

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
"""The syscall's number; 98 on architectures with the kernel's generic table: aarch64, riscv64, loongarch64."""
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # not FUTEX_PRIVATE_FLAG: the word is shared between processes
_EVERYBODY = (1 << 31) - 1
_wait = ctypes.CDLL(None, use_errno=True).syscall  # releases the GIL during the call
_wait.restype = ctypes.c_long
_wake = ctypes.PyDLL(None).syscall  # keeps the GIL: this call never sleeps, and another thread would take the lock


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class Futex:
    """A u32 of shared memory to sleep on. Only one thread at a time may wait with one object.

    The arguments of the calls are converted once: after a sleep, with cold caches, the conversion would take longer
    than the kernel's part.
    """

    __slots__ = ("_seen", "_timeout", "_wait_args", "_wait_timed_args", "_wake_args")

    def __init__(self, address: int) -> None:
        number, where = ctypes.c_long(_SYS_FUTEX), ctypes.c_void_p(address)
        self._seen, self._timeout = ctypes.c_uint32(), _Timespec()
        wait = (number, where, ctypes.c_int(_FUTEX_WAIT), self._seen)
        self._wait_args = (*wait, ctypes.c_void_p(None))
        self._wait_timed_args = (*wait, ctypes.byref(self._timeout))
        self._wake_args = (number, where, ctypes.c_int(_FUTEX_WAKE), ctypes.c_int(_EVERYBODY))

    def wait(self, seen: int, timeout_s: float | None) -> None:
        """Sleeps until woken or `timeout_s` has passed; returns at once if the word is not `seen`.

        It may also return early, for example after a signal: the caller must check the word again. Raises OSError
        where futexes are not supported.
        """
        self._seen.value = seen
        if timeout_s is None:
            code = _wait(*self._wait_args)
        else:
            self._timeout.tv_sec = seconds = int(timeout_s)
            self._timeout.tv_nsec = int((timeout_s - seconds) * 1e9)
            code = _wait(*self._wait_timed_args)
        if code != 0 and (error := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(error, os.strerror(error))

    def wake(self) -> None:
        """Wakes every thread and process that sleeps on the word."""
        _wake(*self._wake_args)


class Fence:
    """`fence()` orders all memory accesses before it before all after it, for every process that shares the memory.

    Python has no such primitive. Releasing a lock and acquiring it again is one: a locked instruction on x86, and on
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
