"""From logits to tokens without the host: everything that a choice depends on is read from the device's state.

The same choices as `executor.sampler`, bit for bit where arithmetic allows it (`tests/test_gpu_sampler.py`), in
operations whose shapes the host knows beforehand, so that they can be captured in a graph and nothing waits.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from headrace import kernels
from headrace.executor.batch import Needs
from headrace.executor.device_state import SEEN_IN_PROMPT, DeviceState
from headrace.executor.logprobs import likeliest
from headrace.executor.random_numbers import gumbel_noise, words
from headrace.kernels.reference_sampling import DeviceChosen, DeviceDraws

TILE_ELEMENTS = 1 << 23
"""So many logits are sampled from at a time: their float64 noise and their keys take 64 MiB each."""


class Choice(enum.IntEnum):
    """How far a step goes by itself. A higher one serves every request that a lower one serves."""

    ARGMAX = 0
    DRAW = 1
    """Greedy rows, and rows that draw from the whole vocabulary."""
    TRUNCATE = 2
    """And rows with top_k, top_p or min_p."""
    LOGITS = 3
    """The step ends with the logits: something is to change in them or to be reported of them."""


def choice_for(needs: int) -> Choice:
    """needs: bits of `Needs`, of all rows together."""
    if needs & ~int(Needs.RANDOM | Needs.TRUNCATION):  # of a plain int: a flag's complement has known bits only
        return Choice.LOGITS
    if needs & Needs.TRUNCATION:
        return Choice.TRUNCATE
    return Choice.DRAW if needs & Needs.RANDOM else Choice.ARGMAX


class Chosen(NamedTuple):
    token_ids: Tensor  # [num_rows] int32
    best: Tensor  # [num_rows] float32: the highest logit, NaN where there is one


Choose = Callable[[Tensor, DeviceState, Tensor, Tensor, Choice], Chosen]
"""`choose`, or what does the same faster."""


def chooser(device: torch.device, vocab_size: int) -> Choose:
    """The kernel for this device where there is one."""
    found = kernels.ops()["choose_tokens"].choose(device=device, dtype=torch.float32, vocab_size=vocab_size)
    return choose if found.name == "reference" else partial(choose_with, found.function)


def choose_with(
    op: Callable[[Tensor, DeviceDraws], DeviceChosen],
    logits: Tensor,
    state: DeviceState,
    rows: Tensor,
    positions: Tensor,
    choice: Choice,
) -> Chosen:
    """`choose` by a version of the op `choose_tokens`."""
    draws = DeviceDraws(
        temperature=state.temperature[rows],
        top_k=state.top_k[rows],
        top_p=state.top_p[rows],
        min_p=state.min_p[rows],
        seed=state.seed[rows],
        position=positions,
        may_draw=choice is not Choice.ARGMAX,
        may_truncate=choice > Choice.DRAW,
    )
    chosen = op(logits, draws)
    return Chosen(chosen.token_ids.int(), chosen.best)


def choose(logits: Tensor, state: DeviceState, rows: Tensor, positions: Tensor, choice: Choice) -> Chosen:
    """The next token of each row.

    logits: [num_rows, vocab_size] float32, kept as they are; rows: [num_rows] int64, of the state; positions:
    [num_rows] int64, in its sequence, of the token to choose. LOGITS chooses as TRUNCATE does.
    """
    best = logits.max(1)
    greedy = best.indices.int()
    if choice is Choice.ARGMAX:
        return Chosen(greedy, best.values)
    at_once = max(1, TILE_ELEMENTS // logits.shape[1])
    parts = []
    for first in range(0, len(logits), at_once):
        tile = slice(first, first + at_once)
        parts.append(_draw(logits[tile], state, rows[tile], positions[tile], choice))
    drawn = torch.cat(parts).int()
    return Chosen(torch.where(state.temperature[rows] > 0, drawn, greedy), best.values)


def _draw(logits: Tensor, state: DeviceState, rows: Tensor, positions: Tensor, choice: Choice) -> Tensor:
    """[num_rows] int64; of greedy rows something of no use."""
    temperature = state.temperature[rows]
    tempered = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    keys = words(state.seed[rows][:, None], positions[:, None])  # the same mixing makes a row's key and a token's word
    if choice is Choice.DRAW:
        noise = gumbel_noise(keys, torch.arange(logits.shape[1], device=logits.device))
        return noise.add_(tempered).argmax(1)
    token_ids = likeliest(tempered, logits.shape[1])
    kept = truncated(tempered, token_ids, state.top_k[rows], state.top_p[rows], state.min_p[rows])
    scores = kept.add_(gumbel_noise(keys, token_ids))
    return token_ids.gather(1, scores.argmax(1, keepdim=True))[:, 0]


def truncated(tempered: Tensor, token_ids: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[num_rows, vocab_size] float64: the logits in the order of token_ids, -inf for what min_p, top_k and top_p cut.

    As `sampler.truncate`, over the whole vocabulary. tempered: [num_rows, vocab_size] float32; token_ids: the same
    shape, each row in the total order of `logprobs.likeliest`; the rest [num_rows].
    """
    vocab_size = tempered.shape[1]
    values = tempered.gather(1, token_ids).double()
    first = values[:, :1]
    weights = (values - first).exp()
    place = torch.arange(vocab_size, device=tempered.device)
    by_min_p = (weights >= min_p[:, None]).sum(1)
    by_top_k = torch.where(top_k > 0, top_k.long().clamp(max=vocab_size), vocab_size)
    limit = torch.minimum(by_min_p, by_top_k)
    mass = weights.masked_fill_(place >= limit[:, None], 0).cumsum(1)
    # Without min_p and top_k, top_p takes its share of the whole vocabulary, summed as the host sums it.
    whole = (min_p <= 0) & (top_k <= 0)
    total = torch.where(whole, (tempered - first.float()).exp_().sum(1, dtype=torch.float64), mass[:, -1])
    by_top_p = (mass < (top_p * total)[:, None]).sum(1) + 1
    keep = torch.where(top_p < 1, torch.minimum(by_top_p, limit), limit)
    return values.masked_fill_(place >= keep[:, None], -torch.inf)


