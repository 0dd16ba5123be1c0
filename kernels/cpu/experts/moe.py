"""Mixtures of experts on the CPU kernels: routing, and experts with packed matrices.

Each expert's matrices are packed separately, in any type of linear layers (see linear.py, whose error bounds hold for
each product). An expert that no row chose is not read. A row's result is bitwise independent of the other rows and of
the number of threads: experts are added in float32 in rising order of their indices.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Required, TypedDict, Unpack

import torch
from torch import Tensor

from headrace.kernels.cpu.experts.args import ExpertsArgs, RouteArgs
from headrace.kernels.cpu.linear.args import ACTIVATIONS, PackedWeightC, RowAdaptersC, ScratchNeed
from headrace.kernels.cpu.linear.deltas import DeltaTable, PackedDelta, PairedRows
from headrace.kernels.cpu.linear.linear import (
    DTYPES,
    FLOAT_TYPES,
    ROWS_FIXED,
    PackedLinear,
    Runtime,
    pack,
    runtime,
    why_not,
)
from headrace.kernels.cpu.ops import why_no_op
from headrace.kernels.cpu.runtime.pointers import pointer
from headrace.kernels.cpu.runtime.threads import Step
from headrace.kernels.expert_groups import ALL_EXPERTS, ExpertGroups
from headrace.kernels.expert_places import ExpertPlaces
from headrace.kernels.low_rank import AdaptedTokens, LowRankExperts, SlotLimits
from headrace.kernels.reference.moe import ExpertStack, ExpertWeights, Scoring
from headrace.kernels.registry import Version

SCORINGS: Mapping[Scoring, int] = MappingProxyType({"softmax": 0, "sigmoid": 1, "sparsemixer": 2, "sqrtsoftplus": 3})
"""`Scoring` in experts.h."""
PASS_BYTES, LEAST_PASS_ROWS = 16 << 20, 256
"""Limits on the activations between an expert's two products in one pass, large enough that many rows share each read
of the weights."""


@dataclass(frozen=True, eq=False)
class PackedExpertDeltas:
    """An adapter's part of a layer's experts."""

    gate_up: PackedDelta | None
    down: PackedDelta | None

    def of(self, experts: Sequence[int]) -> PackedExpertDeltas:
        """The parts of these experts, in this order."""
        return PackedExpertDeltas(*(None if each is None else each.of(experts) for each in (self.gate_up, self.down)))

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.gate_up, self.down) if each is not None)


@dataclass(frozen=True, eq=False)
class ExpertDeltas:
    """The adapters of a layer's experts, by slot."""

    gate_up: DeltaTable
    down: DeltaTable
    most_used: int
    """Adapters of a row."""
    most_width: int
    """Values of y of a row and adapter."""

    @classmethod
    def of(
        cls, gate_up: PackedLinear, down: PackedLinear, limits: SlotLimits, own: Sequence[int] | None = None
    ) -> ExpertDeltas:
        """gate_up, down: of any of the experts. own: as in `AdaptableExperts.adaptable`."""
        first, second = (DeltaTable(weight, limits.dtype, limits.num_slots) for weight in (gate_up, down))
        most_used, width = limits.most_used, 2 * (limits.max_rank + 1)
        if own is None:
            return cls(first, second, most_used, width)
        return MovableExpertDeltas(first, second, most_used, width, list(own))

    def pack(self, delta: LowRankExperts) -> PackedExpertDeltas:
        return PackedExpertDeltas(self.gate_up.pack_stack(delta.gate_up), self.down.pack_stack(delta.down))

    def put(self, slot: int, packed: PackedExpertDeltas | None) -> None:
        self.gate_up.put(slot, None if packed is None else packed.gate_up)
        self.down.put(slot, None if packed is None else packed.down)


