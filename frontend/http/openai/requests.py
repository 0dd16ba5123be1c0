"""Structs of request bodies. A field is declared once: decoding, its checks and the OpenAPI document derive from it.

Ranges of sampling fields are declared by `SamplingParams`. None is the same as an omitted field. A field of the right
type has an effect, or is accepted because no answer depends on it, or is refused by name.
"""

from __future__ import annotations

import difflib
import logging
import re
import types
import typing
import urllib.parse
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from headrace.frontend.api.parameters.sampling_fields import body_fields
from headrace.frontend.api.parameters.sampling_params import FIELDS, NOT_SUPPORTED, OTHER_NAMES
from headrace.frontend.api.parameters.sampling_params import NEUTRAL as NEUTRAL_PARAMS
from headrace.frontend.fleet.decisions import ANYWHERE, Affinity
from headrace.frontend.http.errors import LONGEST_PARAM, ApiError, bad_field, shortened
from headrace.frontend.http.large_lists import decode_json
from headrace.ipc.failure import InvalidRequestError

T = TypeVar("T")
# Bounds of lists that are processed item by item. Lists of token ids have only the body's (exchange.check_shape).
Few = Annotated[list[T], Meta(max_length=1024)]
MOST_MESSAGES = 16384
Many = Annotated[list[T], Meta(max_length=MOST_MESSAGES)]
MOST_BIASES = 4096
"""Most entries of logit_bias. OpenAI accepts 300; each costs some microseconds of the event loop."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: Annotated[bool, Meta(description="End the stream with an event that counts its tokens")] = False
    continuous_usage_stats: Annotated[bool, Meta(description="Count the tokens so far in every event")] = False
    include_obfuscation: Annotated[bool | None, Meta(description="Taken, and not read: events are not padded")] = None


class SharedFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of all generating routes that SamplingParams lacks, or declares in another form."""

    model: Annotated[str | None, Meta(description="One of /v1/models; the first of them when left out")] = None
    logit_bias: Annotated[
        Annotated[dict[str, float], Meta(max_length=MOST_BIASES)] | None,
        Meta(description="Token id: -100 to 100, added to its logit"),
    ] = None
    stop: Annotated[str | list[str] | None, Meta(description="Texts that end the output, and are not in it")] = None
    stream: Annotated[bool | None, Meta(description="Send the answer as server-sent events while it grows")] = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int | None, Meta(description="Smaller is sooner, under the policy `priority`")] = None
    data_parallel_rank: Annotated[
        int | None, Meta(description="Which of several engines begins it; also the header X-data-parallel-rank")
    ] = None
    prompt_cache_key: Annotated[
        str | None,
        Meta(description="Of several engines, requests of one key prefer one, which has their prefix cached"),
    ] = None
    cache_salt: Annotated[str | None, Meta(description="Cached prefixes are shared only under the same salt")] = None
    request_id: Annotated[str | None, Meta(description="Name of the request; also the header X-Request-Id")] = None
    vllm_xargs: Annotated[dict[str, Any] | None, Meta(description="What the engine's logits processors read")] = None