class PenaltyCounts:
    """What tokens each row has seen and how often, for rows with penalties: [num_rows + 1, vocab_size] int32.

    A word is SEEN_IN_PROMPT for a token of the prompt, plus the times that it came in the output.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(num_rows + 1, vocab_size, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes

    def enter(self, row: int, token_ids: Tensor, num_prompt_tokens: int) -> None:
        """token_ids: [num_tokens] int32 on the device, the prompt and what is known of the output."""
        ids, counts = token_ids.long(), self.counts[row]
        output = ids[num_prompt_tokens:]
        counts.zero_().index_fill_(0, ids[:num_prompt_tokens], SEEN_IN_PROMPT)
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def add(self, rows: Tensor, token_ids: Tensor) -> None:
        """Counts one more output token, token_ids [n], of each of rows [n] int64."""
        flat = rows * self.counts.shape[1] + token_ids
        self.counts.view(-1).index_add_(0, flat, torch.ones_like(token_ids, dtype=torch.int32))

    def penalise(self, logits: Tensor, state: DeviceState, rows: Tensor) -> None:
        """`sampler.penalise`, in place: logits [num_rows, vocab_size] float32; rows without penalties keep theirs."""
        counts = self.counts[rows]
        repetition = state.repetition_penalty[rows][:, None]
        penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits.copy_(torch.where(counts != 0, penalised, logits))
        times = counts & (SEEN_IN_PROMPT - 1)
        losses = state.frequency_penalty[rows][:, None] * times.float()
        losses += torch.where(times > 0, state.presence_penalty[rows][:, None], 0.0)
        logits.sub_(losses)
