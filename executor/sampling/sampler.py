"""Samples: allowed tokens, bad words, min_tokens, bias, penalties, temperature, min_p, top_k, top_p, then a choice.

A row's choice depends only on its own logits, parameters, tokens and seed, never on other rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace import kernels
from headrace.executor.sampling.columns import CHANGES, Needs, SampledRows
from headrace.executor.sampling.draws import Chosen, Draws
from headrace.executor.sampling.logprobs import asked_tokens, logprob_rows
from headrace.executor.sampling.penalties import penalise
from headrace.executor.sampling.rows import ProcessedRows, truncate_row
from headrace.executor.sampling.token_rules import additions
from headrace.ipc.messages import LogprobRows
from headrace.ipc.step import RowFailure
from headrace.kernels.reference.sampling import DeviceDraws

ChangeLogits = Callable[[Tensor, np.ndarray, np.ndarray], Mapping[int, str]]
"""Called with logits [num_rows, vocab_size], which it changes in place, the row of each, and how many tokens of the row
come before the one to choose. Returns which of them it spoilt, by index, and how."""


class RefusedRow(str):
    """A row's reason for failure that its client's parameters caused."""

    __slots__ = ()


ALL_FORBIDDEN = RefusedRow(
    "allowed_token_ids, bad_words, logit_bias, structured_outputs, the end of reasoning that thinking_token_budget "
    "forces, logits processors, step features and the stop tokens that min_tokens forbids leave no token to choose"
)


def row_failure(row: int, why: str) -> RowFailure:
    """A failure that ends the request in `row`: the client's error if `why` is `RefusedRow`, otherwise ours."""
    return RowFailure.of(row, why, "InvalidRequestError" if isinstance(why, RefusedRow) else "SamplingError")


@dataclass(frozen=True)
class Sampled:
    token_ids: np.ndarray  # [num_rows] int32; meaningless for rows in `problems`
    problems: dict[int, str]
    """Index of a row -> why no token could be chosen for it."""
    logprob_indices: np.ndarray | None = None  # [num_logprob_rows] int32, ascending: the rows that `logprobs` is of
    logprobs: LogprobRows | None = None

    @property
    def good(self) -> np.ndarray:
        """[num_rows] bool: whether a token was chosen."""
        good = np.ones(len(self.token_ids), bool)
        good[list(self.problems)] = False
        return good


def sample(
    logits: Tensor,
    batch: SampledRows,
    rows: np.ndarray,
    num_tokens: np.ndarray | None = None,
    change: ChangeLogits | None = None,
) -> Sampled:
    """Chooses the next token of each row.

    logits: [num_rows, vocab_size] float32, one row for each of `rows` [num_rows]; may be overwritten. num_tokens:
    [num_rows], the number of the row's tokens before the one to choose, where a row with drafts occurs once for each
    position; None: all known tokens. change: what step features change, such as tokens that a grammar forbids.
    """
    needs = batch.sampling.needs[rows]
    used = batch.sampling.all_needs(rows) if len(rows) else 0
    reporting = np.flatnonzero((needs & Needs.LOGPROBS) != 0)
    mode = batch.sampling.logprobs_mode
    changes = bool(used & CHANGES) or change is not None
    reported = None
    if reporting.size and mode.startswith("raw") and (changes or used & Needs.PROCESSORS):
        reported = logits[_indices(reporting, logits)]  # a copy, before anything changes logits
    problems: dict[int, str] = {}
    custom = None
    if changes:
        problems = find_problems(logits.amax(1).cpu().numpy())
        if used & Needs.LOGITS_PROCESSORS and batch.sampling.logits_processors is not None:
            custom = batch.sampling.logits_processors.begin(batch, rows, num_tokens, problems)
        if change is not None:
            spoilt = change(logits, rows, batch.num_tokens[rows] if num_tokens is None else num_tokens)
            problems = {**spoilt, **problems}
        apply_rules(logits, batch, rows, num_tokens)
        if custom is not None:
            custom.apply(logits, argmax_invariant=False)
        penalise(logits, batch, rows, num_tokens)
    draws = batch.sampling.draws(rows, batch.num_tokens[rows] if num_tokens is None else num_tokens)
    processed = None
    if used & Needs.PROCESSORS:
        processed = ProcessedRows(batch, rows, num_tokens, problems)
        processed.change(logits)
    if custom is not None and custom.has(argmax_invariant=True) and draws.temperature.any():
        draws = _temper(logits, draws)
        custom.apply(logits, argmax_invariant=True)
    if processed is not None:
        draws = processed.keep(logits, draws)
    if reporting.size and mode.startswith("processed"):
        reported = drawn_from(logits, draws, reporting)
    chosen = choose_tokens(logits, draws)
    if processed is not None:
        processed.chosen(chosen.token_ids)
    if changes:
        for index in np.flatnonzero(np.isneginf(chosen.best)):
            problems.setdefault(int(index), ALL_FORBIDDEN)
    else:
        problems = find_problems(chosen.best)
    if not reporting.size:
        return Sampled(chosen.token_ids, problems)
    if reported is None:
        reported = logits if len(reporting) == len(logits) else logits[_indices(reporting, logits)]
    return _with_logprobs(reported, reporting, batch, rows, chosen, problems)


