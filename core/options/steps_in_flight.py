"""How many steps the core keeps in flight: planned and submitted, their results not yet taken."""

from __future__ import annotations

from typing import Protocol

import msgspec

from headrace.core.options.engine_options import Options
from headrace.ipc.failure import OptionError


class Capacity(Protocol):
    """What an Executor says of itself; see executor/placement/base.py."""

    @property
    def max_steps_in_flight(self) -> int: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def async_by_default(self) -> bool: ...


class InFlight(msgspec.Struct, frozen=True):
    depth: int
    """Most steps in flight; with 1 each step is planned when the one before has been answered."""
    rows_run_ahead: bool
    """A row may be in several of them."""
    reason: str


def steps_in_flight(options: Options, executor: Capacity) -> InFlight:
    """Raises OptionError when async_scheduling is asked for and the executor runs one step at a time."""
    stages, most = executor.num_stages, executor.max_steps_in_flight
    asked = options.async_scheduling
    if asked and most <= stages:
        raise OptionError(
            f"async_scheduling=True cannot apply: {type(executor).__name__} holds {most} steps and needs "
            f"{stages + 1} to plan ahead; leave it out"
        )
    ahead = (executor.async_by_default if asked is None else asked) and most > stages
    why = "asked for" if asked is not None else "the next step is planned while one runs" if ahead else "the default"
    if stages > 1:
        depth = min(most, stages + ahead)
        return InFlight(depth, False, f"{why}; {stages} pipeline stages" + (" and one step waiting" if ahead else ""))
    return InFlight(2 if ahead else 1, True, why)
