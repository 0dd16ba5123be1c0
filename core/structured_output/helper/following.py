"""The process that follows the grammars of running requests, and its messages.

No library that reads a client's grammar runs in the engine. Forms whose trial was passed (trial.py) are compiled here,
by one process for all requests, and followed here token by token; masks are written to memory that the engine shares.
Plain forms (../plain.py) come without a trial, as it would take most of the time that they wait, and are followed here
for some tokens instead. The process may be killed by what it follows, as a trial is: follower.py then opens all
matchers again in its successor, but for the one that it worked on.

    engine                                 process of the lane FOLLOWING
    Prepare(form)           ------------>    compiles on a thread beside the steps
    Follow(accepted, masks) ------------>    passes the tokens to the matchers, and writes masks
             <-- Followed(states) ----      (or Restarted: it knows none of the matchers)
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.core.structured_output.backend import Backend, FormMatcher
from headrace.core.structured_output.held_memory import MOST_BYTES
from headrace.core.structured_output.helper.trial import MOST_COMPUTING_S as MOST_TRYING_S
from headrace.core.structured_output.helper.trial import problem_of
from headrace.ipc.failure import HeadraceError
from headrace.ipc.messages import StructuredOutput
from headrace.ipc.process.background import give_way
from headrace.ipc.process.helper import limit_memory

HEADER_BYTES = 64
"""Of the shared memory, in front of the masks: int64, the number of the matcher that the process follows (0: none, or
several at once), and behind it those of the forms that it compiles (0: none)."""
PREPARING_S = 1e-3
"""How long an answer to `Prepare` waits for the end of a compilation that is asked for again."""
MOST_COMPUTING_S, MOST_MASK_S = 3.0, 0.5
"""CPU time limit for one compilation or message, and in addition for each mask: what takes longer has no end."""
MOST_UNTRIED_S = 0.1
"""CPU time of a form without a trial: what takes longer has one, which measures the memory that it takes."""
MOST_AGAIN_S = 2e-3
"""CPU time limit, in addition, for each token that a matcher has to accept again in a new process."""
MOST_CACHE_BYTES = 512 << 20
"""Memory in addition to that of the forms, for the libraries' caches."""
UNLIMITED_STACK_BYTES = 2 << 20
"""What a thread's stack takes if the system has no limit (`ulimit -s`)."""
_SWITCH_S = 2e-4
"""Compiling, on its own thread, must not keep the interpreter from steps."""


class Form(msgspec.Struct, frozen=True, array_like=True):
    number: int
    backend: str
    wanted: StructuredOutput
    is_tried: bool = True
    """False: it is plain (../plain.py), and is followed here for some tokens as a trial would."""


class Open(msgspec.Struct, frozen=True, array_like=True):
    """A matcher of a form that has accepted these tokens."""

    matcher: int
    form: int
    token_ids: list[int]


class State(msgspec.Struct, frozen=True, array_like=True):
    """Of a matcher after a token; at the start of its form, before any."""

    is_allowed: bool
    is_complete: bool
    problem: str
    forced: list[int]


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Compile this form. Asked again until it is done."""

    pid: int
    """The process that is meant: another one answers Restarted."""
    forgotten: list[int]
    closed: list[int]
    """As in `Follow`: forms may be compiled for long without a step."""
    form: Form


class Prepared(msgspec.Struct, frozen=True, tag=True):
    state: State | None = None
    """At the start of the form; None: it is still compiled."""
    problem: str = ""
    """Why it cannot be compiled."""
    is_for_trial: bool = False
    """A form that was not tried is not as cheap as expected, or the library failed."""


class Follow(msgspec.Struct, frozen=True, tag=True):
    """One message may ask for several things, which are done in the order of the fields. Matchers are numbers."""

    pid: int
    forgotten: list[int]
    """Forms that no request has any more."""
    closed: list[int]
    forms: list[Form]
    """Forms that the matchers to open need and a former process had compiled."""
    opened: list[Open]
    accepted: list[tuple[int, list[int]]]
    """Tokens that come next, up to the first that is not allowed or completes the answer."""
    tried: list[tuple[int, list[int]]]
    """`Matcher.num_valid`."""
    masks: list[tuple[int, int, list[int]]]
    """`Backend.fill`."""
    num_masks: int
    one_by_one: bool
    """Make each mask by itself, so that a failure tells whose it was."""


class Followed(msgspec.Struct, frozen=True, tag=True):
    states: list[list[State]]
    """For each of `accepted`: one for each token that was looked at."""
    num_valid: list[int]
    problems: list[tuple[int, str]]
    """Matchers whose masks could not be made."""


class Restarted(msgspec.Struct, frozen=True, tag=True):
    """This process is not the one that was meant, and knows none of its matchers."""

    pid: int
    status: int
    """How the one before it ended, as in WorkerEnded; 0: there was none."""


class _Job:
    """A compilation on a thread."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.matcher: FormMatcher | None = None
        self.problem = ""
        self.is_for_trial = False
        self.clock: int | None = None
        """That of its thread's CPU time, once it runs."""

    def check_computing(self, form: Form) -> None:
        """Ends the process if the compilation has taken so long that it has no end: its trial takes less."""
        most_s = MOST_COMPUTING_S if form.is_tried else MOST_TRYING_S
        with contextlib.suppress(OSError):  # the thread has just ended
            if self.clock is not None and time.clock_gettime(self.clock) > most_s:
                os.kill(os.getpid(), signal.SIGPROF)


