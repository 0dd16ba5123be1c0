"""Structs of request bodies. A field is declared once: decoding, its checks and the OpenAPI document derive from it.

Ranges of sampling fields are declared by `SamplingParams`. None is the same as an omitted field. A field of the right
type has an effect, or is accepted because no answer depends on it, or is refused by name.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from headrace.frontend.fleet.decisions import ANYWHERE, Affinity
from headrace.frontend.http.server.adapters import AdapterScale
from headrace.frontend.http.server.decoding.decoder import MOST_MESSAGES
from headrace.frontend.http.server.decoding.foreign_fields import ANY, Neutral
from headrace.frontend.http.server.errors import bad_field
from headrace.frontend.request.parameters.sampling_fields import body_fields
from headrace.frontend.request.parameters.sampling_params import FIELDS, NOT_SUPPORTED
from headrace.frontend.request.parameters.sampling_params import NEUTRAL as NEUTRAL_PARAMS

T = TypeVar("T")
# Bounds of lists that are processed item by item. Lists of token ids have only the body's (exchange.check_num_values).
Few = Annotated[list[T], Meta(max_length=1024)]
Many = Annotated[list[T], Meta(max_length=MOST_MESSAGES)]
MOST_BIASES = 4096
"""Most entries of logit_bias. OpenAI accepts 300; each costs some microseconds of the event loop."""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]

# Types of the fields that determine how a conversation becomes a prompt.
GenerationPrompt = Annotated[
    bool | None,
    Meta(
        description="Add the template's generation prompt, which begins the assistant's message; default: "
        "true unless continue_final_message"
    ),
]
ContinueFinal = Annotated[bool | None, Meta(description="Continue the last message instead of beginning a new one")]
Template = Annotated[
    str | None,
    Meta(
        description="Name of one of the model's chat templates, or a template's text if the server has "
        "--trust-request-chat-template"
    ),
]
Thinking = Annotated[bool | None, Meta(description="Sets enable_thinking in the chat template")]
TemplateVariables = Annotated[dict[str, Any] | None, Meta(description="Additional variables for the chat template")]
ReasoningEffort = Annotated[
    Effort | None,
    Meta(description="Sets reasoning_effort in the chat template; none also sets enable_thinking to false"),
]
VerbosityOfAnswer = Annotated[Verbosity | None, Meta(description="The template's variable of that name")]
Documents = Annotated[Few[dict[str, Any]] | None, Meta(description="Passed to the chat template")]
SpecialTokens = Annotated[bool | None, Meta(description="Add special tokens such as BOS to the prompt")]
Tools = Annotated[Few[dict[str, Any]] | None, Meta(description="Passed to the chat template")]
Choice = Annotated[
    str | dict[str, Any] | None, Meta(description="none, auto, required, or the tool that must be called")
]
WithReasoning = Annotated[bool | None, Meta(description="Return the reasoning; default: true")]
ParallelCalls = Annotated[
    bool | None, Meta(description="Allow several tool calls in one answer; false returns only the first; default: true")
]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: Annotated[bool, Meta(description="End the stream with an event that has the usage")] = False
    continuous_usage_stats: Annotated[bool, Meta(description="Include the usage so far in every event")] = False
    include_obfuscation: Annotated[bool | None, Meta(description="Accepted without effect: events are not padded")] = (
        None
    )


class SharedFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of all generating routes that SamplingParams lacks, or declares in another form."""

    model: Annotated[str | None, Meta(description="A served model, see GET /v1/models; default: the first of them")] = (
        None
    )
    logit_bias: Annotated[
        Annotated[dict[str, float], Meta(max_length=MOST_BIASES)] | None,
        Meta(description="By token id, the value from -100 to 100 that is added to its logit"),
    ] = None
    stop: Annotated[
        str | list[str] | None, Meta(description="Strings that stop the generation; the output does not contain them")
    ] = None
    stream: Annotated[
        bool | None, Meta(description="Stream the answer as server-sent events while it is generated")
    ] = None
    stream_options: StreamOptions | None = None
    priority: Annotated[
        int | None, Meta(description="Scheduling priority, lower values first; needs --scheduling-policy priority")
    ] = None
    data_parallel_rank: Annotated[
        int | None,
        Meta(
            description="Rank of the data parallel engine that runs the request; also the header X-data-parallel-rank"
        ),
    ] = None
    prompt_cache_key: Annotated[
        str | None,
        Meta(
            description="Requests with the same key prefer the same data parallel engine, whose cache has their prefix"
        ),
    ] = None
    cache_salt: Annotated[
        str | None, Meta(description="Cached prefixes are shared only among requests with the same salt")
    ] = None
    lora: Annotated[
        Few[AdapterScale] | None,
        Meta(description="llama.cpp's: LoRA adapters by their ids in GET /lora-adapters, each with a scale"),
    ] = None
    request_id: Annotated[str | None, Meta(description="Id of the request; also the header X-Request-Id")] = None
    vllm_xargs: Annotated[
        dict[str, Any] | None, Meta(description="Arguments for the engine's custom logits processors")
    ] = None
    structured_outputs: Annotated[
        dict[str, Any] | None,
        Meta(description="Constraint on the output: json, regex, choice, grammar, json_object or structural_tag"),
    ] = None
    thinking_budget: Annotated[
        int | None,
        Meta(
            description="The same as thinking_token_budget, but without effect if the model's reasoning format "
            "is unknown"
        ),
    ] = None


