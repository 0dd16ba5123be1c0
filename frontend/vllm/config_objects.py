"""vLLM's config classes for options that take a dict here: an object is the dict of the fields passed to it."""

from __future__ import annotations

import enum
from typing import Any


class ConfigDict(dict[str, Any]):
    """A dict of the given fields. The option checks them, and has its own defaults for those left out."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} was made without {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value  # checked by the option, as the constructor's

    def __delattr__(self, name: str) -> None:
        del self[name]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.items())})"


class ReasoningConfig(ConfigDict):
    """The option reasoning_config."""


class PoolerConfig(ConfigDict):
    """The option pooler_config."""


class ProfilerConfig(ConfigDict):
    """The option profiler_config."""


class SpeculativeConfig(ConfigDict):
    """The option speculative_config."""


class EPLBConfig(ConfigDict):
    """The option eplb_config."""


class StructuredOutputsConfig(ConfigDict):
    """The option structured_outputs_config."""


class CompilationConfig(ConfigDict):
    """The option compilation_config, of which only what sets CUDA graphs has an effect."""


class PassConfig(ConfigDict):
    """A part of CompilationConfig."""


class DynamicShapesConfig(ConfigDict):
    """A part of CompilationConfig."""


class CompilationMode(enum.IntEnum):
    """A value in CompilationConfig."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CUDAGraphMode(enum.Enum):
    """A value in CompilationConfig."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"


class DynamicShapesType(enum.Enum):
    """A value in DynamicShapesConfig."""

    BACKED = "backed"
    UNBACKED = "unbacked"
    BACKED_SIZE_OBLIVIOUS = "backed_size_oblivious"
