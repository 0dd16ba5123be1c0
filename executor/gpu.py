"""The executor of a world of one on a GPU."""

from __future__ import annotations

import gc
import logging

import torch

from headrace.core.options import Options
from headrace.core.plan import MemoryReading, ModelDescription, Plan
from headrace.executor import kv_cache
from headrace.executor.base import Report
from headrace.executor.decoder import Decoder
from headrace.executor.device_state import Device
from headrace.executor.dummy_shapes import weight_shapes
from headrace.executor.gpu_cuda import CudaCapturer, CudaDevice
from headrace.executor.gpu_device import GpuFacts, check_free_memory, check_gpu, gpu_facts
from headrace.executor.gpu_memory import CudaMeter, measure
from headrace.executor.gpu_runner import STEPS_IN_FLIGHT, GpuRunner, RunnerLimits
from headrace.executor.gpu_weights import DeviceDummyWeights, StagedWeights
from headrace.executor.graphs import Capturer, capture_sizes
from headrace.executor.memory_estimate import weight_elements
from headrace.executor.uniproc import DTYPES, UniprocExecutor
from headrace.executor.weights import WeightSource
from headrace.ipc.failure import OptionError
from headrace.ipc.step import StepPlan, StepResult

logger = logging.getLogger(__name__)


class GpuExecutor(UniprocExecutor):
    """As UniprocExecutor, with the model and all that a step needs on one GPU. Two steps may be in flight."""

    max_steps_in_flight = STEPS_IN_FLIGHT
    async_by_default = True

    def __init__(self, options: Options, device: torch.device) -> None:
        super().__init__(options)
        self._device = device
        self._facts: GpuFacts | None = None
        self._decoder: Decoder | None = None
        self._steps: GpuRunner | None = None

    def describe(self, report: Report) -> ModelDescription:
        self._facts = gpu_facts(self._device)  # before anything is fetched for a GPU that cannot be used
        return self._find_model(report)

    def load(self, plan: Plan, report: Report) -> MemoryReading:
        assert self._spec is not None, "describe comes before load"
        assert self._facts is not None, "describe comes before load"
        dtype, facts = DTYPES[plan.dtype], self._facts
        check_gpu(self._device, dtype, facts)
        check_plan(plan)
        needed_bytes = weight_elements(self._spec) * dtype.itemsize
        what = f"holding {weight_elements(self._spec) / 1e9:.2f} billion weights of {plan.model.name} as {plan.dtype}"
        check_free_memory(self._device, facts, needed_bytes, what)
        self._plan = plan
        with torch.cuda.device(self._device):
            report("load weights")
            self._decoder = Decoder(self._spec, self._source(dtype), dtype, self._device)
            torch.cuda.synchronize()
            report("measure memory")
            return self._measure(plan, self._decoder, facts)

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        assert self._plan is not None, "load comes before allocate"
        assert self._decoder is not None, "load comes before allocate"
        plan, decoder = self._plan, self._decoder
        with torch.cuda.device(self._device):
            cache = kv_cache.allocate(decoder.spec, num_blocks, plan.block_size, decoder.dtype, self._device)
            limits = runner_limits(plan, max_model_len)
            self._steps = GpuRunner(decoder, cache, self._host_side(), limits, self._capturer(plan))

    def submit(self, plan: StepPlan) -> None:
        assert self._steps is not None, "allocate comes before submit"
        with torch.cuda.device(self._device):
            self._steps.submit(plan)

    def collect(self) -> StepResult:
        assert self._steps is not None, "allocate comes before collect"
        with torch.cuda.device(self._device):
            return self._steps.collect()

    def idle(self) -> bool:
        if self._steps is None:
            return False
        with torch.cuda.device(self._device):
            return self._steps.idle()

    def stop(self) -> None:
        super().stop()
        self._steps = self._decoder = None

    def _source(self, dtype: torch.dtype) -> WeightSource:
        assert self._checkpoint is not None, "describe comes before load"
        assert self._spec is not None, "describe comes before load"
        if self._checkpoint.format == "dummy":
            return DeviceDummyWeights(weight_shapes(self._spec), dtype, self._device)
        return StagedWeights(self._checkpoint.weights(), self._host_side())

    def _measure(self, plan: Plan, decoder: Decoder, facts: GpuFacts) -> MemoryReading:
        cache = kv_cache.allocate(decoder.spec, 1, plan.block_size, decoder.dtype, self._device)
        limits = runner_limits(plan, plan.max_model_len)
        found = measure(
            decoder,
            cache,
            self._host_side(),
            limits,
            plan.max_num_batched_tokens,
            CudaMeter(self._device),
            self._capturer(plan),
        )
        del cache
        gc.collect()
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return MemoryReading(
            total_bytes=total_bytes,
            available_bytes=free_bytes,
            weights_bytes=decoder.weight_bytes,
            activation_bytes=found.activation_bytes,
            state_bytes=found.state_bytes,
            graph_bytes=found.graph_bytes,
            device=facts.name,
        )

    def _host_side(self) -> Device:
        return CudaDevice(self._device)

    def _capturer(self, plan: Plan) -> Capturer | None:
        return None if plan.options.enforce_eager else CudaCapturer(self._device)


def runner_limits(plan: Plan, max_model_len: int) -> RunnerLimits:
    """Raises OptionError when the sizes of graphs contradict each other."""
    options = plan.options
    sizes = capture_sizes(plan.max_num_seqs, options.cudagraph_capture_sizes, options.max_cudagraph_capture_size)
    return RunnerLimits(
        max_num_seqs=plan.max_num_seqs,
        max_model_len=max_model_len,
        block_size=plan.block_size,
        vocab_size=plan.model.vocab_size,
        eos_token_ids=plan.model.eos_token_ids,
        capture_sizes=sizes,
    )


def check_plan(plan: Plan) -> None:
    """Raises OptionError for what is computed on a CPU only."""
    if plan.weight_bits:
        raise OptionError(f"quantization={plan.options.quantization} is computed on a CPU only; leave it out on a GPU")
    if plan.kv_cache_dtype != plan.dtype:
        raise OptionError(
            f"kv_cache_dtype={plan.options.kv_cache_dtype} beside dtype={plan.dtype} is computed on a CPU only; on a "
            "GPU the cache has the type of the model, so leave it out"
        )
