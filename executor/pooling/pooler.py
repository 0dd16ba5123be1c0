"""Makes the vectors of the rows that pool: which tokens they need of a step, and what becomes of their states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from headrace.executor.adapters.heads import SlotScales
from headrace.executor.pooling.all_tokens import AllTokens
from headrace.executor.pooling.first_token import FirstToken
from headrace.executor.pooling.head import Head, activated
from headrace.executor.pooling.joined import Joined
from headrace.executor.pooling.largest import Largest
from headrace.executor.pooling.last_token import LastToken
from headrace.executor.pooling.mean import Mean, MeanSquareRoot, WeightedMean
from headrace.executor.pooling.output import PooledOutput
from headrace.executor.pooling.token_pooling import TokenPooling
from headrace.executor.sampling.sampler import row_failure
from headrace.ipc.codec import Tensor as Values
from headrace.ipc.messages import Pool
from headrace.ipc.step import NewRow, PooledRows, RowFailure, StepPlan, StepResult

TOKEN_POOLINGS: dict[str, type[TokenPooling]] = {
    "LAST": LastToken,
    "CLS": FirstToken,
    "MEAN": Mean,
    "MAX": Largest,
    "MEAN_SQRT_LEN": MeanSquareRoot,
    "WEIGHTED_MEAN": WeightedMean,
    "ALL": AllTokens,
}
"""By vLLM's names of pooling types, and names for those of sentence-transformers that vLLM lacks."""
JOINT = "+"
"""Between the names of several whose vectors lie side by side."""
TOKENS_AT_ONCE = 64
"""How many tokens' values over the vocabulary are in memory at a time."""


def reads_all(tokens: str) -> bool:
    """Whether it needs the states of all tokens. tokens: `PooledOutput.tokens`"""
    return any(TOKEN_POOLINGS[each].reads_all for each in tokens.split(JOINT))


def _token_pooling(tokens: str) -> TokenPooling:
    parts = [TOKEN_POOLINGS[each]() for each in tokens.split(JOINT)]
    return parts[0] if len(parts) == 1 else Joined(parts)


class WantedRow(NamedTuple):
    row: int
    num_tokens: int
    """How many of a step's tokens it wants."""
    spans: list[slice]
    """Which of these each of its kinds wants."""
    is_begin: bool
    """The prompt begins in this step."""
    is_end: bool
    """The prompt ends in this step."""


class WantedTokens(NamedTuple):
    """The tokens of a step whose hidden states the pooler gets."""

    indices: np.ndarray  # [num_wanted] int32: their indices in the step
    rows: list[WantedRow]
    """Those that want some."""


class _Ended(NamedTuple):
    rows: list[int]
    output: _Output
    vectors: np.ndarray
    """[num_rows, width], or [num_vectors, width] of the only row"""


class _Row(NamedTuple):
    task: Pool
    token_ids: np.ndarray  # [num_tokens] int32
    outputs: list[_Output]
    adapters: SlotScales


