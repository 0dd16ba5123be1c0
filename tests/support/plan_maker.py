"""Step plans made by tests, for tests of executors and runners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.core.options.plan import Plan
from headrace.ipc.adapters import RowAdapter
from headrace.ipc.messages import Generate, Sampling
from headrace.ipc.step import Drafts, NewRow, StepPlan

OTHER_BLOCKS = 1000
"""The default difference between the block numbers of one cache group and those of the next."""


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass
class PlanMaker:
    """Makes step plans, and keeps in plain lists the state that a batch should then have."""

    block_size: int = 4
    num_groups: int = 1
    num_rows: int = 0
    """Rows of the batch state; needed with several groups."""
    blocks_apart: int = OTHER_BLOCKS
    step: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    blocks: dict[int, list[int]] = field(default_factory=dict)
    """The blocks of each row in the first group."""
    next_block: int = 1
    state_pages: int = 0
    """Of each row; a row's pages are the last of the pool, those of row 0 first."""
    num_blocks: int = 0
    """Of the pool; needed with state pages."""
    _released: list[int] = field(default_factory=list)
    _new: list[NewRow] = field(default_factory=list)
    _appended: list[tuple[int, int]] = field(default_factory=list)
    _work: list[tuple[int, int]] = field(default_factory=list)
    _drafts: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, num_blocks: int) -> PlanMaker:
        """A maker for an executor with this plan and number of blocks."""
        pages = plan.model.cache_groups[-1].pages
        groups = len(plan.model.cache_groups) - (pages > 0)
        apart = (num_blocks - 1 - pages * plan.max_num_seqs) // max(1, groups)
        rows = plan.max_num_seqs
        return cls(plan.block_size, groups, rows, blocks_apart=apart, state_pages=pages, num_blocks=num_blocks)

    def enter(
        self,
        row: int,
        tokens: list[int],
        num_prompt: int | None = None,
        seed: int = 0,
        like: int | None = None,
        adapters: tuple[RowAdapter, ...] = (),
        **sampling: object,
    ) -> None:
        """Adds a new row with one block after those found in the cache; `compute` appends more as needed.

        sampling: fields of Sampling. like: a row whose full blocks are reused for the tokens that both begin with.
        """
        self.tokens[row], self.prompts[row] = list(tokens), num_prompt or len(tokens)
        found = self._found(tokens, like)
        self.computed[row], self.blocks[row] = len(found) * self.block_size, found + self._take(1)
        self._new.append(
            NewRow(
                row=row,
                token_ids=np.array(tokens, np.int32),
                num_prompt_tokens=self.prompts[row],
                num_computed_tokens=self.computed[row],
                block_ids=self._in_groups(self.blocks[row], self.blocks_apart),
                task=Generate(sampling=Sampling(max_tokens=99, **sampling)),  # type: ignore[arg-type]
                seed=seed,
                adapters=adapters,
                state_pages=self.num_blocks
                - self.state_pages * (row + 1)
                + np.arange(self.state_pages, dtype=np.int32),
            )
        )

    def _found(self, tokens: list[int], like: int | None) -> list[int]:
        """The cached blocks of the shared prefix, without the block of the last token, as the prefix cache finds."""
        if like is None or like not in self.computed:
            return []
        usable = min(self.computed[like], len(tokens) - 1) // self.block_size
        alike = [mine == theirs for mine, theirs in zip(tokens, self.tokens[like], strict=False)]
        same = alike.index(False) if False in alike else len(alike)
        return self.blocks[like][: min(usable, same // self.block_size)]

    def release(self, row: int) -> None:
        for state in (self.tokens, self.prompts, self.computed, self.blocks):
            del state[row]
        self._released.append(row)

    def compute(self, row: int, count: int | None = None, drafts: Sequence[int] = ()) -> None:
        """Adds the row's next `count` tokens to the plan, by default all known ones and the drafts after them."""
        count = len(self.tokens[row]) - self.computed[row] + len(drafts) if count is None else count
        self._drafts[row] = list(drafts)
        needed = -(-(self.computed[row] + count) // self.block_size) - len(self.blocks[row])
        for block in self._take(needed):
            self.blocks[row].append(block)
            self._appended.append((row, block))
        self._work.append((row, count))

    def plan(self) -> StepPlan:
        rows = [row for row, _ in self._work]
        counts = np.array([count for _, count in self._work], np.int32)
        computed = np.array([self.computed[row] for row in rows], np.int32)
        known = np.array([len(self.tokens[row]) for row in rows], np.int32)
        plan = StepPlan(
            step=self.step,
            released_rows=i32(*self._released),
            new_rows=tuple(self._new),
            block_tables=self._in_groups([row for row, _ in self._appended], self.num_rows),
            block_ids=self._in_groups([block for _, block in self._appended], self.blocks_apart),
            rows=i32(*rows),
            num_tokens=counts,
            num_computed_tokens=computed,
            sampled=computed + counts >= known,
            total_tokens=int(counts.sum()),
            attachments=self._attachments(rows),
        )
        for row, count in self._work:
            self.computed[row] += count
        self.step += 1
        self._released, self._new, self._appended, self._work, self._drafts = [], [], [], [], {}
        return plan

    def _in_groups(self, numbers: list[int], apart: int) -> np.ndarray:
        return np.concatenate([i32(), *(i32(*numbers) + i32(group * apart) for group in range(self.num_groups))])

    def _attachments(self, rows: list[int]) -> tuple[Drafts, ...]:
        drafts = [self._drafts[row] for row in rows]
        token_ids = i32(*(token for each in drafts for token in each))
        return (Drafts(counts=i32(*map(len, drafts)), token_ids=token_ids),) if len(token_ids) else ()

    def sampled(self, rows: np.ndarray, token_ids: np.ndarray, counts: np.ndarray | None = None) -> None:
        """Appends sampled tokens to their rows. counts: as in `StepResult`."""
        row_of = rows if counts is None else np.repeat(rows, counts)
        for row, token in zip(row_of.tolist(), token_ids.tolist(), strict=True):
            self.tokens[row].append(token)
        for row in rows.tolist():
            self.computed[row] = min(self.computed[row], len(self.tokens[row]) - 1)

    def _take(self, count: int) -> list[int]:
        self.next_block += max(count, 0)
        is_alone = self.num_groups == 1 and not self.state_pages
        assert is_alone or self.next_block - 1 <= self.blocks_apart, "groups' blocks are not apart"
        return list(range(self.next_block - max(count, 0), self.next_block))
