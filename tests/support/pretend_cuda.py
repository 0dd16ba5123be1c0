"""A simulated GPU that enforces a GPU's rules: tensors on `cuda:0` whose values are in the CPU's memory.

A `CudaTensor` computes on the CPU tensor inside it, and refuses what a GPU would refuse: an operation between a tensor
of the host and one of the device, a kernel on the host's memory, and any wait in a capture. Every synchronisation is
recorded with the line of Headrace that caused it. Copies between pinned memory and the device arrive late: the host
finds wrong values until it has waited for a later event, and it is an error to change memory of the host while the
device may still read it.

`pretend_streams.install` puts streams, events and graphs of the same kind into `torch.cuda`.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pretend_streams import Capture, Stream, byte_view, nonsense
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("cuda", 0)
MOST_GRID = (2**31 - 1, 65535, 65535)
WAITING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique", "_unique2"),
    *("unique_dim", "unique_consecutive", "bincount", "allclose"),
}
"""Operations for which the host must know the shape or value of the result."""
NUMBERS_WELCOME = {"masked_fill_", "masked_fill", "fill_", "index_fill_", "index_fill"}
"""Operations that, besides pointwise ones, accept zero-dimensional tensors of the host."""
WITHOUT_LAUNCH = {
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"),
}
as_tensor = torch.as_tensor
ROOT = Path(__file__).parents[2]


class CudaTensor(Tensor):
    """A tensor of the simulated device. `held`, a CPU tensor, has the values; views share its memory."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, real: Tensor) -> CudaTensor:
        made: CudaTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, real.size(), strides=real.stride(), storage_offset=real.storage_offset(), dtype=real.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.held = real
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return GPU.call(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CudaTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def untyped_storage(self) -> Any:
        return DeviceStorage(self.held.untyped_storage())

    def storage_offset(self) -> int:
        return int(self.held.storage_offset())

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def is_pinned(self, *_: Any) -> bool:
        return False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"tensor": self}

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def set_(self, source: Any, offset: int, size: Any, stride: Any) -> CudaTensor:  # type: ignore[override]
        """Returns a new tensor if the size changes, which suffices if there is no other reference to this one."""
        assert isinstance(source, DeviceStorage), f"memory of {source.device} for a tensor of {DEVICE}"
        self.held.set_(source.held, offset, size, stride)
        return self if tuple(size) == tuple(self.shape) else CudaTensor(self.held)


class DeviceStorage:
    """The memory of a CudaTensor."""

    device = DEVICE

    def __init__(self, real: torch.UntypedStorage) -> None:
        self.held = real

    def nbytes(self) -> int:
        return self.held.nbytes()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def resize_(self, size: int) -> None:
        GPU.refuse_in_capture("the resizing of memory")
        GPU.num_resized[self.held._cdata] += 1
        self.held.resize_(size)


