"""Prompts of requests that pool: their tokens, truncated from the end unless asked otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.frontend.request.parameters.pooling_params import PoolingParams
from headrace.frontend.request.prompts import Prompt, Tokenization, encode_texts
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Welcome

EMBEDDING = ("embed", "token_embed")
"""Tasks with prompts by name."""
NOT_POOLING = (
    "it is only supported for pooling models. Try passing `--runner pooling` to use the model as a pooling model, or "
    "`--runner generate --convert embed` to use it for both"
)


def tokenize_to_pool(
    prompts: Sequence[Prompt],
    params: Sequence[PoolingParams],
    tokenizer: Tokenizer | None,
    how: Tokenization,
    welcome: Welcome,
) -> None:
    """Sets the token ids of prompts that have only text, and truncates prompts as `how` and `params` ask."""
    for prompt, each in zip(prompts, params, strict=True):
        if prompt.text is not None and prompt.token_ids is None:
            prompt.text = as_pooled(prompt.text, welcome, each.task)
    encode_texts(prompts, tokenizer, how)
    cut_to_pool(prompts, params, tokenizer, how, welcome)


def as_pooled(text: str, welcome: Welcome, task: str | None, prompt_name: str | None = None) -> str:
    """The text as the model's folder wants it: behind the prompt of this name, or the default one, and in lower case.
    Raises InvalidRequestError for a name that the folder does not have."""
    pooling = welcome.pooling
    if pooling is None:
        return text
    name = pooling.default_prompt if prompt_name is None else prompt_name
    if name is not None and (task or pooling.kinds[0]) in EMBEDDING:
        if name not in pooling.prompts:
            known = ", ".join(pooling.prompts) or "none"
            raise InvalidRequestError(f"the model has no prompt with the name {name!r:.100}; it has {known}")
        text = pooling.prompts[name] + text
    return text.lower() if pooling.lower_case else text


def cut_to_pool(
    prompts: Sequence[Prompt],
    params: Sequence[PoolingParams],
    tokenizer: Tokenizer | None,
    how: Tokenization,
    welcome: Welcome,
) -> None:
    """Truncates tokenised prompts as `how` and `params` ask. The special tokens around a text are kept: the last may be
    the one whose hidden state is pooled."""
    for prompt, each in zip(prompts, params, strict=True):
        most = most_tokens(how, each, welcome)
        if most is not None and len(prompt.token_ids or ()) > most:
            inner = tokenizer.encode(prompt.text, False) if prompt.text is not None and tokenizer is not None else None
            prompt.token_ids = _cut(list(prompt.token_ids or ()), inner, most, from_left=how.truncates_left(False))


def most_tokens(how: Tokenization, params: PoolingParams, welcome: Welcome) -> int | None:
    """Most tokens of a prompt that are kept; None: all."""
    asked = [params.truncate_prompt_tokens, how.truncate_prompt_tokens]
    if how.truncation:
        asked.append(-1 if how.max_length is None else how.max_length)
    limits = [welcome.max_model_len if each == -1 else each for each in asked if each is not None]
    return min(limits, default=None)


def _cut(token_ids: list[int], inner: Sequence[int] | None, most: int, *, from_left: bool) -> list[int]:
    """token_ids: special tokens, then `inner` (the text's own), then special tokens; inner None: all are its own."""
    before = after = 0
    if inner is not None and (num_special := len(token_ids) - len(inner)) > 0:
        starts = range(num_special + 1)
        before = next((n for n in starts if token_ids[n : n + len(inner)] == list(inner)), 0)
        after = num_special - before
    body = token_ids[before : len(token_ids) - after]
    room = max(0, most - before - after)
    kept = body[len(body) - room :] if from_left else body[:room]
    return (token_ids[:before] + kept + token_ids[len(token_ids) - after :])[:most]
