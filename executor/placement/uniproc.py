"""The executor of a world of one: the model runs in the core's own process, on the CPU."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from headrace.core.options.cache_groups import ONE_GROUP, CacheGroup
from headrace.core.options.engine_options import Options
from headrace.core.options.plan import MemoryReading, ModelDescription, Plan
from headrace.executor.checkpoints.checkpoint import Checkpoint, open_checkpoint
from headrace.executor.checkpoints.new_weights import open_again
from headrace.executor.checkpoints.weights import WeightSource
from headrace.executor.cpu.decoder import CpuDecoder, CpuRank, why_not
from headrace.executor.cpu.host import HostMemory, host_memory, usable_cores
from headrace.executor.cpu.program import StepLimits
from headrace.executor.cpu.runner import ModelRunner
from headrace.executor.cpu.weights import Blocks
from headrace.executor.gpu.device import check_no_gpu_options, choose_device
from headrace.executor.models import kv_cache
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.sizes import activation_bytes, weight_elements
from headrace.executor.parallel.divisibility import check_shares
from headrace.executor.parallel.rank_place import SINGLE, Collectives, RankPlace
from headrace.executor.parallel.rendezvous import Rendezvous
from headrace.executor.parallel.stages import LastStageRunner, StageRunner, make_runner
from headrace.executor.placement.base import Executor, Report, reader_of
from headrace.executor.placement.extension import Extension
from headrace.executor.placement.profiling import WorkerProfile
from headrace.executor.placement.step_thread import StepThread
from headrace.ipc.control import (
    ASLEEP,
    CallExtension,
    DescribeEngine,
    PrepareWeights,
    Sleep,
    StartProfile,
    StopProfile,
    UseWeights,
    WakeUp,
    WorkerAnswer,
    WorkerCommand,
)
from headrace.ipc.failure import ModelError, OptionError
from headrace.ipc.messages import TokenizerBundle
from headrace.ipc.step import StepPlan, StepResult
from headrace.ipc.wait import BoundedCalls
from headrace.kernels.cpu import build

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BLOCK_HEAD_BYTES = {8: 2, 4: 4}
"""Of a block of 32 quantised weights: its scale, and the minimum of 4-bit ones."""
CACHE_DTYPES = {**DTYPES, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


class SleepingModel:
    """In the place of a model whose weights have been dropped: no step comes before the core has woken them."""

    choose = None

    def step(self, *_: Any) -> NoReturn:
        raise RuntimeError("a step came while the weights sleep")


class UniprocExecutor(Executor):
    """Owns the checkpoint until the weights are loaded, then the model, its cache and the runner.

    Steps run in `collect`, as there is no one else to run them meanwhile; with async_scheduling, on a thread. That is
    off by default: the kernels keep all cores busy, and what is planned meanwhile slows them by as much as it saves.

    With a place it is one rank of several, each of which is given every plan; see `executor.place`.
    """

    max_steps_in_flight = 2

    def __init__(self, options: Options, place: RankPlace | None = None) -> None:
        self._options, self._place = options, place or RankPlace.of_options(0, options)
        self._device = torch.device("cpu")
        self._checkpoint: Checkpoint | None = None
        self._spec: ArchSpec | None = None
        self._plan: Plan | None = None
        self._model: Decoder | CpuDecoder | None = None
        self._runner: ModelRunner | StageRunner | LastStageRunner | None = None
        self._submitted: deque[StepPlan] = deque()
        self._thread: StepThread | None = None
        self._cache: Any = None
        self._prepared: Decoder | CpuDecoder | None = None  # weights to take the old ones' place
        self._compiling = threading.Thread()
        self._profile = WorkerProfile(options.profiler_config.get("torch_profiler_dir"), self._place.rank)
        self._bounded = BoundedCalls(options.control_timeout)
        self._extension = Extension(options.worker_extension_cls, self)

    def describe(self, report: Report) -> ModelDescription:
        # Where the kernels must be compiled first, that goes on while the model is found, fetched and described.
        self._compiling = threading.Thread(target=build.load, name="compile kernels")
        self._compiling.start()
        return self._find_model(report)

    def _find_model(self, report: Report) -> ModelDescription:
        report("find model")
        checkpoint = self._checkpoint = replace(open_checkpoint(self._options), on_read=reader_of(report))
        spec = self._spec = spec_from_config(checkpoint.config)
        check_shares(spec, self._place)
        groups = kv_cache.cache_groups(spec, self._options.max_model_len)
        if self._options.disable_hybrid_kv_cache_manager:
            groups = ONE_GROUP
        kv_rows = own_kv_rows(spec, self._place, groups)
        return ModelDescription(
            name=checkpoint.name,
            architecture=spec.architecture,
            checkpoint_dtype=checkpoint.dtype_name,
            max_model_len=spec.max_positions,
            vocab_size=spec.vocab_size,
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            kv_elements_per_token=kv_rows * spec.head_dim,
            kv_rows_per_token=kv_rows,
            cache_groups=groups,
            eos_token_ids=tuple(checkpoint.eos_token_ids),
            generation_defaults=dict(checkpoint.generation_config),
            why_no_prefix_caching=_why_no_prefix_caching(spec),
        )

    def join(self, meeting: Rendezvous) -> None:
        """Connects to the other ranks as this executor's device needs it; otherwise as `connect`."""
        self.connect(meeting.link())

    def connect(self, collectives: Collectives) -> None:
        """How this rank talks to the others; between `describe` and `load`, where there are others."""
        self._place = self._place.with_collectives(collectives)

    def tokenizer(self) -> TokenizerBundle | None:
        if self._options.skip_tokenizer_init:
            return None
        assert self._checkpoint is not None, "describe comes before tokenizer"
        from headrace.executor.checkpoints.tokenizer import load_bundle  # may bring in transformers

        return load_bundle(self._checkpoint, self._options)

    def load(self, plan: Plan, report: Report) -> MemoryReading:
        check_no_gpu_options(plan.options)
        assert self._checkpoint is not None, "describe comes before load"
        assert self._spec is not None, "describe comes before load"
        report("compile kernels")
        if plan.weights_stay_packed or plan.weight_bits:
            build.load(part=build.PACKED)  # beside the other part, which is still compiling where this one must be
        self._compiling.join()
        report("load weights")
        dtype = DTYPES[plan.dtype]
        reason = why_not(self._spec, dtype, self._place)
        if reason:
            check_op_by_op(plan, reason)
        stays_packed = plan.weights_stay_packed and not reason
        check_weights_fit(self._spec, plan, host_memory(), self._checkpoint.stored_bytes if stays_packed else None)
        self._model = load_model(self._spec, self._checkpoint.weights(place=self._place), plan, reason, self._place)
        self._plan = plan
        memory = host_memory()
        return MemoryReading(
            total_bytes=memory.total_bytes,
            available_bytes=memory.available_bytes,
            weights_bytes=self._model.weight_bytes,
            # The program's buffers are float32, but for what meets bf16 weights.
            activation_bytes=activation_bytes(self._model.spec, plan, dtype.itemsize if reason else 4, self._place),
        )

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        plan, model = self._plan, self._model
        assert plan is not None, "load comes before allocate"
        assert model is not None, "load comes before allocate"
        dtype = cache_dtype(plan, is_program=isinstance(model, CpuDecoder))
        groups = plan.model.cache_groups
        cache = kv_cache.allocate(model.spec, num_blocks, plan.block_size, dtype, self._device, self._place, groups)
        self._cache = cache
        batch_args = (plan.max_num_seqs, max_model_len, plan.block_size, plan.model.eos_token_ids, len(groups))
        self._runner = make_runner(model, cache, batch_args, self._place, vocab_size=model.spec.vocab_size)
        if isinstance(model, CpuDecoder):
            model.bind(cache)  # before the first request waits for it
        if self._options.async_scheduling and self._place.world_size == 1:
            self._thread = StepThread(self._runner.step)

    def submit(self, plan: StepPlan) -> None:
        if self._thread is not None:
            self._thread.submit(plan)
        else:
            self._submitted.append(plan)

    def collect(self) -> StepResult:
        assert self._runner is not None, "allocate comes before collect"
        if self._thread is not None:
            return self._thread.collect()
        return self._runner.step(self._submitted.popleft())

    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]:
        rank = self._place.rank
        match command:
            case StartProfile():
                self._profile.start(command.prefix)
                return (WorkerAnswer(rank=rank),)
            case StopProfile():
                return (WorkerAnswer(rank=rank, files=(self._profile.stop(),)),)
            case DescribeEngine():
                return (WorkerAnswer(rank=rank, facts=self.facts()),)
            case CallExtension():
                return (WorkerAnswer(rank=rank, payload=self._call_extension(command.payload)),)
            case PrepareWeights():
                self._prepare(command.path)
            case UseWeights():
                self._use_prepared(command.prepared)
            case Sleep():
                self._sleep(command.level)
            case WakeUp():
                self._wake_up(frozenset(command.tags) or ASLEEP)
        return (WorkerAnswer(rank=rank),)

    def _prepare(self, path: str) -> None:
        """Reads new weights beside those that serve."""
        self._prepared = self._bounded.run("reading the weights", self._read_again, path)

    def _call_extension(self, payload: dict[str, Any]) -> dict[str, Any]:
        return self._bounded.run("the call of the worker extension", self._extension.call, payload)

    def _read_again(self, path: str) -> Decoder | CpuDecoder:
        assert self._spec is not None, "describe comes before control"
        assert self._plan is not None, "load comes before control"
        checkpoint = open_again(path, self._options, self._plan, self._spec)
        reason = why_not(self._spec, DTYPES[self._plan.dtype], self._place)
        stored_bytes = checkpoint.stored_bytes if self._plan.weights_stay_packed and not reason else None
        check_weights_fit(self._spec, self._plan, host_memory(), stored_bytes)
        model = load_model(self._spec, checkpoint.weights(place=self._place), self._plan, reason, self._place)
        if isinstance(model, CpuDecoder):
            model.bind(self._cache)
        return model

    def _use_prepared(self, is_wanted: bool) -> None:
        model, self._prepared = self._prepared, None
        if is_wanted and model is not None and self._runner is not None:
            self._model = model
            self._runner.use(model)

    def _sleep(self, level: int) -> None:
        """The cache's pages go; the weights are in the host's memory already, and go at level 2 alone."""
        assert self._runner is not None, "allocate comes before control"
        self._cache.release()
        if level == 2:
            self._runner.use(SleepingModel())
            self._model = None
            gc.collect()

    def _wake_up(self, tags: frozenset[str]) -> None:
        """The cache's pages come back as they are written."""
        assert self._runner is not None, "allocate comes before control"
        if "weights" in tags and self._model is None:
            self._model = self._read_again("")
            self._runner.use(self._model)

    def facts(self) -> dict[str, Any]:
        """What this worker is, for DescribeEngine."""
        weight_bytes = self._model.weight_bytes if self._model is not None else 0
        return {
            "pid": os.getpid(),
            "device": str(self._device),
            "threads": torch.get_num_threads(),
            "weight_bytes": weight_bytes,
        }

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        self._submitted.clear()
        if self._place.collectives is not None:
            self._place.collectives.close()
        self._runner = self._model = self._checkpoint = None


