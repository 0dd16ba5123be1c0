"""Log-probabilities in the shapes of OpenAI's two APIs."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.frontend.api.outputs import Logprob, LogprobsOfPosition
from headrace.frontend.http.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from headrace.frontend.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write; the same number as vLLM's."""


class TokenSpelling:
    """How tokens are written in log-probabilities: as their text, or as token_id:NUMBER."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = None if as_ids else tokenizer

    def __call__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.decode_token(token_id)


def completion_logprobs(
    token_ids: Sequence[int], positions: Sequence[LogprobsOfPosition | None], spell: TokenSpelling, offset: int
) -> tuple[CompletionLogprobs, int]:
    """Of adjacent tokens that begin `offset` characters into the text, and where the text goes on after them."""
    result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token_id, position in zip(token_ids, positions, strict=True):
        token = spell(token_id)
        result.text_offset.append(offset)
        result.tokens.append(token)
        offset += len(token)
        if position is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        result.token_logprobs.append(_finite(position[token_id]))
        top: dict[str, float] = {}
        for each, logprob in position.items():
            top.setdefault(spell(each), _finite(logprob))
        result.top_logprobs.append(top)
    return result, offset


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[LogprobsOfPosition], spell: TokenSpelling, num_top: int
) -> ChatLogprobs:
    """With the `num_top` likeliest of each position."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        likeliest = sorted((e for e in position.items() if (e[1].rank or 0) <= num_top), key=lambda e: e[1].rank or 0)
        token = spell(token_id)
        content.append(
            TokenLogprob(
                token=token,
                logprob=_finite(position[token_id]),
                bytes=list(token.encode()),
                top_logprobs=[_top(spell(each), logprob) for each, logprob in likeliest[:num_top]],
            )
        )
    return ChatLogprobs(content)


def prompt_logprobs(positions: Sequence[LogprobsOfPosition | None]) -> PromptLogprobs:
    return [
        None
        if position is None
        else {
            str(token_id): PromptLogprob(_finite(logprob), logprob.rank, logprob.decoded_token)
            for token_id, logprob in position.items()
        }
        for position in positions
    ]


def _top(token: str, logprob: Logprob) -> TopLogprob:
    return TopLogprob(token=token, logprob=_finite(logprob), bytes=list(token.encode()))


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST)
