"""A request's rules for single tokens: allowed_token_ids, bad_words, logit_bias, and what min_tokens forbids.

Imports no torch. All rules except allowed tokens are numbers that are added to single logits, -inf to forbid a token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.ipc.messages import Sampling

if TYPE_CHECKING:
    from headrace.executor.sampling.columns import SampledRows

FORBIDDEN = np.float32(-np.inf)


@dataclass(frozen=True)
class TokenRules:
    """The rules of one request."""

    allowed: np.ndarray  # [n] int64: all other tokens are forbidden; empty if every token is allowed
    ids: np.ndarray  # [m] int64: tokens whose logits change at every step
    added: np.ndarray  # [m] float32: what is added to them
    words_after: Mapping[int, Sequence[tuple[int, ...]]]
    """Bad words of several tokens, by their last token but one."""

    def completing(self, output: np.ndarray) -> list[int]:
        """The last tokens of those bad words whose other tokens end output [num_output_tokens].

        As in vLLM, these other tokens are searched for in the output only, not in the prompt.
        """
        words = self.words_after.get(int(output[-1]), ()) if len(output) else ()
        return [word[-1] for word in words if output[1 - len(word) :].tolist() == list(word[:-1])]


def rules_of(sampling: Sampling) -> TokenRules | None:
    """None if the request has none of these rules."""
    if not (sampling.allowed_token_ids or sampling.bad_words or sampling.logit_bias):
        return None
    alone = [word[0] for word in sampling.bad_words if len(word) == 1]
    words_after: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
    for word in sampling.bad_words:
        if len(word) > 1:
            words_after[word[-2]].append(word)
    return TokenRules(
        allowed=np.array(sampling.allowed_token_ids, np.int64),
        ids=np.array([*alone, *sampling.logit_bias], np.int64),
        added=np.array([*[FORBIDDEN] * len(alone), *sampling.logit_bias.values()], np.float32),
        words_after=words_after,
    )


def additions(
    batch: SampledRows, rows: np.ndarray, vocab_size: int, num_tokens: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers to add to single logits of rows [num_rows] at this step, for bad words, min_tokens and bias.

    num_tokens: as in `sample`.

    Returns flat indices [n] int64 into logits [num_rows, vocab_size], which may repeat, and the numbers [n] float32.
    The output tokens of rows with bad words of several tokens must be known.
    """
    columns, first = batch.sampling, batch.num_prompt_tokens[rows]
    last = batch.num_tokens[rows] if num_tokens is None else num_tokens
    places, added = [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]

    def forbid(index: int, token_ids: np.ndarray) -> None:
        places.append(token_ids + index * vocab_size)
        added.append(np.full(len(token_ids), FORBIDDEN))

    for index in np.flatnonzero(last - first < columns.min_tokens[rows]).tolist():
        ending = columns.ending_token_ids[rows[index]]
        forbid(index, ending[ending < vocab_size])
    for index, row, rules in batch.sampling.with_rules(rows):
        places.append(rules.ids + index * vocab_size)
        added.append(rules.added)
        if completing := rules.completing(batch.tokens[row, first[index] : last[index]]):
            forbid(index, np.array(completing, np.int64))
    return np.concatenate(places), np.concatenate(added)
