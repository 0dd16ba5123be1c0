"""A rank: one device's part of a model, independent of what drives it. Imports no torch.

A placement (in the core's process, in workers, on nodes, through Ray or torchrun) creates ranks and drives them, and
does not depend on the device; a rank does not depend on how plans reach it. `cpu.rank.CpuRank` and `gpu.rank.GpuRank`
are the implementations; the option `worker_cls` names another one.

    describe > [join] > load > [measure] > allocate > (submit > collect | control | idle)* > stop
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.core.options.plan import MemoryReading, ModelDescription, Plan
from headrace.ipc.adapters import AdapterFacts
from headrace.ipc.control import WorkerAnswer, WorkerCommand
from headrace.ipc.failure import ModelError
from headrace.ipc.messages import TokenizerBundle
from headrace.ipc.step import Attachment, AttachmentError, Drafts, StateSnapshots, StepPlan, StepResult, TokenMasks

if TYPE_CHECKING:
    from headrace.executor.parallel.rendezvous import Rendezvous

Report = Callable[[str], None]
"""Called with the name of each start-up phase as it begins. Its method `read`, if it has one as a Reporter has, is
called with the progress of loading the weights."""


@dataclass(frozen=True)
class Reporter:
    """A Report made of two functions."""

    begin: Callable[[str], None]
    read: Callable[[int, int], None]
    """Called with the number of weight bytes read so far, and the total."""

    def __call__(self, phase: str) -> None:
        self.begin(phase)


def reader_of(report: Report | None) -> Callable[[int, int], None] | None:
    """The report's callback for the progress of loading weights; None if it has none."""
    return getattr(report, "read", None)


class ModelHost(ABC):
    """The interface common to placements and ranks: the core drives a placement as a placement drives a rank."""

    max_steps_in_flight: int = 1
    """How many steps may be submitted and not collected. With 1, `collect` follows each `submit`. This and the next two
    attributes are valid once the object is constructed."""
    has_own_memory: bool = False
    """Whether each rank has its own memory, as a GPU has; otherwise all ranks of a host share its memory."""
    async_by_default: bool = False
    """Whether the core plans ahead by default: steps run in another process or on a device, or gain from it here."""

    reads: frozenset[type[Attachment]] = frozenset((Drafts, TokenMasks, StateSnapshots))
    """The kinds of step attachments that this rank reads: Headrace's own; a rank with a model reads those that an
    installed handler is for, too (`executor/step/handlers.py`)."""

    def check_attachments(self, plan: Plan) -> None:
        """Raises AttachmentError if steps may carry a kind that this rank does not read: it would have no effect."""
        read = {kind.__name__ for kind in self.reads}
        if not read.issuperset(plan.attachments):
            raise AttachmentError.of(set(plan.attachments), read)

    @abstractmethod
    def describe(self, report: Report) -> ModelDescription:
        """Finds the checkpoint that the options name (downloading it if necessary) and reads its config.

        Raises ModelError if it is missing, foreign, truncated or of an unsupported kind.
        """

    @abstractmethod
    def tokenizer(self) -> TokenizerBundle | None:
        """The model's tokeniser, converted if necessary; None with skip_tokenizer_init.

        May be called from another thread while `load` runs. Raises ModelError if the model has none.
        """

    @abstractmethod
    def load(self, plan: Plan, report: Report) -> MemoryReading:
        """Loads the weights. Raises ModelError if they do not match the config or do not fit the memory."""

    def measure(self, reading: MemoryReading, report: Report) -> MemoryReading:
        """Called after `load`, if there are several ranks: adds what they can only measure together to the reading."""
        return reading

    @abstractmethod
    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        """Allocates the KV cache and all per-row state. Called once."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Starts one step."""

    @abstractmethod
    def collect(self) -> StepResult:
        """Returns the result of the oldest submitted step; it is empty from a rank whose `place.replies` is false.

        Raises the error that ended the engine, if one did.
        """

    def has_result(self) -> bool:
        """Whether `collect` would return without waiting for other processes. A step must have been submitted."""
        return True

    def idle(self) -> bool:
        """Does a piece of work of about 100 ms at most that no request waits for; returns False if none is left.

        Called while there is nothing to compute, until it returns False or a message arrives.
        """
        return False

    def load_adapter(self, slot: int, path: str, *, is_3d: bool = False) -> AdapterFacts:
        """Reads an adapter's files, each once, and puts it into the slot, in place of what was there.

        Called on a thread of its own, beside `submit` and `collect` on theirs. No step that is not collected, and none
        that is submitted before this returns, has a row with this slot; steps with other slots run meanwhile, so what
        they read changes at one point. Raises ModelError with the cause, and leaves the slot empty.
        """
        raise ModelError(f"{type(self).__name__} has no adapters (enable_lora)")

    def drop_adapter(self, slot: int) -> None:
        """Empties the slot and frees its memory. Called on the thread of `load_adapter`, under the same conditions."""
        raise ModelError(f"{type(self).__name__} has no adapters (enable_lora)")

    @abstractmethod
    def stop(self) -> None:
        """Frees the device. Safe to call twice and after a failed start."""


class Rank(ModelHost):
    """Used from one thread, except for `tokenizer`. All ranks of a world get every plan, in the core's order."""

    def join(self, rendezvous: Rendezvous) -> None:
        """Connects to the other ranks, if there are any."""

    @abstractmethod
    def control(self, command: WorkerCommand) -> WorkerAnswer:
        """Carries out a command, with no step in flight.

        Raises HeadraceError, and leaves everything unchanged, if the command cannot be carried out.
        """
