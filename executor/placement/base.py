"""The one interface between the core and whatever runs the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from headrace.core.options.plan import MemoryReading, ModelDescription, Plan
from headrace.executor.rank import Report
from headrace.ipc.control import DoIdleWork, WorkerAnswer, WorkerCommand
from headrace.ipc.failure import Failure, HeadraceError
from headrace.ipc.messages import TokenizerBundle
from headrace.ipc.step import StepPlan, StepResult


class Executor(ABC):
    """Runs one model, in this process or in workers. Called from the core's loop thread only.

    Life: describe > load > allocate > (submit > collect | control)* > stop. `submit` and `collect` are apart so that
    the core can plan step N+1 while step N runs. Steps are computed wholly in the order of submission, on every rank,
    and results come back in that order: the core hands blocks out again that a step in flight still writes to, and
    plans rows whose last token only the step before will know. That token is the executor's to append.
    """

    max_steps_in_flight: int = 1
    """Most steps that may be submitted and not collected. With 1, `collect` follows each `submit`. This and the next
    three are known once the executor is constructed."""
    num_stages: int = 1
    """Pipeline stages. With more than one, a row is in one step in flight at most: it is planned again only once its
    last token has been collected. Other rows' steps fill the other stages."""
    has_own_memory: bool = False
    """Whether each rank has a memory of its own, as a GPU has; else all ranks of a host share its memory."""
    async_by_default: bool = False
    """Whether the core plans ahead unless it is told not to: steps run in other processes, or gain by it here."""

    ranks_startup_s: tuple[dict[str, float], ...] = ()
    """Where the model runs in other processes: how long each phase of their start took, by rank; after `allocate`."""

    @abstractmethod
    def describe(self, report: Report) -> ModelDescription:
        """Finds the checkpoint that the options name (fetching it when needed) and reads its config.

        Raises ModelError when it is missing, foreign, truncated or of an unsupported kind.
        """

    @abstractmethod
    def tokenizer(self) -> TokenizerBundle | None:
        """The model's tokeniser, converted when need be; None with skip_tokenizer_init.

        May be called from another thread while `load` runs. Raises ModelError when there is none.
        """

    @abstractmethod
    def load(self, plan: Plan, report: Report) -> MemoryReading:
        """Loads the weights. Raises ModelError when they do not match the config or do not fit the memory."""

    def measure(self, reading: MemoryReading, report: Report) -> MemoryReading:
        """After `load` of every rank of several: its reading, with what they can only find out together."""
        return reading

    @abstractmethod
    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        """Makes the KV cache and all per-row state. Called once."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Starts one step."""

    @abstractmethod
    def collect(self) -> StepResult:
        """The result of the oldest submitted step. Raises what ended the engine, if anything did."""

    def has_result(self) -> bool:
        """Whether `collect` would return without waiting for others, where a step is submitted."""
        return True

    def idle(self) -> bool:
        """A piece of work of at most some 100 ms that no request waits for; False when there is none (left).

        Called while there is nothing to compute, again and again until it is false or something comes. Ranks with a
        memory of their own are told to do theirs, all at once.
        """
        return self.has_own_memory and any(answer.did_something for answer in self.control(DoIdleWork()))

    def agree(self, count: int) -> int:
        """How many of the `count` requests that have come may be taken before the next step.

        Fewer only where other cores plan the same steps, and not all of them have as many yet.
        """
        return count

    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]:
        """Carries out a command on every worker, with no step in flight; their answers, by rank.

        Raises HeadraceError, with what is as it was before, when the command cannot be carried out.
        """
        raise HeadraceError(f"{type(self).__name__} does not carry out {type(command).__name__}")

    def watch(self, on_failure: Callable[[Failure], None]) -> None:  # noqa: B027 - nothing can fail meanwhile
        """Calls back once, from another thread, when what runs the model has failed, also while no step is under way.

        An executor without processes of its own fails in the calls above and nowhere else.
        """

    @abstractmethod
    def stop(self) -> None:
        """Frees the device. Safe to call twice and after a failed start."""
