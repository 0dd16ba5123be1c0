"""`check`: makes a `CheckedRequest` of what a user asks for, or says in the user's terms why no engine of the model
serves it.

The core checks each message again in its own terms (core/engine/admission.py), since it trusts no client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec

from headrace.frontend.request.embeds import check_enabled, check_shape
from headrace.frontend.request.parameters.pooling_params import PoolingParams
from headrace.frontend.request.parameters.sampling_fields import plain_integer
from headrace.frontend.request.parameters.sampling_params import NOTHING, RequestOutputKind, SamplingParams
from headrace.frontend.request.parameters.thinking import thinking_of
from headrace.frontend.request.parameters.token_rules import bad_words_of, breakers_of, check_model_limits
from headrace.frontend.request.pooling_prompts import NOT_POOLING
from headrace.frontend.request.prompts import ModelFacts, Prompt, truncate
from headrace.ipc.adapters import most_of_request
from headrace.ipc.codec import Tensor
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Pool, Welcome
from headrace.ipc.row_inputs import PROMPT_EMBEDS

NOT_ENABLED = "LoRA is not enabled: start the engine with enable_lora"
NO_TOKENS = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
"""In the place of a request's parameters where it pools."""


class RequestTrace(Protocol):
    """What exports a request's times once it has ended (frontend/tracing/tracer.py)."""

    trace_id: str
    """In hexadecimal digits."""
    wants_steps: bool
    """Whether the engine is to note each step that the request takes part in."""

    def note_steps(self, times: Tensor) -> None:
        """Takes those of one output (Finish.steps)."""
        ...

    def on_done(self, stream: Any) -> None:
        """Called once, when the request has ended."""
        ...


class CheckedRequest(msgspec.Struct, frozen=True, eq=False):
    """A request that was checked, as every client submits it."""

    name: str
    """Its request id."""
    prompt: Prompt
    params: SamplingParams
    """Frozen. NO_TOKENS of a request that pools."""
    priority: int = 0
    max_tokens: int = 1
    """The most tokens that max_model_len leaves room for."""
    tokenized: Mapping[str, Any] = NOTHING
    """The fields of Sampling that are made of texts with the tokenizer."""
    pooling_task: Pool | None = None
    """What is asked for if it pools."""
    trace: RequestTrace | None = None
    other_names: Iterator[str] | None = None
    """Where its name comes from if its caller gave none. It has another if the name is in use once it is submitted."""


def check(
    name: Any,
    prompt: Prompt,
    params: SamplingParams | PoolingParams,
    facts: ModelFacts,
    priority: Any = 0,
    tasks: dict[int, Pool] | None = None,
    min_room: int = 1,
    other_names: Iterator[str] | None = None,
) -> CheckedRequest:
    """The request, whose prompt is tokenised; truncates the prompt if the parameters ask for it.

    tasks: of a list of requests, those of parameters that were checked already, by their id(). min_room: how many
    tokens max_model_len must leave room for behind a prompt that generates. Raises InvalidRequestError for a request
    that can never be served.
    """
    welcome = facts.welcome
    name, priority = checked_id(name), checked_priority(priority)
    if prompt.adapters:
        _check_adapters(prompt, welcome)
    if isinstance(params, PoolingParams):
        task = _check_pooling(prompt, params, welcome, {} if tasks is None else tasks)
        return CheckedRequest(name, prompt, NO_TOKENS, priority, pooling_task=task, other_names=other_names)
    params = params.frozen()
    if not welcome.generates:
        raise InvalidRequestError(
            f"this engine runs {welcome.served_model_names[0]} for pooling alone, and generation is only supported for "
            "generative models. Try passing `--runner generate` to use the model as a generative model."
        )
    if params.truncate_prompt_tokens is not None:
        truncate(prompt, params, welcome)
    if prompt.inputs and params.prompt_logprobs is not None:
        raise InvalidRequestError("SamplingParams.prompt_logprobs is not compatible with prompt embeds.")
    check_token_ids(prompt, welcome)
    room = _check_length(prompt, welcome, min_room)
    check_model_limits(params, welcome.vocab_size, welcome.max_logprobs)
    if params.stop and welcome.tokenizer is None:
        raise InvalidRequestError(
            "SamplingParams.stop needs a tokenizer, and this engine runs without one: use stop_token_ids"
        )
    tokenizer = facts.tokenizer
    tokenized: dict[str, Any] = {}
    if params.bad_words:
        tokenized["bad_words"] = bad_words_of(params, tokenizer, welcome.vocab_size)
    if params.dry_multiplier > 0:
        tokenized["dry_breaker_token_ids"] = breakers_of(params.dry_sequence_breakers, tokenizer)
    if params.thinking_token_budget is not None or params.structured_outputs is not None:
        thinking = thinking_of(params, prompt, tokenizer, welcome)
        if thinking is not None:
            tokenized["thinking"] = thinking
    return CheckedRequest(name, prompt, params, priority, room, tokenized, other_names=other_names)


