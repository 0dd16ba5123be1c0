"""A rank on the CPU: its part of the model as one program of the CPU kernels or, where that is impossible, op by op."""

from __future__ import annotations

import gc
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import msgspec
import torch

from headrace.core.options.engine_options import Options
from headrace.core.options.eplb import eplb_of
from headrace.core.options.plan import MemoryReading, ModelDescription, Plan
from headrace.executor.adapters.heads import HeadTable
from headrace.executor.adapters.located import located
from headrace.executor.adapters.slots import AdapterSlots, PreparedSlots
from headrace.executor.checkpoints.checkpoint import Checkpoint
from headrace.executor.checkpoints.weights import WeightSource
from headrace.executor.cpu.decoder import CpuDecoder, CpuDecoderPart, why_not
from headrace.executor.cpu.program import StepLimits
from headrace.executor.cpu.runner import ModelRunner
from headrace.executor.cpu.weights import Blocks
from headrace.executor.model_rank import DTYPES, ModelRank, OpenedAgain, cache_dtype
from headrace.executor.models import kv_cache
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.heads import HeadLinear, HeadNorm
from headrace.executor.models.implementations import load_foreign
from headrace.executor.models.sizes import activation_bytes, redundant_elements, repeated_elements, weight_elements
from headrace.executor.parallel.expert_exchange import ExpertExchange
from headrace.executor.parallel.load_balancing import ExpertBalancer, costs
from headrace.executor.parallel.rank_place import SINGLE, RankCoordinates
from headrace.executor.rank import Report
from headrace.executor.step.batch import BatchState
from headrace.executor.step.pipeline import StageRunner
from headrace.ipc.adapters import AdapterFacts
from headrace.ipc.failure import ModelError, OptionError
from headrace.ipc.process.host import HostMemory, host_memory, usable_cores
from headrace.ipc.step import StepPlan, StepResult
from headrace.kernels.cpu.facade import build, units
from headrace.kernels.registry import Op, Version

logger = logging.getLogger(__name__)
BLOCK_HEAD_BYTES = {8: 2, 4: 4}
"""Overhead of a block of 32 quantised weights: its scale and, for 4 bits, its minimum."""


