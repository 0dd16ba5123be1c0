"""Engine cores placed by Ray, one actor each in a placement group with one bundle per engine; and their coordinators.

    RayFleet.start(rank) -> RayEngine -- ready, ended, stop --> EngineActor, where Ray placed it
       |                                                          | starts, as any parent does
       |                    clients <====== tcp://, keys ======> engine-core
       |                                                          | announces itself
       +------------------> RayCoordinator --- address, ended --> CoordinatorActor, on an engine's host
                            frontends of other hosts <== tcp:// ==+

One coordinator runs on the first host, and if engines are on several hosts, another on a second one. The frontend that
started the engines does not need them: they are for other frontends (`headrace serve --coordinator`).

Ray decides where engines run and notices lost hosts; requests and tokens do not pass through it. `RayEngine` has the
interface of `Child`. Engines listen on their host's own address, with keys that are created for the fleet unless the
user has named some.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.coordinator.program import Coordinator
from headrace.core.options.engine_options import Options
from headrace.core.process.child import START_GRACE_S, OnExit, OnProgress, OnTokenizer, start_engine
from headrace.ipc.extras import how_to_install
from headrace.ipc.failure import EngineStartError, Failure, HeadraceError, OptionError
from headrace.ipc.messages import Ready
from headrace.ipc.process.own_folder import OwnFolder
from headrace.ipc.process.private_files import make_existing_private
from headrace.ipc.process.program import FOR_PROGRAMS
from headrace.ipc.struct_types import threadsafe
from headrace.ipc.transport.hosts import bare_host
from headrace.ipc.transport.keys import VARIABLE, key_file, make_key_file

PASSED_ON, PASSED_ON_STARTS = ("PYTHONPATH", "HEADRACE_LOG_LEVEL"), ("NCCL_", "TORCH_NCCL_", "GLOO_")
"""Environment variables (by name, by prefix) that are passed to the actors, including NCCL's settings."""
RAYS_TOKEN = "~/.ray/auth_token"
"""Whoever reads it runs code in this user's Ray clusters, and Ray writes it readable by all."""
STRATEGY = "SPREAD"
"""Spreads engines over as many hosts as possible, so that the loss of a host ends few of them."""
STOP_GRACE_S = WEIGHTS_TOLD_S = 5.0
CONNECT_S = 10.0
MOST_COORDINATORS = 2
COORDINATOR_STARTS_WITHIN_S, COORDINATOR_PAUSE_S = 60.0, 0.5
logger = logging.getLogger(__name__)


def load_ray(option: str) -> Any:
    """Imports the ray package. Raises OptionError, naming the option that needs it, if it is missing."""
    try:
        import ray
    except ImportError as error:
        raise OptionError(f"{option}=ray needs the package ray ({error}): {how_to_install('ray')}") from error
    return ray


