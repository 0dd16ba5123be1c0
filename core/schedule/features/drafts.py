"""Speculative decoding: lengthens decodes by draft tokens, which the ranks keep as long as they sample the same.

Where drafts come from is the drafters' business (`core/schedule/drafters/`); this feature shares out a step's room
among the rows that have some, and tells each drafter how its drafts fared. What a grammar forces is tried first, and
every feature may cut a draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.core.options.plan import Plan
from headrace.core.options.speculation import CPU_STEP_TOKENS, GPU_STEP_TOKENS
from headrace.core.schedule.drafters import drafter_of
from headrace.core.schedule.drafters.drafter import Drafter
from headrace.core.schedule.drafters.from_rank import RankDrafter
from headrace.core.schedule.drafters.step_costs import StepCosts
from headrace.core.schedule.features.feature import Context, StepFeature
from headrace.core.schedule.plan_builder import PlanBuilder
from headrace.core.schedule.requests import Request
from headrace.ipc.step import Drafts, StepPlan, StepResult


class DraftCounts(msgspec.Struct):
    """Counts since the engine's start."""

    num_drafts: int = 0
    """Drafts of at least one token: one per row and step."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = []


class Drafting(StepFeature):
    """Owns the drafts of plans in flight. Without drafters of its own, only those of other features are asked."""

    attaches = (Drafts,)

    def __init__(
        self, drafters: Sequence[Drafter] = (), *, most_step_tokens: int, most_drafts: int, most_running: int = 0
    ) -> None:
        """most_step_tokens: drafts are added until a step has so many tokens. most_drafts: of a row and step.
        most_running: with more running rows than this, `drafters` are not asked."""
        self._own = tuple(drafters)
        self.most_step_tokens, self._most_drafts, self._most_running = most_step_tokens, most_drafts, most_running
        self.counts = DraftCounts(accepted_per_position=[0] * most_drafts if drafters else [])
        self._proposed: dict[int, np.ndarray] = {}  # index in the builder's decodes -> draft tokens, ascending
        self._author: dict[int, Drafter] = {}  # row with drafts in flight -> whose they are
        self._costs = StepCosts()

    def bind(self, context: Context) -> None:
        super().bind(context)
        self._in_flight = np.zeros(len(context.rows.active), np.int32)  # draft tokens in flight, by row
        for drafter in self._own:
            drafter.bind(context.rows)

    @property
    def _others(self) -> list[Drafter]:
        """The drafters of other features, which come first."""
        return [each.drafter for each in self.context.features if each.drafter is not None]

    def _asked(self) -> tuple[Drafter, ...]:
        return self._own if np.count_nonzero(self.context.rows.active) <= self._most_running else ()

    def needed_by(self, request: Request) -> bool:
        return bool(self._own) or any(
            each.drafter is not None and each.needed_by(request) for each in self.context.features
        )

    # --- planning -----------------------------------------------------------------------------------------------

    def waits(self, rows: np.ndarray) -> np.ndarray | None:
        if not self._own:
            return None
        table = self.context.rows
        wanted = self._in_flight[rows] > 0
        for drafter in self._asked():
            wanted |= drafter.wants(rows)
        waits: np.ndarray = wanted & (table.num_known_tokens[rows] < table.num_tokens[rows])
        return waits

    def propose(self, builder: PlanBuilder) -> None:
        table, tables, rows = self.context.rows, self.context.tables, builder.decodes
        self._proposed.clear()
        budget = min(builder.budget, self.most_step_tokens - builder.total_tokens)
        if not len(rows) or budget <= 0:
            return
        drafters = (*self._others, *self._asked())
        if not drafters:
            return
        is_known = table.num_known_tokens[rows] == table.num_tokens[rows]
        wanted = [is_known & each.wants(rows) for each in drafters]
        due = np.logical_or.reduce(wanted).nonzero()[0].tolist()
        for drafter, mask in zip(drafters, wanted, strict=True):
            if mask.any():
                drafter.look_up(rows[mask])
        num_running = int(np.count_nonzero(table.active))
        for nth, index in enumerate(due):
            row = int(rows[index])
            num_tokens, held = int(table.num_tokens[row]), int(tables.num_blocks[row])
            tables.give_back([row], table)
            # Each running request may need a block before this one has used the blocks that it gets for drafts.
            spare = max(0, tables.num_free_to_grow() - num_running)
            limit = min(
                self._most_drafts,
                budget // (len(due) - nth),
                int(table.max_tokens_total[row]) - num_tokens - 1,
                (held + spare) * tables.block_size - num_tokens,
            )
            if limit <= 0:
                continue
            asked = [drafter for drafter, mask in zip(drafters, wanted, strict=True) if mask[index]]
            author, draft = self._draft_of(row, limit, asked)
            if author is not None:
                more = max(0, -(-(num_tokens + len(draft)) // tables.block_size) - held)
                builder.lengthen(index, len(draft), *tables.extend(row, more))
                self._proposed[index], self._author[row] = draft, author
                budget -= len(draft)

    def _draft_of(self, row: int, limit: int, drafters: Sequence[Drafter]) -> tuple[Drafter | None, np.ndarray]:
        """The first draft that is found, and its drafter. None if there is no draft."""
        for drafter in drafters:
            draft = drafter.propose(row, limit, self._costs.least_likely)
            for feature in self.context.features:
                if len(draft) and feature.drafter is not drafter:  # which drafts what it allows
                    draft = feature.cut(row, draft)
            if len(draft):
                return drafter, draft
        return None, np.empty(0, np.int32)

    def seal(self, plan: StepPlan) -> StepPlan:
        for drafter in self._own:
            drafter.planned(plan)
        proposed, self._proposed = self._proposed, {}
        if self._own and plan.total_tokens == len(plan.rows) + sum(map(len, proposed.values())):
            self._costs.planned(plan.step, plan.total_tokens)
        if not proposed:
            return plan
        counts = np.zeros(len(plan.rows), np.int32)
        counts[list(proposed)] = [len(each) for each in proposed.values()]
        drafts = Drafts(counts=counts, token_ids=np.concatenate(list(proposed.values())))
        self._in_flight[plan.rows] = counts
        return msgspec.structs.replace(plan, attachments=(*plan.attachments, drafts))

    def quiet_steps(self, plan: StepPlan) -> int | None:
        if plan.get(Drafts) is not None:
            return 0
        found = [steps for each in self._asked() if (steps := each.quiet_steps(plan.rows)) is not None]
        return min(found, default=None)

    # --- results ------------------------------------------------------------------------------------------------

    def take(self, result: StepResult) -> None:
        if self._own:
            self._costs.take(result)
        if result.counts is not None:
            self._judge(result.rows, result.counts)
        for drafter in self._own:
            drafter.take(result)

    def _judge(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """counts: [num_rows], how many tokens were sampled for each row: its accepted drafts and one more."""
        drafted = self._in_flight[rows] > 0
        rows, num_right = rows[drafted], counts[drafted] - 1
        num_drafts = self._in_flight[rows]
        self._in_flight[rows] = 0
        authors = [self._author.pop(row) for row in rows.tolist()]
        for drafter in dict.fromkeys(authors):
            mine = np.array([each is drafter for each in authors], bool)
            drafter.judged(rows[mine], num_drafts[mine], num_right[mine])
        if self._own:
            for drafts, right in zip(num_drafts.tolist(), num_right.tolist(), strict=True):
                self._count(drafts, right)

    def _count(self, drafts: int, right: int) -> None:
        counts = self.counts
        counts.num_drafts += 1
        counts.num_draft_tokens += drafts
        counts.num_accepted_tokens += right
        for position in range(right):
            counts.accepted_per_position[position] += 1

    def leave(self, row: int) -> None:
        self._in_flight[row] = 0
        self._author.pop(row, None)
        for drafter in self._own:
            drafter.leave(row)


def drafting_of(plan: Plan) -> Drafting:
    """The drafters that the options and the model ask for, which are asked in this order. Without any, only tokens that
    a grammar forces become drafts."""
    speculation, of_rank = plan.speculation, plan.model.num_rank_drafts
    if of_rank and speculation is None:
        most = min(GPU_STEP_TOKENS if plan.model.device_bytes else CPU_STEP_TOKENS, plan.max_logits)
        return Drafting([RankDrafter()], most_step_tokens=most, most_drafts=of_rank, most_running=most - 1)
    if speculation is None:
        forced = plan.most_forced_drafts
        return Drafting(most_step_tokens=forced, most_drafts=forced)
    return Drafting(
        [drafter_of(speculation), *([RankDrafter()] if of_rank else [])],
        most_step_tokens=speculation.most_step_tokens,
        most_drafts=max(speculation.num_speculative_tokens, of_rank),
        most_running=speculation.most_running,
    )
