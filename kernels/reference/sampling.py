"""Sampling on the device, in torch: masks and penalties, the choice of tokens, and log-probabilities.

All tensors are on the device, and a GPU version reads none of them on the host. Rows of padding have temperature 0.
Tokens are ranked in one total order: by logit, highest first, and equal logits by token id, lowest first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB
"""SplitMix64's constants, used as a counter-based generator (see `choose_tokens`)."""
LOW_WORD = 0xFFFFFFFF
TILE_ELEMENTS = 1 << 23
"""Logits that are sampled from at a time; their float64 noise and their sort keys take 64 MiB each."""
CPU_TILE_ELEMENTS = 1 << 18
"""Logits that are ranked at a time on a CPU, so that their sort keys stay in its cache."""


@dataclass(frozen=True, eq=False)
class Penalties:
    """The penalties of every request, indexed by `LogitChanges.rows`."""

    prompt_bits: Tensor
    """[num_states, ceil(vocab_size / 32)] int32: bit t % 32 of word t // 32 is set where token t is in the prompt"""
    output_bits: Tensor
    """the same for the output"""
    output_counts: Tensor | None
    """[num_states, vocab_size] int32: occurrences of each token in the output; None if `frequency` is 0 in all rows"""
    repetition: Tensor
    """[num_states] float32; 1 for none"""
    frequency: Tensor
    """[num_states] float32; 0 for none"""
    presence: Tensor
    """[num_states] float32; 0 for none"""


@dataclass(frozen=True, eq=False)
class LogitChanges:
    """Changes to logits before sampling, applied in the order of the fields. None skips a change."""

    rows: Tensor
    """[num_rows] int32 or int64: for each row of logits, its row of the tensors below"""
    allowed_bits: Tensor | None = None
    """[num_states, ceil(vocab_size / 32)] int32: tokens whose bit is 0 become -inf"""
    penalties: Penalties | None = None


@dataclass(frozen=True, eq=False)
class DeviceDraws:
    """The sampling parameters of each row of logits."""

    temperature: Tensor
    """[num_rows] float32; 0 is greedy"""
    top_k: Tensor
    """[num_rows] int32; 0 keeps all"""
    top_p: Tensor
    """[num_rows] float64 (or float32); 1 keeps all"""
    min_p: Tensor
    """[num_rows] float64 (or float32); 0 keeps all"""
    seed: Tensor
    """[num_rows] int64: the bits of an unsigned seed"""
    position: Tensor
    """[num_rows] int32 or int64: the position in the sequence, prompt included, of the token to sample"""
    may_draw: bool = True
    """Known on the host: False means that every row is greedy."""
    may_truncate: bool = True
    """Known on the host: False means that no row sets top_k, top_p or min_p."""


class DeviceChosen(NamedTuple):
    """The sampled token of each row of logits, on the device."""

    token_ids: Tensor  # [num_rows] int64 or int32; meaningless where `best` is not finite
    best: Tensor  # [num_rows] float32: the row's highest logit, NaN if the row contains a NaN


class TokenLogprobs(NamedTuple):
    """Log-probabilities of the sampled token, in column 0, and of the num_top likeliest."""

    token_ids: Tensor  # [num_rows, 1 + num_top] int32
    logprobs: Tensor  # [num_rows, 1 + num_top] float32
    ranks: Tensor  # [num_rows] int32: rank of the sampled token, from 1; equal logits share a rank


def adjust_logits(logits: Tensor, changes: LogitChanges) -> Tensor:
    """Applies `changes` to logits [num_rows, vocab_size] float32 in place, and returns them.

    The logit of a token in the prompt or output is divided by the repetition penalty if positive, or multiplied by it
    if negative (Keskar et al., "CTRL", 2019). The logit of a token in the output then loses the frequency penalty for
    each occurrence and the presence penalty once. Every product and difference is rounded separately.
    """
    rows, vocab_size = changes.rows.long(), logits.shape[1]
    if changes.allowed_bits is not None:
        logits.masked_fill_(~unpack_bits(changes.allowed_bits[rows], vocab_size), -torch.inf)
    if (penalties := changes.penalties) is not None:
        written = unpack_bits(penalties.output_bits[rows], vocab_size)
        seen = unpack_bits(penalties.prompt_bits[rows], vocab_size) | written
        repetition = penalties.repetition[rows, None]
        penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits.copy_(torch.where(seen, penalised, logits))
        losses = penalties.presence[rows, None]
        if penalties.output_counts is not None:
            losses = penalties.frequency[rows, None] * penalties.output_counts[rows] + losses
        logits.copy_(torch.where(written, logits - losses, logits))
    return logits