class GenerationFields(SharedFields, kw_only=True):
    """Further fields of completions and chat completions."""

    n: Annotated[int | None, Meta(description="Outputs for each prompt")] = None
    max_tokens: Annotated[int | None, Meta(description="Most tokens to generate")] = None
    prompt_logprobs: Annotated[int | None, Meta(description="Likeliest tokens to report per prompt token")] = None
    structured_outputs: Annotated[
        dict[str, Any] | None,
        Meta(description="The form of the output: json, regex, choice, grammar, json_object or structural_tag"),
    ] = None
    response_format: Annotated[
        dict[str, Any] | None, Meta(description="The same as OpenAI has it: text, json_object or json_schema")
    ] = None
    guided_json: Annotated[str | dict[str, Any] | None, Meta(description="structured_outputs.json, retired")] = None
    guided_regex: Annotated[str | None, Meta(description="structured_outputs.regex, retired")] = None
    guided_choice: Annotated[list[str] | None, Meta(description="structured_outputs.choice, retired")] = None
    guided_grammar: Annotated[str | None, Meta(description="structured_outputs.grammar, retired")] = None
    guided_json_object: Annotated[bool | None, Meta(description="structured_outputs.json_object, retired")] = None
    guided_whitespace_pattern: Annotated[
        str | None, Meta(description="structured_outputs.whitespace_pattern, retired")
    ] = None
    guided_decoding_backend: Annotated[str | None, Meta(description="structured_outputs.backend, retired")] = None
    structural_tag: Annotated[
        str | dict[str, Any] | None, Meta(description="structured_outputs.structural_tag, retired")
    ] = None
    use_beam_search: Annotated[
        bool | None, Meta(description="Give the n likeliest continuations that a search with so many beams finds")
    ] = None
    length_penalty: Annotated[
        float | None, Meta(description="Of beams: over 1 prefers longer ones, below 1 shorter ones; default: 1")
    ] = None
    add_special_tokens: Annotated[bool | None, Meta(description="Add special tokens to the prompt, such as BOS")] = None
    return_token_ids: Annotated[bool | None, Meta(description="Give token ids besides the text")] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, Meta(description="Spell tokens in logprobs as token_id:NUMBER")
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


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    prompt: Annotated[
        str | list[str | int | list[int]],
        Meta(description="A text, a list of token ids, or a list of either"),
    ]
    echo: Annotated[bool | None, Meta(description="Begin the output with the prompt")] = None
    best_of: Annotated[
        int | None, Meta(description="Compute so many outputs, or beams, and give the n best of them")
    ] = None
    logprobs: Annotated[
        int | bool | None, Meta(description="Likeliest tokens to report per token, besides its own; true is 1")
    ] = None

    def __post_init__(self) -> None:
        if isinstance(self.logprobs, bool):
            self.logprobs = 1 if self.logprobs else None


class ChatMessage(msgspec.Struct, kw_only=True):
    """Unknown fields of a message are treated as those of a body: see `RequestDecoder`."""

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
    refusal: Annotated[str | None, Meta(description="What an assistant said in the place of content")] = None
    # Clients send an assistant's message back as they received it, with these fields, which have no effect.
    annotations: Few[Any] | None = None
    audio: None = None
    function_call: None = None
    # Fields that clients store with a message, or that are hints to other servers.
    id: Annotated[Any, Meta(description="Taken, and not read")] = None
    cache_control: Annotated[Any, Meta(description="Taken, and not read: equal prefixes are cached without it")] = None


UNREAD_IN_MESSAGES = ("id", "cache_control")


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


def one_of(kind: Any, where: str, value: Any) -> Any:
    """Returns a value that must be None or one of a Literal's values. Raises ApiError, which names `where`."""
    values = typing.get_args(kind)
    if value is not None and value not in values:
        raise bad_field(where, f"{where} must be one of {', '.join(values)}")
    return value


