"""Checks of `n`, `best_of` and `use_beam_search`, and the selection of outputs that they ask for."""

from __future__ import annotations

import types

from headrace.frontend.api.beam_search import BeamSearchParams, check_width
from headrace.frontend.http.apis.openai.requests import CompletionRequest, GenerationRequest
from headrace.frontend.http.server.errors import bad_field
from headrace.frontend.http.server.selection import OutputSelection
from headrace.frontend.request.parameters.sampling_params import FIELDS, GREEDY_BELOW, SamplingParams
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Welcome

BEAMS_READ = frozenset(
    {
        *("n", "temperature", "seed", "max_tokens", "ignore_eos", "include_stop_str_in_output", "detokenize"),
        *("skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "stream_interval"),
        *("skip_reading_prefix_cache", "logprobs"),
    }
)
"""Fields that a beam search reads, or that cannot change its result. Others are refused."""


_ALSO_UNREAD = types.MappingProxyType(
    {"structured_outputs": "structured_outputs", "extra_args": "vllm_xargs", "prompt_logprobs": "prompt_logprobs"}
)
"""Fields of SamplingParams that a beam search refuses, and the body's fields that set them."""


def outputs_of(request: GenerationRequest) -> int:
    """How many outputs are returned for a prompt."""
    return 1 if request.n is None else request.n


def width_of(request: GenerationRequest) -> int:
    """How many outputs, or beams, are computed for a prompt."""
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    return outputs_of(request) if best_of is None else best_of


def drop_needless_outputs(request: CompletionRequest, welcome: Welcome) -> None:
    """Drops best_of under greedy sampling, where all outputs are the same."""
    temperature = getattr(request, "temperature", None)
    if temperature is None:
        temperature = welcome.generation_defaults.get("temperature", FIELDS["temperature"].default)
    if temperature < GREEDY_BELOW and not request.use_beam_search and width_of(request) > outputs_of(request):
        request.best_of = None


def check_selection(request: GenerationRequest, most: int) -> None:
    """Checks n, best_of and beam search together. Raises ApiError. most: the server's limit per prompt (max_n)."""
    num_outputs, width = outputs_of(request), width_of(request)
    if num_outputs > width:
        raise bad_field("best_of", f"best_of is {width}, less than n, {num_outputs}")
    if width > max(most, num_outputs):
        raise bad_field(
            "best_of",
            f"best_of is {width}; this server computes at most {most} outputs for a prompt (its option max_n)",
        )
    if request.use_beam_search:
        return
    if request.length_penalty not in (None, 1.0):
        raise bad_field("length_penalty", "length_penalty needs use_beam_search: true")
    if width > num_outputs and request.stream:
        raise bad_field("best_of", "best_of over n cannot be streamed: which outputs are the best is known at the end")


def selection_of(
    request: GenerationRequest, params: SamplingParams, welcome: Welcome, form_field: str
) -> OutputSelection | None:
    """How outputs are chosen; None if all computed outputs are returned. Raises ApiError, which names the field.

    params: those of the request's prompts. form_field: the field that asks for structured output."""
    num_outputs, width = outputs_of(request), width_of(request)
    if not request.use_beam_search:
        return None if width == num_outputs else OutputSelection(num_outputs)
    _refuse_unread(request, params, form_field)
    if (params.logprobs or 0) > 2 * width:
        raise bad_field(
            "logprobs", f"logprobs is {params.logprobs}; a search with {width} beams knows the likeliest {2 * width}"
        )
    try:
        beams = BeamSearchParams(
            beam_width=width,
            max_tokens=params.max_tokens or welcome.max_model_len,
            ignore_eos=params.ignore_eos,
            temperature=params.temperature,
            length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
        check_width(beams, welcome)
    except InvalidRequestError as error:
        name = str(error).removeprefix("BeamSearchParams.").partition(" ")[0]
        field = {"beam_width": "n" if width == num_outputs else "best_of"}.get(name, name)
        raise bad_field(field, str(error).replace(f"BeamSearchParams.{name}", field, 1)) from error
    return OutputSelection(num_outputs, beams)


def _refuse_unread(request: GenerationRequest, params: SamplingParams, form_field: str) -> None:
    for declared in FIELDS.values():
        name = declared.name
        if name in BEAMS_READ or getattr(request, name, None) is None:
            continue
        if getattr(params, name) not in (declared.default, None, [], {}):
            raise bad_field(name, f"{name} does nothing with use_beam_search; leave it out")
    for name, asked in _ALSO_UNREAD.items():
        if getattr(params, name) is not None:
            if name == "structured_outputs":
                asked = form_field
            elif name == "prompt_logprobs" and request.prompt_logprobs is None:
                asked = "echo"  # with logprobs
            raise bad_field(asked, f"{asked} does nothing with use_beam_search; leave it out")
