"""Triton kernels on the simulated GPU: interpreted, or (some hundred times faster) replaced by their references.

In both cases the real launching code runs with tensors of the device, and each launch is checked and recorded. A
replaced kernel's outputs are computed by the op's torch reference. Linear layers are always replaced, since the
interpreter takes a minute for each.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pretend_cuda import GPU, CudaTensor, Mode, borrow, unwrap
from pretend_streams import install
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from triton_language import stay_interpreted

from headrace.kernels.reference import rows as reference
from headrace.kernels.registry import Version, choose_reference
from headrace.kernels.triton import versions

LINEAR = (*versions.LINEAR, "linear_fp8_dynamic")


def begin() -> None:
    """Installs the simulation. Call it once per process, before importing modules of Headrace that use torch.cuda's
    classes and before the first kernel is chosen. The environment must select Triton's interpreter."""
    from triton.runtime.interpreter import InterpretedFunction

    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, where a GPU's arithmetic silently gives infinity
    torch.set_num_threads(1)
    stay_interpreted()
    install(GPU, Mode)
    torch.as_tensor = borrow
    run = InterpretedFunction.run

    def launch(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        GPU.launch(function, run, args, grid, kwargs)

    InterpretedFunction.run = launch  # type: ignore[method-assign]
    versions.VERSIONS = tuple(_changed(version) for version in versions.VERSIONS)


def _changed(version: Version) -> Version:
    def why_not(device: Any = None, **facts: Any) -> str:
        """Refuses CPU tensors, which interpreted kernels would otherwise accept too."""
        return "not here" if device == torch.device("cpu") else version.why_not(device=device, **facts)

    function = _linear(version) if version.op in LINEAR else _either(version)
    return dataclasses.replace(version, function=function, why_not=why_not)


def _either(version: Version) -> Callable[..., Any]:
    def serve(*args: Any, **options: Any) -> Any:
        return _computed(version.op, version.function, choose_reference(version.op), args, options)

    return serve


def _linear(version: Version) -> Callable[..., Any]:
    def pack(*args: Any) -> Any:
        packed: Any = version.function(*args)
        plain = choose_reference(version.op)(*_held(args))

        def fused(x: Tensor, norm: Any = None, activation: Any = None, residual: Any = None) -> Tensor:
            if norm is not None:
                x = reference.rms_norm(x, None, *norm)[0]
            x = plain.apply(x)
            if activation is not None:
                x = reference.activate_and_multiply(x, activation)
            return x if residual is None else x + residual

        for name, compute in (("apply", plain.apply), ("apply_fused", fused)):
            if hasattr(packed, name):
                real = getattr(packed, name)
                setattr(packed, name, functools.partial(_called, version.op, real, compute))
        return packed

    return pack


def _called(op: str, real: Callable[..., Any], compute: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return _computed(op, real, compute, args, options)


def _computed(op: str, real: Callable[..., Any], compute: Callable[..., Any], args: Any, options: Any) -> Any:
    """Calls `real`, which launches kernels, and fills its outputs with the results of `compute` on CPU tensors."""
    is_interpreted = GPU.interpreting and op not in LINEAR
    if is_interpreted or not any(isinstance(tensor, CudaTensor) for tensor in _tensors((args, options))):
        return real(*args, **options)
    with GPU.noting():
        out = real(*args, **options)
    into = [tensor.held for tensor in tree_leaves(out) if isinstance(tensor, CudaTensor)]

    def fill(*_: Any) -> None:
        # New arguments each time, since references cache values that they derive in their arguments.
        held, options_held = _held(args), _held(options)
        with torch._C._DisableTorchDispatch():
            for target, values in zip(into, tree_leaves(compute(*held, **options_held)), strict=False):
                target.copy_(values)

    GPU.run(fill, op, (into, unwrap(list(_tensors((args, options))))), {}, launches=False)
    return out


def _held(tree: Any) -> Any:
    """Replaces the device's tensors by the CPU tensors inside them, also in dataclasses."""

    def replace(leaf: Any) -> Any:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = {field.name: _held(getattr(leaf, field.name)) for field in dataclasses.fields(leaf) if field.init}
            return type(leaf)(**fields)
        return unwrap(leaf)

    return tree_map(replace, tree)


def _tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
