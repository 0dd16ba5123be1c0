"""What clients tell the engine besides requests: carried out between steps, and answered."""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.engine.commands import Commands, Controlled
from headrace.core.engine.pause import Pause, forget_computed
from headrace.core.options.plan import Facts, Plan
from headrace.core.schedule.scheduler import Scheduler
from headrace.ipc.control import Commands as Command
from headrace.ipc.control import PauseGeneration, ReloadWeights, ResumeGeneration, Sleep, WakeUp
from headrace.ipc.failure import EngineDeadError, Failure, HeadraceError
from headrace.ipc.messages import Reply


class Orders:
    """For the loop's thread."""

    def __init__(
        self, plan: Plan, facts: Facts, executor: Controlled, scheduler: Scheduler, reply: Callable[[int, Reply], None]
    ) -> None:
        """reply: sends it to a client."""
        self._scheduler, self._reply = scheduler, reply
        self.commands = Commands(plan, facts, executor)
        self.pause = Pause(scheduler, self._settle)

    def carry_out(self, client: int, call: int, command: Command) -> None:
        """With no step in flight. What cannot be done is told, and changes nothing.

        Raises EngineDeadError, after the answer, where the executor turns out to be dead.
        """
        result, failure, death = None, None, None
        try:
            result = self.commands.carry_out(command)
        except HeadraceError as error:
            failure = Failure.of(error, process="engine-core", phase="control")
            death = error if isinstance(error, EngineDeadError) else None
        if failure is None and isinstance(command, ReloadWeights | Sleep):
            forget_computed(self._scheduler)
        # A sleep that failed is over too.
        slept = isinstance(command, Sleep | WakeUp) and self.pause.is_for_sleep and not self.commands.asleep
        if slept or (failure is None and isinstance(command, ResumeGeneration)):
            self.pause.resume()
        self._reply(client, Reply(call=call, result=result, failure=failure))
        if death is not None:  # or the client, which knows now, might have it stopped in order
            raise death

    def _settle(self, client: int, call: int, command: PauseGeneration | Sleep) -> None:
        """A pause has come about, or was called off: who asked for it is answered."""
        if isinstance(command, PauseGeneration):
            self._reply(client, Reply(call=call))
        elif self.pause.stands_still:
            self.carry_out(client, call, command)
        else:
            failure = Failure(message="generation was resumed before the engine could sleep", phase="control")
            self._reply(client, Reply(call=call, failure=failure))