def borrow(data: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Replaces `torch.as_tensor`, for tensors over memory that another object owns."""
    tensor = getattr(data, "__cuda_array_interface__", {}).get("tensor")
    return as_tensor(data, *args, **kwargs) if tensor is None else CudaTensor(tensor.held)


def unwrap(tree: Any) -> Any:
    return tree_map_only(CudaTensor, lambda tensor: tensor.held, tree)


class Gpu:
    """The state and log of the simulated device, and its checks."""

    def __init__(self) -> None:
        self.default = self.current = Stream()
        self.capture: Capture | None = None
        self.depth = 0
        """The number of open `torch.cuda.device` contexts; with 0 nothing may be created or launched on the device."""
        self.syncs: list[str] = []
        self.launches: list[str] = []
        self.allocated_bytes = 0
        self.num_replays = 0
        self.num_resized: Counter[int] = Counter()
        """How often each storage was resized: a GPU's memory moves each time, even if the CPU's does not."""
        self.interpreting = False
        """Whether kernels that have a reference are interpreted."""
        self._is_noting = False
        self._lifted: deque[Tensor] = deque(maxlen=4)
        self._pinned: dict[int, torch.UntypedStorage] = {}

    # --- what is noted and refused ------------------------------------------------------------------------------

    def wait(self, what: str) -> None:
        """Records that the host waits for the device."""
        self.refuse_in_capture(what)
        self.syncs.append(f"{what} at {caller()}")

    def refuse_in_capture(self, what: str) -> None:
        if self.capture is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what} at {caller()}")

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _pin(self, tensor: Tensor) -> None:
        self.refuse_in_capture("an allocation of pinned memory")
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage

    # --- operations ---------------------------------------------------------------------------------------------

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [leaf for leaf in leaves if isinstance(leaf, CudaTensor)]
        target = kwargs.get("device")
        is_to_device = target is not None and torch.device(target).type == DEVICE.type
        if not here and not is_to_device:
            return self._on_host(func, name, args, kwargs)
        if torch.Tag.inplace_view in func.tags and name != "detach_":
            raise NotImplementedError(f"{func} changes a tensor's shape in place")
        if name == "is_pinned":
            return False
        self.current.flush()
        if name == "copy_" and not any(args[1] is lifted for lifted in self._lifted):
            return self._copy(args[0], args[1], bool(kwargs.get("non_blocking") or args[2:]))
        if name == "_to_copy" and (not here or (target is not None and not is_to_device)):
            return self._move(args[0], kwargs)
        if is_to_device and not self.depth:
            raise RuntimeError(f"{func} makes a tensor outside of the device's context, at {caller()}")
        self._check(func, name, args, kwargs, [leaf for leaf in leaves if not isinstance(leaf, CudaTensor)])
        if target is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        kwargs.pop("pin_memory", None)
        if name == "_scaled_mm":
            return CudaTensor(self.run(scaled_mm, "_scaled_mm", unwrap(args), unwrap(kwargs)))
        out = self.run(func, name, unwrap(args), unwrap(kwargs))
        if here and is_view(func):  # a view is an inference tensor if its base is, whatever the current mode
            with torch.inference_mode(here[0].is_inference()):
                return self._wrapped(out, here)
        return self._wrapped(out, here)

    def run(self, func: Any, name: str, args: Any, kwargs: Any, launches: bool = True) -> Any:
        """Computes on the CPU tensors, and records the call in a capture."""
        if self.capture is not None:
            self.capture.before(func, args, kwargs)
        out = func(*args, **kwargs)
        if self.capture is not None:
            self.capture.add(func, args, kwargs, out)
        if launches and not (name in WITHOUT_LAUNCH or is_view(func)):
            self.launches.append(f"{name} at {caller()}")
        return out

    def launch(self, function: Any, run: Callable[..., Any], args: Any, grid: Any, kwargs: Any) -> None:
        """Launches a Triton kernel."""
        name = function.__name__
        if not self.depth:
            raise RuntimeError(f"{name} is launched outside of the device's context, at {caller()}")
        for index, argument in enumerate([*args, *kwargs.values()]):
            if isinstance(argument, Tensor) and not isinstance(argument, CudaTensor):
                raise ValueError(f"Pointer argument (at {index}) cannot be accessed from Triton (cpu tensor?): {name}")
        if any(size > most for size, most in zip(grid, MOST_GRID, strict=False)):
            raise RuntimeError(f"Triton Error [CUDA]: invalid argument: grid {grid} of {name}")
        self.current.flush()
        if self._is_noting:
            self.launches.append(f"{name} at {caller()}")
            return

        def interpret(*reals: Any, **real_kwargs: Any) -> None:
            with torch._C._DisableTorchDispatch():
                run(function, *reals, grid=grid, warmup=False, **real_kwargs)

        self.run(interpret, name, unwrap(args), unwrap(kwargs))

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Inside, launched kernels are only recorded; the caller computes their results in another way."""
        self._is_noting = True
        try:
            yield
        finally:
            self._is_noting = False

    def _on_host(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if name == "is_pinned":
            return self.is_pinned(args[0])
        if name == "lift_fresh":
            self._lifted.append(args[0])
        if name == "_pin_memory":
            func, name, kwargs = torch.ops.aten.clone.default, "clone", {"pin_memory": True}
        wanted = kwargs.pop("pin_memory", False) if "pin_memory" in kwargs else False
        out = func(*args, **kwargs)
        if wanted:
            self._pin(out)
        return out

    def _check(self, func: Any, name: str, args: Any, kwargs: Any, host: list[Tensor]) -> None:
        if name in WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.wait(name)
        indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
            self.wait(f"{name} by a mask")
        for tensor in host:
            if any(tensor is index for index in indices):
                self.wait(f"{name} by indices of the host")
            elif name in ("index_put_", "copy_") and any(tensor is lifted for lifted in self._lifted):
                continue  # a Python number, which torch converts to a tensor of the device
            elif tensor.dim() or not (torch.Tag.pointwise in func.tags or name in NUMBERS_WELCOME):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but {func} was given cpu and {DEVICE}: {caller()}"
                )
        if name in ("normal_", "uniform_", "random_", "bernoulli_", "exponential_"):
            self.refuse_in_capture(name)

    def _wrapped(self, out: Any, here: list[CudaTensor]) -> Any:
        known = {id(tensor.held): tensor for tensor in here}

        def wrap(real: Tensor) -> Tensor:
            if id(real) in known:
                return known[id(real)]
            return CudaTensor(real)

        self.allocated_bytes += sum(leaf.nbytes for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        return tree_map_only(Tensor, wrap, out)

    # --- copies -------------------------------------------------------------------------------------------------

    def _move(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """`Tensor.to` from the host to the device or back."""
        to_host = isinstance(source, CudaTensor)
        dtype = kwargs.get("dtype") or source.dtype
        if to_host:
            self.wait("a copy to the host")
            return source.held.to(dtype, copy=True)  # type: ignore[attr-defined]
        if not self.depth:
            raise RuntimeError(f"a copy to the device outside of its context, at {caller()}")
        into = CudaTensor(torch.empty_like(source, dtype=dtype))
        self.allocated_bytes += into.nbytes
        if self.capture is not None:
            self.capture.make(into.held)
        self._copy(into, source, bool(kwargs.get("non_blocking")))
        return into

    def _copy(self, into: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
        if isinstance(into, CudaTensor) and isinstance(source, CudaTensor):
            self.run(torch.ops.aten.copy_.default, "copy_", (into.held, source.held), {})
            return into
        host, plain = (source, into) if isinstance(into, CudaTensor) else (into, source)
        is_plain = into.dtype == source.dtype and into.shape == source.shape and host.is_contiguous()
        is_plain = is_plain and unwrap(plain).is_contiguous()
        is_pinned = self.is_pinned(host) and is_plain  # other copies go through a temporary, which is not pinned
        where = f"a copy {'to' if isinstance(into, CudaTensor) else 'from'} the device"
        if not (non_blocking and is_pinned):
            self.wait(where if is_pinned else f"{where} by memory that is not pinned")
        if isinstance(into, CudaTensor):
            self.current.copy_in(into.held, source, is_late=non_blocking and is_pinned)
        else:
            self.current.copy_out(into, unwrap(source), is_late=non_blocking and is_pinned)
        return into


class Mode(TorchDispatchMode):
    """Directs torch's operations to the simulated device, on the thread that entered the mode."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # with True torch would import its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_composite(func):  # torch itself decomposes it only outside of inference mode
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return GPU.call(func, args, dict(kwargs or {}))


GPU = Gpu()


@functools.cache
def is_composite(func: Any) -> bool:
    return bool(func._can_decompose())


@functools.cache
def is_view(func: Any) -> bool:
    """Whether its result is a view of an argument."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    infos = [returned.alias_info for returned in schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def caller() -> str:
    """The innermost line of the call stack that is in Headrace's own code, outside the tests."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if where := ours(frame.f_code.co_filename):
            return f"{where}:{frame.f_lineno}"
        frame = frame.f_back
    return "a test"


@functools.cache
def ours(file: str) -> str:
    """The path of a file of Headrace within the repository; "" for files of tests and others."""
    path = Path(file)
    is_ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] not in ("tests", ".venv")
    return str(path.relative_to(ROOT)) if is_ours else ""


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Any = None, result: Any = None, out_dtype: Any = None
) -> Tensor:
    """`torch._scaled_mm` with a scale for each row, which the CPU's lacks, with the GPU's checks."""
    assert a.is_contiguous()
    assert b.stride(0) == 1, "the second factor must be column-major"
    assert b.shape[0] % 16 == b.shape[1] % 16 == 0, "sides must be multiples of 16"
    assert scale_a.shape == (len(a), 1)
    assert scale_b.shape == (1, b.shape[1])
    assert scale_a.is_contiguous()
    assert scale_b.is_contiguous()
    assert out_dtype in (torch.bfloat16, torch.float16)
    product = (a.float() @ b.float()) * scale_a * scale_b
    return (product if bias is None else product + bias.float()).to(out_dtype)


__all__ = ["DEVICE", "GPU", "CudaTensor", "Mode", "byte_view", "nonsense"]
