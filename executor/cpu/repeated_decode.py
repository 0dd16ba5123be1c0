"""The rank's part of repeated decodes: it detects a plan that is the last one with every row one token further, and
lets the model advance what it has in place. `core/schedule/repeated_decode.py` makes such plans."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from headrace.executor.sampling.draws import Chosen
from headrace.executor.step.inputs import BegunBlocks
from headrace.ipc.step import Attachment, StepPlan, TokenMasks

_REPEATED = frozenset((TokenMasks,))
"""The attachments that `RepeatingModel.repeat` takes."""


@runtime_checkable
class RepeatingModel(Protocol):
    """A model that can repeat a decode step with little work on the host."""

    def repeat(self, begun: BegunBlocks | None, masks: TokenMasks | None) -> Chosen:
        """Repeats the previous step, a decode whose tokens this model chose, with each sequence one token further. It
        has masks exactly where that step had."""


class ContinuedDecode:
    """A decode that continues: every step has the same rows, each one token further."""

    def __init__(self, model: RepeatingModel, plan: StepPlan, block_size: int) -> None:
        """Call it after the model has computed and chosen one token for each row of the plan."""
        self.model = model
        self._rows, self._block_size, self._kinds = plan.rows, block_size, _kinds(plan)
        self._steps_to_block = self._until_block(plan)

    def goes_on(self, plan: StepPlan) -> bool:
        """Whether the plan is the next step of this decode. That each row advances by one token and is sampled need not
        be checked: each has exactly one token that is not computed yet."""
        if plan.total_tokens != len(self._rows) or plan.new_rows or plan.released_rows.size:
            return False
        kinds = _kinds(plan)
        if kinds != self._kinds or not _REPEATED.issuperset(kinds):
            return False
        return plan.rows is self._rows or np.array_equal(plan.rows, self._rows)

    def begun_blocks(self, plan: StepPlan, block_tables: np.ndarray) -> BegunBlocks | None:
        """Which rows of the plan, a step of this decode, begin a block; None if none does. block_tables: [num_groups,
        num_rows, max_blocks], already updated for this plan."""
        self._steps_to_block -= 1
        if self._steps_to_block:
            return None
        self._steps_to_block = self._until_block(plan)
        begun = np.flatnonzero(plan.num_computed_tokens % self._block_size == 0)
        block_indices = plan.num_computed_tokens[begun] // self._block_size
        return BegunBlocks(begun.tolist(), block_indices, block_tables[:, plan.rows[begun], block_indices])

    def _until_block(self, plan: StepPlan) -> int:
        """The number of steps after the plan until a row begins a block."""
        return self._block_size - int((plan.num_computed_tokens % self._block_size).max())


def _kinds(plan: StepPlan) -> frozenset[type[Attachment]]:
    return frozenset(map(type, plan.attachments)) if plan.attachments else _NO_KINDS


_NO_KINDS: frozenset[type[Attachment]] = frozenset()
