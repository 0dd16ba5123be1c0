"""Which states of recurrent layers are kept, so that later requests can start from them.

A state cannot be cut, so a prefix is found in the cache only at a position whose state was kept (`groups/state.py`).
The ranks store it as they pass the position (`ipc.step.StateSnapshots`): no chunk ends there for it, and nothing is
copied.
Kept are, in each row:

    the last end of a block in its prompt      the same prompt again computes only what follows it
    where it leaves what others computed       the next request that begins with the shared part starts there
    every so many tokens of a long prompt      such that their pages are at most a tenth of its keys' and values'
    the last end of a block while it decodes   the conversation goes on from there, as does a preempted row

The first three are entries of the prefix cache at once. The last one is the row's spare, overwritten at each end of a
block. All of them are evicted before a row is preempted, and none is taken when pages are short. Positions never
include drafts: what a step accepts is passed, and kept, in the row's next step.

Requests that arrive together and begin alike would all compute the shared part, as nothing is kept of it yet. So a
request waits while a row that begins alike is on its way to where they part, and that row keeps its state there. Others
pass it meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.core.options.plan import Plan
from headrace.core.schedule.features.feature import NOTHING_NOW, Context, Repeated, StepFeature
from headrace.core.schedule.groups.group import PrefixHit
from headrace.core.schedule.groups.state import StatePages
from headrace.core.schedule.requests import Request
from headrace.ipc.failure import InconsistentError
from headrace.ipc.prefix_names import PrefixKey
from headrace.ipc.step import Attachment, Drafts, NewRow, StateSnapshots, StepPlan, StepResult

KV_BYTES_PER_BYTE = 10
"""How many bytes of keys and values there are at least for each byte of the snapshots that are taken at intervals."""
WORTH_WAITING = 8
"""A request waits for the state of a row if that saves it at least this part (1 of 8) of its tokens to compute."""
_NONE_COMMITTED = -1


def keeps_states(plan: Plan) -> bool:
    """Whether this model's steps need the feature."""
    return plan.enable_prefix_caching and any(group.kind == "state" for group in plan.model.cache_groups)


def _may_share(key: PrefixKey, other: PrefixKey) -> bool:
    """Whether equal tokens of two requests have equal states, as far as their keys tell at once."""
    return key.root == other.root and not key.inputs and not other.inputs


