"""A layer's blocks. A block declares its weights once and emits its ops once.

    Attention, Dense, Experts              a block: numbers, `declare`, `emit`; one file each
      declare(spec) -> Linear, Norm, ...   the weights it reads: names, shapes, how ranks divide them, their roles
      emit(ops, held, x) -> contributions  the ops it computes; `held` has the declared things as `ops` takes them

`Ops` and `LayerOps` have two implementations: `models.eager` computes on tensors, `cpu.program` writes a CPU program.
Shapes, memory estimates, dummy weights, padding and the ranks' parts derive from the declarations (`models.sizes`). A
family in another package adds a block of its own by subclassing `Mixer` or `Ffn`, and an op by subclassing `Declared`.
Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from headrace.executor.models.arch import ArchSpec, LayerSpec, LayerTable, Placement
from headrace.kernels.expert_groups import ALL_EXPERTS, ExpertGroups

if TYPE_CHECKING:
    from headrace.executor.models.arch import Kept, RopeSpec, TokenCache
    from headrace.executor.parallel.rank_place import RankCoordinates

Role = Literal["matrix", "bias", "norm", "embedding", "head", "router", "expert", "table"]
"""What a weight is for, which decides its quantisation: matrices and experts are quantised as the option asks, the
embedding and the head more finely or not at all, the rest not. A table has whole numbers."""


@dataclass(frozen=True)
class Axis:
    """A dimension that the tensor-parallel ranks divide."""

    size: int
    unit: int = 1
    """Elements that stay on one rank: those of a head."""
    groups: int = 1
    """Parts of equal size, each of which padding extends at its end: the query heads of each key/value head."""

    def own(self, place: RankCoordinates) -> slice | None:
        """A rank's slice; None: the whole dimension. With fewer units than ranks, several ranks have the same unit."""
        if place.tp_size == 1:
            return None
        units = self.size // self.unit
        first = place.tp_rank * units // place.tp_size
        return slice(first * self.unit, (first + max(1, units // place.tp_size)) * self.unit)


Dimension = int | Axis


def size_of(dimension: Dimension) -> int:
    return dimension.size if isinstance(dimension, Axis) else dimension


@dataclass(frozen=True)
class Weight:
    """One tensor of the checkpoint."""

    name: str
    dimensions: tuple[Dimension, ...]
    role: Role
    offset: float = 0.0
    """Of a norm: what is added to the stored numbers before they are computed with."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size_of(each) for each in self.dimensions)


class Declared:
    """What a block reads: weights, and perhaps an op that they are for. Subclasses are frozen dataclasses.

    A reader, `module:name`, is called with (weights, declared, prefix) and returns what the ops take. What
    `Ops.compute` and `LayerOps.mix` take computes the op itself, so that a new op needs no more than a new class: on
    tensors it is called with them, and in a program its `write(ops, *buffers)` appends ops and returns a buffer."""

    eager_reader: ClassVar[str]
    """weights: a `models.eager.EagerWeights`."""
    program_reader: ClassVar[str] = ""
    """weights: a `cpu.weights.CpuWeights`. "" if a CPU program cannot have the op: its model then runs op by op."""
    held_twice: ClassVar[bool] = False
    """Whether a CPU program holds its weights in two layouts."""

    def weights(self) -> Iterator[Weight]:
        """Its tensors in the checkpoint. Names are relative to the prefix of the layer, or of the model."""
        raise NotImplementedError


class WithoutWeights:
    """Of a `Declared` that is an op alone."""

    def weights(self) -> Iterator[Weight]:
        return iter(())


@dataclass(frozen=True)
class Linear(Declared):
    """y = x W^T + b, where W stacks the rows of one or several matrices, and an activation of y.

    Ranks divide the rows (each computes some columns of y) or the columns (each computes a partial sum, to which the
    first rank alone adds the bias).
    """

    eager_reader = "headrace.executor.models.eager:EagerLinear.read"
    program_reader = "headrace.executor.cpu.weights:CpuWeights.linear"

    matrices: tuple[tuple[str, Dimension], ...]
    """(name without `.weight`, rows) of each matrix."""
    columns: Dimension
    bias: bool = False
    role: Role = "matrix"
    activation: str | None = None
    gated: bool = False
    """Whether there are two matrices, and y is activation(first product) * second product."""

    def weights(self) -> Iterator[Weight]:
        for name, rows in self.matrices:
            yield Weight(f"{name}.weight", (rows, self.columns), self.role)
            if self.bias:
                yield Weight(f"{name}.bias", (rows,), "bias")


@dataclass(frozen=True)
class Norm(Declared):
    """A norm of rows of `size` values."""

    eager_reader = "headrace.executor.models.eager:EagerNorm"
    program_reader = "headrace.executor.cpu.weights:CpuWeights.norm"

    name: str
    size: Dimension
    kind: Literal["rms", "layer"]
    eps: float
    weight_offset: float
    affine: bool
    bias: bool = False
    """Whether there is a bias: layer norms only."""
    scale: float = 1.0
    """Multiplies the result."""
    weight_name: str = "weight"
    """Follows `name`: `router.scale`."""
    groups: int = 1
    """Groups of columns, each of which is normed by itself; of RMS norms."""

    @classmethod
    def of(cls, spec: ArchSpec, name: str, size: Dimension) -> Norm:
        norm = dict(spec.other_norms).get(name, spec.norm)
        bias = norm.affine and norm.bias and norm.kind == "layer"
        return cls(name, size, norm.kind, norm.eps, norm.weight_offset, norm.affine, bias)

    @classmethod
    def of_stream(cls, spec: ArchSpec, name: str, scale: float = 1.0) -> Norm:
        """A norm of the residual stream. The stream is kept divided by `residual_scale`, so eps is scaled to match."""
        norm = cls.of(spec, name, spec.hidden_size)
        return replace(norm, eps=norm.eps / spec.residual_scale**2, scale=scale, groups=spec.norm.groups)

    def weights(self) -> Iterator[Weight]:
        if self.affine:
            yield Weight(f"{self.name}.{self.weight_name}", (self.size,), "norm", self.weight_offset)
            if self.bias:
                yield Weight(f"{self.name}.bias", (self.size,), "norm")


@dataclass(frozen=True)
class DistanceBias(Declared):
    """What is added to a score by the distance of key and query, in buckets: near ones of one distance each, far ones
    by its logarithm (Raffel et al. 2020, section 2.1), to both sides apart."""

    eager_reader = program_reader = "headrace.executor.models.reading:CheckedWeights.distance_bias"

    name: str
    """Of the table, [num_buckets, heads], without `.weight`."""
    num_buckets: int
    most_distance: int
    """Keys at least this far away share the last bucket of their side."""
    heads: Axis
    reach: int
    """Distances are below it: the longest context."""

    def weights(self) -> Iterator[Weight]:
        yield Weight(f"{self.name}.weight", (self.num_buckets, self.heads), "bias")


@dataclass(frozen=True)
class SinkTokens(Declared):
    """Keys and values of the model's own, which every token attends to besides those of its context. Keys are normed,
    and not rotated."""

    eager_reader = program_reader = "headrace.executor.models.reading:CheckedWeights.sink_tokens"

    keys: str
    """A complete name, [count, heads, head_dim]."""
    values: str
    """A complete name, [count, heads, value_dim]; empty: they are 0."""
    count: int
    heads: Axis
    head_dim: int
    value_dim: int
    norm: Norm | None
    """Of each head's key."""
    pairs: int = 0
    """How many of a key's first dimensions are in the order of interleaved pairs (`RopeSpec.interleaved`)."""

    def weights(self) -> Iterator[Weight]:
        yield Weight(self.keys, (self.count, self.heads.size, self.head_dim), "bias")
        if self.values:
            yield Weight(self.values, (self.count, self.heads.size, self.value_dim), "bias")


@dataclass(frozen=True)
class Attend(Declared):
    """Attention over the paged cache, with the norms and rotation of queries and keys before it.

    mix(qkv): query, key and value heads side by side -> [num_tokens, heads * head_dim]; writes the cache. If
    `reads_only`, qkv has query heads only, and nothing is written."""

    eager_reader = "headrace.executor.models.eager:EagerAttend"
    program_reader = "headrace.executor.cpu.attention:CpuAttend.read"

    num_heads: int
    """Heads here and in num_kv_heads are those of all ranks together."""
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    query_norm: Norm | None = None
    """Norm of each head's query; key_norm and value_norm likewise."""
    key_norm: Norm | None = None
    value_norm: Norm | None = None
    sinks: Vector | None = None
    """Attention sinks: one score per head that takes part in the softmax and has no value."""
    sink_tokens: SinkTokens | None = None
    alibi: tuple[float, ...] = ()
    """ALiBi slope of each head, by which a score falls per token of distance (Press et al. 2022); empty: no ALiBi."""
    alibi_root: bool = False
    """Whether a score falls by the slope times the root of the distance instead."""
    chunk_size: int | None = None
    """Tokens per chunk if a token attends only to its chunk and to `chunks_before` before it, in the place of a window
    (`executor.models.chunks`); None: no chunks."""
    chunks_before: int = 0
    grow_after: int | None = None
    """The scores of tokens at positions p beyond it grow, after the cap, by log(p) / log(grow_after); None: none do."""
    norm_after_rotation: bool = False
    """Whether the norms follow the rotation."""
    clip_qkv: float | None = None
    """Largest magnitude of queries, keys and values, to which they are clipped before the norms of heads."""
    query_growth: tuple[int, float, int] | None = None
    """positions_per_step, share and offset of `executor.models.chunks.query_growth`; None: queries are not scaled."""
    causal: bool = True
    """False: a token attends to the tokens after it too. The whole prompt must be in one step."""
    distance_bias: DistanceBias | None = None
    reads_only: bool = False
    """Whether the layer has queries only and attends to keys and values that another layer writes."""
    keys_are_values: bool = False
    """Whether the keys before their norm and rotation are the values before theirs: qkv has query and key heads."""
    whole: bool = False
    """Whether later ops read the results of all tokens even in the last layer."""

    def weights(self) -> Iterator[Weight]:
        own = self.sinks, self.sink_tokens, self.distance_bias
        for each in (self.query_norm, self.key_norm, self.value_norm, *own):
            if each is not None:
                yield from each.weights()


@dataclass(frozen=True)
class ExpertStack(Declared):
    """Experts: gated MLPs of one shape, each down(activation(gate(x)) * up(x))."""

    eager_reader = "headrace.executor.models.eager:EagerExperts"
    program_reader = "headrace.executor.cpu.weights:CpuWeights.experts"

    gates: tuple[str, ...]
    """Name of each expert's gate matrix, without `.weight`; ups and downs likewise."""
    ups: tuple[str, ...]
    downs: tuple[str, ...]
    hidden: int
    inner: Axis
    activation: str
    bias: bool = False
    factors: Declared | None = None
    """Multiplies each expert's share of a result: a `Vector`, or what is read as one."""

    @property
    def num_unread(self) -> int:
        """Experts behind these that compute nothing, whose rows of the gates' and ups' tensor no one reads."""
        return 0

    def weights(self) -> Iterator[Weight]:
        if self.factors is not None:
            yield from self.factors.weights()
        for gate, up, down in zip(self.gates, self.ups, self.downs, strict=True):
            yield Weight(f"{gate}.weight", (self.inner, self.hidden), "expert")
            yield Weight(f"{up}.weight", (self.inner, self.hidden), "expert")
            yield Weight(f"{down}.weight", (self.hidden, self.inner), "expert")
            if self.bias:
                yield Weight(f"{gate}.bias", (self.inner,), "bias")
                yield Weight(f"{up}.bias", (self.inner,), "bias")
                yield Weight(f"{down}.bias", (self.hidden,), "bias")

    @classmethod
    def of(cls, spec: ArchSpec, layer: LayerSpec) -> ExpertStack | None:
        """The experts among which a layer's FFN chooses, which ranks can divide; None if it has none."""
        found = layer.ffn.declare(spec).get("experts")
        return found if isinstance(found, cls) else None


@dataclass(frozen=True)
class AttendLatent(Declared):
    """Latent attention over the paged cache: see `kernels.reference.latent`. Rotary dimensions come last in a head.

    mix(query, latent): nope_dim, then rope_dim columns per head; latent_dim, then rope_dim columns -> [num_tokens,
    heads * value_dim]; writes the cache."""

    eager_reader = "headrace.executor.models.eager:EagerLatent"
    program_reader = "headrace.executor.cpu.attention:CpuLatent.read"
    held_twice = True  # by heads and whole

    num_heads: int
    """Heads of all ranks together."""
    nope_dim: int
    """Dimensions of a head's query and key without rotary positions."""
    rope_dim: int
    latent_dim: int
    value_dim: int
    scale: float
    rope: RopeSpec | None
    """None where rope_dim is 0."""
    interleaved: bool
    """Whether dimension 2i is rotated with 2i + 1, instead of i with i + rope_dim / 2."""
    up: str
    """Name, without `.weight`, of the up-projection from the compressed vector to keys and values: for each head
    nope_dim rows for its key, then value_dim rows for its value."""
    query_growth: tuple[int, float, int] | None = None
    """As of `Attend`."""
    sliding_window: int | None = None
    """Likewise, op by op."""

    @property
    def up_rows(self) -> Axis:
        each = self.nope_dim + self.value_dim
        return Axis(self.num_heads * each, unit=each)

    def weights(self) -> Iterator[Weight]:
        yield Weight(f"{self.up}.weight", (self.up_rows, self.latent_dim), "matrix")


@dataclass(frozen=True)
class Vector(Declared):
    """A vector that a block's ops take directly, in float32."""

    eager_reader = program_reader = "headrace.executor.models.reading:CheckedWeights.values"

    name: str
    size: Dimension
    stored: tuple[int | None, ...] = (None,)
    """Shape in the checkpoint, with None in the place of the size: (1, None) for [1, size]."""
    optional: bool = False
    """Whether a checkpoint may have none: then all values are 0."""

    def weights(self) -> Iterator[Weight]:
        yield Weight(self.name, tuple(self.size if each is None else each for each in self.stored), "bias")


Held = Mapping[str, Any]
"""The things of a `declare`, by its names, in the form that an implementation of `Ops` takes."""
Value = Any
"""Input or result of an op: a tensor, or a buffer of a program. [num_tokens, ...]."""


@dataclass(frozen=True)
class Routing:
    """How a router's logits select experts and weight them: see `kernels.reference.moe.route_experts`."""

    num_chosen: int
    scoring: Literal["softmax", "sigmoid", "sparsemixer", "sqrtsoftplus"]
    renormalise: bool
    scale: float = 1.0
    groups: ExpertGroups = ALL_EXPERTS
    margin: float = 0.0
    """For sparsemixer."""

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `route_experts`, without the number of experts that it chooses."""
        return {name: getattr(self, name) for name in ("scoring", "renormalise", "scale", "groups", "margin")}


class Ops(Protocol):
    """The ops on weights and on single tokens, which any block can emit. Along an axis that ranks divide, values have
    this rank's part only."""

    def linear(self, weight: Any, x: Value) -> Value:
        """The product of a `Linear`, its activation applied."""

    def norm(self, norm: Any, x: Value, first: int = 0, last: int | None = None) -> Value:
        """x with its columns first .. last - 1 normed; x itself may be overwritten."""

    def compute(self, op: Any, *values: Value) -> Value:
        """The result of the op of a `Declared`."""

    def product(self, weight: Any, x: Value) -> Value:
        """A contribution: a `Linear` without an activation. It may be computed only when it is added."""

    def experts(self, stack: Any, x: Value, logits: Value, routing: Routing, correction: Any = None) -> Value:
        """A contribution: the weighted sum of the chosen experts' results for x. correction: a `Vector` that is added
        to the scores for the choice of experts only, not for their weights."""

    def columns(self, x: Value, first: int, count: int) -> Value:
        """A view of columns first .. first + count - 1."""

    def call(self, function: Callable[..., Value], *values: Any) -> Value:
        """The result of any torch function of tensors. This op exists only where ops run eagerly: a block that needs it
        gives the reason in `why_no_program`."""

    def gathered(self, x: Value) -> Value:
        """All-gather: the columns of all ranks side by side. x has this rank's columns. A program has one rank then."""

    def partial(self, contribution: Value) -> Value:
        """This rank's part of a contribution, for ops that are linear in it."""

    def total(self, contributions: Sequence[Value]) -> Value:
        """All-reduce: the contributions' sum over the ranks. One of them may be a result of `linear`, alone."""


class Block:
    """A part of a layer. Subclasses are frozen dataclasses of numbers, so that equal layers are equal."""

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        """What the block reads, under keys that `emit` uses. Names of weights are relative to the layer's prefix."""
        raise NotImplementedError

    def emit(self, ops: LayerOps, held: Held, x: Value) -> Sequence[Value]:
        """x [num_tokens, hidden] -> contributions, whose sum over the ranks is added to the residual stream."""
        raise NotImplementedError

    def for_ranks(self, tp_size: int, inner_block: int) -> Self:
        """The block padded so that the ranks divide it evenly: see `ArchSpec.for_ranks`."""
        return self

    def values_per_token(self, tp_size: int) -> int:
        """Estimate of the elements per token that are in memory at once on one rank while the block computes."""
        raise NotImplementedError

    def problem(self) -> str:
        """What is inconsistent in the block's numbers, as the end of a sentence; "" if nothing is."""
        return ""

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        """Why a CPU program cannot compute the block, as a sentence; "" if it can."""
        return ""


class Ffn(Block):
    """A block that computes each token independently."""

    inner: int
    """Its inner (intermediate) size, over all ranks."""
    reads_token_ids: ClassVar[bool] = False
    """Whether it reads what tokens there are, so that nothing can be given in the place of their embeddings."""

    @property
    def chosen_share(self) -> float:
        """The fraction of its experts that compute a token; 1 without experts."""
        return 1.0

    def emit(self, ops: Ops, held: Held, x: Value) -> Sequence[Value]:
        raise NotImplementedError


@dataclass(frozen=True)
class NoFfn(Ffn):
    """In a layer that is a mixer alone: nothing, and no norm before it."""

    inner: int = 0

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        return {}

    def emit(self, ops: Ops, held: Held, x: Value) -> Sequence[Value]:
        return []

    def values_per_token(self, tp_size: int) -> int:
        return 0


class Mixer(Block):
    """A block that reads other tokens: through the cache that it writes for each token, or through a state that it
    keeps for the sequence."""

    num_heads: int
    """Query heads; 0 where it keeps a state."""
    rope: RopeSpec | None
    sliding_window: int | None
    cache_kind: ClassVar[str] = ""
    """The kind of cache groups that keeps its tokens (`core/schedule/groups/`). Empty: full, or sliding_window, as its
    window says. A mixer of another kind has as its window the most tokens back that it reads, or None."""

    cpu_alone: ClassVar[str] = ""
    """What about it only a CPU computes so far, as the object of a sentence; empty if GPUs compute it."""

    @property
    def lookback(self) -> int:
        """Number of tokens before a token whose ids it reads, besides the token's own; 0: it reads no ids."""
        return 0

    @property
    def follows(self) -> bool:
        """Whether it reads what an earlier layer left in the same pass, which must be of the same stage."""
        return False

    @property
    def cache(self) -> TokenCache | None:
        """What it caches per token; None if it keeps a state."""
        raise NotImplementedError

    def for_context(self, longest: int) -> Self:
        """The mixer for requests of up to `longest` tokens: see `ArchSpec.for_context`."""
        rope = self.rope
        if rope is None or rope.kind != "longrope" or longest <= rope.original_max_positions:
            return self
        return replace(self, rope=replace(rope, divisors=rope.long_divisors))  # type: ignore[type-var]

    def state(self, tp_size: int) -> tuple[Kept, ...]:
        """What it keeps per sequence on one of `tp_size` ranks; empty if it caches tokens."""
        return ()

    def draft_elements(self, tp_size: int) -> int:
        """float32 values of a draft token from which an accepted one is applied to the state, on one rank."""
        return 0


class StateMixer(Mixer):
    """A mixer that keeps a state per sequence. Ranks divide its channels evenly, without padding."""

    cpu_alone = "a recurrence without kernels for GPUs"
    num_heads: int = 0
    rope: RopeSpec | None = None
    sliding_window: None = None

    @property
    def cache(self) -> None:
        return None


@dataclass(frozen=True)
class NoMixer(StateMixer):
    """In a layer that is an FFN alone: nothing, and no norm before it."""

    cpu_alone = ""

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        return {}

    def emit(self, ops: LayerOps, held: Held, x: Value) -> Sequence[Value]:
        return []

    def values_per_token(self, tp_size: int) -> int:
        return 0


class Stream:
    """A residual stream with more than one row of hidden values per token. Its `emit_layer` replaces the module's and
    surrounds both blocks of each layer. It runs op by op, undivided on each rank of a stage, unless it is a
    `beside.Beside`. Subclasses are frozen dataclasses of numbers."""

    placement: ClassVar[Placement] = "sandwich"
    """The norms that its layers have."""

    @property
    def why_no_program(self) -> str:
        """Why a CPU program cannot compute it, as a sentence; "" if it can."""
        return "the program has no ops of this model's residual stream, which is several rows for a token."

    @property
    def table(self) -> LayerTable | None:
        """The second embedding table, which gives the `inputs` of `begin`; None: there is none."""
        return None

    def declare_beginning(self, spec: ArchSpec) -> Mapping[str, Declared]:
        """What `begin` reads. Names of weights are relative to the model's prefix."""
        return {}

    def declare_end(self, spec: ArchSpec) -> Mapping[str, Declared]:
        """What `end` reads. Names of weights are relative to the model's prefix."""
        return {}

    def width(self, num_layers: int) -> int:
        """Elements of the stream per token after `num_layers` layers."""
        raise NotImplementedError

    def declare_layer(self, spec: ArchSpec) -> Mapping[str, Declared]:
        """What `emit_layer` reads besides the layer's blocks and norms. Names are relative to the layer's prefix."""
        raise NotImplementedError

    def begin(self, ops: Ops, held: Held, embedded: Value, inputs: Value | None) -> Value:
        """embedded [num_tokens, hidden], inputs [num_tokens, table.width] or, without a table, None -> the stream,
        [num_tokens, width(0)]"""
        raise NotImplementedError

    def emit_layer(self, layer: LayerSpec, held: LayerHeld, ops: LayerOps, x: Value) -> Value:
        """x: the stream -> the stream after this layer, which may be narrower"""
        raise NotImplementedError

    def end(self, ops: Ops, held: Held, x: Value) -> Value:
        """x: the stream -> [num_tokens, hidden], before the final norm"""
        raise NotImplementedError

    def values_per_token(self) -> int:
        """Estimate of the elements per token that are in memory at once, besides those of a layer's blocks."""
        raise NotImplementedError

    def problem(self) -> str:
        """What is inconsistent in its numbers, as the end of a sentence; "" if nothing is."""
        return ""


def rounded_up(size: int, step: int) -> int:
    """The least multiple of `step` that is not below `size`."""
    return -(-size // step) * step


@dataclass(frozen=True)
class LayerDeclaration:
    """All that a layer reads; names are relative to its prefix."""

    mixer: Mapping[str, Declared]
    ffn: Mapping[str, Declared]
    norms: Mapping[str, Norm]
    """Those of the spec's placement: "mixer" and "ffn" on the blocks' inputs, "mixer_post" and "ffn_post" on their
    outputs; with placement "post", "mixer" and "ffn" are on the stream after each, with "normed" before each."""
    stream: Mapping[str, Declared]
    """What `Stream.declare_layer` declares; empty without a `Stream`."""

    @classmethod
    def of(cls, spec: ArchSpec, layer: LayerSpec) -> LayerDeclaration:
        names, placement = spec.names, layer.norm_placement or spec.norm_placement
        norms: dict[str, Norm] = {}
        if placement not in ("output", "none"):
            if layer.mixer_norm:
                norms["mixer"] = Norm.of_stream(spec, names.attention_norm)
            if placement != "parallel" or names.mlp_norm != names.attention_norm:
                norms["ffn"] = Norm.of_stream(spec, names.mlp_norm)
        if placement in ("sandwich", "output"):
            norms["mixer_post"] = Norm.of(spec, names.attention_post_norm, spec.hidden_size)
        if placement in ("sandwich", "ffn_sandwich", "output"):
            norms["ffn_post"] = Norm.of(spec, names.mlp_post_norm, spec.hidden_size)
        for block, part in ((layer.mixer, "mixer"), (layer.ffn, "ffn")):
            if isinstance(block, NoMixer | NoFfn):
                norms = {key: norm for key, norm in norms.items() if not key.startswith(part)}
        stream = {} if spec.stream is None else spec.stream.declare_layer(spec)
        return cls(layer.mixer.declare(spec), layer.ffn.declare(spec), norms, stream)

    def weights(self) -> Iterator[Weight]:
        for part in (self.mixer, self.ffn, self.norms, self.stream):
            for declared in part.values():
                yield from declared.weights()


@dataclass(frozen=True)
class LayerHeld:
    """The things of a `LayerDeclaration` in the form that an implementation of `Ops` takes."""

    mixer: Held
    ffn: Held
    norms: Held
    stream: Held


class LayerOps(Ops, Protocol):
    """`Ops` in one layer of one step: with the step's other tokens, the layer's cache, and the residual stream, which
    the blocks read and add to."""

    def mix(self, op: Any, *values: Value) -> Value:
        """The result of the op of a `Declared` that reads other tokens: eagerly, op(*values, step, cache)."""

    def stream(self) -> Value:
        """The residual stream, not normed; of a `Beside`, the hidden values."""

    def replace(self, value: Value) -> None:
        """stream = value"""

    def rows(self) -> Value:
        """Of a `Beside` of several rows: these."""

    def put_rows(self, rows: Value) -> None:
        """Of a `Beside` of several rows: those after the layer."""

    def beside(self) -> Value:
        """Of a `Beside`: the columns beside the hidden values that the layer reads, and may write if it reads all."""

    def wide(self) -> Value:
        """Of a `Beside`: the hidden values and the columns beside them."""

    def normed(self, norm: Any) -> Value:
        """The norm of the stream, which itself does not change."""

    def add(self, contributions: Sequence[Value], post_norm: Any = None, factor: Any = None) -> None:
        """stream += the contributions' sum over the ranks, or post_norm of that sum. factor, with a post_norm only: a
        `Vector` of one value, or a number, by which the stream is then multiplied."""

    def add_whole(self, value: Value, post_norm: Any, factor: Any = None) -> None:
        """As `add`, of a value that each rank has whole."""

    def norm_stream(self, norm: Any) -> None:
        """stream = norm(stream)"""


def emit_layer(spec: ArchSpec, layer: LayerSpec, held: LayerHeld, ops: LayerOps) -> None:
    """Emits a layer's ops in order."""
    norms, placement = held.norms, layer.norm_placement or spec.norm_placement
    if placement == "post":  # the original transformer's order
        ops.add(layer.mixer.emit(ops, held.mixer, ops.stream()))
        ops.norm_stream(norms["mixer"])
        ops.add(layer.ffn.emit(ops, held.ffn, ops.stream()))
        ops.norm_stream(norms["ffn"])
        return
    if placement == "normed":  # as in BLOOM with apply_residual_connection_post_layernorm
        for block, held_block, key in ((layer.mixer, held.mixer, "mixer"), (layer.ffn, held.ffn, "ffn")):
            ops.norm_stream(norms[key])
            ops.add(block.emit(ops, held_block, ops.stream()))
        return
    if placement == "parallel":  # as in GPT-J; in a CPU program's last layer, the FFN's norm has fewer rows
        mixed = layer.mixer.emit(ops, held.mixer, ops.normed(norms["mixer"]))
        ops.add([*mixed, *layer.ffn.emit(ops, held.ffn, ops.normed(norms.get("ffn", norms["mixer"])))])
        return
    for block, held_block, key in ((layer.mixer, held.mixer, "mixer"), (layer.ffn, held.ffn, "ffn")):
        if isinstance(block, NoMixer | NoFfn):
            continue
        read = ops.normed(norms[key]) if key in norms else ops.stream()
        ops.add(block.emit(ops, held_block, read), norms.get(f"{key}_post"))