# Types of the fields that determine how a conversation becomes a prompt.
GenerationPrompt = Annotated[bool | None, Meta(description="Begin an answer; default: unless continue_final_message")]
ContinueFinal = Annotated[bool | None, Meta(description="Go on with the last message")]
Template = Annotated[str | None, Meta(description="A template's name or, where the server trusts requests, its text")]
Thinking = Annotated[bool | None, Meta(description="The template's variable enable_thinking")]
TemplateVariables = Annotated[dict[str, Any] | None, Meta(description="What else the template sees")]
Tools = Annotated[Few[dict[str, Any]] | None, Meta(description="Passed to the template")]
Choice = Annotated[str | dict[str, Any] | None, Meta(description="none, auto, required, or which of the tools")]
ParallelCalls = Annotated[bool | None, Meta(description="False: only the first call is answered")]


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions"""

    messages: Many[ChatMessage]
    max_completion_tokens: Annotated[int | None, Meta(description="Most tokens to generate")] = None
    logprobs: Annotated[bool | None, Meta(description="Report log-probabilities")] = None
    top_logprobs: Annotated[int | None, Meta(description="Likeliest tokens to report, with logprobs")] = None
    echo: Annotated[
        bool | None, Meta(description="Begin the answer with the last message, where that has the answer's role")
    ] = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: ContinueFinal = None
    chat_template: Template = None
    chat_template_kwargs: TemplateVariables = None
    enable_thinking: Thinking = None
    reasoning_effort: Annotated[
        Effort | None,
        Meta(description="The template's variable of that name; none also sets enable_thinking to false"),
    ] = None
    verbosity: Annotated[Verbosity | None, Meta(description="The template's variable of that name")] = None
    tools: Tools = None
    tool_choice: Choice = None
    parallel_tool_calls: ParallelCalls = None
    include_reasoning: Annotated[bool | None, Meta(description="False: the reasoning is left out")] = None
    documents: Annotated[Few[dict[str, Any]] | None, Meta(description="Passed to the template")] = None


class ChatBatchRequest(ChatCompletionRequest):
    """POST /v1/chat/completions/batch"""

    messages: Annotated[  # type: ignore[assignment]
        Many[Many[ChatMessage]], Meta(description="Conversations, each of which gets one choice")
    ]


class ResponsesFields(SharedFields, kw_only=True):
    """Fields of OpenAI's Responses API, besides those of SamplingParams."""

    input: Annotated[str | Many[dict[str, Any]], Meta(description="A text, or items: messages, calls, their outputs")]
    instructions: Annotated[str | None, Meta(description="A system message before all else")] = None
    previous_response_id: Annotated[str | None, Meta(description="The stored response that this one follows")] = None
    max_output_tokens: Annotated[int | None, Meta(description="Most tokens to generate, reasoning included")] = None
    tools: Annotated[Few[dict[str, Any]] | None, Meta(description="Functions that the model may call")] = None
    tool_choice: Choice = None
    parallel_tool_calls: ParallelCalls = None
    max_tool_calls: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Most calls that the server itself carries out")
    ] = None
    text: Annotated[
        dict[str, Any] | None, Meta(description="{format: {type: text, json_object or json_schema, ...}}")
    ] = None
    reasoning: Annotated[dict[str, Any] | None, Meta(description="{effort: ...}, for templates that read it")] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None, Meta(description="auto: the oldest turns are dropped where they do not fit")
    ] = None
    include: Annotated[Few[str] | None, Meta(description="What else to give, such as log-probabilities")] = None
    top_logprobs: Annotated[int | None, Meta(description="Likeliest tokens to report with each")] = None
    store: Annotated[bool | None, Meta(description="Keep the response, to be read and followed by its id")] = None
    background: Annotated[bool | None, Meta(description="Answer at once, and generate meanwhile")] = None
    metadata: Annotated[
        Annotated[dict[str, str], Meta(max_length=16)] | None, Meta(description="Given back with the response")
    ] = None
    user: Annotated[str | None, Meta(description="Given back with the response")] = None
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


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: tokenises a text, or the prompt of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[ChatMessage] | None = None
    add_special_tokens: Annotated[bool | None, Meta(description="Default: true for a text, false for messages")] = None
    return_token_strs: bool | None = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: ContinueFinal = None
    chat_template: Template = None
    chat_template_kwargs: TemplateVariables = None
    tools: Tools = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize"""

    tokens: list[int]
    model: str | None = None


S = TypeVar("S", bound=msgspec.Struct)
logger = logging.getLogger(__name__)
ANY = object()
"""In `Neutral.values`: every value is accepted."""


class Neutral(msgspec.Struct, frozen=True):
    """A field of OpenAI's or vLLM's that is accepted at values without effect (`values`, or None), else refused."""

    reason: str
    values: tuple[Any, ...] = ()
    is_harmless: bool = False
    """No answer depends on the field: every value is accepted, unless the server is strict."""


_BEAMS = "responses are sampled; completions and chat completions have use_beam_search"
_TEXT_ONLY = "models read and write text alone"
_CACHED = "a hint; equal prefixes are cached without one"
_STORED = "nothing is stored by this server"
_NO_CONVERSATIONS = "conversations are not kept as such"

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
        "early_stopping": Neutral("as in vLLM, a search goes on until max_tokens or the last beam's end", (False,)),
        "logits_processors": Neutral("code in requests is not supported", ([],)),
        "prompt_embeds": Neutral("not supported yet; give text or token ids"),
        "mm_processor_kwargs": Neutral(_TEXT_ONLY),
        "kv_transfer_params": Neutral("an engine keeps its cache to itself"),
        "prediction": Neutral("a hint; an answer that is known in part comes no faster", is_harmless=True),
    }
)
_CHAT_NEUTRAL: Mapping[str, Neutral] = types.MappingProxyType(
    {
        **NEUTRAL,
        "best_of": Neutral("not part of chat completions; use n", (1,)),
        "functions": Neutral("retired by OpenAI; use tools", ([],)),
        "function_call": Neutral("retired by OpenAI; use tools", ("none",)),
        "modalities": Neutral(_TEXT_ONLY, (["text"],)),
        "audio": Neutral(_TEXT_ONLY),
        "moderation": Neutral("not supported: no text is moderated"),
        "prompt_cache_options": Neutral(_CACHED, is_harmless=True),
        "web_search_options": Neutral("not supported: the server searches nothing; give what was found as messages"),
    }
)
NEUTRAL_OF: Mapping[type[msgspec.Struct], Mapping[str, Neutral]] = types.MappingProxyType(
    {
        CompletionRequest: types.MappingProxyType(
            {**NEUTRAL, "suffix": Neutral("filling in the middle is not supported; give a prompt alone", ("",))}
        ),
        ChatCompletionRequest: _CHAT_NEUTRAL,
        ChatBatchRequest: _CHAT_NEUTRAL,
        ResponsesRequest: types.MappingProxyType(
            {name: NEUTRAL[name] for name in NEUTRAL if name not in ResponsesFields.__struct_fields__}
            | {
                "use_beam_search": Neutral(_BEAMS, (False,)),
                "length_penalty": Neutral(_BEAMS, (1.0,)),
                "messages": Neutral("responses have input"),
                **dict.fromkeys(("max_tokens", "max_completion_tokens"), Neutral("responses have max_output_tokens")),
                "response_format": Neutral("responses have text.format"),
                "prompt_cache_options": Neutral(_CACHED, is_harmless=True),
                "conversation": Neutral(f"{_NO_CONVERSATIONS}; use previous_response_id"),
                "prompt": Neutral("templates of prompts are kept by OpenAI; give input and instructions"),
                "context_management": Neutral("not supported; truncation: auto drops the oldest turns"),
                "moderation": _CHAT_NEUTRAL["moderation"],
            }
        ),
    }
)


class RequestDecoder:
    """Decodes bodies to request structs. All methods raise ApiError, which names the field.

    Fields that no answer depends on are accepted with any value. So are unknown fields, unless the name looks like a
    misspelt known one. `strict` refuses both.
    """

    def __init__(self, *, strict: bool, neutral: Mapping[type[msgspec.Struct], Mapping[str, Neutral]] = NEUTRAL_OF):
        """neutral: by kind of request, the fields that are accepted only at values without effect."""
        self._strict, self._neutral = strict, neutral
        self._ignored: set[str] = set()  # names that have been logged

    def decode(self, body: bytes, kind: type[S]) -> S:
        return self._request(_fields(body), kind)

    def decode_one_of(self, body: bytes, kinds: Mapping[str, type[S]]) -> S:
        """Decodes a body as the first kind whose key in `kinds` is a field of the body."""
        fields = _fields(body)
        kind = next((kinds[name] for name in kinds if name in fields), None)
        if kind is None:
            raise bad_field(next(iter(kinds)), f"the body must have {' or '.join(kinds)}", "missing_required_parameter")
        return self._request(fields, kind)

    def _request(self, fields: dict[str, Any], kind: type[S]) -> S:
        _take_neutral(fields, self._neutral.get(kind, {}), strict=self._strict)
        known = kind.__struct_fields__
        unknown = [name for name in fields if name not in known]
        for name in unknown:
            # Finding the closest known name is too slow to do for many fields.
            if self._strict or len(unknown) > _MOST_UNKNOWN or closest(name, known) is not None:
                raise _unknown(name, known)
            del fields[name]
            self._note_ignored(name)
        if kind in _OF_CHATS and isinstance(messages := fields.get("messages"), list):
            self._check_messages(messages)
        try:
            return msgspec.convert(fields, kind)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InvalidRequestError):
                raise ApiError.of(error.__cause__) from None
            found = error
            if not self._strict:
                try:
                    return msgspec.convert(fields, kind, strict=False)  # numbers may be strings, as in vLLM's server
                except msgspec.ValidationError as still:  # the field that is wrong even so
                    found = still
            raise invalid_body(str(found), kind) from None
        except RecursionError:
            raise ApiError(HTTPStatus.BAD_REQUEST, "the body is nested too deeply", code="invalid_json") from None

    def _check_messages(self, messages: list[Any]) -> None:
        """Raises ApiError for fields of messages, by the rules for those of the body."""
        known, unknown = ChatMessage.__struct_fields__, set()
        for where, message in _each_message(messages):
            if message.keys() <= _READ_IN_MESSAGES:
                continue
            for name in message:
                if name in known:
                    if self._strict and name in UNREAD_IN_MESSAGES and message[name] is not None:
                        raise _unknown(name, (), where)
                elif name not in unknown:
                    unknown.add(name)
                    if self._strict or len(unknown) > _MOST_UNKNOWN or closest(name, known) is not None:
                        raise _unknown(name, known, where)
                    self._note_ignored(f"messages[].{name}")

    def _note_ignored(self, name: str) -> None:
        """Logs each ignored name once, and at most _MOST_IGNORED names, since clients choose them."""
        name = shortened(name, _LONGEST_NAME)
        if name not in self._ignored and len(self._ignored) < _MOST_IGNORED:
            self._ignored.add(name)
            logger.warning("a field %r of requests is not known and does nothing; see --strict-requests", name)


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = decode_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = _lone_surrogate(body) or str(error)
        raise ApiError(HTTPStatus.BAD_REQUEST, f"the body is not valid JSON: {why}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(HTTPStatus.BAD_REQUEST, "the body is nested too deeply", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(HTTPStatus.BAD_REQUEST, "the body must be a JSON object", code="invalid_json")
    if len(fields) > _MOST_FIELDS:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"the body has {len(fields)} fields", code="unknown_parameter")
    return fields


def _lone_surrogate(body: bytes) -> str | None:
    """The error of an escaped UTF-16 surrogate without its pair, if any: the decoder does not name it."""
    alone = next((each[1].decode() for each in _ESCAPES.finditer(body, 0, _MOST_SEARCHED) if each[1]), None)
    return None if alone is None else f"\\{alone} is half of a character's escape, and the other half is missing"


_ESCAPES = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL)
_MOST_SEARCHED = 1 << 20
"""Bytes of a body that are searched for the cause of an error."""


def decode_query(query: str, kind: type[S]) -> S:
    """Decodes the query parameters of a URL. Raises ApiError, which names the parameter.

    A parameter whose default is a tuple may be repeated, also as NAME[], as OpenAI's clients write lists; of others,
    the last one counts.
    """
    several = [field.name for field in msgspec.structs.fields(kind) if isinstance(field.default, tuple)]
    fields: dict[str, Any] = {}
    for name, value in urllib.parse.parse_qsl(query, keep_blank_values=True):
        if (plain := name.removesuffix("[]")) in several:
            fields.setdefault(plain, []).append(value)
        else:
            fields[name] = value
    for name in fields:
        if name not in kind.__struct_fields__:
            raise _unknown(name, kind.__struct_fields__)
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_body(str(error), kind) from None


_OF_CHATS = frozenset({ChatCompletionRequest, ChatBatchRequest, TokenizeRequest})
_READ_IN_MESSAGES = frozenset(ChatMessage.__struct_fields__) - frozenset(UNREAD_IN_MESSAGES)


def _each_message(messages: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each message and its place in the body, also within the conversations of a batch. Skips what is not an object."""
    for index, each in enumerate(messages[:MOST_MESSAGES]):
        if isinstance(each, list):
            inner = enumerate(each[:MOST_MESSAGES])
            yield from ((f"messages[{index}][{at}]", one) for at, one in inner if isinstance(one, dict))
        elif isinstance(each, dict):
            yield f"messages[{index}]", each


