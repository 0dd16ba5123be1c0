"""Streams, events, graphs and memory figures of the simulated GPU, which replace those of `torch.cuda`.

A stream computes its work at once, except copies from pinned memory: these wait until the same stream gets other work,
or until another stream or the host waits for them. The values of a copy to the host arrive when the host waits for a
later event, or has queried it often enough.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

GIB = 1 << 30
MEMORY = (7 * GIB, 8 * GIB)
ASKED_BEFORE_PASSED = 2
CUDA, META = 1, 14
"""Values of c10::DeviceType."""


def byte_view(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload]


def nonsense(tensor: Tensor) -> None:
    """Fills a tensor with NaN (floats) or -1 (integers)."""
    tensor.view(-1).view(torch.uint8).fill_(0xFF)


class Stream:
    """A stream. `at` counts its work, and `passed` the work that the host knows to be complete."""

    gpu: Any = None

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.at = self.passed = 0
        self._late: list[tuple[int, Callable[[], None]]] = []  # copies to the device that are still pending
        self._to_host: list[tuple[int, Tensor, Tensor]] = []
        self._read: list[tuple[int, Tensor, Tensor]] = []  # host memory, and the values that it must keep
        self._needs: list[tuple[int, Stream, int]] = []  # (own point, other stream, its point to wait for)

    def flush(self, until: int | None = None) -> None:
        """Executes pending copies to the device."""
        while self._late and (until is None or self._late[0][0] <= until):
            self._late.pop(0)[1]()

    def copy_in(self, into: Tensor, source: Tensor, is_late: bool) -> None:
        self.at += 1
        capture = self.gpu.capture
        if capture is not None and self not in capture.streams:
            raise RuntimeError("dependency created on uncaptured work in another stream: a copy beside the capture")
        if not is_late:
            into.copy_(source)
            return
        with torch._C._DisableTorchDispatch():
            self._read.append((self.at, source, source.clone()))
        self.gpu.run(nonsense, "poison", (into,), {}, launches=False)

        def copy() -> None:
            self.gpu.run(torch.ops.aten.copy_.default, "copy from the host", (into, source), {})

        self._late.append((self.at, copy))

    def copy_out(self, into: Tensor, source: Tensor, is_late: bool) -> None:
        self.at += 1
        with torch._C._DisableTorchDispatch():
            if not is_late:
                into.copy_(source)
                return
            self._to_host.append((self.at, into, source.clone()))
            nonsense(into)
        self.gpu.launches.append("copy to the host")

    def arrive(self, at: int) -> None:
        """The host learns that all work up to `at` is done. Raises AssertionError for host memory that changed too
        early."""
        self.flush(at)
        self.passed = max(self.passed, at)
        with torch._C._DisableTorchDispatch(), torch.inference_mode():
            while self._to_host and self._to_host[0][0] <= at:
                _, into, values = self._to_host.pop(0)
                into.copy_(values)
            while self._read and self._read[0][0] <= at:
                _, source, values = self._read.pop(0)
                same = torch.equal(source.view(-1).view(torch.uint8), values.view(-1).view(torch.uint8))
                assert same, "memory of the host was written while the device may still have read it"
        while self._needs and self._needs[0][0] <= at:
            _, other, other_at = self._needs.pop(0)
            other.arrive(other_at)

    # --- as torch.cuda.Stream -----------------------------------------------------------------------------------

    def wait_event(self, event: Event) -> None:
        stream, at = event.stream, event.at
        if stream is None or stream is self:
            return
        capture = self.gpu.capture
        if capture is not None:
            capture.meet(self, event)
        stream.flush(at)
        self.at += 1
        self._needs.append((self.at, stream, at))

    def wait_stream(self, stream: Stream) -> None:
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.gpu.wait("Stream.synchronize")
        self.arrive(self.at)


class Event:
    """As torch.cuda.Event; it can be subclassed."""

    gpu: Any = None

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self._timed = enable_timing
        self.stream: Stream | None = None
        self.at = 0
        self.capture: Capture | None = None
        self._asked = 0
        self._at_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self.gpu.current
        self.stream.at += 1
        self.at, self._asked, self._at_s = self.stream.at, 0, time.monotonic()
        capture = self.gpu.capture
        self.capture = capture if capture is not None and self.stream in capture.streams else None

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.current).wait_event(self)

    @property
    def has_passed(self) -> bool:
        return self.stream is None or self.at <= self.stream.passed

    def query(self) -> bool:
        self.gpu.refuse_in_capture("Event.query")
        self._asked += not self.has_passed
        if self._asked > ASKED_BEFORE_PASSED and self.stream is not None:
            self.stream.arrive(self.at)
        return self.has_passed

    def synchronize(self) -> None:
        self.gpu.refuse_in_capture("Event.synchronize")
        if not self.has_passed and self.stream is not None:
            self.gpu.wait("Event.synchronize")
            self.stream.arrive(self.at)

    def elapsed_time(self, end: Event) -> float:
        if not (self._timed and end._timed and self.stream and end.stream):
            raise RuntimeError("both events must be timed and recorded")
        if not (self.has_passed and end.has_passed):
            raise RuntimeError("both events must be completed before calculating elapsed time")
        return (end._at_s - self._at_s) * 1e3


class Capture:
    """The operations that a graph repeats. As on a GPU, none of them has been computed when the capture ends: memory
    that existed before is restored, and memory allocated in the capture holds wrong values."""

    def __init__(self, stream: Stream) -> None:
        self.streams = [stream]
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._unjoined: dict[int, int] = {}
        self._made: dict[int, Tensor] = {}
        self._saved: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._found: dict[int, tuple[torch.UntypedStorage, int]] = {}
        """By address: memory that existed before and is used, and how often it had been resized at the capture."""

    def _num_resized(self, storage: torch.UntypedStorage) -> int:
        found: int = self.streams[0].gpu.num_resized[storage._cdata]
        return found

    def make(self, real: Tensor) -> None:
        self._made[_address(real)] = real

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Saves the memory that an operation may change, which is that of all its arguments."""
        for tensor in _tensors((args, kwargs)):
            at = _address(tensor)
            if at in self._made or at in self._found:
                continue
            storage = tensor.untyped_storage()
            self._found[at] = storage, self._num_resized(storage)
            self._saved[at] = storage, byte_view(storage).clone()

    def add(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        for tensor in _tensors(out):
            if _address(tensor) not in self._found:
                self._made[_address(tensor)] = tensor
        self.calls.append((func, args, kwargs, out))

    def meet(self, waiting: Stream, event: Event) -> None:
        """Called when one stream waits for an event of another."""
        if event.capture is not self:
            if waiting in self.streams:
                raise RuntimeError("dependency created on uncaptured work in another stream")
            return
        if waiting not in self.streams:
            self.streams.append(waiting)
        if waiting is self.streams[0] and event.stream is not None:
            self._unjoined[id(event.stream)] = event.at

    def end(self) -> None:
        for stream in self.streams[1:]:
            if stream._late or self._unjoined.get(id(stream), -1) < stream.at:
                raise RuntimeError("capturing stream has unjoined work")
        with torch.inference_mode():
            for storage, values in self._saved.values():
                byte_view(storage).copy_(values)
            self._saved.clear()
            self.spoil()

    def spoil(self) -> None:
        """Fills this graph's own memory with wrong values, since another graph of the pool has run."""
        with torch.inference_mode():
            for tensor in self._made.values():
                byte_view(tensor.untyped_storage()).fill_(0xFF)

    def replay(self) -> None:
        moved = [storage for storage, resized in self._found.values() if self._num_resized(storage) != resized]
        assert not moved, "a graph is replayed after memory that it uses has moved"
        with torch.inference_mode():
            for func, args, kwargs, recorded in self.calls:
                inputs = {_address(tensor) for tensor in _tensors((args, kwargs))}
                repeated = func(*args, **kwargs)
                for old, new in zip(_tensors(recorded), _tensors(repeated), strict=True):
                    if _address(old) not in inputs:
                        old.copy_(new)


class Graph:
    """As torch.cuda.CUDAGraph."""

    gpu: Any = None
    pools: dict[Any, list[Graph]] = {}  # noqa: RUF012 the process's, as a device's are

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture: Capture | None = None
        self._pool: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        gpu = self.gpu
        if gpu.current is gpu.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        gpu.refuse_in_capture("another capture")
        gpu.current.flush()
        self._pool = pool or object()
        gpu.capture = Capture(gpu.current)
        gpu.launches.clear()

    def capture_end(self) -> None:
        capture, self.gpu.capture = self.gpu.capture, None
        if capture is None:
            raise RuntimeError("there is no capture to end")
        with torch._C._DisableTorchDispatch():
            capture.end()
        self._capture = capture
        self.pools.setdefault(self._pool, []).append(self)

    def replay(self) -> None:
        assert self._capture is not None, "a graph is replayed that was not captured"
        self.gpu.refuse_in_capture("a replay")
        self.gpu.current.flush()
        with torch._C._DisableTorchDispatch():
            for graph in self.pools[self._pool]:
                if graph is not self and graph._capture is not None:
                    graph._capture.spoil()
            self._capture.replay()
        self.gpu.num_replays += 1


def _allow_guards() -> None:
    """Makes torch's indexing work: it makes a tensor's device the current one, which a build without CUDA cannot. The
    guard of the device `meta`, which does nothing, is installed for CUDA."""
    torch._C._ensureCUDADeviceGuardSet()  # for a build with CUDA but without a GPU
    if torch.version.cuda is None:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        guards = (ctypes.c_void_p * (META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
        guards[CUDA] = guards[META]


class Generator(torch.Generator):
    """A generator of the device, which is one of the CPU."""

    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def install(gpu: Any, new_mode: Callable[[], Any]) -> None:
    """Replaces parts of torch.cuda permanently in this process. Call it before importing modules of Headrace that use
    torch.cuda's classes."""
    Stream.gpu = Event.gpu = Graph.gpu = gpu
    _allow_guards()
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=MEMORY[1]
    )

    def synchronize(_: Any = None) -> None:
        gpu.wait("torch.cuda.synchronize")
        gpu.current.arrive(gpu.current.at)

    functions = {
        **_contexts(gpu, new_mode),
        "_lazy_init": lambda: None,
        "default_stream": lambda _=None: gpu.default,
        "current_stream": lambda _=None: gpu.current,
        "synchronize": synchronize,
        "empty_cache": lambda: gpu.refuse_in_capture("empty_cache"),
        "mem_get_info": lambda _=None: MEMORY,
        "memory_allocated": lambda _=None: gpu.allocated_bytes,
        "max_memory_allocated": lambda _=None: gpu.allocated_bytes,
        "reset_peak_memory_stats": lambda _=None: None,
        "graph_pool_handle": object,
        "get_device_properties": lambda _=None: properties,
        "get_device_capability": lambda _=None: (9, 0),
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    torch._C._cuda_endAllocateToPool = lambda *_: None  # type: ignore[attr-defined]
    torch.Generator = Generator  # type: ignore[misc]


def _contexts(gpu: Any, new_mode: Callable[[], Any]) -> dict[str, Any]:
    threads = threading.local()

    @contextmanager
    def device(_: Any) -> Iterator[None]:
        """As torch.cuda.device: inside, torch uses the simulated device on the calling thread."""
        if getattr(threads, "inside", False):
            yield
            return
        threads.inside = True
        gpu.depth += 1
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            with new_mode():
                yield
        finally:
            threads.inside = False
            gpu.depth -= 1
            torch._C._set_only_lift_cpu_tensors(False)

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        before, gpu.current = gpu.current, chosen
        try:
            yield
        finally:
            gpu.current = before

    return {"device": device, "stream": stream}