def join_ray(ray: Any) -> bool:
    """Connects to the Ray cluster of RAY_ADDRESS or of this host, or starts a local one. Returns whether this process
    has to shut the connection down.

    Raises EngineStartError if Ray can neither be joined nor started.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _check_address(os.environ.get("RAY_ADDRESS", ""))
    try:
        ray.init(include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False, configure_logging=False)
    except Exception as error:  # Ray raises many types
        reason = str(error).strip().partition("\n")[0]
        raise EngineStartError(f"Ray can neither be joined nor started: {type(error).__name__}: {reason}") from error
    make_existing_private([Path(os.path.expanduser(RAYS_TOKEN))])
    return True


def _check_address(address: str) -> None:
    """Raises EngineStartError if nothing listens at a HOST:PORT address: Ray would try silently for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "://" in address:
        return  # no address, or another form (auto, local, a client's), which Ray checks itself
    try:
        socket.create_connection((bare_host(host), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise EngineStartError(f"there is no Ray at {address}, which RAY_ADDRESS names: {error}") from error


def passed_on() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name in PASSED_ON or name.startswith(PASSED_ON_STARTS)}
    return {**own, **FOR_PROGRAMS}


class RayFleet:
    """The placement group of data_parallel_size engines. It is removed when the last engine is stopped."""

    def __init__(self, options: Options) -> None:
        """Raises OptionError if ray is missing or for options that its engines lack; EngineStartError if the cluster
        has too few resources."""
        if options.data_parallel_size == 1:
            raise OptionError("data_parallel_backend=ray places several engines: it needs data_parallel_size=2 or more")
        if options.shares_experts:
            raise OptionError("engines that share experts (enable_expert_parallel) must be of one machine, not Ray's")
        self._ray = load_ray("data_parallel_backend")
        self._options = options
        self._owns_ray = join_ray(self._ray)
        self._running: set[RayEngine] = set()
        self._lock = threading.Lock()
        self._folder: OwnFolder | None = None
        self.keys = key_file() or self._new_keys()
        self._group = self._place()
        self._bundles = self._by_host()
        self._coordinators: list[RayCoordinator] = []
        try:
            nodes = {node: bundle for bundle, node in reversed(self._bundles)}
            for bundle in sorted(nodes.values())[:MOST_COORDINATORS]:
                self._coordinators.append(RayCoordinator(self._ray, self, bundle))
        except BaseException:
            self._end()
            raise
        logger.info("engines announce themselves at %s", " and ".join(self.coordinators))

    @property
    def coordinators(self) -> tuple[str, ...]:
        """Addresses of the coordinators."""
        return tuple(each.address for each in self._coordinators)

    def _new_keys(self) -> Path:
        self._folder = OwnFolder("keys")
        path = self._folder.path / "deployment.keys"
        make_key_file(path)
        return path

    def _place(self) -> Any:
        from ray.util.placement_group import placement_group

        options = self._options
        size, world = options.data_parallel_size, options.tensor_parallel_size * options.pipeline_parallel_size
        gpus = self._ray.cluster_resources().get("GPU", 0)
        wants_gpus = options.device.startswith("cuda") or (options.device == "auto" and gpus >= size * world)
        kind = "GPU" if wants_gpus else "CPU"
        self._share = {"num_gpus" if wants_gpus else "num_cpus": world}
        group = placement_group([{kind: float(world)}] * size, strategy=STRATEGY)
        if not group.wait(options.node_join_timeout):
            there = self._ray.cluster_resources().get(kind, 0)
            self._ray.util.remove_placement_group(group)
            if self._owns_ray:
                self._ray.shutdown()
            raise EngineStartError(
                f"Ray did not place {size} engines of {world} {kind} each within {options.node_join_timeout:g} s "
                f"(node_join_timeout); the cluster has {there:g} in all"
            )
        return group

    def _by_host(self) -> list[tuple[int, str]]:
        """The bundle and the node of each rank. Ranks of a node are consecutive, so that they divide its cores."""
        from ray.util.placement_group import placement_group_table

        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        return sorted(nodes.items(), key=lambda each: (each[1], each[0]))

    def _nodes(self) -> dict[int, str]:
        return dict(self._by_host())

    def actor(self, kind: type, bundle: int, *args: Any, **share: float) -> Any:
        """Starts an actor of a class in the bundle, with this share of its resources. args: constructor arguments after
        the first, which is the keys."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
        )
        actor = self._ray.remote(max_restarts=0, max_concurrency=4)(kind).options(
            **{"num_cpus": 0, **share}, scheduling_strategy=strategy, runtime_env={"env_vars": passed_on()}
        )
        return actor.remote(self.keys.read_text(encoding="utf-8"), *args)

    def start(self, rank: int, weights_path: str = "") -> RayEngine:
        nodes, bundle = self._nodes(), self._bundles[rank][0]
        # The engines of one host divide its cores and its memory.
        options = msgspec.structs.replace(
            self._options,
            data_parallel_size_local=list(nodes.values()).count(nodes[bundle]),
            data_parallel_rank=rank,
            data_parallel_backend="mp",
            coordinator=self.coordinators,
        )
        handle = self.actor(EngineActor, bundle, msgspec.msgpack.encode(options), weights_path, **self._share)
        engine = RayEngine(self._ray, handle, self, rank)
        with self._lock:
            self._running.add(engine)
        return engine

    def running(self) -> list[RayEngine]:
        with self._lock:
            return list(self._running)

    def ended(self, engine: RayEngine, *, for_good: bool) -> None:
        """Notes the end of an engine. With for_good, and after the last one, removes the placement group, and shuts Ray
        down if the fleet connected to it."""
        with self._lock:
            self._running.discard(engine)
            if self._running or not for_good:
                return
        self._end()

    def _end(self) -> None:
        for coordinator in self._coordinators:
            coordinator.stop()
        with contextlib.suppress(Exception):  # if Ray has died, the group is gone too
            self._ray.util.remove_placement_group(self._group)
        if self._owns_ray:
            self._ray.shutdown()
        if self._folder is not None:
            self._folder.close()


class RayEngine:
    """One engine that Ray placed, with the interface of a `Child`."""

    def __init__(self, ray: Any, actor: Any, fleet: RayFleet, rank: int) -> None:
        self._ray, self._actor, self.fleet, self._rank = ray, actor, fleet, rank
        self.keys: Path | None = fleet.keys
        self.ready: Ready | None = None
        self.pid = 0
        """The engine's process id on its own host."""
        self._failure: Failure | None = None
        self._on_exit: list[OnExit] = []
        self._is_stopping = False
        self._ended = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name=f"ray-engine-{rank}", daemon=True).start()

    def again(self, weights_path: str = "") -> RayEngine:
        """Starts a replacement of this engine, with weights of this path; on another host if this one's is gone."""
        return self.fleet.start(self._rank, weights_path)

    @property
    def weights_path(self) -> str:
        """Where its weights come from, or, if its host is gone, those of the fleet's other engines."""
        for engine in (self, *self.fleet.running()):
            with contextlib.suppress(Exception):  # Ray raises many types
                return str(self._ray.get(engine._actor.weights_path.remote(), timeout=WEIGHTS_TOLD_S))
        return ""

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    @property
    def runs(self) -> bool:
        """Same as `alive`: Ray tells of an end at once."""
        return self.alive

    def wait_ready(
        self,
        timeout_s: float | None = None,
        on_progress: OnProgress | None = None,
        on_tokenizer: OnTokenizer | None = None,
    ) -> Ready:
        """Waits for the engine's Ready. Raises EngineStartError with the cause if it fails or is not ready in time."""
        limit_s = self.fleet._options.startup_timeout + 2 * START_GRACE_S if timeout_s is None else timeout_s
        try:
            ready, failure, self.pid = self._ray.get(self._actor.ready.remote(), timeout=limit_s)
        except Exception as error:  # Ray raises many types
            raise EngineStartError(failure=self._lost(error)) from error
        if failure is not None:
            raise EngineStartError.from_failure(msgspec.msgpack.decode(failure, type=threadsafe(Failure)))
        self.ready = msgspec.msgpack.decode(ready, type=threadsafe(Ready))
        return self.ready

    def on_exit(self, callback: OnExit) -> None:
        """Registers a callback for an unexpected end of the engine. It is called once: on the watching thread, or at
        once if the engine has already ended."""
        with self._lock:
            if self.alive:
                self._on_exit.append(callback)
                return
        if self._failure is not None and not self._is_stopping:
            callback(self._failure)

    def ask_to_stop(self, deadline_s: float) -> Any:
        """Asks the engine to finish its requests within `deadline_s` and exit. Returns Ray's reference to the call."""
        self._is_stopping = True
        return self._actor.stop.remote(deadline_s)

    def stop(self, deadline_s: float = 5.0) -> None:
        """Lets requests finish within `deadline_s`, then ends the engine."""
        with contextlib.suppress(Exception):  # it may be gone
            self._ray.get(self.ask_to_stop(deadline_s), timeout=deadline_s + STOP_GRACE_S)
        self._end(for_good=True)

    def kill(self) -> None:
        self._is_stopping = True
        self._end(for_good=True)

    def make_way(self) -> None:
        """Ends the engine so that another can replace it. Unlike `kill` it keeps the placement group, which the
        replacement needs, even if no other engine is left."""
        self._is_stopping = True
        self._end(for_good=False)

    def left(self) -> None:
        """Notes that the engine has ended as it was asked to, so that nobody will stop or replace it. Does not wait."""
        self._is_stopping = True
        threading.Thread(target=self._end, kwargs={"for_good": True}, name=f"ray-engine-{self._rank}-left").start()

    def _end(self, *, for_good: bool) -> None:
        with contextlib.suppress(Exception):
            self._ray.kill(self._actor)
        self._ended.wait(STOP_GRACE_S)
        self.fleet.ended(self, for_good=for_good)

    def _watch(self) -> None:
        try:
            failure = msgspec.msgpack.decode(self._ray.get(self._actor.ended.remote()), type=threadsafe(Failure))
        except Exception as error:  # Ray raises many types
            failure = self._lost(error)
        with self._lock:
            self._failure = failure
            self._ended.set()
            callbacks = list(self._on_exit)
        if not self._is_stopping:
            for callback in callbacks:
                callback(failure)

    def _lost(self, error: Exception) -> Failure:
        reason = str(error).strip().partition("\n")[0]
        return Failure(
            message=f"engine {self._rank}, which Ray placed, is gone: {reason}",
            type=type(error).__name__,
            process="engine-core",
        )


