"""Compiles a grammar first in a separate process, which can be killed: a library cannot be interrupted, and may crash.

A schema whose references form a long chain overflows a library's stack, which would end the engine; another of a
hundred bytes computes for minutes, or takes gigabytes. Such a grammar ends only the process that tries it, for which
the kernel limits CPU time and memory. No grammar is compiled in the engine that was not compiled and followed here.

Reading a tokenizer takes seconds, so one process reads it, compiles nothing, and forks the processes that do. When one
of these ends, the next takes milliseconds to fork. Each serves one lane: forms known to be cheap (`plain.py`) have a
lane of their own, in which no other form delays them.

    core                                  child: reads the tokenizer, forks, and waits for the end of
    Trial.check -- Candidate -->            a process per lane: compile, follow some tokens
                <-- Verdict ----            (or the child sends the verdict, after that process ended by a signal)
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec
import numpy as np
import psutil

from headrace.core.structured_output.backend import Backend, Matcher, Vocabulary
from headrace.core.structured_output.refusals import NO_ANSWER
from headrace.ipc.failure import HeadraceError, InvalidRequestError
from headrace.ipc.messages import StructuredOutput
from headrace.ipc.process.child import STOP_SIGNALS, die_with_parent, leave_signals_to_parent
from headrace.ipc.process.program import python_command, starting_folder
from headrace.ipc.transport.channel import Channel, ChannelClosedError
from headrace.ipc.wait import Deadline, WaitTimeoutError

PLAIN, OTHER = LANES = (0, 1)
"""Lanes of plain forms, and of all others."""
MOST_COMPUTING_S = 1.0
"""CPU time limit for one grammar."""
MOST_BYTES = 512 << 20
"""Limit of memory in addition to what the process uses without a grammar."""
STACK_BYTES = 1 << 20
"""Stack of the thread that tries grammars: half of the smallest that a thread of the engine has (those of llguidance
that fill masks), so that what recurses too deeply ends here."""
MOST_WAIT_S = 20.0
"""Longest wait for a verdict, even on a busy machine."""
START_S = 60.0
WALK_TOKENS = 12
"""Tokens of a random answer that the trial accepts: some grammars are slow only after their beginning."""


class Beginning(msgspec.Struct, frozen=True, tag=True):
    vocabulary: Vocabulary
    backend: str
    """The library to load before the first fork. Others are loaded by the process that needs them."""


class Candidate(msgspec.Struct, frozen=True, tag=True):
    backend: str
    wanted: StructuredOutput


class Verdict(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Candidate`. The first one of each lane answers the `Beginning`: the lane is ready."""

    problem: str = ""
    is_unknown: bool = False
    """The process that tried it was killed from outside."""


TrialMessage = Beginning | Candidate | Verdict


@dataclass
class _Running:
    """The trial process and its channels, one per lane."""

    process: subprocess.Popen[bytes]
    channels: list[Channel]
    starting: set[int] = field(default_factory=lambda: set(LANES))
    """Lanes that have not reported yet that they are ready."""


class Trial:
    """Owns the trial process, which starts with the first grammar. Thread-safe: grammars of one lane take turns."""

    def __init__(self, vocabulary: Vocabulary, backend: str) -> None:
        """backend: the library that most grammars need."""
        self._beginning = Beginning(vocabulary, backend)
        self._turns = [threading.Lock() for _ in LANES]
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._is_stopped = False
        """`stop` was called."""

    def start(self) -> None:
        """Starts the process, without waiting, if it does not run."""
        with self._lock:
            self._begin()

    def check(self, backend: str, wanted: StructuredOutput, lane: int = OTHER) -> None:
        """Raises InvalidRequestError if the grammar cannot be compiled or costs too much."""
        candidate = Candidate(backend, wanted)
        with self._turns[lane]:
            # A process may have been killed from outside while it waited for work, so try twice.
            problem = self._try(candidate, lane)
            if problem is None:
                problem = self._try(candidate, lane)
        if problem is None:
            raise HeadraceError("the process that tries grammars was killed twice")
        if problem:
            raise InvalidRequestError(problem)

    def stop(self) -> None:
        """Kills the process, which also ends calls that wait for it."""
        self._is_stopped = True
        if (running := self._running) is not None:
            running.process.kill()
            running.process.wait()

    def _try(self, candidate: Candidate, lane: int) -> str | None:
        """The grammar's problem, or "". None if a process was killed from outside."""
        with self._lock:
            running = self._begin()
        channel = running.channels[lane]
        try:
            if lane in running.starting:
                channel.receive(Deadline(START_S))
                running.starting.discard(lane)
            channel.send(candidate, Deadline(MOST_WAIT_S))
            verdict: Verdict = channel.receive(Deadline(MOST_WAIT_S))
        except (ChannelClosedError, WaitTimeoutError) as error:
            channel.close()
            self._end(running)
            if isinstance(error, ChannelClosedError):
                return None
            return f"SamplingParams.structured_outputs: the grammar was not compiled within {MOST_WAIT_S:g} s"
        return None if verdict.is_unknown else verdict.problem

    def _begin(self) -> _Running:
        """The process, which is started if there is none. Called with the lock."""
        if self._is_stopped:
            raise HeadraceError("the engine is stopping")
        if self._running is not None:
            return self._running
        with contextlib.ExitStack() as theirs:
            pairs = [Channel.pair(TrialMessage) for _ in LANES]
            numbers = [theirs.enter_context(sock).fileno() for _, sock in pairs]
            process = subprocess.Popen(
                python_command("-m", __name__, *map(str, numbers)),
                cwd=starting_folder(),
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                # Else each thread of a library reserves 128 MiB of address space, which counts towards the limit. And a
                # process that forks should have no other threads.
                env={**os.environ, "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"},
                stderr=subprocess.DEVNULL,  # a library's panic message is also in the verdict
            )
        running = self._running = _Running(process, [channel for channel, _ in pairs])
        if self._is_stopped:  # another thread called `stop` meanwhile, before there was a process to kill
            self.stop()
            raise HeadraceError("the engine is stopping")
        with contextlib.suppress(ChannelClosedError):  # the process was killed, which `_try` finds out
            running.channels[0].send(self._beginning, Deadline(START_S))
        return running

    def _end(self, running: _Running) -> None:
        """Ends the process with those that it has forked; a thread that waits for another lane tries again."""
        with self._lock:
            if self._running is running:
                self._running = None
        running.process.kill()
        running.process.wait()


