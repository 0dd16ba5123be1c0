"""`ArchSpec`: a transformer of one stack as data, a decoder or an encoder. A family's adapter fills one in from a
checkpoint's config."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from headrace.ipc.failure import ModelError

if TYPE_CHECKING:
    from headrace.executor.models.blocks import Ffn, Mixer, Stream, Weight
    from headrace.executor.models.blocks.ngrams import NGrams
    from headrace.executor.models.heads import Classifier, HeadLayer

StateType = Literal["float32", "float16", "bfloat16"]
STATE_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "float16": 2, "bfloat16": 2})
"""Bytes of an element of each type of states."""
INCONSISTENT = " is inconsistent: "
"""In messages, before what a spec's checks say."""
RopeKind = Literal["none", "default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
Placement = Literal["pre", "sandwich", "ffn_sandwich", "output", "parallel", "post", "normed", "none"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of a layer. Fields that `kind` does not use stay at their defaults."""

    theta: float
    rotary_dim: int
    """Number of leading dimensions of a head that are rotated."""
    kind: RopeKind = "default"
    """none: the dimensions are there and stay as they are."""
    factor: float = 1.0
    original_max_positions: int = 0
    """The context length, in tokens, that the model was trained for before scaling: dynamic, llama3, yarn, longrope."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    """Multiplies cos and sin: yarn, longrope."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether yarn's ramp starts and ends on whole dimensions."""
    divisors: tuple[float, ...] = ()
    """Divisor of each frequency, [rotary_dim / 2], in contexts up to original_max_positions: longrope."""
    long_divisors: tuple[float, ...] = ()
    """Divisors for longer contexts; `ArchSpec.for_context` chooses between the two."""
    turned_dim: int = 0
    """Number of dimensions that turn, of rotary_dim ones: proportional."""
    spread_dim: int = 0
    """Number of dimensions by which the frequencies are spread; 0: rotary_dim. Proportional."""
    interleaved: bool = False
    """Whether the checkpoint rotates dimension 2i with 2i + 1. Its rows are then reordered on reading, so that all
    computation rotates dimension i with i + rotary_dim / 2."""


@dataclass(frozen=True)
class TokenCache:
    """What a mixer caches per token: for each key/value head a key, and a value unless it is a part of the key."""

    num_heads: int
    """Key/value heads of the whole model; `ArchSpec.own_caches` gives those of one rank."""
    key_size: int
    value_size: int
    """0 where the value is a part of the key, as in latent attention."""

    @property
    def rows(self) -> int:
        """Vectors per token; a quantised cache keeps one scale per vector."""
        return self.num_heads * (2 if self.value_size else 1)

    @property
    def elements(self) -> int:
        """Cached elements per token."""
        return sum(each.elements for each in self.kept)

    @property
    def kept(self) -> tuple[Kept, ...]:
        sizes = {"key": self.key_size, "value": self.value_size}
        return tuple(Kept(name, (self.num_heads, size)) for name, size in sizes.items() if size)


@dataclass(frozen=True)
class Kept:
    """One thing that a mixer keeps between steps, for each token or for the whole sequence."""

    name: str
    shape: tuple[int, ...]
    """Of one token, or of the sequence. The first dimension counts units, which stay whole in memory: the heads, or the
    past inputs of a convolution (of a name that begins with history)."""
    dtype: Literal["cache"] | StateType = "cache"
    """cache: what the engine's options say: of a token, the type of cached keys and values; of a state, that of the
    spec (`history_type` for names that begin with history, else `state_type`). Another: that of a state, whatever they
    say."""

    @property
    def unit_bytes(self) -> int:
        """Of a state."""
        return math.prod(self.shape[1:]) * STATE_BYTES[self.dtype]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class LayerSpec:
    """A layer's two blocks on the residual stream: a mixer, which reads other tokens, and an FFN, which does not."""

    mixer: Mixer
    ffn: Ffn
    cache_of: int | None = None
    """Index of the earlier layer whose cached keys and values the mixer reads; None if the layer has its own cache."""
    mixer_norm: bool = True
    """Whether there is a norm before the mixer, where the spec's placement has one."""
    norm_placement: Placement | None = None
    """In the place of the spec's, where layers differ."""
    weights_of: int | None = None
    """Index of the earlier layer of which this one is a further run, with the same weights, or a part of them, and, if
    it caches, a cache of its own; None if its weights are its own."""

    @property
    def sliding_window(self) -> int | None:
        """A token attends to itself and the sliding_window - 1 tokens before it; None: to all."""
        return self.mixer.sliding_window


@dataclass(frozen=True)
class LayerTable:
    """A second table of token embeddings, which a `Stream` reads besides the model's own."""

    name: str
    """Relative to the model's prefix, without `.weight`."""
    vocab_size: int
    """Larger token ids have the row of token 0."""
    width: int
    scale: float
    """Multiplies the rows; rounded to the model's type, as `ArchSpec.embedding_scale` is."""
    factor: float = 1.0
    """Multiplies them, too, not rounded."""


@dataclass(frozen=True)
class NormSpec:
    kind: Literal["rms", "layer"]
    eps: float
    weight_offset: float = 0.0
    """Added to the stored weight: 1 where the checkpoint stores weight - 1 (Gemma)."""
    affine: bool = True
    """Whether the norm has weights (and a layer norm, biases)."""
    bias: bool = True
    """Whether an affine layer norm has biases."""
    groups: int = 1
    """Groups of columns of the residual stream, each of which an RMS norm norms by itself."""


@dataclass(frozen=True)
class Fused:
    """Matrices of a layer that a checkpoint stores as one tensor, whose rows come in groups: g0: q k v, g1: q k v, ...

    Names are relative to the layer's prefix, without `.weight` or `.bias`. A checkpoint that stores the parts
    separately is read too.
    """

    name: str
    parts: tuple[tuple[str, int], ...]
    """(name, number of its rows in each group), in order."""
    groups: int = 1
    transposed: bool = False
    """Whether the tensor is stored as [columns, rows], as GPT-2's are."""
    layers: frozenset[int] | None = None
    """Indices of the layers that have it, where its parts have other numbers of rows in others; None: all."""


@dataclass(frozen=True)
class StackedExperts:
    """Tensors in which a checkpoint stores the matrices of all experts of a layer, [num_experts, rows, columns] each.

    Names are relative to the layer's prefix and complete (with `.weight`, if they end so). A checkpoint that stores
    each expert separately is read too.
    """

    gate_up: str
    """Matrices of the gate's rows, then the up projection's."""
    down: str
    gate_up_bias: str = ""
    down_bias: str = ""
    transposed: bool = False
    """Whether the tensors are stored as [num_experts, columns, rows]."""
    alternating: bool = False
    """Whether the gate's and the up projection's rows alternate in `gate_up`."""
    up: str = ""
    """The up projection's matrices, where `gate_up` has the gate's alone."""
    first: int = 0
    """Number of the first of these experts in the layer."""
    flat: bool = False
    """Whether the tensors are [num_experts * inner, hidden]: the rows of all gates (or ups, or transposed downs)."""


STACKED = StackedExperts("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""As transformers saves most mixtures."""


@dataclass(frozen=True)
class WeightNames:
    """Names of a checkpoint's tensors, without `.weight` or `.bias`; by default those of Llama in Hugging Face format.
    A layer's names are relative to `{prefix}{layers}.{i}.`."""

    prefixes: tuple[str, ...] = ("model.", "")
    """Possible prefixes of all names but the head's; the first under which the embedding exists is used."""
    lm_heads: tuple[str, ...] = ("lm_head",)
    layers: str = "layers"
    sublayers: int = 1
    """Layers that a checkpoint counts as one, in whose names their number follows the part: `layers.0.self_attn.1.`.
    The names of what one alone has are without it. Here layer 1 is `layers.0.1.self_attn.` then."""
    embedding: str = "embed_tokens"
    positions: str = "embed_positions"
    token_types: str = "token_type_embeddings"
    embedding_norm: str = "word_embeddings_layernorm"
    project_in: str = "project_in"
    project_out: str = "project_out"
    final_norm: str = "norm"
    query: str = "self_attn.q_proj"
    query_gate: str = "self_attn.q_gate"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    sinks: str = "self_attn.sinks"
    """A complete name: no `.weight` follows."""
    distance_bias: str = "self_attn.relative_attention_bias"
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
    """The matrices of expert i are named `{experts}.{i}.{expert_gate}` and so on."""
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    shared_expert: str = "mlp.shared_expert"
    shared_router: str = "mlp.shared_expert_gate"
    router_correction: str = "mlp.gate.e_score_correction_bias"
    """A complete name: no `.weight` follows."""
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"
    ignorable: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    """Regular expressions (`re.search`) of tensors that a checkpoint may hold and the decoder does not need."""

    renamed: tuple[tuple[str, str], ...] = ()
    """(regular expression, replacement), by which names that checkpoints also have become those of these fields
    (`re.sub`, one after the other). Names that they make they do not change again."""

    def own(self, name: str) -> str:
        """A complete name of a checkpoint as these fields have it, by `renamed`."""
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name

    def layer(self, prefix: str, index: int) -> str:
        """The prefix of the names of a layer's weights."""
        if self.sublayers > 1:
            return f"{prefix}{self.layers}.{index // self.sublayers}.{index % self.sublayers}."
        return f"{prefix}{self.layers}.{index}."

    def prefix_in(self, held: Container[str]) -> str:
        """The first prefix under which these names include the embedding, whole or, as a model without a head writes
        it, without its first part; the first of all if none does."""
        tried = (*self.prefixes, *(prefix.partition(".")[2] for prefix in self.prefixes))
        return next((p for p in tried if f"{p}{self.embedding}.weight" in held), self.prefixes[0])


@dataclass(frozen=True)
class ArchSpec:
    """All that the decoder is built from. Raises ModelError when the numbers are inconsistent."""

    architecture: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    """The longest context that the model supports, in tokens, rope scaling included."""
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    norm_placement: Placement = "pre"
    """Where a layer's norms are. pre: on the input of the mixer and of the FFN; sandwich: on their inputs and outputs;
    ffn_sandwich: on their inputs and on the FFN's output; output: on their outputs, before these are added to the
    stream; parallel: on the inputs, and both blocks read the same stream (one norm serves both if the two norms have
    one name); post: on the stream after each addition; normed: on the stream before each block, to whose output the
    normed stream is added; none: there are none, and a `Stream` has its own."""
    other_norms: tuple[tuple[str, NormSpec], ...] = ()
    """Norms that differ from `norm`, by name without prefix or `.weight`; a layer's are those of all layers."""
    final_soft_cap: float | None = None
    has_head: bool = True
    """False where nothing reads logits: the head's weights stay in the checkpoint."""
    tied_head: bool = False
    embedding_scale: float = 1.0
    scales_given: bool = False
    """Whether `embedding_scale` applies also to embeddings that are given in the place of tokens. Not where
    transformers' embedding layer has the scale in it, so that what it returns is scaled already."""
    residual_scale: float = 1.0
    """Multiplies the outputs of mixers and FFNs. It costs no op: the stream is kept divided by it, see
    `Norm.of_stream`."""
    logit_scale: float = 1.0
    """Multiplies the logits; the final norm's weights include it."""
    head_bias: bool = False
    unit_head: bool = False
    """Whether the head's rows are divided by their L2 norms on reading."""
    embedding_norm: bool = False
    """Whether embeddings, with positions and token types, are normed before the first layer."""
    norms_given: bool = True
    """Whether that norm applies also to embeddings that are given in the place of tokens. Not where transformers'
    embedding layer has it; those models have neither positions nor token types."""
    token_types: int = 0
    """Rows of a table of token types, which says of each token to which text of a pair it belongs; 0: there is none."""
    task_types: str = ""
    """A table, without `.weight`, whose first row is added to each token's embedding; empty: there is none."""
    ngrams: NGrams | None = None
    """Changes the embedding of each token by the tokens before it; None: nothing does."""
    classifier: Classifier | None = None
    """What computes classes of texts or tokens from hidden states; None: nothing does."""
    vocabulary_layers: tuple[HeadLayer, ...] = ()
    """Of a masked language model: from a token's hidden state to logits. Only SPLADE's vectors are made with them."""
    shared: tuple[tuple[str, str], ...] = ()
    """Weights that a checkpoint has once for all layers: (name in each layer, stored name relative to the model's
    prefix), without `.weight`."""
    foreign: tuple[Weight, ...] = ()
    """All weights of a model that transformers' code computes: names and shapes, since its blocks declare none."""
    fused: tuple[Fused, ...] = ()
    """Matrices that checkpoints of this model store as one tensor."""
    embedding_size: int = 0
    """Width of the embedding and head where projections lead to and from hidden_size; 0: it is hidden_size."""
    learned_position_offset: int | None = None
    """Row of the table of learned positions for position 0; None: there are no learned positions."""
    final_norm: bool = True
    names: WeightNames = WeightNames()
    scaled: tuple[tuple[str, float], ...] = ()
    """(name of a layer's weight, factor), by which the weight is multiplied on reading. The names are complete."""
    contains_factors: bool = False
    """Whether the matrices contain factors that the checkpoint does not tell, as Falcon-H1's do in GGUF files. Adapters
    are refused, whose results would be multiplied too."""
    stacked: StackedExperts | None = None
    also_stacked: tuple[StackedExperts, ...] = ()
    """Of checkpoints that have others, or several in a layer."""
    sharded: tuple[str, ...] = ()
    """Tables of layers, without `.weight`, whose rows a checkpoint may store in parts: `NAME.shard_0.weight` and so
    on."""
    stored_vocab: int = 0
    """Rows that the embedding and the head may have in checkpoints, of which the first vocab_size are read; 0: they
    have vocab_size."""
    history_type: StateType = "float32"
    """In which layers keep the past inputs of their convolutions."""
    state_type: StateType = "float32"
    """In which recurrent layers keep their states between steps. They are computed in float32."""
    stream: Stream | None = None
    """Replaces the residual stream of one row of hidden values per token. It needs its own norm_placement."""

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
        groups = self.norm.groups
        self._require(
            groups >= 1 and self.hidden_size % groups == 0,
            f"{groups} groups of a norm must divide a hidden_size of {self.hidden_size}",
        )
        for block in {block for layer in self.layers for block in (layer.mixer, layer.ffn)}:
            self._require(not block.problem(), block.problem())
        if self.stream is not None:
            self._require(not self.stream.problem(), self.stream.problem())
            self._require(self.norm_placement == self.stream.placement, "the stream needs norms in other places")
        if self.ngrams is not None:
            self._require(not self.ngrams.problem(), self.ngrams.problem())
        self._check_shared_caches()
        self._check_further_runs()
        attention = [mixer for mixer in self.mixers if mixer.cache is not None]
        caches = {mixer.cache for mixer in attention if mixer.cache is not None}
        parts = {Fraction(cache.num_heads * cache.key_size, cache.elements) for cache in caches}
        self._require(len(parts) <= 1, f"layers differ in which part of what they keep are keys: {caches}")
        rotated = {(mixer.rope, mixer.cache.key_size) for mixer in attention if mixer.rope and mixer.cache}
        for rope, head in rotated:
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

    def _check_further_runs(self) -> None:
        """A further run reads what its source does, or a part of it."""
        from headrace.executor.models.blocks import LayerDeclaration  # which imports this module

        for index, layer in enumerate(self.layers):
            if (source := layer.weights_of) is None:
                continue
            known = 0 <= source < index and self.layers[source].weights_of is None
            self._require(known, f"layer {index} has the weights of layer {source}, which has none before it")
            found, read = (LayerDeclaration.of(self, each) for each in (layer, self.layers[source]))
            parts = ((vars(found)[part], vars(read)[part]) for part in vars(found))
            same = all(own.items() <= theirs.items() for own, theirs in parts)
            self._require(same, f"layer {index} has the weights of layer {source}, of other shapes")

    def _check_rope(self, rope: RopeSpec) -> None:
        self._require(rope.theta > 1, f"rope theta must be above 1, got {rope.theta}")
        self._require(rope.factor > 0, f"rope factor must be positive, got {rope.factor}")
        if rope.kind in ("dynamic", "llama3", "yarn", "longrope"):
            self._require(
                rope.original_max_positions >= 1,
                f"{rope.kind} rope needs the original context's length, got {rope.original_max_positions}",
            )
        self._require(
            rope.kind != "proportional" or 0 <= rope.turned_dim <= rope.rotary_dim,
            f"{rope.turned_dim} of {rope.rotary_dim} dimensions cannot turn",
        )
        self._require(rope.kind != "dynamic" or rope.rotary_dim > 2, "dynamic rope needs more than 2 rotary dimensions")
        self._require(
            rope.kind != "llama3" or rope.high_freq_factor >= rope.low_freq_factor > 0,
            f"llama3 rope needs high_freq_factor not below low_freq_factor, "
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
            raise ModelError(f"the config of this {self.architecture}{INCONSISTENT}{message}")

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The distinct mixers, in order of first use."""
        return tuple(dict.fromkeys(layer.mixer for layer in self.layers))

    @property
    def num_heads(self) -> int:
        """Query heads of an attention layer, the most where layers differ; 0 without one."""
        return max(mixer.num_heads for mixer in self.mixers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def intermediate_size(self) -> int:
        """The largest inner size of the FFNs."""
        return max(ffn.inner for ffn in {layer.ffn for layer in self.layers})

    def fused_in(self, index: int) -> tuple[Fused, ...]:
        """Those that the layer of this index has."""
        return tuple(each for each in self.fused if each.layers is None or index in each.layers)

    def layer_prefix(self, prefix: str, index: int) -> str:
        """The prefix of the names of the weights that a layer is computed with. prefix: of the model's names."""
        source = self.layers[index].weights_of
        return self.names.layer(prefix, index if source is None else source)

    @property
    def embedding_width(self) -> int:
        return self.embedding_size or self.hidden_size

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The distinct rotary specs, in order of first use."""
        return tuple(dict.fromkeys(mixer.rope for mixer in self.mixers if mixer.rope is not None))

    @property
    def lookback(self) -> int:
        """Number of tokens before a token whose ids the model reads with it."""
        reach = 0 if self.ngrams is None else self.ngrams.reach
        return max(reach, *(mixer.lookback for mixer in self.mixers))

    @property
    def is_causal(self) -> bool:
        """Whether no token depends on the tokens after it."""
        return all(getattr(mixer, "causal", True) for mixer in self.mixers)

    @property
    def uses_prompt_lens(self) -> bool:
        """Whether the rotation beyond the trained context depends on the prompt's length (dynamic NTK)."""
        return any(rope.kind == "dynamic" for rope in self.ropes)

    def for_context(self, max_model_len: int | None) -> ArchSpec:
        """The spec with the rotation, and without the growth of queries, for requests of up to max_model_len tokens
        (default: max_positions).

        LongRoPE has one set of divisors for contexts up to the original length and one for longer contexts; an engine
        uses one set for all requests.
        """
        longest = max_model_len or self.max_positions
        found: dict[LayerSpec, LayerSpec] = {}
        for layer in dict.fromkeys(self.layers):
            found[layer] = replace(layer, mixer=layer.mixer.for_context(longest))
        return replace(self, layers=tuple(found[layer] for layer in self.layers))

    def for_ranks(self, tp_size: int, inner_block: int = 1) -> ArchSpec:
        """The spec with heads and inner columns padded so that `tp_size` ranks share them evenly; padding has zero
        weights.

        inner_block: each rank's share of an FFN's inner size becomes a multiple of it. Raises ModelError if there are
        more ranks than query heads.
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

    def own_caches(self, tp_size: int) -> tuple[TokenCache | None, ...]:
        """What each layer caches per token on one of `tp_size` ranks; None for a layer that keeps a state instead.
        Raises ModelError as `for_ranks` does."""
        whole = (layer.mixer.cache for layer in self.for_ranks(tp_size).layers)
        return tuple(each and replace(each, num_heads=max(1, each.num_heads // tp_size)) for each in whole)

    def own_states(self, tp_size: int) -> tuple[tuple[Kept, ...], ...]:
        """What each layer keeps per sequence on one of `tp_size` ranks; empty for a layer that only caches tokens."""
        states = (layer.mixer.state(tp_size) for layer in self.for_ranks(tp_size).layers)
        return tuple(tuple(self._typed(kept) for kept in state) for state in states)

    def _typed(self, kept: Kept) -> Kept:
        if kept.dtype != "cache":
            return kept
        return replace(kept, dtype=self.history_type if kept.name.startswith("history") else self.state_type)

    @property
    def cpu_alone(self) -> str:
        """What of the model a CPU alone computes so far, as the object of a sentence; "" if GPUs compute all."""
        if self.ngrams is not None:
            return "embeddings of n-grams"
        return next((mixer.cpu_alone for mixer in self.mixers if mixer.cpu_alone), "")

    @property
    def has_states(self) -> bool:
        """Whether a layer keeps a state per sequence."""
        return any(mixer.state(1) for mixer in self.mixers)
