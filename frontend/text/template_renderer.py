"""This process's end of the program that renders chat templates (`template_process.py`): who waits for it, how long.

A rendering takes less than a millisecond, or, of a hostile template, seconds. An event loop waits for it for INLINE_S,
since a change of threads would cost more than most renderings; after that the work goes on in a thread
(`without_blocking`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from headrace.frontend.text.template_messages import MOST_BYTES, Output, Rendered, Rendering, TemplateMessage
from headrace.ipc.failure import HeadraceError, InvalidRequestError, QueueFullError
from headrace.ipc.process.helper import Helper, Sent, WorkerEnded, is_from_outside
from headrace.ipc.transport.channel import ChannelClosedError
from headrace.ipc.wait import WaitTimeoutError

T = TypeVar("T")

MOST_COMPUTING_S = 5.0
"""Limit of processor time for one conversation, all its renderings together."""
LONGEST_S = 60.0
"""Limit by the clock, for a busy machine."""
_LEAST_S = 1e-3
INLINE_S = 0.01
"""How long an event loop waits for a rendering."""
_LANES = 4
"""How many templates are rendered at a time: a slow one does not delay others."""
_MOST_AT_ONCE = 64
_BYTES_AT_ONCE = 1 << 18
"""So many conversations, or conversations of so many bytes, are passed on at once."""


class TemplateLimitError(InvalidRequestError):
    """A template reached a limit of time or memory."""


class StillRenderingError(Exception):
    """A rendering takes longer than an event loop waits: `without_blocking` goes on with it in a thread."""

    def __init__(self, begun: _Begun | None) -> None:
        super().__init__("a chat template is still being rendered")
        self.begun = begun


class _Begun(NamedTuple):
    """A rendering whose answer is due. It keeps its lane until then."""

    lane: int
    asked: Rendering
    sent: Sent


class _Here(threading.local):
    """What holds for the renderings of this thread."""

    is_brief = False
    begun: _Begun | None = None
    left_s: float | None = None


_here = _Here()


class TemplateRenderer:
    """Owns the helper program and its lanes. Thread-safe."""

    def __init__(self) -> None:
        self._helper = Helper(
            "headrace.frontend.text.template_process", TemplateMessage, _LANES, answers_soon=range(_LANES)
        )
        self._free = list(reversed(range(_LANES)))  # the last is taken, which knows the usual template
        self._has_free = threading.Condition()
        self.threads = self._new_threads()
        self.start = self._helper.start
        self.num_ends = 0
        """How often `end` was called."""
        self._num_users = 0
        self._users_lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The helper program's; None if it does not run."""
        return self._helper.pid

    @staticmethod
    def _new_threads() -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_LANES, "chat-template")

    def use(self) -> None:
        """Keeps the helper program from ending until `leave`."""
        with self._users_lock:
            self._num_users += 1

    def leave(self) -> None:
        """Undoes `use`. The last user's ends the helper program."""
        with self._users_lock:
            self._num_users -= 1
            is_last = self._num_users == 0
        if is_last:
            self.end()

    def end(self) -> None:
        """Ends the helper program and what waits for it; later renderings start another."""
        self.num_ends += 1
        threads, self.threads = self.threads, self._new_threads()
        threads.shutdown(wait=False, cancel_futures=True)
        self._helper.end()

    def outputs(self, template: str, *contexts: bytes) -> Sequence[Output]:
        """What the template makes of each context, all within the limits of one. Raises InvalidRequestError if it is no
        template, TemplateLimitError, and in `without_blocking` StillRenderingError."""
        left_s, num_ends = _here.left_s, self.num_ends
        most_s = MOST_COMPUTING_S if left_s is None else max(left_s, _LEAST_S)
        asked, answer = Rendering(template, contexts, most_s, LONGEST_S), None
        for _ in range(2):  # the process may have been killed from outside
            if (begun := self._begun(asked)) is not None:
                answer = self._finish(begun, INLINE_S if _here.is_brief else None)
            if answer is not None or num_ends != self.num_ends:
                break
        if answer is None:
            why = ", as its last user here was closed" if num_ends != self.num_ends else ""
            raise HeadraceError(f"the process that renders chat templates was ended{why}")
        if answer.invalid:
            raise InvalidRequestError(f"the chat template is not valid: {answer.invalid}")
        if left_s is not None:
            _here.left_s = left_s - answer.used_s
        return answer.outputs

    def render_all(self, template: str, contexts: Sequence[bytes]) -> Iterator[str]:
        """The outputs in order. The next are rendered while the caller works with those that it has. Raises
        InvalidRequestError."""

        def asked(part: tuple[bytes, ...]) -> Rendering:
            return Rendering(template, part, MOST_COMPUTING_S, LONGEST_S)

        if not contexts:
            return
        parts = list(_parts(contexts))
        lane = self._take()
        sent: Sent | None = None
        try:
            sent = self._sent(lane, asked(parts[0]))
            for part, following in itertools.zip_longest(parts, parts[1:]):
                outputs, sent = _received(sent), None
                if following is not None:
                    sent = self._sent(lane, asked(following))
                for context, output in itertools.zip_longest(part, outputs):
                    # What did not succeed together has the limits for itself.
                    is_cut = output is None or output.is_limit
                    yield text_of(self.outputs(template, context)[0] if is_cut else output)
        finally:
            _received(sent)
            self._give(lane)

    def _begun(self, asked: Rendering) -> _Begun | None:
        """This rendering, which this thread goes on with or begins; None if the process was killed from outside."""
        begun, _here.begun = _here.begun, None
        if begun is not None:
            if (begun.asked.template, begun.asked.contexts) == (asked.template, asked.contexts):
                return begun
            self.drop(begun)
        lane = self._take()
        try:
            return _Begun(lane, asked, self._helper.send(lane, asked, LONGEST_S))
        except ChannelClosedError:
            self._give(lane)
            return None

    def _finish(self, begun: _Begun, most_wait_s: float | None = None) -> Rendered | None:
        """The answer; None if the process was killed from outside. Raises TemplateLimitError, and StillRenderingError
        after most_wait_s: the lane is kept then."""
        keeps_lane = False
        try:
            if most_wait_s is None:
                answer = begun.sent.receive(2 * LONGEST_S)
            else:
                answer = begun.sent.receive(most_wait_s, start_s=most_wait_s, ends=False)
        except WaitTimeoutError:
            keeps_lane = most_wait_s is not None
            if keeps_lane:
                raise StillRenderingError(begun) from None
            answer = WorkerEnded(-signal.SIGALRM)
        except ChannelClosedError:
            return None
        except BaseException:  # an interrupt: the answer would be taken for that of the next rendering
            self._helper.end()
            raise
        finally:
            if not keeps_lane:
                self._give(begun.lane)
        if isinstance(answer, Rendered):
            return answer
        if is_from_outside(answer.status):
            return None
        raise TemplateLimitError(_reason(answer.status))

    def drop(self, begun: _Begun) -> None:
        """Waits for an answer that nobody needs any more, so that its lane is free."""
        with contextlib.suppress(HeadraceError):
            self._finish(begun)

    def _sent(self, lane: int, asked: Rendering) -> Sent | None:
        try:
            return self._helper.send(lane, asked, LONGEST_S)
        except ChannelClosedError:
            return None

    def _take(self) -> int:
        """A free lane. Raises StillRenderingError, QueueFullError."""
        with self._has_free:
            if not self._free:
                if _here.is_brief:
                    raise StillRenderingError(None)
                if not self._has_free.wait_for(lambda: self._free, LONGEST_S):
                    raise QueueFullError("the chat templates of other requests are being rendered; try again")
            return self._free.pop()

    def _give(self, lane: int) -> None:
        with self._has_free:
            self._free.append(lane)
            self._has_free.notify()


