"""Builds an engine core: model, plan, memory, port, loop. The engine-core program runs one; so can a thread."""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from headrace import __version__
from headrace.core.coordinator.announcer import AnnouncedState, Announcer, entry_of, reachable
from headrace.core.engine.control import profile_folder
from headrace.core.engine.loop import Loop, scheduler_class
from headrace.core.engine.memory_port import MemoryPort
from headrace.core.engine.sessions import ExecutorFailed, Inbox, PeerStep, Sessions, StopRequest
from headrace.core.engine.zmq_port import ZmqPort
from headrace.core.options.engine_options import Options
from headrace.core.options.memory import cache_size, fit_cache, ledger
from headrace.core.options.plan import Facts, Plan
from headrace.core.options.resolve import check_stored_format, resolve, steps_in_flight
from headrace.core.process.child_output import LoadBar, startup_table
from headrace.core.schedule.features.chosen import attached_kinds
from headrace.core.structured_output.backend import Vocabulary
from headrace.core.structured_output.backends import Backends
from headrace.ipc.adapters import Adapters
from headrace.ipc.extras import how_to_install
from headrace.ipc.failure import Failure, HeadraceError, OptionError, let_interrupts_pass
from headrace.ipc.messages import TokenizerBundle, TokenizerInfo, Welcome
from headrace.ipc.plugins import import_users_module, load_plugin, plugins, warn_of_vllm_plugins
from headrace.ipc.process.gc_pauses import no_collections
from headrace.ipc.process.resources import check_library_fits, what_limits

if TYPE_CHECKING:
    from headrace.executor.placement.base import Executor

logger = logging.getLogger(__name__)
EXECUTORS = {
    "uni": "headrace.executor.placement.in_process:InProcessExecutor",
    "mp": "headrace.executor.placement.multiproc:MultiprocExecutor",
    "external_launcher": "headrace.executor.placement.torchrun:ExternalExecutor",
    "ray": "headrace.executor.placement.ray_cluster:RayExecutor",
}
SHARING_EXPERTS = {
    "uni": "headrace.executor.placement.shared_experts:SharedExpertsExecutor",
    "mp": "headrace.executor.placement.shared_experts:of_several_ranks",
}
"""The executors of engines that share experts with others."""
ON_SEVERAL_NODES = "headrace.executor.placement.multinode:MultiNodeExecutor"

OnPhase = Callable[[str, float], None]
"""Called with the name of the phase that begins and the seconds that the previous one took."""
OnRead = Callable[[int, int], None]
"""Called with the bytes of weights read so far and the total."""


class Phases:
    """Measures the phases of the start-up; each lasts until the next begins."""

    def __init__(self, on_phase: OnPhase, read: OnRead) -> None:
        self._on_phase = on_phase
        self.read = read
        """Called with the progress of reading weights; see Reporter in executor/rank.py."""
        self._name = ""
        self._began_s = time.monotonic()
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str) -> None:
        """Begins a phase and ends the previous one. An empty name only ends the last phase."""
        now_s = time.monotonic()
        took_s = now_s - self._began_s
        if self._name:
            self.seconds[self._name] = self.seconds.get(self._name, 0.0) + took_s
            logger.info("%s: %.2f s", self._name, took_s)
        self._name, self._began_s = name, now_s
        if name:
            self._on_phase(name, took_s)


