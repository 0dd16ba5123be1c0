"""A layer's blocks. A block declares its weights once and emits its ops once.

    Attention, Dense, Experts          a block: numbers, `declare`, `emit`; one file each
      declare(spec) -> Linear, Norm, ...   what it reads: names, shapes, how ranks divide them, what they are for
      emit(ops, held, x) -> Contribution   what it computes, of the declared things as a reader of `Ops` holds them

`Ops` has two implementations: `models.eager` computes on tensors, `cpu.program` writes a CPU program. Shapes, memory
estimates, dummy weights, padding and the ranks' parts derive from the declarations (`models.sizes`). A family of
another package brings a block of its own by subclassing `Block`. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from headrace.executor.models.arch import ArchSpec, LayerSpec, LayerTable
from headrace.kernels.expert_groups import ALL_EXPERTS, ExpertGroups

if TYPE_CHECKING:
    from headrace.executor.models.arch import RopeSpec, TokenCache
    from headrace.executor.parallel.rank_place import RankPlace

Role = Literal["matrix", "bias", "norm", "embedding", "head", "router", "expert"]
"""What a weight is for, which is what a quantised format goes by: matrices and experts are quantised as asked, the
embedding and the head more finely or not at all, and the rest stays."""


@dataclass(frozen=True)
class Axis:
    """A dimension that the tensor-parallel ranks divide."""

    size: int
    unit: int = 1
    """What stays together: a head."""
    groups: int = 1
    """Runs of equal size that each keep their place when the dimension is padded: query heads by key/value head."""

    def own(self, place: RankPlace) -> slice | None:
        """A rank's part; None where it is all there is. Fewer units than ranks are repeated."""
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

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size_of(each) for each in self.dimensions)


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b of matrices whose rows stand one below the other, and what is applied to y.

    Ranks divide the rows (each computes its columns of y), or the columns (each computes a part of the sum, to which
    the first rank alone adds the bias).
    """

    matrices: tuple[tuple[str, Dimension], ...]
    """(name without `.weight`, rows) of each."""
    columns: Dimension
    bias: bool = False
    role: Role = "matrix"
    activation: str | None = None
    gated: bool = False
    """Two matrices: the activated result of the first is multiplied by that of the second."""

    def weights(self) -> Iterator[Weight]:
        for name, rows in self.matrices:
            yield Weight(f"{name}.weight", (rows, self.columns), self.role)
            if self.bias:
                yield Weight(f"{name}.bias", (rows,), "bias")


@dataclass(frozen=True)
class Norm:
    """The spec's norm over rows of `size` values."""

    name: str
    size: Dimension
    kind: Literal["rms", "layer"]
    eps: float
    weight_offset: float
    affine: bool
    bias: bool = False
    """Of a layer norm."""
    scale: float = 1.0
    """Multiplies the result."""

    @classmethod
    def of(cls, spec: ArchSpec, name: str, size: Dimension) -> Norm:
        norm = spec.norm
        bias = norm.affine and norm.bias and norm.kind == "layer"
        return cls(name, size, norm.kind, norm.eps, norm.weight_offset, norm.affine, bias)

    @classmethod
    def of_stream(cls, spec: ArchSpec, name: str, scale: float = 1.0) -> Norm:
        """Of the residual stream, which is kept divided by `residual_scale`: a norm sees that in its eps alone."""
        norm = cls.of(spec, name, spec.hidden_size)
        return replace(norm, eps=norm.eps / spec.residual_scale**2, scale=scale)

    def weights(self) -> Iterator[Weight]:
        if self.affine:
            yield Weight(f"{self.name}.weight", (self.size,), "norm")
            if self.bias:
                yield Weight(f"{self.name}.bias", (self.size,), "norm")


