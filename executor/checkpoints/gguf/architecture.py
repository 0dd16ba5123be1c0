"""`GGUFArchitecture`, an entry of `dense.py` or `mixtures.py`, and typed access to a file's metadata for these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.executor.checkpoints.gguf.header import GGUFHeader, StringArray
from headrace.ipc.failure import ModelError

Extra = Callable[["Fields", Mapping[str, Any]], dict[str, Any]]
"""(fields, common config) -> config fields of an architecture, which extend or replace the common ones."""


@dataclass(frozen=True)
class GGUFArchitecture:
    """How to read one architecture. llama.cpp's converter changes weights, which must be undone: its scripts show how
    (https://github.com/ggml-org/llama.cpp, conversion/)."""

    architecture: str
    """Name as in a Hugging Face config's `architectures`."""
    model_type: str
    permuted: bool = False
    """Whether rows of the query and key projections are reordered for rotation of neighbouring pairs."""
    offset_norms: bool = False
    """Whether 1 was added to norm weights."""
    is_mixture: bool = False
    extra: Extra | None = None
    renormalised: bool = False
    """Whether the chosen experts' weights are scaled to a sum of 1, if the file does not say."""


class Fields:
    """Typed access to the metadata keys of a file's architecture. A key is given without the architecture's prefix."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.prefix = str(header.metadata.get("general.architecture", ""))

    def get(self, key: str, kinds: tuple[type, ...], default: Any = None) -> Any:
        """The key's value. Raises ModelError if it is missing and there is no default, or of none of the `kinds`."""
        name = f"{self.prefix}.{key}"
        value = self.header.metadata.get(name, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # one value per layer, all equal
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
        """One integer for all layers, or a list with one per layer. Raises ModelError."""
        values = self.header.metadata.get(f"{self.prefix}.{key}")
        if isinstance(values, np.ndarray) and values.dtype.kind in "iu" and len(set(values.tolist())) > 1:
            return [int(each) for each in values]
        return self.integer(key, default)

    def floats(self, key: str) -> list[float] | None:
        """One number per layer; None if the key is missing or no array of floats."""
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
        """Number of the tensor's rows. Raises ModelError if the file does not have it."""
        if tensor not in self.header.tensors:
            raise ModelError(f"{self.header.path} has no tensor {tensor}")
        return int(self.header.tensors[tensor].shape[0])

    def any_layer_holds(self, tensor: str) -> bool:
        """Whether any layer has this tensor; the first layers may be of another kind than the rest."""
        return any(name.endswith(f".{tensor}") for name in self.header.tensors)

    def sliding_layers(self) -> list[str] | None:
        """`layer_types`, if the file tells for each layer whether it has a sliding window; else None."""
        pattern = self.header.metadata.get(f"{self.prefix}.attention.sliding_window_pattern")
        if not isinstance(pattern, np.ndarray):
            return None
        return ["sliding_attention" if slides else "full_attention" for slides in pattern]