def make_executor(options: Options) -> Executor:
    """The executor for the device that the options name. Raises OptionError when that device cannot be used."""
    device = choose_device(options.device)
    if device.type == "cpu":
        check_no_gpu_options(options)
        return UniprocExecutor(options)
    from headrace.executor.gpu.executor import GpuExecutor

    return GpuExecutor(options, device)


def make_rank(options: Options, place: RankPlace) -> Executor:
    """What a worker runs: the rank of this place, on the device that is its own. Raises OptionError for none."""
    from headrace.executor.gpu.device import rank_device

    device = rank_device(options.device)
    if device.type == "cpu":
        check_no_gpu_options(options)
        return UniprocExecutor(options, place)
    from headrace.executor.gpu.executor import GpuExecutor

    return GpuExecutor(options, device, place=place)


def load_model(
    spec: ArchSpec, weights: WeightSource, plan: Plan, why_no_program: str, place: RankPlace = SINGLE
) -> Decoder | CpuDecoder:
    """The model as a program of the CPU kernels, or op by op where there is a reason against that."""
    dtype = DTYPES[plan.dtype]
    if why_no_program:
        if build.why_not() is None:  # else it has been said
            logger.warning("the model runs op by op, and not as one program of the CPU kernels: %s", why_no_program)
        use_all_cores()
        return Decoder(spec, weights, dtype, "cpu", place)
    limits = StepLimits(
        plan.max_num_batched_tokens, plan.max_num_seqs, plan.max_model_len, plan.max_logits - plan.max_num_seqs
    )
    blocks = Blocks(plan.weight_bits, plan.options.quantization_group_size) if plan.weight_bits else None
    kind = CpuDecoder if place.world_size == 1 else CpuRank
    model = kind(spec, weights, dtype, limits, keep_packed=plan.weights_stay_packed, blocks=blocks, place=place)
    torch.set_num_threads(1)  # the cores are the program's
    logger.info("computing on %d threads: %s", model.runtime.pool.num_threads, model.runtime.pool.plan.reason)
    return model


