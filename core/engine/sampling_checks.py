"""The gatekeeper of sampling parameters that users' logits processors check: only the workers load their classes.

new parameters --> known? ----------------> no gate is closed, or it fails at once
                     | no
                     v
              gate "logits processors" closes until the workers are asked about all such parameters together

Asking waits for the steps in flight, which a trickle of requests with parameters of their own must not do each time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec

from headrace.core.engine.gates import Gate, GateFailed, GateOpened
from headrace.core.schedule.requests import Request
from headrace.ipc.control import CheckSampling, WorkerAnswer, WorkerCommand
from headrace.ipc.failure import EngineDeadError, Failure, HeadraceError
from headrace.ipc.messages import AddRequest, Generate

PERIOD_S = 0.1
"""While steps are in flight, the workers are asked at most this often."""
TIMEOUT_S = 120.0
"""The longest time that a request may wait for the workers' answer."""
MOST_KNOWN = 1024
"""Sampling parameters of which the workers' answer is remembered."""
REASON = "logits processors"


class AsksWorkers(Protocol):
    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]: ...


class SamplingChecks:
    """A `Gatekeeper`, used only by the loop's thread."""

    timeout_s = TIMEOUT_S

    def __init__(
        self,
        workers: AsksWorkers,
        report: Callable[[GateOpened | GateFailed], None],
        refusal: Callable[[str], Failure],
        is_computing: Callable[[], bool],
    ) -> None:
        """refusal: makes the failure of a request whose parameters are refused, from the reason; is_computing: whether
        a step is in flight."""
        self._workers, self._report, self._refusal, self._is_computing = workers, report, refusal, is_computing
        self._known: OrderedDict[bytes, str] = OrderedDict()
        """The workers' refusals, "" for parameters that they accept; the last asked for at the end."""
        self._unknown: dict[bytes, Gate] = {}
        self._asked_s = 0.0

    def closed_gates(self, request: Request, message: AddRequest) -> Collection[Gate]:
        if not isinstance(message.task, Generate):
            return ()
        sampling = msgspec.msgpack.encode(message.task.sampling)
        if (why := self._known.get(sampling)) is not None:
            self._known.move_to_end(sampling)
            if not why:
                return ()
        gate = self._unknown.get(sampling) or Gate(REASON, f"parameters of {message.request_id}")
        if why is not None:
            self._report(GateFailed(gate, self._refusal(why)))
            return (gate,)
        self._unknown[sampling] = gate
        return (gate,)

    def is_due(self) -> bool:
        """Whether to collect the steps in flight, and then to `ask`."""
        if not self._unknown:
            return False
        return not self._is_computing() or time.monotonic() >= self._asked_s + PERIOD_S

    def ask(self) -> None:
        """Asks the workers about all parameters that requests wait for. No step may be in flight."""
        unknown, self._unknown, self._asked_s = self._unknown, {}, time.monotonic()
        try:
            refusals = self._refusals(tuple(unknown))
        except EngineDeadError:
            raise
        except HeadraceError as error:
            failure = Failure.of(error, process="engine-core", phase="admission")
            for gate in unknown.values():
                self._report(GateFailed(gate, failure))
            return
        for (sampling, gate), why in zip(unknown.items(), refusals, strict=True):
            self._known[sampling] = why
            self._report(GateFailed(gate, self._refusal(why)) if why else GateOpened(gate))
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def _refusals(self, parameters: Sequence[bytes]) -> list[str]:
        """The first worker's refusal of each, or ""."""
        command = CheckSampling(sampling=tuple(msgspec.Raw(each) for each in parameters))
        answers = [answer.refusals for answer in self._workers.control(command)]
        return [next(filter(None, of_workers), "") for of_workers in zip(*answers, strict=True)]
