"""A thread that runs steps, so that the core can plan and answer meanwhile: the kernels' call lets go of Python."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from headrace.ipc.step import StepPlan, StepResult


class StepThread:
    """One thread from the first step to `stop`. `submit` and `collect` are for one caller."""

    def __init__(self, run: Callable[[StepPlan], StepResult]) -> None:
        self._run = run
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="steps", daemon=True)
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def collect(self) -> StepResult:
        """The oldest submitted step's. Raises what it raised; the thread has ended then."""
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def stop(self) -> None:
        """Returns once the step at hand is done."""
        self._plans.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (plan := self._plans.get()) is not None:
            try:
                self._results.put(self._run(plan))
            except BaseException as error:  # it is raised where the result is waited for
                self._results.put(error)
                return