def own_kv_rows(spec: ArchSpec, place: RankPlace, groups: Sequence[CacheGroup]) -> int:
    """Keys and values of one token in a block of this rank's, each a row of head_dim elements.

    The ranks' sum may be more than a single rank has: where there are fewer key/value heads than ranks, and where
    stages have a group's layers in unequal numbers.
    """
    return 2 * kv_cache.layers_in_block(spec.num_layers, place, groups) * spec.local_kv_heads(place.tp_size)


def cache_dtype(plan: Plan, *, is_program: bool) -> torch.dtype:
    """Of keys and values. The finer type that packed weights come with is for the CPU kernels' program alone."""
    if plan.options.kv_cache_dtype == "auto" and not is_program:
        return DTYPES[plan.dtype]
    return CACHE_DTYPES[plan.kv_cache_dtype]


def check_op_by_op(plan: Plan, reason: str) -> None:
    """Raises OptionError for what only the program of the CPU kernels computes; `reason` is why it cannot serve."""
    if plan.weight_bits:
        raise OptionError(
            f"quantization={plan.options.quantization} needs the CPU kernels' program, which cannot run "
            f"{plan.model.name}: {reason}"
        )
    if plan.options.kv_cache_dtype != "auto" and plan.kv_cache_dtype != plan.dtype:
        raise OptionError(
            f"kv_cache_dtype={plan.options.kv_cache_dtype} beside dtype={plan.dtype} needs the CPU kernels' program, "
            f"which cannot run {plan.model.name}: {reason}"
        )