class RayCoordinator:
    """A coordinator that Ray placed. When it dies, another is started, at the same address if on the same host."""

    def __init__(self, ray: Any, fleet: RayFleet, bundle: int) -> None:
        """Raises EngineStartError if it does not start."""
        self._ray, self._fleet, self._bundle = ray, fleet, bundle
        self._is_stopping = threading.Event()
        self._actor: Any = None
        self.address = ""
        try:
            self._begin()
        except Exception as error:  # Ray raises many types
            raise EngineStartError(f"the coordinator that Ray placed did not start: {error}") from error
        threading.Thread(target=self._watch, name=f"ray-coordinator-{bundle}", daemon=True).start()

    def stop(self) -> None:
        self._is_stopping.set()
        with contextlib.suppress(Exception):  # it may be gone
            self._ray.kill(self._actor)

    def _begin(self) -> None:
        self._actor = self._fleet.actor(CoordinatorActor, self._bundle, self.address)
        self.address = self._ray.get(self._actor.address.remote(), timeout=COORDINATOR_STARTS_WITHIN_S)

    def _watch(self) -> None:
        while True:
            try:
                reason = self._ray.get(self._actor.ended.remote())
            except Exception as error:  # Ray raises many types
                reason = str(error)
            if self._is_stopping.is_set():
                return
            first_line = reason.strip().partition("\n")[0]
            logger.warning("the coordinator at %s is gone, and another is started: %s", self.address, first_line)
            if not self._replace():
                return

    def _replace(self) -> bool:
        """Retries until a new coordinator runs. Returns False if `stop` was called meanwhile."""
        before = self.address
        while not self._is_stopping.wait(COORDINATOR_PAUSE_S):
            try:
                self._begin()
            except Exception as error:  # Ray raises many types
                logger.warning("a coordinator did not start: %s", error)
                continue
            moved = "" if self.address == before else ", where engines announce themselves that start from now on"
            logger.warning("there is a coordinator at %s again%s", self.address, moved)
            return True
        return False


