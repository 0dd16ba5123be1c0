"""Standing still on request: no step is planned, so that weights can be changed, or the machine used otherwise."""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.schedule.scheduler import Scheduler
from headrace.ipc.control import PauseGeneration, Sleep


class Pause:
    """Running, on the way to a standstill, or standing still. A pause outlives the client that asked for it."""

    def __init__(self, scheduler: Scheduler, settle: Callable[[int, int, PauseGeneration | Sleep], None]) -> None:
        """settle: answers a client's call, and carries out what the pause was for."""
        self._scheduler, self._settle = scheduler, settle
        self._asked: PauseGeneration | Sleep | None = None
        self._unanswered: list[tuple[int, int, PauseGeneration | Sleep]] = []  # clients, their calls, what they asked
        self.stands_still = False
        """Nothing is to be planned, whatever waits."""

    @property
    def is_asked(self) -> bool:
        return self._asked is not None

    @property
    def is_for_sleep(self) -> bool:
        """Nobody but Sleep has asked for it."""
        return isinstance(self._asked, Sleep)

    @property
    def comes_about(self) -> bool:
        """Somebody waits for the standstill."""
        return bool(self._unanswered)

    def ask(self, client: int, call: int, command: PauseGeneration | Sleep) -> None:
        """Begins one. With `wait`, what is here may still be planned; else no step may be in flight any more."""
        if not (self.is_asked and isinstance(command, Sleep)):
            self._asked = command
        self._unanswered.append((client, call, command))
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
        unanswered, self._unanswered = self._unanswered, []
        for client, call, command in unanswered:
            self._settle(client, call, command)

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
