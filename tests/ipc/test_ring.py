"""The broadcast ring: every message to every reader in order, whoever sleeps, dies or lags."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ipc.failure import InconsistentError
from headrace.ipc.transport.ring import (
    FIRST,
    Mailbox,
    RingInterruptedError,
    RingLayout,
    RingReader,
    RingWriter,
    lay_out_ring,
)
from headrace.ipc.wait import Deadline, WaitTimeoutError

AT_ONCE, SOON = Deadline(0.0), 20.0

READER = """
import hashlib, os, random, sys, time
from headrace.ipc.transport.ring import RingLayout, RingReader
from headrace.ipc.wait import Deadline
fd, reader, count = map(int, sys.argv[1:4])
ring = RingReader(fd, RingLayout(*map(int, sys.argv[4:7])), reader)
seen, pauses = hashlib.sha256(), random.Random(reader)
for _ in range(count):
    kind, data = ring.take(Deadline(20.0))
    seen.update(bytes([kind]) + data)
    if pauses.random() < 0.01:
        time.sleep(0.001)
    ring.finished()
print(seen.hexdigest())
"""


@contextmanager
def ring(num_readers: int = 2, num_slots: int = 4, message_bytes: int = 100) -> Iterator[tuple[int, RingLayout]]:
    layout = RingLayout.holding(message_bytes, num_slots, num_readers)
    fd = os.memfd_create("test-ring")
    try:
        lay_out_ring(fd, layout)
        yield fd, layout
    finally:
        os.close(fd)


def test_every_process_reads_every_message_in_order_also_where_numbers_wrap() -> None:
    count, rng, sent = 5000, random.Random(1), hashlib.sha256()
    assert FIRST + count > 1 << 32
    with ring(num_readers=3, message_bytes=300) as (fd, layout):
        shape = [str(value) for value in (layout.num_slots, layout.slot_bytes, layout.num_readers)]
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", READER, str(fd), str(reader), str(count), *shape],
                pass_fds=[fd],
                stdout=subprocess.PIPE,
                text=True,
            )
            for reader in range(3)
        ]
        writer = RingWriter(fd, layout)
        for n in range(count):
            kind, data = n % 5, rng.randbytes(rng.randrange(301))
            sent.update(bytes([kind]) + data)
            writer.put(data, Deadline(SOON), kind)
            if rng.random() < 0.01:
                time.sleep(0.001)  # lets the readers fall asleep
        for process in readers:
            assert process.communicate(timeout=SOON)[0].strip() == sent.hexdigest()
            assert process.returncode == 0
        assert writer.behind(writer.last) == []
        writer.close()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 150), max_size=40),
    choices=st.lists(st.integers(0, 3), min_size=1, max_size=120),
    num_slots=st.integers(1, 9),
)
def test_any_order_of_puts_and_takes_gives_each_reader_the_same_messages(
    sizes: list[int], choices: list[int], num_slots: int
) -> None:
    """Choice 0 puts, 1 and 2 let a reader take, 3 lets both finish; messages over 100 bytes go by the mailbox."""
    with ring(num_slots=num_slots) as (fd, layout):
        assert layout.num_slots >= num_slots
        boxes = [Mailbox(), Mailbox()]
        writer = RingWriter(fd, layout, lambda number, data: [box.put(number, data) for box in boxes])  # type: ignore[func-returns-value]
        readers = [RingReader(fd, layout, r, boxes[r]) for r in range(2)]
        sent: list[bytes] = []
        taken, finished = [0, 0], [0, 0]
        for choice in choices:
            if choice == 0 and len(sent) < len(sizes):
                data = bytes([len(sent)]) * sizes[len(sent)]
                if len(sent) - min(taken) < layout.num_slots:
                    assert writer.put(data, AT_ONCE) == (FIRST + len(sent)) % (1 << 32)
                    sent.append(data)
                else:
                    with pytest.raises(WaitTimeoutError):
                        writer.put(data, AT_ONCE)
                    assert writer.blocking == [r for r in (0, 1) if len(sent) - taken[r] == layout.num_slots]
            elif choice in (1, 2):
                r = choice - 1
                if taken[r] < len(sent):
                    assert readers[r].take(AT_ONCE)[1] == sent[taken[r]]
                    taken[r] += 1
                else:
                    with pytest.raises(WaitTimeoutError):
                        readers[r].take(AT_ONCE)
            elif choice == 3:
                finished = list(taken)
                for reader in readers:
                    reader.finished()
            assert writer.behind(writer.last) == [r for r in (0, 1) if finished[r] < len(sent)]
        for end in (writer, *readers):
            end.close()


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Runs it in a thread; what it returned or raised is the list's one element at the end."""
    got: list[object] = []

    def run() -> None:
        try:
            got.append(call())
        except Exception as error:
            got.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, got


