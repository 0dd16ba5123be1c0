"""Schedulers, for `scheduler_cls`, that fail on request; see null_rank.told_to.

`bad_core:BadScheduler` fails in a turn of the loop, when a trigger file asks for it; `bad_core:BadLoad` always fails
when it is constructed, at the end of loading; `bad_core:BadImport` always fails when it is imported.
"""

from __future__ import annotations

from typing import Any

from null_rank import misbehave, told_to

from headrace.core.schedule.scheduler import Scheduler, SchedulerConfig
from headrace.ipc.step import StepPlan


class BadScheduler(Scheduler):
    @property
    def has_work(self) -> bool:
        """Read in every turn of the loop without a step in flight, even if there is no work."""
        misbehave(told_to(), "the core", "a turn")
        return super().has_work

    def schedule(self) -> StepPlan | None:
        """Called in every turn with a step in flight."""
        misbehave(told_to(), "the core", "a turn")
        return super().schedule()


class BadLoad(Scheduler):
    def __init__(self, config: SchedulerConfig) -> None:
        raise RuntimeError("the core was told to fail in loading")


def __getattr__(name: str) -> Any:
    if name == "BadImport":
        raise RuntimeError("the core was told to fail in starting")
    raise AttributeError(name)