def _take_neutral(fields: dict[str, Any], table: Mapping[str, Neutral], *, strict: bool) -> None:
    for name in [name for name in fields if name in table]:
        value, neutral = fields.pop(name), table[name]
        if value is None or ANY in neutral.values or any(_same(value, each) for each in neutral.values):
            continue
        if neutral.is_harmless and not strict:
            continue
        raise bad_field(name, f"{name} is refused: {neutral.reason}", "unsupported_parameter")


def _same(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _unknown(name: str, known: tuple[str, ...], where: str = "") -> ApiError:
    close = closest(name, known)
    name = shortened(name, _LONGEST_NAME)
    hint = f"; did you mean {close}?" if close is not None else ""
    of = f" of {where}" if where else ""
    return bad_field(f"{where}.{name}" if where else name, f"unknown field {name!r}{of}{hint}", "unknown_parameter")


def closest(name: str, known: tuple[str, ...]) -> str | None:
    """The known name of which `name` may be a misspelling; None if there is none."""
    if OTHER_NAMES.get(name) in known:
        return OTHER_NAMES[name]
    close = difflib.get_close_matches(name, known, n=1, cutoff=_MISSPELT) if len(name) <= _LONGEST_NAME else []
    return close[0] if close else None


_MISSPELT = 0.75
"""The similarity (difflib's ratio) from which a name counts as a misspelling of another."""
_MOST_FIELDS, _MOST_UNKNOWN = 256, 8
_MOST_IGNORED = 100
_LONGEST_NAME = 64
"""Characters of a field's name that are compared and quoted; a client may send millions."""
_MISSING, _EXTRA = "Object missing required field `", "Object contains unknown field `"


def invalid_body(text: str, kind: type[msgspec.Struct]) -> ApiError:
    """Converts msgspec's message, such as 'Expected `int`, got `str` - at `$.max_tokens`'; it quotes names in full."""
    what, at, where = text.rpartition(" - at `$")
    if not at:
        what, where = text, ""
    where = shortened(where.removeprefix(".").removesuffix("`"), LONGEST_PARAM)
    for begin, code in ((_MISSING, "missing_required_parameter"), (_EXTRA, "unknown_parameter")):
        if not what.startswith(begin):
            continue
        name = shortened(what[len(begin) :].removesuffix("`"), _LONGEST_NAME)
        where = f"{where}.{name}" if where else name
        message = f"{where} is required" if begin == _MISSING else f"unknown field {where}"
        return bad_field(where, message, code)
    what = shortened(what, LONGEST_PARAM).replace("`", "")
    hint = next((each.type for each in msgspec.structs.fields(kind) if each.encode_name == where), None)
    if values := _literals(hint):
        what += f"; it must be one of {', '.join(values)}"
    return bad_field(where, f"{where}: {what[:1].lower()}{what[1:]}", "invalid_type")


def _literals(hint: Any) -> tuple[str, ...]:
    """The values of all Literals in a field's type."""
    if typing.get_origin(hint) is Literal:
        return tuple(map(str, typing.get_args(hint)))
    return tuple(each for part in typing.get_args(hint) for each in _literals(part))
