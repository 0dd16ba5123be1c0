"""Schedulers that misbehave when their engine core is told to; see null_rank.told_to. For `scheduler_cls`.

`bad_core:BadScheduler` does so in a turn of the loop, `bad_core:BadLoad` while it is made, at the end of loading, and
`bad_core:BadImport` cannot be had at all.
"""

from __future__ import annotations

from typing import Any

from null_rank import misbehave, told_to

from headrace.core.schedule.scheduler import Scheduler, SchedulerConfig
from headrace.ipc.step import StepPlan


class BadScheduler(Scheduler):
    @property
    def has_work(self) -> bool:
        """Asked for at every turn of the loop without a step in flight, whether or not there is any."""
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