def wait_asleep(end: RingReader | RingWriter) -> None:
    deadline = Deadline(SOON)
    while not end._sleeps_on:
        assert not deadline.passed
        os.sched_yield()


def test_a_sleeping_reader_and_a_sleeping_writer_are_woken() -> None:
    with ring(num_readers=1, num_slots=1) as (fd, layout):
        writer, reader = RingWriter(fd, layout), RingReader(fd, layout, 0)
        thread, got = in_thread(lambda: reader.take(Deadline(SOON)))
        wait_asleep(reader)
        writer.put(b"one", AT_ONCE)
        thread.join(SOON)
        assert got == [(0, bytearray(b"one"))]
        writer.put(b"two", AT_ONCE)
        thread, got = in_thread(lambda: writer.put(b"three", Deadline(SOON)))
        wait_asleep(writer)
        assert reader.take(AT_ONCE)[1] == b"two"
        thread.join(SOON)
        assert got == [(FIRST + 2) % (1 << 32)]


@pytest.mark.parametrize("who", ["reader", "writer", "mailbox"])
def test_an_interrupt_ends_the_wait_of_now_and_later_ones(who: str) -> None:
    with ring(num_readers=1, num_slots=1) as (fd, layout):
        writer = RingWriter(fd, layout, lambda number, data: None)
        reader = RingReader(fd, layout, 0, Mailbox())
        if who != "reader":
            writer.put(b"x" * (1000 if who == "mailbox" else 10), AT_ONCE)
        end = writer if who == "writer" else reader
        wait = (lambda: writer.put(b"y", Deadline(SOON))) if who == "writer" else (lambda: reader.take(Deadline(SOON)))
        thread, got = in_thread(wait)
        if who != "mailbox":
            wait_asleep(end)
        end.interrupt()
        thread.join(SOON)
        assert isinstance(got[0], RingInterruptedError)
        with pytest.raises(RingInterruptedError):
            wait()


def test_what_was_published_before_an_interrupt_can_still_be_taken() -> None:
    with ring(num_readers=1) as (fd, layout):
        writer, reader = RingWriter(fd, layout), RingReader(fd, layout, 0)
        writer.put(b"last words", AT_ONCE)
        reader.interrupt()
        assert reader.take(AT_ONCE)[1] == b"last words"
        with pytest.raises(RingInterruptedError):
            reader.take(Deadline(SOON))


def test_waiting_takes_no_processor_time() -> None:
    with ring(num_readers=1) as (fd, layout):
        reader = RingReader(fd, layout, 0)

        def wait() -> float:
            before_s = time.thread_time()
            with pytest.raises(WaitTimeoutError):
                reader.take(Deadline(0.5))
            return time.thread_time() - before_s

        thread, got = in_thread(wait)
        thread.join(SOON)
        assert isinstance(got[0], float)
        assert got[0] < 0.01


def test_a_message_too_large_for_a_slot_is_refused_where_there_is_no_other_way() -> None:
    with ring(num_readers=1, message_bytes=100) as (fd, layout):
        writer = RingWriter(fd, layout)
        writer.put(bytes(layout.message_bytes), AT_ONCE)
        with pytest.raises(
            InconsistentError, match=rf"{layout.message_bytes + 1} bytes; slots take {layout.message_bytes}"
        ):
            writer.put(bytes(layout.message_bytes + 1), AT_ONCE)
