"""The executor of one rank that a launcher started, such as torchrun: every rank has an engine core of its own.

All ranks run the same program, so all cores get the same requests in the same order, and plan the same steps. What
may differ is when a request arrives: before each step the ranks agree on how many are taken (`agree`).

    torchrun --nproc-per-node 2 script.py    # in it: LLM(tensor_parallel_size=2,
                                             #            distributed_executor_backend="external_launcher")
"""

from __future__ import annotations

import os

import msgspec
import torch

from headrace.core.options import Options
from headrace.core.plan import MemoryReading, Plan
from headrace.executor.base import Report
from headrace.executor.collectives_gloo import open_gloo
from headrace.executor.place import Place, World
from headrace.executor.uniproc import UniprocExecutor
from headrace.ipc.failure import OptionError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ExternalExecutor(UniprocExecutor):
    """A rank of a world that the environment describes, as torchrun's does."""

    def __init__(self, options: Options) -> None:
        """Raises OptionError when the environment does not say which rank this is, or disagrees with the options."""
        missing = [name for name in VARIABLES if name not in os.environ]
        if missing:
            raise OptionError(
                f"distributed_executor_backend=external_launcher needs {', '.join(missing)} in the environment: start "
                "the program with torchrun"
            )
        if options.pipeline_parallel_size > 1:
            raise OptionError(
                f"distributed_executor_backend=external_launcher runs one pipeline stage, not "
                f"{options.pipeline_parallel_size}; use mp, whose ranks have one engine core in common"
            )
        size, given = options.tensor_parallel_size, int(os.environ["WORLD_SIZE"])
        if size != given:
            raise OptionError(
                f"tensor_parallel_size={size}, and the launcher started {given} ranks; they must be equal"
            )
        super().__init__(options, Place.of(int(os.environ["RANK"]), size, 1))

    def load(self, plan: Plan, report: Report) -> MemoryReading:
        report("meet the other ranks")
        master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        # torchrun's agent has a store there already; without it, rank 0 opens one.
        opens_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and self._place.rank == 0
        world = World.of(plan, self._place.tp_size, 1)
        if self._place.tp_size > 1:
            self.connect(open_gloo(master, world, self._place.rank, opens_store=opens_store))
        reading = super().load(plan, report)
        # Caches must be of one size, or the cores would plan different steps.
        return msgspec.structs.replace(reading, available_bytes=self._least(reading.available_bytes))

    def agree(self, count: int) -> int:
        return self._least(count)

    def _least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        return int(self._place.all_gather(torch.tensor([[value]], dtype=torch.int64)).min())