class CpuRank(ModelRank):
    """Runs each step inside `collect`, on the calling thread; with async_scheduling on a thread of its own.

    async_scheduling is off by default: the kernels keep all cores busy, so planning meanwhile slows them down by as
    much as it saves.
    """

    max_steps_in_flight = 2

    def __init__(self, options: Options, place: RankCoordinates = SINGLE) -> None:
        super().__init__(options, place, torch.device("cpu"))
        self._model: Decoder | CpuDecoder | None = None
        self._prepared: tuple[Decoder | CpuDecoder, PreparedSlots | None] | None = None
        """The model that will replace the current one, and what is loaded, for it."""
        self._cache: Any = None
        self._runner: ModelRunner | StageRunner | None = None
        self._balancer: ExpertBalancer | None = None  # for the model's experts
        self._submitted: deque[StepPlan] = deque()
        self._adapters: AdapterSlots | None = None
        self._thread: StepThread | None = None
        self._compiling = threading.Thread()

    def describe(self, report: Report) -> ModelDescription:
        # If the kernels must be compiled first, that runs while the model is found, fetched and described.
        self._compiling = threading.Thread(target=build.load, name="compile kernels")
        self._compiling.start()
        described = super().describe(report)
        if self.found.config is not None:
            return described
        return msgspec.structs.replace(described, why_no_adapters="")

    def load(self, plan: Plan, report: Report) -> MemoryReading:
        check_no_gpu_options(plan.options)
        self.check_attachments(plan)
        if plan.options.quantization == "fp8" and not plan.model.stored_as:
            raise OptionError(
                "quantization=fp8 of float weights is computed on a GPU only, and the model runs on the CPU "
                f"(device={plan.options.device}); int8 and int4 are computed on a CPU, and fp8 checkpoints"
            )
        report("compile kernels")
        if plan.weights_stay_packed or plan.weight_bits:
            # Compiles this part, if needed, while the other one is still compiling.
            build.load(part=units.GROUPED if plan.model.stored_as or rounds_inputs(plan) else units.PACKED)
        self._compiling.join()
        report("load weights")
        self._plan = plan
        _, reason = self._choose()
        if reason:
            check_op_by_op(plan, reason)
        model = self._model = self._load_model(self.found.checkpoint)
        if plan.adapters is not None:
            read = partial(self.found.checkpoint.weights, place=self._place)
            classifier = self.found.spec.classifier if plan.model.pooling is not None else None
            if classifier is not None and self._place.is_last_stage:
                self._head_tables = {
                    each.name: HeadTable(each) for each in classifier.layers if isinstance(each, HeadLinear | HeadNorm)
                }
            self._adapters = AdapterSlots(plan.adapters, model, self._place, read, self._head_tables)
        self._balance(model)
        memory = host_memory()
        return MemoryReading(
            total_bytes=memory.total_bytes,
            available_bytes=memory.available_bytes,
            weights_bytes=model.weight_bytes,
            # The program's buffers are float32, except the inputs of bf16 weights.
            activation_bytes=activation_bytes(
                model.spec, plan, DTYPES[plan.dtype].itemsize if reason else 4, self._place, gathers=bool(reason)
            ),
        )

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        plan, model = self.plan, self._model
        assert model is not None, "load comes first"
        dtype = cache_dtype(plan, is_program=isinstance(model, CpuDecoder))
        groups = plan.model.cache_groups
        cache = kv_cache.allocate(
            model.spec, num_blocks, plan.block_size, dtype, self._device, self._place, groups, self._cache_scales
        )
        cache = kv_cache.with_drafts(cache, model.spec, self._place, plan.max_num_seqs, plan.most_drafts)
        self._cache = cache
        ends, pages = plan.model.eos_token_ids, groups[-1].pages
        back = model.spec.lookback
        batch = BatchState(plan.max_num_seqs, max_model_len, plan.block_size, ends, cache.factors, pages, back)
        self.bind_packages(batch, cache)
        self._runner = self._make_runner(model, batch)
        if isinstance(model, CpuDecoder):
            model.bind(cache)  # now, so that the first request need not wait for it
        if self._options.async_scheduling and self._place.world_size == 1:
            self._thread = StepThread(self._runner.step)

    def _make_runner(self, model: Decoder | CpuDecoder, batch: BatchState) -> ModelRunner | StageRunner:
        place = self._place
        if not place.is_last_stage:
            return StageRunner(model, self._cache, batch, place.link)
        pooler = self.set_up(batch)
        return ModelRunner(
            model,
            self._cache,
            batch,
            vocab_size=model.spec.vocab_size,
            may_repeat=place.pp_size == 1,  # a repeated step would receive nothing from the previous stage
            link=place.link if place.pp_size > 1 and place.tp_rank == 0 else None,
            pooler=pooler,
        )

    def submit(self, plan: StepPlan) -> None:
        if plan.attachments:
            plan.check_read(self.reads)
        if self._cache.beginnings:
            self._cache.will_use(plan.block_ids)
            for new in plan.new_rows:
                self._cache.will_use(new.block_ids)
        if self._thread is not None:
            self._thread.submit(plan)
        else:
            self._submitted.append(plan)

    def collect(self) -> StepResult:
        if self._thread is not None:
            return self._thread.collect()
        plan = self._submitted.popleft()
        result = self.runner.step(plan)
        if self._balancer is None or not plan.total_tokens:
            return result
        return msgspec.structs.replace(result, expert_balance=self._balancer.after_step())

    def load_adapter(self, slot: int, path: str, *, is_3d: bool = False) -> AdapterFacts:
        assert self._adapters is not None, "the core asks with enable_lora alone"
        return self._adapters.load(slot, located(path, self._options))

    def drop_adapter(self, slot: int) -> None:
        assert self._adapters is not None, "the core asks with enable_lora alone"
        self._adapters.drop(slot)

    def share_experts(self, exchange: ExpertExchange) -> None:
        self._place = self._place.sharing_experts(exchange)

    def compute_for_others(self) -> None:
        assert isinstance(self._model, Decoder), "why_not has a reason against a program"
        self._model.compute_for_others()

    @property
    def runner(self) -> ModelRunner | StageRunner:
        assert self._runner is not None, "allocate comes first"
        return self._runner

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes if self._model is not None else 0

    def prepare_weights(self, path: str) -> None:
        """Loads new weights beside those in use."""
        self._opened, model, moved = self._in_time("reading the weights", self._read_again, path)
        self._prepared = model, moved

    def use_weights(self, prepared: bool) -> None:
        read, self._prepared = self._prepared, None
        if prepared and read is not None:
            self._use(*read)

    def sleep(self, level: int) -> None:
        """Releases the cache's pages. Weights are in host memory already, so that only level 2 drops them."""
        self._cache.release()
        if level == 2:
            self.runner.use(UnloadedModel())
            self._model = self._balancer = None
            gc.collect()

    def wake_up(self, tags: frozenset[str]) -> None:
        """Reads dropped weights again. The cache's pages come back as they are written."""
        if "weights" in tags and self._model is None:
            self._opened, model, moved = self._in_time("reading the weights", self._read_again, None)
            self._use(model, moved)

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        self._submitted.clear()
        super().stop()
        self._runner = self._model = self._balancer = None

    def _use(self, model: Decoder | CpuDecoder, moved: PreparedSlots | None) -> None:
        """Computes with this model from the next step on. moved: the loaded adapters, for it."""
        self._model = model
        if self._adapters is not None:
            assert moved is not None, "the weights were read again"
            self._adapters.move_to(moved)
        self._balance(model)
        self.runner.use(model)

    def _balance(self, model: Decoder | CpuDecoder) -> None:
        """Starts balancing this model's experts, from their initial placement."""
        self._balancer, eplb = None, eplb_of(self._options)
        if eplb is None or not model.balanced:
            return
        self._balancer = ExpertBalancer(model.balanced, eplb, self._place)
        if self._place.tp_rank == 0:
            logger.info("%s", costs(model.balanced, eplb.num_redundant_experts))

    def _choose(self) -> tuple[Callable[..., Decoder | CpuDecoder], str]:
        """The function that makes the model, and why it is not a program; "" if it is one."""
        choice = DECODER.choose(spec=self.found.spec, dtype=DTYPES[self.plan.dtype], place=self._place)
        return choice.function, next((reason for _, reason in choice.refused), "")

    def _read_again(self, path: str | None) -> tuple[OpenedAgain, Decoder | CpuDecoder, PreparedSlots | None]:
        opened = self._open_again(path)
        checkpoint = opened.checkpoint
        model = self._load_model(checkpoint)
        if isinstance(model, CpuDecoder):
            model.bind(self._cache)
        moved = None
        if self._adapters is not None:
            moved = self._adapters.prepared_for(model, partial(checkpoint.weights, place=self._place))
        return opened, model, moved

    def _load_model(self, checkpoint: Checkpoint) -> Decoder | CpuDecoder:
        """Raises ModelError, before any weight is read, when the weights cannot fit the memory."""
        plan, spec = self.plan, self.found.spec
        make, reason = self._choose()
        stored_bytes = checkpoint.kept_bytes(spec) if plan.weights_stay_packed and not reason else None
        check_weights_fit(spec, plan, host_memory(), stored_bytes)
        if self.found.config is not None:
            use_all_cores()
            return load_foreign(self.found, checkpoint, DTYPES[plan.dtype], self._options)
        return make(spec, checkpoint.weights(place=self._place), plan, self._place)


