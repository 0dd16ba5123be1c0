"""Prompts of requests that pool: their tokens, truncated from the end unless asked otherwise, and for late interaction
(ColBERT) with the markers of queries and documents.

    [CLS] [Q] who wrote it [SEP] [MASK] [MASK] ...      [CLS] [D] goethe wrote faust . [SEP]
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence

from headrace.frontend.request.parameters.pooling_params import PoolingParams
from headrace.frontend.request.prompts import Prompt, Tokenization, encode_texts
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import LateInteraction, Pooling, Welcome

QUERY, DOCUMENT = "query", "document"
"""Names of prompts that all models of late interaction have."""
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
    """Sets the token ids of prompts that have only text, and truncates prompts as `how` and `params` ask. Raises
    InvalidRequestError."""
    texts = [prompt.token_ids is None for prompt in prompts]
    for prompt, each in zip(prompts, params, strict=True):
        if prompt.text is not None and prompt.token_ids is None:
            prompt.text = as_pooled(prompt.text, welcome, each)
    if any(texts):
        encode_texts([prompt for prompt in prompts if prompt.token_ids is None], tokenizer, how)
    cut_to_pool(prompts, params, tokenizer, how, welcome, texts)


def as_pooled(text: str, welcome: Welcome, params: PoolingParams) -> str:
    """The text as the model's folder wants it: behind the prompt that the parameters name, or the default one, and in
    lower case. Raises InvalidRequestError for a name that the folder does not have."""
    pooling = welcome.pooling
    if pooling is None:
        return text
    if "embed" in (params.task or pooling.kinds[0]):
        text = prompt_before(params.prompt_name, pooling) + text
    return text.lower() if pooling.lower_case else text


def prompt_before(name: str | None, pooling: Pooling) -> str:
    """What comes before a text: the prompt of that name, or the default one. Raises InvalidRequestError."""
    name = pooling.default_prompt if name is None else name
    if name is None:
        return ""
    if name not in pooling.prompts and not (pooling.late_interaction and name in (QUERY, DOCUMENT)):
        known = ", ".join(pooling.prompts) or "none"
        raise InvalidRequestError(f"the model has no prompt with the name {name!r:.100}; it has {known}")
    return pooling.prompts.get(name, "")


_OF_INPUT_TYPES: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "search_query": ("search_query", QUERY),
        "search_document": ("search_document", DOCUMENT, "passage", "corpus"),
        "classification": ("classification",),
        "clustering": ("clustering",),
    }
)
"""Cohere's types of inputs, and what prompts for them are called."""


def prompt_of_type(input_type: str | None, welcome: Welcome) -> str | None:
    """The name of the prompt for Cohere's type of an input, or of the prompt that is called so; None for the default
    one, where the folder has none for the type. Raises InvalidRequestError for an unknown type."""
    pooling = welcome.pooling
    if input_type is None or pooling is None or input_type in pooling.prompts:
        return input_type
    if input_type not in _OF_INPUT_TYPES:
        known = ", ".join(dict.fromkeys((*_OF_INPUT_TYPES, *pooling.prompts)))
        raise InvalidRequestError(f"Unsupported input_type {input_type!r:.100}; known: {known}")
    by_name = {name.lower(): name for name in pooling.prompts}
    if pooling.late_interaction is not None:
        by_name |= {QUERY: QUERY, DOCUMENT: DOCUMENT}
    return next((by_name[name] for name in _OF_INPUT_TYPES[input_type] if name in by_name), None)