@dataclass(frozen=True)
class Attend:
    """Attention over the paged cache, with what is done to queries and keys before."""

    num_heads: int
    """Of all ranks."""
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    query_norm: Norm | None = None
    """Of each head."""
    key_norm: Norm | None = None
    sinks: Vector | None = None
    """Of each head the score of a token that is not there, which takes a share of the softmax."""
    alibi: tuple[float, ...] = ()
    """Of each head what a score loses for each token between the two (Press et al. 2022); empty without."""
    chunk_size: int | None = None
    """A token sees those of its chunk alone: `executor.models.chunks`."""
    query_growth: tuple[int, float] | None = None
    """How queries grow with their positions: tokens of a step, and the share of the logarithm (same module)."""
    reads_only: bool = False
    """Queries alone are given: the keys and values are those that another layer writes."""

    def weights(self) -> Iterator[Weight]:
        for each in (self.query_norm, self.key_norm, self.sinks):
            if each is not None:
                yield from each.weights()


@dataclass(frozen=True)
class ExpertStack:
    """The gated MLPs of experts, all of one shape. Each is down(activation(gate(x)) * up(x))."""

    gates: tuple[str, ...]
    """Of each expert, without `.weight`."""
    ups: tuple[str, ...]
    downs: tuple[str, ...]
    hidden: int
    inner: Axis
    activation: str
    bias: bool = False

    def weights(self) -> Iterator[Weight]:
        for gate, up, down in zip(self.gates, self.ups, self.downs, strict=True):
            yield Weight(f"{gate}.weight", (self.inner, self.hidden), "expert")
            yield Weight(f"{up}.weight", (self.inner, self.hidden), "expert")
            yield Weight(f"{down}.weight", (self.hidden, self.inner), "expert")
            if self.bias:
                yield Weight(f"{gate}.bias", (self.inner,), "bias")
                yield Weight(f"{up}.bias", (self.inner,), "bias")
                yield Weight(f"{down}.bias", (self.hidden,), "bias")


@dataclass(frozen=True)
class AttendLatent:
    """Latent attention over the paged cache: see `kernels.reference.latent`. The rotary dimensions come last."""

    num_heads: int
    """Of all ranks."""
    nope_dim: int
    """Of a head's query and key, without rotary positions."""
    rope_dim: int
    latent_dim: int
    value_dim: int
    scale: float
    rope: RopeSpec
    interleaved: bool
    """Dimension 2i is rotated with 2i + 1, instead of i with i + rope_dim / 2."""
    up: str
    """The matrix, without `.weight`, that makes keys and values of the compressed vector: of each head nope_dim rows of
    its key, then value_dim rows of its value."""

    @property
    def up_rows(self) -> Axis:
        each = self.nope_dim + self.value_dim
        return Axis(self.num_heads * each, unit=each)

    def weights(self) -> Iterator[Weight]:
        yield Weight(f"{self.up}.weight", (self.up_rows, self.latent_dim), "matrix")


@dataclass(frozen=True)
class Vector:
    """Values that a block's ops take as they are, in float32."""

    name: str
    size: Dimension
    is_row: bool = False
    """Stored as [1, size]."""

    def weights(self) -> Iterator[Weight]:
        yield Weight(self.name, (1, self.size) if self.is_row else (self.size,), "bias")


Declared = Linear | Norm | Attend | AttendLatent | ExpertStack | Vector
Held = Mapping[str, Any]
"""What `declare` named, as a reader holds it for its `Ops`."""
Value = Any
"""What flows between ops: a tensor, or a buffer of a program. [num_tokens, ...]."""


@dataclass(frozen=True)
class Routing:
    """How a router's logits become experts and their weights: see `kernels.reference.moe.route_experts`."""

    num_chosen: int
    scoring: Literal["softmax", "sigmoid", "sparsemixer"]
    renormalise: bool
    scale: float = 1.0
    groups: ExpertGroups = ALL_EXPERTS
    margin: float = 0.0
    """Of sparsemixer."""

    @property
    def options(self) -> dict[str, Any]:
        """As arguments of `route_experts`, beside how many it chooses."""
        return {name: getattr(self, name) for name in ("scoring", "renormalise", "scale", "groups", "margin")}