class StepThread:
    """A thread that runs steps, so that the core can plan and send meanwhile: the kernels' call releases the GIL.

    The thread lives from the first step to `stop`. `submit` and `collect` must be called from one thread.
    """

    def __init__(self, run: Callable[[StepPlan], StepResult]) -> None:
        self._run = run
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="steps", daemon=True)
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def collect(self) -> StepResult:
        """The result of the oldest submitted step. Raises the step's error; the thread has ended then."""
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def stop(self) -> None:
        """Returns once the current step is done."""
        self._plans.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (plan := self._plans.get()) is not None:
            try:
                self._results.put(self._run(plan))
            except BaseException as error:  # `collect` raises it
                self._results.put(error)
                return


class UnloadedModel:
    """Replaces a model whose weights have been dropped. The core submits no step before it has woken them."""

    def step(self, *_: Any) -> NoReturn:
        raise RuntimeError("a step came while the weights sleep")


def op_by_op(spec: ArchSpec, weights: WeightSource, plan: Plan, place: RankCoordinates) -> Decoder:
    use_all_cores()
    return Decoder(spec, weights, DTYPES[plan.dtype], "cpu", place, adapters=plan.adapters)


def as_program(spec: ArchSpec, weights: WeightSource, plan: Plan, place: RankCoordinates) -> CpuDecoder:
    pooling = plan.model.pooling
    limits = StepLimits(
        plan.max_num_batched_tokens,
        plan.max_num_seqs,
        plan.max_model_len,
        plan.max_num_batched_tokens
        if pooling is not None and not plan.model.generates
        else plan.max_logits - plan.max_num_seqs,
        pools=pooling is not None,
        batch_invariant=plan.options.batch_invariant,
        adapters=plan.adapters,
    )
    blocks = None
    if plan.weight_bits:
        blocks = Blocks(plan.weight_bits, plan.weight_groups, rounds_inputs=rounds_inputs(plan))
    kind = CpuDecoder if place.world_size == 1 else CpuDecoderPart
    model = kind(
        spec, weights, DTYPES[plan.dtype], limits, keep_packed=plan.weights_stay_packed, blocks=blocks, place=place
    )
    torch.set_num_threads(1)  # the program's own threads use the cores
    logger.info("computing on %d threads: %s", model.runtime.pool.num_threads, model.runtime.pool.plan.reason)
    return model


