"""Mixtures of experts (Shazeer et al. 2017; Fedus et al. 2021), in torch: the router and the experts' computation.

A token's result does not depend on the rest of the batch. The weights of experts that no token chose are not read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.expert_groups import ALL_EXPERTS, ExpertGroups
from headrace.kernels.low_rank import AdaptedTokens, LowRank, LowRankExperts, SlotLimits
from headrace.kernels.reference.quantised import QuantisedLinear
from headrace.kernels.reference.rows import LinearWeight, activate_and_multiply

Scoring = Literal["softmax", "sigmoid", "sparsemixer", "sqrtsoftplus"]
LEAST_SUM = 1e-20
"""The least divisor of `renormalise`, since sigmoid scores can all be 0."""


class QuantisedStack(Sequence[LinearWeight]):
    """One of the matrices of all experts, in 8 or 4 bits. Each expert's part is a `QuantisedLinear`."""

    def __init__(self, codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> None:
        self.codes = codes  # [num_experts, out_features, in_features] int8; [.., in_features / 2] uint8 for 4 bits
        self.scales = scales  # [num_experts, out_features, num_groups] float32 or float16
        self.zeros = zeros  # [num_experts, out_features, num_groups] uint8 or float32, only for 4 bits

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, expert: Any) -> Any:
        """One expert's weight."""
        zeros = None if self.zeros is None else self.zeros[expert]
        return QuantisedLinear(self.codes[expert], self.scales[expert], None, zeros)


Biases = tuple[Tensor, Tensor]
"""The biases of gate_up and down: [num_experts, 2 * inner] and [num_experts, hidden] float32."""
ExpertStack = Tensor | Sequence[LinearWeight]
"""One of the matrices of all experts: [num_experts, out_features, in_features], or a packed weight for each expert."""


