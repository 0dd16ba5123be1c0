"""From a request's fields to SamplingParams and prompts, within the server's limits and the model's."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from headrace.frontend.api.prompts import Prompt
from headrace.frontend.api.sampling_params import RequestOutputKind, SamplingParams
from headrace.frontend.api.token_rules import openai_bias
from headrace.frontend.http.errors import ApiError, bad_field
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.requests import GenerationRequest
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Welcome

MAX_OUTPUTS = 16384
"""Prompts times n."""
MAX_STOP_CHARACTERS = 4096
MAX_TOKEN_RULES = 1 << 19
"""Entries of each of a request's token rules, times its outputs."""
_TOKENIZE_AT_ONCE_CHARACTERS = 1 << 20
_PROBED_CHARACTERS_PER_TOKEN = 16
_PROBE_SLACK_TOKENS = 16
"""By how much a cut may raise the number of a text's tokens."""
_PASSED_ON = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


def sampling_params(
    request: GenerationRequest,
    welcome: Welcome,
    options: ServeOptions,
    **chosen: Any,
) -> SamplingParams:
    """`chosen` is what the two APIs spell differently. What is left out is the model's default."""
    if request.stream_options is not None and not request.stream:
        raise bad_field("stream_options", "stream_options needs stream: true")
    if request.n is not None and request.n > options.max_n:
        raise bad_field("n", f"n is {request.n}; this server gives at most {options.max_n} outputs for a prompt")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > options.max_stop_strings:
        raise bad_field("stop", f"stop has {len(stops)} strings; this server takes at most {options.max_stop_strings}")
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        raise bad_field("stop", f"a stop string is longer than {MAX_STOP_CHARACTERS} characters")
    given = {name: getattr(request, name) for name in _PASSED_ON}
    given |= {"prompt_logprobs": request.prompt_logprobs, "logit_bias": openai_bias(request.logit_bias)}
    values = {name: value for name, value in (given | chosen).items() if value is not None}
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**{"max_tokens": None, **welcome.generation_defaults, **values, "output_kind": kind})


def tokenize_texts(
    texts: Sequence[str], tokenizer: Tokenizer | None, *, special: bool, max_tokens: int, param: str
) -> list[list[int]]:
    """Raises ApiError for text that is none, or is surely longer than `max_tokens`.

    Tokenising takes a hundred times a text's own memory, so what cannot fit is refused before.
    """
    if tokenizer is None:
        raise bad_field("prompt", "this engine runs without a tokenizer: give token ids instead of text")
    token_ids: list[list[int]] = []
    batch: list[str] = []
    for text in texts:
        _check_text(text, tokenizer, max_tokens, param)
        batch.append(text)
        if sum(map(len, batch)) > _TOKENIZE_AT_ONCE_CHARACTERS:
            token_ids += tokenizer.encode_batch(batch, special)
            batch = []
    if len(batch) == 1:
        return [*token_ids, tokenizer.encode(batch[0], special)]
    return token_ids + tokenizer.encode_batch(batch, special)


def _check_text(text: str, tokenizer: Tokenizer, max_tokens: int, param: str) -> None:
    if len(text) > max_tokens and len(text) > max_tokens * tokenizer.longest_token:
        raise _too_long(
            param,
            max_tokens,
            f"has {len(text)} characters, and no token stands for more than {tokenizer.longest_token}",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_field("prompt", f"the prompt is not valid Unicode text: {error}") from error
    if len(text) > max_tokens * _PROBED_CHARACTERS_PER_TOKEN:
        # Most long texts are shown to be too long by their beginning, for a fraction of the memory.
        (beginning,) = tokenizer.encode_batch([text[: max_tokens * _PROBED_CHARACTERS_PER_TOKEN]], False)
        if len(beginning) > max_tokens + _PROBE_SLACK_TOKENS:
            raise _too_long(param, max_tokens, f"resulted in more than {len(beginning) - _PROBE_SLACK_TOKENS} tokens")


def _too_long(param: str, max_tokens: int, what: str) -> ApiError:
    return ApiError(
        HTTPStatus.BAD_REQUEST,
        f"This model's maximum context length is {max_tokens} tokens. However, your {param} {what}. Please reduce "
        f"the length of the {param}.",
        param=param,
        code="context_length_exceeded",
    )


def check_length(prompt: Prompt, max_tokens: int | None, welcome: Welcome, param: str) -> None:
    """In OpenAI's words, which clients look for. `max_tokens` is what was asked for, None where nothing was."""
    num_prompt, limit = len(prompt.token_ids or ()), welcome.max_model_len
    if num_prompt < limit and num_prompt + (max_tokens or 0) <= limit:
        return
    text = f"This model's maximum context length is {limit} tokens. However, "
    if max_tokens and num_prompt < limit:
        text += (
            f"you requested {num_prompt + max_tokens} tokens ({num_prompt} in the {param}, {max_tokens} in the "
            f"completion). Please reduce the length of the {param} or completion."
        )
    else:
        text += (
            f"your {param} resulted in {num_prompt} tokens, and at least one is needed for the completion. "
            f"Please reduce the length of the {param}."
        )
    raise ApiError(HTTPStatus.BAD_REQUEST, text, param=param, code="context_length_exceeded")


def check_outputs(num_prompts: int, params: SamplingParams) -> None:
    """Raises ApiError for too many outputs, or too many token rules for so many: each output has its own copy."""
    n = params.n
    if num_prompts * n > MAX_OUTPUTS:
        raise bad_field("n", f"{num_prompts} prompts times n = {n} are more than {MAX_OUTPUTS} outputs")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "bad_words"):
        size = len(getattr(params, name) or ())
        if size > 1 and num_prompts * n * size > MAX_TOKEN_RULES:
            raise bad_field(
                name, f"{name} has {size} entries for {num_prompts * n} outputs; together they may be {MAX_TOKEN_RULES}"
            )


def cache_salt(request: GenerationRequest, tenant: str) -> str:
    """Blocks are shared only within one tenant, and there only under the same salt."""
    if request.cache_salt == "":
        raise bad_field("cache_salt", "cache_salt is empty; leave it out, or give a text")
    return f"{tenant}/{request.cache_salt}" if request.cache_salt else tenant


def as_api_error(error: InvalidRequestError, index: int, count: int) -> ApiError:
    """With the prompt's index where there are several."""
    answer = ApiError.of(error)
    if count > 1 and answer.body.param == "prompt":
        answer.body.message = f"prompt[{index}]: {answer.body.message}"
    return answer