class _Lost:
    """Stands for a matcher that could not be opened again."""

    backend: Any = None

    def __init__(self, problem: str) -> None:
        self.problem = problem
        self.is_complete = False

    def accept(self, token_id: int) -> bool:
        return False

    def num_valid(self, token_ids: Sequence[int]) -> int:
        return 0

    def forced_tokens(self) -> list[int]:
        return []


class Following:
    """The work of the process."""

    def __init__(self, backend_of: Callable[[str], Backend], masks_fd: int, vocab_size: int) -> None:
        """backend_of: loads a library, once. masks_fd: the memory that the engine shares."""
        self._backend_of, self._fd = backend_of, masks_fd
        self._vocab_size, self._num_words = vocab_size, -(-vocab_size // 32)
        self._jobs: dict[int, _Job] = {}
        self._matchers: dict[int, Any] = {}
        self._memory: mmap.mmap | None = None
        self._loading, self._loaded = threading.Lock(), set[str]()

    def begin(self, former: int) -> None:
        """former: how the process before this one ended, as in `Restarted`."""
        self._former = former
        sys.setswitchinterval(_SWITCH_S)
        self._limit()

    def _limit(self) -> None:
        # Libraries make masks on a thread for each core, and the limit is one of address space.
        stack_bytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
        if stack_bytes == resource.RLIM_INFINITY:
            stack_bytes = UNLIMITED_STACK_BYTES
        limit_memory(MOST_BYTES + MOST_CACHE_BYTES + stack_bytes * (os.cpu_count() or 1))

    def do(self, message: Prepare | Follow) -> Prepared | Followed | Restarted:
        if message.pid != os.getpid():
            return Restarted(os.getpid(), self._former)
        for number in message.forgotten:
            self._jobs.pop(number, None)
        for number in message.closed:
            self._matchers.pop(number, None)
        if isinstance(message, Prepare):
            return self._prepare(message.form)
        num_again = sum(len(each.token_ids) for each in message.opened)
        limit_s = MOST_COMPUTING_S + MOST_MASK_S * message.num_masks + MOST_AGAIN_S * num_again
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # SIGPROF ends the process
        try:
            return self._follow(message)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    # --- compiling ------------------------------------------------------------------------------------------------

    def _prepare(self, form: Form) -> Prepared:
        job = self._jobs.get(form.number)
        if is_new := job is None:
            job = self._jobs[form.number] = _Job()
            compiled = self._masks(0)[0][1:]
            slot = int(np.flatnonzero(compiled == 0)[0])
            compiled[slot] = form.number  # here: two threads might take the same
            threading.Thread(target=self._compile, args=(job, form, compiled[slot : slot + 1]), daemon=True).start()
        if not job.ended.wait(0 if is_new else PREPARING_S):
            job.check_computing(form)
            return Prepared()
        if job.matcher is None:
            del self._jobs[form.number]
            return Prepared(problem=job.problem, is_for_trial=job.is_for_trial)
        return Prepared(_state(job.matcher, is_allowed=True))

    def _compile(self, job: _Job, form: Form, named: np.ndarray) -> None:
        """named: [1], the place in the shared memory that has the form's number meanwhile."""
        give_way()
        job.clock = time.pthread_getcpuclockid(threading.get_ident())
        self._run(job, form)
        named[:] = 0
        job.ended.set()

    def _run(self, job: _Job, form: Form) -> None:
        try:
            with self._loading:
                backend = self._backend_of(form.backend)
                if form.backend not in self._loaded:
                    self._loaded.add(form.backend)
                    self._limit()  # without the library itself
            began_s, matcher = time.thread_time(), backend.compile(form.wanted)
            if not form.is_tried:
                job.problem = problem_of(backend, matcher.copy(), self._vocab_size)
                job.is_for_trial = time.thread_time() - began_s > MOST_UNTRIED_S
            if not (job.problem or job.is_for_trial):
                job.matcher = matcher
        except BaseException as error:  # a library's panic too: the request is to be told
            job.problem = str(error) or type(error).__name__
            job.is_for_trial = not (form.is_tried or isinstance(error, HeadraceError))

    # --- following ------------------------------------------------------------------------------------------------

    def _follow(self, message: Follow) -> Followed:
        current = self._masks(message.num_masks)[0]
        forms = {form.number: form for form in message.forms}
        for each in message.opened:
            current[0] = each.matcher
            self._matchers[each.matcher] = self._opened(each, forms)
        states = []
        for number, token_ids in message.accepted:
            current[0] = number
            states.append(list(_accepted(self._matchers[number], token_ids)))
        num_valid = []
        for number, token_ids in message.tried:
            current[0] = number
            num_valid.append(self._matchers[number].num_valid(token_ids))
        problems = self._fill(message, current) if message.masks else []
        current[0] = 0
        return Followed(states, num_valid, problems)

    def _opened(self, wanted: Open, forms: dict[int, Form]) -> Any:
        job = self._jobs.get(wanted.form)
        if job is None:
            job = self._jobs[wanted.form] = _Job()
            self._run(job, forms[wanted.form])
            job.ended.set()
        if job.matcher is None:
            return _Lost(job.problem)
        matcher = job.matcher.copy()
        for token_id in wanted.token_ids:
            matcher.accept(token_id)
        return matcher

    def _fill(self, message: Follow, current: np.ndarray) -> list[tuple[int, str]]:
        masks = self._masks(message.num_masks)[1]
        by_backend: dict[int, list[tuple[Any, int, list[int]]]] = {}
        for number, at, drafts in message.masks:
            position = (self._matchers[number], at, drafts)
            if position[0].backend is None:
                masks[at : at + len(drafts) + 1] = -1  # the next token ends the request
            elif message.one_by_one:
                current[0] = number
                position[0].backend.fill([position], masks)
            else:
                by_backend.setdefault(id(position[0].backend), []).append(position)
        for positions in by_backend.values():
            current[0] = message.masks[0][0] if len(message.masks) == 1 else 0
            positions[0][0].backend.fill(positions, masks)
        return [(number, problem) for number, *_ in message.masks if (problem := self._matchers[number].problem)]

    def _masks(self, num_masks: int) -> tuple[np.ndarray, np.ndarray]:
        """As `shared_arrays`."""
        size = shared_bytes(num_masks, self._num_words)
        if self._memory is None or len(self._memory) < size:
            self._memory = mmap.mmap(self._fd, os.fstat(self._fd).st_size)
        return shared_arrays(self._memory, num_masks, self._num_words)


def shared_bytes(num_masks: int, num_words: int) -> int:
    return HEADER_BYTES + 4 * num_masks * num_words


def shared_arrays(memory: mmap.mmap, num_masks: int, num_words: int) -> tuple[np.ndarray, np.ndarray]:
    """The header, [8] int64, and the masks, [num_masks, num_words] int32."""
    masks = np.frombuffer(memory, np.int32, num_masks * num_words, HEADER_BYTES)
    return np.frombuffer(memory, np.int64, HEADER_BYTES // 8), masks.reshape(num_masks, num_words)


def _accepted(matcher: Any, token_ids: list[int]) -> Any:
    for token_id in token_ids:
        state = _state(matcher, is_allowed=matcher.accept(token_id))
        yield state
        if not state.is_allowed or state.is_complete:
            return


def _state(matcher: Any, *, is_allowed: bool) -> State:
    problem = matcher.problem
    is_complete = is_allowed and matcher.is_complete
    forced = matcher.forced_tokens() if is_allowed and not (is_complete or problem) else []
    return State(is_allowed, is_complete, problem, forced)
