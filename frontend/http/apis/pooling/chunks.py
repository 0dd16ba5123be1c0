"""Texts that are longer than the engine takes: embedded in chunks of consecutive tokens, whose vectors are averaged.

Each chunk counts as many times as it has tokens, so that of a model that averages its tokens' states the result is as
of the whole text, but that no token sees those of another chunk. vLLM does the same (enable_chunked_processing).
"""

from __future__ import annotations

import array
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from headrace.frontend.client.pooling_stream import PoolingStream
from headrace.frontend.http.server.errors import ContextLengthError
from headrace.frontend.request.pooling_outputs import PoolingOutput
from headrace.frontend.request.pooling_prompts import longest_text
from headrace.frontend.request.prompts import Prompt
from headrace.ipc.messages import Welcome

UNIT = 0.01
"""How far a vector's length may be from 1 if it was scaled to it: the rounding of bf16."""


class JoinedChunks(NamedTuple):
    """The result of a prompt's chunks, as a PoolingStream has it."""

    kinds: Sequence[str]
    parts: Sequence[PoolingOutput]

    @property
    def vectors(self) -> memoryview[float]:
        return self.parts[0].values


Pooled = PoolingStream | JoinedChunks


def in_chunks(
    prompts: Sequence[Prompt], names: Sequence[str], welcome: Welcome
) -> tuple[list[int], list[Prompt], list[str]]:
    """Of each prompt the number of its chunks; all chunks, and their names. Raises ContextLengthError."""
    size, longest = welcome.max_model_len, longest_text(welcome)
    counts, chunks, of_chunks = list[int](), list[Prompt](), list[str]()
    for prompt, name in zip(prompts, names, strict=True):
        token_ids = prompt.token_ids or ()
        if len(token_ids) > longest:
            raise ContextLengthError(
                f"your {name} resulted in {len(token_ids)} tokens", param=name, num_prompt=len(token_ids), limit=longest
            )
        made = [prompt]
        if len(token_ids) > size:
            starts = range(0, len(token_ids), size)
            made = [msgspec.structs.replace(prompt, text=None, token_ids=token_ids[at : at + size]) for at in starts]
        counts.append(len(made))
        chunks += made
        of_chunks += [name] * len(made)
    return counts, chunks, of_chunks


def joined(streams: Sequence[PoolingStream], counts: Sequence[int]) -> list[Pooled]:
    """The results of prompts with so many chunks each."""
    return list(_joined(iter(streams), counts))


def _joined(streams: Iterator[PoolingStream], counts: Sequence[int]) -> Iterator[Pooled]:
    for count in counts:
        chunks = [next(streams) for _ in range(count)]
        if count == 1:
            yield chunks[0]
            continue
        sizes = [len(each.prompt.token_ids or ()) for each in chunks]
        vectors = [each.parts[0].values.tolist() for each in chunks]
        yield JoinedChunks(chunks[0].kinds, [PoolingOutput(memoryview(array.array("f", average(vectors, sizes))))])


def average(vectors: Sequence[Sequence[float]], weights: Sequence[int]) -> list[float]:
    """The weighted average of vectors, scaled to length 1 if all of them are."""
    total = sum(weights)
    found = [
        sum(value * weight for value, weight in zip(values, weights, strict=True)) / total
        for values in zip(*vectors, strict=True)
    ]
    if all(abs(math.hypot(*each) - 1) <= UNIT for each in vectors):
        length = math.hypot(*found)
        found = [each / length for each in found] if length else found
    return found
