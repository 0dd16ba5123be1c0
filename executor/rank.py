"""A rank: one device's part of a model, whoever drives it. Imports no torch.

A placement (in the core's process, in workers, on nodes, through Ray or torchrun) makes ranks and drives them, and
knows nothing of devices; a rank knows nothing of how plans reach it. `cpu.rank.CpuRank` and `gpu.rank.GpuRank` are the
two there are, and `worker_cls` names another.

    describe > [join] > load > [measure] > allocate > (submit > collect | control | idle)* > stop
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.core.options.engine_options import Options
from headrace.core.options.plan import MemoryReading, ModelDescription, Plan
from headrace.executor.parallel.rank_place import RankPlace
from headrace.ipc.control import WorkerAnswer, WorkerCommand
from headrace.ipc.messages import TokenizerBundle
from headrace.ipc.plugins import load_class
from headrace.ipc.step import StepPlan, StepResult

if TYPE_CHECKING:
    from headrace.executor.parallel.rendezvous import Rendezvous

Report = Callable[[str], None]
"""Called with the name of each start-up phase as it begins. One that has a method `read`, as a Reporter has, hears of
the weights too."""


@dataclass(frozen=True)
class Reporter:
    """A Report of two functions."""

    begin: Callable[[str], None]
    read: Callable[[int, int], None]
    """Bytes of the weights that have been read, and of how many."""

    def __call__(self, phase: str) -> None:
        self.begin(phase)


def reader_of(report: Report | None) -> Callable[[int, int], None] | None:
    """The report's callback for how much of the weights is read; None where it has none."""
    return getattr(report, "read", None)


class ModelHost(ABC):
    """What a placement and a rank have in common: a placement offers the core what a rank offers the placement."""

    max_steps_in_flight: int = 1
    """Most steps that may be submitted and not collected. With 1, `collect` follows each `submit`. This and the next
    two are known once the object is constructed."""
    has_own_memory: bool = False
    """Whether each rank has a memory of its own, as a GPU has; else all ranks of a host share its memory."""
    async_by_default: bool = False
    """Whether the core plans ahead unless an option says otherwise: steps run elsewhere, or gain by it here."""

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
        """The result of the oldest submitted step; that of a rank whose `place.replies` is false holds nothing.

        Raises what ended the engine, if anything did.
        """

    def has_result(self) -> bool:
        """Whether `collect` would return without waiting for others, where a step is submitted."""
        return True

    def idle(self) -> bool:
        """A piece of work of at most some 100 ms that no request waits for; False when there is none (left).

        Called while there is nothing to compute, until it is false or something comes.
        """
        return False

    @abstractmethod
    def stop(self) -> None:
        """Frees the device. Safe to call twice and after a failed start."""


class Rank(ModelHost):
    """Used from one thread, but for `tokenizer`. Every rank of a world is given every plan, in the core's order."""

    def join(self, meeting: Rendezvous) -> None:
        """Connects to the other ranks, where there are others."""

    @abstractmethod
    def control(self, command: WorkerCommand) -> WorkerAnswer:
        """Carries out a command, with no step in flight.

        Raises HeadraceError, with what is as it was before, when the command cannot be carried out.
        """


def make_rank(options: Options, place: RankPlace) -> Rank:
    """The rank of this place: on the device that is its own, or of the class that `worker_cls` names.

    Raises OptionError for a device that cannot be used, or where there is no such class.
    """
    if options.worker_cls != "auto":
        rank: Rank = load_class("worker_cls", options.worker_cls)(options, place=place)
        return rank
    from headrace.executor.gpu.hardware.device import check_no_gpu_options, choose_device, rank_device

    device = choose_device(options.device) if place.world_size == 1 else rank_device(options.device)
    if device.type == "cpu":
        from headrace.executor.cpu.rank import CpuRank

        check_no_gpu_options(options)
        return CpuRank(options, place)
    from headrace.executor.gpu.rank import GpuRank

    return GpuRank(options, device, place=place)