@dataclass(frozen=True, eq=False)
class MovableExpertDeltas(ExpertDeltas):
    """The adapters of experts that load balancing moves between ranks: each rank has those of all experts, and its
    tables the parts of its own."""

    own: list[int] = field(default_factory=list)
    """The experts in this rank's places."""
    held: dict[int, PackedExpertDeltas] = field(default_factory=dict)
    """Of all experts, by slot."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Adapters are loaded beside steps, between which experts move."""

    def put(self, slot: int, packed: PackedExpertDeltas | None) -> None:
        with self.lock:
            self.held.pop(slot, None)
            if packed is not None:
                self.held[slot] = packed
            self._put_own(slot, packed)

    def move(self, own: Sequence[int]) -> None:
        """As `MovableDeltas.move`."""
        with self.lock:
            self.own[:] = own
            for slot, packed in self.held.items():
                self._put_own(slot, packed)

    def _put_own(self, slot: int, packed: PackedExpertDeltas | None) -> None:
        super().put(slot, None if packed is None else packed.of(self.own))


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """The experts of one layer on one rank. Each has a gated pair [2 * inner, hidden] and a down projection
    [hidden, inner]."""

    gate_up: tuple[PackedLinear, ...]
    down: tuple[PackedLinear, ...]
    activation: str
    biases: tuple[Tensor, Tensor] | None = None
    """[num_experts, 2 * inner] and [num_experts, hidden] float32."""
    experts_read: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    """[1] int64: a counter of experts read, summed over steps."""
    places: ExpertPlaces | None = None
    """The map from the router's experts to these; None if they are all of them, in order."""
    loads: Tensor | None = None
    """[num_experts] int64: counters of the rows that each expert computes; None if they are not needed."""
    factors: Tensor | None = None
    """float32, of each of the router's experts: multiply the weights with which routing chooses them."""
    deltas: ExpertDeltas | None = None
    """None where adapters cannot change them."""

    def __post_init__(self) -> None:
        if not self.gate_up or len(self.gate_up) != len(self.down):
            raise ValueError(f"{len(self.gate_up)} gated pairs and {len(self.down)} matrices are no set of experts.")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} is unknown; there are {', '.join(ACTIVATIONS)}.")
        for stack, what in ((self.gate_up, "gated pairs"), (self.down, "down projections")):
            kinds = sorted({(weight.type_name, weight.n, weight.k, weight.gated) for weight in stack})
            if len(kinds) > 1 or kinds[0][3] != (stack is self.gate_up):
                raise ValueError(f"a layer's {what} must be of one type and shape, packed as such, not {kinds}.")
        if self.down[0].k != self.inner or self.down[0].n != self.hidden:
            raise ValueError(
                f"experts between {self.hidden} and {self.inner} values need [{self.hidden}, {self.inner}] to come "
                f"back, not {[self.down[0].n, self.down[0].k]}."
            )

        sizes = (2 * self.inner, self.hidden)
        for bias, size in zip(self.biases or (), sizes, strict=self.biases is not None):
            if bias.dtype != torch.float32 or bias.shape != (self.num_experts, size) or not bias.is_contiguous():
                wanted = f"contiguous float32 [{self.num_experts}, {size}]"
                raise ValueError(f"biases of experts are {wanted}, not {bias.dtype} {list(bias.shape)}.")

        if self.loads is not None and (self.loads.dtype != torch.int64 or self.loads.shape != (self.num_experts,)):
            raise ValueError(f"the rows of {self.num_experts} experts are counted in as many int64.")

    @property
    def num_experts(self) -> int:
        return len(self.gate_up)

    @property
    def hidden(self) -> int:
        return self.gate_up[0].k

    @property
    def inner(self) -> int:
        return self.gate_up[0].columns

    @property
    def inner_dtype(self) -> torch.dtype:
        """The type of the activations between the two products: bf16 if the second product rounds its input to bf16
        anyway, else float32."""
        return torch.bfloat16 if self.down[0].type_name == "BF16" else torch.float32

    @property
    def runtime(self) -> Runtime:
        return self.gate_up[0].runtime

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in (*self.gate_up, *self.down, *(self.biases or ())))

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's matrices, which a step reads for each expert that its rows chose."""
        return self.gate_up[0].nbytes + self.down[0].nbytes

    def memory(self, expert: int) -> tuple[Tensor, ...]:
        """As `MovableExperts.memory`."""
        packed = (self.gate_up[expert].packed, self.down[expert].packed)
        return (*packed, *(bias[expert] for bias in self.biases or ()))

    @property
    def layout(self) -> tuple[int, ...]:
        """As `MovableExperts.layout`."""
        return (*self.gate_up[0].layout, *self.down[0].layout)

    def pass_rows(self, max_rows: int, top_k: int) -> int:
        """The number of (row, expert) pairs that one pass computes; see experts.h."""
        return min(max_rows * top_k, max(LEAST_PASS_ROWS, PASS_BYTES // (4 * self.inner)))

    def describe(self, top_k: int, max_rows: int) -> tuple[ExpertsArgs, tuple[object, ...]]:
        """The op's arguments without those that depend on the rows, and the objects that they point to."""
        both = (self.gate_up, self.down)
        stacks = tuple((PackedWeightC * len(stack))(*(weight.descriptor for weight in stack)) for stack in both)
        args = ExpertsArgs(
            gate_up=ctypes.addressof(stacks[0]),
            down=ctypes.addressof(stacks[1]),
            experts_read=pointer(self.experts_read),
            num_experts=self.num_experts,
            top_k=top_k,
            pass_rows=self.pass_rows(max_rows, top_k),
            inner_dtype=DTYPES[self.inner_dtype],
            activation=ACTIVATIONS[self.activation],
        )
        if self.biases is not None:
            args.gate_up_bias, args.down_bias = (pointer(bias) for bias in self.biases)
        if self.loads is not None:
            args.loads = pointer(self.loads)
        if self.deltas is None:
            return args, (*stacks, self)
        sites = self.deltas.gate_up.describe(), self.deltas.down.describe()
        args.gate_up_site, args.down_site = map(ctypes.addressof, sites)
        args.delta_uses, args.delta_width = self.deltas.most_used, self.deltas.most_width
        return args, (*stacks, *sites, self)

    def scratch(self, args: ExpertsArgs, max_rows: int) -> tuple[int, int]:
        """The scratch to reserve in the pool for up to `max_rows` rows: (shared bytes, bytes per thread)."""
        need = ScratchNeed()
        self.runtime.library.dll.hr_experts_scratch(ctypes.byref(args), ctypes.c_int64(max_rows), ctypes.byref(need))
        return need.shared_bytes, need.per_thread_bytes

    def adaptable(self, limits: SlotLimits, own: Sequence[int] | None = None) -> tuple[PackedExperts, ExpertDeltas]:
        """As `AdaptableExperts.adaptable`."""
        deltas = ExpertDeltas.of(self.gate_up[0], self.down[0], limits, own)
        return replace(self, deltas=deltas), deltas

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """As `ExpertWeights.apply`."""
        return self._apply(x, expert_ids, weights, None)

    def apply_adapted(self, x: Tensor, expert_ids: Tensor, weights: Tensor, adapters: AdaptedTokens) -> Tensor:
        """As `AdaptedExperts.apply_adapted`."""
        paired = PairedRows.of(adapters.slots, adapters.scales)
        paired.put(args := RowAdaptersC())
        return self._apply(x, expert_ids, weights, Step(adapters=ctypes.addressof(args)))

    def _apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor, step: Step | None) -> Tensor:
        x, (num_rows, top_k) = x.contiguous(), expert_ids.shape
        if x.shape != (num_rows, self.hidden) or x.dtype not in DTYPES or weights.shape != expert_ids.shape:
            raise ValueError(
                f"{num_rows} rows of {self.hidden} values in fp32, bf16 or fp16 and {list(expert_ids.shape)} weights "
                f"are needed; here: {x.dtype} {list(x.shape)} and {list(weights.shape)}."
            )
        if not num_rows:
            return torch.empty_like(x)
        ids, wide = expert_ids.to(torch.int32).contiguous(), weights.float().contiguous()
        args, kept = self.describe(top_k, num_rows)
        inner = torch.empty(args.pass_rows, self.inner, dtype=self.inner_dtype)
        out = torch.empty(num_rows, self.hidden)
        args.x, args.x_stride, args.x_dtype = pointer(x), self.hidden, DTYPES[x.dtype]
        args.expert_ids, args.weights, args.inner = pointer(ids), pointer(wide), pointer(inner)
        args.out, args.out_stride = pointer(out), self.hidden
        args.rows, args.fixed_rows = ROWS_FIXED, num_rows
        self.runtime.pool.reserve(*self.scratch(args, num_rows))
        self.runtime.pool.run_op("hr_op_experts", args, step)
        del kept
        return out.to(x.dtype)


class RouteOptions(TypedDict, total=False):
    """Options of `reference.route_experts`, and `places`."""

    scoring: Required[Scoring]
    renormalise: Required[bool]
    scale: float
    groups: ExpertGroups
    margin: float
    places: ExpertPlaces | None
    """If given, local indices of this map are returned instead of the router's expert ids."""


def route_args(num_experts: int, top_k: int, options: RouteOptions) -> RouteArgs:
    """The arguments of routing without those that depend on the rows. Raises ValueError for invalid options."""
    scoring, groups = options["scoring"], options.get("groups", ALL_EXPERTS)
    places = options.get("places")
    if places is not None and len(places.replicas) != num_experts:
        raise ValueError(f"there are places of {len(places.replicas)} experts, and logits of {num_experts}.")
    if not 0 < top_k <= num_experts:
        raise ValueError(f"{top_k} of {num_experts} experts cannot be chosen.")
    if scoring not in SCORINGS:
        raise ValueError(f"experts are scored by {', '.join(SCORINGS)}, not by {scoring!r}.")
    if reason := groups.why_not(num_experts, top_k):
        raise ValueError(f"{reason}.")
    return RouteArgs(
        num_experts=num_experts,
        top_k=top_k,
        num_groups=groups.number,
        groups_chosen=groups.chosen,
        group_best=groups.best,
        places=None if places is None else pointer(places.numbers),
        replicas=None if places is None else pointer(places.replicas),
        most_replicas=0 if places is None else places.numbers.shape[1],
        scoring=SCORINGS[scoring],
        renormalise=options["renormalise"],
        scale=options.get("scale", 1.0),
        margin=options.get("margin", 0.0),
    )


def route_scratch_bytes(num_experts: int) -> int:
    """Scratch bytes of routing per thread."""
    return 20 * (num_experts + 16)


def route_experts(
    logits: Tensor,
    *,
    top_k: int,
    bias: Tensor | None = None,
    used: Runtime | None = None,
    **options: Unpack[RouteOptions],
) -> tuple[Tensor, Tensor]:
    """As `reference.route_experts`, on the given runtime or this process's shared one."""
    logits, runtime_ = logits.contiguous(), used or runtime()
    num_rows, num_experts = logits.shape
    args = route_args(num_experts, top_k, options)
    expert_ids = torch.empty(num_rows, top_k, dtype=torch.int32)
    weights = torch.empty(num_rows, top_k)
    wide_bias = None if bias is None else bias.float().contiguous()
    args.logits, args.logits_stride, args.logits_dtype = pointer(logits), num_experts, DTYPES[logits.dtype]
    args.bias = None if wide_bias is None else pointer(wide_bias)
    args.expert_ids, args.weights = pointer(expert_ids), pointer(weights)
    args.rows, args.fixed_rows = ROWS_FIXED, num_rows
    runtime_.pool.reserve(0, route_scratch_bytes(num_experts))
    runtime_.pool.run_op("hr_op_route", args)
    return expert_ids, weights


def pack_experts(
    gate_up: ExpertStack,
    down: ExpertStack,
    activation: str,
    biases: tuple[Tensor, Tensor] | None = None,
    *,
    used: Runtime | None = None,
) -> ExpertWeights:
    """As `reference.experts`, but only for stacks [num_experts, rows, columns] in fp32, bf16 or fp16."""
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor):
        raise ValueError("experts are packed from stacks of floats; what is packed already makes a PackedExperts.")
    return PackedExperts(
        tuple(pack(weight, gated=True, runtime_=used) for weight in gate_up),
        tuple(pack(weight, runtime_=used) for weight in down),
        activation,
        biases,
    )


