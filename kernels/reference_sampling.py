"""From logits to tokens on the device, in torch: masks, penalties and bias; the choice; log-probabilities.

Every tensor that a GPU version needs is on the device, and nothing of it is read on the host. Rows of padding have
state row -1 and temperature 0. Tokens are ranked in one total order: by logit, highest first, equal ones by token id,
lowest first.
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
"""SplitMix64's constants, as a counter-based generator (see `choose_tokens`)."""


@dataclass(frozen=True, eq=False)
class Penalties:
    """What a row loses for tokens that it has seen. State rows live as long as their request."""

    state_rows: Tensor
    """[num_rows] int32: each row's row of the two states below; -1 for a row without penalties"""
    output_counts: Tensor
    """[num_states, vocab_size] int32: how often each token was sampled"""
    prompt_bits: Tensor
    """[num_states, ceil(vocab_size / 32)] int32: bit t % 32 of word t // 32 is set where token t is in the prompt"""
    repetition: Tensor
    """[num_rows] float32; 1 for none"""
    frequency: Tensor
    """[num_rows] float32; 0 for none"""
    presence: Tensor
    """[num_rows] float32; 0 for none"""


@dataclass(frozen=True, eq=False)
class LogitChanges:
    """What is done to logits before a token is chosen, in the order of the fields. None leaves a part out."""

    allowed_bits: Tensor | None = None
    """[num_rows, ceil(vocab_size / 32)] int32: tokens whose bit is 0 become -inf"""
    penalties: Penalties | None = None
    bias_ids: Tensor | None = None
    """[num_rows, width] int32: distinct tokens within a row; negative ones are padding"""
    bias: Tensor | None = None
    """[num_rows, width] float32, added to those tokens; -inf forbids (bad words, min_tokens)"""


@dataclass(frozen=True, eq=False)
class DeviceDraws:
    """How rows of logits become tokens."""

    temperature: Tensor
    """[num_rows] float32; 0 is greedy"""
    top_k: Tensor
    """[num_rows] int32; 0 keeps all"""
    top_p: Tensor
    """[num_rows] float64 (or float32); 1 keeps all"""
    min_p: Tensor
    """[num_rows] float64 (or float32); 0 keeps all"""
    seed: Tensor
    """[num_rows] int64: the bits of an unsigned one"""
    position: Tensor
    """[num_rows] int32 or int64: the place in the sequence, prompt included, of the token to draw"""
    may_draw: bool = True
    """The host's bound: False says that every row is greedy."""
    may_truncate: bool = True
    """The host's bound: False says that no row has a top_k, top_p or min_p."""


class DeviceChosen(NamedTuple):
    """Tokens for rows of logits, on the device."""

    token_ids: Tensor  # [num_rows] int64; meaningless where `best` is not finite
    best: Tensor  # [num_rows] float32: each row's highest logit, NaN where it holds one


class TokenLogprobs(NamedTuple):
    """The chosen token first, then the likeliest."""

    token_ids: Tensor  # [num_rows, 1 + num_top] int32
    logprobs: Tensor  # [num_rows, 1 + num_top] float32
    ranks: Tensor  # [num_rows] int32: of the chosen token, 1 for the likeliest; equals share a rank


def adjust_logits(logits: Tensor, changes: LogitChanges) -> Tensor:
    """Applies `changes` to logits [num_rows, vocab_size] float32 in place, and returns them.

    A token seen in prompt or output has its logit divided by the repetition penalty if positive and multiplied if
    negative (Keskar et al., "CTRL", 2019); one seen in the output then loses frequency for each time and presence once.
    """
    vocab_size = logits.shape[1]
    if changes.allowed_bits is not None:
        logits.masked_fill_(~unpack_bits(changes.allowed_bits, vocab_size), -torch.inf)
    if changes.penalties is not None:
        _penalise(logits, changes.penalties)
    if changes.bias_ids is not None and changes.bias is not None:
        used = changes.bias_ids >= 0
        row, _ = torch.nonzero(used, as_tuple=True)
        logits[row, changes.bias_ids[used].long()] += changes.bias[used]
    return logits


def _penalise(logits: Tensor, penalties: Penalties) -> None:
    (rows,) = torch.nonzero(penalties.state_rows >= 0, as_tuple=True)
    states = penalties.state_rows[rows].long()
    counts = penalties.output_counts[states]
    seen = unpack_bits(penalties.prompt_bits[states], logits.shape[1]) | (counts > 0)
    values = logits[rows]
    factor = penalties.repetition[rows, None]
    values = torch.where(seen, torch.where(values > 0, values / factor, values * factor), values)
    losses = penalties.frequency[rows, None] * counts + penalties.presence[rows, None]
    logits[rows] = torch.where(counts > 0, values - losses, values)


