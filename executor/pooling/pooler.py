"""Makes the vectors of the rows that pool: which tokens they need of a step, and what becomes of their states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace.executor.adapters.heads import SlotScales
from headrace.executor.pooling.all_tokens import AllTokens
from headrace.executor.pooling.first_token import FirstToken
from headrace.executor.pooling.head import Head, exact
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
TOKENS_AT_ONCE = 64
"""How many tokens' values over the vocabulary are in memory at a time."""


class WantedTokens(NamedTuple):
    """The tokens of a step whose hidden states the pooler gets."""

    indices: np.ndarray  # [num_wanted] int32: their indices in the step
    rows: list[tuple[int, int, list[slice], bool]]
    """For each row that has some: (row, how many, which of these each of its kinds wants, the prompt ends in this
    step)."""


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
        self._done: list[tuple[int, Tensor]] = []  # the vectors of rows that end in the current step
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
        indices, rows = list[np.ndarray](), list[tuple[int, int, list[slice], bool]]()
        for index, row in enumerate(plan.rows.tolist()):
            if (found := self._rows.get(row)) is None:
                continue
            begin, num_tokens = int(plan.num_computed_tokens[index]), len(found.token_ids)
            end = begin + int(plan.num_tokens[index])
            spans = [output.pooling.wanted(begin, end, num_tokens) for output in found.outputs]
            first, last = min(each.start for each in spans), max(each.stop for each in spans)
            if first < last:
                indices.append(np.arange(first, last, dtype=np.int32) + (query_start[index] - begin))
                parts = [slice(each.start - first, each.stop - first) for each in spans]
                rows.append((row, last - first, parts, end == num_tokens))
        return WantedTokens(np.concatenate(indices).astype(np.int32), rows) if rows else None

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

    @torch.inference_mode()
    def take(self, wanted: WantedTokens, hidden: Tensor) -> None:
        """Makes the vectors of rows that end. hidden: [num_wanted, width], those of the wanted tokens, which may be
        overwritten afterwards."""
        hidden, first = hidden.to(torch.float32, copy=True) / self._divisor, 0
        ended = list[tuple[int, _Output, Tensor]]()
        for row, count, spans, is_end in wanted.rows:
            for output, span in zip(self._rows[row].outputs, spans, strict=True):
                if span.start < span.stop:
                    vectors = output.add(row, hidden[first + span.start : first + span.stop], is_end=is_end)
                    if vectors is not None:
                        ended.append((row, output, vectors))
            first += count
        failed = set[int]()
        for row, output, vectors in self._through_heads(ended):
            made = output.made(vectors, self._rows[row])
            if bool(made.isfinite().all()):
                self._done.append((row, made))
            else:
                failed.add(row)
        if failed:
            why = "the hidden states of its prompt are not finite: the model's computation overflowed"
            self._failures += [row_failure(row, why) for row in sorted(failed)]
            self._done = [(row, made) for row, made in self._done if row not in failed]

    def _through_heads(self, ended: list[tuple[int, _Output, Tensor]]) -> list[tuple[int, _Output, Tensor]]:
        """What the layers behind the pooling make, of all rows with the same ones and the same adapters at once."""
        made, groups = list(ended), dict[tuple[int, SlotScales], list[int]]()
        for index, (row, output, _) in enumerate(ended):
            if output.head is not None and not output.declared.head_first:
                groups.setdefault((id(output), self._rows[row].adapters), []).append(index)
        for (_, adapters), mine in groups.items():
            head = ended[mine[0]][1].head
            assert head is not None, "the group has one"
            parts = head(torch.cat([ended[index][2] for index in mine]), adapters)
            for index, part in zip(mine, parts.split([len(ended[each][2]) for each in mine]), strict=True):
                made[index] = (*ended[index][:2], part)
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
        self.pooling = TOKEN_POOLINGS[declared.tokens]()
        self._skipped = np.array(declared.skipped, np.int32)

    def add(self, row: int, hidden: Tensor, *, is_end: bool) -> Tensor | None:
        """As `TokenPooling.add`; a head that comes before the pooling is computed for some tokens at a time."""
        if not self.declared.head_first:
            return self.pooling.add(row, hidden, is_end=is_end)
        assert self.head is not None, "it comes first"
        made, parts = None, hidden.split(TOKENS_AT_ONCE)
        for index, part in enumerate(parts):
            made = self.pooling.add(row, self.head(part), is_end=is_end and index == len(parts) - 1)
        return made

    def made(self, vectors: Tensor, row: _Row) -> Tensor:
        """vectors [num_vectors, width] behind the head -> the result [num_vectors, values]."""
        task, declared = row.task, self.declared
        if declared.tokens == "ALL":
            kept = self._kept(row)
            vectors = vectors[torch.from_numpy(kept)]
            if declared.is_sparse:
                return _largest_of_each(vectors[:, 0], row.token_ids[kept])
        if task.columns:
            vectors = vectors[:, list(task.columns)]
        vectors = vectors[:, : task.dimensions]
        if task.activate or declared.is_sparse:
            vectors = exact(declared.activation, vectors)
        if declared.is_sparse:
            (places,) = vectors[0].nonzero(as_tuple=True)
            return torch.stack((places.float(), vectors[0, places]), dim=1)
        return vectors if task.compared_with is None else _most_alike(task.compared_with, vectors)

    def _kept(self, row: _Row) -> np.ndarray:
        """[num_tokens] bool: which tokens have vectors."""
        kept, task = np.ones(len(row.token_ids), bool), row.task
        if self._skipped.size or task.skipped:
            kept &= ~np.isin(row.token_ids, np.concatenate((self._skipped, np.array(task.skipped, np.int32))))
        if task.steps_end_at is not None:
            kept &= row.token_ids == task.steps_end_at
        return kept


def _largest_of_each(values: Tensor, token_ids: np.ndarray) -> Tensor:
    """Pairs (token id, its largest value) [num_pairs, 2] of tokens with a value above 0, by id."""
    ids, place_of = np.unique(token_ids, return_inverse=True)
    largest = torch.zeros(len(ids)).scatter_reduce(0, torch.from_numpy(place_of), values, "amax")
    pairs = torch.stack((torch.from_numpy(ids.astype(np.float32)), largest), dim=1)
    return pairs[largest > 0]


def _most_alike(others: Values, vectors: Tensor) -> Tensor:
    """[1, 1]: see `Pool.compared_with`."""
    if not len(vectors):
        return torch.zeros(1, 1)
    products = torch.from_numpy(others.numpy().copy()).double() @ vectors.double().T
    return products.amax(1).sum().float().reshape(1, 1)


def _pooled(done: list[tuple[int, Tensor]]) -> PooledRows | None:
    if not done:
        return None
    values = torch.cat([vectors.reshape(-1) for _, vectors in done])
    return PooledRows(
        rows=np.array([row for row, _ in done], np.int32),
        counts=np.array([len(vectors) for _, vectors in done], np.int32),
        widths=np.array([vectors.shape[1] for _, vectors in done], np.int32),
        values=values.cpu().numpy(),
    )