class KeepingStates(StepFeature):
    attaches = (StateSnapshots,)

    def bind(self, context: Context) -> None:
        super().bind(context)
        if context.tables.states is None:
            raise InconsistentError("there are no states to keep")
        self._states: StatePages = context.tables.states
        self._size, num_rows = context.tables.block_size, len(context.rows.active)
        num_full = sum(group.kind == "full" for group in context.tables.groups)
        self._interval = -(-KV_BYTES_PER_BYTE * self._states.group.pages // num_full) if num_full else 0  # in blocks
        self._due: dict[int, list[int]] = {}  # row -> lengths in blocks at which its prompt's states are kept
        self._asked_for: dict[int, set[int]] = {}  # the same, of requests that wait for rows which are in no step yet
        self._prompt_end = np.zeros(num_rows, np.int32)  # the last of them
        self._spare_at = np.zeros(num_rows, np.int32)  # how many blocks the row's spare is the state of; 0: of none
        self._committed = np.full(num_rows, _NONE_COMMITTED, np.int32)
        """[num_rows]: how many tokens the row's state is of, if its last step had drafts."""

    # --- planning -----------------------------------------------------------------------------------------------

    def postpones(self, request: Request, hit: PrefixHit) -> bool:
        table, size = self.context.rows, self._size
        usable = request.token_ids[: request.task.most_cached(len(request.token_ids)) // size * size]
        least = hit.num_blocks + -(-(len(request.token_ids) // size - hit.num_blocks) // WORTH_WAITING)
        computes_prompt = table.active & (table.num_computed_tokens < table.num_tokens - 1)
        for row in np.flatnonzero(computes_prompt).tolist():
            other = table.requests[row]
            if other is None or not _may_share(other.prefix_key, request.prefix_key):
                continue
            tokens = table.token_ids[row, : min(len(usable), int(table.num_tokens[row]))]
            differs = np.flatnonzero(tokens != usable[: len(tokens)])
            part = int(differs[0] if len(differs) else len(tokens)) // size
            if part > least and table.num_computed_tokens[row] < part * size:
                if row in self._due:
                    self._due[row] = sorted({*self._due[row], part})
                    self._prompt_end[row] = max(part, self._prompt_end[row])
                else:
                    self._asked_for.setdefault(row, set()).add(part)
                return True
        return False

    def seal(self, plan: StepPlan) -> StepPlan:
        for new in plan.new_rows:
            self._enter(new)
        self._states.planned(plan.step, plan.rows)
        rows, ends, drafts = plan.rows, plan.num_computed_tokens + plan.num_tokens, plan.get(Drafts)
        begun = np.where(self._committed[rows] < 0, plan.num_computed_tokens, self._committed[rows])
        self._committed[rows] = _NONE_COMMITTED
        if drafts is not None:
            ends = ends - drafts.counts
            self._committed[rows] = np.where(drafts.counts, ends, _NONE_COMMITTED)
        begun, ends = begun // self._size, ends // self._size
        kept: list[tuple[int, int, list[int]]] = []
        for index in np.flatnonzero(ends > begun).tolist():
            kept += self._passed(int(rows[index]), int(begun[index]), int(ends[index]))
        if not kept:
            return plan
        return msgspec.structs.replace(plan, attachments=(*plan.attachments, self._attachment(kept)))

    def _enter(self, new: NewRow) -> None:
        """Decides where the states of the request's prompt are kept."""
        begun, end = new.num_computed_tokens // self._size, (len(new.token_ids) - 1) // self._size
        wanted = {int(self._states.reach[new.row]), end, *self._asked_for.pop(new.row, ())}
        if self._interval:
            wanted.update(range(self._interval, end, self._interval))
        self._due[new.row] = sorted(each for each in wanted if each > begun)
        self._prompt_end[new.row] = max(wanted)

    def _passed(self, row: int, begun: int, end: int) -> list[tuple[int, int, list[int]]]:
        """What is kept of a row that comes from `begun` to `end`, in blocks: (row, length in blocks, pages)."""
        kept = []
        for length in self._due.get(row, ()):
            if begun < length <= end:
                pages = self._states.keep(row, length, self.context.hashes(row, length)[length - 1])
                if pages is not None:
                    kept.append((row, length, pages))
        if end > self._prompt_end[row]:
            kept += self.spares([row], [end])
        return kept

    def spares(self, rows: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int, list[int]]]:
        """The rows' spares, which are to be their states after so many blocks."""
        kept = []
        for row, length in zip(rows, lengths, strict=True):
            pages = self._states.spare(row)
            self._spare_at[row] = length if pages else 0
            if pages:
                kept.append((row, length, pages))
        return kept

    def _attachment(self, kept: list[tuple[int, int, list[int]]]) -> StateSnapshots:
        """Gives up the references to the pages, of which the plan takes no more."""
        self._states.pool.release([pages[0] for _, _, pages in kept])
        return StateSnapshots(
            rows=np.array([row for row, _, _ in kept], np.int32),
            positions=np.array([length * self._size for _, length, _ in kept], np.int32),
            pages=np.array([page for _, _, pages in kept for page in pages], np.int32),
        )

    def repeated(self, plan: StepPlan) -> Repeated:
        return _RepeatedSnapshots(self, plan, self._size)

    def snapshots(self, rows: np.ndarray, lengths: np.ndarray, num_rows: int) -> StateSnapshots | None:
        """The spares of `rows` in a plan that extends at most num_rows rows after it. None if pages are short."""
        tables = self.context.tables
        if tables.pool.num_available < len(rows) * self._states.group.pages + num_rows * tables.num_growing:
            return None
        return self._attachment(self.spares(rows.tolist(), lengths.tolist()))

    # --- results ------------------------------------------------------------------------------------------------

    def take(self, result: StepResult) -> None:
        self._states.computed(result.step)

    def leave(self, row: int) -> None:
        """The row's spare becomes an entry of the cache, unless a step that would write it was not planned."""
        table, length = self.context.rows, int(self._spare_at[row])
        if 0 < length * self._size <= min(table.num_known_tokens[row], table.num_computed_tokens[row]):
            self._states.keep_spare(row, length, self.context.hashes(row, length)[length - 1])
        self._states.drop_spare(row)
        self._spare_at[row], self._committed[row] = 0, _NONE_COMMITTED
        self._due.pop(row, None)
        self._asked_for.pop(row, None)


class _RepeatedSnapshots(Repeated):
    """The spares of rows that only decode."""

    def __init__(self, feature: KeepingStates, plan: StepPlan, block_size: int) -> None:
        self._feature, self._rows, self._size = feature, plan.rows, block_size
        self._ends = plan.num_computed_tokens + 1
        self._steps_to_end = self._until_end()

    def attachment(self, num_in_flight: int) -> Attachment | None:
        self._steps_to_end -= 1
        if self._steps_to_end:
            return NOTHING_NOW
        at_end = self._ends % self._size == 0
        snapshots = self._feature.snapshots(self._rows[at_end], self._ends[at_end] // self._size, len(self._rows))
        self._steps_to_end = self._until_end()
        return snapshots

    def _until_end(self) -> int:
        """Counts on to the next step in which a row comes to the end of a block; returns how many steps that takes."""
        steps = self._size - int((self._ends % self._size).max())
        self._ends = self._ends + steps
        return steps
