"""When the running requests begin alike: how far, and whether that beginning's keys are read once for all of them.

Blocks are shared through the prefix cache alone, so equal tokens at the start of two requests are the same blocks in
their tables, and the host's copy of the tables tells how many. That changes only when a request enters or leaves.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from headrace.core.options.engine_options import Options
from headrace.core.options.plan import Plan
from headrace.executor.cpu.batch import BatchState
from headrace.executor.gpu.device_state import Deltas
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.eager import ChooseKernel
from headrace.ipc.failure import OptionError
from headrace.ipc.step import StepPlan
from headrace.kernels.registry import choose_reference

logger = logging.getLogger(__name__)
LEAST_ROWS = 8
LEAST_TOKENS = 256
"""vLLM's rule of thumb: with fewer requests or fewer shared tokens, cascade attention is not worth its own kernels."""
LEAST_SAVED_BYTES = 64 << 20
"""Of keys and values that a layer reads less often. Two more kernels and their parts cost some 5 to 10 us; an H200's
second-level cache, which serves requests that read the same blocks at about the same time, gives so much in that."""
COLUMNS_AT_ONCE = 64
ALL = np.iinfo(np.int32).max


@dataclass(frozen=True)
class CascadeRule:
    """When it is worth it."""

    least_rows: int
    least_tokens: int
    least_saved_tokens: int
    """Shared tokens times the rows that need not read them by themselves."""

    @classmethod
    def for_layers(cls, bytes_per_token: int) -> CascadeRule:
        """bytes_per_token: of one layer's keys and values, on this rank."""
        return cls(LEAST_ROWS, LEAST_TOKENS, -(-LEAST_SAVED_BYTES // bytes_per_token))

    def is_worth_it(self, num_rows: int, num_tokens: int) -> bool:
        enough = num_rows >= self.least_rows and num_tokens >= self.least_tokens
        return enough and (num_rows - 1) * num_tokens >= self.least_saved_tokens


def check_cascade(options: Options) -> None:
    """Raises OptionError where cascade attention is asked for beside what excludes it."""
    if options.disable_cascade_attn:
        return
    asked = "disable_cascade_attn=False asks for one reading of what all requests begin with"
    if options.batch_invariant:
        raise OptionError(f"{asked}, which depends on the batch, and batch_invariant=True excludes that; drop one")
    if not options.enable_prefix_caching:
        raise OptionError(f"{asked}, and with enable_prefix_caching=False requests never share blocks; drop one")


def rule_for(
    plan: Plan, spec: ArchSpec, tp_size: int, cache_itemsize: int, choose: ChooseKernel, **facts: torch.device
) -> CascadeRule | None:
    """The rule of every rank; None where it is not asked for, or this model on this device has no use for it.

    spec: as the ranks divide it; cache_itemsize: of a key's element, in bytes; facts: the kernels' `device`.
    """
    if plan.options.disable_cascade_attn:
        return None
    num_heads, num_kv_heads = spec.num_heads // tp_size, max(1, spec.num_kv_heads // tp_size)
    kernel = choose(
        "cascade_attention",
        dtype=getattr(torch, plan.dtype),
        head_dim=spec.head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        **facts,
    )
    if kernel is choose_reference("cascade_attention"):
        reason = "no kernel here computes it for this model"
    elif all(layer.sliding_window is not None for layer in spec.layers):
        reason = "every layer of this model has a sliding window"
    elif not plan.enable_prefix_caching:
        reason = "requests of this model share no blocks"
    else:
        return CascadeRule.for_layers(2 * num_kv_heads * spec.head_dim * cache_itemsize)
    logger.warning("cascade attention is not used, though disable_cascade_attn=False asks for it: %s", reason)
    return None


class CommonBlocks:
    """How many blocks the tables of all occupied rows begin with alike.

    Each row has a depth: in how many leading blocks it agrees with one of them, the leader. A row that enters is
    compared with the leader, and when that leaves, only rows that were as deep as its successor are compared again.
    Tables only grow, by blocks that nobody else holds at that place, so depths stay true meanwhile.
    """

    def __init__(self, num_rows: int) -> None:
        self._depth = np.zeros(num_rows, np.int32)
        self._occupied = np.zeros(num_rows, bool)
        self._leader = -1
        self.count = 0
        """0 while fewer than two rows are occupied."""

    def apply(self, plan: StepPlan, batch: BatchState) -> None:
        """After `batch.apply(plan)`. Does nothing unless a row is released or entered."""
        if not plan.new_rows and not plan.released_rows.size:
            return
        tables, lengths = batch.block_tables[0], batch.num_blocks  # of full attention
        self._occupied[plan.released_rows] = False
        self._occupied[[new.row for new in plan.new_rows]] = False
        if self._leader >= 0 and not self._occupied[self._leader]:
            self._succeed(tables, lengths)
        for new in plan.new_rows:
            row = new.row
            self._occupied[row] = True
            if self._leader < 0:
                self._leader, self._depth[row] = row, ALL
            else:
                self._depth[row] = self._agreement(np.array([row]), 0, tables, lengths)[0]
        depths = self._depth[self._occupied]
        self.count = int(depths.min()) if len(depths) > 1 else 0

    def _succeed(self, tables: np.ndarray, lengths: np.ndarray) -> None:
        """The leader has left. Its successor agreed with it as far as any row did, so it agrees with less deep rows
        exactly as far as the old one."""
        rows = np.flatnonzero(self._occupied)
        if not rows.size:
            self._leader = -1
            return
        deepest = int(self._depth[rows].max())
        equals = rows[self._depth[rows] == deepest]
        self._leader = int(equals[0])
        self._depth[equals] = self._agreement(equals, deepest, tables, lengths)
        self._depth[self._leader] = ALL

    def _agreement(self, rows: np.ndarray, start: int, tables: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """[len(rows)]: how many leading blocks each shares with the leader, all of them at least the first `start`."""
        own = tables[self._leader]
        depths = np.minimum(lengths[rows], lengths[self._leader])
        open_rows = np.flatnonzero(depths > start)
        while open_rows.size:
            end = start + COLUMNS_AT_ONCE
            differs = tables[rows[open_rows], start:end] != own[start:end]
            found = differs.any(1)
            ended = open_rows[found]
            depths[ended] = np.minimum(depths[ended], start + differs[found].argmax(1))
            start = end
            open_rows = open_rows[~found]
            open_rows = open_rows[depths[open_rows] > start]
        return depths


class Cascade:
    """Decides it for each decode, and tells the device how many tokens are shared."""

    def __init__(self, rule: CascadeRule, batch: BatchState, deltas: Deltas) -> None:
        self._rule, self._batch, self._deltas = rule, batch, deltas
        self._common = CommonBlocks(len(batch.num_tokens))
        self._told = 0

    def apply(self, plan: StepPlan) -> None:
        """After `batch.apply(plan)`."""
        self._common.apply(plan, self._batch)

    def place(self, plan: StepPlan) -> bool:
        """Whether this decode's rows read their common beginning once; if so, how long it is goes with the deltas."""
        shared = self._common.count * self._batch.block_size
        if not self._rule.is_worth_it(len(plan.rows), shared):
            return False
        # Blocks are shared when they are full, and so are computed by all; this holds however the core hands them out.
        shared = min(shared, int(plan.num_computed_tokens.min()) + 1)
        if shared != self._told:
            self._deltas.set("shared_tokens", np.zeros(1, np.int64), np.array([shared]))
            self._told = shared
        return True
