"""The executor of one rank that a launcher started, such as torchrun: every rank has an engine core of its own.

All ranks run the same program, so all cores get the same requests in the same order, and plan the same steps. What
may differ is when a request arrives: before each step the ranks agree on how many are taken (`agree`). The last stage
of a pipeline tells the cores of the other stages what each step came to; they run the steps after it meanwhile.

    torchrun --nproc-per-node 4 script.py    # in it: LLM(tensor_parallel_size=2, pipeline_parallel_size=2,
                                             #            distributed_executor_backend="external_launcher")
"""

from __future__ import annotations

import os

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.options.plan import MemoryReading, ModelDescription, Plan
from headrace.executor.cpu.rank import CpuRank
from headrace.executor.model_rank import own_kv
from headrace.executor.parallel.gloo import GlooCollectives, open_gloo
from headrace.executor.parallel.rank_place import RankPlace, World
from headrace.executor.placement.in_process import InProcessExecutor
from headrace.executor.placement.step_codec import StepCodec
from headrace.executor.rank import Report
from headrace.ipc.failure import OptionError
from headrace.ipc.step import StepPlan, StepResult

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ExternalExecutor(InProcessExecutor):
    """A rank of a world that the environment describes, as torchrun's does. Its ranks compute on CPUs."""

    rank: CpuRank

    def __init__(self, options: Options) -> None:
        """Raises OptionError when the environment does not say which rank this is, or disagrees with the options."""
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
        super().__init__(options, CpuRank(options, RankPlace.of_options(int(os.environ["RANK"]), options)))
        self.num_stages, self.max_steps_in_flight = pp_size, pp_size + 1
        self._link: GlooCollectives | None = None
        self._codec = StepCodec(StepResult)
        self._num_submitted = 0
        if pp_size > 1:
            self.submit, self.collect = self._submit_to_stage, self._collect_of_last_stage  # type: ignore[method-assign]

    def describe(self, report: Report) -> ModelDescription:
        described = super().describe(report)
        spec, own = self.rank.found.spec, self.rank.place
        # The largest share is every rank's, or the cores would make caches of different sizes and plan other steps.
        stages = [RankPlace.of(rank, own.tp_size, own.pp_size, own.layer_partition) for rank in range(own.world_size)]
        rows, elements = map(max, zip(*(own_kv(spec, place, described.cache_groups) for place in stages), strict=True))
        return msgspec.structs.replace(described, kv_rows_per_token=rows, kv_elements_per_token=elements)

    def load(self, plan: Plan, report: Report) -> MemoryReading:
        report("meet the other ranks")
        master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        # torchrun's agent has a store there already; without it, rank 0 opens one.
        opens_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and self.rank.place.rank == 0
        world = World.of(plan, self.rank.place.tp_size, self.rank.place.pp_size)
        if world.size > 1:
            self._link = open_gloo(master, world, self.rank.place.rank, opens_store=opens_store)
            self.rank.connect(self._link)
        reading = super().load(plan, report)
        available, most = self.agree(reading.available_bytes), -self.agree(-reading.activation_bytes)
        return msgspec.structs.replace(reading, available_bytes=available, activation_bytes=most)

    def _submit_to_stage(self, plan: StepPlan) -> None:
        self.rank.submit(plan)
        self._num_submitted += 1

    def _collect_of_last_stage(self) -> StepResult:
        """The last stage's result, on every stage; the others' own hold nothing."""
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

    def agree(self, count: int) -> int:
        return count if self._link is None else self._link.least(count)
