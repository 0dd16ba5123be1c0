"""Loads adapters into the ranks' slots on a thread of its own, beside running steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from headrace.ipc.adapters import AdapterFacts
from headrace.ipc.failure import Failure, let_interrupts_pass
from headrace.ipc.process.background import Background


class LoadsAdapters(Protocol):
    """The part of an Executor that the loader uses."""

    def load_adapter(self, slot: int, path: str, *, is_3d: bool = False) -> AdapterFacts: ...
    def drop_adapter(self, slot: int) -> None: ...


class AdapterLoaded(msgspec.Struct, frozen=True, kw_only=True):
    """Not a wire message: a load has ended."""

    slot: int
    seconds: float
    facts: AdapterFacts | None = None
    """None if it failed; the slot is empty then."""
    failure: Failure | None = None


class AdapterLoader:
    """Carries out one order after another."""

    def __init__(self, executor: LoadsAdapters, report: Callable[[AdapterLoaded], None]) -> None:
        """report: called from the loader's thread."""
        self._executor, self._report = executor, report
        self._background = Background("adapters")
        self.stop = self._background.stop

    def load(self, slot: int, path: str, *, is_3d: bool) -> None:
        self._background.submit(lambda: self._load(slot, path, is_3d))

    def drop(self, slot: int) -> None:
        self._background.submit(lambda: self._executor.drop_adapter(slot))

    def _load(self, slot: int, path: str, is_3d: bool) -> None:
        began_s, facts, failure = time.monotonic(), None, None
        try:
            facts = self._executor.load_adapter(slot, path, is_3d=is_3d)
        except BaseException as error:
            let_interrupts_pass(error)
            failure = Failure.of(error, process="engine-core", phase="adapter")
            self.drop(slot)  # some ranks may have succeeded
        seconds = time.monotonic() - began_s
        self._report(AdapterLoaded(slot=slot, seconds=seconds, facts=facts, failure=failure))