class GenerationFields(SharedFields, kw_only=True):
    """Further fields of completions and chat completions."""

    n: Annotated[int | None, Meta(description="Number of outputs for each prompt")] = None
    max_tokens: Annotated[int | None, Meta(description="Maximum number of tokens to generate")] = None
    prompt_logprobs: Annotated[
        int | None,
        Meta(
            description="Number of most likely tokens whose log-probabilities are returned per prompt token; -1 "
            "returns all"
        ),
    ] = None
    response_format: Annotated[
        dict[str, Any] | None,
        Meta(description="OpenAI's constraint on the output: {type: text, json_object or json_schema, ...}"),
    ] = None
    guided_json: Annotated[str | dict[str, Any] | None, Meta(description="Deprecated: use structured_outputs.json")] = (
        None
    )
    guided_regex: Annotated[str | None, Meta(description="Deprecated: use structured_outputs.regex")] = None
    guided_choice: Annotated[list[str] | None, Meta(description="Deprecated: use structured_outputs.choice")] = None
    guided_grammar: Annotated[str | None, Meta(description="Deprecated: use structured_outputs.grammar")] = None
    guided_json_object: Annotated[bool | None, Meta(description="Deprecated: use structured_outputs.json_object")] = (
        None
    )
    guided_whitespace_pattern: Annotated[
        str | None, Meta(description="Deprecated: use structured_outputs.whitespace_pattern")
    ] = None
    guided_decoding_backend: Annotated[str | None, Meta(description="Deprecated: use structured_outputs.backend")] = (
        None
    )
    structural_tag: Annotated[
        str | dict[str, Any] | None, Meta(description="Deprecated: use structured_outputs.structural_tag")
    ] = None
    use_beam_search: Annotated[
        bool | None,
        Meta(description="Return the n best sequences of a beam search; the number of beams is n, or best_of"),
    ] = None
    length_penalty: Annotated[
        float | None,
        Meta(description="Beam search: above 1 prefers longer sequences, below 1 shorter ones; default: 1"),
    ] = None
    add_special_tokens: SpecialTokens = None
    return_token_ids: Annotated[bool | None, Meta(description="Return token ids besides the text")] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, Meta(description="Write tokens in log-probabilities as token_id:ID")
    ] = None


if TYPE_CHECKING:
    GenerationRequest = GenerationFields
else:
    GenerationRequest = msgspec.defstruct(
        "GenerationRequest",
        body_fields(FIELDS, GenerationFields.__struct_fields__),
        bases=(GenerationFields,),
        module=__name__,
        kw_only=True,
        forbid_unknown_fields=True,
    )
    """GenerationFields, and the fields of SamplingParams (`Field.in_body`)."""


