"""The gatekeeper of grammars: compiles requests' grammars on its own threads, and caches the compiled ones.

request --> cached? ----------------------------> it gets a copy, and no gate is closed
              | no
              v
         gate "grammar" closes, a thread compiles --> GateOpened, its requests have copies
                                                 \\-> GateFailed with the library's reason
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

import msgspec

from headrace.core.engine.gates import Gate, GateFailed, GateOpened
from headrace.core.schedule.requests import Request
from headrace.core.structured_output.backend import Matcher
from headrace.core.structured_output.backends import Backends
from headrace.core.structured_output.plain import is_plain
from headrace.core.structured_output.thinking import ThinkingMatcher
from headrace.ipc.failure import Failure, InvalidRequestError, QueueFullError
from headrace.ipc.messages import AddRequest, Generate, StructuredOutput

MOST_CACHED = 256
"""Most cached results: compiled grammars, and failures of those that cannot be compiled."""
REASON = "grammar"
TIMEOUT_S = 120.0
"""The longest time that a request may wait for its grammar."""


class GrammarCompiler:
    """A `Gatekeeper`. Its threads set the matchers of gated requests, which nothing else accesses meanwhile."""

    timeout_s = TIMEOUT_S

    def __init__(self, backend: Backends, report: Callable[[GateOpened | GateFailed], None]) -> None:
        """report: called from any thread."""
        self._backend, self._report = backend, report
        # What these threads wait for gives way to steps in its own process. Two that compute at once cost twice as
        # much, as each core's part of a step waits for the others: so plain forms share one, all others another. The
        # threads themselves compute little, and hold locks that steps need: so they have the priority of steps.
        self._plain = ThreadPoolExecutor(1, "grammar")
        self._others = ThreadPoolExecutor(1, "grammar-other")
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Gate, Matcher | Failure] = OrderedDict()  # the least recently used first
        self._waiting: dict[Gate, list[Request]] = {}

    def prepare(self) -> None:
        """Has the library loaded that the first request would wait for."""
        self._others.submit(self._backend.prepare)

    def closed_gates(self, request: Request, message: AddRequest) -> Collection[Gate]:
        wanted = message.task.sampling.structured_output if isinstance(message.task, Generate) else None
        if wanted is None:
            if request.sampling.thinking is not None:
                request.matcher = _matcher_for(request, None)
            return ()
        gate = Gate(REASON, hashlib.sha256(msgspec.msgpack.encode(wanted)).hexdigest()[:32])
        with self._lock:
            if (compiled := self._compiled.get(gate)) is not None:
                self._compiled.move_to_end(gate)
                if isinstance(compiled, Failure):
                    self._report(GateFailed(gate, compiled))
                    return (gate,)
                request.matcher = _matcher_for(request, compiled)
                return ()
            if gate not in self._waiting:
                self._waiting[gate] = []
                self._plain.submit(self._route, gate, wanted)
            self._waiting[gate].append(request)
        return (gate,)

    def stop(self) -> None:
        for pool in (self._plain, self._others):
            pool.shutdown(wait=False, cancel_futures=True)
        self._backend.stop()

    def _route(self, gate: Gate, wanted: StructuredOutput) -> None:
        """Compiles a plain form, and leaves others, which may take long, to the other thread."""
        if is_plain(wanted):
            self._compile(gate, wanted)
        else:
            with contextlib.suppress(RuntimeError):  # the pool is shut down
                self._others.submit(self._compile, gate, wanted)

    def _compile(self, gate: Gate, wanted: StructuredOutput) -> None:
        try:
            compiled = self._compiled_with_room(wanted)
        except BaseException as error:  # a Rust panic is not an Exception
            self._fail(gate, error)
            return
        self._keep(gate, compiled)
        self._report(GateOpened(gate))

    def _compiled_with_room(self, wanted: StructuredOutput) -> Matcher:
        """If there is no memory for it, the forms that are kept for later requests are forgotten."""
        try:
            return self._backend.compile(wanted)
        except QueueFullError:
            with self._lock:
                self._compiled.clear()
            return self._backend.compile(wanted)

    def _fail(self, gate: Gate, error: BaseException) -> None:
        failure = Failure.of(error, process="engine-core", phase=REASON)
        self._keep(gate, failure)
        self._report(GateFailed(gate, failure))

    def _keep(self, gate: Gate, compiled: Matcher | Failure) -> None:
        """Caches a result, and sets the matchers of the requests that wait for it."""
        with self._lock:
            waiting = self._waiting.pop(gate)
            if not _is_for_now(compiled):
                self._compiled[gate] = compiled
            while len(self._compiled) > MOST_CACHED:
                self._compiled.popitem(last=False)
        if isinstance(compiled, Failure):
            return
        for request in waiting:  # without the lock: thousands may wait, and the loop needs it for each new request
            request.matcher = _matcher_for(request, compiled)


def _is_for_now(compiled: Matcher | Failure) -> bool:
    """Whether the next request with the form may fare better."""
    return isinstance(compiled, Failure) and compiled.type != InvalidRequestError.__name__


def _matcher_for(request: Request, compiled: Matcher | None) -> Matcher | None:
    """A matcher for the request, which has accepted the output that it arrived with (from another engine).

    compiled: matcher at the start of its grammar; None if it has no structured output."""
    matcher, thinking = None if compiled is None else compiled.copy(), request.sampling.thinking
    if thinking is not None:
        matcher = ThinkingMatcher(thinking, matcher)
    if matcher is not None:
        for token_id in request.token_ids[request.num_prompt_tokens :].tolist():
            matcher.accept(token_id)
    return matcher
