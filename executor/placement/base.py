"""The one interface between the core and whatever runs the model."""

from __future__ import annotations

from collections.abc import Callable

from headrace.executor.rank import ModelHost
from headrace.ipc.control import DoIdleWork, WorkerAnswer, WorkerCommand
from headrace.ipc.failure import Failure, HeadraceError


class Executor(ModelHost):
    """Runs one model, in this process or in workers. Called from the core's loop thread only.

    Life: describe > load > allocate > (submit > collect | control)* > stop. `submit` and `collect` are apart so that
    the core can plan step N+1 while step N runs. Steps are computed wholly in the order of submission, on every rank,
    and results come back in that order: the core hands blocks out again that a step in flight still writes to, and
    plans rows whose last token only the step before will know. That token is the executor's to append.
    """

    num_stages: int = 1
    """Pipeline stages. With more than one, a row is in one step in flight at most: it is planned again only once its
    last token has been collected. Other rows' steps fill the other stages."""
    ranks_startup_s: tuple[dict[str, float], ...] = ()
    """Where the model runs in other processes: how long each phase of their start took, by rank; after `allocate`."""

    def idle(self) -> bool:
        """As in `ModelHost`. Ranks with a memory of their own do theirs, all at once."""
        return self.has_own_memory and any(answer.did_something for answer in self.control(DoIdleWork()))

    def agree(self, count: int) -> int:
        """How many of the `count` requests that have come may be taken before the next step.

        Fewer only where other cores plan the same steps, and not all of them have as many yet.
        """
        return count

    def take_part(self) -> None:
        """Computes what other cores need of this one, if they wait for it now. With no step in flight."""

    def may_leave(self) -> bool:
        """No more steps of its own will come; whether no other core needs this one either. Asked until it is true."""
        return True

    def on_call(self, callback: Callable[[], None]) -> None:
        """Calls back, from another thread, when `take_part` is due, or what `may_leave` says has changed."""

    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]:
        """Carries out a command on every worker, with no step in flight; their answers, by rank.

        Raises HeadraceError, with what is as it was before, when the command cannot be carried out.
        """
        raise HeadraceError(f"{type(self).__name__} does not carry out {type(command).__name__}")

    def watch(self, on_failure: Callable[[Failure], None]) -> None:
        """Calls back once, from another thread, when what runs the model has failed, also while no step is under way.

        An executor without processes of its own fails in the calls above and nowhere else.
        """
