"""A minimal engine around a decoder, and weights from a dictionary: what tests of models share."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.executor.decoder import Decoder
from headrace.executor.inputs import StepInputs
from headrace.executor.kv_cache import allocate


class DictSource:
    """Weights from a state dict; every part read is counted."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.elements_read = 0

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        tensor = self.tensors[name]
        if rows is not None:
            tensor = tensor[rows]
        if columns is not None:
            tensor = tensor[:, columns]
        self.elements_read += tensor.numel()
        return tensor.clone()


class Driver:
    """Runs sequences through a decoder the way an engine does, with blocks handed out in shuffled order.

    The cache starts full of NaN, as a reused one may be: whatever reads a slot that was not written shows.
    """

    def __init__(self, decoder: Decoder, block_size: int = 8, num_blocks: int = 200, tp_size: int = 1) -> None:
        self.decoder, self.block_size = decoder, block_size
        self.cache = allocate(decoder.spec, num_blocks, block_size, decoder.dtype, tp_size=tp_size)
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.fill_(float("nan"))
        self.free = list(range(num_blocks))
        random.Random(1).shuffle(self.free)

    def greedy(
        self, prompts: Sequence[list[int]], new_tokens: int, chunk: int, budget: int = 1 << 30
    ) -> tuple[list[list[int]], list[Tensor]]:
        """New tokens of each prompt, and the logits they were chosen from, [new_tokens, vocab_size].

        A sequence computes at most `chunk` tokens a step and a step at most `budget`, so prompts that are still
        being read share steps with sequences that already generate.
        """
        tokens = [list(prompt) for prompt in prompts]
        tables: list[list[int]] = [[] for _ in prompts]
        done = [0] * len(prompts)
        chosen: list[list[Tensor]] = [[] for _ in prompts]
        while active := [i for i in range(len(prompts)) if len(chosen[i]) < new_tokens]:
            left, step = budget, []
            for i in sorted(active, key=lambda i: len(tokens[i]) - done[i]):
                count = min(chunk, len(tokens[i]) - done[i], left)
                if count:
                    step.append((i, done[i], count))
                    left -= count
            inputs = self._inputs(step, tokens, tables, [len(prompt) for prompt in prompts])
            hidden = self.decoder.forward(inputs, self.cache)
            logits = self.decoder.logits(hidden[inputs.logits_indices])
            for row, (i, start, count) in zip(logits, step, strict=True):
                done[i] = start + count
                if done[i] == len(tokens[i]):
                    chosen[i].append(row)
                    tokens[i].append(int(row.argmax()))
        return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)], [torch.stack(rows) for rows in chosen]

    def _inputs(
        self,
        step: list[tuple[int, int, int]],
        tokens: list[list[int]],
        tables: list[list[int]],
        prompt_lens: list[int],
    ) -> StepInputs:
        size = self.block_size
        for i, start, count in step:
            while len(tables[i]) * size < start + count:
                tables[i].append(self.free.pop())
        positions = [position for _, start, count in step for position in range(start, start + count)]
        owners = [i for i, _, count in step for _ in range(count)]
        ends = torch.tensor([count for _, _, count in step]).cumsum(0)
        width = max(len(tables[i]) for i, _, _ in step) + 3
        int32 = torch.int32
        return StepInputs(
            token_ids=torch.tensor([tokens[i][p] for i, p in zip(owners, positions, strict=True)]),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(
                [tables[i][p // size] * size + p % size for i, p in zip(owners, positions, strict=True)]
            ),
            query_start=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(int32),
            seq_lens=torch.tensor([start + count for _, start, count in step], dtype=int32),
            block_tables=torch.tensor([tables[i] + [0] * (width - len(tables[i])) for i, _, _ in step], dtype=int32),
            logits_indices=ends - 1,
            block_size=size,
            prompt_lens=torch.tensor([prompt_lens[i] for i, _, _ in step], dtype=int32),
        )