class Ops(Protocol):
    """What a block emits its ops to. Values hold this rank's part of what ranks divide."""

    def linear(self, weight: Any, x: Value) -> Value:
        """Of a `Linear`, its activation applied."""

    def norm(self, norm: Any, x: Value, first: int = 0, last: int | None = None) -> Value:
        """x with its columns first .. last - 1 normed; x itself may be overwritten."""

    def attend(self, attend: Any, qkv: Value) -> Value:
        """qkv: query, key and value heads side by side -> [num_tokens, heads * head_dim]; writes the cache. Of one that
        reads only, queries alone."""

    def attend_latent(self, attend: Any, query: Value, latent: Value) -> Value:
        """query: of each head nope_dim and rope_dim columns; latent: latent_dim and rope_dim columns -> [num_tokens,
        heads * value_dim]; writes the cache."""

    def product(self, weight: Any, x: Value) -> Value:
        """A contribution: a `Linear` without an activation, computed as it is added."""

    def experts(self, stack: Any, x: Value, logits: Value, routing: Routing, correction: Any = None) -> Value:
        """A contribution: the weighted sum of what the chosen experts of an `ExpertStack` make of x. correction: a
        `Vector` that is added to the scores to choose, and to nothing else."""

    def call(self, function: Callable[..., Value], *values: Any) -> Value:
        """Any torch function of tensors. Only where ops run eagerly: a block that needs it says so in
        `why_no_program`. So are the two below."""

    def gathered(self, x: Value) -> Value:
        """The columns of all ranks side by side, of what each has a part of."""

    def total(self, contributions: Sequence[Value]) -> Value:
        """The contributions' sum over the ranks."""


class Block:
    """A part of a layer. Subclasses are frozen dataclasses of numbers, so that equal layers are equal."""

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        """What it reads, under names of its own. Weights' names are those below a layer's prefix."""
        raise NotImplementedError

    def emit(self, ops: Ops, held: Held, x: Value) -> Sequence[Value]:
        """x [num_tokens, hidden] -> contributions, which are added over ranks and to the residual stream."""
        raise NotImplementedError

    def for_ranks(self, tp_size: int, inner_block: int) -> Self:
        """Itself padded to what the ranks can divide evenly: see `ArchSpec.for_ranks`."""
        return self

    def values_per_token(self, tp_size: int) -> int:
        """About how many values of a token live at once on one rank while this computes."""
        raise NotImplementedError

    def problem(self) -> str:
        """What is inconsistent in its numbers, as a sentence's end; "" when nothing is."""
        return ""

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        """Why it cannot be written into a CPU program, in a sentence; "" when it can."""
        return ""


class Ffn(Block):
    """A block that works on each token alone."""

    inner: int
    """Its widest row of values, over all ranks."""

    @property
    def chosen_share(self) -> float:
        """The part of its experts that computes one token."""
        return 1.0


class Mixer(Block):
    """A block that reads other tokens, by way of what it keeps of each."""

    num_heads: int
    rope: RopeSpec | None
    sliding_window: int | None

    @property
    def cache(self) -> TokenCache:
        """What it keeps of a token."""
        raise NotImplementedError


class Stream:
    """What a model keeps of each token from layer to layer, where that is more than one row of hidden values. It stands
    around both blocks of each layer in the place of `emit_layer`, and runs op by op, whole on each rank of a stage.
    Subclasses are frozen dataclasses of numbers."""

    @property
    def table(self) -> LayerTable:
        """Of the token embeddings that `begin` is given beside the first."""
        raise NotImplementedError

    def declare_beginning(self, spec: ArchSpec) -> Mapping[str, Declared]:
        """What `begin` reads. Weights' names are those below the model's prefix."""
        raise NotImplementedError

    def declare_end(self, spec: ArchSpec) -> Mapping[str, Declared]:
        """What `end` reads."""
        raise NotImplementedError

    def width(self, num_layers: int) -> int:
        """Values of a token after so many layers."""
        raise NotImplementedError

    def declare_layer(self, spec: ArchSpec) -> Mapping[str, Declared]:
        """What `emit_layer` reads beside the layer's blocks and norms. Names below a layer's prefix."""
        raise NotImplementedError

    def begin(self, ops: Ops, held: Held, embedded: Value, inputs: Value) -> Value:
        """embedded [num_tokens, hidden], inputs [num_tokens, width of the table] -> the stream, [num_tokens, ...]"""
        raise NotImplementedError

    def emit_layer(self, layer: LayerSpec, held: LayerHeld, ops: Ops, x: Value) -> Value:
        """x: the stream -> the stream after this layer, which may be narrower"""
        raise NotImplementedError

    def end(self, ops: Ops, held: Held, x: Value) -> Value:
        """x: the stream -> [num_tokens, hidden], before the final norm"""
        raise NotImplementedError

    def values_per_token(self) -> int:
        """About how many values of a token live at once beside those of a layer's blocks."""
        raise NotImplementedError

    def problem(self) -> str:
        """As a block's."""
        return ""


