"""The executor's interface to CUDA: pinned memory, events, graphs and the amount of memory.

Needs a GPU. All decisions are made elsewhere, in code that tests run on a CPU with a stand-in for `CudaBackend`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from headrace.core.options.engine_options import Options
from headrace.executor.gpu.collectives import GpuCollectives
from headrace.executor.gpu.device_state import Device, DeviceEvent, Mark
from headrace.executor.gpu.graphs import Capturer, Replay
from headrace.executor.gpu.hardware.device import GpuFacts, gpu_facts
from headrace.executor.gpu.hardware.memory import Meter
from headrace.executor.gpu.weights.offload import SideStream
from headrace.executor.parallel.rendezvous import Rendezvous
from headrace.ipc.process.gc_pauses import no_collections


class CudaMark(torch.cuda.Event):
    """A torch event with its time; a time difference needs two marks of one GPU."""

    def seconds_since(self, earlier: torch.cuda.Event) -> float:
        return float(earlier.elapsed_time(self)) / 1e3


class CudaDevice:
    """One GPU, used through the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host_buffer(self, num_elements: int) -> Tensor:
        return torch.empty(num_elements, dtype=torch.int32, pin_memory=True)

    def event(self) -> DeviceEvent:
        event: DeviceEvent = torch.cuda.Event()
        return event

    def mark(self) -> Mark:
        mark: Mark = CudaMark(enable_timing=True)
        return mark

    def to_host(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source, non_blocking=True)

    def to_device(self, source: Tensor) -> Tensor:
        return source.to(self.device, non_blocking=True)


class CudaCapturer:
    """Captures on its own stream into one memory pool, which all graphs share.

    Sharing is safe because graphs are replayed one after another in one stream, and the result of one is read before
    the next is replayed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        """Kept until `forget`: a pool whose last graph is gone accepts no other (`create_or_incref_pool` in
        c10/cuda/CUDACachingAllocator.cpp asserts that), and torch may still refer to the capture of a graph that
        failed."""
        self.pool_bytes = 0

    def capture(self, run: Callable[[], Any]) -> tuple[Replay, Any]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        # The memory of the first run counts too: torch keeps it for this stream only.
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        with torch.cuda.stream(self._stream):
            run()  # compilation, tuning and allocations of a first call must not be captured
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            self._graphs.append(graph)
            with no_collections():  # freeing CUDA objects could invalidate the capture
                begin(graph, self._pool)
                try:
                    result = run()
                    graph.capture_end()
                except BaseException:
                    self._abandon(graph)
                    raise
        current.wait_stream(self._stream)
        left_bytes, _ = torch.cuda.mem_get_info(self._device)
        self.pool_bytes += max(0, free_bytes - left_bytes)
        return graph.replay, lent(result)

    def forget(self) -> None:
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()
        self.pool_bytes = 0

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a failed capture. `capture_end` is expected to fail too, and where it raises, torch has not told its
        allocator of the end, which would free no cached memory from then on. Nor has torch up to 2.12 told its random
        generator (`capture_epilogue` in aten/src/ATen/cuda/CUDAGeneratorImpl.cpp), which refuses random numbers, and
        the replay of other graphs, until a later capture ends well."""
        with suppress(RuntimeError):
            graph.capture_end()
            return  # not an error of CUDA's, so the capture has ended properly
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        with suppress(RuntimeError), warnings.catch_warnings(action="ignore"):  # warns that the graph is empty
            empty = torch.cuda.CUDAGraph()
            begin(empty, torch.cuda.graph_pool_handle())
            empty.capture_end()


def begin(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Begins a capture. Other threads, such as a loader's, may go on using CUDA meanwhile.

    It leaves inference mode: the tensors that torch makes for the first graph, and writes for each later one, would
    otherwise be inference tensors, and no capture outside of that mode could begin (pytorch/pytorch#166792).
    """
    with torch.inference_mode(False):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")


def lent(result: Any) -> Any:
    """A tensor on the same memory without owning it, so that later graphs of the pool may use the memory too: a
    replay's result is read before the next replay. Separate logits for all batch sizes would take gigabytes."""
    if not isinstance(result, Tensor) or not result.is_cuda:
        return result
    try:
        view = SimpleNamespace(__cuda_array_interface__=result.__cuda_array_interface__)
        borrowed = torch.as_tensor(view, device=result.device)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # the fallback only costs memory
        return result
    return borrowed if borrowed.data_ptr() == result.data_ptr() else result


class CudaSideStream:
    """Copies on a stream of its own. In a capture, the events between the two streams make it part of the graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            for into, source in pairs:
                into.copy_(source, non_blocking=True)
            done.record()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)


class CudaMeter:
    """The peak of memory that torch's allocator reserved: more than it handed out, as it keeps pieces between."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before_bytes = torch.cuda.memory_reserved(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return max(0, torch.cuda.max_memory_reserved(self._device) - before_bytes)


class CudaBackend:
    """One GPU. Implements `gpu.rank.Backend`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def facts(self) -> GpuFacts:
        return gpu_facts(self.device)

    def here(self) -> AbstractContextManager[Any]:
        """Makes this GPU the current device of the calling thread."""
        return torch.cuda.device(self.device)

    def host_side(self) -> Device:
        return CudaDevice(self.device)

    def capturer(self) -> Capturer:
        return CudaCapturer(self.device)

    def side_stream(self) -> SideStream:
        return CudaSideStream(self.device)

    def meter(self) -> Meter:
        return CudaMeter(self.device)

    def link(self, rendezvous: Rendezvous, options: Options) -> GpuCollectives:
        from headrace.executor.gpu.collectives import open_nccl  # imported only with several ranks

        return open_nccl(
            rendezvous,
            self.device,
            custom_all_reduce=not options.disable_custom_all_reduce,
            in_order=options.batch_invariant,
        )

    def memory(self) -> tuple[int, int]:
        """Free and total bytes, after torch's unused cached memory has been returned to the driver."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)
