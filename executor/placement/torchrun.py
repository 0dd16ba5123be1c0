"""The executor of one rank started by a launcher such as torchrun: every rank has an engine core of its own.

All ranks run the same program, so all cores get the same requests in the same order and plan the same steps. Only the
arrival times may differ: before each step the ranks agree on how many requests are admitted (`agree`). The last stage
of a pipeline sends each step's result to the cores of the other stages, which run later steps meanwhile.

    torchrun --nproc-per-node 4 script.py    # in it: LLM(tensor_parallel_size=2, pipeline_parallel_size=2,
                                             #            distributed_executor_backend="external_launcher")
"""

from __future__ import annotations

import os

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.options.plan import MemoryReading, ModelDescription, Plan
from headrace.executor.model_rank import ModelRank, own_share
from headrace.executor.parallel.gloo import GlooCollectives
from headrace.executor.parallel.rank_place import DEADLINE_S, RankCoordinates, World
from headrace.executor.parallel.rendezvous import Rendezvous
from headrace.executor.placement.in_process import InProcessExecutor
from headrace.executor.placement.make_rank import make_rank
from headrace.executor.placement.step_codec import StepCodec
from headrace.executor.rank import Report
from headrace.ipc.failure import OptionError
from headrace.ipc.step import StepPlan, StepResult
from headrace.ipc.transport.hosts import bare_host

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ExternalExecutor(InProcessExecutor):
    """A rank of the world that torchrun's environment describes; with GPUs, on the GPU of its LOCAL_RANK."""

    rank: ModelRank

    def __init__(self, options: Options) -> None:
        """Raises OptionError when the environment does not name this rank, or disagrees with the options."""
        missing = [name for name in VARIABLES if name not in os.environ]
        if missing:
            raise OptionError(
                f"distributed_executor_backend=external_launcher needs {', '.join(missing)} in the environment: start "
                "the program with torchrun"
            )
        tp_size, pp_size = options.tensor_parallel_size, options.pipeline_parallel_size
        if tp_size * pp_size != int(os.environ["WORLD_SIZE"]):
            asked = f"tensor_parallel_size={tp_size}"
            if pp_size > 1:
                asked += f" times pipeline_parallel_size={pp_size} is {tp_size * pp_size}"
            raise OptionError(f"{asked}, and the launcher started {os.environ['WORLD_SIZE']} ranks; they must be equal")
        super().__init__(options, make_rank(options, RankCoordinates.of_options(int(os.environ["RANK"]), options)))
        self.num_stages = pp_size
        if not self.has_own_memory:  # a rank with its own memory has room for only so many steps
            self.max_steps_in_flight = pp_size + 1
        self._link: GlooCollectives | None = None
        self._codec = StepCodec(StepResult)
        self._num_submitted = 0
        if pp_size > 1:
            self.submit, self.collect = self._submit_to_stage, self._collect_of_last_stage  # type: ignore[method-assign]

    def describe(self, report: Report) -> ModelDescription:
        described = super().describe(report)
        spec, own = self.rank.found.spec, self.rank.place
        # Every rank reports the largest share, or the cores would make caches of different sizes and plan different
        # steps.
        stages = [
            RankCoordinates.of(rank, own.tp_size, own.pp_size, own.layer_partition) for rank in range(own.world_size)
        ]
        shares = [own_share(spec, place, described.cache_groups) for place in stages]
        largest = {name: max(share[name] for share in shares) for name in shares[0]}
        return msgspec.structs.replace(described, **largest)

    def load(self, plan: Plan, report: Report) -> MemoryReading:
        report("meet the other ranks")
        place = self.rank.place
        if place.world_size > 1:
            self.rank.join(
                Rendezvous(
                    world=World.of(plan, place.tp_size, place.pp_size),
                    rank=place.rank,
                    host_ranks=range(place.rank, place.rank + 1),
                    memory_fd=-1,
                    deadline_s=DEADLINE_S,
                    address=(bare_host(os.environ["MASTER_ADDR"]), int(os.environ["MASTER_PORT"])),
                    # torchrun's agent usually has a store there already; otherwise rank 0 opens one.
                    opens_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and place.rank == 0,
                )
            )
            assert isinstance(self.rank.place.collectives, GlooCollectives), "it was asked to meet at an address"
            self._link = self.rank.place.collectives
        return self._tightest(super().load(plan, report))

    def _tightest(self, reading: MemoryReading) -> MemoryReading:
        """The least memory and the largest needs of any rank, so that all cores make caches of the same size."""
        least = {name: self.agree(getattr(reading, name)) for name in ("total_bytes", "available_bytes")}
        needs = ("weights_bytes", "activation_bytes", "graph_bytes", "state_bytes")
        return msgspec.structs.replace(
            reading, **least, **{name: -self.agree(-getattr(reading, name)) for name in needs}
        )

    def _submit_to_stage(self, plan: StepPlan) -> None:
        self.rank.submit(plan)
        self._num_submitted += 1

    def _collect_of_last_stage(self) -> StepResult:
        """The last stage's result, on every stage; results of the other stages are empty."""
        assert self._link is not None, "load comes first"
        place = self.rank.place
        while self._num_submitted:
            self._num_submitted -= 1
            result = self.rank.collect()
            if place.is_last_stage:
                if place.replies:
                    self._link.tell(self._codec.encode(result))
                return result
        return self._codec.decode(self._link.told())

    def idle(self) -> bool:
        """Always False: ranks do idle work together, and no core knows when all of them are idle."""
        return False

    def agree(self, count: int) -> int:
        return count if self._link is None else self._link.least(count)