def _with_logprobs(
    logits: Tensor,
    reporting: np.ndarray,
    batch: SampledRows,
    rows: np.ndarray,
    chosen: Chosen,
    problems: dict[int, str],
) -> Sampled:
    """Adds the logprobs of the rows with these indices, whose logits these are; not of those in `problems`."""
    if problems:
        good = ~np.isin(reporting, list(problems))
        reporting, logits = reporting[good], logits[_column(good, logits)]
        if not reporting.size:
            return Sampled(chosen.token_ids, problems)
    logprobs = logprob_rows(
        logits,
        chosen.token_ids[reporting],
        batch.sampling.num_logprobs[rows[reporting]],
        asked_tokens(batch.sampling, rows[reporting]),
        as_logits=batch.sampling.logprobs_mode.endswith("logits"),
    )
    return Sampled(chosen.token_ids, problems, reporting.astype(np.int32), logprobs)


def drawn_from(logits: Tensor, draws: Draws, indices: np.ndarray) -> Tensor:
    """The logits from which these rows' tokens are drawn, [num_indices, vocab_size] float32: divided by temperature,
    -inf where truncated; unchanged for greedy rows."""
    found = logits[_indices(indices, logits)]
    for place, index in enumerate(indices.tolist()):
        if draws.temperature[index] > 0:
            candidates = truncate_row(logits[index], draws, index)
            found[place] = -torch.inf
            found[place, _indices(candidates.token_ids, logits)] = _column(candidates.logits, logits).float()
    return found


def _temper(logits: Tensor, draws: Draws) -> Draws:
    """Divides random rows by their temperature, in place; returns the draws without it."""
    is_random = draws.temperature > 0
    temperature = np.where(is_random, draws.temperature, np.float32(1))
    logits.div_(_column(temperature, logits)[:, None])
    return dataclasses.replace(draws, temperature=is_random.astype(np.float32))


def choose_tokens(logits: Tensor, draws: Draws) -> Chosen:
    """Chooses tokens for logits [num_rows, vocab_size] float32, which stay unchanged, by the op for their device."""
    op = kernels.choose("choose_tokens", device=logits.device, dtype=logits.dtype, vocab_size=logits.shape[1])
    truncating = (draws.top_k > 0) | (draws.top_p < 1) | (draws.min_p > 0)
    chosen = op(
        logits,
        DeviceDraws(
            temperature=_column(draws.temperature, logits),
            top_k=_column(np.minimum(draws.top_k, logits.shape[1]).astype(np.int32), logits),
            top_p=_column(draws.top_p, logits),
            min_p=_column(draws.min_p, logits),
            seed=_column(draws.seed.view(np.int64), logits),
            position=_column(draws.position, logits),
            may_draw=bool(draws.temperature.any()),
            may_truncate=bool(truncating.any()),
        ),
    )
    return Chosen(chosen.token_ids.int().cpu().numpy(), chosen.best.cpu().numpy())


def apply_rules(logits: Tensor, batch: SampledRows, rows: np.ndarray, num_tokens: np.ndarray | None = None) -> None:
    """Applies rules for single tokens, in place: allowed tokens, bad words, min_tokens, bias (vLLM's order)."""
    for index, _, rules in batch.sampling.with_rules(rows):
        if len(rules.allowed):
            allowed = _indices(rules.allowed, logits)
            kept = logits[index, allowed]
            logits[index] = -torch.inf
            logits[index, allowed] = kept
    places, added = additions(batch, rows, logits.shape[1], num_tokens)
    if places.size:
        logits.view(-1).index_add_(0, _indices(places, logits), _column(added, logits))


def find_problems(best: np.ndarray) -> dict[int, str]:
    """Index of a row -> why it cannot be sampled, from the rows' highest logits.

    A row with a NaN has NaN as its highest. -inf is allowed elsewhere: models mask tokens with it.
    """
    if math.isfinite(sum(best.tolist())):  # faster than numpy for few rows
        return {}
    finite = np.isfinite(best)
    return {
        int(i): f"the model's highest logit is {best[i]}: its computation overflowed" for i in np.flatnonzero(~finite)
    }


def _indices(indices: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(indices.astype(np.int64)).to(like.device)


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)
