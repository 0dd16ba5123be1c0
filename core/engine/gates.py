"""Gates: conditions that a request waits for before it may be scheduled.

    admission --> [closed gates: grammar, adapter, ...] --> waiting queue --> scheduled
                        |  abort, time-out, or the gate's failure
                        v
                     FINISHED

A gate is a reason and a key: the grammar with this hash is being compiled, the adapter of this name is being loaded,
the blocks of this transfer are on their way, the encoder's output of this image is missing. For a new request, a
Gatekeeper reports which of its gates are closed and starts the work behind each. When that work ends, it puts
GateOpened or GateFailed into the loop's inbox, from any thread. Several requests may wait for the same gate.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Collection
from typing import NamedTuple, Protocol

import msgspec

from headrace.core.schedule.requests import Request
from headrace.ipc.failure import Failure
from headrace.ipc.messages import AddRequest


class Gate(NamedTuple):
    reason: str
    """The kind of condition. It is a label of metrics, so there are only a few."""
    key: str
    """Identifies the condition among those of its kind."""


class GateOpened(msgspec.Struct, frozen=True):
    """Not a wire message: the gate's condition is met."""

    gate: Gate


class GateFailed(msgspec.Struct, frozen=True):
    """Not a wire message: the condition will never be met. Requests that wait for the gate end with `failure`."""

    gate: Gate
    failure: Failure


class Gatekeeper(Protocol):
    """Decides and fulfils the conditions of one reason. Called on the loop's thread, so it must not block."""

    @property
    def timeout_s(self) -> float:
        """The longest time that a request may wait for its gates of this reason."""
        ...

    def closed_gates(self, request: Request, message: AddRequest) -> Collection[Gate]:
        """The closed gates that the request needs. Each is later reported as opened or failed.

        The result of the work behind a gate (such as a matcher) is set in the request before the gate is reported open,
        or at once if the gate is not closed."""
        ...


class _Gated(NamedTuple):
    request: Request
    priority: int
    closed: set[Gate]
    timeout_s: float
    deadline_s: float


class Gates:
    """Requests that wait for gates, in order of arrival. Used only by the loop's thread."""

    def __init__(self) -> None:
        self._gatekeepers: list[Gatekeeper] = []
        self._gated: dict[Request, _Gated] = {}
        self._of_timeout: dict[float, dict[Request, _Gated]] = {}  # the same, by time-out: each expires in order
        self._of_gate: dict[Gate, dict[Request, None]] = {}

    def __len__(self) -> int:
        return len(self._gated)

    def register(self, gatekeeper: Gatekeeper) -> None:
        self._gatekeepers.append(gatekeeper)

    def hold(self, request: Request, message: AddRequest) -> bool:
        """Holds the request if any of its gates is closed. False: it may be scheduled."""
        closed, timeout_s = set[Gate](), math.inf
        for gatekeeper in self._gatekeepers:
            if gates := gatekeeper.closed_gates(request, message):
                closed.update(gates)
                timeout_s = min(timeout_s, gatekeeper.timeout_s)
        if not closed:
            return False
        gated = _Gated(request, message.priority, closed, timeout_s, time.monotonic() + timeout_s)
        self._gated[request] = self._of_timeout.setdefault(timeout_s, {})[request] = gated
        for gate in closed:
            self._of_gate.setdefault(gate, {})[request] = None
        return True

    def open(self, gate: Gate, most: int = sys.maxsize) -> tuple[list[tuple[Request, int]], bool]:
        """Opens the gate for up to `most` of the requests that wait for it. Returns those with no other closed gate,
        with their priorities and in order of arrival; and whether more requests still wait for this gate."""
        ready = []
        waiting = self._of_gate.get(gate, {})
        for request in list(itertools.islice(waiting, most)):
            del waiting[request]
            gated = self._gated[request]
            gated.closed.discard(gate)
            if not gated.closed:
                self._forget(gated)
                request.gated_s = time.monotonic() - request.arrived_s
                ready.append((request, gated.priority))
        if not waiting:
            self._of_gate.pop(gate, None)
        return ready, bool(waiting)

    def fail(self, gate: Gate) -> list[Request]:
        """Removes and returns all requests that wait for the gate."""
        requests = list(self._of_gate.get(gate, ()))
        for request in requests:
            self.remove(request)
        return requests

    def remove(self, request: Request) -> bool:
        """Removes a request from all gates. False if it does not wait for any."""
        gated = self._gated.get(request)
        if gated is None:
            return False
        self._forget(gated)
        for gate in gated.closed:
            waiting = self._of_gate[gate]
            del waiting[request]
            if not waiting:
                del self._of_gate[gate]
        return True

    def _forget(self, gated: _Gated) -> None:
        del self._gated[gated.request]
        del self._of_timeout[gated.timeout_s][gated.request]

    def expired(self) -> list[tuple[Request, Failure]]:
        """Removes and returns the requests that have waited for longer than their time-out, each with its failure."""
        now_s = time.monotonic()
        late = []
        for waiting in self._of_timeout.values():
            for gated in waiting.values():
                if gated.deadline_s > now_s:
                    break
                late.append(gated)
        for gated in late:
            self.remove(gated.request)
        return [(gated.request, self._timeout_failure(gated)) for gated in late]

    def next_deadline_s(self) -> float | None:
        """When the next request expires (monotonic seconds). None if none does."""
        firsts = (next(iter(waiting.values())) for waiting in self._of_timeout.values() if waiting)
        return min((gated.deadline_s for gated in firsts if gated.deadline_s < math.inf), default=None)

    def waiting_by_reason(self) -> dict[str, int]:
        """How many requests wait for each reason; a request that waits for several counts for each."""
        counts: dict[str, int] = {}
        for gated in self._gated.values():
            for reason in {gate.reason for gate in gated.closed}:
                counts[reason] = counts.get(reason, 0) + 1
        return counts

    def _timeout_failure(self, gated: _Gated) -> Failure:
        wanted = ", ".join(f"{gate.reason} {gate.key}".strip() for gate in sorted(gated.closed))
        return Failure(
            message=f"the request waited {gated.timeout_s:g} s for {wanted}, which did not become ready",
            type="GateTimeout",
            process="engine-core",
            phase="gate",
        )