def cut_to_pool(
    prompts: Sequence[Prompt],
    params: Sequence[PoolingParams],
    tokenizer: Tokenizer | None,
    how: Tokenization,
    welcome: Welcome,
    are_texts: Sequence[bool] | None = None,
) -> None:
    """Truncates tokenised prompts as `how` and `params` ask. The special tokens around a text are kept: the last may be
    the one whose hidden state is pooled. Texts (those that are true in are_texts, or that have one) whose tokens are
    compared one by one get their markers: those of queries if their prompt_name is so, else those of documents."""
    pooling = welcome.pooling
    late = None if pooling is None else pooling.late_interaction
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        is_text = prompt.text is not None if are_texts is None else are_texts[index]
        marked = late if late is not None and is_text and "token_embed" in (each.task or "token_embed") else None
        most = most_tokens(how, each, welcome)
        if marked is not None:
            most = _room(marked, most, is_query=each.prompt_name == QUERY)
        if most is not None and len(prompt.token_ids or ()) > most:
            inner = tokenizer.encode(prompt.text, False) if prompt.text is not None and tokenizer is not None else None
            prompt.token_ids = cut(list(prompt.token_ids or ()), inner, most, from_left=cuts_left(how, tokenizer))
        if marked is not None and tokenizer is not None:
            _mark(prompt, marked, tokenizer, is_query=each.prompt_name == QUERY)


def cuts_left(how: Tokenization, tokenizer: Tokenizer | None) -> bool:
    """Whether texts that are pooled are cut at their beginning."""
    return how.truncates_left(tokenizer is not None and tokenizer.truncation_side == "left")


def _room(late: LateInteraction, most: int | None, *, is_query: bool) -> int | None:
    """Most tokens besides the marker."""
    marker, own = (late.query_prefix, late.query_length) if is_query else (late.document_prefix, late.document_length)
    limits = [each for each in (most, own) if each is not None]
    return max(0, min(limits) - bool(marker)) if limits else None


def _mark(prompt: Prompt, late: LateInteraction, tokenizer: Tokenizer, *, is_query: bool) -> None:
    """Puts the marker behind the first token, and fills a query up. Raises InvalidRequestError."""
    token_ids = list(prompt.token_ids or ())
    if marker := late.query_prefix if is_query else late.document_prefix:
        token_ids[1:1] = [_id_of(marker, tokenizer)]
    prompt.pooling_fields = {}
    if skipped := late.skipped_of_queries if is_query else late.skipped:
        found = (tokenizer.token_id(token) for token in skipped)
        prompt.pooling_fields["skipped"] = tuple(each for each in found if each is not None)
    if is_query and late.filled_length is not None and len(token_ids) < late.filled_length:
        if not late.fillers_are_seen:
            prompt.pooling_fields["num_keys"] = len(token_ids)
        named = tokenizer.special_tokens_map
        usual = next((named[each] for each in ("mask_token", "eos_token", "pad_token") if named.get(each)), "[MASK]")
        token_ids += [_id_of(late.filler or usual, tokenizer)] * (late.filled_length - len(token_ids))
    prompt.token_ids = token_ids


def _id_of(token: str, tokenizer: Tokenizer) -> int:
    found = tokenizer.token_id(token)
    if found is None:
        raise InvalidRequestError(
            f"the tokenizer has no token {token!r:.100}, with which this model's texts are written"
        )
    return found


def most_tokens(how: Tokenization, params: PoolingParams, welcome: Welcome) -> int | None:
    """Most tokens of a prompt that are kept; None: all. Raises InvalidRequestError for more than the model takes."""
    asked = [params.truncate_prompt_tokens, how.truncate_prompt_tokens]
    if how.truncation:
        asked.append(-1 if how.max_length is None else how.max_length)
    longest = longest_text(welcome)
    limits = [longest if each == -1 else each for each in asked if each is not None]
    if max(limits, default=0) > longest:
        raise InvalidRequestError(  # vLLM's sentences, which programs look for
            "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation size: at "
            f"most {longest}, or -1"
        )
    return min(limits, default=None)


def longest_text(welcome: Welcome) -> int:
    """The most tokens of a text that is pooled, perhaps in chunks."""
    return welcome.max_model_len if welcome.pooling is None else welcome.pooling.longest or welcome.max_model_len


def cut(token_ids: list[int], inner: Sequence[int] | None, most: int, *, from_left: bool) -> list[int]:
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
