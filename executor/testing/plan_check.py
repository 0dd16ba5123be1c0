"""A checker of step plans: tracks every row and block in its own simple way, and checks each plan against that.

It checks contents as well as counts. Each cache slot has the cache group and the chain hash of the tokens up to the one
whose keys and values it holds. So a block that was reused too early, freed while a sliding window still reads it,
shared wrongly or never computed is detected when a row reads it, independent of the block manager.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from headrace.core.options.plan import Plan
from headrace.executor.sampling.random_numbers import mix
from headrace.executor.testing.state_check import RowWork, StateCheck
from headrace.ipc.adapters import RowAdapter
from headrace.ipc.failure import InconsistentError
from headrace.ipc.messages import Generate
from headrace.ipc.step import Drafts, NewRow, StepPlan

NEVER_WRITTEN = 0


@dataclass
class _Row:
    tokens: list[int]
    num_computed: int
    tables: list[list[int]]
    """By cache group. Blocks that a sliding window has passed stay in the table, as executors keep them."""
    generates: bool
    adapters: list[tuple[int, int]] = field(default_factory=list)
    """A hash of each adapter's identity and scale, and the position from which it applies."""
    chain: list[int] = field(default_factory=list)  # chain[i]: hash of tokens[: i + 1]
    drafts: list[int] = field(default_factory=list)  # drafts that the current step computes after the tokens

    def chain_with_drafts(self) -> np.ndarray:
        """[num_tokens + num_drafts] uint64"""
        self.chain += self._go_on(self.chain, self.tokens[len(self.chain) :])
        return np.array([*self.chain, *self._go_on(self.chain, self.drafts)], np.uint64)

    def _go_on(self, chain: list[int], tokens: list[int]) -> list[int]:
        hashes, parent = list[int](), chain[-1] if chain else 1
        for position, token in enumerate(tokens, len(chain)):
            parent = sum((number for number, start in self.adapters if position >= start), parent)
            parent = int(mix(np.array([(parent * 31 + token + 1) % (1 << 64)], np.uint64))[0])
            hashes.append(parent)
        return hashes

    def drop_drafts(self) -> None:
        """Removes the drafts: accepted ones are among the tokens by now, and the others will be computed anew."""
        self.num_computed, self.drafts = min(self.num_computed, len(self.tokens) - 1), []


