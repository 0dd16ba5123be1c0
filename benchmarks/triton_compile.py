"""Compiles the launches of the entry points of `headrace.kernels.triton`, for a GPU that need not be present.

`record` runs an entry point on tensors of the meta device, which have shapes but no memory: launches are recorded
instead of run, and an entry point that reads a value on the host fails. `compile_launch` compiles one such launch ahead
of time, and determines its resources by cuobjdump.
"""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from headrace.kernels.triton import configs

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "launch_pdl")
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
}
DEVICES = {80: configs.DeviceProperties((8, 0), 108), 90: configs.DeviceProperties((9, 0), 132)}
"""An A100 and an H200."""


@dataclass(frozen=True, eq=False)
class LaunchRecord:
    """One launch of a kernel."""

    function: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True)
class Resources:
    """The resources that a compiled kernel needs."""

    num_registers: int
    """Per thread; at most 255."""
    spilled_bytes: int
    """Bytes of each thread's stack to which registers are spilled."""
    shared_bytes: int
    num_threads: int
    tensor_core_instructions: int


@contextmanager
def pretended(architecture: int) -> Iterator[None]:
    """Makes every tensor appear to be on this GPU."""
    with mock.patch.object(configs, "device_of", return_value=DEVICES[architecture]):
        yield


def record(run: Callable[[], Any], architecture: int) -> list[LaunchRecord]:
    """The launches of `run` on that architecture."""
    found: list[LaunchRecord] = []

    def note(function: JITFunction, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        arguments = dict(zip(function.arg_names, args, strict=False))
        options = {name: keywords.pop(name) for name in OPTIONS if name in keywords}
        found.append(LaunchRecord(function, tuple(grid), {**arguments, **keywords}, options))

    with pretended(architecture), mock.patch.object(JITFunction, "run", note):
        run()
    return found


def compile_launch(launch: LaunchRecord, architecture: int) -> Resources:
    """The resources of the launch on `architecture`."""
    compiled = compile_kernel(launch, architecture)
    num_threads = 32 * compiled.metadata.num_warps
    return _resources(compiled.asm["cubin"], compiled.asm["ptx"], compiled.metadata.shared, num_threads)


def compile_kernel(launch: LaunchRecord, architecture: int) -> Any:
    """Triton's compiled kernel, with the specialisations that its own launcher would choose."""
    source = ASTSource(launch.function, *_specialised(launch))
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch.options)


def digest_of(launch: LaunchRecord, architecture: int) -> str:
    """A hash of everything that one version of Triton compiles from: the text of the kernel and of its callees, the
    specialisations of its arguments, the options and the architecture."""
    texts: dict[str, str] = {}
    _add_texts(launch.function, texts)
    parts = (sorted(texts.items()), *_specialised(launch), sorted(launch.options.items()), architecture)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _add_texts(function: JITFunction, texts: dict[str, str]) -> None:
    """Adds, by name, the texts of a kernel, of its callees, and of the global constants that they read."""
    name = f"{function.__module__}.{function.__name__}"
    if name in texts:
        return
    texts[name] = function.src
    around = function.fn.__globals__
    for read in {node.id for node in ast.walk(ast.parse(function.src)) if isinstance(node, ast.Name)}:
        value = around.get(read)
        if isinstance(value, JITFunction):
            _add_texts(value, texts)
        elif isinstance(value, int | float | str | tl.constexpr):
            texts[f"{function.__module__}.{read}"] = repr(value)


def _specialised(launch: LaunchRecord) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any]]:
    """Types of arguments by name; and by index the constants, and the attributes of the other arguments."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.function.params):
        value = launch.arguments.get(parameter.name, parameter.default)
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialised and type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
            continue
        signature[parameter.name] = _type(value)
        is_aligned = isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0)
        if specialised and is_aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    return "fp32"


def _resources(cubin: bytes, ptx: str, shared_bytes: int, num_threads: int) -> Resources:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if usage is None:
        raise ValueError(f"cuobjdump named no registers: {text}")
    instructions = len(re.findall(r"^\s*(?:mma\.sync|wgmma\.mma_async)", ptx, re.M))
    return Resources(int(usage[1]), int(usage[2]), shared_bytes, num_threads, instructions)