class EngineCore:
    """Serves one model through one port. Call `start` and then `run` on one thread; `stop` from any other."""

    def __init__(self, options: Options, port: ZmqPort | MemoryPort, executor: Executor | None = None) -> None:
        self._options, self.port = options, port
        self._executor = executor
        self._inbox = Inbox(int(options.max_client_inbox_mb * 1e6))
        self._loop: Loop | None = None
        self._announcer: Announcer | None = None
        self.plan: Plan | None = None
        self.facts: Facts | None = None
        self.startup_s: dict[str, float] = {}
        self.on_weights_path: Callable[[str], None] = lambda path: None
        """Set before `start`. Called with the path when a client has had the weights read again from there."""
        self.on_tokenizer: Callable[[TokenizerInfo], None] = lambda info: None
        """Set before `start`. Called on another thread once the tokenizer is known, while weights are read."""
        self.on_first_idle: Callable[[], None] = lambda: None
        """Set before `run`, which calls it when no request has come for a second."""

    def start(
        self,
        on_phase: OnPhase = lambda name, seconds: None,
        on_read: OnRead = lambda done_bytes, total_bytes: None,
        weights_path: str = "",
    ) -> None:
        """Loads the model and begins to answer clients. Raises OptionError or ModelError with the cause.

        weights_path: where to read weights after those of the model, which an engine before this one used.
        """
        phases = Phases(on_phase, on_read)
        phases("import")
        for check in (scheduler_class, profile_folder, check_stored_format):  # fail before a model is loaded
            check(self._options)
        with no_collections():  # torch is imported
            executor = self._executor = self._executor or load_executor(self._options)
        steps_in_flight(self._options, executor)
        description = executor.describe(phases)
        plan = resolve(self._options, description)
        plan = msgspec.structs.replace(plan, attachments=attached_kinds(plan))
        self.plan = plan
        with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as pool:
            tokenizer = pool.submit(self._tokenizer, executor)  # converting it may take as long as loading the weights
            reading = executor.load(plan, phases)
            facts = self.facts = fit_cache(plan, reading)
            phases("allocate")
            executor.allocate(facts.num_blocks, facts.max_model_len)
            phases("tokenizer")
            bundle, info = tokenizer.result()
        backends = _grammar_backends(plan, bundle)
        phases("")
        self.startup_s, of_ranks = phases.seconds, executor.ranks_startup_s
        facts = self.facts = msgspec.structs.replace(facts, startup_s=self.startup_s, ranks_startup_s=of_ranks)
        if of_ranks:
            logger.info("start-up\n%s", startup_table(self.startup_s, of_ranks))
        for decision in plan.decisions:
            logger.info("%s = %s: %s", decision.name, decision.value, decision.reason)
        logger.info("memory\n%s", ledger(facts, plan))
        for warning in facts.warnings:
            logger.warning("%s", warning)
        self._loop = Loop(plan, facts, executor, self.port, self._inbox)
        is_backend_named = bool(self._options.structured_outputs_config.get("backend"))
        self._loop.use_grammars(backends, prepares=is_backend_named)
        executor.watch(lambda failure: self._inbox.put((0, ExecutorFailed(failure))))
        executor.watch_leaving(self._on_leaving)
        executor.on_call(lambda: self._inbox.put((0, PeerStep())))
        self.welcome = self._welcome(plan, facts, info)
        self._sessions = Sessions(self._inbox, self.welcome, bundle)
        self._loop.on_weights_changed(self._on_weights, self.on_weights_path)
        if self._loop.adapters is not None:
            self._loop.adapters.on_change = self._on_adapters
        if weights_path:
            self._loop.reload_weights(weights_path)
        self.port.serve(self._sessions)

    def announce(self, coordinators: Sequence[str], on_ready: Callable[[], None] = lambda: None) -> None:
        """Announces the engine to these coordinators until `close`. Raises AddressError and KeyFileError.

        on_ready: called first, also without coordinators, so that a parent knows of an engine before its clients do.
        """
        if not coordinators or not isinstance(self.port, ZmqPort):
            on_ready()
            return
        address = reachable(self.port.address, coordinators[0])
        entry = entry_of(self.welcome, address, self._options.data_parallel_rank)
        announcer = Announcer(entry, coordinators, self._state)
        on_ready()
        announcer.start()
        assert self._loop is not None, "an engine announces itself once it has started"
        self._announcer, self._loop.on_stopping = announcer, announcer.hurry

    def _state(self) -> AnnouncedState:
        assert self._loop is not None, "an engine announces itself once it has started"
        return AnnouncedState(self._loop.load, is_draining=self._loop.is_stopping)

    def run(self) -> None:
        """Serves until `stop`. Raises the error that ended the executor."""
        assert self._loop is not None, "run before start"
        self._loop.on_first_idle = self.on_first_idle
        self._loop.run()

    def stop(self, deadline_s: float = 0.0) -> None:
        """Lets running requests finish within `deadline_s`, then `run` returns. A second call may shorten it."""
        self._inbox.put((0, StopRequest(deadline_s)))

    def _on_leaving(self, name: str) -> None:
        """Part of the executor was asked to end, which ends this engine: running requests get the time of a drain."""
        logger.warning("%s was asked to end: this engine finishes its requests and ends", name)
        self.stop(self._options.shutdown_timeout)

    def close(self) -> None:
        """Frees the device and the port. Call it after `run` has returned, or instead of `run`."""
        if self._announcer is not None:
            self._announcer.close()
        if self._executor is not None:
            self._executor.stop()
        self.port.close()

    def _tokenizer(self, executor: Executor) -> tuple[TokenizerBundle | None, TokenizerInfo | None]:
        bundle = executor.tokenizer()
        if bundle is None:
            return None, None
        encoded = msgspec.msgpack.encode(bundle)
        info = TokenizerInfo(content_hash=hashlib.sha256(encoded).hexdigest(), size_bytes=len(encoded))
        self.on_tokenizer(info)
        return bundle, info

    def _welcome(self, plan: Plan, facts: Facts, info: TokenizerInfo | None) -> Welcome:
        kv_cache_tokens, kv_cache_requests = cache_size(facts, plan)
        return Welcome(
            version=__version__,
            pid=os.getpid(),
            model=plan.model.name,
            served_model_names=plan.served_model_names,
            max_model_len=facts.max_model_len,
            vocab_size=plan.model.vocab_size,
            dtype=plan.dtype,
            block_size=plan.block_size,
            num_blocks=facts.num_blocks,
            max_num_seqs=plan.max_num_seqs,
            max_waiting_requests=plan.options.max_waiting_requests,
            max_logprobs=plan.max_logprobs,
            eos_token_ids=plan.model.eos_token_ids,
            tokenizer=info,
            generation_defaults=plan.model.generation_defaults,
            most_new_tokens=plan.most_new_tokens,
            startup_s=self.startup_s,
            stream_interval=plan.options.stream_interval,
            reasoning_parser=plan.reasoning.reasoning_parser,
            reasoning_begin=plan.reasoning.reasoning_start_str,
            reasoning_end=plan.reasoning.reasoning_end_str,
            grammars_hold_in_reasoning=plan.structured_outputs.enable_in_reasoning,
            enable_prefix_caching=plan.enable_prefix_caching,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            kv_cache_tokens=kv_cache_tokens,
            kv_cache_requests=kv_cache_requests,
            generates=plan.model.generates,
            pooling=plan.model.pooling,
            reads_priority=plan.options.scheduling_policy != "fcfs" or bool(plan.options.scheduler_cls),
            row_inputs=plan.row_inputs,
            input_width=plan.model.input_width,
            model_version=plan.model_version(plan.model.weights),
            max_loras=0 if plan.adapters is None else plan.adapters.max_loras,
        )

    def _on_weights(self, weights: str) -> None:
        """Sends the model version of reloaded weights to connected clients and, in the Welcome, to later ones."""
        assert self.plan is not None, "weights are read again once the engine has started"
        self._welcome_with(model_version=self.plan.model_version(weights))
        self.port.send_all(self.welcome)

    def _on_adapters(self, adapters: Adapters) -> None:
        """Tells connected clients and, in the Welcome, later ones which adapters there are."""
        self._welcome_with(adapters=adapters.adapters)
        self.port.send_all(adapters)

    def _welcome_with(self, **changes: Any) -> None:
        self.welcome = self._sessions.welcome = msgspec.structs.replace(self.welcome, **changes)


