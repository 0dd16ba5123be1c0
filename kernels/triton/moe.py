"""Mixtures of experts on the GPU: rows are sorted by expert, and one launch multiplies blocks of rows by their expert's
matrix. The host reads no results and grids follow from shapes alone, so that a CUDA graph can capture the launches."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.expert_groups import ALL_EXPERTS, ExpertGroups
from headrace.kernels.reference.moe import LEAST_SUM, Biases, ExpertStack, ExpertWeights, QuantisedStack, Scoring
from headrace.kernels.triton import configs
from headrace.kernels.triton.activation import activated_and_multiplied
from headrace.kernels.triton.common import rounded
from headrace.kernels.triton.configs import MatrixTiles, experts_tiles, power_of_two
from headrace.kernels.triton.linear import TritonLinear, product
from headrace.kernels.triton.linear_packed import DENSE, INT4, INT4_BLOCK, Packed

SORTED_TOGETHER = 1024
SUMMED_COLUMNS = 1024
MOST_PARTS_BYTES = 256 << 20
"""Limit on the experts' results before they are summed; a batch that exceeds it is computed in several parts."""


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
    """As `reference.route_experts`."""
    num_rows, num_experts = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    expert_ids = torch.empty((num_rows, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_rows, top_k), dtype=torch.float32, device=logits.device)
    if num_rows:
        block = power_of_two(num_experts)
        route_kernel[(num_rows,)](
            logits,
            bias,
            expert_ids,
            weights,
            num_experts,
            logits.stride(0),
            float(scale),
            LEAST_SUM,
            float(margin),
            TOP_K=top_k,
            SCORING=scoring,
            RENORMALISE=renormalise,
            NUM_GROUPS=groups.number,
            GROUPS_CHOSEN=groups.chosen,
            GROUP_BEST=groups.best,
            BLOCK=block,
            BLOCK_TOP_K=power_of_two(top_k),
            num_warps=min(4, max(1, block // 128)),
        )
    return expert_ids, weights


class TritonExperts:
    """The experts of a layer in floats, 8 or 4 bits, in the layout of `experts_kernel`."""

    def __init__(
        self, gate_up: ExpertStack, down: ExpertStack, activation: str, biases: Biases | None, batch_invariant: bool
    ) -> None:
        self._gate_up, self._down = _packed(gate_up), _packed(down)
        self._num_experts, self._activation = len(down), activation
        self._gate_up_bias = None if biases is None else biases[0].contiguous()
        self._down_bias = None if biases is None else biases[1].contiguous()
        self._hidden, self._inner = self._gate_up.in_features, self._down.in_features
        self._device, self._batch_invariant = configs.device_of(self._down.codes), batch_invariant

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """As `ExpertWeights.apply`."""
        if x.stride(1) != 1:
            x = x.contiguous()
        expert_ids, weights = expert_ids.contiguous(), weights.contiguous()
        out = torch.empty((len(x), self._hidden), dtype=x.dtype, device=x.device)
        most = max(1, MOST_PARTS_BYTES // (4 * self._hidden * expert_ids.shape[1]))
        for first in range(0, len(x), most):
            rows = slice(first, first + most)
            self._apply(x[rows], expert_ids[rows], weights[rows], out[rows])
        return out

    def _apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor, out: Tensor) -> None:
        num_rows, top_k = expert_ids.shape
        num_pairs = num_rows * top_k
        is_int4 = INT4 in (self._gate_up.kind, self._down.kind)
        tiles = experts_tiles(
            self._device, num_pairs, self._num_experts, x.element_size(), is_int4, invariant=self._batch_invariant
        )
        blocks = sort_pairs(
            expert_ids, self._num_experts, tiles.block_m, min(SORTED_TOGETHER, max(32, power_of_two(num_pairs)))
        )
        inner = torch.empty((num_pairs, self._inner), dtype=x.dtype, device=x.device)
        multiply(x, self._gate_up, self._gate_up_bias, blocks, None, inner, top_k, self._activation, tiles)
        parts = torch.empty((num_pairs, self._hidden), dtype=torch.float32, device=x.device)
        multiply(inner, self._down, self._down_bias, blocks, weights, parts, 1, None, tiles)
        sum_experts_kernel[(num_rows, -(-self._hidden // SUMMED_COLUMNS))](
            parts, expert_ids, out, self._num_experts, self._hidden, TOP_K=top_k, BLOCK=SUMMED_COLUMNS, num_warps=4
        )

    @property
    def nbytes(self) -> int:
        parts = (
            part for packed in (self._gate_up, self._down) for part in (packed.codes, packed.scales, packed.shifts)
        )
        return sum(part.nbytes for part in parts if part is not None)


def sort_pairs(
    expert_ids: Tensor, num_experts: int, block_m: int, sorted_together: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The outputs of `sort_pairs_kernel` for as many pairs as there are expert_ids, of any shape."""
    num_pairs = expert_ids.numel()
    max_blocks = min(num_pairs, num_pairs // block_m + num_experts)
    # Each in memory of its own: Triton compiles again for addresses that are no multiples of 16 bytes.
    order, starts, block_experts, block_firsts = (
        torch.empty(size, dtype=torch.int32, device=expert_ids.device)
        for size in (num_pairs, num_experts + 1, max_blocks, max_blocks)
    )
    sort_pairs_kernel[(num_experts,)](
        expert_ids,
        order,
        starts,
        block_experts,
        block_firsts,
        num_pairs,
        num_experts,
        max_blocks,
        BLOCK_M=block_m,
        BLOCK_E=power_of_two(num_experts + 1),
        BLOCK=sorted_together,
        num_warps=4,
    )
    return order, starts, block_experts, block_firsts


def _packed(stack: ExpertStack) -> Packed:
    """Packs the matrices of all experts as one weight, stacked along the output axis."""
    if isinstance(stack, Tensor):
        return Packed(DENSE, stack.flatten(0, 1).contiguous(), None, None, None, stack.shape[2], 0)
    if not isinstance(stack, QuantisedStack):
        raise ValueError(f"experts are stacked in one tensor or a QuantisedStack, not in a {type(stack).__name__}.")
    zeros = None if stack.zeros is None else stack.zeros.flatten(0, 1)
    return TritonLinear(stack.codes.flatten(0, 1), stack.scales.flatten(0, 1), None, zeros).packed


def multiply(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None,
    blocks: tuple[Tensor, Tensor, Tensor, Tensor],
    weights: Tensor | None,
    out: Tensor,
    pairs_per_row: int,
    activation: str | None,
    tiles: MatrixTiles,
) -> None:
    """Multiplies by one stack into out [num_pairs, out_features]; blocks: the outputs of `sort_pairs_kernel`."""
    out_features = out.shape[1]
    experts_kernel[(len(blocks[2]) * -(-out_features // tiles.block_n),)](
        x,
        packed.codes,
        packed.scales,
        packed.shifts,
        bias,
        *blocks,
        weights,
        out,
        out_features,
        packed.in_features,
        1 if packed.scales is None else packed.scales.shape[1],
        x.stride(0),
        packed.codes.stride(0),
        PAIRS_PER_ROW=pairs_per_row,
        ACTIVATION=activation,
        KIND=packed.kind,
        GROUP=packed.group,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=INT4_BLOCK if packed.kind == INT4 else tiles.block_k,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def experts(
    gate_up: ExpertStack,
    down: ExpertStack,
    activation: str,
    biases: Biases | None = None,
    batch_invariant: bool = False,
) -> ExpertWeights:
    """As `reference.experts`, for stacks of floats or `QuantisedStack`s."""
    return TritonExperts(gate_up, down, activation, biases, batch_invariant)


@triton.jit
def route_kernel(
    logits,  # [num_rows, num_experts]
    bias,  # [num_experts] float32 or None
    expert_ids,  # [num_rows, TOP_K] int32
    weights,  # [num_rows, TOP_K] float32
    num_experts,
    logits_stride,
    scale,
    least_sum,
    margin,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALISE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
):
    """The best TOP_K of each row, one after the other. Grid (num_rows)."""
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, BLOCK)
    inside = numbers < num_experts
    wide = tl.load(logits + row * logits_stride + numbers, mask=inside, other=float("-inf")).to(tl.float32)
    if SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-wide))
    elif SCORING == "sqrtsoftplus":
        scores = tl.sqrt(tl.where(wide > 20.0, wide, tl.log(1.0 + tl.exp(tl.minimum(wide, 20.0)))))
    else:
        powers = tl.exp(wide - tl.max(wide, 0))
        scores = powers / tl.sum(powers, 0)
    keys = wide
    if bias is not None:
        keys = tl.where(inside, scores + tl.load(bias + numbers, mask=inside, other=0.0), float("-inf"))
    elif NUM_GROUPS > 1:
        keys = tl.where(inside, scores, float("-inf"))
    if NUM_GROUPS > 1:
        groups = numbers // (num_experts // NUM_GROUPS)
        worth = tl.where(inside, 0.0, float("-inf"))
        for group in tl.static_range(NUM_GROUPS):
            left = tl.where(groups == group, keys, float("-inf"))
            for _ in tl.static_range(GROUP_BEST):
                largest = tl.max(left, 0)
                worth = tl.where(inside & (groups == group), worth + largest, worth)
                left = tl.where(numbers == tl.min(tl.where(left == largest, numbers, BLOCK), 0), float("-inf"), left)
        is_chosen = numbers < 0
        for _ in tl.static_range(GROUPS_CHOSEN):
            best_group = tl.min(tl.where(worth == tl.max(worth, 0), groups, NUM_GROUPS - 1), 0)
            is_chosen = is_chosen | (groups == best_group)
            worth = tl.where(groups == best_group, float("-inf"), worth)
        keys = tl.where(is_chosen & inside, keys, float("-inf"))
    slots = tl.arange(0, BLOCK_TOP_K)
    chosen = tl.zeros([BLOCK_TOP_K], tl.int32)
    found = tl.zeros([BLOCK_TOP_K], tl.float32)
    for slot in tl.static_range(TOP_K):
        # NaN is nobody's best; what is chosen then is an expert all the same.
        best = tl.min(tl.where(keys == tl.max(keys, 0), numbers, num_experts - 1), 0)
        chosen = tl.where(slots == slot, best, chosen)
        if SCORING == "sparsemixer":
            largest = tl.max(keys, 0)
            is_near = inside & (keys > float("-inf")) & ((largest - keys) <= margin * tl.maximum(tl.abs(keys), largest))
            share = 1.0 / tl.sum(tl.where(is_near, tl.exp(keys - largest), 0.0), 0)
        else:
            share = tl.sum(tl.where(numbers == best, scores, 0.0), 0)
        found = tl.where(slots == slot, share, found)
        keys = tl.where(numbers == best, float("-inf"), keys)
    if RENORMALISE:
        found = found / tl.maximum(tl.sum(found, 0), least_sum)
    tl.store(expert_ids + row * TOP_K + slots, chosen, mask=slots < TOP_K)
    tl.store(weights + row * TOP_K + slots, found * scale, mask=slots < TOP_K)


@triton.jit(do_not_specialize=["num_pairs", "max_blocks"])
def sort_pairs_kernel(
    expert_ids,  # [num_pairs] int32: pair i is of row i // top_k
    order,  # [num_pairs] int32: pairs by expert, of one expert by number
    starts,  # [num_experts + 1] int32: expert e has order[starts[e] .. starts[e + 1]]
    block_experts,  # [max_blocks] int32: whose pairs a block of up to BLOCK_M multiplies; -1 for no one's
    block_firsts,  # [max_blocks] int32: where in `order` it begins
    num_pairs,
    num_experts,
    max_blocks,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program counts all pairs and places those of its own expert. Grid (num_experts). BLOCK_E > num_experts."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pairs = first + tl.arange(0, BLOCK)
        ids = tl.load(expert_ids + pairs, mask=pairs < num_pairs, other=-1)
        is_one = (ids >= 0) & (ids < num_experts)
        counts += tl.histogram(tl.where(is_one, ids, BLOCK_E - 1), BLOCK_E).to(tl.int32)
    counts = tl.where(bins < num_experts, counts, 0)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    start = tl.sum(tl.where(bins < expert, counts, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    first_block = tl.sum(tl.where(bins < expert, blocks, 0), 0)
    num_blocks = tl.sum(tl.where(bins == expert, blocks, 0), 0)
    tl.store(starts + expert, start)
    for first in range(0, num_blocks, BLOCK):
        mine = first + tl.arange(0, BLOCK)
        tl.store(block_experts + first_block + mine, tl.zeros([BLOCK], tl.int32) + expert, mask=mine < num_blocks)
        tl.store(block_firsts + first_block + mine, start + mine * BLOCK_M, mask=mine < num_blocks)
    if expert == num_experts - 1:
        tl.store(starts + num_experts, start + count)
        for first in range(first_block + num_blocks, max_blocks, BLOCK):
            rest = first + tl.arange(0, BLOCK)
            tl.store(block_experts + rest, tl.full([BLOCK], -1, tl.int32), mask=rest < max_blocks)
    placed = start
    if count > 0:
        for first in range(0, num_pairs, BLOCK):
            pairs = first + tl.arange(0, BLOCK)
            is_mine = (tl.load(expert_ids + pairs, mask=pairs < num_pairs, other=-1) == expert).to(tl.int32)
            tl.store(order + placed + tl.cumsum(is_mine, 0) - 1, pairs, mask=is_mine != 0)
            placed += tl.sum(is_mine, 0)


@triton.jit
def experts_kernel(
    x,  # [num_pairs / PAIRS_PER_ROW, in_features]
    weight,  # [num_experts * weight rows of an expert, ..] as `linear_kernel` has it
    scales,  # [num_experts * weight rows, num_groups] or None
    shifts,  # as scales, of 4 bits alone
    bias,  # [num_experts * weight rows] float32 or None
    order,  # as `sort_pairs_kernel` leaves these
    starts,
    block_experts,
    block_firsts,
    pair_weights,  # [num_pairs] float32 that results are multiplied by, or None
    out,  # [num_pairs, out_features]
    out_features,
    in_features,
    num_groups,
    x_stride,
    weight_stride,
    PAIRS_PER_ROW: tl.constexpr,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of an expert's product with the rows that chose it, by pair. Grid (max_blocks * tiles of out_features).

    ACTIVATION: an expert has 2 * out_features rows, those of the gate first, and out = activation(gate) * up; None:
    out_features rows.
    """
    tiles_n = tl.cdiv(out_features, BLOCK_N)
    block = tl.program_id(0) // tiles_n
    expert = tl.load(block_experts + block)
    if expert >= 0:
        positions = tl.load(block_firsts + block) + tl.arange(0, BLOCK_M)
        in_rows = positions < tl.load(starts + expert + 1)
        pairs = tl.load(order + positions, mask=in_rows, other=0)
        x_rows = x + (pairs // PAIRS_PER_ROW).to(tl.int64)[:, None] * x_stride
        columns = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
        in_columns = columns < out_features
        dtype = x.dtype.element_ty
        num_blocks = tl.cdiv(in_features, 2 * BLOCK_K if KIND == 4 else BLOCK_K)
        rows = expert * out_features * (1 if ACTIVATION is None else 2) + columns
        weight_rows = weight + rows.to(tl.int64)[:, None] * weight_stride
        acc = product(x_rows, in_rows, weight_rows, scales, shifts, rows, in_columns, 0, num_blocks, in_features,
                      num_groups, dtype, False, KIND, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)  # fmt: skip
        if scales is not None and GROUP == 0:
            acc *= tl.load(scales + rows, mask=in_columns, other=0.0)[None, :]
        if bias is not None:
            acc += tl.load(bias + rows, mask=in_columns, other=0.0)[None, :]
        if ACTIVATION is not None:
            rows += out_features
            weight_rows = weight + rows.to(tl.int64)[:, None] * weight_stride
            up = product(x_rows, in_rows, weight_rows, scales, shifts, rows, in_columns, 0, num_blocks, in_features,
                         num_groups, dtype, False, KIND, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)  # fmt: skip
            if scales is not None and GROUP == 0:
                up *= tl.load(scales + rows, mask=in_columns, other=0.0)[None, :]
            if bias is not None:
                up += tl.load(bias + rows, mask=in_columns, other=0.0)[None, :]
            acc = activated_and_multiplied(acc, up, ACTIVATION)
        if pair_weights is not None:
            acc *= tl.load(pair_weights + pairs, mask=in_rows, other=0.0)[:, None]
        target = out + pairs.to(tl.int64)[:, None] * out_features + columns[None, :]
        tl.store(target, rounded(acc, out.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


@triton.jit
def sum_experts_kernel(
    parts,  # [num_rows, TOP_K, size] float32; of what is no expert nothing was written
    expert_ids,  # [num_rows, TOP_K] int32
    out,  # [num_rows, size]
    num_experts,
    size,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row's parts in their order, rounded once. Grid (num_rows, blocks of size)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in range(TOP_K):
        expert = tl.load(expert_ids + row * TOP_K + slot)
        if (expert >= 0) & (expert < num_experts):
            total += tl.load(parts + (row * TOP_K + slot) * size + columns, mask=columns < size, other=0.0)
    tl.store(out + row * size + columns, rounded(total, out.dtype.element_ty), mask=columns < size)
