"""Makes the vectors of the rows that pool: which tokens they need of a step, and what becomes of their states."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace.executor.pooling.all_tokens import AllTokens
from headrace.executor.pooling.first_token import FirstToken
from headrace.executor.pooling.head import Head, exact
from headrace.executor.pooling.largest import Largest
from headrace.executor.pooling.last_token import LastToken
from headrace.executor.pooling.mean import Mean, MeanSquareRoot, WeightedMean
from headrace.executor.pooling.token_pooling import TokenPooling
from headrace.executor.sampling.sampler import row_failure
from headrace.ipc.messages import Pool, Pooling
from headrace.ipc.step import NewRow, PooledRows, RowFailure, StepPlan, StepResult

TOKEN_POOLINGS: dict[str, type[TokenPooling]] = {
    "LAST": LastToken,
    "CLS": FirstToken,
    "MEAN": Mean,
    "MAX": Largest,
    "MEAN_SQRT_LEN": MeanSquareRoot,
    "WEIGHTED_MEAN": WeightedMean,
}
"""By vLLM's names of pooling types, and names for those of sentence-transformers that vLLM lacks."""


class WantedTokens(NamedTuple):
    """The tokens of a step whose hidden states the pooler gets."""

    indices: np.ndarray  # [num_wanted] int32: their indices in the step
    rows: list[tuple[int, int, bool]]  # for each row that has some: (row, how many, the prompt ends in this step)


class Pooler:
    """`RowColumns` of rows that pool, and their vectors."""

    def __init__(self, pooling: Pooling, head: Head | None = None, scale: float = 1.0) -> None:
        """head: the layers behind the pooled states, of vectors and of classes; tokens' vectors have it too. scale:
        that of the hidden states, as a model has them: its final norm may include a factor of the logits."""
        self._of_text = TOKEN_POOLINGS[pooling.tokens]()
        self._of_tokens = AllTokens()
        self._head, self._divisor, self._activation = head, scale, pooling.activation
        self._rows: dict[int, tuple[Pool, int]] = {}  # the task and the number of tokens
        self._num_pairs = 0
        self._done: list[tuple[int, Tensor]] = []  # the vectors of rows that end in the current step
        self._failures: list[RowFailure] = []

    # --- columns ------------------------------------------------------------------------------------------------

    def enter(self, new: NewRow) -> None:
        if isinstance(new.task, Pool):
            self._rows[new.row] = new.task, len(new.token_ids)
            self._num_pairs += new.task.second_text is not None

    def leave(self, rows: np.ndarray) -> None:
        for row in rows.tolist() if self._rows else ():
            if (found := self._rows.pop(row, None)) is not None:
                self._num_pairs -= found[0].second_text is not None
                self._tokens(found[0]).leave(row)

    # --- a step -------------------------------------------------------------------------------------------------

    def wanted(self, plan: StepPlan, query_start: np.ndarray) -> WantedTokens | None:
        """query_start: [num_scheduled + 1], of `StepArrays`. None if no row pools in this step."""
        if not self._rows:
            return None
        indices, rows = list[np.ndarray](), list[tuple[int, int, bool]]()
        for index, row in enumerate(plan.rows.tolist()):
            if row not in self._rows:
                continue
            begin, (task, num_tokens) = int(plan.num_computed_tokens[index]), self._rows[row]
            end = begin + int(plan.num_tokens[index])
            found = self._tokens(task).wanted(begin, end, num_tokens)
            if found.start < found.stop:
                indices.append(np.arange(found.start, found.stop, dtype=np.int32) + (query_start[index] - begin))
                rows.append((row, found.stop - found.start, end == num_tokens))
        return WantedTokens(np.concatenate(indices).astype(np.int32), rows) if rows else None

    def token_types(self, plan: StepPlan, query_start: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
        """[num_tokens] int32: 1 in the second text of each pair; None if the step has no pair."""
        if not self._num_pairs:
            return None
        types = np.zeros(len(positions), np.int32)
        for index, row in enumerate(plan.rows.tolist()):
            task = self._rows[row][0] if row in self._rows else None
            if task is not None and task.second_text is not None:
                span = slice(query_start[index], query_start[index + 1])
                types[span] = positions[span] >= task.second_text
        return types

    @torch.inference_mode()
    def take(self, wanted: WantedTokens, hidden: Tensor) -> None:
        """Makes the vectors of rows that end. hidden: [num_wanted, width], those of the wanted tokens, which may be
        overwritten afterwards."""
        hidden, first = hidden.to(torch.float32, copy=True) / self._divisor, 0
        ended = list[tuple[int, Tensor]]()
        for row, count, is_end in wanted.rows:
            vectors = self._tokens(self._rows[row][0]).add(row, hidden[first : first + count], is_end=is_end)
            first += count
            if vectors is not None:
                ended.append((row, vectors))
        if self._head is not None and ended:
            parts = self._head(torch.cat([vectors for _, vectors in ended])).split([len(each) for _, each in ended])
            ended = [(row, part) for (row, _), part in zip(ended, parts, strict=True)]
        for row, vectors in ended:
            vectors = self._activated(vectors, self._rows[row][0])
            if bool(vectors.isfinite().all()):
                self._done.append((row, vectors))
            else:
                why = "the hidden states of its prompt are not finite: the model's computation overflowed"
                self._failures.append(row_failure(row, why))

    def added_to(self, result: StepResult) -> StepResult:
        """The step's result with what `take` made in it."""
        done, failures = self._done, self._failures
        if not done and not failures:
            return result
        self._done, self._failures = [], []
        return msgspec.structs.replace(result, vectors=_pooled(done), failures=(*result.failures, *failures))

    def _tokens(self, task: Pool) -> TokenPooling:
        return self._of_tokens if task.kind.startswith("token_") else self._of_text

    def _activated(self, vectors: Tensor, task: Pool) -> Tensor:
        """vectors [num_vectors, width] -> [num_vectors, dimensions]: cut, then activated if the task says so."""
        vectors = vectors[:, : task.dimensions]
        return exact(self._activation, vectors) if task.activate else vectors


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