class Pooler:
    """`RowColumns` of rows that pool, and their vectors."""

    def __init__(self, outputs: Mapping[str, PooledOutput], heads: Mapping[str, Head], scale: float = 1.0) -> None:
        """outputs, heads: by kind. scale: that of the hidden states, as a model has them: its final norm may include a
        factor of the logits."""
        self._outputs = {kind: _Output(output, heads.get(kind)) for kind, output in outputs.items()}
        self._divisor = scale
        self._rows: dict[int, _Row] = {}
        self._num_pairs = self._num_narrowed = 0
        self._done = list[tuple[list[int], np.ndarray]]()
        """Rows that end in the current step: [num_rows, count, width]."""
        self._failures: list[RowFailure] = []

    def use(self, heads: Mapping[str, Head]) -> None:
        """Replaces the heads' weights from the next step on. The rows stay as they are."""
        for kind, output in self._outputs.items():
            output.head = heads.get(kind)

    # --- columns ------------------------------------------------------------------------------------------------

    def enter(self, new: NewRow) -> None:
        if isinstance(new.task, Pool):
            outputs = [self._outputs[kind] for kind in new.task.kinds]
            adapters = tuple((each.slot, each.scale) for each in new.adapters)
            self._rows[new.row] = _Row(new.task, np.asarray(new.token_ids, np.int32), outputs, adapters)
            self._num_pairs += new.task.second_text is not None
            self._num_narrowed += new.task.num_keys is not None

    def leave(self, rows: np.ndarray) -> None:
        for row in rows.tolist() if self._rows else ():
            if (found := self._rows.pop(row, None)) is not None:
                self._num_pairs -= found.task.second_text is not None
                self._num_narrowed -= found.task.num_keys is not None
                for output in found.outputs:
                    output.pooling.leave(row)

    # --- a step -------------------------------------------------------------------------------------------------

    def wanted(self, plan: StepPlan, query_start: np.ndarray) -> WantedTokens | None:
        """query_start: [num_scheduled + 1], of `StepArrays`. None if no row pools in this step."""
        if not self._rows:
            return None
        rows, firsts = list[WantedRow](), list[int]()  # firsts: where each row's begin in the step
        scheduled = zip(
            plan.rows.tolist(), plan.num_computed_tokens.tolist(), plan.num_tokens.tolist(), query_start.tolist(),
            strict=False,
        )  # fmt: skip
        for row, begin, count, at in scheduled:
            if (found := self._rows.get(row)) is None:
                continue
            end, num_tokens = begin + count, len(found.token_ids)
            spans = [output.pooling.wanted(begin, end, num_tokens) for output in found.outputs]
            first, last, parts = spans[0].start, spans[0].stop, [slice(0, spans[0].stop - spans[0].start)]
            if len(spans) > 1:
                first, last = min([each.start for each in spans]), max([each.stop for each in spans])
                parts = [slice(each.start - first, each.stop - first) for each in spans]
            if first < last:
                rows.append(WantedRow(row, last - first, parts, begin == 0, end == num_tokens))
                firsts.append(at + first - begin)
        if not rows:
            return None
        num_wanted = sum([each.num_tokens for each in rows])
        if num_wanted == query_start[-1]:
            return WantedTokens(np.arange(num_wanted, dtype=np.int32), rows)
        counts = np.array([each.num_tokens for each in rows])
        starts = np.array(firsts) - (np.cumsum(counts) - counts)
        indices = np.repeat(starts, counts) + np.arange(counts.sum())
        return WantedTokens(indices.astype(np.int32), rows)

    def token_types(self, plan: StepPlan, query_start: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
        """[num_tokens] int32: 1 in the second text of each pair; None if the step has no pair."""
        if not self._num_pairs:
            return None
        types = np.zeros(len(positions), np.int32)
        for index, row in enumerate(plan.rows.tolist()):
            found = self._rows.get(row)
            if found is not None and found.task.second_text is not None:
                span = slice(query_start[index], query_start[index + 1])
                types[span] = positions[span] >= found.task.second_text
        return types

    def key_lens(self, plan: StepPlan, seq_lens: np.ndarray) -> np.ndarray | None:
        """[num_seqs] int32: to how many of each row's tokens all attend; None if to all."""
        if not self._num_narrowed:
            return None
        lens = seq_lens.copy()
        for index, row in enumerate(plan.rows.tolist()):
            found = self._rows.get(row)
            if found is not None and found.task.num_keys is not None:
                lens[index] = min(lens[index], found.task.num_keys)
        return lens

    @np.errstate(invalid="ignore", over="ignore")  # rows that are not finite fail by themselves
    def take(self, wanted: WantedTokens, hidden: np.ndarray) -> None:
        """Makes the vectors of rows that end. hidden: [num_wanted, width] float32, of the wanted tokens, in memory that
        may be overwritten afterwards."""
        failed = set[int]()
        if self._divisor != 1.0:
            hidden = hidden / np.float32(self._divisor)
        for ended in self._through_heads(self._pooled(wanted, hidden)):
            made = ended.output.made(ended.vectors, self._rows[ended.rows[0]])
            parts = made.reshape(len(ended.rows), len(made) // len(ended.rows), made.shape[1])
            is_finite = np.isfinite(made)
            if is_finite.all():
                self._done.append((ended.rows, parts))
                continue
            are_good = is_finite.reshape(len(ended.rows), -1).all(1).tolist()
            for row, part, is_good in zip(ended.rows, parts, are_good, strict=True):
                if is_good:
                    self._done.append(([row], part[None]))
                else:
                    failed.add(row)
        if failed:
            why = "the hidden states of its prompt are not finite: the model's computation overflowed"
            self._failures += [row_failure(row, why) for row in sorted(failed)]
            self._done = [each for each in self._done if failed.isdisjoint(each[0])]

    def _pooled(self, wanted: WantedTokens, hidden: np.ndarray) -> list[_Ended]:
        """The pooled states of rows that end. Those that ask for one vector each of the same kind and in the same way
        are together, since each operation costs more than the numbers of one."""
        ended, alike, first = list[_Ended](), dict[tuple[object, ...], tuple[list[int], list[np.ndarray]]](), 0
        for row, count, spans, is_begin, is_end in wanted.rows:
            found = self._rows[row]
            outputs, own = found.outputs, hidden[first : first + count]
            first += count
            output = outputs[0]
            if len(outputs) == 1 and output.joins and is_end and (is_begin or not output.pooling.reads_all):
                key = (output, found.adapters, found.task.dimensions, found.task.activate)
                rows, states = alike.setdefault(key, ([], []))
                rows.append(row)
                states.append(own)
                continue
            for output, span in zip(outputs, spans, strict=True):
                if span.start < span.stop:
                    vectors = output.add(row, own[span], is_end=is_end)
                    if vectors is not None:
                        ended.append(_Ended([row], output, vectors))
        for rows, states in alike.values():
            output = self._rows[rows[0]].outputs[0]
            ended.append(_Ended(rows, output, output.pooling.whole(states)))
        return ended

    def _through_heads(self, ended: list[_Ended]) -> list[_Ended]:
        """What the layers behind the pooling make, of all rows with the same ones and the same adapters at once."""
        made, groups = list(ended), dict[tuple[int, SlotScales], list[int]]()
        for index, each in enumerate(ended):
            if each.output.head is not None and not each.output.declared.head_first:
                groups.setdefault((id(each.output), self._rows[each.rows[0]].adapters), []).append(index)
        for (_, adapters), mine in groups.items():
            head = ended[mine[0]].output.head
            assert head is not None, "the group has one"
            values, first = head(np.concatenate([ended[index].vectors for index in mine]), adapters), 0
            for index in mine:
                last = first + len(ended[index].vectors)
                made[index] = ended[index]._replace(vectors=values[first:last])
                first = last
        return made

    def added_to(self, result: StepResult) -> StepResult:
        """The step's result with what `take` made in it."""
        done, failures = self._done, self._failures
        if not done and not failures:
            return result
        self._done, self._failures = [], []
        return msgspec.structs.replace(result, vectors=_pooled(done), failures=(*result.failures, *failures))


class _Output:
    """One kind of results: its token pooling, with the states of rows, and what is made of pooled states."""

    def __init__(self, declared: PooledOutput, head: Head | None) -> None:
        self.declared, self.head = declared, head
        self.pooling = _token_pooling(declared.tokens)
        self._skipped = np.array(declared.skipped, np.int32)
        self.joins = declared.tokens != "ALL" and not declared.head_first and not declared.is_sparse
        """Whether rows that want all of it may be computed together."""

    def add(self, row: int, hidden: np.ndarray, *, is_end: bool) -> np.ndarray | None:
        """As `TokenPooling.add`; a head that comes before the pooling is computed for some tokens at a time."""
        if not self.declared.head_first:
            return self.pooling.add(row, hidden, is_end=is_end)
        assert self.head is not None, "it comes first"
        made = None
        for first in range(0, len(hidden), TOKENS_AT_ONCE):
            last = first + TOKENS_AT_ONCE
            made = self.pooling.add(row, self.head(hidden[first:last]), is_end=is_end and last >= len(hidden))
        return made

    def made(self, vectors: np.ndarray, row: _Row) -> np.ndarray:
        """vectors [num_vectors, width] behind the head -> the result [num_vectors, values]."""
        task, declared = row.task, self.declared
        if declared.tokens == "ALL":
            kept = self._kept(row)
            vectors = vectors[kept]
            if declared.is_sparse:
                return _largest_of_each(vectors[:, 0], row.token_ids[kept])
        if task.columns:
            vectors = vectors[:, list(task.columns)]
        vectors = vectors[:, : task.dimensions]
        if (declared.mean, declared.sigma) != (0.0, 1.0):
            vectors = ((vectors.astype(np.float64) - declared.mean) / declared.sigma).astype(np.float32)
        if task.activate or declared.is_sparse:
            vectors = activated(declared.activation, vectors)
        vectors = vectors[:, : declared.kept]
        if declared.is_sparse:
            (places,) = vectors[0].nonzero()
            return np.stack((places.astype(np.float32), vectors[0, places]), axis=1)
        return vectors if task.compared_with is None else _most_alike(task.compared_with, vectors)

    def _kept(self, row: _Row) -> np.ndarray:
        """[num_tokens] bool: which tokens have vectors."""
        kept, task = np.ones(len(row.token_ids), bool), row.task
        if self._skipped.size or task.skipped:
            kept &= ~np.isin(row.token_ids, np.concatenate((self._skipped, np.array(task.skipped, np.int32))))
        if task.steps_end_at is not None:
            kept &= row.token_ids == task.steps_end_at
        return kept


def _largest_of_each(values: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Pairs (token id, its largest value) [num_pairs, 2] of tokens with a value above 0, by id."""
    ids, place_of = np.unique(token_ids, return_inverse=True)
    largest = np.zeros(len(ids), np.float32)
    np.maximum.at(largest, place_of, values)
    return np.stack((ids.astype(np.float32), largest), axis=1)[largest > 0]


def _most_alike(others: Values, vectors: np.ndarray) -> np.ndarray:
    """[1, 1]: see `Pool.compared_with`. The products are torch's, whose threads are those that the model has."""
    if not len(vectors):
        return np.zeros((1, 1), np.float32)
    products = torch.from_numpy(others.numpy().copy()).double() @ torch.from_numpy(vectors).double().T
    most_alike: np.ndarray = products.amax(1).sum().float().reshape(1, 1).numpy()
    return most_alike


def _pooled(done: list[tuple[list[int], np.ndarray]]) -> PooledRows | None:
    if not done:
        return None
    sizes = [len(rows) for rows, _ in done]
    return PooledRows(
        rows=np.array([row for rows, _ in done for row in rows], np.int32),
        counts=np.array([parts.shape[1] for _, parts in done], np.int32).repeat(sizes),
        widths=np.array([parts.shape[2] for _, parts in done], np.int32).repeat(sizes),
        values=done[0][1].reshape(-1) if len(done) == 1 else np.concatenate([parts.reshape(-1) for _, parts in done]),
    )