def rounded_up(size: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-size // step) * step


@dataclass(frozen=True)
class LayerDeclaration:
    """All that a layer reads, with names below its prefix."""

    mixer: Mapping[str, Declared]
    ffn: Mapping[str, Declared]
    norms: Mapping[str, Norm]
    """Of the spec's placement: mixer and ffn before these, mixer_post and ffn_post after them."""
    stream: Mapping[str, Declared]
    """Of the spec's `Stream`."""

    @classmethod
    def of(cls, spec: ArchSpec, layer: LayerSpec) -> LayerDeclaration:
        names, placement = spec.names, spec.norm_placement
        norms: dict[str, Norm] = {}
        if placement != "output":
            norms["mixer"] = Norm.of_stream(spec, names.attention_norm)
            if placement != "parallel" or names.mlp_norm != names.attention_norm:
                norms["ffn"] = Norm.of_stream(spec, names.mlp_norm)
        if placement in ("sandwich", "output"):
            norms["mixer_post"] = Norm.of(spec, names.attention_post_norm, spec.hidden_size)
            norms["ffn_post"] = Norm.of(spec, names.mlp_post_norm, spec.hidden_size)
        stream = {} if spec.stream is None else spec.stream.declare_layer(spec)
        return cls(layer.mixer.declare(spec), layer.ffn.declare(spec), norms, stream)

    def weights(self) -> Iterator[Weight]:
        for part in (self.mixer, self.ffn, self.norms, self.stream):
            for declared in part.values():
                yield from declared.weights()


@dataclass(frozen=True)
class LayerHeld:
    """A `LayerDeclaration`'s things as a reader holds them."""

    mixer: Held
    ffn: Held
    norms: Held
    stream: Held


class LayerOps(Ops, Protocol):
    """`Ops` with the residual stream that a layer's blocks stand around."""

    def stream(self) -> Value:
        """The residual stream as it is."""

    def normed(self, norm: Any) -> Value:
        """The norm of the stream, which stays as it is."""

    def add(self, contributions: Sequence[Value], post_norm: Any = None) -> None:
        """stream += [post_norm of] the contributions' sum over the ranks."""

    def norm_stream(self, norm: Any) -> None:
        """stream = norm(stream)"""


def emit_layer(spec: ArchSpec, layer: LayerSpec, held: LayerHeld, ops: LayerOps) -> None:
    """A layer's ops, in order."""
    norms = held.norms
    if spec.norm_placement == "post":  # the original transformer's order
        ops.add(layer.mixer.emit(ops, held.mixer, ops.stream()))
        ops.norm_stream(norms["mixer"])
        ops.add(layer.ffn.emit(ops, held.ffn, ops.stream()))
        ops.norm_stream(norms["ffn"])
        return
    if spec.norm_placement == "parallel":  # as in GPT-J; the second norm may be of fewer rows than the first
        mixed = layer.mixer.emit(ops, held.mixer, ops.normed(norms["mixer"]))
        ops.add([*mixed, *layer.ffn.emit(ops, held.ffn, ops.normed(norms.get("ffn", norms["mixer"])))])
        return
    for block, held_block, key in ((layer.mixer, held.mixer, "mixer"), (layer.ffn, held.ffn, "ffn")):
        read = ops.normed(norms[key]) if key in norms else ops.stream()
        ops.add(block.emit(ops, held_block, read), norms.get(f"{key}_post"))
