"""The rank that workers run in tests of processes: a null executor that fails on request.

The request is `hf_overrides={"rank": 1, "phase": "step", "how": "hang", ...}`; all other fields are NullModel's. Use it
as `worker_cls=null_rank:NullRank`, with this folder on the worker's PYTHONPATH.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.options.plan import MemoryReading, ModelDescription, Plan
from headrace.executor.parallel.rank_place import SINGLE, RankCoordinates
from headrace.executor.rank import Rank, Report
from headrace.executor.testing.null import NullExecutor, NullModel
from headrace.ipc.adapters import AdapterFacts
from headrace.ipc.control import DescribeEngine, WorkerAnswer, WorkerCommand
from headrace.ipc.failure import HeadraceError
from headrace.ipc.messages import TokenizerBundle
from headrace.ipc.step import StepPlan, StepResult

WORKER_CLS = "null_rank:NullRank"
LATE_S = 0.2


class Misbehaviour(msgspec.Struct, frozen=True, kw_only=True):
    rank: int = -1
    phase: str = ""
    """describe, load, allocate or step"""
    at_step: int = 3
    how: str = ""
    """exception, hang, sigkill, sigterm, exit; late: each result is there LATE_S after its step was submitted"""
    load_log: str = ""
    """A file to which each rank writes + when it begins to load, and - when it has."""
    load_together: int = 0
    """How many ranks must have begun before one goes on; it waits half a minute at most."""
    load_until: str = ""
    """A file that must be there before one goes on; it waits half a minute at most."""


def told_to() -> str:
    """How this process is asked to fail now: the content of the file named by its pid in the folder TRIGGERS, or ""."""
    folder = os.environ.get("TRIGGERS")
    if not folder:
        return ""
    try:
        return Path(folder, str(os.getpid())).read_text()
    except OSError:
        return ""


def misbehave(how: str, who: str, where: str) -> None:
    """Fails in one of the ways exception, hang, sigkill, sigterm or exit; does nothing for ""."""
    if not how:
        return
    print(f"{who} is about to {how}", file=sys.stderr, flush=True)
    if how == "exception":
        raise RuntimeError(f"{who} was told to fail in {where}")
    if how == "exit":
        os._exit(3)
    if how != "hang":
        os.kill(os.getpid(), {"sigkill": signal.SIGKILL, "sigterm": signal.SIGTERM}[how])
        return  # a worker ignores SIGTERM, since its parent handles it
    threading.Event().wait()


class NullRank(Rank):
    max_steps_in_flight = 2

    def __init__(self, options: Options, place: RankCoordinates = SINGLE) -> None:
        given: dict[str, Any] = dict(options.hf_overrides)
        own = {name: given.pop(name) for name in Misbehaviour.__struct_fields__ if name in given}
        self._bad = Misbehaviour(**own)
        self._place = place
        self._submitted_s: deque[float] = deque()
        """Of each step under way."""
        self._null = NullExecutor(options, msgspec.convert(given, NullModel))

    def describe(self, report: Report) -> ModelDescription:
        description = self._null.describe(report)
        self._perhaps("describe")
        return description

    def tokenizer(self) -> TokenizerBundle | None:
        return self._null.tokenizer()

    def stop(self) -> None:
        self._null.stop()

    def load(self, plan: Plan, report: Report) -> MemoryReading:
        self._log_load("+")
        reading = self._null.load(plan, report)
        self._log_load("-")
        self._perhaps("load")
        return reading

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        self._null.allocate(num_blocks, max_model_len)
        self._perhaps("allocate")

    def submit(self, plan: StepPlan) -> None:
        if plan.step == self._bad.at_step:
            self._perhaps("step")
        misbehave(told_to(), f"rank {self._place.rank}", "a step")
        self._null.submit(plan)
        self._submitted_s.append(time.monotonic())

    def has_result(self) -> bool:
        is_late = (self._bad.rank, self._bad.how) == (self._place.rank, "late")
        return not is_late or time.monotonic() > self._submitted_s[0] + LATE_S

    def collect(self) -> StepResult:
        self._submitted_s.popleft()
        result = self._null.collect()
        # The other ranks return wrong tokens, since only the result of the last stage's first rank is used.
        return result if self._place.replies else msgspec.structs.replace(result, token_ids=result.token_ids * 0)

    def control(self, command: WorkerCommand) -> WorkerAnswer:
        misbehave(told_to(), f"rank {self._place.rank}", "a command")
        if not isinstance(command, DescribeEngine):
            raise HeadraceError(f"rank {self._place.rank} does not know {type(command).__name__}")
        facts = {
            "pid": os.getpid(),
            "steps_under_way": len(self._submitted_s),
            "adapters": {str(slot): each for slot, each in self._null.identities.items()},
            "cpus": sorted(os.sched_getaffinity(0)),
            "omp_num_threads": os.environ["OMP_NUM_THREADS"],
            "has_torch": "torch" in sys.modules,
        }
        return WorkerAnswer(facts=facts)

    def load_adapter(self, slot: int, path: str, *, is_3d: bool = False) -> AdapterFacts:
        """A rank reads the folder that is called as `path` and its own number, if there is one."""
        own = f"{path}{self._place.rank}"
        return self._null.load_adapter(slot, own if os.path.exists(own) else path, is_3d=is_3d)

    def drop_adapter(self, slot: int) -> None:
        self._null.drop_adapter(slot)

    def _log_load(self, sign: str) -> None:
        if self._bad.load_log:
            with open(self._bad.load_log, "a") as file:  # appends are atomic, so several ranks may write
                file.write(sign)
            end_s = time.monotonic() + 30.0
            while not self._may_load() and time.monotonic() < end_s:
                time.sleep(0.01)

    def _may_load(self) -> bool:
        told = self._bad
        began = Path(told.load_log).read_text().count("+")
        return began >= told.load_together and (not told.load_until or os.path.exists(told.load_until))

    def _perhaps(self, phase: str) -> None:
        if (self._bad.rank, self._bad.phase) == (self._place.rank, phase):
            misbehave(self._bad.how, f"rank {self._place.rank}", phase)