def rounds_inputs(plan: Plan) -> bool:
    """Whether quantization=int8 rounds inputs too: an encoder computes many tokens at a time, so that arithmetic takes
    its time, and not the memory of weights."""
    return plan.weight_bits == 8 and plan.model.whole_prompts


def _why_no_program(*, spec: ArchSpec, dtype: torch.dtype, place: RankCoordinates, **_: Any) -> str:
    return why_not(spec, dtype, place)


PROGRAM = Version(
    "decoder",
    "cpu_program",
    as_program,
    _why_no_program,
    refusal="the model runs op by op, and not as one program of the CPU kernels",
)
DECODER = Op("decoder", op_by_op, (PROGRAM,))
"""Makes a rank's part of the model."""


def check_op_by_op(plan: Plan, reason: str) -> None:
    """Raises OptionError for options that need the CPU kernels' program; `reason`: why it cannot run this model."""
    if plan.weight_bits:
        raise OptionError(
            f"quantization={plan.options.quantization} needs the CPU kernels' program, which cannot run "
            f"{plan.model.name}: {reason}"
        )
    if plan.options.batch_invariant:
        raise OptionError(
            f"batch_invariant needs the CPU kernels' program, which cannot run {plan.model.name}: {reason}"
        )
    if plan.options.kv_cache_dtype != "auto" and plan.kv_cache_dtype != plan.dtype:
        raise OptionError(
            f"kv_cache_dtype={plan.options.kv_cache_dtype} beside dtype={plan.dtype} needs the CPU kernels' program, "
            f"which cannot run {plan.model.name}: {reason}"
        )


def check_weights_fit(spec: ArchSpec, plan: Plan, memory: HostMemory, stored_bytes: int | None = None) -> None:
    """Raises ModelError, before any weight is read, when the weights cannot fit the available memory.

    stored_bytes: the size of weights that stay as the checkpoint stores them.
    """
    elements, itemsize = weight_elements(spec), DTYPES[plan.dtype].itemsize
    needed_bytes, kind = elements * itemsize, f"of {itemsize} bytes ({plan.dtype})"
    if plan.weight_bits:
        needed_bytes = elements * (plan.weight_bits * 32 // 8 + BLOCK_HEAD_BYTES[plan.weight_bits]) // 32
        kind = f"of {plan.weight_bits} bits"
    if stored_bytes is not None:
        needed_bytes = stored_bytes
        kind = f"as stored ({plan.model.checkpoint_dtype})"
        if plan.model.quantised_as_loaded:
            kind = f"as {plan.model.stored_as}"
    needed_bytes += repeated_elements(spec) * itemsize
    if (eplb := eplb_of(plan.options)) is not None:
        needed_bytes += needed_bytes * redundant_elements(spec, eplb.num_redundant_experts) // elements
    if needed_bytes > memory.available_bytes:
        raise ModelError(
            f"the weights of {plan.model.name} do not fit: {elements / 1e9:.2f} billion {kind} "
            f"need {_gib(needed_bytes)}, and {_gib(memory.available_bytes)} of "
            f"{_gib(memory.total_bytes)} are available",
            hint="a smaller model fits, or one of the 16-bit dtypes" if itemsize > 2 else "a smaller model fits",
        )


def tell_no_graphs(options: Options) -> None:
    """Logs that options of CUDA graphs have no effect on the CPU: no result depends on them, and scripts set them
    wherever they run."""
    for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size"):
        if getattr(options, name):
            logger.warning(
                "%s has no effect: it is for CUDA graphs, and the model runs on the CPU (device=%s)",
                name,
                options.device,
            )


def check_no_gpu_options(options: Options) -> None:
    """Raises OptionError for options that mean nothing on a CPU, except those of CUDA graphs: see `tell_no_graphs`."""
    if options.cpu_offload_gb:
        raise OptionError(
            "cpu_offload_gb keeps a GPU's weights in the host's memory, which is where they are when the model runs on "
            f"the CPU (device={options.device})"
        )


def use_all_cores() -> None:
    """Sets torch's threads to this process's cores, not the machine's. OMP_NUM_THREADS takes precedence."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_cores())
    logger.info("computing on %d threads", torch.get_num_threads())


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.2f} GiB"
