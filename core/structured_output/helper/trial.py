"""Compiles a grammar first in a separate process, which can be killed: a library cannot be interrupted, and may crash.

A schema whose references form a long chain overflows a library's stack, which would end the engine; another of a
hundred bytes computes for minutes, or takes gigabytes. Such a grammar ends only the process that tries it, for which
the kernel limits CPU time and memory. No grammar is followed for requests (following.py) that was not compiled and
followed here, unless it is plain (../plain.py), and no plain one has lately ended the process that follows them.

Each of two processes (process.py) serves one lane: plain forms have a lane of their own, in which no other form delays
them.

    core                                  a process per lane
    Trial.check -- Candidate -->            compiles, and follows some tokens
                <-- Verdict ----            (or WorkerEnded)
"""

from __future__ import annotations

import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from headrace.core.structured_output.backend import Backend, FormMatcher
from headrace.core.structured_output.refusals import NO_ANSWER
from headrace.ipc.failure import HeadraceError, InvalidRequestError
from headrace.ipc.messages import StructuredOutput
from headrace.ipc.process.background import give_way
from headrace.ipc.process.helper import Helper, HelperEndedError, WorkerEnded, is_from_outside, limit_memory
from headrace.ipc.process.resources import allocated_bytes
from headrace.ipc.wait import WaitTimeoutError

PLAIN, OTHER = LANES = (0, 1)
"""Lanes of plain forms, and of all others."""
MOST_COMPUTING_S = 1.0
"""CPU time limit for one grammar."""
MOST_BYTES = 512 << 20
"""Limit of memory in addition to what the process uses without a grammar."""
MOST_STACK_BYTES = 1 << 20
"""Most stack of the thread that tries grammars: half of what the threads have with which llguidance fills masks."""
MOST_WAIT_S = 20.0
"""Longest that a trial may take by the clock, even on a busy machine: the process ends itself then."""
MOST_LATE_S = 60.0
"""How long to wait for its end in addition. What answers nothing at all then is ended with the whole program."""
MEASURED_S, MEASURED_CHARACTERS = 0.02, 1 << 14
"""The memory of a form that takes so much CPU time or is so long is measured, which takes some 10 ms itself: the C
library walks through all of its free blocks."""
QUICK_BYTES = 1 << 20
"""What any other form counts: most take a tenth of it."""
WALK_TOKENS = 12
"""Tokens of a random answer that the trial accepts: some grammars are slow only after their beginning."""


class Candidate(msgspec.Struct, frozen=True, tag=True):
    backend: str
    wanted: StructuredOutput
    most_s: float
    """By the clock."""


class Verdict(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Candidate`."""

    problem: str = ""
    num_bytes: int = 0
    """Memory that the form takes, compiled and followed for a while."""


class Trial:
    """Tries grammars. Thread-safe: those of one lane take turns."""

    def __init__(self, helper: Helper) -> None:
        """helper: process.py:grammar_helper."""
        self.helper = helper
        self._turns = [threading.Lock() for _ in LANES]

    def check(self, backend: str, wanted: StructuredOutput, lane: int = OTHER) -> int:
        """The bytes that the grammar takes. Raises InvalidRequestError if it cannot be compiled or costs too much."""
        candidate = Candidate(backend, wanted, MOST_WAIT_S)
        with self._turns[lane]:
            # A process may have been killed from outside while it waited for work, so try twice.
            verdict = self._try(candidate, lane) or self._try(candidate, lane)
        if verdict is None:
            raise HeadraceError("the process that tries grammars was killed twice")
        if verdict.problem:
            raise InvalidRequestError(verdict.problem)
        return verdict.num_bytes

    def _try(self, candidate: Candidate, lane: int) -> Verdict | None:
        """None if a process was killed from outside."""
        try:
            sent = self.helper.send(lane, candidate, MOST_LATE_S)
            verdict: Verdict | WorkerEnded = sent.receive(candidate.most_s + MOST_LATE_S)
        except HelperEndedError:
            return None
        except WaitTimeoutError:
            verdict = WorkerEnded(-signal.SIGALRM)
        return verdict if isinstance(verdict, Verdict) else _verdict_of(verdict.status, candidate)


def _verdict_of(status: int, candidate: Candidate) -> Verdict | None:
    """That on a grammar whose process has ended with the status; None if it was killed from outside."""
    if is_from_outside(status):
        return None
    if status == -signal.SIGALRM:
        said = f"the grammar was not compiled within {candidate.most_s:g} s"
    elif status == -signal.SIGPROF:
        said = f"the grammar takes more than {MOST_COMPUTING_S:g} s to compile, which is as much as one may"
    else:
        said = (
            "the grammar cannot be compiled: it is nested too deeply, its references form too long a chain, or it "
            f"takes more than {MOST_BYTES >> 20} MiB (its compiler ended with status {status})"
        )
    return Verdict(f"SamplingParams.structured_outputs: {said}")


class Trying:
    """The work of a process that tries grammars."""

    def __init__(self, backend_of: Callable[[str], Backend], made: Mapping[str, Backend], vocab_size: int) -> None:
        """backend_of: loads a library, once, into `made`."""
        self._backend_of, self._made, self._vocab_size = backend_of, made, vocab_size

    def begin(self, former: int) -> None:
        give_way()
        self._limit()

    def _limit(self) -> None:
        limit_memory(MOST_BYTES)
        self._allocated = allocated_bytes()

    def do(self, candidate: Candidate) -> Verdict:
        made, num_bytes = self._made, QUICK_BYTES
        try:
            if candidate.backend not in made:
                self._backend_of(candidate.backend)
                self._limit()
            signal.setitimer(signal.ITIMER_PROF, MOST_COMPUTING_S)  # SIGPROF ends this process, and so does SIGALRM
            signal.setitimer(signal.ITIMER_REAL, candidate.most_s)
            backend, began_s = made[candidate.backend], time.thread_time()
            matcher = backend.compile(candidate.wanted)
            problem = problem_of(backend, matcher, self._vocab_size)
            if len(candidate.wanted.text) > MEASURED_CHARACTERS or time.thread_time() - began_s > MEASURED_S:
                num_bytes = max(QUICK_BYTES, allocated_bytes() - self._allocated)
                del matcher
                self._allocated = allocated_bytes()  # what caches hold of it is no further form's
        except HeadraceError as error:
            problem = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if problem and candidate.backend in made:
            # Nobody will follow this grammar. A later one must not seem cheaper here, by parts of it in caches, than it
            # is where it is followed.
            made[candidate.backend].forget()
        return Verdict(problem, num_bytes)


def stack_bytes() -> int:
    """Stack of the thread that tries grammars: half of the smallest that a thread of the engine has, so that what
    recurses too deeply ends here. Most of the engine's threads have as much as the system's limit (`ulimit -s`)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return MOST_STACK_BYTES if limit == resource.RLIM_INFINITY else min(MOST_STACK_BYTES, limit // 2)


def problem_of(backend: Backend, matcher: FormMatcher, vocab_size: int) -> str:
    """Accepts some random tokens. Returns why the form cannot be used, or ""."""
    problem = _walk(backend, matcher, vocab_size)
    return problem and f"SamplingParams.structured_outputs: {problem}"


def _walk(backend: Backend, matcher: FormMatcher, vocab_size: int) -> str:
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
