"""Both ends of a model: token embeddings and the head, with the vocabulary divided among the ranks, and the beginning
and end of a `Stream`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.executor.models.arch import ArchSpec, LayerTable
from headrace.executor.models.blocks import Stream
from headrace.executor.models.eager import EagerOps, EagerWeights
from headrace.executor.models.reading import Part
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.executor.step.inputs import GivenRows, StepAdapters
from headrace.kernels.reference.rows import DenseLinear, LinearWeight


def stream_scale(spec: ArchSpec, dtype: torch.dtype) -> float:
    """Factor from the embedding to the residual stream, which is kept divided by `residual_scale`."""
    # The scale is rounded to the model's dtype, as it was when the models that have one were trained.
    return float(torch.tensor(spec.embedding_scale, dtype=dtype)) / spec.residual_scale


def given_scale(spec: ArchSpec, dtype: torch.dtype) -> float:
    """`stream_scale` for embeddings that are given in the place of tokens."""
    return stream_scale(spec, dtype) if spec.scales_given else 1.0 / spec.residual_scale


def table_scale(table: LayerTable, dtype: torch.dtype) -> float:
    """Factor of the rows of a `Stream`'s table."""
    return float(torch.tensor(table.scale, dtype=dtype)) * table.factor


def put_given(hidden: Tensor, given: Sequence[GivenRows], dtype: torch.dtype, scale: float) -> None:
    """Writes given embeddings over rows of hidden [num_tokens, width]. dtype: of the model's own table, to which they
    are rounded as its rows are; scale: `given_scale`."""
    for each in given:
        rows = each.tensor.to(hidden.device, dtype).to(hidden.dtype)
        hidden[each.at : each.at + len(rows)] = rows if scale == 1.0 else rows * scale


class VocabParallelEmbedding:
    """Token embeddings with the vocabulary divided among the ranks."""

    def __init__(
        self, weights: EagerWeights, name: str, vocab_size: int, width: int, scale: float, place: RankCoordinates
    ) -> None:
        self._place = place
        self._rows = place.vocabulary(vocab_size)
        table = weights.matrix(f"{name}.weight", vocab_size, width, self._rows if place.tp_size > 1 else None)
        self.table: LinearWeight = DenseLinear(table, None)
        """A tied head replaces it with its packed weight, so that the table is in memory once."""
        self._num_rows = len(table)
        self._embed, self._scale = weights.fused_kernel("embed"), scale

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [num_tokens] int64 -> [num_tokens, width]"""
        if self._embed is not None and isinstance(self.table, DenseLinear):
            rows = self._embed(token_ids, self.table.weight, self._rows.start, self._scale)
            return rows if self._place.tp_size == 1 else self._place.all_reduce(rows)
        if self._place.tp_size == 1:
            rows = self.table.look_up(token_ids)
        else:
            local = token_ids - self._rows.start
            mine = (local >= 0) & (local < self._num_rows)
            rows = self.table.look_up(local * mine).masked_fill(~mine[:, None], 0)
            rows = self._place.all_reduce(rows)
        return rows if self._scale == 1.0 else rows * self._scale


class VocabParallelHead:
    """The output head. Each rank computes the logits of its part of the vocabulary, which are then gathered. A tied
    head shares the embedding's table."""

    def __init__(
        self,
        weights: EagerWeights,
        name: str,
        embedding: VocabParallelEmbedding | None,
        shape: tuple[int, int],
        bias: bool,
        place: RankCoordinates,
    ) -> None:
        self._place = place
        if embedding is not None:
            dense, own = embedding.table, place.vocabulary(shape[0]) if place.tp_size > 1 else None
            bias_row = weights.stack([(f"{name}.bias", Part(name, shape[0], own))], None, None) if bias else None
            assert isinstance(dense, DenseLinear)  # no head has replaced it yet
            weights.nbytes -= dense.nbytes
            self.weight = embedding.table = weights.pack("head", dense.weight, bias_row)
        else:
            rows = place.vocabulary(shape[0]) if place.tp_size > 1 else None
            self.weight = weights.linear([Part(name, shape[0], rows)], shape[1], None, bias=bias, role="head")
        self._vocab_size = shape[0]
        own_rows = Part(name, shape[0], place.vocabulary(shape[0]) if place.tp_size > 1 else None)
        self._deltas = weights.deltas([own_rows], shape[1], bias=bias) if weights.adapts_all else None

    def __call__(self, hidden: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """hidden [n, width] -> logits [n, vocab_size] in hidden's dtype"""
        logits = self.weight.apply(hidden)
        if adapters is not None and self._deltas is not None:
            logits = self._deltas.added(hidden, logits, adapters)
        size = self._place.tp_size
        if size == 1:
            return logits
        missing = -(-self._vocab_size // size) - logits.shape[1]  # the last rank may have fewer columns
        whole = self._place.all_gather(torch.nn.functional.pad(logits, (0, missing)))
        return whole if whole.shape[1] == self._vocab_size else whole[:, : self._vocab_size].contiguous()


class EagerStream:
    """A spec's `Stream` at both ends of a model. The first pipeline stage reads its beginning, the last its end."""

    def __init__(self, weights: EagerWeights, spec: ArchSpec, stream: Stream, prefix: str) -> None:
        self._stream, self._place = stream, weights.place
        self._table: VocabParallelEmbedding | None = None
        self._beginning, self._end = dict[str, Any](), dict[str, Any]()
        if weights.place.is_first_stage:
            if (table := stream.table) is not None:
                self._table_size, scale = table.vocab_size, table_scale(table, weights.dtype)
                shape = (table.vocab_size, table.width)
                self._table = VocabParallelEmbedding(weights, prefix + table.name, *shape, scale, weights.place)
            self._beginning = {key: weights.read(each, prefix) for key, each in stream.declare_beginning(spec).items()}
        if weights.place.is_last_stage:
            self._end = {key: weights.read(each, prefix) for key, each in stream.declare_end(spec).items()}

    def begin(self, token_ids: Tensor, embedded: Tensor, adapters: StepAdapters | None) -> Tensor:
        """token_ids [num_tokens] int64, embedded [num_tokens, hidden], adapters of these tokens -> the stream"""
        inputs = None if self._table is None else self._table(token_ids * (token_ids < self._table_size))
        ops = EagerOps(self._place, adapters=adapters)
        result: Tensor = self._stream.begin(ops, self._beginning, embedded, inputs)
        return result

    def end(self, stream: Tensor, adapters: StepAdapters | None) -> Tensor:
        """stream [num_tokens, ...], adapters of these tokens -> [num_tokens, hidden]"""
        result: Tensor = self._stream.end(EagerOps(self._place, adapters=adapters), self._end, stream)
        return result