def _received(sent: Sent | None) -> Sequence[Output]:
    """The outputs; none if the template is invalid, or its process ended."""
    if sent is None:
        return ()
    try:
        answer = sent.receive(2 * LONGEST_S)
    except (ChannelClosedError, WaitTimeoutError):
        return ()
    return answer.outputs if isinstance(answer, Rendered) else ()


def _parts(contexts: Sequence[bytes]) -> Iterator[tuple[bytes, ...]]:
    part: list[bytes] = []
    num_bytes = 0
    for context in contexts:
        part.append(context)
        num_bytes += len(context)
        if len(part) == _MOST_AT_ONCE or num_bytes > _BYTES_AT_ONCE:
            yield tuple(part)
            part, num_bytes = [], 0
    if part:
        yield tuple(part)


def text_of(output: Output) -> str:
    """Raises InvalidRequestError, with the template's own words where it refuses the messages."""
    if output.problem:
        raise (TemplateLimitError if output.is_limit else InvalidRequestError)(output.problem)
    return output.text.decode("utf-8", "surrogatepass")


def _reason(status: int) -> str:
    if status == -signal.SIGPROF:
        said = f"takes more than {MOST_COMPUTING_S:g} s of processor time for these messages, as much as it may take"
    elif status == -signal.SIGALRM:
        said = f"took more than {LONGEST_S:g} s for these messages, since the machine is busy"
    else:
        said = (
            f"needs more than {MOST_BYTES >> 20} MiB for these messages, or is nested too deeply (its process ended "
            f"with status {status})"
        )
    return f"the chat template {said}"


@functools.cache
def renderer() -> TemplateRenderer:
    """This process's."""
    return TemplateRenderer()


os.register_at_fork(after_in_child=renderer.cache_clear)


@contextlib.contextmanager
def one_limit() -> Iterator[None]:
    """The renderings in the block, such as those that try where instructions may stand, share the limit of one."""
    if _here.left_s is not None:
        yield
        return
    _here.left_s = MOST_COMPUTING_S
    try:
        yield
    finally:
        _here.left_s = None


def leave_event_loop() -> None:
    """For work that may take long: in `without_blocking` it goes on in a thread."""
    if _here.is_brief:
        raise StillRenderingError(None)


async def without_blocking(make: Callable[[], T]) -> T:
    """Returns make(), which renders templates: called in this event loop if they answer at once, else in a thread.

    `make` may be called twice: it must be able to begin anew after a rendering.
    """
    _here.is_brief = True
    try:
        return make()
    except StillRenderingError as waiting:
        begun = waiting.begun
    finally:
        _here.is_brief = False
    future = asyncio.wrap_future(renderer().threads.submit(_go_on, begun, make))
    future.add_done_callback(_notice)
    return await asyncio.shield(future)  # who waits may be cancelled, and the lane must be given back nevertheless


def _go_on(begun: _Begun | None, make: Callable[[], T]) -> T:
    _here.begun = begun
    try:
        return make()
    finally:
        left, _here.begun = _here.begun, None
        if left is not None:
            renderer().drop(left)


def _notice(future: asyncio.Future[T]) -> None:
    if not future.cancelled():
        future.exception()