def check_weights_fit(spec: ArchSpec, plan: Plan, memory: HostMemory, stored_bytes: int | None = None) -> None:
    """Raises ModelError, before any weight is read, when they cannot fit the memory that is available.

    stored_bytes: of weights that stay as the checkpoint stores them.
    """
    elements, itemsize = weight_elements(spec), DTYPES[plan.dtype].itemsize
    needed_bytes, kind = elements * itemsize, f"of {itemsize} bytes ({plan.dtype})"
    if plan.weight_bits:
        needed_bytes = elements * (plan.weight_bits * 32 // 8 + BLOCK_HEAD_BYTES[plan.weight_bits]) // 32
        kind = f"of {plan.weight_bits} bits"
    if stored_bytes is not None:
        needed_bytes, kind = stored_bytes, f"as stored ({plan.model.checkpoint_dtype})"
    if needed_bytes > memory.available_bytes:
        raise ModelError(
            f"the weights of {plan.model.name} do not fit: {elements / 1e9:.2f} billion {kind} "
            f"need {_gib(needed_bytes)}, and {_gib(memory.available_bytes)} of "
            f"{_gib(memory.total_bytes)} are available",
            hint="a smaller model fits, or one of the 16-bit dtypes" if itemsize > 2 else "a smaller model fits",
        )


def _why_no_prefix_caching(spec: ArchSpec) -> str:
    if spec.uses_prompt_lens:
        return "the model's dynamic rotary scaling makes keys depend on the length of their prompt"
    return ""


def use_all_cores() -> None:
    """torch starts with the machine's cores, whatever this process was granted. OMP_NUM_THREADS has the last word."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_cores())
    logger.info("computing on %d threads", torch.get_num_threads())


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.2f} GiB"
