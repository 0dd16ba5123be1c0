"""A broadcast ring in shared memory: one writer, N readers, every message to every reader, in order.

The memory is a memfd that processes inherit, so there is no name to collide and no file to be left behind.

    byte 0      head        u32   messages published so far, modulo 2^32; readers sleep on it
         4      writer      u32   1 while the writer sleeps on a reader's `taken`
    64*(1+r)    taken       u32   reader r: messages that it has copied out; the writer may sleep on it
         +4     sleeping    u32   reader r: 1 while it sleeps on `head`
         +8     finished    u32   reader r: messages that it has processed; nobody sleeps on it
    then        slot 0 | slot 1 | ...         num_slots of slot_bytes each
    a slot:     length      u32   of the message
         +4     kind        u16   the message's type, defined by the users of the ring
         +6     is_aside    u16   1: the message is larger than a slot and is sent another way
         +8     the message

Message number n, counted from FIRST, lies in slot n % num_slots. Each word is written by one process.

    writer: wait until n - taken[r] < num_slots for every r > fill slot > fence > head = n + 1 > fence > wake sleepers
    reader: wait until head != n > copy the slot out > fence > taken[r] = n + 1 > fence > wake the writer if it sleeps

A reader's slot is free as soon as it has copied the message, before it processes it; so a writer that never has more
than num_slots messages in flight never waits.

A wait spins for a few microseconds, then sleeps. The spin time adapts between MIN_SPIN_S and MAX_SPIN_S: a spin that
saw the change doubles it, a spin in vain halves it. The ring does not detect deaths: whoever does (by pidfd or end of
file) calls `interrupt`, which ends the wait.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable

import msgspec

from headrace.ipc.failure import HeadraceError, InconsistentError
from headrace.ipc.transport.futex import Fence, Futex
from headrace.ipc.wait import Deadline

FIRST = (1 << 32) - 1000
"""The first message's number: it wraps after a thousand messages, so that a mistake shows in tests, not after weeks."""
MIN_SPIN_S, MAX_SPIN_S = 2e-6, 50e-6
_MASK = (1 << 32) - 1
_LINE_BYTES, _LINE_WORDS = 64, 16  # a cache line for each process that writes
_HEAD, _WRITER = 0, 1
_TAKEN, _SLEEPING, _FINISHED = 0, 1, 2
_SLOT = struct.Struct("=IHH")
Aside = Callable[[int, bytes], None]
"""Sends message `number` to every reader's Mailbox another way."""


class RingInterruptedError(HeadraceError):
    """`interrupt` was called: the other side is gone, or the process is ending."""