def route_experts(
    logits: Tensor,
    *,
    top_k: int,
    scoring: Scoring,
    renormalise: bool,
    scale: float = 1.0,
    bias: Tensor | None = None,
    groups: ExpertGroups = ALL_EXPERTS,
    margin: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Chooses the `top_k` experts of each token, best first, and the weights of their results.

    logits [num_tokens, num_experts] of any float type. Scores are computed in float32: the softmax over all experts, or
    of each logit the sigmoid or the root of softplus. The experts with the highest logits are chosen, of equal ones the
    lower index. With a bias [num_experts] float32 (DeepSeek-V3, section 2.1.2) those with the highest score + bias are
    chosen; the bias does not enter the weights. With several `groups` only experts of the best groups can be chosen.
    The weights are the scores, divided by their sum if `renormalise`, times `scale`.

    Scoring by sparsemixer (Liu et al. 2024, "GRIN", section 3.1): an expert's weight is its share of a softmax over
    itself and the experts ranked below it, without those whose logit is below its own by more than `margin` times the
    larger of its own logit and the absolute value of theirs. It ignores bias and groups.
    Returns expert_ids [num_tokens, top_k] int32 and weights [num_tokens, top_k] float32.
    """
    wide = logits.float()
    if scoring == "sparsemixer":
        expert_ids, weights = _by_sparsemixer(wide, top_k, margin)
        return expert_ids.to(torch.int32), _renormalised(weights, renormalise) * scale
    scores = scores_of(wide, scoring)
    order = wide if bias is None else scores + bias
    if groups.number > 1:
        order = _within_groups(scores if bias is None else order, groups)
    expert_ids = order.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(-1, expert_ids)
    return expert_ids.to(torch.int32), _renormalised(weights, renormalise) * scale


def scores_of(wide: Tensor, scoring: Scoring) -> Tensor:
    """wide: logits [num_tokens, num_experts] float32 -> as wide. Not by sparsemixer."""
    if scoring == "sqrtsoftplus":
        return F.softplus(wide).sqrt()
    return wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()


def shares_of(scores: Tensor, expert_ids: Tensor, scale: float) -> Tensor:
    """The weights of chosen experts' results: scores [num_tokens, num_experts], expert_ids [num_tokens, top_k] ->
    [num_tokens, top_k], which add up to scale."""
    return _renormalised(scores.gather(-1, expert_ids.long()), renormalise=True) * scale


def _renormalised(weights: Tensor, renormalise: bool) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp(min=LEAST_SUM) if renormalise else weights


def _by_sparsemixer(wide: Tensor, top_k: int, margin: float) -> tuple[Tensor, Tensor]:
    """wide: logits [num_tokens, num_experts] float32. Returns expert ids and weights, both [num_tokens, top_k]."""
    order = wide.sort(dim=-1, descending=True, stable=True)
    shares = []
    for slot in range(top_k):
        best, left = order.values[:, slot, None], order.values[:, slot:]
        is_far = (best - left) / left.abs().maximum(best) > margin
        shares.append((left - best).masked_fill(is_far, float("-inf")).softmax(-1)[:, 0])
    return order.indices[:, :top_k], torch.stack(shares, dim=-1)


def _within_groups(order: Tensor, groups: ExpertGroups) -> Tensor:
    """order [num_tokens, num_experts], with -inf for the experts outside the best groups."""
    grouped = order.unflatten(-1, (groups.number, -1))
    worth = grouped.topk(groups.best, dim=-1).values.sum(-1)
    best = worth.sort(dim=-1, descending=True, stable=True).indices[:, : groups.chosen]
    is_chosen = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~is_chosen[..., None], float("-inf")).flatten(1)


class ExpertWeights(Protocol):
    """The weights of all experts of a layer on one rank, in the layout that their kernel needs."""

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """The sum over k of weights[:, k] * down(activation(gate(x)) * up(x)) of expert expert_ids[:, k].

        x [num_tokens, hidden]; expert_ids [num_tokens, top_k] int32 and weights [num_tokens, top_k] float32 as
        `route_experts` returns them, each expert at most once per token. A negative id (padding, or an expert of
        another rank) adds nothing. The sum is in float32, in an order that does not depend on the other tokens, and is
        rounded once. Returns [num_tokens, hidden] in x's dtype.
        """
        ...

    @property
    def nbytes(self) -> int: ...


@runtime_checkable
class AdaptableExperts(ExpertWeights, Protocol):
    """Experts that adapters may change."""

    def adaptable(self, limits: SlotLimits, own: Sequence[int] | None = None) -> tuple[AdaptedExperts, Any]:
        """The same weights, which adapters change, and the table of the adapters: `pack(LowRankExperts)`, `put(slot,
        packed)`.

        own: with load balancing, which of the layer's experts these are; what is packed is then of all, and the table
        is `MovableDeltas`."""
        ...


class AdaptedExperts(ExpertWeights, Protocol):
    def apply_adapted(self, x: Tensor, expert_ids: Tensor, weights: Tensor, adapters: AdaptedTokens) -> Tensor:
        """As `apply`, of tokens some of which have adapters. The others' results are those of `apply`."""
        ...


class MovableExperts(ExpertWeights, Protocol):
    """Experts whose weights can be overwritten by those of another expert between steps, for load balancing."""

    def memory(self, expert: int) -> tuple[Tensor, ...]:
        """All weights of one expert: contiguous tensors that share the kernel's memory, to be copied from or into."""
        ...

    @property
    def layout(self) -> tuple[int, ...]:
        """Describes the format of `memory`. Experts may be copied between ranks if their layouts are equal."""
        ...


class MovableDeltas(Protocol):
    """The adapters of experts that load balancing moves."""

    def move(self, own: Sequence[int]) -> None:
        """own: which of the layer's experts are in these places from the next step on."""
        ...


class TorchExperts:
    """Experts in the layout of the checkpoint. Shares the tensors that it is given."""

    def __init__(self, gate_up: ExpertStack, down: ExpertStack, activation: str, biases: Biases | None) -> None:
        self.gate_up, self.down, self.activation, self.biases = gate_up, down, activation, biases
        self._deltas: TorchExpertDeltas | None = None

    def adaptable(
        self, limits: SlotLimits, own: Sequence[int] | None = None
    ) -> tuple[AdaptedExperts, TorchExpertDeltas]:
        self._deltas = TorchExpertDeltas(limits, own)
        return self, self._deltas

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        return self._apply(x, expert_ids, weights, None)

    def apply_adapted(self, x: Tensor, expert_ids: Tensor, weights: Tensor, adapters: AdaptedTokens) -> Tensor:
        return self._apply(x, expert_ids, weights, adapters)

    def _apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor, adapters: AdaptedTokens | None) -> Tensor:
        parts = torch.zeros(*expert_ids.shape, x.shape[1], dtype=torch.float32, device=x.device)
        for expert in expert_ids.unique().tolist():
            if expert >= 0:
                rows, slots = (expert_ids == expert).nonzero(as_tuple=True)
                first, last = (None, None) if self.biases is None else (each[expert] for each in self.biases)
                both = _multiply(x[rows], self.gate_up, expert, first)
                if adapters is not None and self._deltas is not None:
                    self._deltas.add("gate_up", expert, x[rows], both, rows, adapters)
                inner = activate_and_multiply(both, self.activation)
                result = _multiply(inner, self.down, expert, last)
                if adapters is not None and self._deltas is not None:
                    self._deltas.add("down", expert, inner, result, rows, adapters)
                parts[rows, slots] = result.float()
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for slot in range(expert_ids.shape[1]):
            total += parts[:, slot] * weights[:, slot, None]
        return total.to(x.dtype)

    def memory(self, expert: int) -> tuple[Tensor, ...]:
        """As `MovableExperts.memory`; only for stacks of floats."""
        return tuple(each[expert] for each in (*self._stacks, *(self.biases or ())))

    @property
    def layout(self) -> tuple[int, ...]:
        """As `MovableExperts.layout`."""
        return tuple(number for stack in self._stacks for number in (*stack.shape[1:], stack.itemsize))

    @property
    def _stacks(self) -> list[Tensor]:
        return [stack for stack in (self.gate_up, self.down) if isinstance(stack, Tensor)]

    @property
    def nbytes(self) -> int:
        return sum(
            stack.nbytes if isinstance(stack, Tensor) else sum(weight.nbytes for weight in stack)
            for stack in (self.gate_up, self.down)
        )


