"""Shared parts of tests of models: a minimal engine around a decoder, and weights from a dictionary."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace.executor.checkpoints.weights import StoredTensor, WeightSource, dtype_name, take_part
from headrace.executor.cpu.decoder import CpuDecoder
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.kv_cache import allocate
from headrace.executor.parallel.rank_place import SINGLE, RankCoordinates
from headrace.executor.step.adapters import AdapterColumns
from headrace.executor.step.batch import StepArrays
from headrace.ipc.adapters import RowAdapter
from headrace.ipc.messages import Sampling
from headrace.ipc.step import NewRow


class DictSource(WeightSource):
    """Weights from a state dict. `elements_read` counts the elements that were read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.elements_read = 0

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def stored(self, name: str) -> StoredTensor:
        tensor = self.tensors[name]
        return StoredTensor.plain(tuple(tensor.shape), dtype_name(tensor.dtype), partial(self.read_part, name))

    def read_part(self, name: str, rows: slice | None, columns: slice | None) -> Tensor:
        whole = self.tensors[name]
        tensor = take_part(whole, tuple(whole.shape), rows, columns)
        self.elements_read += tensor.numel()
        return tensor.clone()


def new_row(row: int, adapters: tuple[RowAdapter, ...]) -> NewRow:
    """A request of which only the adapters matter."""
    nothing = np.zeros(0, np.int32)
    return NewRow(
        row=row,
        token_ids=nothing,
        num_prompt_tokens=0,
        num_computed_tokens=0,
        block_ids=nothing,
        task=Sampling(max_tokens=1),
        seed=0,
        adapters=adapters,
    )


class Driver:
    """Runs sequences through a decoder as an engine does, with blocks allocated in shuffled order.

    The cache is filled with NaN, as a reused one may be, so that reading a slot that was not written is detected.
    """

    def __init__(
        self,
        decoder: Decoder | CpuDecoder,
        block_size: int = 8,
        num_blocks: int = 200,
        place: RankCoordinates = SINGLE,
        cache_dtype: torch.dtype | None = None,
        layer_scales: Sequence[tuple[float, float]] = (),
    ) -> None:
        self.decoder, self.block_size = decoder, block_size
        dtype = cache_dtype or decoder.dtype
        self.cache = cache = allocate(
            decoder.spec, num_blocks, block_size, dtype, place=place, layer_scales=layer_scales
        )
        for tensor in (*cache.key_scales, *cache.value_scales) or (*cache.keys, *cache.values):
            tensor.fill_(float("nan"))
        self.free = list(range(num_blocks))
        random.Random(1).shuffle(self.free)

    def greedy(
        self,
        prompts: Sequence[list[int]],
        new_tokens: int,
        chunk: int,
        budget: int = 1 << 30,
        adapters: Sequence[tuple[RowAdapter, ...]] = (),
    ) -> tuple[list[list[int]], list[Tensor]]:
        """The new tokens of each prompt, and the logits that they were chosen from, [new_tokens, vocab_size].
        adapters: of each prompt; empty: none has any.

        A sequence computes at most `chunk` tokens per step, and a step at most `budget`, so that chunks of prompts
        share steps with sequences that already generate.
        """
        tokens = [list(prompt) for prompt in prompts]
        tables: list[list[int]] = [[] for _ in prompts]
        done = [0] * len(prompts)
        chosen: list[list[Tensor]] = [[] for _ in prompts]
        columns = AdapterColumns()
        for row, used in enumerate(adapters):
            columns.enter(new_row(row, used))
        while active := [i for i in range(len(prompts)) if len(chosen[i]) < new_tokens]:
            left, step = budget, []
            for i in sorted(active, key=lambda i: len(tokens[i]) - done[i]):
                count = min(chunk, len(tokens[i]) - done[i], left)
                if count:
                    step.append((i, done[i], count))
                    left -= count
            arrays = self._arrays(step, tokens, tables, [len(prompt) for prompt in prompts])
            rows = np.array([i for i, _, _ in step], np.int32)
            arrays = replace(arrays, adapters=columns.of_tokens(rows, arrays.query_start, arrays.positions))
            logits = self.decoder.step(arrays, self.cache, None).sampled.clone()
            for row, (i, start, count) in zip(logits, step, strict=True):
                done[i] = start + count
                if done[i] == len(tokens[i]):
                    chosen[i].append(row)
                    tokens[i].append(int(row.argmax()))
        return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)], [torch.stack(rows) for rows in chosen]

    def _arrays(
        self,
        step: list[tuple[int, int, int]],
        tokens: list[list[int]],
        tables: list[list[int]],
        prompt_lens: list[int],
    ) -> StepArrays:
        size = self.block_size
        for i, start, count in step:
            while len(tables[i]) * size < start + count:
                tables[i].append(self.free.pop())
        positions = [position for _, start, count in step for position in range(start, start + count)]
        owners = [i for i, _, count in step for _ in range(count)]
        ends = np.cumsum([count for _, _, count in step])
        width = max(len(tables[i]) for i, _, _ in step) + 3
        slots = [tables[i][p // size] * size + p % size for i, p in zip(owners, positions, strict=True)]
        reach = 0 if (ngrams := self.decoder.spec.ngrams) is None else ngrams.reach
        earlier = [
            [tokens[i][p - back] if p >= back else -1 for back in range(1, reach + 1)]
            for i, p in zip(owners, positions, strict=True)
        ]
        return StepArrays(
            token_ids=np.array([tokens[i][p] for i, p in zip(owners, positions, strict=True)], np.int32),
            positions=np.array(positions, np.int32),
            slot_mapping=np.array([slots], np.int64),
            query_start=np.array([0, *ends], np.int32),
            seq_lens=np.array([start + count for _, start, count in step], np.int32),
            block_tables=np.array([[tables[i] + [0] * (width - len(tables[i])) for i, _, _ in step]], np.int32),
            logits_indices=ends.astype(np.int32) - 1,
            prompt_lens=np.array([prompt_lens[i] for i, _, _ in step], np.int32),
            block_size=size,
            earlier_ids=np.array(earlier, np.int32) if reach else None,
        )
