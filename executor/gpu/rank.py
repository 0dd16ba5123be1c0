"""A rank on a GPU: alone, or one of several ranks with a GPU each."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Protocol

import msgspec
import torch

from headrace import kernels
from headrace.core.options.engine_options import Options
from headrace.core.options.plan import MemoryReading, ModelDescription, Plan
from headrace.executor.adapters.layers import ReadBase
from headrace.executor.adapters.located import located
from headrace.executor.adapters.slots import AdapterSlots, PreparedSlots
from headrace.executor.checkpoints.checkpoint import Checkpoint
from headrace.executor.checkpoints.sources.dummy_weights import DummyWeights
from headrace.executor.checkpoints.weights import WeightSource
from headrace.executor.gpu.collectives import AgreedCapturer, GpuCollectives
from headrace.executor.gpu.device_state import Device
from headrace.executor.gpu.graphs import Capturer, capture_sizes
from headrace.executor.gpu.hardware.cuda import CudaBackend
from headrace.executor.gpu.hardware.device import GpuFacts, check_free_memory, check_gpu, gib
from headrace.executor.gpu.hardware.memory import Meter, measure
from headrace.executor.gpu.kernels import Rounding, chooser_for
from headrace.executor.gpu.runner import STEPS_IN_FLIGHT, GpuRunner, RunnerLimits
from headrace.executor.gpu.stages import make_runner, runner_kind
from headrace.executor.gpu.weights.offload import Offload, SideStream, layers_to_offload
from headrace.executor.gpu.weights.residency import WeightResidency
from headrace.executor.gpu.weights.staging import staged
from headrace.executor.model_rank import DTYPES, ModelRank, WorkerProfile, cache_dtype
from headrace.executor.models import kv_cache
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.eager import ChooseKernel
from headrace.executor.models.sizes import layer_elements, table_names, weight_elements, weight_shapes
from headrace.executor.parallel.rank_place import SINGLE, Collectives, RankCoordinates
from headrace.executor.parallel.rendezvous import Rendezvous
from headrace.executor.rank import Report
from headrace.ipc.adapters import AdapterFacts, most_of_request
from headrace.ipc.failure import HeadraceError, OptionError
from headrace.ipc.step import StepPlan, StepResult
from headrace.kernels.triton.versions import why_no_triton

logger = logging.getLogger(__name__)


class DeviceBackend(Protocol):
    """What the rank needs from a device. `gpu.hardware.cuda.CudaBackend` implements it for a GPU."""

    device: torch.device

    def facts(self) -> GpuFacts: ...
    def here(self) -> AbstractContextManager[Any]: ...
    def host_side(self) -> Device: ...
    def capturer(self) -> Capturer | None: ...
    def side_stream(self) -> SideStream: ...
    def meter(self) -> Meter: ...
    def link(self, rendezvous: Rendezvous, options: Options) -> GpuCollectives: ...
    def memory(self) -> tuple[int, int]: ...


class GpuRank(ModelRank):
    """A rank's part of the model, with its cache and runner, on one GPU. Two steps may be in flight."""

    max_steps_in_flight = STEPS_IN_FLIGHT
    async_by_default = True
    has_own_memory = True

    choose: ChooseKernel = staticmethod(kernels.choose)

    def __init__(
        self,
        options: Options,
        device: torch.device,
        backend: DeviceBackend | None = None,
        place: RankCoordinates = SINGLE,
    ) -> None:
        super().__init__(options, place, device)
        self._backend = backend or CudaBackend(device)
        self._gpu: GpuFacts | None = None
        self._decoder: Decoder | None = None
        self._steps: GpuRunner | None = None
        self._residence: WeightResidency | None = None
        self._adapters: AdapterSlots | None = None
        self._moved: tuple[Decoder, PreparedSlots] | None = None  # what is loaded, for weights that were read again

    def describe(self, report: Report) -> ModelDescription:
        self._gpu = self._backend.facts()  # checked before anything is fetched for a GPU that cannot be used
        return msgspec.structs.replace(super().describe(report), device_bytes=self._gpu.total_bytes, why_no_adapters="")

    def _link(self, rendezvous: Rendezvous) -> Collectives:
        with self._backend.here():
            return self._backend.link(rendezvous, self._options)

    def load(self, plan: Plan, report: Report) -> MemoryReading:
        assert self._gpu is not None, "describe comes first"
        self.check_attachments(plan)
        if plan.model.pooling is not None:
            raise OptionError(
                f"requests pool on a CPU alone so far, and the device is {plan.options.device}: use device=cpu, or "
                "runner=generate"
            )
        dtype, facts, spec = DTYPES[plan.dtype], self._gpu, self.found.spec
        check_gpu(self._device, dtype, facts)
        sizes_of(plan)
        elements = weight_elements(spec) / self._place.world_size
        what = f"holding {elements / 1e9:.2f} billion weights of {plan.model.name} as {plan.dtype}"
        # A lower bound: while a matrix is being quantised, it also needs its full size.
        needed_bytes = int(elements * Rounding.bits_of(plan, dtype.itemsize) / 8)
        offload_bytes = int(plan.options.cpu_offload_gb * (1 << 30))
        check_free_memory(self._device, facts, max(0, needed_bytes - offload_bytes), what)
        self._plan = plan
        if self._device.type == "cuda" and (reason := why_no_triton(self._device)):
            logger.warning("the model is computed by torch's own operations, which is much slower: %s", reason)
        with self._backend.here():
            report("load weights")
            decoder = self._decoder = self._new_decoder(self.found.checkpoint)
        if plan.adapters is not None:
            self._adapters = AdapterSlots(plan.adapters, decoder, self._place, self._base_of(self.found.checkpoint))
        if self._place.world_size > 1:
            weights_bytes = self._decoder.weight_bytes
            return MemoryReading(total_bytes=0, available_bytes=0, weights_bytes=weights_bytes, activation_bytes=0)
        return self._measure_now(report)

    def measure(self, reading: MemoryReading, report: Report) -> MemoryReading:
        """Measures after `load` of all ranks, since they run the measured steps together."""
        return reading if self._place.world_size == 1 else self._measure_now(report)

    def _measure_now(self, report: Report) -> MemoryReading:
        assert self._decoder is not None, "load comes first"
        assert self._gpu is not None, "describe comes first"
        report("measure memory")
        with self._backend.here():
            return self._measure(self.plan, self._decoder, self._gpu)

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        assert self._decoder is not None, "load comes first"
        plan, decoder = self.plan, self._decoder
        with self._backend.here():
            cache = self._new_cache(plan, num_blocks)
            limits = runner_limits(plan, max_model_len, cache)
            device, capturer = self._backend.host_side(), self._capturer(plan)
            self._steps = make_runner(self._place, decoder, cache, device, limits, capturer)
            self.bind_packages(self._steps.batch, cache)
            self.set_up(self._steps.batch)
            self._residence = WeightResidency(decoder, cache, self._steps, self._backend, self._find_weights)
        self._decoder = None  # owned by the residency from now on, which may replace it
        folder = self._options.profiler_config.get("torch_profiler_dir")
        self._profile = WorkerProfile(folder, self._place.rank, self._steps.times)

    def submit(self, plan: StepPlan) -> None:
        plan.check_read(self.reads)
        with self._backend.here():
            self.steps.submit(plan)

    def collect(self) -> StepResult:
        with self._backend.here():
            return self.steps.collect()

    def has_result(self) -> bool:
        with self._backend.here():
            return self.steps.has_result()

    def load_adapter(self, slot: int, path: str, *, is_3d: bool = False) -> AdapterFacts:
        assert self._adapters is not None, "the core asks with enable_lora alone"
        with self._backend.here():
            facts = self._adapters.load(slot, located(path, self._options))
            self._wait()
        return facts

    def drop_adapter(self, slot: int) -> None:
        assert self._adapters is not None, "the core asks with enable_lora alone"
        with self._backend.here():
            self._adapters.drop(slot)
            self._wait()

    def _wait(self) -> None:
        """Until what the calling thread has given to the device is done: steps may run in another stream."""
        done = self._backend.host_side().event()
        done.record()
        done.synchronize()

    @property
    def residence(self) -> WeightResidency:
        assert self._residence is not None, "allocate comes first"
        return self._residence

    @property
    def weight_bytes(self) -> int:
        return self._residence.decoder.weight_bytes if self._residence is not None else 0

    def prepare_weights(self, path: str) -> None:
        with self._backend.here():
            self._adapters_leave()
            try:
                self.residence.prepare(path)
            except HeadraceError:  # the old weights are back
                self._adapters_return()
                raise

    def use_weights(self, prepared: bool) -> None:
        with self._backend.here():
            self.residence.use_prepared(prepared)
            self._adapters_return()

    @property
    def can_compute(self) -> bool:
        return self.residence.is_awake

    def sleep(self, level: int) -> None:
        with self._backend.here():
            self._adapters_leave()
            self.residence.sleep(level)

    def wake_up(self, tags: frozenset[str]) -> None:
        with self._backend.here():
            self.residence.wake_up(tags)
            if self.residence.has_weights:
                self._adapters_return()

    def _adapters_leave(self) -> None:
        """Before the weights' memory is freed, and with it that of the slots."""
        if self._adapters is not None:
            self._adapters.go_away()

    def _adapters_return(self) -> None:
        """Into the slots of the model in use, which may be another one than before."""
        moved, self._moved = self._moved, None
        if self._adapters is None:
            return
        if moved is not None and moved[0] is self.residence.decoder:
            self._adapters.move_to(moved[1])
        self._adapters.come_back()

    def facts(self) -> dict[str, Any]:
        """Adds the device, the captured graphs, and a recent step's times (microseconds by phase)."""
        graphs, gpu = self.steps.graphs, self._gpu
        return {
            **super().facts(),
            "gpu": gpu.name if gpu is not None else "",
            "graphs": len(graphs),
            "graph_pool_bytes": graphs.pool_bytes,
            "why_eager": graphs.why_eager,
            "sums": link.sums if isinstance(link := self._place.collectives, GpuCollectives) else "",
            "step_us": self.steps.times.summary(),
        }

    def idle(self) -> bool:
        if self._steps is None or (self._residence is not None and not self._residence.is_awake):
            return False
        with self._backend.here():
            return self._steps.idle()

    def stop(self) -> None:
        super().stop()
        self._steps = self._decoder = self._residence = self._adapters = None
        if self._gpu is None:
            return
        gc.collect()
        with suppress(RuntimeError), self._backend.here():  # the device may have failed
            self._backend.memory()  # returns memory to the driver, for the next engine of this process

    @property
    def steps(self) -> GpuRunner:
        """The runner, for benchmarks and tests; exists after `allocate`."""
        assert self._steps is not None, "allocate comes first"
        return self._steps

    def _new_decoder(self, checkpoint: Checkpoint) -> Decoder:
        plan, place, spec = self.plan, self._place, self.found.spec
        dtype = DTYPES[plan.dtype]
        source: WeightSource
        if checkpoint.format == "dummy":
            source = DummyWeights(weight_shapes(spec), dtype, self._device, table_names(spec))
        else:
            source = staged(checkpoint.weights(place=place), self._backend.host_side())
        offload = offload_of(plan, spec, place, self._backend)
        choose, keep = chooser_for(self.choose, plan), None if offload is None else offload.keep
        decoder = Decoder(spec, source, dtype, self._device, place, choose, keep, plan.adapters)
        if offload is not None:
            decoder.weight_bytes -= offload.saved_bytes
            logger.info("%s of weights are kept in the host's memory", gib(offload.offloaded_bytes))
        return decoder

    def _find_weights(self, path: str | None) -> Callable[[], Decoder]:
        opened = self._in_time("finding the weights", self._open_again, path)

        def read() -> Decoder:
            decoder, moved = self._bounded.run("reading the weights", self._read_again, opened.checkpoint)
            self._opened, self._moved = opened, None if moved is None else (decoder, moved)
            return decoder

        return read

    def _read_again(self, checkpoint: Checkpoint) -> tuple[Decoder, PreparedSlots | None]:
        with self._backend.here():
            decoder = self._new_decoder(checkpoint)
            self._backend.memory()  # waits for this thread's pending work
        if self._adapters is None:
            return decoder, None
        return decoder, self._adapters.prepared_for(decoder, self._base_of(checkpoint))

    def _base_of(self, checkpoint: Checkpoint) -> ReadBase:
        """Reads the weights again, for what adapters take from them."""
        return partial(checkpoint.weights, place=self._place)

    def _new_cache(self, plan: Plan, num_blocks: int) -> kv_cache.KVCache:
        dtype = cache_dtype(plan, is_program=False)
        groups, spec = plan.model.cache_groups, self.found.spec
        cache = kv_cache.allocate(
            spec, num_blocks, plan.block_size, dtype, self._device, self._place, groups, self._cache_scales
        )
        rows = plan.max_num_seqs + 1  # that of padding too
        return kv_cache.with_drafts(cache, spec, self._place, rows, plan.most_drafts, self._device)

    def _measure(self, plan: Plan, decoder: Decoder, facts: GpuFacts) -> MemoryReading:
        backend = self._backend
        null_block = self._new_cache(plan, 1)
        limits, capturer = runner_limits(plan, plan.max_model_len, null_block), self._capturer(plan)
        tokens = plan.max_num_batched_tokens
        runner = runner_kind(self._place)(decoder, null_block, backend.host_side(), limits)
        found = measure(runner, backend.host_side(), limits, tokens, backend.meter(), capturer)
        del runner
        state_bytes = found.state_bytes + null_block.draft_bytes
        del null_block, capturer
        gc.collect()
        free_bytes, total_bytes = backend.memory()
        return MemoryReading(
            total_bytes=total_bytes,
            available_bytes=free_bytes,
            weights_bytes=decoder.weight_bytes,
            activation_bytes=found.activation_bytes,
            state_bytes=state_bytes,
            graph_bytes=found.graph_bytes,
            device=facts.name,
        )

    def _capturer(self, plan: Plan) -> Capturer | None:
        capturer, link = self._backend.capturer(), self._place.collectives
        if plan.options.enforce_eager or capturer is None:
            return None
        return AgreedCapturer(capturer, link.agree) if isinstance(link, GpuCollectives) else capturer


