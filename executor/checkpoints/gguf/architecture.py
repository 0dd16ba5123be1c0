"""What is known of an architecture of GGUF files: an entry of `dense.py` or `mixtures.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.executor.checkpoints.gguf.header import GGUFHeader, StringArray
from headrace.ipc.failure import ModelError

Extra = Callable[["Fields", Mapping[str, Any]], dict[str, Any]]
"""Fields of the config that an architecture has beside the common ones, or other than these."""


@dataclass(frozen=True)
class GGUFArchitecture:
    """What llama.cpp's converter does to a family, and so what must be undone, is in its conversion scripts
    (https://github.com/ggml-org/llama.cpp, conversion/)."""

    architecture: str
    """As in a Hugging Face config's `architectures`."""
    model_type: str
    permuted: bool = False
    """The rows of the query and key projections are reordered for rotation by neighbouring pairs."""
    offset_norms: bool = False
    """Norm weights have 1 added to them."""
    is_mixture: bool = False
    extra: Extra | None = None
    renormalised: bool = False
    """Whether chosen experts' weights add up to 1, where the file does not say."""


class Fields:
    """Typed reading of one architecture's keys."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.prefix = str(header.metadata.get("general.architecture", ""))

    def get(self, key: str, kinds: tuple[type, ...], default: Any = None) -> Any:
        """A value of one of the kinds. Raises ModelError when it is neither there nor has a default, or of another."""
        name = f"{self.prefix}.{key}"
        value = self.header.metadata.get(name, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # given per layer, all alike
        if value is None:
            raise ModelError(f"{self.header.path} lacks the metadata key {name}")
        if (isinstance(value, bool) and bool not in kinds) or not isinstance(value, kinds):
            shown = f"an array of {len(value)}" if isinstance(value, np.ndarray | StringArray) else repr(value)
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ModelError(f"{self.header.path}: the metadata key {name} is {shown}; a single {expected} is expected")
        return value

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.header.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        value: int = self.get(key, (int,), default)
        return value

    def integers(self, key: str, default: int | None = None) -> int | list[int]:
        """One of all layers, or one of each."""
        values = self.header.metadata.get(f"{self.prefix}.{key}")
        if isinstance(values, np.ndarray) and values.dtype.kind in "iu" and len(set(values.tolist())) > 1:
            return [int(each) for each in values]
        return self.integer(key, default)

    def floats(self, key: str) -> list[float] | None:
        """One of each layer; None where the file has none."""
        values = self.header.metadata.get(f"{self.prefix}.{key}")
        if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
            return None
        return [float(each) for each in values]

    def number(self, key: str, default: float | None = None) -> float:
        return float(self.get(key, (int, float), default))

    def flag(self, key: str, default: bool) -> bool:
        value: bool = self.get(key, (bool,), default)
        return value

    def holds(self, tensor: str) -> bool:
        """Whether the file has that tensor."""
        return tensor in self.header.tensors

    def rows(self, tensor: str) -> int:
        """How many rows that tensor has. Raises ModelError where there is none."""
        if tensor not in self.header.tensors:
            raise ModelError(f"{self.header.path} has no tensor {tensor}")
        return int(self.header.tensors[tensor].shape[0])

    def any_layer_holds(self, tensor: str) -> bool:
        """Whether a layer has a tensor whose name ends so: the first ones may be of another kind."""
        return any(name.endswith(f".{tensor}") for name in self.header.tensors)

    def sliding_layers(self) -> list[str] | None:
        """`layer_types`, where the file says of each layer whether it slides."""
        pattern = self.header.metadata.get(f"{self.prefix}.attention.sliding_window_pattern")
        if not isinstance(pattern, np.ndarray):
            return None
        return ["sliding_attention" if slides else "full_attention" for slides in pattern]