def unpack_bits(bits: Tensor, count: int) -> Tensor:
    """Unpacks bits [num_rows, words] int32 to [num_rows, count] bool, the lowest bit of a word first."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> places) & 1).flatten(1)[:, :count].bool()


def choose_tokens(logits: Tensor, draws: DeviceDraws) -> DeviceChosen:
    """Samples the next token of each row of logits [num_rows, vocab_size] float32, which are not modified.

    Greedy rows take the highest logit. Others use the Gumbel-max trick on the logits, divided by the temperature, that
    min_p, top_k and top_p keep. A token's noise depends only on (seed, position, token id): with SplitMix64's finaliser
    `mix` (Steele, Lea and Flood, 2014) and unsigned 64-bit words,

        key = mix(seed + GOLDEN * (position + 1))      word = mix(key + GOLDEN * (token + 1))
        noise = -log(-log(((word >> 12) + 0.5) * 2**-52))      in float64
    """
    best = logits.max(1)
    if not draws.may_draw:
        return DeviceChosen(best.indices, best.values)
    at_once = max(1, TILE_ELEMENTS // logits.shape[1])
    tiles = [slice(first, first + at_once) for first in range(0, len(logits), at_once)]
    drawn = torch.cat([best.indices[:0], *(_draw(logits[tile], draws, tile) for tile in tiles)])
    return DeviceChosen(torch.where(draws.temperature > 0, drawn, best.indices), best.values)


def _draw(logits: Tensor, draws: DeviceDraws, tile: slice) -> Tensor:
    """Sampled tokens [num_rows] int64 for the rows of `draws` in this tile; meaningless for greedy rows."""
    temperature = draws.temperature[tile]
    tempered = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    seed, position = draws.seed[tile], draws.position[tile]
    if not draws.may_truncate:
        noise = gumbel_noise(seed, position, torch.arange(logits.shape[1], device=logits.device)[None])
        return noise.add_(tempered).argmax(1)
    ids = likeliest(tempered, logits.shape[1])
    kept = truncated(tempered, ids, draws.top_k[tile], draws.top_p[tile].double(), draws.min_p[tile].double())
    scores = kept.add_(gumbel_noise(seed, position, ids))
    return ids.gather(1, scores.argmax(1, keepdim=True))[:, 0]


def truncated(tempered: Tensor, token_ids: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Applies min_p, top_k and top_p: [num_rows, num_ranked] float64, the logits in the order of token_ids, with -inf
    for those that are cut.

    tempered: [num_rows, vocab_size] float32; token_ids: [num_rows, num_ranked], ranked by `likeliest`: the whole
    vocabulary, or at least as many as the largest top_k; top_k, top_p and min_p: [num_rows].
    """
    num_ranked = token_ids.shape[1]
    values = tempered.gather(1, token_ids).double()
    first = values[:, :1]
    weights = (values - first).exp()
    place = torch.arange(num_ranked, device=tempered.device)
    by_min_p = (weights >= min_p[:, None]).sum(1)
    by_top_k = torch.where(top_k > 0, top_k.long().clamp(max=num_ranked), num_ranked)
    limit = torch.minimum(by_min_p, by_top_k)
    mass = weights.masked_fill_(place >= limit[:, None], 0).cumsum(1)
    # Without min_p and top_k, top_p is a share of the whole vocabulary's mass, summed in float64.
    whole = (min_p <= 0) & (top_k <= 0)
    total = torch.where(whole, (tempered - first.float()).exp_().sum(1, dtype=torch.float64), mass[:, -1])
    by_top_p = (mass < (top_p * total)[:, None]).sum(1) + 1
    keep = torch.where(top_p < 1, torch.minimum(by_top_p, limit), limit)
    return values.masked_fill_(place >= keep[:, None], -torch.inf)


def gumbel_noise(seed: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """The Gumbel noise of token ids [num_rows or 1, n]: [num_rows, n] float64."""
    uniform = _shifted(random_words(seed, position, ids), 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def random_words(seed: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """The random words of token ids [num_rows or 1, n]: [num_rows, n] int64, the bits of unsigned words."""
    key = _mix(seed + _signed(GOLDEN) * (position.long() + 1))
    return _mix(key[:, None] + (ids + 1) * _signed(GOLDEN))


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _signed(FIRST_FACTOR)
    bits = (bits ^ _shifted(bits, 27)) * _signed(SECOND_FACTOR)
    return bits ^ _shifted(bits, 31)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Logical right shift; the shift of int64 is arithmetic and would copy the sign bit."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def likeliest(logits: Tensor, count: int) -> Tensor:
    """Token ids [num_rows, count] int64 of the `count` tokens ranked first; count <= vocab_size."""
    at_once = max(1, CPU_TILE_ELEMENTS // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))
    return torch.cat([_likeliest(part, count) for part in logits.split(at_once)])


def _likeliest(logits: Tensor, count: int) -> Tensor:
    keys = ordered_keys(logits)
    top = keys.topk(count, dim=1).values if count < keys.shape[1] else keys.sort(dim=1, descending=True).values
    return LOW_WORD - (top & LOW_WORD)


def ordered_keys(logits: Tensor) -> Tensor:
    """Sort keys [num_rows, vocab_size] int64, distinct within a row; the token ranked first has the highest key.

    bits 63..32: the logit's bits as an integer of the same order    31..0: 0xFFFFFFFF - token id
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    keys = bits.long()
    keys <<= 32
    keys |= torch.arange(LOW_WORD, LOW_WORD - logits.shape[1], -1, device=logits.device)
    return keys


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """Log-probabilities of one given token per row and of the num_top likeliest.

    logits [num_rows, vocab_size] float32; token_ids [num_rows] int64; num_top from 0 to vocab_size.
    """
    ids = own = token_ids.long()[:, None]
    if num_top:
        ids = torch.cat((own, likeliest(logits, num_top)), 1)
    logprobs = logits.gather(1, ids) - logits.logsumexp(1, keepdim=True)
    ranks = (logits > logits.gather(1, own)).sum(1, dtype=torch.int32) + 1
    return TokenLogprobs(ids.int(), logprobs, ranks)


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"adjust_logits": adjust_logits, "choose_tokens": choose_tokens, "token_logprobs": token_logprobs}
)