def _check_adapters(prompt: Prompt, welcome: Welcome) -> None:
    """Raises InvalidRequestError for adapters that the engine takes none of, or not so many."""
    if not welcome.max_loras:
        named = ", ".join(use.name for use in prompt.adapters)
        raise InvalidRequestError(f"the request asks for the adapter {named!r:.200}, and {NOT_ENABLED}")
    names, most = [use.name for use in prompt.adapters if use.scale], most_of_request(welcome.max_loras)
    if len(names) > most:
        shown = ", ".join(names)
        raise InvalidRequestError(
            f"the request has {len(names)} adapters ({shown:.200}), and at most {most} are computed: max_loras is "
            f"{welcome.max_loras} (the engine's option)"
        )


class TooLongError(InvalidRequestError):
    """A prompt that does not fit max_model_len. HTTP says it in the words of its APIs, made of the numbers."""

    num_prompt = limit = 0


def _check_length(prompt: Prompt, welcome: Welcome, min_room: int) -> int:
    """How many tokens max_model_len leaves room for behind the prompt. Raises TooLongError if those are fewer than
    min_room."""
    num_prompt, limit = len(prompt.token_ids or ()), welcome.max_model_len
    if num_prompt + min_room <= limit:
        return limit - num_prompt
    error = TooLongError(
        # vLLM's sentences, which programs look for.
        f"The decoder prompt (length {num_prompt}) plus the number of requested output tokens (at least {min_room}) is "
        f"longer than the maximum model length of {limit}. Make sure that `max_model_len` is no smaller than the "
        f"number of text tokens (prompt + requested output tokens). The model's maximum context length is {limit} "
        f"tokens. Please reduce the length of the prompt to {limit - min_room} tokens or fewer"
        if min_room
        else f"the prompt has {num_prompt} tokens, and max_model_len is {limit} (the model's maximum context length is "
        f"{limit} tokens). Please reduce the length of the prompt, or let truncate_prompt_tokens=-1 truncate it"
    )
    error.num_prompt, error.limit = num_prompt, limit
    raise error


def checked_id(request_id: Any) -> str:
    """As messages hold it: it may be of a subclass of str. Raises InvalidRequestError."""
    if not isinstance(request_id, str):
        raise InvalidRequestError(f"request_id must be a string, not {request_id!r:.100}")
    return str(request_id)


def checked_priority(priority: Any) -> int:
    """A priority as messages hold it. Raises InvalidRequestError."""
    plain = priority if type(priority) is int else plain_integer(priority)
    if plain is None or not -(2**63) <= plain < 2**63:
        raise InvalidRequestError(f"priority must be an integer, and smaller is sooner, not {priority!r:.100}")
    return plain


def _check_pooling(prompt: Prompt, params: PoolingParams, welcome: Welcome, tasks: dict[int, Pool]) -> Pool:
    """The task for the engine."""
    task = params.checked_task or tasks.get(id(params))
    if task is None:
        params.verify()
        if welcome.pooling is None:
            raise InvalidRequestError(f"this engine generates and does not pool: {NOT_POOLING}")
        task = tasks[id(params)] = params.to_wire(welcome.pooling, welcome.served_model_names[0])
    _check_length(prompt, welcome, 0)
    check_token_ids(prompt, welcome)
    return msgspec.structs.replace(task, **prompt.pooling_fields) if prompt.pooling_fields else task


def check_token_ids(prompt: Prompt, welcome: Welcome) -> None:
    """Raises InvalidRequestError for a prompt without tokens, or with one outside the vocabulary, and for embeddings
    that the engine cannot take."""
    for each in prompt.inputs:
        if each.kind == PROMPT_EMBEDS:
            check_enabled(welcome)
            (values,) = each.tensors
            check_shape((values.shape[0], values.shape[1]), values.dtype, welcome)
    token_ids = prompt.token_ids or ()
    if not token_ids:
        raise InvalidRequestError("the decoder prompt cannot be empty: give at least one token")
    if not (min(token_ids) >= 0 and max(token_ids) < welcome.vocab_size):
        index, bad = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < welcome.vocab_size)
        raise InvalidRequestError(
            f"prompt_token_ids[{index}] is {bad}, which is out of vocabulary: the model's token ids are 0 to "
            f"{welcome.vocab_size - 1}{', greater than or equal to 0' if bad < 0 else ''}"
        )