def why_no_experts(
    type_names: Sequence[str], hidden: int, inner: int, activation: str, *, level: str = "native"
) -> str:
    """The reason why experts of these types and sizes cannot be packed, in a sentence; "" if they can.

    type_names: the types of the gate, up and down projections.
    """
    gate, up, down = type_names
    if gate != up:
        return f"an expert's gate and up projection are computed together, and their types differ: {gate} and {up}."
    if activation not in ACTIVATIONS:
        return f"the activation {activation} is unknown to the kernels; there are {', '.join(ACTIVATIONS)}."
    return why_not(gate, 2 * inner, hidden, gated=True, level=level) or why_not(down, hidden, inner, level=level) or ""


def _why_no_stacks(
    dtype: torch.dtype | None = None,
    hidden: int = 1,
    inner: int = 1,
    activation: str = "silu",
    stored: str = "floats",
    **facts: Any,
) -> str:
    if reason := why_no_op(dtype=dtype, **facts):
        return reason
    if stored != "floats":
        return f"it packs experts in floats, and these are stored in {stored}."
    assert dtype is not None, "why_no_op takes none"
    return why_no_experts([FLOAT_TYPES[dtype]] * 3, hidden, inner, activation)


VERSIONS = (
    Version("route_experts", "cpu_native", route_experts, why_no_op),
    Version("experts", "cpu_packed", pack_experts, _why_no_stacks),
)
