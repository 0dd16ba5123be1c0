"""The decoder against transformers' own models: tiny random checkpoints, greedy, token by token."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor

from headrace.executor.decoder import Decoder
from headrace.executor.families import spec_from_config
from headrace.executor.inputs import StepInputs
from headrace.executor.kv_cache import allocate

PROMPT_LENGTHS = (300, 1, 17, 64, 2, 33, 129)
NEW_TOKENS = 12


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

    def __init__(self, decoder: Decoder, block_size: int = 8, num_blocks: int = 200, seed: int = 1) -> None:
        self.decoder, self.block_size = decoder, block_size
        self.cache = allocate(decoder.spec, num_blocks, block_size, decoder.dtype)
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.fill_(float("nan"))
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)

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


@cache
def reference(name: str) -> Any:
    return tiny_models.build(name)


def make_decoder(name: str, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Decoder:
    model = reference(name)
    return Decoder(spec_from_config(config_of(name)), DictSource(state_of(model)), dtype, **kwargs)


def config_of(name: str) -> dict[str, Any]:
    model = reference(name)
    return model.config.to_dict() | {"architectures": [type(model).__name__]}


def state_of(model: Any) -> dict[str, Tensor]:
    """The state dict as a checkpoint holds it: without the tied copy of the embedding."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    return state


def random_prompts(lengths: Sequence[int] = PROMPT_LENGTHS, seed: int = 7) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(tiny_models.VOCAB_SIZE) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def reference_logits(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """What transformers says after the prompt and after each token of the answer but the last."""
    ids = torch.tensor([prompt + answer[:-1]])
    return model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float()


@torch.inference_mode()
def reference_greedy(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Step by step with transformers' cache, for models whose past depends on when it was computed."""
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    answer: list[int] = []
    past, ids = None, prompt
    for _ in range(new_tokens):
        output = model(torch.tensor([ids]), past_key_values=past, use_cache=True)
        past = output.past_key_values
        answer.append(int(output.logits[0, -1].argmax()))
        ids = answer[-1:]
    return answer


CASES = [name for name in tiny_models.TINY_MODELS if name != "llama_dynamic"]


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_equal_transformers_whole_and_in_chunks(name: str) -> None:
    prompts = random_prompts()
    decoder = make_decoder(name)
    for block_size, chunk, budget in ((8, 512, 1 << 30), (16, 7, 40)):
        answers, logits = Driver(decoder, block_size).greedy(prompts, NEW_TOKENS, chunk, budget)
        for prompt, answer, rows in zip(prompts, answers, logits, strict=True):
            expected = reference_logits(reference(name), prompt, answer)
            assert answer == expected.argmax(-1).tolist(), f"{len(prompt)} prompt tokens in chunks of {chunk}"
            torch.testing.assert_close(rows, expected, atol=2e-3, rtol=1e-3)
        assert len({token for answer in answers for token in answer}) > NEW_TOKENS, "the model answers one thing"
