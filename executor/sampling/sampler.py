"""From logits to tokens: allowed tokens, bad words, min_tokens, bias, penalties, temperature, min_p, top_k, top_p, then
a choice.

A row's choice depends on its own logits, parameters, tokens and seed only, never on the rows beside it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.executor.cpu.batch import CHANGES, BatchState, Draws, Needs
from headrace.executor.models.inputs import Chosen
from headrace.executor.sampling.logprobs import asked_tokens, logprob_rows
from headrace.executor.sampling.random_numbers import draw, gumbel_noise, row_keys, token_steps
from headrace.executor.sampling.rows import ProcessedRows
from headrace.executor.sampling.token_rules import additions
from headrace.executor.sampling.truncation import first_width, to_column, to_indices, truncate
from headrace.ipc.failure import Failure
from headrace.ipc.messages import LogprobRows
from headrace.ipc.step import RowFailure, TokenMasks

ALL_FORBIDDEN = (
    "allowed_token_ids, bad_words, logit_bias, structured_outputs and the stop tokens that min_tokens forbids leave no "
    "token to choose"
)


def row_failure(row: int, why: str) -> RowFailure:
    """Ends the request in `row`: the client's doing where its own options leave no token, else ours."""
    kind = "InvalidRequestError" if why == ALL_FORBIDDEN else "SamplingError"
    return RowFailure(
        row=row,
        failure=Failure(message=f"the request cannot go on: {why}", type=kind, pid=os.getpid(), phase="step"),
    )


@dataclass(frozen=True)
class Sampled:
    token_ids: np.ndarray  # [num_rows] int32; meaningless where not ok
    problems: dict[int, str]
    """Index of a row -> why no token could be chosen for it."""
    logprob_indices: np.ndarray | None = None  # [num_logprob_rows] int32, ascending: rows of `logprobs`
    logprobs: LogprobRows | None = None

    @property
    def good(self) -> np.ndarray:
        """[num_rows] bool: a token was chosen."""
        good = np.ones(len(self.token_ids), bool)
        good[list(self.problems)] = False
        return good


Choose = Callable[[Tensor, Draws], Chosen]
"""(logits [num_rows, vocab_size] float32, how each row's token is drawn) -> the tokens; equal to `choose_in_torch`."""


def sample(
    logits: Tensor,
    batch: BatchState,
    rows: np.ndarray,
    choose: Choose | None = None,
    num_tokens: np.ndarray | None = None,
    masks: TokenMasks | None = None,
) -> Sampled:
    """Chooses the next token of each row.

    logits: [num_rows, vocab_size] float32, one row for each of `rows` [num_rows]; it may be overwritten.
    num_tokens: [num_rows], how many of the row's tokens come before the one to choose, where the row occurs several
    times, for a place after each of its drafts; None: all known ones.
    masks: which tokens may be chosen; places are the rows of logits.
    """
    needs = batch.sampling.needs[rows]
    used = batch.needs(rows) if len(rows) else 0
    reporting = np.flatnonzero((needs & Needs.LOGPROBS) != 0)
    raw = logits[to_indices(reporting, logits)] if reporting.size else None  # a copy, before anything changes them
    changes = bool(used & CHANGES) or masks is not None
    problems: dict[int, str] = {}
    if changes:
        problems = find_problems(_argmax(logits)[1])
        if masks is not None:
            apply_masks(logits, masks)
        apply_rules(logits, batch, rows, num_tokens)
        penalise(logits, batch, rows, num_tokens)
    draws, processed = batch.draws(rows, num_tokens), None
    if used & Needs.PROCESSORS:
        processed = ProcessedRows(batch, rows, num_tokens, problems)
        processed.change(logits)
        draws = processed.keep(logits, draws)
    chosen = (choose or choose_in_torch)(logits, draws)
    if processed is not None:
        processed.chosen(chosen.token_ids)
    if changes:
        for index in np.flatnonzero(np.isneginf(chosen.best)):
            problems.setdefault(int(index), ALL_FORBIDDEN)
    else:
        problems = find_problems(chosen.best)
    if raw is not None and problems:
        good = ~np.isin(reporting, list(problems))
        reporting, raw = reporting[good], raw[to_column(good, raw)]
    if raw is None or not len(raw):
        return Sampled(chosen.token_ids, problems)
    asked = asked_tokens(batch.sampling, rows[reporting])
    logprobs = logprob_rows(raw, chosen.token_ids[reporting], batch.sampling.num_logprobs[rows[reporting]], asked)
    return Sampled(chosen.token_ids, problems, reporting.astype(np.int32), logprobs)


def choose_in_torch(logits: Tensor, draws: Draws) -> Chosen:
    """Greedily, or from the tempered and truncated distribution. May overwrite the logits."""
    token_ids, best = _argmax(logits)
    random_indices = np.flatnonzero(draws.temperature)
    if random_indices.size:
        token_ids[random_indices] = _choose_randomly(logits, draws, random_indices)
    return Chosen(token_ids.astype(np.int32), best)


def apply_masks(logits: Tensor, masks: TokenMasks) -> None:
    """Forbids, in place, what masks do not allow."""
    allowed = torch.from_numpy(masks.allowed(logits.shape[1])).to(logits.device)
    for place, mask in zip(masks.places.tolist(), allowed, strict=True):
        logits[place].masked_fill_(~mask, -torch.inf)


