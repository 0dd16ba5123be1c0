"""The request of OpenAI's Responses API: its fields, and what is known of those that it lacks."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from headrace.frontend.http.apis.openai.requests import (
    CHAT_NEUTRAL,
    NEUTRAL,
    Choice,
    Few,
    GenerationFields,
    Many,
    ParallelCalls,
    SharedFields,
    TemplateVariables,
    Thinking,
    WithReasoning,
)
from headrace.frontend.http.server.decoding.foreign_fields import Neutral
from headrace.frontend.request.parameters.sampling_fields import body_fields
from headrace.frontend.request.parameters.sampling_params import FIELDS
from headrace.frontend.request.parameters.structured_outputs import RETIRED


class ResponsesFields(SharedFields, kw_only=True):
    """Fields of OpenAI's Responses API, besides those of SamplingParams."""

    inner_fields: ClassVar[Mapping[str, tuple[str, ...]]] = types.MappingProxyType(
        {"text": ("format", "verbosity"), "reasoning": ("effort", "summary", "generate_summary", "context", "mode")}
    )
    """By field that is an object, the fields in it; others are refused."""
    own_names: ClassVar[Mapping[str, str]] = types.MappingProxyType({"max_tokens": "max_output_tokens"})

    input: Annotated[
        str | Many[dict[str, Any]],
        Meta(description="A text, or a list of items: messages, tool calls and their outputs"),
    ]
    instructions: Annotated[str | None, Meta(description="System message that is inserted before the conversation")] = (
        None
    )
    previous_response_id: Annotated[
        str | None, Meta(description="Id of the stored response that this one continues")
    ] = None
    max_output_tokens: Annotated[
        int | None, Meta(description="Maximum number of tokens to generate, including reasoning")
    ] = None
    tools: Annotated[Few[dict[str, Any]] | None, Meta(description="Tools that the model may call")] = None
    tool_choice: Choice = None
    parallel_tool_calls: ParallelCalls = None
    max_tool_calls: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Maximum number of tool calls that the server itself carries out"),
    ] = None
    text: Annotated[
        dict[str, Any] | None, Meta(description="{format: {type: text, json_object or json_schema, ...}}")
    ] = None
    reasoning: Annotated[dict[str, Any] | None, Meta(description="{effort: ...}, for chat templates that read it")] = (
        None
    )
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        Meta(
            description="auto: drop the oldest turns if the conversation does not fit into the context; "
            "disabled: refuse it"
        ),
    ] = None
    include: Annotated[Few[str] | None, Meta(description="Additional data to return, such as log-probabilities")] = None
    top_logprobs: Annotated[
        int | None,
        Meta(description="Number of most likely tokens whose log-probabilities are returned per output token"),
    ] = None
    store: Annotated[
        bool | None, Meta(description="Store the response, so that it can be retrieved and continued by its id")
    ] = None
    background: Annotated[bool | None, Meta(description="Return at once, and generate in the background")] = None
    metadata: Annotated[
        Annotated[dict[str, str], Meta(max_length=16)] | None, Meta(description="Returned with the response")
    ] = None
    user: Annotated[str | None, Meta(description="Returned with the response")] = None
    include_reasoning: WithReasoning = None
    chat_template_kwargs: TemplateVariables = None
    enable_thinking: Thinking = None


if TYPE_CHECKING:
    ResponsesRequest = ResponsesFields
else:
    ResponsesRequest = msgspec.defstruct(
        "ResponsesRequest",
        body_fields(FIELDS, (*ResponsesFields.__struct_fields__, *GenerationFields.__struct_fields__)),
        bases=(ResponsesFields,),
        module=__name__,
        kw_only=True,
        forbid_unknown_fields=True,
    )
    """POST /v1/responses"""

_BEAMS = "responses are sampled; completions and chat completions have use_beam_search"
NOT_SUPPORTED: Mapping[str, Neutral] = types.MappingProxyType(
    {name: NEUTRAL[name] for name in NEUTRAL if name not in ResponsesFields.__struct_fields__}
    | {
        "use_beam_search": Neutral(_BEAMS, (False,)),
        "length_penalty": Neutral(_BEAMS, (1.0,)),
        "messages": Neutral("responses have input"),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), Neutral("responses have max_output_tokens")),
        "response_format": Neutral("responses have text.format"),
        **dict.fromkeys(RETIRED, Neutral("retired; responses have text.format and structured_outputs", (False,))),
        "prompt_cache_options": CHAT_NEUTRAL["prompt_cache_options"],
        "conversation": Neutral("conversations are not kept as such; use previous_response_id"),
        "prompt": Neutral("templates of prompts are kept by OpenAI; give input and instructions"),
        "context_management": Neutral("not supported; truncation: auto drops the oldest turns"),
        "moderation": CHAT_NEUTRAL["moderation"],
        "background_options": Neutral("responses in the background begin at once", is_harmless=True),
    }
)