class CoordinatorActor:
    """A Ray actor: runs a coordinator on a thread of its process."""

    def __init__(self, keys: str, address: str) -> None:
        """keys: content of the key file. address: its predecessor's, which it reuses if that was on the same host."""
        self._folder = use_keys(keys)
        is_here = address.startswith(f"{own_host()}:")
        self._coordinator = Coordinator(address if is_here else f"{own_host()}:*")
        self._reason = "it stopped"
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    def address(self) -> str:
        return self._coordinator.address

    def ended(self) -> str:
        """Waits for the coordinator's end and returns the reason."""
        self._thread.join()
        return self._reason

    def _run(self) -> None:
        try:
            self._coordinator.run()
        except Exception as error:  # reported to the frontend by `ended`
            self._reason = f"{type(error).__name__}: {error}"
        finally:
            self._coordinator.close()


def use_keys(keys: str) -> OwnFolder:
    """Makes this process and its children use these keys. The key file exists as long as the returned folder."""
    folder = OwnFolder("keys")
    path = folder.path / "deployment.keys"
    path.touch(mode=0o600)
    path.write_text(keys, encoding="utf-8")
    os.environ[VARIABLE] = str(path)
    return folder


def own_host() -> str:
    """The tcp:// address, without a port, at which other nodes of the Ray cluster reach this host."""
    import ray

    host = ray.util.get_node_ip_address()
    return f"tcp://[{host}]" if ":" in host else f"tcp://{host}"


class EngineActor:
    """A Ray actor: the parent process of one engine-core."""

    def __init__(self, keys: str, options: bytes, weights_path: str) -> None:
        """keys: content of the key file. options: `Options` in msgpack."""
        self._folder = use_keys(keys)
        self._failure: Failure | None = None
        self._has_ended = threading.Event()
        self._child = start_engine(
            msgspec.msgpack.decode(options, type=threadsafe(Options)), f"{own_host()}:*", weights_path
        )
        self._child.on_exit(self._end)

    def ready(self) -> tuple[bytes | None, bytes | None, int]:
        """Waits until the engine is ready. Returns its Ready or its Failure, in msgpack, and its process id."""
        try:
            return msgspec.msgpack.encode(self._child.wait_ready()), None, self._child.pid
        except HeadraceError as error:
            failure = Failure.of(error, process="engine-core", phase="start")
            return None, msgspec.msgpack.encode(failure), self._child.pid

    def ended(self) -> bytes:
        """Waits for an unexpected end of the engine and returns its Failure in msgpack."""
        self._has_ended.wait()
        return msgspec.msgpack.encode(self._failure)

    def weights_path(self) -> str:
        return self._child.weights_path

    def stop(self, deadline_s: float) -> None:
        self._child.stop(deadline_s)

    def _end(self, failure: Failure) -> None:
        self._failure = failure
        self._has_ended.set()