def apply_rules(logits: Tensor, batch: BatchState, rows: np.ndarray, num_tokens: np.ndarray | None = None) -> None:
    """What requests say of single tokens, in place: allowed tokens, bad words, min_tokens, bias (the order of vLLM)."""
    for index, _, rules in batch.with_rules(rows):
        if len(rules.allowed):
            allowed = to_indices(rules.allowed, logits)
            kept = logits[index, allowed]
            logits[index] = -torch.inf
            logits[index, allowed] = kept
    places, added = additions(batch, rows, logits.shape[1], num_tokens)
    if places.size:
        logits.view(-1).index_add_(0, to_indices(places, logits), to_column(added, logits))


def penalise(logits: Tensor, batch: BatchState, rows: np.ndarray, num_tokens: np.ndarray | None = None) -> None:
    """Applies the repetition, frequency and presence penalties in place, in that order (the order of vLLM).

    A token seen in prompt or output has its logit divided by the repetition penalty if positive and multiplied
    if negative (Keskar et al., "CTRL", 2019); one seen in the output then loses frequency_penalty for each time
    and presence_penalty once.
    """
    indices = np.flatnonzero((batch.sampling.needs[rows] & Needs.PENALTIES) != 0)
    if not indices.size:
        return
    vocab_size = logits.shape[1]
    seen: list[np.ndarray] = []  # flat indices into logits, one for each token of each row
    written: list[np.ndarray] = []  # the same for output tokens alone
    for index in indices:
        row = rows[index]
        end = batch.num_tokens[row] if num_tokens is None else num_tokens[index]
        flat = batch.tokens[row, :end] + np.int64(index) * vocab_size
        seen.append(flat)
        written.append(flat[batch.num_prompt_tokens[row] :])
    flat_logits = logits.view(-1)

    places = np.unique(np.concatenate(seen))
    repetition = to_column(batch.sampling.repetition_penalty[rows[places // vocab_size]], logits)
    at = to_indices(places, logits)
    values = flat_logits[at]
    flat_logits[at] = torch.where(values > 0, values / repetition, values * repetition)

    places, counts = np.unique(np.concatenate(written), return_counts=True)
    owners = rows[places // vocab_size]
    losses = batch.sampling.frequency_penalty[owners] * counts.astype(np.float32)
    losses += batch.sampling.presence_penalty[owners]
    flat_logits[to_indices(places, logits)] -= to_column(losses, logits)


def _choose_randomly(logits: Tensor, draws: Draws, indices: np.ndarray) -> np.ndarray:
    """Token ids [num_indices] drawn for the rows at `indices` from their truncated, tempered distributions."""
    tempered = logits if len(indices) == len(logits) else logits[to_indices(indices, logits)]
    tempered = tempered.div_(to_column(draws.temperature[indices], logits)[:, None])
    keys = to_column(row_keys(draws.seed[indices], draws.position[indices]).view(np.int64), logits)[:, None]
    top_k, top_p, min_p = draws.top_k[indices], draws.top_p[indices], draws.min_p[indices]
    truncating = (top_k > 0) | (top_p < 1) | (min_p > 0)
    token_ids = np.empty(len(indices), np.int64)
    if not truncating.all():
        whole = np.flatnonzero(~truncating)
        token_ids[whole] = _draw_from_all(tempered, keys, whole)
    pending, width = np.flatnonzero(truncating), first_width(top_k[truncating], logits.shape[1])
    while pending.size:
        at = to_indices(pending, logits)
        candidates = truncate(
            tempered if len(pending) == len(tempered) else tempered[at],
            width,
            top_k=top_k[pending],
            top_p=top_p[pending],
            min_p=min_p[pending],
        )
        scores = candidates.logits.add_(gumbel_noise(keys[at], candidates.token_ids))
        drawn = candidates.token_ids.gather(1, scores.argmax(1, keepdim=True))[:, 0].cpu().numpy()
        token_ids[pending] = drawn
        pending, width = pending[~candidates.complete], logits.shape[1]
    return token_ids


def _draw_from_all(tempered: Tensor, keys: Tensor, indices: np.ndarray) -> np.ndarray:
    """Token ids [num_indices] from the whole vocabulary, for the rows at `indices`."""
    vocab_size = tempered.shape[1]
    if tempered.device.type == "cpu":
        logits, steps = tempered.numpy(), token_steps(vocab_size)
        words = keys[:, 0].numpy().view(np.uint64)
        return np.array([draw(logits[index], words[index], steps) for index in indices])
    at = to_indices(indices, tempered)
    noise = gumbel_noise(keys[at], torch.arange(vocab_size, device=tempered.device))
    return _argmax(noise.add_(tempered[at]))[0]


def _argmax(values: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Indices [num_rows] of the first highest value of each row (the first NaN, if any), and those values."""
    if values.device.type == "cpu":
        # numpy's is vectorised, and torch's is ten times slower.
        array = values.numpy()
        indices = array.argmax(1)
        return indices, array[np.arange(len(array)), indices]
    best = values.max(1)
    return best.indices.cpu().numpy(), best.values.cpu().numpy()


def find_problems(best: np.ndarray) -> dict[int, str]:
    """Index of a row -> why it cannot be sampled from, by the rows' highest logits.

    A row with a NaN has NaN as its highest. -inf elsewhere is how a model masks a token.
    """
    if math.isfinite(sum(best.tolist())):  # of few rows, faster than numpy's
        return {}
    finite = np.isfinite(best)
    return {
        int(i): f"the model's highest logit is {best[i]}: its computation overflowed" for i in np.flatnonzero(~finite)
    }