NO_PROMPT = "Either prompt or prompt_embeds must be provided and non-empty."
"""vLLM's words, which clients written for it look for."""


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    prompt: Annotated[
        str | list[str | int | list[int]] | None, Meta(description="A text, a list of token ids, or a list of either")
    ] = None
    prompt_embeds: Annotated[
        str | list[str] | None,
        Meta(description="Prompts as embeddings: base64 of files written by torch.save or safetensors"),
    ] = None
    echo: Annotated[bool | None, Meta(description="Begin the output with the prompt")] = None
    best_of: Annotated[
        int | None, Meta(description="Number of outputs (or beams) to compute, of which the n best are returned")
    ] = None
    logprobs: Annotated[
        int | bool | None,
        Meta(
            description="Number of most likely tokens whose log-probabilities are returned per output token, "
            "besides the sampled token's own; true is 1"
        ),
    ] = None

    def __post_init__(self) -> None:
        if isinstance(self.logprobs, bool):
            self.logprobs = 1 if self.logprobs else None

    @staticmethod
    def check_fields(fields: Mapping[str, Any]) -> None:
        """Raises ApiError for a body without a prompt."""
        if fields.get("prompt") is None and not fields.get("prompt_embeds"):
            param = "prompt" if fields.get("prompt_embeds") is None else "prompt_embeds"
            raise bad_field(param, f"{param} is required. {NO_PROMPT}", "missing_required_parameter")


