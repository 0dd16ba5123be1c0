"""Standing still on request: no step is planned, so that weights can be changed, or the machine used otherwise."""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.scheduler import Scheduler
from headrace.ipc.control import PauseGeneration
from headrace.ipc.messages import Reply


class Pause:
    """Running, on the way to a standstill, or standing still. A pause outlives the client that asked for it."""

    def __init__(self, scheduler: Scheduler, reply: Callable[[int, Reply], None]) -> None:
        self._scheduler, self._reply = scheduler, reply
        self._asked: PauseGeneration | None = None
        self._unanswered: list[tuple[int, int]] = []  # clients and their calls
        self.stands_still = False
        """Nothing is to be planned, whatever waits."""

    @property
    def is_asked(self) -> bool:
        return self._asked is not None

    @property
    def comes_about(self) -> bool:
        """Somebody waits for the standstill."""
        return bool(self._unanswered)

    def ask(self, client: int, call: int, command: PauseGeneration) -> None:
        """Begins one. With `wait`, what is here may still be planned; else no step may be in flight any more."""
        self._asked = command
        self._unanswered.append((client, call))
        if command.mode == "wait":
            self._scheduler.waiting.hold()
        else:
            self.stands_still = True

    def stand_still(self) -> None:
        """Nothing runs any more: whoever asked is told."""
        if self._asked is not None:
            self.stands_still = True
            if self._asked.clear_cache:
                forget_computed(self._scheduler)
        for client, call in self._unanswered:
            self._reply(client, Reply(call=call))
        self._unanswered.clear()

    def resume(self) -> None:
        """Ends it, and the waiting for it."""
        self._asked, self.stands_still = None, False
        self._scheduler.waiting.release()
        self.stand_still()


def forget_computed(scheduler: Scheduler) -> None:
    """Keys and values of before count no more: running requests will compute theirs again. With no step in flight."""
    for row in scheduler.rows.active.nonzero()[0].tolist():
        scheduler.preempt(row)
    scheduler.pool.reset_cache()
