"""`ArchSpec`: a decoder-only transformer as data. A family's adapter fills one in from a checkpoint's config."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from headrace.ipc.failure import ModelError

if TYPE_CHECKING:
    from headrace.executor.models.blocks import Ffn, Mixer, Stream, Weight

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
Placement = Literal["pre", "sandwich", "output", "parallel", "post"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of a layer. Fields that `kind` does not use stay at their defaults."""

    theta: float
    rotary_dim: int
    """Leading dimensions of a head that are rotated."""
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    """The context before scaling: dynamic, llama3, yarn, longrope."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    """Multiplies cos and sin: yarn, longrope."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether yarn's ramp starts and ends on whole dimensions."""
    divisors: tuple[float, ...] = ()
    """What each frequency is divided by in contexts up to the original: longrope."""
    long_divisors: tuple[float, ...] = ()
    """The same in longer ones; `ArchSpec.for_context` chooses."""
    interleaved: bool = False
    """The checkpoint's pairs are neighbours. Its rows are reordered as they are read, so that pairs are halves apart
    wherever anything is computed."""


@dataclass(frozen=True)
class TokenCache:
    """What a mixer keeps of each token: a key of each key/value head, and a value beside it or within it."""

    num_heads: int
    """Of all ranks, which divide them; fewer heads than ranks are repeated."""
    key_size: int
    value_size: int
    """0 where a value is a part of its key, as in latent attention."""

    @property
    def rows(self) -> int:
        """Vectors of one token: a quantised cache keeps a scale for each."""
        return self.num_heads * (2 if self.value_size else 1)

    @property
    def elements(self) -> int:
        """Values of one token."""
        return self.num_heads * (self.key_size + self.value_size)


@dataclass(frozen=True)
class LayerSpec:
    """What reads other tokens, and what works on each token alone: two blocks around the residual stream."""

    mixer: Mixer
    ffn: Ffn
    cache_of: int | None = None
    """The number of the layer before it whose keys and values its mixer reads; None where it keeps its own."""

    @property
    def sliding_window(self) -> int | None:
        """A token sees itself and the sliding_window - 1 before it; None sees all."""
        return self.mixer.sliding_window


@dataclass(frozen=True)
class LayerTable:
    """Token embeddings beside those that the stream begins with."""

    name: str
    """Below the model's prefix, without `.weight`."""
    vocab_size: int
    width: int
    scale: float


@dataclass(frozen=True)
class NormSpec:
    kind: Literal["rms", "layer"]
    eps: float
    weight_offset: float = 0.0
    """Added to the stored weight: 1 where the checkpoint holds the difference from 1 (Gemma)."""
    affine: bool = True
    """Whether there are weights at all (and, for layer norm, biases)."""
    bias: bool = True
    """Of an affine layer norm."""


@dataclass(frozen=True)
class Fused:
    """Matrices of a layer that a checkpoint stores as one, their rows in groups: g0: q k v, g1: q k v, ...

    Names are below the layer's prefix, without `.weight` or `.bias`. A checkpoint that has the parts by themselves is
    read as it is.
    """

    name: str
    parts: tuple[tuple[str, int], ...]
    """(name, its rows in each group), in order."""
    groups: int = 1
    transposed: bool = False
    """[columns, rows], as GPT-2's are."""


@dataclass(frozen=True)
class StackedExperts:
    """How a checkpoint holds the matrices of all experts of a layer, [num_experts, rows, columns] each. Whole names
    below the layer's prefix; a checkpoint that has each expert by itself is read as it is."""

    gate_up: str
    """The gate's rows, then the up projection's."""
    down: str
    gate_up_bias: str = ""
    down_bias: str = ""
    transposed: bool = False
    """[num_experts, columns, rows]."""
    alternating: bool = False
    """The gate's rows and the up projection's alternate."""