def unpack_bits(bits: Tensor, count: int) -> Tensor:
    """bits [num_rows, words] int32 -> [num_rows, count] bool, the lowest bit of a word first."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> places) & 1).flatten(1)[:, :count].bool()


def pack_bits(flags: Tensor) -> Tensor:
    """flags [num_rows, count] bool -> [num_rows, ceil(count / 32)] int32, as `unpack_bits` reads them."""
    missing = -flags.shape[1] % 32
    padded = torch.nn.functional.pad(flags, (0, missing)).unflatten(1, (-1, 32)).long()
    words = (padded << torch.arange(32, device=flags.device)).sum(-1)
    return torch.where(words >> 31 > 0, words - (1 << 32), words).int()


def count_tokens(output_counts: Tensor, state_rows: Tensor, token_ids: Tensor) -> None:
    """Counts each row's sampled token in its state.

    output_counts [num_states, vocab_size] int32, mutated; state_rows [num_rows] int32, distinct, negative for none;
    token_ids [num_rows] int32 or int64, negative for none.
    """
    kept = (state_rows >= 0) & (token_ids >= 0)
    output_counts[state_rows[kept].long(), token_ids[kept].long()] += 1


def choose_tokens(logits: Tensor, draws: DeviceDraws) -> DeviceChosen:
    """The next token of each row of logits [num_rows, vocab_size] float32, which are left as they are.

    Greedily, or by the Gumbel-max trick from the tempered logits that min_p, top_k and top_p keep. A token's noise is
    a function of (seed, position, token id) alone: with SplitMix64's finaliser `mix` (Steele, Lea and Flood, 2014) and
    unsigned 64-bit words,

        key = mix(seed + GOLDEN * (position + 1))      word = mix(key + GOLDEN * (token + 1))
        noise = -log(-log(((word >> 12) + 0.5) * 2**-52))      in float64
    """
    best = logits.max(1)
    tempered = logits / torch.where(draws.temperature > 0, draws.temperature, 1.0)[:, None]
    order = ordered_keys(tempered).sort(dim=1, descending=True).values
    ids = LOW_WORD - (order & LOW_WORD)
    values = tempered.gather(1, ids).double()
    weights = (values - values[:, :1]).exp()
    limit = _kept(weights, draws)
    place = torch.arange(logits.shape[1], device=logits.device)
    noise = -(-_uniform(draws.seed, draws.position, ids).log()).log()
    drawn = (values + noise).masked_fill(place >= limit[:, None], -torch.inf).argmax(1, keepdim=True)
    random = ids.gather(1, drawn)[:, 0]
    return DeviceChosen(torch.where(draws.temperature > 0, random, best.indices), best.values)


def _kept(weights: Tensor, draws: DeviceDraws) -> Tensor:
    """weights [num_rows, vocab_size] float64, descending from 1 -> [num_rows] int64: how many tokens are kept."""
    vocab_size = weights.shape[1]
    place = torch.arange(vocab_size, device=weights.device)
    by_min_p = (weights >= draws.min_p.double()[:, None]).sum(1)
    top_k = torch.where(draws.top_k > 0, draws.top_k, vocab_size).clamp(max=vocab_size)
    limit = torch.minimum(by_min_p, top_k)
    mass = weights.masked_fill(place >= limit[:, None], 0).cumsum(1)
    top_p = draws.top_p.double()
    by_top_p = (mass < (top_p * mass[:, -1])[:, None]).sum(1) + 1
    return torch.where(top_p < 1, torch.minimum(by_top_p, limit), limit)


def _uniform(seed: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """[num_rows, n] float64 in (0, 1) for token ids [num_rows, n]."""
    key = _mix(seed + _signed(GOLDEN) * (position.long() + 1))
    words = _mix(key[:, None] + (ids + 1) * _signed(GOLDEN))
    return _shifted(words, 12).double().add_(0.5).mul_(2.0**-52)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _signed(FIRST_FACTOR)
    bits = (bits ^ _shifted(bits, 27)) * _signed(SECOND_FACTOR)
    return bits ^ _shifted(bits, 31)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Logical shift: int64's own would copy the sign bit in."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


LOW_WORD = 0xFFFFFFFF


def ordered_keys(logits: Tensor) -> Tensor:
    """[num_rows, vocab_size] int64, distinct within a row, ordered as the tokens are ranked (the first highest).

    bits 63..32: the float's bits as an integer of the same order    31..0: 0xFFFFFFFF - token id
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    bits = bits ^ (bits >> 31).bitwise_and_(0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (bits.long() << 32) | (LOW_WORD - ids)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """Log-probabilities of one token per row and of the num_top likeliest.

    logits [num_rows, vocab_size] float32; token_ids [num_rows] int64; num_top from 0 to vocab_size.
    """
    own = token_ids.long()[:, None]
    likeliest = LOW_WORD - (ordered_keys(logits).topk(num_top, dim=1).values & LOW_WORD)
    ids = torch.cat((own, likeliest), 1)
    logprobs = logits.gather(1, ids) - logits.logsumexp(1, keepdim=True)
    ranks = (logits > logits.gather(1, own)).sum(1, dtype=torch.int32) + 1
    return TokenLogprobs(ids.int(), logprobs, ranks)


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "adjust_logits": adjust_logits,
        "count_tokens": count_tokens,
        "choose_tokens": choose_tokens,
        "token_logprobs": token_logprobs,
    }
)
