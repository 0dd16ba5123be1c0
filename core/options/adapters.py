"""The options of adapters as the values that the engine runs with (`AdapterLimits`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from headrace.ipc.failure import OptionError
from headrace.ipc.struct_types import threadsafe

if TYPE_CHECKING:
    from headrace.core.options.engine_options import Options

MOST_RANK = 512
"""vLLM's highest max_lora_rank."""
_SLOTS = 64
"""Slots unless the options say how many: a slot is host memory, taken only while an adapter is in it. On a GPU, where
each takes memory from the start, there are max_loras."""
_AT_ONCE = 8
"""max_loras unless the options say how many."""
_ONLY_WITH = ("max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "lora_target_modules")
_OF_VLLM = {"max_loras": 1, "max_lora_rank": 16}
"""vLLM's defaults, which programs made for it pass on where they ask for no adapters, as lm-eval does."""

AdapterDtype = Literal["float32", "float16", "bfloat16"]


class AdapterLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine with enable_lora treats adapters."""

    max_loras: int
    """Most distinct adapters in a step, and in a request."""
    slots: int
    """Most adapters in memory: slots 0 to slots - 1 of every rank."""
    max_rank: int
    """An adapter with a larger matrix is refused."""
    dtype: AdapterDtype
    """In which the factors are kept and multiplied."""
    target_modules: tuple[str, ...]
    """Names, or ends of names, of the modules whose matrices adapters may change; empty: all. An adapter's matrices of
    other modules are left out."""
    in_device_memory: bool = False
    """Whether slots have their memory from the start, on the device that computes, as those of a GPU do."""


def max_loras_of(options: Options) -> int:
    """How many adapters the rows of one step may have."""
    return options.max_loras or min(_AT_ONCE, options.max_cpu_loras or _AT_ONCE)


def adapters_of(options: Options, dtype: str, *, in_device_memory: bool = False) -> AdapterLimits | None:
    """None without enable_lora. dtype: the plan's. Raises OptionError for options that contradict each other."""
    if not options.enable_lora:
        for name in _ONLY_WITH:
            value, usual = getattr(options, name), getattr(type(options)(), name)
            if value not in (usual, _OF_VLLM.get(name, usual)):
                raise OptionError(f"{name}={value} needs enable_lora: set it, or leave {name} out")
        return None
    max_loras = max_loras_of(options)
    if options.max_cpu_loras is not None and options.max_cpu_loras < max_loras:
        raise OptionError(
            f"max_cpu_loras={options.max_cpu_loras} adapters in memory are fewer than the max_loras={max_loras} of one "
            "step; raise the one or lower the other"
        )
    if options.shares_experts:
        raise OptionError(
            "enable_lora cannot apply where engines share experts (enable_expert_parallel with data_parallel_size): "
            "they compute tokens of each other's requests, whose adapters they do not have"
        )
    if options.distributed_executor_backend == "external_launcher":
        raise OptionError(
            "enable_lora cannot apply with distributed_executor_backend=external_launcher: each rank plans its own "
            "steps, and they would differ by when each rank has loaded an adapter; use mp"
        )
    if in_device_memory and options.cpu_offload_gb:
        raise OptionError(
            "enable_lora cannot apply with cpu_offload_gb: the layers that it keeps in the host's memory would take "
            "their adapters with them; leave one of the two out"
        )
    found = options.lora_dtype if options.lora_dtype != "auto" else dtype
    return AdapterLimits(
        max_loras=max_loras,
        slots=options.max_cpu_loras or (max_loras if in_device_memory else max(_SLOTS, max_loras)),
        max_rank=options.max_lora_rank,
        dtype=msgspec.convert(found, threadsafe(AdapterDtype)),
        target_modules=options.lora_target_modules,
        in_device_memory=in_device_memory,
    )