@dataclass(frozen=True)
class WeightNames:
    """Hugging Face names. Those of a layer are below `{prefix}{layers}.{i}.`, without `.weight` or `.bias`."""

    prefixes: tuple[str, ...] = ("model.",)
    """What comes before everything but the head; the first under which the embedding is found is used."""
    lm_heads: tuple[str, ...] = ("lm_head",)
    layers: str = "layers"
    embedding: str = "embed_tokens"
    positions: str = "embed_positions"
    embedding_norm: str = "word_embeddings_layernorm"
    project_in: str = "project_in"
    project_out: str = "project_out"
    final_norm: str = "norm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    sinks: str = "self_attn.sinks"
    """The whole name."""
    query_norm: str = "self_attn.q_norm"
    query_down: str = "self_attn.q_a_proj"
    query_down_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    latent_down: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    latent_up: str = "self_attn.kv_b_proj"
    key_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    """Each expert's matrices are below `{experts}.{number}.`."""
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    shared_expert: str = "mlp.shared_expert"
    shared_router: str = "mlp.shared_expert_gate"
    router_correction: str = "mlp.gate.e_score_correction_bias"
    """The whole name."""
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"
    ignorable: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    """Regular expressions, searched for, of tensors that a checkpoint may hold and the decoder does not need."""

    def layer(self, prefix: str, index: int) -> str:
        """What the names of a layer's weights begin with."""
        return f"{prefix}{self.layers}.{index}."

    def prefix_in(self, held: Container[str]) -> str:
        """Of these weights: the prefix under which the embedding is among them."""
        return next((p for p in self.prefixes if f"{p}{self.embedding}.weight" in held), self.prefixes[0])