def main(fds: Sequence[int]) -> None:
    """Forks a process per lane, each again when it ends, until the core closes their channels."""
    from headrace.core.structured_output.backends import make_backend

    channels = [Channel.inherited(fd, TrialMessage) for fd in fds]
    beginning: Beginning = channels[0].receive(Deadline(None))
    made: dict[str, Backend] = {}
    with contextlib.suppress(HeadraceError):  # the first grammar gets the error
        made[beginning.backend] = make_backend(beginning.backend, beginning.vocabulary)
    gc.freeze()  # else the first collection in each forked process would copy all pages with objects
    is_busy = mmap.mmap(-1, len(channels))
    for channel in channels:
        channel.send(Verdict())

    def fork(lane: int) -> int:
        if (pid := os.fork()) == 0:
            die_with_parent()
            _serve(channels, lane, is_busy, beginning.vocabulary, made)
        return pid

    lanes = {fork(lane): lane for lane in range(len(channels))}
    while lanes:
        pid, waited = os.wait()
        lane, status = lanes.pop(pid), os.waitstatus_to_exitcode(waited)
        if status == 0:
            continue
        if is_busy[lane]:
            is_busy[lane] = 0
            channels[lane].send(_verdict_of(status))
        elif status > 0:
            return  # it cannot even begin to serve
        lanes[fork(lane)] = lane


def _verdict_of(status: int) -> Verdict:
    """The verdict on a grammar whose process has ended with the status."""
    if status == -signal.SIGKILL or -status in STOP_SIGNALS:
        return Verdict(is_unknown=True)
    if status == -signal.SIGPROF:
        said = f"the grammar takes more than {MOST_COMPUTING_S:g} s to compile, which is as much as one may"
    else:
        said = (
            "the grammar cannot be compiled: it is nested too deeply, its references form too long a chain, or it "
            f"takes more than {MOST_BYTES >> 20} MiB (its compiler ended with status {status})"
        )
    return Verdict(f"SamplingParams.structured_outputs: {said}")


def _serve(
    channels: Sequence[Channel], lane: int, is_busy: mmap.mmap, vocabulary: Vocabulary, made: dict[str, Backend]
) -> NoReturn:
    """Tries the grammars of one lane, on a thread with a small stack, until the core closes the channel."""
    for other in channels:
        if other is not channels[lane]:
            other.close()
    status = 1

    def serve() -> None:
        nonlocal status
        _limit_memory()
        try:
            while True:
                candidate: Candidate = channels[lane].receive(Deadline(None))
                is_busy[lane] = 1
                verdict = _tried(candidate, vocabulary, made)
                is_busy[lane] = 0
                channels[lane].send(verdict)
        except ChannelClosedError:
            status = 0

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    os._exit(status)


def _tried(candidate: Candidate, vocabulary: Vocabulary, made: dict[str, Backend]) -> Verdict:
    from headrace.core.structured_output.backends import make_backend

    try:
        if candidate.backend not in made:
            made[candidate.backend] = make_backend(candidate.backend, vocabulary)
            _limit_memory()
        signal.setitimer(signal.ITIMER_PROF, MOST_COMPUTING_S)  # SIGPROF ends this process
        backend = made[candidate.backend]
        problem = _walk(backend, backend.compile(candidate.wanted), vocabulary.vocab_size)
        problem = problem and f"SamplingParams.structured_outputs: {problem}"
    except HeadraceError as error:
        problem = str(error)
    signal.setitimer(signal.ITIMER_PROF, 0)
    if problem and candidate.backend in made:
        # The engine will not compile this grammar. Without its cached parts there, a later grammar must not seem
        # cheaper here than it is in the engine.
        made[candidate.backend].forget()
    return Verdict(problem)


def _walk(backend: Backend, matcher: Matcher, vocab_size: int) -> str:
    """Accepts some random tokens. Returns why the matcher cannot be used, or ""."""
    chance = random.Random(0)
    mask = np.zeros((1, -(-vocab_size // 32)), np.int32)
    for _ in range(WALK_TOKENS):
        backend.fill([(matcher, 0, [])], mask)
        matcher.forced_tokens()
        if matcher.is_complete or matcher.problem:
            break
        allowed = np.flatnonzero(mask[0])
        if not len(allowed):
            return NO_ANSWER
        word = int(chance.choice(allowed))
        bits = [bit for bit in range(32) if int(mask[0, word]) >> bit & 1]
        if not matcher.accept(32 * word + chance.choice(bits)):
            break
    return matcher.problem


def _limit_memory() -> None:
    used_bytes = psutil.Process().memory_info().vms
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MOST_BYTES, hard))


if __name__ == "__main__":
    leave_signals_to_parent()  # the parent ends this process by closing the channels
    with contextlib.suppress(ChannelClosedError):
        main([int(each) for each in sys.argv[1:]])
    os._exit(0)