def offload_of(plan: Plan, spec: ArchSpec, place: RankCoordinates, backend: DeviceBackend) -> Offload | None:
    """What keeps layers in the host's memory; None without cpu_offload_gb."""
    offload_bytes = int(plan.options.cpu_offload_gb * (1 << 30))
    if not offload_bytes:
        return None
    if any(layer.weights_of is not None for layer in spec.layers):
        raise OptionError(
            f"cpu_offload_gb: layers of this {spec.architecture} run several times in a step, and an offloaded one "
            "is on the device once; leave it out"
        )
    bits = Rounding.bits_of(plan, DTYPES[plan.dtype].itemsize)
    own = place.layers(spec.num_layers)
    elements = sum(layer_elements(spec, spec.layers[index]) for index in own) / len(own)
    which = layers_to_offload(own, int(elements / place.tp_size * bits / 8), offload_bytes)
    return Offload(which, backend.host_side(), backend.side_stream())


def sizes_of(plan: Plan) -> tuple[int, ...]:
    """The batch sizes to capture. Raises OptionError when the options for them contradict each other."""
    options = plan.options
    return capture_sizes(plan.max_num_seqs, options.cudagraph_capture_sizes, options.max_cudagraph_capture_size)


def runner_limits(plan: Plan, max_model_len: int, cache: kv_cache.KVCache) -> RunnerLimits:
    return RunnerLimits(
        max_num_seqs=plan.max_num_seqs,
        max_model_len=max_model_len,
        block_size=plan.block_size,
        vocab_size=plan.model.vocab_size,
        eos_token_ids=plan.model.eos_token_ids,
        block_factors=cache.factors,
        capture_sizes=sizes_of(plan),
        most_adapters=most_of_request(plan.adapters.max_loras) if plan.adapters is not None else 0,
        state_pages=plan.model.cache_groups[-1].pages,
    )