@dataclass(frozen=True)
class ArchSpec:
    """Everything the decoder is built from. Raises ModelError when the numbers do not fit together."""

    architecture: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    """The longest context the model was made for, rope scaling included."""
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    norm_placement: Placement = "pre"
    """pre: before mixer and FFN; sandwich: before and after, inside the residual; output: after, inside the residual;
    parallel: before both, which read the same stream (with one norm where their norms' names are one); post: after the
    residual."""
    final_soft_cap: float | None = None
    tied_head: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Multiplies what mixers and FFNs add. What is computed is the stream divided by it: `Norm.of_stream`."""
    logit_scale: float = 1.0
    """Multiplies the logits; it is applied by the final norm."""
    head_bias: bool = False
    unit_head: bool = False
    """The head's rows are divided by their lengths as they are read."""
    embedding_norm: bool = False
    """Whether embeddings are normed before the first layer."""
    foreign: tuple[Weight, ...] = ()
    """All weights of a model whose code is transformers', where nothing is known of them but names and shapes."""
    fused: tuple[Fused, ...] = ()
    """What a checkpoint of this model stores together."""
    embedding_size: int = 0
    """Width of the embedding and head where projections lead in and out of hidden_size; 0 is hidden_size."""
    learned_position_offset: int | None = None
    """Learned positions, whose row for position 0 is this; None without them."""
    final_norm: bool = True
    names: WeightNames = WeightNames()
    stacked: StackedExperts | None = None
    stream: Stream | None = None
    """What stands around the blocks, where that is not one row of hidden values: of the norms, those of a sandwich."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "max_positions"):
            self._require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        self._require(bool(self.layers), "there must be at least one layer")
        for name in ("final_soft_cap", "embedding_scale", "residual_scale", "logit_scale"):
            value = getattr(self, name)
            self._require(value is None or 0 < value < math.inf, f"{name} must be positive, got {value}")
        self._require(
            self.logit_scale == 1 or (self.final_norm and self.norm.affine),
            "scaled logits need a final norm with weights",
        )
        self._require(0 < self.norm.eps < 1, f"the norm's eps must be between 0 and 1, got {self.norm.eps}")
        for block in {block for layer in self.layers for block in (layer.mixer, layer.ffn)}:
            self._require(not block.problem(), block.problem())
        if self.stream is not None:
            self._require(not self.stream.problem(), self.stream.problem())
            self._require(self.norm_placement == "sandwich", "a stream of several rows needs norms on both sides")
        self._check_shared_caches()
        heads = sorted({mixer.num_heads for mixer in self.mixers})
        self._require(len(heads) == 1, f"layers differ in the number of their heads: {heads}")
        caches = {mixer.cache for mixer in self.mixers}
        parts = {Fraction(cache.num_heads * cache.key_size, cache.elements) for cache in caches}
        self._require(len(parts) == 1, f"layers differ in which part of what they keep are keys: {caches}")
        for rope, head in {(mixer.rope, mixer.cache.key_size) for mixer in self.mixers if mixer.rope is not None}:
            self._require(
                rope.rotary_dim % 2 == 0 and 2 <= rope.rotary_dim <= head,
                f"{rope.rotary_dim} rotary dimensions must be even and fit a head of {head}",
            )
        for rope in self.ropes:
            self._check_rope(rope)

    def _check_shared_caches(self) -> None:
        for index, layer in enumerate(self.layers):
            if layer.cache_of is None:
                continue
            known = 0 <= layer.cache_of < index and self.layers[layer.cache_of].cache_of is None
            self._require(known, f"layer {index} reads the cache of layer {layer.cache_of}, which keeps none before it")
            own, source = layer.mixer, self.layers[layer.cache_of].mixer
            fits = (own.cache, own.sliding_window) == (source.cache, source.sliding_window)
            self._require(fits, f"layer {index} reads the cache of layer {layer.cache_of}, which is another kind")

    def _check_rope(self, rope: RopeSpec) -> None:
        self._require(rope.theta > 1, f"rope theta must be above 1, got {rope.theta}")
        self._require(rope.factor > 0, f"rope factor must be positive, got {rope.factor}")
        if rope.kind in ("dynamic", "llama3", "yarn", "longrope"):
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

        if rope.kind == "longrope":
            for values in (rope.divisors, rope.long_divisors):
                self._require(
                    len(values) == rope.rotary_dim // 2 and all(0 < value < math.inf for value in values),
                    f"longrope needs {rope.rotary_dim // 2} positive factors, got {list(values)[:8]}",
                )

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise ModelError(f"the config of this {self.architecture} is inconsistent: {message}")

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The distinct ones, in order of first use."""
        return tuple(dict.fromkeys(layer.mixer for layer in self.layers))

    @property
    def num_heads(self) -> int:
        """Query heads of every layer."""
        return self.layers[0].mixer.num_heads

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def intermediate_size(self) -> int:
        """Of the FFNs' inner sizes the largest."""
        return max(ffn.inner for ffn in {layer.ffn for layer in self.layers})

    @property
    def embedding_width(self) -> int:
        return self.embedding_size or self.hidden_size

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The distinct ones, in order of first use."""
        return tuple(dict.fromkeys(mixer.rope for mixer in self.mixers if mixer.rope is not None))

    @property
    def uses_prompt_lens(self) -> bool:
        """Whether a token's rotation depends on its prompt's length beyond the trained context (dynamic NTK)."""
        return any(rope.kind == "dynamic" for rope in self.ropes)

    def for_context(self, max_model_len: int | None) -> ArchSpec:
        """Itself with the rotation for requests of up to so many tokens (by default as many as it was made for).

        LongRoPE has one for contexts up to the original and another for longer ones; one engine has one of them.
        """
        longest = max_model_len or self.max_positions
        found: dict[LayerSpec, LayerSpec] = {}
        for layer in dict.fromkeys(self.layers):
            rope, mixer = layer.mixer.rope, layer.mixer
            if rope is not None and rope.kind == "longrope" and longest > rope.original_max_positions:
                mixer = replace(mixer, rope=replace(rope, divisors=rope.long_divisors))  # type: ignore[type-var]
            found[layer] = replace(layer, mixer=mixer)
        return replace(self, layers=tuple(found[layer] for layer in self.layers))

    def for_ranks(self, tp_size: int, inner_block: int = 1) -> ArchSpec:
        """Itself with as many heads and inner columns as `tp_size` ranks can share evenly; those added weigh nothing.

        inner_block: what each rank's share of an FFN's inner size is a multiple of. Raises ModelError for more ranks
        than query heads.
        """
        padded = {
            layer: replace(
                layer,
                mixer=layer.mixer.for_ranks(tp_size, inner_block),
                ffn=layer.ffn.for_ranks(tp_size, inner_block),
            )
            for layer in dict.fromkeys(self.layers)
        }
        return replace(self, layers=tuple(padded[layer] for layer in self.layers))

    def own_caches(self, tp_size: int) -> tuple[TokenCache, ...]:
        """What each layer keeps of a token on one of `tp_size` ranks. Raises ModelError."""
        whole = (layer.mixer.cache for layer in self.for_ranks(tp_size).layers)
        return tuple(replace(cache, num_heads=max(1, cache.num_heads // tp_size)) for cache in whole)
