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
        num_running, num_reserved = int(np.count_nonzero(table.active)), 0
        proposals = list[_Proposal]()
        for nth, index in enumerate(due):
            row = int(rows[index])
            num_tokens, held = int(table.num_tokens[row]), int(tables.num_blocks[row])
            tables.give_back([row], table)
            # Each running request may need a block before this one has used the blocks that it gets for drafts.
            spare = max(0, tables.num_free_to_grow() - num_running - num_reserved)
            limit = min(
                self._most_drafts,
                budget // (len(due) - nth),
                int(table.max_tokens_total[row]) - num_tokens - 1,
                (held + spare) * tables.block_size - num_tokens,
            )
            if limit <= 0:
                continue
            asked = [drafter for drafter, mask in zip(drafters, wanted, strict=True) if mask[index]]
            proposal = _Proposal(index, row, asked)
            if proposal.next(limit, self._costs.least_likely):
                proposals.append(proposal)
                num_reserved += self._num_more_blocks(proposal)
                budget -= len(proposal.draft)
        self._cut(proposals)
        for each in proposals:
            if len(each.draft):
                more = self._num_more_blocks(each)
                builder.lengthen(each.index, len(each.draft), *tables.extend(each.row, more))
                self._proposed[each.index], self._author[each.row] = each.draft, each.author

    def _num_more_blocks(self, proposal: _Proposal) -> int:
        tables = self.context.tables
        num_tokens = int(self.context.rows.num_tokens[proposal.row]) + len(proposal.draft)
        return max(0, -(-num_tokens // tables.block_size) - int(tables.num_blocks[proposal.row]))

    def _cut(self, proposals: list[_Proposal]) -> None:
        """Has features cut the drafts, each feature all of them at once. Where nothing is left, the next drafter's is
        cut, which gets the room of the first one's."""
        while proposals:
            rooms = [len(each.draft) for each in proposals]
            for feature in self.context.features:
                cut = [each for each in proposals if len(each.draft) and feature.drafter is not each.author]
                if cut:  # a feature's own drafter drafts what it allows
                    drafts = feature.cut([each.row for each in cut], [each.draft for each in cut])
                    for each, draft in zip(cut, drafts, strict=True):
                        each.draft = draft
            pairs = zip(proposals, rooms, strict=True)
            least = self._costs.least_likely
            proposals = [each for each, room in pairs if not len(each.draft) and each.next(room, least)]

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


class _Proposal:
    """A row's draft in the making."""

    def __init__(self, index: int, row: int, drafters: Sequence[Drafter]) -> None:
        """index: of the row in the builder's decodes. drafters: those to ask, in this order."""
        self.index, self.row, self._left = index, row, list(drafters)
        self.draft = np.empty(0, np.int32)

    def next(self, limit: int, least_likely: float) -> bool:
        """Takes the draft of the next drafter that has one."""
        while self._left:
            self.author = self._left.pop(0)
            self.draft = self.author.propose(self.row, limit, least_likely)
            if len(self.draft):
                return True
        return False


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
