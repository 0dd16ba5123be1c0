"""`ArchSpec`: a decoder-only transformer as data. A family's adapter fills one in from a checkpoint's config."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Literal

from headrace.ipc.failure import ModelError

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
Placement = Literal["pre", "sandwich", "post"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of a layer. Fields that `kind` does not use stay at their defaults."""

    theta: float
    rotary_dim: int
    """Leading dimensions of a head that are rotated."""
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    """The context before scaling: dynamic, llama3, yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    """Multiplies cos and sin: yarn."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether yarn's ramp starts and ends on whole dimensions."""


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer."""

    rope: RopeSpec | None
    """None for a layer without rotary positions."""
    sliding_window: int | None = None
    """A token sees itself and the sliding_window - 1 before it; None sees all."""


@dataclass(frozen=True)
class NormSpec:
    kind: Literal["rms", "layer"]
    eps: float
    weight_offset: float = 0.0
    """Added to the stored weight: 1 where the checkpoint holds the difference from 1 (Gemma)."""
    affine: bool = True
    """Whether there are weights at all (and, for layer norm, biases)."""


@dataclass(frozen=True)
class WeightNames:
    """Hugging Face names. Those of a layer are below `{prefix}layers.{i}.`, without `.weight` or `.bias`."""

    prefixes: tuple[str, ...] = ("model.",)
    """What comes before everything but the head; the first under which the embedding is found is used."""
    lm_heads: tuple[str, ...] = ("lm_head",)
    embedding: str = "embed_tokens"
    positions: str = "embed_positions"
    project_in: str = "project_in"
    project_out: str = "project_out"
    final_norm: str = "norm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"
    ignorable: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    """Regular expressions, searched for, of tensors that a checkpoint may hold and the decoder does not need."""

    def prefix_in(self, held: Container[str]) -> str:
        """Of these weights: the prefix under which the embedding is among them."""
        return next((p for p in self.prefixes if f"{p}{self.embedding}.weight" in held), self.prefixes[0])


@dataclass(frozen=True)
class ArchSpec:
    """Everything the decoder is built from. Raises ModelError when the numbers do not fit together."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    """The longest context the model was made for, rope scaling included."""
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"]
    attention_scale: float
    norm_placement: Placement = "pre"
    """pre: before attention and MLP; sandwich: before and after, inside the residual; post: after the residual."""
    gated_mlp: bool = True
    attention_bias: bool = False
    """On the query, key and value projections."""
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Normalise each head's query and key before rotation."""
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    tied_head: bool = False
    embedding_scale: float = 1.0
    embedding_size: int = 0
    """Width of the embedding and head where projections lead in and out of hidden_size; 0 is hidden_size."""
    learned_position_offset: int | None = None
    """Learned positions, whose row for position 0 is this; None without them."""
    final_norm: bool = True
    names: WeightNames = WeightNames()

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
            self._require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        self._require(self.max_positions >= 1, f"max_positions must be at least 1, got {self.max_positions}")
        self._require(bool(self.layers), "there must be at least one layer")
        self._require(
            self.num_heads % self.num_kv_heads == 0,
            f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads evenly",
        )
        for name in ("attention_scale", "attention_soft_cap", "final_soft_cap", "embedding_scale"):
            value = getattr(self, name)
            self._require(value is None or 0 < value < math.inf, f"{name} must be positive, got {value}")
        self._require(0 < self.norm.eps < 1, f"the norm's eps must be between 0 and 1, got {self.norm.eps}")
        for index, layer in enumerate(self.layers):
            self._require(
                layer.sliding_window is None or layer.sliding_window >= 1,
                f"layer {index} has a sliding window of {layer.sliding_window}; it must be at least 1",
            )
        for rope in self.ropes:
            self._check_rope(rope)

    def _check_rope(self, rope: RopeSpec) -> None:
        self._require(
            rope.rotary_dim % 2 == 0 and 2 <= rope.rotary_dim <= self.head_dim,
            f"{rope.rotary_dim} rotary dimensions must be even and fit a head of {self.head_dim}",
        )
        self._require(rope.theta > 1, f"rope theta must be above 1, got {rope.theta}")
        self._require(rope.factor > 0, f"rope factor must be positive, got {rope.factor}")
        if rope.kind in ("dynamic", "llama3", "yarn"):
            self._require(
                rope.original_max_positions >= 1,
                f"{rope.kind} rope needs the original context's length, got {rope.original_max_positions}",
            )
        self._require(rope.kind != "dynamic" or rope.rotary_dim > 2, "dynamic rope needs more than 2 rotary dimensions")
        self._require(
            rope.kind != "llama3" or rope.high_freq_factor > rope.low_freq_factor > 0,
            f"llama3 rope needs high_freq_factor above low_freq_factor, "
            f"got {rope.high_freq_factor} and {rope.low_freq_factor}",
        )

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise ModelError(f"the config of this {self.architecture} is inconsistent: {message}")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def embedding_width(self) -> int:
        return self.embedding_size or self.hidden_size

    @property
    def kv_elements_per_token(self) -> int:
        """Keys and values of one token, summed over layers."""
        return self.kv_rows_per_token * self.head_dim

    @property
    def kv_rows_per_token(self) -> int:
        """Vectors of head_dim elements that those are."""
        return 2 * self.num_layers * self.num_kv_heads

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The distinct ones, in order of first use."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    @property
    def uses_prompt_lens(self) -> bool:
        """Whether a token's rotation depends on its prompt's length beyond the trained context (dynamic NTK)."""
        return any(rope.kind == "dynamic" for rope in self.ropes)

    def for_ranks(self, tp_size: int, inner_block: int = 1) -> ArchSpec:
        """Itself with as many heads and inner columns as `tp_size` ranks can share evenly; those added weigh nothing.

        Key/value heads become a multiple of tp_size, or one of its divisors where they are fewer than ranks: then
        each is repeated on several ranks, which divide its query heads. Inner columns become a multiple of
        tp_size * inner_block. Raises ModelError for more ranks than query heads.
        """
        if self.num_heads < tp_size:
            raise ModelError(
                f"{self.num_heads} attention heads cannot be divided among {tp_size} ranks: each needs at least one"
            )
        group = self.num_heads // self.num_kv_heads
        if self.num_kv_heads >= tp_size:
            kv_heads = _rounded_up(self.num_kv_heads, tp_size)
        else:
            kv_heads = next(n for n in range(self.num_kv_heads, tp_size + 1) if tp_size % n == 0)
            group = _rounded_up(group, tp_size // kv_heads)
        inner = _rounded_up(self.intermediate_size, tp_size * inner_block) if tp_size > 1 else self.intermediate_size
        return replace(self, num_heads=kv_heads * group, num_kv_heads=kv_heads, intermediate_size=inner)

    def local_kv_heads(self, tp_size: int) -> int:
        """Key/value heads of one of `tp_size` ranks; fewer heads than ranks are repeated. Raises ModelError."""
        return max(1, self.for_ranks(tp_size).num_kv_heads // tp_size)


def _rounded_up(size: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-size // step) * step