class PlanCheck:
    """Checks plans one after another. Every error is an InconsistentError with the step, row and values."""

    def __init__(
        self, plan: Plan, num_blocks: int, max_model_len: int, identities: Mapping[int, str] | None = None
    ) -> None:
        """identities: of the adapter in each slot that has one; kept up to date by the caller."""
        self._identities = {} if identities is None else identities
        self._plan, self._num_blocks, self._max_model_len = plan, num_blocks, max_model_len
        self._groups = [group for group in plan.model.cache_groups if group.kind != "state"]
        self._rows: dict[int, _Row] = {}
        self._adapters_of: dict[int, dict[int, str]] = {}  # by row: the slots of its adapters, and what is in them
        self._content = np.full(num_blocks * plan.block_size, NEVER_WRITTEN, np.uint64)
        self._states: StateCheck | None = None
        if self._groups != [*plan.model.cache_groups]:
            pages = plan.model.cache_groups[-1].pages
            self._states = StateCheck(pages, self._content.reshape(num_blocks, plan.block_size))

    def apply(self, plan: StepPlan) -> None:
        """Raises InconsistentError if the plan contradicts itself, earlier plans or the limits."""
        for row in plan.released_rows.tolist():
            if row not in self._rows:
                raise InconsistentError(f"step {plan.step} releases row {row}, which is free")
            del self._rows[row], self._adapters_of[row]
            if self._states is not None:
                self._states.leave(row)
        for new in plan.new_rows:
            self._enter(plan.step, new)
        for table, block in zip(plan.block_tables.tolist(), plan.block_ids.tolist(), strict=True):
            group, row = self._table(table)
            if row not in self._rows:
                raise InconsistentError(f"step {plan.step} appends block {block} to row {row}, which is free")
            if group >= len(self._groups):
                raise InconsistentError(f"step {plan.step} appends block {block} to group {group}")
            self._rows[row].tables[group].append(block)
        for row, drafts in self._drafts_of(plan).items():
            self._rows[row].drafts = drafts
        self._check_tables(plan)
        self._check_work(plan)
        self._check_adapters(plan)
        self._compute(plan)

    def append_sampled(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Appends the tokens that the applied step has sampled: token_ids, and the row of each."""
        for row, token in zip(rows.tolist(), token_ids.tolist(), strict=True):
            self._rows[row].tokens.append(token)
        for row in set(rows.tolist()):
            self._rows[row].drop_drafts()

    def _enter(self, step: int, new: NewRow) -> None:
        where = f"step {step}, new row {new.row}"
        num_tokens = len(new.token_ids)
        if not 0 <= new.row < self._plan.max_num_seqs:
            raise InconsistentError(f"{where}: not below max_num_seqs {self._plan.max_num_seqs}")
        if new.row in self._rows:
            raise InconsistentError(f"{where}: is occupied")
        if not 1 <= new.num_prompt_tokens <= num_tokens:
            raise InconsistentError(f"{where}: prompt of {new.num_prompt_tokens} of {num_tokens}")
        if not 0 <= new.num_computed_tokens < num_tokens:
            raise InconsistentError(f"{where}: {new.num_computed_tokens} of {num_tokens} computed")
        tokens = [int(token) for token in new.token_ids]
        if min(tokens) < 0:
            raise InconsistentError(f"{where}: token {min(tokens)}")
        if max(tokens) >= self._plan.model.vocab_size:
            raise InconsistentError(f"{where}: token {max(tokens)} is outside the vocabulary")
        num_groups = len(self._groups)
        if len(new.block_ids) % max(1, num_groups) != 0:
            raise InconsistentError(f"{where}: {len(new.block_ids)} blocks in {num_groups} groups")
        tables = new.block_ids.reshape(num_groups, -1).tolist() if num_groups else []
        if self._states is not None:
            self._states.enter(where, new)
        generates = isinstance(new.task, Generate)
        slots = [adapter.slot for adapter in new.adapters]
        if len(set(slots)) != len(slots) or not self._identities.keys() >= set(slots):
            raise InconsistentError(f"{where}: adapters in slots {slots}; in use are {sorted(self._identities)}")
        adapters = [(self._number_of(adapter), adapter.from_position) for adapter in new.adapters]
        self._rows[new.row] = _Row(tokens, new.num_computed_tokens, tables, generates, adapters)
        self._adapters_of[new.row] = {slot: self._identities[slot] for slot in slots}

    def _number_of(self, adapter: RowAdapter) -> int:
        return zlib.crc32(f"{self._identities[adapter.slot]} {adapter.scale}".encode())

    def _check_tables(self, plan: StepPlan) -> None:
        for number, row in self._rows.items():
            where = f"step {plan.step}, row {number}"
            read = list[int]()
            for group, table in zip(self._groups, row.tables, strict=True):
                shown = table[group.first_read(row.num_computed) // self._plan.block_size :]
                if not all(0 < block < self._num_blocks for block in shown):
                    raise InconsistentError(f"{where}: no such block in {shown}")
                read += shown
            if len(set(read)) != len(read):
                raise InconsistentError(f"{where}: a block occurs twice in {row.tables}")

    def _drafts_of(self, plan: StepPlan) -> dict[int, list[int]]:
        """Drafts by row."""
        drafts = plan.get(Drafts)
        if drafts is None:
            return {}
        counts, token_ids = drafts.counts, drafts.token_ids.tolist()
        if len(counts) != len(plan.rows):
            raise InconsistentError(f"step {plan.step}: {len(counts)} counts of drafts, {len(plan.rows)} rows")
        if not sum(counts) == len(token_ids) > 0:
            raise InconsistentError(f"step {plan.step}: {len(token_ids)} drafts, {sum(counts)} are counted")
        ends = np.cumsum(counts).tolist()
        by_row = zip(plan.rows.tolist(), counts.tolist(), ends, strict=True)
        return {row: token_ids[end - count : end] for row, count, end in by_row if count}

    def _check_work(self, plan: StepPlan) -> None:
        rows = plan.rows.tolist()
        lengths = {len(plan.rows), len(plan.num_tokens), len(plan.num_computed_tokens), len(plan.sampled)}
        if len(lengths) != 1:
            raise InconsistentError(f"step {plan.step}: columns of different lengths {sorted(lengths)}")
        if len(set(rows)) != len(rows):
            raise InconsistentError(f"step {plan.step}: a row occurs twice in {rows}")
        limit = self._plan.max_num_batched_tokens
        if plan.total_tokens != plan.num_tokens.sum():
            raise InconsistentError(f"step {plan.step}: {plan.total_tokens} tokens in all?")
        if plan.total_tokens > limit:
            raise InconsistentError(f"step {plan.step}: {plan.total_tokens} tokens, over the budget of {limit}")
        for number, count, computed, sampled in zip(
            rows, plan.num_tokens.tolist(), plan.num_computed_tokens.tolist(), plan.sampled.tolist(), strict=True
        ):
            where = f"step {plan.step}, row {number}"
            if number not in self._rows:
                raise InconsistentError(f"{where}: is free")
            row = self._rows[number]
            known, end = len(row.tokens), computed + count
            if count < 1:
                raise InconsistentError(f"{where}: computes {count} tokens")
            if computed != row.num_computed:
                raise InconsistentError(f"{where}: says {computed} computed, it is {row.num_computed}")
            drafts = len(row.drafts)
            if end - drafts > known:
                raise InconsistentError(f"{where}: computes up to {end - drafts}, but only {known} tokens are known")
            if sampled != (row.generates and end - drafts == known):
                raise InconsistentError(f"{where}: sampled is {sampled} at {end - drafts} of {known} tokens")
            if drafts and not sampled:
                raise InconsistentError(f"{where}: has {drafts} drafts, and is not sampled")
            if end > self._max_model_len:
                raise InconsistentError(f"{where}: computes up to {end} of {self._max_model_len} tokens")
            for table in row.tables:
                held = len(table) * self._plan.block_size
                if end > held:
                    raise InconsistentError(f"{where}: computes up to {end}, its {len(table)} blocks hold {held}")

    def _check_adapters(self, plan: StepPlan) -> None:
        where = f"step {plan.step}"
        adapters = {slot: name for row in plan.rows.tolist() for slot, name in self._adapters_of[row].items()}
        if adapters and (self._plan.adapters is None or len(adapters) > self._plan.adapters.max_loras):
            raise InconsistentError(f"{where}: {len(adapters)} distinct adapters, over max_loras")
        if any(self._identities.get(slot) != name for slot, name in adapters.items()):
            raise InconsistentError(f"{where}: a slot of adapters has other content than when its rows entered")

    def _compute(self, plan: StepPlan) -> None:
        """Writes all rows, then reads them, as each layer of a model does."""
        writers, chains = dict[int, int](), dict[int, np.ndarray]()
        work = list(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True))
        for number, count in work:
            row = self._rows[number]
            chains[number] = row.chain_with_drafts()
            positions = np.arange(row.num_computed, row.num_computed + count)
            for group, table in enumerate(row.tables):
                for block in {table[position // self._plan.block_size] for position in positions.tolist()}:
                    other = writers.setdefault(block, number)
                    if other != number:
                        raise InconsistentError(f"step {plan.step}: rows {other} and {number} both write block {block}")
                self._content[self._slots(table, positions)] = chains[number][positions] + np.uint64(group)
        if self._states is not None:
            rows = [(number, count, self._rows[number]) for number, count in work]
            self._states.compute(
                plan,
                [
                    RowWork(
                        row=number,
                        begin=row.num_computed,
                        end=row.num_computed + count - len(row.drafts),
                        num_drafts=len(row.drafts),
                        chain=chains[number],
                    )
                    for number, count, row in rows
                ],
                set(writers),
            )
        for number, count in work:
            row = self._rows[number]
            end = row.num_computed + count
            for group, table in enumerate(row.tables):
                positions = np.arange(self._groups[group].first_read(row.num_computed), end)
                found = self._content[self._slots(table, positions)]
                wrong = np.flatnonzero(found != chains[number][positions] + np.uint64(group))
                if wrong.size:
                    position = int(positions[wrong[0]])
                    block = table[position // self._plan.block_size]
                    state = "was never written" if found[wrong[0]] == NEVER_WRITTEN else "holds another sequence"
                    raise InconsistentError(
                        f"step {plan.step}, row {number}: block {block} {state} at position {position} of the "
                        f"{end} tokens it reads"
                    )
            row.num_computed = end

    def _table(self, number: int) -> tuple[int, int]:
        """The group and row of a table, from its number in a plan."""
        return divmod(number, self._plan.max_num_seqs)

    def _slots(self, table: list[int], positions: np.ndarray) -> np.ndarray:
        size = self._plan.block_size
        return np.array(table, np.int64)[positions // size] * size + positions % size