class ChatMessage(msgspec.Struct, kw_only=True):
    """Unknown fields of a message are treated as those of a body: see `RequestDecoder`."""

    unread: ClassVar[tuple[str, ...]] = ("id", "cache_control")
    """Fields that are accepted and not read."""

    role: str
    content: Annotated[
        str | Many[str | dict[str, Any]] | None, Meta(description="A text, or parts like {type: text, text: ...}")
    ] = None
    name: str | None = None
    tool_calls: Few[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_text: str | None = None
    refusal: Annotated[str | None, Meta(description="The assistant's refusal, in place of content")] = None
    # Clients send an assistant's message back as they received it, with these fields, which have no effect.
    annotations: Few[Any] | None = None
    audio: None = None
    function_call: None = None
    # Fields that clients store with a message, or that are hints to other servers.
    id: Annotated[Any, Meta(description="Accepted without effect")] = None
    cache_control: Annotated[Any, Meta(description="Accepted without effect: equal prefixes are cached without it")] = (
        None
    )


def one_of(kind: Any, where: str, value: Any) -> Any:
    """Returns a value that must be None or one of a Literal's values. Raises ApiError, which names `where`."""
    values = typing.get_args(kind)
    if value is not None and value not in values:
        raise bad_field(where, f"{where} must be one of {', '.join(values)}")
    return value


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions"""

    message_kind: ClassVar[type[msgspec.Struct]] = ChatMessage
    """The struct of a message; its unknown fields are treated as those of the body."""

    messages: Many[ChatMessage]
    max_completion_tokens: Annotated[int | None, Meta(description="Maximum number of tokens to generate")] = None
    logprobs: Annotated[bool | None, Meta(description="Return the log-probabilities of the output tokens")] = None
    top_logprobs: Annotated[
        int | None, Meta(description="Number of most likely tokens to return per output token; needs logprobs: true")
    ] = None
    echo: Annotated[
        bool | None, Meta(description="Begin the answer with the last message, if that has the answer's role")
    ] = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: ContinueFinal = None
    chat_template: Template = None
    chat_template_kwargs: TemplateVariables = None
    enable_thinking: Thinking = None
    reasoning_effort: ReasoningEffort = None
    verbosity: VerbosityOfAnswer = None
    tools: Tools = None
    tool_choice: Choice = None
    parallel_tool_calls: ParallelCalls = None
    include_reasoning: WithReasoning = None
    documents: Documents = None
    return_prompt_text: Annotated[
        bool | None, Meta(description="Return the prompt's text, as the chat template rendered it")
    ] = None


class ChatBatchRequest(ChatCompletionRequest):
    """POST /v1/chat/completions/batch"""

    messages: Annotated[  # type: ignore[assignment]
        Many[Many[ChatMessage]], Meta(description="Conversations, each of which is answered by one choice")
    ]


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: tokenises a text, or the prompt of a conversation."""

    message_kind: ClassVar[type[msgspec.Struct]] = ChatMessage

    model: str | None = None
    prompt: str | None = None
    messages: Many[ChatMessage] | None = None
    add_special_tokens: Annotated[bool | None, Meta(description="Default: true for a text, false for messages")] = None
    return_token_strs: bool | None = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: ContinueFinal = None
    chat_template: Template = None
    chat_template_kwargs: TemplateVariables = None
    enable_thinking: Thinking = None
    reasoning_effort: ReasoningEffort = None
    verbosity: VerbosityOfAnswer = None
    documents: Documents = None
    tools: Tools = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize"""

    tokens: list[int]
    model: str | None = None


_TEXT_ONLY = "models read and write text alone"
_STORED = "nothing is stored by this server"
_OWN_CACHE = "an engine keeps its cache to itself"

RANK_HEADER = b"x-data-parallel-rank"


def take_rank(request: SharedFields, header: str | None) -> None:
    """Sets data_parallel_rank from the header if the body lacks it. Raises ApiError for an invalid header."""
    if header is None or request.data_parallel_rank is not None:
        return
    if not header.isdecimal() or len(header) > 9:
        raise bad_field("data_parallel_rank", f"the header X-data-parallel-rank is {header!r:.40}, which is no rank")
    request.data_parallel_rank = int(header)


def affinity_of(request: SharedFields) -> Affinity:
    """The engine that a request asks for or prefers."""
    if request.data_parallel_rank is None and request.prompt_cache_key is None:
        return ANYWHERE
    return Affinity(session=request.prompt_cache_key or "", rank=request.data_parallel_rank)


_ONLY_PYTHONS = types.MappingProxyType({"extra_args": "bodies have vllm_xargs, which is the same"})
NEUTRAL: Mapping[str, Neutral] = types.MappingProxyType(
    {
        **{
            name: Neutral(_ONLY_PYTHONS.get(name, "a field of SamplingParams in Python alone"), (FIELDS[name].default,))
            for name in FIELDS
            if not FIELDS[name].field.in_body and name != "logprobs"
        },
        **{
            name: Neutral("not supported by this version", NEUTRAL_PARAMS.get(name, ()))
            for name in NOT_SUPPORTED
            if name not in CompletionRequest.__struct_fields__
        },
        "user": Neutral("names the end user for abuse reports; nothing depends on it", (ANY,)),
        "safety_identifier": Neutral("names the end user for abuse reports; nothing depends on it", (ANY,)),
        "metadata": Neutral("labels stored completions, and none are stored", (ANY,)),
        "prompt_cache_retention": Neutral("a hint; what is cached stays as long as there is room", is_harmless=True),
        "store": Neutral(_STORED, (False,), is_harmless=True),
        "service_tier": Neutral("there is one tier", ("auto", "default"), is_harmless=True),
        "access_programs": Neutral("there are none", ({}, []), is_harmless=True),
        "early_stopping": Neutral("as in vLLM, a search goes on until max_tokens or the last beam's end", (False,)),
        "logits_processors": Neutral("code in requests is not supported", ([],)),
        "prompt_embeds": Neutral("of completions; a message has parts of type prompt_embeds", ([],)),
        "mm_processor_kwargs": Neutral(_TEXT_ONLY),
        "media_io_kwargs": Neutral(_TEXT_ONLY, ({},)),
        "mm_payload": Neutral(_TEXT_ONLY, ("none",)),
        # vLLM reads these on the routes that render prompts, which are not served.
        "return_mm_kwargs": Neutral(_TEXT_ONLY, (ANY,)),
        "return_token_offsets": Neutral(
            "of routes that render prompts; POST /tokenize gives a prompt's tokens", (False,)
        ),
        "kv_transfer_params": Neutral(_OWN_CACHE, ({},)),
        "ec_transfer_params": Neutral(_OWN_CACHE, ({},)),
        "previous_input_messages": Neutral("give the earlier items as input, or previous_response_id", ([],)),
        "previous_response": Neutral("give the earlier items as input, or previous_response_id"),
        "enable_response_messages": Neutral("a response has items, and no messages besides", (False,)),
        "prediction": Neutral("a hint; an answer that is known in part comes no faster", is_harmless=True),
    }
)
CHAT_NEUTRAL: Mapping[str, Neutral] = types.MappingProxyType(
    {
        **NEUTRAL,
        "best_of": Neutral("not part of chat completions; use n", (1,)),
        "functions": Neutral("retired by OpenAI; use tools", ([],)),
        "function_call": Neutral("retired by OpenAI; use tools", ("none",)),
        "modalities": Neutral(_TEXT_ONLY, (["text"],)),
        "audio": Neutral(_TEXT_ONLY),
        "moderation": Neutral("not supported: no text is moderated"),
        "prompt_cache_options": Neutral("a hint; equal prefixes are cached without one", is_harmless=True),
        "web_search_options": Neutral("not supported: the server searches nothing; give what was found as messages"),
    }
)
COMPLETION_NEUTRAL: Mapping[str, Neutral] = types.MappingProxyType(
    {**NEUTRAL, "suffix": Neutral("filling in the middle is not supported; give a prompt alone", ("",))}
)
