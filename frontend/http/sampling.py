"""From a request's fields to SamplingParams and prompts, within the server's limits and the model's."""

from __future__ import annotations

import asyncio
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
_TOKENIZE_INLINE_CHARACTERS = 16384
"""Longer texts are tokenised in a thread, so that other requests' streams do not wait for them."""
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


async def tokenize_texts(texts: Sequence[str], tokenizer: Tokenizer | None, *, special: bool) -> list[list[int]]:
    """Raises ApiError for text that is none."""
    if tokenizer is None:
        raise bad_field("prompt", "this engine runs without a tokenizer: give token ids instead of text")
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise bad_field("prompt", f"the prompt is not valid Unicode text: {error}") from error
    if sum(map(len, texts)) > _TOKENIZE_INLINE_CHARACTERS:
        return await asyncio.to_thread(tokenizer.encode_batch, texts, special)
    return [tokenizer.encode(text, special) for text in texts]


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


def check_outputs(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_OUTPUTS:
        raise bad_field("n", f"{num_prompts} prompts times n = {n} are more than {MAX_OUTPUTS} outputs")


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
