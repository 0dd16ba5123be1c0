"""The executor of a world whose ranks Ray places: one actor per rank, in a placement group with one bundle per rank.

Ray only decides where the ranks run and starts an agent there (node_agent.py), which joins the engine core over TCP
like a manually started node; steps and results never pass through Ray.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.process.ray_engines import join_ray, load_ray, passed_on
from headrace.executor.placement.cluster_proof import KEY_VARIABLE
from headrace.executor.placement.multinode import MultiNodeExecutor
from headrace.ipc.failure import EngineStartError, OptionError
from headrace.ipc.struct_types import threadsafe

STRATEGY = "PACK"
"""Places ranks on as few hosts as have room for them."""


class RayExecutor(MultiNodeExecutor):
    """Owns the actors, their placement group and, if it had to start Ray, Ray itself."""

    def __init__(self, options: Options) -> None:
        """Connects to the Ray cluster of RAY_ADDRESS or of this host, or starts one. Raises OptionError without Ray."""
        ray = self._ray = load_ray("distributed_executor_backend")
        self._key = secrets.token_hex(16)
        self._actors: list[Any] = []
        self._group: Any = None
        self._owns_ray = join_ray(ray)
        address = ray.util.get_node_ip_address()
        here = msgspec.structs.replace(options, master_addr=address, master_port=0)
        size = options.tensor_parallel_size * options.pipeline_parallel_size
        try:
            self._open(here, size, range(size), self._key)
        except OptionError:
            self._leave_ray()
            raise

    def stop(self) -> None:
        super().stop()
        self._leave_ray()

    def _start_nodes(self) -> None:
        """Raises EngineStartError, with the numbers, when Ray has no room for the ranks in time."""
        from ray.util.placement_group import placement_group

        host, port = self.address
        each = {"GPU": 1.0} if self._wants_gpus() else {"CPU": 1.0}
        group = self._group = placement_group([each] * self._num_nodes, strategy=STRATEGY)
        if not group.wait(self._options.node_join_timeout):
            (kind,) = each
            there = self._ray.cluster_resources().get(kind, 0)
            raise EngineStartError(
                f"Ray did not place {self._num_nodes} ranks of one {kind} each within "
                f"{self._options.node_join_timeout:g} s (node_join_timeout); the cluster has {there:g} in all"
            )
        actor = self._ray.remote(num_cpus=0, max_restarts=0)(RankActor)
        for number in range(self._num_nodes):
            options = msgspec.structs.replace(self._options, node_rank=number, master_addr=host, master_port=port)
            placed = actor.options(
                **({"num_gpus": 1} if "GPU" in each else {"num_cpus": 1}),
                scheduling_strategy=self._strategy(group, number),
                runtime_env={"env_vars": _environment(self._key)},
            ).remote()
            placed.run.remote(msgspec.msgpack.encode(options))
            self._actors.append(placed)

    def _wants_gpus(self) -> bool:
        """Whether each rank needs a GPU from Ray, which hides all others from it."""
        device, there = self._options.device, self._ray.cluster_resources().get("GPU", 0)
        return device.startswith("cuda") or (device == "auto" and there >= self._num_nodes)

    def _strategy(self, group: Any, number: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)

    def _leave_ray(self) -> None:
        with contextlib.suppress(Exception):  # a Ray that died took actors and group with it
            for actor in self._actors:
                self._ray.kill(actor)
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
        self._actors, self._group = [], None
        if self._owns_ray:
            self._ray.shutdown()


class RankActor:
    """The agent of one rank, in a process that Ray started."""

    def run(self, options: bytes) -> None:
        """Runs until the engine core stops. Failures reach the core over the agent's own connection."""
        from headrace.executor.placement.node_agent import run_node
        from headrace.ipc.failure import HeadraceError

        with contextlib.suppress(HeadraceError):
            run_node(msgspec.msgpack.decode(options, type=threadsafe(Options)))


def _environment(key: str) -> dict[str, str]:
    """The environment variables of the core that an agent needs."""
    return {**passed_on(), KEY_VARIABLE: key}
