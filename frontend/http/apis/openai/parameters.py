"""Converts a request's fields to SamplingParams, within the limits of the server and the model."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.frontend.http.apis.openai.requests import GenerationRequest, StreamOptions
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.errors import SPELLINGS, bad_field, respelt
from headrace.frontend.request.parameters.sampling_params import FIELDS, RequestOutputKind, SamplingParams
from headrace.frontend.request.parameters.thinking import reads_reasoning
from headrace.frontend.request.parameters.token_rules import openai_bias
from headrace.frontend.request.prompts import Prompt
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Welcome

MAX_OUTPUTS = 16384
"""Most outputs of a request: prompts times n."""
MAX_STOP_CHARACTERS = 4096
MAX_TOKEN_RULES = 1 << 19
"""Most entries of each of a request's token rules, or characters of its bad words, times its outputs."""
MOST_CARRIED_BYTES = 32 << 20
"""Most bytes of structured_outputs, or of vllm_xargs, times the outputs: each output sends its own copy."""
_RULES = ("stop_token_ids", "allowed_token_ids", "logit_bias")
_PASSED_ON = tuple(
    each.name for each in FIELDS.values() if each.field.in_body and each.name not in ("max_tokens", "logit_bias")
)


def apply_server_defaults(request: GenerationRequest, options: ServeOptions) -> None:
    """Applies the server's options to fields that a request omits, or to all requests."""
    if request.return_tokens_as_token_ids is None:
        request.return_tokens_as_token_ids = options.return_tokens_as_token_ids
    if options.enable_force_include_usage and request.stream:
        asked = request.stream_options or StreamOptions()
        request.stream_options = msgspec.structs.replace(asked, include_usage=True, continuous_usage_stats=True)


def sampling_params(
    request: GenerationRequest, welcome: Welcome, options: ServeOptions, **chosen: Any
) -> SamplingParams:
    """A request's SamplingParams, frozen, with the model's defaults for omitted fields. Raises ApiError,
    InvalidRequestError.

    chosen: values of fields that the two APIs name differently.
    """
    _check_limits(request, options)
    if getattr(request, "logprob_token_ids", None):
        if chosen.get("logprobs") is None:
            raise bad_field(
                "logprob_token_ids", "logprob_token_ids needs logprobs: give it, too, when using `logprob_token_ids`"
            )
        chosen["logprobs"] = None  # these tokens replace a number of top tokens
    asked: dict[str, Any] = {"max_tokens": None, **welcome.generation_defaults}
    for name in _PASSED_ON:
        if (value := getattr(request, name)) is not None:
            asked[name] = value
    if request.logit_bias is not None:
        asked["logit_bias"] = openai_bias(request.logit_bias)
    if request.vllm_xargs:
        asked["extra_args"] = request.vllm_xargs
    for name, value in chosen.items():
        if value is not None:
            asked[name] = value
    if "stop_token_ids" in welcome.generation_defaults:
        always: Any = welcome.generation_defaults["stop_token_ids"]
        asked["stop_token_ids"] = [*(getattr(request, "stop_token_ids", None) or ()), *always]
    asked["output_kind"] = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    try:
        params = SamplingParams(**asked)
        if (most := welcome.most_new_tokens) is not None and (params.max_tokens is None or params.max_tokens > most):
            params = SamplingParams(**{**asked, "max_tokens": most, "min_tokens": min(params.min_tokens, most)})
        return params.freeze()
    except InvalidRequestError as error:
        raise respelt(error, SPELLINGS) from error


def _check_limits(request: GenerationRequest, options: ServeOptions) -> None:
    """Raises ApiError for more outputs or stop strings than the server's options allow."""
    if request.stream_options is not None and not request.stream:
        raise bad_field("stream_options", "Stream options can only be defined when `stream=True` (stream: true)")
    if request.n is not None and request.n > options.max_n:
        raise bad_field("n", f"n is {request.n}; this server gives at most {options.max_n} outputs for a prompt")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > options.max_stop_strings:
        raise bad_field("stop", f"stop has {len(stops)} strings; this server takes at most {options.max_stop_strings}")
    for stop in stops:
        if len(stop) > MAX_STOP_CHARACTERS:
            raise bad_field("stop", f"a stop string is longer than {MAX_STOP_CHARACTERS} characters")


def check_outputs(num_prompts: int, n: int, params: SamplingParams) -> None:
    """Raises ApiError for too many outputs, or for fields that are too large, since each output has its own copy."""
    num_outputs = num_prompts * n
    if num_outputs > MAX_OUTPUTS:
        raise bad_field("n", f"{num_prompts} prompts times n = {n} are more than {MAX_OUTPUTS} outputs")
    form, arguments = params.structured_outputs, params.extra_args
    sizes: list[tuple[str, str, int, int]] = []
    for name in _RULES:
        if rules := getattr(params, name):
            sizes.append((name, "entries", len(rules), MAX_TOKEN_RULES))
    if params.bad_words:
        sizes.append(("bad_words", "characters", sum(map(len, params.bad_words)), MAX_TOKEN_RULES))
    if form:
        sizes.append(("structured_outputs", "characters", len(form.to_wire().text), MOST_CARRIED_BYTES))
    if arguments:
        sizes.append(("vllm_xargs", "bytes", len(msgspec.msgpack.encode(arguments)), MOST_CARRIED_BYTES))
    for name, unit, size, most in sizes:
        if size > 1 and num_outputs * size > most:
            raise bad_field(name, f"{name} has {size} {unit} for {num_outputs} outputs; together they may be {most}")


def thinking_budget(request: GenerationRequest, prompt: Prompt, welcome: Welcome) -> int | None:
    """The request's limit of reasoning tokens. Its thinking_budget counts where the reasoning can be told apart."""
    own: int | None = getattr(request, "thinking_token_budget", None)
    if own is not None or request.thinking_budget is None or not reads_reasoning(prompt, welcome):
        return own
    return request.thinking_budget