class TorchExpertDeltas:
    """The adapters of a layer's experts, by slot."""

    def __init__(self, limits: SlotLimits, own: Sequence[int] | None) -> None:
        self._dtype, self._own = limits.dtype, own
        self._slots: dict[int, LowRankExperts] = {}

    def move(self, own: Sequence[int]) -> None:
        """As `MovableDeltas.move`."""
        self._own = list(own)

    def pack(self, delta: LowRankExperts) -> LowRankExperts:
        return delta.to(self._dtype)

    def put(self, slot: int, packed: LowRankExperts | None) -> None:
        if packed is None:
            self._slots.pop(slot, None)
        else:
            self._slots[slot] = packed

    def add(
        self,
        side: Literal["gate_up", "down"],
        expert: int,
        x: Tensor,
        product: Tensor,
        tokens: Tensor,
        adapters: AdaptedTokens,
    ) -> None:
        """Adds to the product of an expert's rows x what their adapters add. tokens: of the step, [num_rows] int64"""
        index, own = tokens.numpy(), expert if self._own is None else self._own[expert]
        for slot, scale, chosen in adapters.groups():
            stack = self._slots.get(slot)
            delta: LowRank | None = None if stack is None else getattr(stack, side)[own]
            mine = np.flatnonzero(np.isin(index, chosen))
            if delta is not None and len(mine):
                change = delta.added(x[mine].to(self._dtype), product[mine], scale)
                product[mine] = (product[mine].float() + change).to(product.dtype)


def experts(gate_up: ExpertStack, down: ExpertStack, activation: str, biases: Biases | None = None) -> ExpertWeights:
    """Packs the experts' matrices for `apply`.

    gate_up: [2 * inner, hidden] per expert, the gate's rows first; down: [hidden, inner] per expert; `activation` is a
    key of ACTIVATIONS, or CLAMPED_SILU. Facts: `hidden`, `inner`, `activation`, `has_biases`, and `stored`: floats,
    int8, int4 or (packed) blocks.
    """
    return TorchExperts(gate_up, down, activation, biases)


def _multiply(x: Tensor, stack: ExpertStack, expert: int, bias: Tensor | None) -> Tensor:
    product = F.linear(x, stack[expert]) if isinstance(stack, Tensor) else stack[expert].apply(x)
    return product if bias is None else (product.float() + bias).to(x.dtype)


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType({"route_experts": route_experts, "experts": experts})
