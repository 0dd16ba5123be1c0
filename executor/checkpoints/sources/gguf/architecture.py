"""`GGUFArchitecture`, an entry of `dense.py` or `mixtures.py`, and typed access to a file's metadata for these."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from headrace.executor.checkpoints.sources.gguf.header import GGUFHeader, shown
from headrace.executor.models.families._config import LARGEST
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
    """Whether the files' norm weights include what the model adds to those of its checkpoints."""
    is_mixture: bool = False
    may_be_dense: bool = False
    """Of a mixture: whether files may have no experts."""
    extra: Extra | None = None
    renormalised: bool = False
    """Whether the chosen experts' weights are scaled to a sum of 1, if the file does not say."""
    always_renormalises: bool | None = None
    """What the family computes whatever a file says of `renormalised`; None: what the file says."""
    routes_in_groups: bool = False
    """Whether experts are chosen in groups, their sum is scaled, and dense layers come first, as DeepSeek's are."""
    some_attend: bool = False
    """Whether layers may have no attention; the number of their key/value heads is 0."""
    whole: Callable[[Fields], dict[str, Any]] | None = None
    """Gives the config of an architecture without attention, which has no common fields besides those of tokens."""
    layer_norms: bool = False
    """Whether norms are layer norms, whose eps is `attention.layer_norm_epsilon`; that of RMS norms has its own key. It
    must be there, as for llama.cpp: the other one says nothing of these norms."""
    key_heads: Literal["stated", "all", "one"] = "stated"
    """Of a family that reads no number of key/value heads: as many as heads, or one (or a compressed one, of which
    files say 1 or the number of heads)."""
    key_heads_differ: bool = False
    """Whether `extra` reads the number of key/value heads, which layers may differ in; it may be 0, and that of heads
    then too."""
    heads_differ: bool = False
    """Whether `extra` reads the number of heads and of key/value heads, which layers may differ in."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The model's names of a layer's tensors that gguf's tables lack, by those in the file without `blk.N.`; either
    both complete, or both without what follows the last dot."""
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The model's complete names of the vectors that a layer's tensor has in its rows, by its complete name in the file
    without `blk.N.`."""
    heads: Mapping[str, str] = field(default_factory=lambda: {"cls.output": "score"})
    """The model's names of a classifier's matrices, by the file's."""
    gating: tuple[int, ...] = (0, 1)
    """Values of `expert_gating_func` that the family computes: 0 not said, 1 softmax, 2 sigmoid, 3 softmax of the
    chosen experts."""


UNUSED: Mapping[str, str] = MappingProxyType(
    {
        "vocab_size": "the embedding's shape has it",
        "tensor_data_layout": "the name of a layout that is known by the architecture",
        "pooling_type": "of vectors: `encoders.py` reads it",
        "classifier.output_labels": "names: `encoders.py` reads them",
        "rope.scaling.finetuned": "how the scaling came about",
    }
)
"""Keys that change no result, with the reason."""
OFF: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "attention.causal": (True,),
        "decoder_start_token_id": (),
        "rope.scaling.attn_factor": (1.0,),
        "rope.scaling.yarn_attn_factor": (1.0,),
        "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
        "rope.scaling.yarn_beta_fast": (32.0,),
        "rope.scaling.yarn_beta_slow": (1.0,),
        "expert_gating_func": (0, 1),
        "expert_weights_scale": (0.0, 1.0),
        "expert_group_count": (0, 1),
        "expert_group_used_count": (0, 1),
        "embedding_scale": (0.0, 1.0),
        "residual_scale": (0.0, 1.0),
        "logit_scale": (0.0, 1.0),
    }
)
"""Values of keys that an architecture does not read with which they change nothing; of others it is 0 or false."""

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


