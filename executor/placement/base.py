"""The interface between the core and whatever runs the model."""

from __future__ import annotations

from collections.abc import Callable

from headrace.executor.rank import ModelHost
from headrace.ipc.control import DoIdleWork, WorkerAnswer, WorkerCommand
from headrace.ipc.failure import Failure, HeadraceError


class Executor(ModelHost):
    """Runs one model, in this process or in workers. Called only from the core's loop thread.

    Order of calls: describe > load > allocate > (submit > collect | control)* > stop. `submit` and `collect` are
    separate so that the core can plan step N+1 while step N runs. Every rank must compute each step completely before
    the next, in the order of submission, and results come back in that order. The core relies on it: it reuses blocks
    that a step in flight still writes to, and plans rows whose last token is still being computed. The executor appends
    that token itself.
    """

    num_stages: int = 1
    """Pipeline stages. With more than one, a row is in at most one step in flight: it is planned again only after its
    last token was collected. Steps of other rows fill the other stages meanwhile."""
    ranks_startup_s: tuple[dict[str, float], ...] = ()
    """Seconds that each start-up phase took, by rank, where ranks run in other processes; set by `allocate`."""

    def idle(self) -> bool:
        """As in `ModelHost`. Ranks with their own memory do their idle work at the same time."""
        return self.has_own_memory and any(answer.did_something for answer in self.control(DoIdleWork()))

    def agree(self, count: int) -> int:
        """How many of the `count` waiting requests may be admitted before the next step.

        Fewer than `count` only where several cores plan the same steps and not all of them have received as many yet.
        """
        return count

    def take_part(self) -> None:
        """Computes what other cores need from this one, if they are waiting for it. Called with no step in flight."""

    def may_leave(self) -> bool:
        """Says that this core has no more steps; returns whether no other core needs it either. Asked until true."""
        return True

    def on_call(self, callback: Callable[[], None]) -> None:
        """Registers a callback, called from another thread when `take_part` is due or `may_leave` changes."""

    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]:
        """Carries out a command on every worker, with no step in flight; returns their answers, by rank.

        Raises HeadraceError, with the state unchanged, when the command cannot be carried out.
        """
        raise HeadraceError(f"{type(self).__name__} does not carry out {type(command).__name__}")

    def watch(self, on_failure: Callable[[Failure], None]) -> None:
        """Registers a callback, called once from another thread when whatever runs the model fails, even between steps.

        An executor without processes of its own never calls it: its failures are raised by the other methods.
        """

    def watch_leaving(self, on_leaving: Callable[[str], None]) -> None:
        """Registers a callback, called from another thread with the name of what was asked to end, such as a node. It
        goes on until `stop`, so that running requests can finish before."""
