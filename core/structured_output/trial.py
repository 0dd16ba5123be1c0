"""Compiles a grammar first in a separate process, which can be killed: a library cannot be interrupted, and may crash.

A schema whose references form a long chain overflows a library's stack, which would end the engine; another of a
hundred bytes computes for minutes, or takes gigabytes. Such a grammar ends only the trial process, for which the kernel
limits CPU time and memory; the next grammar gets a new process.

    core: Trial.check -- Candidate -->  child: compile, follow some tokens
                      <-- Verdict ----         (or its end, by a signal)
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import psutil

from headrace.core.structured_output.backend import Backend, Matcher, Vocabulary
from headrace.core.structured_output.refusals import NO_ANSWER
from headrace.ipc.failure import HeadraceError, InvalidRequestError
from headrace.ipc.messages import StructuredOutput
from headrace.ipc.process.child import STOP_SIGNALS, leave_signals_to_parent
from headrace.ipc.process.program import python_command, starting_folder
from headrace.ipc.transport.channel import Channel, ChannelClosedError
from headrace.ipc.wait import Deadline, WaitTimeoutError

MOST_COMPUTING_S = 1.0
"""CPU time limit for one grammar."""
MOST_MASK_S = 0.1
"""CPU time limit for one mask, or for the tokens forced in one state: other requests wait meanwhile."""
MOST_BYTES = 512 << 20
"""Limit of memory in addition to what the process uses without a grammar."""
MOST_WAIT_S = 20.0
"""Longest wait for a verdict, even on a busy machine."""
START_S = 60.0
WALK_TOKENS = 12
"""Tokens of a random answer that the trial accepts: some grammars are slow only after their beginning."""


class Beginning(msgspec.Struct, frozen=True, tag=True):
    vocabulary: Vocabulary


class Candidate(msgspec.Struct, frozen=True, tag=True):
    backend: str
    wanted: StructuredOutput


class Verdict(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Candidate`. The first one answers the `Beginning`: the process is ready."""

    problem: str = ""


TrialMessage = Beginning | Candidate | Verdict


class Trial:
    """Owns the trial process, which starts with the first grammar. Thread-safe: grammars take turns."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._is_new = self._is_stopped = False
        """_is_new: the process has not reported yet that it is ready. _is_stopped: `stop` was called."""

    def start(self) -> None:
        """Starts the process, without waiting, if it does not run."""
        with self._lock:
            self._begin()

    def check(self, backend: str, wanted: StructuredOutput) -> None:
        """Raises InvalidRequestError if the grammar cannot be compiled or costs too much."""
        candidate = Candidate(backend, wanted)
        with self._lock:
            # The process may have been killed from outside while it waited for work, so try twice.
            problem = self._try(candidate)
            if problem is None:
                problem = self._try(candidate)
        if problem is None:
            raise HeadraceError("the process that tries grammars was killed twice")
        if problem:
            raise InvalidRequestError(problem)

    def stop(self) -> None:
        """Kills the process, which also ends calls that wait for it."""
        self._is_stopped = True
        if (process := self._process) is not None:
            process.kill()
            process.wait()

    def _try(self, candidate: Candidate) -> str | None:
        """The grammar's problem, or "". None if the process was killed from outside."""
        try:
            channel = self._begin()
            if self._is_new:
                channel.receive(Deadline(START_S))
                self._is_new = False
            channel.send(candidate, Deadline(MOST_WAIT_S))
            verdict: Verdict = channel.receive(Deadline(MOST_WAIT_S))
        except (ChannelClosedError, WaitTimeoutError) as error:
            said = self._end(has_closed=isinstance(error, ChannelClosedError))
            return None if said is None else f"SamplingParams.structured_outputs: {said}"
        return verdict.problem

    def _begin(self) -> Channel:
        """The channel to the process, which is started if there is none."""
        if self._is_stopped:
            raise HeadraceError("the engine is stopping")
        if self._channel is not None:
            return self._channel
        channel, theirs = Channel.pair(TrialMessage)
        with theirs:
            self._process = subprocess.Popen(
                python_command("-m", __name__, str(theirs.fileno())),
                cwd=starting_folder(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Else each thread of a library reserves 128 MiB of address space, which counts towards the limit.
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
                stderr=subprocess.DEVNULL,  # a library's panic message is also in the verdict
            )
        if self._is_stopped:  # another thread called `stop` meanwhile, before there was a process to kill
            self.stop()
            channel.close()
            raise HeadraceError("the engine is stopping")
        self._channel, self._is_new = channel, True
        channel.send(Beginning(self._vocabulary), Deadline(START_S))
        return channel

    def _end(self, *, has_closed: bool) -> str | None:
        """Ends the process if it still runs. Returns the grammar's problem; None if it was killed from outside.

        has_closed: its channel is closed, so the process is ending by itself, which may take long on a busy machine.
        """
        process, channel = self._process, self._channel
        assert process is not None, "it was started"
        assert channel is not None, "it was started"
        self._process = self._channel = None
        channel.close()
        if has_closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(MOST_WAIT_S)
        status = process.poll()
        if status is None:
            process.kill()
            process.wait()
            return f"the grammar was not compiled within {MOST_WAIT_S:g} s"
        # Killed from outside, or by a signal to the process group before `leave_signals_to_parent` took effect.
        if status == -signal.SIGKILL or -status in STOP_SIGNALS:
            return None
        if status == -signal.SIGPROF:
            return f"the grammar takes more than {MOST_COMPUTING_S:g} s to compile, which is as much as one may"
        return (
            "the grammar cannot be compiled: it is nested too deeply, its references form too long a chain, or it "
            f"takes more than {MOST_BYTES >> 20} MiB (its compiler ended with status {status})"
        )


def main(fd: int) -> None:
    from headrace.core.structured_output.backends import make_backend

    channel = Channel.inherited(fd, TrialMessage)
    vocabulary = channel.receive(Deadline(None)).vocabulary
    made: dict[str, Backend] = {}
    channel.send(Verdict())
    while True:
        candidate = channel.receive(Deadline(None))
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
        channel.send(Verdict(problem))


def _walk(backend: Backend, matcher: Matcher, vocab_size: int) -> str:
    """Accepts some random tokens. Returns why the matcher cannot be used, or ""."""
    chance = random.Random(0)
    mask = np.zeros((1, -(-vocab_size // 32)), np.int32)
    for _ in range(WALK_TOKENS):
        began_s = time.thread_time()
        backend.fill([(matcher, 0, [])], mask)
        if time.thread_time() - began_s > MOST_MASK_S:
            return _takes_too_long("finding the tokens that the grammar allows")
        began_s = time.thread_time()
        matcher.forced_tokens()
        if time.thread_time() - began_s > MOST_MASK_S:
            return _takes_too_long("finding the text that the grammar forces")
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if matcher.is_complete or matcher.problem:
            break
        if not len(allowed):
            return NO_ANSWER
        if not matcher.accept(int(chance.choice(allowed))):
            break
    return matcher.problem


def _takes_too_long(what: str) -> str:
    return f"{what} takes more than {MOST_MASK_S:g} s, which is as much as it may"


def _limit_memory() -> None:
    used_bytes = psutil.Process().memory_info().vms
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MOST_BYTES, hard))


if __name__ == "__main__":
    leave_signals_to_parent()  # the parent ends this process by closing the channel
    with contextlib.suppress(ChannelClosedError):
        main(int(sys.argv[1]))
    os._exit(0)