class Fields:
    """Typed access to the metadata keys of a file's architecture. A key is given without the architecture's prefix.

    Records which keys are read: `check_unread` refuses what is left.
    """

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.prefix = str(header.metadata.get("general.architecture", ""))
        self._read: set[str] = set()

    def get(self, key: str, kinds: tuple[type, ...], default: Any = None) -> Any:
        """The key's value. Raises ModelError if it is missing and there is no default, or of none of the `kinds`."""
        name = f"{self.prefix}.{key}"
        value = self._stored(key)
        value = default if value is None else value
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = self._of_layers(key, value)[0].item()  # one value per layer, all equal
        if value is None:
            raise ModelError(f"{self.header.path} lacks the metadata key {name}")
        if (isinstance(value, bool) and bool not in kinds) or not isinstance(value, kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            said = f"the metadata key {name} is {shown(value)}; a single {expected} is expected"
            raise ModelError(f"{self.header.path}: {said}")
        return value

    def _stored(self, key: str) -> Any:
        self._read.add(key)
        return self.header.metadata.get(f"{self.prefix}.{key}")

    def _of_layers(self, key: str, values: np.ndarray) -> np.ndarray:
        """Raises ModelError if there is not one value for each layer, with those that only predict."""
        count = self.header.metadata.get(f"{self.prefix}.block_count")
        if not isinstance(count, int) or len(values) != count:
            raise ModelError(f"{self._named(key)} has {len(values)} entries, and there are {shown(count)} layers")
        return values

    def has(self, key: str) -> bool:
        return self._stored(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        value: int = self.get(key, (int,), default)
        return value

    def integers(self, key: str, default: int | None = None) -> int | list[int]:
        """One integer for all layers, or a list with one per layer. Raises ModelError."""
        values = self._stored(key)
        if isinstance(values, np.ndarray) and values.dtype.kind in "iu" and len(set(values.tolist())) > 1:
            return [int(each) for each in self._of_layers(key, values)]
        return self.integer(key, default)

    def floats(self, key: str) -> list[float] | None:
        """One number per layer; None if the key is missing. Raises ModelError if it is no array of floats."""
        values = self._stored(key)
        if values is None:
            return None
        if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
            raise ModelError(f"{self._named(key)} is {values!r:.80}; a number for each layer is expected")
        return [float(each) for each in self._of_layers(key, values)]

    def sections(self, key: str) -> list[int]:
        """Numbers that are not those of layers; none if the key is missing. Raises ModelError."""
        values = self._stored(key)
        if values is not None and (not isinstance(values, np.ndarray) or values.dtype.kind not in "iu"):
            raise ModelError(f"{self._named(key)} is {shown(values)}; a list of whole numbers is expected")
        return [] if values is None else [int(each) for each in values]

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number. Raises ModelError."""
        value = float(self.get(key, (int, float), default))
        if not math.isfinite(value):
            raise ModelError(f"{self._named(key)} is {value}; a number is expected")
        return value

    def count(self, key: str, default: int | None = None, most: int = LARGEST) -> int:
        """A whole number from 1 to `most`. Raises ModelError."""
        value = self.integer(key, default)
        if not 1 <= value <= most:
            raise ModelError(f"{self._named(key)} is {value}; from 1 to {most:,} are expected")
        return value

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

    def sliding_layers(self, num_layers: int) -> dict[str, list[str]]:
        """`layer_types`, if the file tells which layers have a sliding window; else nothing. It lists the layers, or
        has a number n: the last of each n has none (0: all have one)."""
        pattern = self._stored("attention.sliding_window_pattern")
        if pattern is None:
            return {}
        if isinstance(pattern, np.ndarray):
            if pattern.dtype.kind not in "biu":
                raise ModelError(f"{self._named('attention.sliding_window_pattern')} has numbers that are not whole")
            slides = [bool(each) for each in self._of_layers("attention.sliding_window_pattern", pattern)]
        else:
            period = self.integer("attention.sliding_window_pattern")
            slides = [period < 1 or index % period < period - 1 for index in range(num_layers)]
        return {"layer_types": ["sliding_attention" if each else "full_attention" for each in slides]}

    def expect(self, key: str, *values: Any) -> None:
        """Reads a key for which the architecture computes with these values alone. Raises ModelError for others."""
        found = self._stored(key)
        if isinstance(found, np.ndarray):
            found = found.tolist() or [found.tolist()]
        for each in found if isinstance(found, list) else [found]:
            if each is not None and each not in values:
                allowed = " or ".join(map(str, values)) or "nothing"
                raise ModelError(f"{self._named(key)} is {found!r:.80}, and {allowed} is computed")

    def expect_flags(self, key: str, values: Sequence[bool]) -> None:
        """Reads a key that, where a file has it, says of each layer what is known already. Raises ModelError."""
        found = self._stored(key)
        listed = found.tolist() if isinstance(found, np.ndarray) else found
        if listed is not None and (not isinstance(listed, list) or list(map(bool, listed)) != list(values)):
            raise ModelError(f"{self._named(key)} is {listed!r:.80}, and the layers' tensors say {list(values)!r:.80}")

    def _named(self, key: str) -> str:
        return f"{self.header.path}: the metadata key {self.prefix}.{key}"

    def check_unread(self) -> None:
        """Call when the architecture has read its keys. Raises ModelError, naming them, for keys that it does not
        compute with, unless their values are of no effect."""
        keys = {key.removeprefix(f"{self.prefix}."): key for key in self.header.metadata}
        for key in [key for key, whole in keys.items() if key != whole and key not in self._read]:
            if key not in UNUSED:
                self.expect(key, *OFF.get(key, (0, False)))