def _grammar_backends(plan: Plan, bundle: TokenizerBundle | None) -> Backends:
    tokenizer_json = bytes(bundle.tokenizer_json) if bundle is not None else b""
    vocabulary = Vocabulary(tokenizer_json, plan.model.vocab_size, plan.model.eos_token_ids)
    return Backends(plan.structured_outputs, vocabulary)


def load_executor(options: Options) -> Executor:
    """The executor that the options name. It is imported by name because the core itself never imports torch.

    Raises OptionError if the name is none of EXECUTORS, no plugin's and no importable module:Class, and for options
    that the executor cannot serve.
    """
    warn_of_vllm_plugins()
    world_size = options.tensor_parallel_size * options.pipeline_parallel_size
    backend = options.distributed_executor_backend
    if backend == "auto":
        backend = "mp" if world_size > 1 else "uni"
    check_node_rank(options)
    if options.nnodes > 1:
        _check_nodes(options, backend)
    if backend == "uni":
        _check_uni(options, world_size)
    if options.data_parallel_backend == "ray":
        raise OptionError(
            "data_parallel_backend=ray is for what starts engines, LLM, AsyncLLM and headrace serve, not for an engine"
        )
    path = EXECUTORS.get(backend, backend)
    if options.nnodes > 1:
        path = ON_SEVERAL_NODES
    elif options.shares_experts:
        path = SHARING_EXPERTS.get(backend, path)
    module, colon, name = path.partition(":")
    if not colon:
        entry = plugins().get(backend)
        if entry is None:
            raise OptionError(
                f"distributed_executor_backend is {backend!r}; it must be uni, mp, ray, external_launcher, a plugin's "
                f"name ({', '.join(plugins()) or 'none is installed'}) or module:Class"
            )
        found: Executor = load_plugin(entry)(options)
        return found
    if backend in EXECUTORS:
        check_library_fits("torch")
    try:
        if backend in EXECUTORS and world_size > 1:  # fail before any worker starts
            importlib.import_module("headrace.executor.parallel.divisibility").check_world(options)
        executor: Executor = getattr(import_users_module(module), name)(options)
    except (ImportError, AttributeError) as error:
        if limit := what_limits(error):
            raise limit from error
        hint = f"what runs models: {how_to_install('engine')}" if backend in EXECUTORS else ""
        raise OptionError(f"distributed_executor_backend {backend!r} cannot be loaded: {error}", hint=hint) from error
    return executor


