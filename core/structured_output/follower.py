"""Grammars of running requests as the engine sees them: matchers whose states are elsewhere (helper/following.py).

What a step needs is asked for at once: the tokens of all rows are passed on in one message, whose answer has the new
states, and the masks are made while the model runs, in memory that both processes share. A process that is killed by
what it follows, or from outside, is replaced, and the matchers are opened again with the tokens they have accepted. The
one that it was killed by ends its request.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import mmap
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.core.structured_output.backend import Vocabulary
from headrace.core.structured_output.held_memory import Held
from headrace.core.structured_output.helper.following import (
    MOST_COMPUTING_S,
    Follow,
    Followed,
    Form,
    Open,
    Prepare,
    Prepared,
    Restarted,
    State,
    shared_arrays,
    shared_bytes,
)
from headrace.core.structured_output.helper.process import FOLLOWING, grammar_helper
from headrace.ipc.failure import HeadraceError, InvalidRequestError
from headrace.ipc.messages import StructuredOutput
from headrace.ipc.process.helper import Helper, HelperEndedError, Sent, WorkerEnded, is_from_outside
from headrace.ipc.wait import WaitTimeoutError

MOST_WAIT_S = 60.0
"""Longest wait for an answer, even on a busy machine: the process itself has a limit of processor time."""
_LOOK_S, _ASK_S = 2e-4, 2e-2
"""How often a compilation is looked for in the shared memory, which costs the process nothing, and how often the
process is asked, which ends there what has no end."""
_MOST_DEATHS = 8
"""How often one message is sent again."""
_DOUBT_S = 60.0
"""How long each form is tried after one without a trial has ended the process: all matchers are opened again then, so
it may happen rarely."""
_NOT_KNOWN = 1
"""The status of a process that ended between two messages and took the whole program with it."""
_NOT_COMPILED = "the grammar cannot be compiled: its compiler ended twice, or has no end"
_LOST = "the process that follows grammars was killed again and again"
Position = tuple["FollowedMatcher", int, list[int]]


class _Prepared:
    """A form that the process has compiled."""

    def __init__(self, follower: Follower, form: Form, start: State, held: Held, life: int) -> None:
        """life: of the process that compiled it."""
        self.follower, self.form, self.start, self.held, self.life = follower, form, start, held, life

    def __del__(self) -> None:
        self.follower.forgotten.append(self.form.number)


class FollowedMatcher:
    """A `Matcher` whose state is known here after each token."""

    def __init__(self, form: _Prepared, token_ids: Sequence[int] = (), state: State | None = None) -> None:
        self.form, self._state = form, state or form.start
        self.token_ids = list(token_ids)
        self.number, self.life = next(form.follower.numbers), -1
        """The life of the process in which it was opened; -1: none yet."""
        self._ahead: deque[tuple[int, State]] = deque()  # states after tokens that were passed on before they came
        self._stopped = ""

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        """Has the other process forget it. It is opened again when it is used."""
        if self.life >= 0:
            self.life = -1
            self.form.follower.closed.append(self.number)

    def accept(self, token_id: int) -> bool:
        if self._stopped:
            return False
        if self._ahead and self._ahead[0][0] != token_id:
            self._ahead.clear()
            self._close()  # it has gone another way there
        if not self._ahead:
            self.form.follower.advance([(self, [token_id])])
        if not self._ahead:
            return False
        _, self._state = self._ahead.popleft()
        self.token_ids.append(token_id)
        return self._state.is_allowed

    @property
    def is_complete(self) -> bool:
        return self._state.is_complete

    @property
    def problem(self) -> str:
        return self._stopped or self._state.problem

    def num_valid(self, token_ids: Sequence[int]) -> int:
        return self.form.follower.num_valid([(self, list(token_ids))])[0]

    def forced_tokens(self) -> list[int]:
        return self._state.forced

    def copy(self) -> FollowedMatcher:
        return FollowedMatcher(self.form, self.token_ids, self._state)

    # --- for its follower -----------------------------------------------------------------------------------------

    def come(self, token_ids: Sequence[int], states: Sequence[State]) -> None:
        """The states after these tokens, which are still to be accepted here."""
        self._ahead.extend(zip(token_ids, states, strict=False))

    def known_valid(self, token_ids: list[int]) -> int | None:
        """`num_valid`, if it is known here."""
        if not token_ids or token_ids == self._state.forced[: len(token_ids)]:
            return len(token_ids)
        return 0 if self._stopped else None

    def stop(self, why: str) -> None:
        self._stopped = self._stopped or why

    @property
    def all_token_ids(self) -> list[int]:
        """Those that the other process has passed to it."""
        return [*self.token_ids, *(token_id for token_id, _ in self._ahead)]


class Masks:
    """Masks that are being made."""

    def __init__(self, follower: Follower, positions: Sequence[Position]) -> None:
        self._follower, self.positions = follower, positions
        self.num_masks = max((at + len(drafts) + 1 for _, at, drafts in positions), default=0)
        self.going: list[FollowedMatcher] = []
        self.sent: Sent | WorkerEnded | None = None
        self.made: np.ndarray | None = None
        """[num_masks, num_words] int32, once they are made and until they are written."""

    def write(self, masks: np.ndarray) -> None:
        """Waits for them. masks: [num_masks, num_words] int32, as in `Backend.fill`."""
        self._follower.write(self, masks)

    def copy_to(self, masks: np.ndarray) -> None:
        assert self.made is not None, "they are made"
        for matcher, at, drafts in self.positions:
            ends_at = at + len(drafts) + 1
            masks[at:ends_at] = -1 if matcher.problem else self.made[at:ends_at]  # -1: the next token ends the request

    def message(self, going: Sequence[FollowedMatcher]) -> Follow:
        numbers = {each.number for each in going}
        wanted = [(each.number, at, drafts) for each, at, drafts in self.positions if each.number in numbers]
        return self._follower._message(going, masks=wanted, num_masks=self.num_masks)


class Follower:
    """Owns the connection to the process. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, backend: str) -> None:
        """backend: the library that most grammars need."""
        self._num_words = -(-vocabulary.vocab_size // 32)
        self._fd = os.memfd_create("headrace-masks")  # no name that could stay behind
        self.helper: Helper = grammar_helper(vocabulary, backend, self._fd)
        self._lock = threading.RLock()
        self.numbers = itertools.count(1)
        self.life, self._pid = 0, 0
        self.closed, self.forgotten = deque[int](), deque[int]()
        """Matchers and forms that nobody has any more. Filled from any thread."""
        self._memory = self._mapped(shared_bytes(16, self._num_words))
        self._begun: Masks | None = None
        self._one_by_one = False
        self._num_ends: collections.Counter[int] = collections.Counter()
        """By form: how often the process ended while it compiled it."""
        self._trusts_at_s = 0.0
        """When plain forms come without a trial again."""
        self._suspects = threading.Lock()
        """Held while such a form is compiled again: without another one, so that the next end tells which it was."""

    def __del__(self) -> None:
        os.close(self._fd)

    def start(self) -> None:
        """Starts the program, without waiting, if it does not run."""
        self.helper.start()

    def stop(self) -> None:
        """Kills it, which also ends calls that wait for it."""
        self.helper.stop()

    def compile(self, backend: str, wanted: StructuredOutput, held: Held) -> FollowedMatcher:
        """A matcher at the start of the form. Raises InvalidRequestError with the library's reason."""
        form = Form(next(self.numbers), backend, wanted)
        for _ in range(_MOST_DEATHS):
            with self._suspects if self._num_ends[form.number] else contextlib.nullcontext():
                prepared, life = self._prepared(form)
            if prepared is not None:
                if prepared.state is None:
                    raise InvalidRequestError(prepared.problem)
                return FollowedMatcher(_Prepared(self, form, prepared.state, held, life))
            if self._num_ends[form.number] > 1:
                raise InvalidRequestError(f"SamplingParams.structured_outputs: {_NOT_COMPILED}")
        raise HeadraceError(_LOST)

    def compile_untried(self, backend: str, wanted: StructuredOutput, held: Held) -> FollowedMatcher | None:
        """As `compile`, for a plain form without a trial. None if it needs one."""
        if time.monotonic() < self._trusts_at_s:
            return None
        form = Form(next(self.numbers), backend, wanted, is_tried=False)
        for _ in range(_MOST_DEATHS):
            prepared, life = self._prepared(form)
            if prepared is not None:
                break
            if self._num_ends.pop(form.number, 0):  # of this form, or another one that was compiled beside it
                self._trusts_at_s = time.monotonic() + _DOUBT_S
                break
        if prepared is None or prepared.is_for_trial:
            return None
        if prepared.state is None:
            raise InvalidRequestError(prepared.problem)
        return FollowedMatcher(_Prepared(self, Form(form.number, backend, wanted), prepared.state, held, life))

    def _prepared(self, form: Form) -> tuple[Prepared | None, int]:
        """Has the form compiled, by the process of the life that is returned. None if it ended meanwhile."""
        life = -1
        while True:
            with self._lock:
                self._settle()
                if life not in (-1, self.life):
                    return None, life  # as another thread has seen: the form may be a suspect now
                life = self.life
                message = Prepare(self._pid, _taken(self.forgotten), _taken(self.closed), form)
                answer = self._received(self._sent(message))
                if not isinstance(answer, Prepared):
                    self._note_end(answer, ())
                    return None, life
            if answer.state is not None or answer.problem or answer.is_for_trial:
                return answer, life
            asks_at_s = time.monotonic() + _ASK_S
            while form.number in self._header()[1:] and time.monotonic() < asks_at_s:
                time.sleep(_LOOK_S)

    def advance(self, passed: Sequence[tuple[FollowedMatcher, list[int]]]) -> None:
        """Passes tokens on that the matchers are to accept next, in one message."""
        with self._lock:
            self._settle()
            tokens_of = {matcher.number: token_ids for matcher, token_ids in passed}

            def message(going: Sequence[FollowedMatcher]) -> Follow:
                return self._message(going, accepted=[(each.number, tokens_of[each.number]) for each in going])

            going, answer = self._exchange([matcher for matcher, _ in passed], message)
            for matcher, states in zip(going, answer.states, strict=True):
                matcher.come(tokens_of[matcher.number], states)

    def num_valid(self, tried: Sequence[tuple[FollowedMatcher, list[int]]]) -> list[int]:
        """`Matcher.num_valid` of each, in one message."""
        found = [matcher.known_valid(token_ids) for matcher, token_ids in tried]
        tokens_of = {
            matcher.number: token_ids for (matcher, token_ids), known in zip(tried, found, strict=True) if known is None
        }
        if not tokens_of:
            return [known or 0 for known in found]

        def message(going: Sequence[FollowedMatcher]) -> Follow:
            return self._message(going, tried=[(each.number, tokens_of[each.number]) for each in going])

        with self._lock:
            self._settle()
            asked = [matcher for matcher, _ in tried if matcher.number in tokens_of]
            going, answer = self._exchange(asked, message)
        valid = {each.number: num for each, num in zip(going, answer.num_valid, strict=True)}
        pairs = zip(tried, found, strict=True)
        return [valid.get(matcher.number, 0) if known is None else known for (matcher, _), known in pairs]

    def begin(self, positions: Sequence[Position]) -> Masks:
        """Begins to make masks, as `Backend.fill` has them. No matcher of them advances before they are written."""
        with self._lock:
            self._settle()
            begun = Masks(self, positions)
            self._grow(begun.num_masks)
            begun.going = [matcher for matcher, *_ in positions if not matcher.problem]
            if begun.going and self._reopen_forms(begun.going):
                begun.sent = self._sent(begun.message(begun.going))
            self._begun = begun
            return begun

    def write(self, begun: Masks, masks: np.ndarray) -> None:
        with self._lock:
            if begun is self._begun:
                self._finish(begun)
                begun.made = shared_arrays(self._memory, begun.num_masks, self._num_words)[1]
                begun.copy_to(masks)
                begun.made = None
            elif begun.made is not None:
                begun.copy_to(masks)

    # --- the connection: with the lock held -----------------------------------------------------------------------

    def _settle(self) -> None:
        """Takes the masks that are being made out of the shared memory, as another message follows."""
        if (begun := self._begun) is not None:
            self._finish(begun)
            begun.made = shared_arrays(self._memory, begun.num_masks, self._num_words)[1].copy()

    def _finish(self, begun: Masks) -> None:
        self._begun = None
        if not begun.going:
            return
        answer = self._received(begun.sent)
        if isinstance(answer, Followed):
            self._note(begun.going)
        else:
            self._note_end(answer, begun.going)
            _, answer = self._exchange(begun.going, begun.message)
        problems = dict(answer.problems)
        for matcher in begun.going:
            if problem := problems.get(matcher.number):
                matcher.stop(problem)

    def _exchange(
        self, matchers: Sequence[FollowedMatcher], message: Callable[[Sequence[FollowedMatcher]], Follow]
    ) -> tuple[list[FollowedMatcher], Followed]:
        """Sends the message about these matchers until it is answered. Returns those that the answer is about: without
        the ones that the process died of."""
        for _ in range(_MOST_DEATHS):
            going = [each for each in matchers if not each.problem]
            if not going:
                break
            if not self._reopen_forms(going):
                continue
            answer = self._received(self._sent(message(going)))
            if isinstance(answer, Followed):
                self._note(going)
                return going, answer
            self._note_end(answer, going)
        else:
            for each in matchers:
                each.stop(_LOST)
        return [], Followed([], [], [])

    def _reopen_forms(self, going: Sequence[FollowedMatcher]) -> bool:
        """Has forms compiled that a former process knew, each in a message of its own: one takes as long as a message
        may take. False if the process ended meanwhile."""
        for each in going:
            if each.form.life != self.life:
                answer = self._received(self._sent(self._message([each])))
                if not isinstance(answer, Followed):
                    self._note_end(answer, [each])
                    return False
                each.life = each.form.life = self.life
        return True

    def _message(
        self,
        going: Sequence[FollowedMatcher],
        *,
        accepted: Sequence[tuple[int, list[int]]] = (),
        tried: Sequence[tuple[int, list[int]]] = (),
        masks: Sequence[Any] = (),
        num_masks: int = 0,
    ) -> Follow:
        """A message about these matchers, which opens those that the process does not know."""
        new = [each for each in going if each.life != self.life]
        unknown = {each.form.form.number: each.form.form for each in new if each.form.life != self.life}
        return Follow(
            pid=self._pid,
            forgotten=_taken(self.forgotten),
            closed=_taken(self.closed),
            forms=list(unknown.values()),
            opened=[Open(each.number, each.form.form.number, each.all_token_ids) for each in new],
            accepted=list(accepted),
            tried=list(tried),
            masks=list(masks),
            num_masks=num_masks,
            one_by_one=self._one_by_one,
        )

    def _sent(self, message: Follow | Prepare) -> Sent | WorkerEnded | None:
        """As `_received`, if it cannot be sent."""
        try:
            return self.helper.send(FOLLOWING, message, MOST_WAIT_S)
        except HelperEndedError as error:
            return _ended_with(error)
        except HeadraceError:  # it cannot be started, or is being stopped
            return None

    def _received(self, sent: Sent | WorkerEnded | None) -> Any:
        """The answer. None: the program was killed."""
        try:
            return sent.receive(MOST_WAIT_S) if isinstance(sent, Sent) else sent
        except HelperEndedError as error:
            return _ended_with(error)
        except WaitTimeoutError:
            return WorkerEnded(-signal.SIGPROF)

    def _note(self, going: Sequence[FollowedMatcher]) -> None:
        """The process knows these matchers and their forms, and lives."""
        self._one_by_one = False
        for each in going:
            each.life = each.form.life = self.life

    def _note_end(self, answer: WorkerEnded | Restarted | None, going: Sequence[FollowedMatcher]) -> None:
        """Another process takes over. Stops the matcher that the former one was ended by, if that is known."""
        current = self._header()
        worked_on, *compiled = current.tolist()
        current[:] = 0
        self.life += 1
        self._pid = answer.pid if isinstance(answer, Restarted) else 0
        status = -signal.SIGKILL if answer is None else answer.status
        if status == 0 or is_from_outside(status):
            return  # it is the first, or was ended from outside
        if any(compiled):
            self._num_ends.update(filter(None, compiled))
            return
        if isinstance(answer, Restarted):
            return  # it worked on nothing, or its end was answered before
        for each in going:
            if each.number == worked_on:
                each.stop(_why(status))
                return
        self._one_by_one = True

    def _header(self) -> np.ndarray:
        """As in `shared_arrays`."""
        return shared_arrays(self._memory, 0, self._num_words)[0]

    def _grow(self, num_masks: int) -> None:
        if len(self._memory) < (size := shared_bytes(num_masks, self._num_words)):
            self._memory = self._mapped(2 * size)

    def _mapped(self, size: int) -> mmap.mmap:
        os.ftruncate(self._fd, size)
        return mmap.mmap(self._fd, size)


def _ended_with(error: HelperEndedError) -> WorkerEnded | None:
    """None: the program was killed."""
    return WorkerEnded(_NOT_KNOWN) if error.lane == FOLLOWING else None


def _taken(numbers: deque[int]) -> list[int]:
    return [numbers.popleft() for _ in range(len(numbers))]


def _why(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"following the grammar takes more than {MOST_COMPUTING_S:g} s for one token, and has no end"
    return f"the library that follows the grammar failed: its process ended with status {status}"