class RingLayout(msgspec.Struct, frozen=True, array_like=True):
    num_slots: int
    """A power of two, so that slots stay in order when message numbers wrap."""
    slot_bytes: int
    """Size of a slot with its header; a multiple of 64."""
    num_readers: int

    @classmethod
    def holding(cls, message_bytes: int, num_slots: int, num_readers: int) -> RingLayout:
        """A layout of at least `num_slots` slots for messages of up to `message_bytes`."""
        lines = -(-(message_bytes + _SLOT.size) // _LINE_BYTES)
        return cls(1 << (num_slots - 1).bit_length(), lines * _LINE_BYTES, num_readers)

    @property
    def header_bytes(self) -> int:
        return _LINE_BYTES * (1 + self.num_readers)

    @property
    def total_bytes(self) -> int:
        return self.header_bytes + self.num_slots * self.slot_bytes

    @property
    def message_bytes(self) -> int:
        """The largest message that fits a slot."""
        return self.slot_bytes - _SLOT.size


def lay_out_ring(fd: int, layout: RingLayout) -> None:
    """Sizes an empty memfd and writes the header, before any end of the ring is opened. Raises OSError."""
    os.ftruncate(fd, layout.total_bytes)
    for line in range(layout.num_readers + 1):
        os.pwrite(fd, struct.pack("=I", FIRST), line * _LINE_BYTES)
        if line:
            os.pwrite(fd, struct.pack("=I", FIRST), line * _LINE_BYTES + 4 * _FINISHED)


class Mailbox:
    """Receives the messages that are too large for a slot, from another thread."""

    def __init__(self) -> None:
        self._arrived: dict[int, bytes] = {}
        self._changed = threading.Condition()
        self._interrupted = False

    def put(self, number: int, data: bytes) -> None:
        with self._changed:
            self._arrived[number] = data
            self._changed.notify_all()

    def take(self, number: int, deadline: Deadline) -> bytes:
        """Raises WaitTimeoutError, or RingInterruptedError."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._arrived or self._interrupted, deadline.remaining_s)
            if number in self._arrived:
                return self._arrived.pop(number)
        if self._interrupted:
            raise RingInterruptedError("the ring was interrupted")
        raise deadline.fail(f"the arrival of message {number}")

    def interrupt(self) -> None:
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()


class _End:
    """Common to writer and reader: mapping the memory, waiting for a word to change, interruption."""

    def __init__(self, fd: int, layout: RingLayout) -> None:
        self.layout = layout
        self._memory = mmap.mmap(fd, layout.total_bytes)
        self._view = memoryview(self._memory)
        # Assigning an item of this view is one store of four aligned bytes, and reading one is one load.
        self._words = self._view[: layout.header_bytes].cast("I")
        anchor = ctypes.c_char.from_buffer(self._memory)
        self._address = ctypes.addressof(anchor)
        del anchor  # otherwise the memory could not be unmapped
        self._fence = Fence()
        # Computed once: a message takes only a few microseconds.
        self._num_slots, self._slot_bytes = layout.num_slots, layout.slot_bytes
        self._slots_at, self._message_bytes = layout.header_bytes, layout.message_bytes
        self._spin_s = MAX_SPIN_S
        self._interrupted = False
        self._sleeps_on: Futex | None = None

    def _futex(self, word: int) -> Futex:
        return Futex(self._address + 4 * word)

    def interrupt(self) -> None:
        """From another thread: ends the current wait and every later one with RingInterruptedError."""
        self._interrupted = True
        while (futex := self._sleeps_on) is not None:  # it may be between its last check and its sleep
            futex.wake()
            time.sleep(1e-3)

    def close(self) -> None:
        """Unmaps the memory; no wait may be in progress. Safe to call twice."""
        self._words.release()
        self._view.release()
        self._memory.close()

    def _await_change(self, word: int, futex: Futex, seen: int, flag: int, deadline: Deadline, what: str) -> None:
        """Returns once words[word], `futex`'s word, is not `seen`. words[flag] is 1 while this process sleeps on it."""
        words = self._words
        end_s = time.perf_counter() + self._spin_s
        while words[word] == seen:
            if time.perf_counter() >= end_s:
                self._spin_s = max(MIN_SPIN_S, self._spin_s / 2)
                break
            os.sched_yield()  # the awaited process may need this core
        else:
            self._spin_s = min(MAX_SPIN_S, self._spin_s * 2)
            return
        words[flag] = 1
        self._fence()
        self._sleeps_on = futex
        try:
            while words[word] == seen:
                if self._interrupted:
                    raise RingInterruptedError("the ring was interrupted")
                remaining_s = deadline.remaining_s
                if remaining_s == 0.0:
                    raise deadline.fail(what)
                futex.wait(seen, remaining_s)
        finally:
            words[flag] = 0
            self._sleeps_on = None


class RingWriter(_End):
    """The only writer. `aside` is needed only if messages may be larger than a slot."""

    def __init__(self, fd: int, layout: RingLayout, aside: Aside | None = None) -> None:
        super().__init__(fd, layout)
        self._aside = aside
        self._number = self._words[_HEAD]
        self._readers = [_LINE_WORDS * (1 + reader) for reader in range(layout.num_readers)]
        self._head = self._futex(_HEAD)
        self._taken = {reader: self._futex(reader + _TAKEN) for reader in self._readers}
        self._room = 0  # messages that can be put before `taken` has to be read again

    def put(self, data: bytes, deadline: Deadline, kind: int = 0) -> int:
        """Publishes one message and returns its number. Waits only while a reader has not taken num_slots messages.

        Raises WaitTimeoutError, or RingInterruptedError.
        """
        words, number = self._words, self._number
        if self._room == 0:
            self._room = self._await_room(deadline)
        at = self._slots_at + number % self._num_slots * self._slot_bytes
        is_aside = len(data) > self._message_bytes
        if is_aside:
            if self._aside is None:
                raise InconsistentError(f"a message of {len(data)} bytes; slots take {self._message_bytes}")
            self._aside(number, data)
        else:
            self._view[at + _SLOT.size : at + _SLOT.size + len(data)] = data
        _SLOT.pack_into(self._view, at, len(data), kind, is_aside)
        self._fence()
        self._number = words[_HEAD] = (number + 1) & _MASK
        self._fence()
        for reader in self._readers:
            if words[reader + _SLEEPING]:
                self._head.wake()  # wakes all readers that sleep on the head
                break
        self._room -= 1
        return number

    def _await_room(self, deadline: Deadline) -> int:
        """Waits until a slot is free; returns the number of free slots."""
        words, number, room = self._words, self._number, self._num_slots
        for reader in self._readers:
            word = reader + _TAKEN
            while (left := self._num_slots - ((number - (taken := words[word])) & _MASK)) <= 0:
                what = "taking a message from the full ring"
                self._await_change(word, self._taken[reader], taken, _WRITER, deadline, what)
            room = min(room, left)
        return room

    @property
    def last(self) -> int:
        """The number of the last message put."""
        return (self._number - 1) & _MASK

    @property
    def blocking(self) -> list[int]:
        """The readers that have not taken the oldest message of a full ring, and so prevent the next one."""
        slots = self.layout.num_slots
        lines = enumerate(self._readers)
        return [reader for reader, line in lines if (self._number - self._words[line + _TAKEN]) & _MASK >= slots]

    def behind(self, number: int) -> list[int]:
        """The readers that have not processed message `number`."""
        return [
            reader
            for reader, line in enumerate(self._readers)
            if _before(self._words[line + _FINISHED], (number + 1) & _MASK)
        ]


class RingReader(_End):
    """One of the readers. Messages are returned as copies, so that their slot is free at once."""

    def __init__(self, fd: int, layout: RingLayout, reader: int, mailbox: Mailbox | None = None) -> None:
        super().__init__(fd, layout)
        self._line = _LINE_WORDS * (1 + reader)
        self._mailbox = mailbox
        self._number = self._words[self._line + _TAKEN]
        self._head, self._taken = self._futex(_HEAD), self._futex(self._line + _TAKEN)

    def take(self, deadline: Deadline) -> tuple[int, bytearray | bytes]:
        """The next message's kind and content. Raises WaitTimeoutError, or RingInterruptedError."""
        words, number = self._words, self._number
        while words[_HEAD] == number:
            self._await_change(_HEAD, self._head, number, self._line + _SLEEPING, deadline, "the next message")
        self._fence()
        at = self._slots_at + number % self._num_slots * self._slot_bytes
        length, kind, is_aside = _SLOT.unpack_from(self._view, at)
        data = None if is_aside else bytearray(self._view[at + _SLOT.size : at + _SLOT.size + length])
        self._fence()
        self._number = words[self._line + _TAKEN] = (number + 1) & _MASK
        self._fence()
        if words[_WRITER]:
            self._taken.wake()
        if data is not None:
            return kind, data
        if self._mailbox is None:
            raise InconsistentError(f"a message of {length} bytes came another way, and there is no mailbox")
        return kind, self._mailbox.take(number, deadline)

    def finished(self, under_way: int = 0) -> None:
        """Marks every message taken so far as processed, except the last `under_way` ones."""
        self._words[self._line + _FINISHED] = (self._number - under_way) & _MASK

    def interrupt(self) -> None:
        super().interrupt()
        if self._mailbox is not None:
            self._mailbox.interrupt()


def _before(a: int, b: int) -> bool:
    """Whether number a comes before b, modulo 2^32."""
    return (a - b) & _MASK > _MASK >> 1