def check_node_rank(options: Options) -> None:
    """Raises OptionError for a node_rank without nnodes."""
    if options.node_rank and options.nnodes == 1:
        raise OptionError(f"node_rank={options.node_rank} needs nnodes above 1: set nnodes, or leave node_rank out")


def _check_nodes(options: Options, backend: str) -> None:
    if backend != "mp":
        raise OptionError(f"nnodes={options.nnodes} needs distributed_executor_backend=mp, not {backend}")
    if options.node_rank:
        raise OptionError(
            f"node_rank={options.node_rank} is a host that computes for the engine of node_rank 0 and accepts no "
            "requests: start it with engine-core, and the server or LLM where node_rank is 0"
        )


def _check_uni(options: Options, world_size: int) -> None:
    if world_size > 1:
        raise OptionError(
            f"tensor_parallel_size={options.tensor_parallel_size} times pipeline_parallel_size="
            f"{options.pipeline_parallel_size} makes {world_size} ranks, and distributed_executor_backend=uni runs "
            "one; use mp, or leave it out"
        )
    for name, why in (("worker_cls", "there are no workers"), ("step_timeout", "its steps cannot be interrupted")):
        if getattr(options, name) != getattr(Options(), name):
            raise OptionError(
                f"{name}={getattr(options, name)} cannot apply: the model runs in the engine core's own process and "
                f"{why}; ask for distributed_executor_backend=mp, or leave it out"
            )


def _check_in_process(options: Options, executor: Executor | None) -> None:
    world_size = options.tensor_parallel_size * options.pipeline_parallel_size
    loads_here = executor is not None or (world_size == 1 and options.distributed_executor_backend in ("auto", "uni"))
    if loads_here and options.startup_timeout != Options().startup_timeout:
        raise OptionError(
            f"startup_timeout={options.startup_timeout:g} cannot apply: the model is loaded on the caller's own "
            "thread, which cannot be interrupted; leave out startup_timeout or in_process"
        )


class EngineThread:
    """An engine core on a thread of this process, reached through its MemoryPort. Has the methods of a child process
    (`Child`)."""

    def __init__(self, options: Options, executor: Executor | None = None) -> None:
        """Returns once the engine answers. Raises the error with which its start failed."""
        _check_in_process(options, executor)
        self.port = MemoryPort()
        self._on_exit: list[Callable[[Failure], None]] = []
        self._core = EngineCore(options, self.port, executor)
        bar = LoadBar(options.use_tqdm_on_load)
        try:
            self._core.start(lambda name, seconds: bar.close(is_done=True), bar.read)
        except BaseException:
            bar.close(is_done=False)
            self._core.close()
            raise
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()

    def on_exit(self, callback: Callable[[Failure], None]) -> None:
        """Registers a callback for an unexpected end of the engine. It is called on the engine's thread."""
        self._on_exit.append(callback)

    def stop(self, deadline_s: float = 0.0) -> None:
        """Lets running requests finish within `deadline_s`, then frees everything."""
        self._core.stop(deadline_s)
        self._thread.join(deadline_s + 5.0)
        self._core.close()

    def _run(self) -> None:
        try:
            self._core.run()
        except BaseException as error:
            let_interrupts_pass(error)
            logger.error("the engine core ended: %s", error, exc_info=not isinstance(error, HeadraceError))
            for callback in self._on_exit:
                callback(Failure.of(error, process="engine-core", phase="step"))
