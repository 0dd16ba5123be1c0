"""Renders the chat templates that models ship, with the globals and filters that transformers provides.

A template is an untrusted program, from the model's author or from a request: it gets plain data instead of objects,
and runs in another process (`template_process.py`), whose time and memory are limited.
"""

from __future__ import annotations

import functools
import marshal
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from headrace.frontend.text.template_renderer import TemplateLimitError, renderer, text_of
from headrace.ipc.failure import InvalidRequestError, OptionError
from headrace.ipc.process.regular_files import read_text

Message = Mapping[str, Any]
ContentFormat = Literal["auto", "string", "openai"]
"""How a template gets a message's content: as a string, or as a list of parts as in OpenAI's API (openai). auto: a
string as a string, and parts as parts if the template supports them."""
_MARSHAL_VERSION = 2
"""Later ones look for objects that occur twice, which takes longer."""
_CONTINUE_HERE = "HEADRACE_CONTINUES_HERE "
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning", "reasoning_text")
"""The names that models and clients use for a message's reasoning. Templates read the first two."""
_TAKES_PARTS = re.compile(
    r"\bin\s+\w+(\.content|\[['\"]content['\"]\])|content\s+is\s+(not\s+)?(string|iterable)"
    r"|content(['\"]\])?\[\d+\]\s*[.\[]"
)
"""Matches a template that may iterate over a message's content parts, index one, or test for parts."""
_PART = "HeadracePart"
_ROLES_LIKE: Mapping[Any, str] = types.MappingProxyType({"developer": "system"})
_CALL = {"type": "function", "id": "000000000", "function": {"name": "f", "arguments": {}}}
_BEFORE: Mapping[str, tuple[Message, ...]] = types.MappingProxyType(
    {
        "system": (),
        "user": (),
        "assistant": ({"role": "user", "content": "x"},),
        "tool": ({"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [_CALL]}),
    }
)
"""Messages after which one of a role can stand."""


class RenderedChat(NamedTuple):
    """A prompt, and the template that made it."""

    text: str
    template: str


def render_chat(template: str, messages: Sequence[Message], **options: Any) -> str:
    """The prompt's text of one conversation. options, and what it raises: as `render_chats`."""
    (text,) = render_chats(template, [messages], **options)
    return text


def render_chats(
    template: str,
    conversations: Sequence[Sequence[Message]],
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    content_format: ContentFormat = "auto",
) -> Iterator[str]:
    """The prompts' texts of conversations; the next are rendered while the caller works with the first. `variables` are
    further variables for the template, such as bos_token.

    Raises InvalidRequestError for malformed messages, and with the template's own error message when it refuses them.
    """
    if content_format not in get_args(ContentFormat):
        raise InvalidRequestError(
            f"chat_template_content_format must be auto, string or openai, not {content_format!r:.100}"
        )
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other: the one goes on with the last "
            "message, the other begins a new one"
        )
    try:
        template.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the chat template is not valid Unicode text: {error}") from None
    contexts: list[bytes] = []
    final_texts: list[str] = []
    try:
        with_parts = _roles_with_parts(template) if content_format == "auto" else frozenset()
        common = {
            "tools": None if tools is None else _plain_mappings("tools", tools),
            "documents": None if documents is None else _plain_mappings("documents", documents),
            "add_generation_prompt": add_generation_prompt,
        }
        others = _plain_mapping(variables or {})
        for messages in conversations:
            chat = _plain_messages(messages, with_parts, wraps_text=content_format == "openai")
            final_texts.append(_mark_end(chat) if continue_final_message else "")
            contexts.append(_marshalled({**others, "messages": chat, **common}))
    except RecursionError:
        raise InvalidRequestError(
            "messages, tools or other variables of the chat template are nested too deeply"
        ) from None
    if len(contexts) == 1:
        rendered: Iterator[str] = map(text_of, renderer().outputs(template, contexts[0]))
    else:
        rendered = renderer().render_all(template, contexts)
    if not continue_final_message:
        return rendered
    return (_cut_at_mark(*each) for each in zip(rendered, final_texts, strict=True))


def _marshalled(context: dict[str, Any]) -> bytes:
    try:
        return marshal.dumps(context, _MARSHAL_VERSION)
    except ValueError as error:  # for it, too, nesting has a limit
        raise RecursionError from error


@functools.lru_cache(maxsize=64)
def _roles_with_parts(template: str) -> frozenset[str]:
    """The roles of which the template shows content parts. Some templates test whether a content is a text, and leave
    out what is none."""
    if not _TAKES_PARTS.search(template):
        return frozenset()
    return frozenset(role for role in _BEFORE if _shows_parts(template, role))


def _shows_parts(template: str, role: str) -> bool:
    message = {"role": role, "content": [{"type": "text", "text": _PART}]}
    after = [] if role in ("user", "tool") else [{"role": "user", "content": "x"}]
    context = {"messages": [*_BEFORE[role], message, *after], "tools": None, "documents": None}
    try:
        (output,) = renderer().outputs(template, _marshalled({**context, "add_generation_prompt": True}))
        shown = text_of(output)
    except TemplateLimitError:
        raise
    except InvalidRequestError:
        return False
    return _PART in shown and not re.search(f"""['"]text['"]: ?['"]{_PART}""", shown)  # nor printed as data


def _plain_messages(
    messages: Sequence[Message], with_parts: Collection[str], *, wraps_text: bool
) -> list[dict[str, Any]]:
    """Copies of the messages, of plain data. with_parts: the roles whose content parts stay parts, instead of being
    joined to text. wraps_text: all stay parts, and text content becomes one too. Raises InvalidRequestError."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"messages must be a list of {{'role': ..., 'content': ...}}, not {type(messages).__name__}"
        )
    if not messages:
        raise InvalidRequestError("messages is empty; give at least one")
    chat = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise InvalidRequestError(f"messages[{index}] must be a dict with a 'role', not {message!r:.100}")
        # APIs write absent fields as None, which templates would print; a missing key they handle.
        plain = _plain_mapping(message, has_absent=True)
        if wraps_text and isinstance(plain.get("content"), str):
            plain["content"] = [plain["content"]] if plain["content"] else []
        if isinstance(plain.get("content"), list | tuple):
            texts = text_parts(plain["content"], f"messages[{index}].content")
            keeps_parts = wraps_text or _ROLES_LIKE.get(plain["role"], plain["role"]) in with_parts
            plain["content"] = (
                [_as_template_part(part) for part in plain["content"]] if keeps_parts else "\n".join(texts)
            )
        for name in _REASONING_NAMES:
            if name in plain:
                plain = {"thinking": plain[name], **plain, "reasoning_content": plain[name]}
                break
        chat.append(plain)
    return chat


def complete_message(message: Message, where: str) -> dict[str, Any]:
    """A message as templates expect it: with content, and with calls whose arguments are objects. Clients of OpenAI's
    API leave content out and hold arguments as text.

    Arguments that are not a JSON object were written by a model earlier; they become empty, since a refusal would
    repeat at each later turn. Raises InvalidRequestError for malformed calls.
    """
    complete: dict[str, Any] = {"content": ""}
    for name, value in message.items():
        if value is not None:
            complete[name] = value
    if message.get("role") == "assistant" and isinstance(parts := complete["content"], list | tuple):
        thoughts = {index: text for index, part in enumerate(parts) if (text := _thought_of(part, where)) is not None}
        if thoughts:
            complete["content"] = [part for index, part in enumerate(parts) if index not in thoughts]
            if not any(name in complete for name in _REASONING_NAMES):
                complete[_REASONING_NAMES[0]] = "".join(thoughts.values())
    calls = complete.pop("tool_calls", None)
    if calls is not None and not isinstance(calls, list | tuple):
        raise InvalidRequestError(f"{where}.tool_calls must be a list of calls")
    if calls:  # an empty list is left out: templates test whether the key exists
        complete["tool_calls"] = [
            _with_parsed_arguments(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    return complete


def _with_parsed_arguments(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise InvalidRequestError(f"{where} must be {{type: function, function: {{name: ..., arguments: ...}}}}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _thought_of(part: Any, where: str) -> str | None:
    """The reasoning in a content part, as clients of Mistral's and Anthropic's APIs and LangChain write it; None for
    another part. Encrypted reasoning is empty."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("thinking", "reasoning", "redacted_thinking"):
        return None
    said = part.get(kind, part.get("text"))
    return "".join(text_parts(said, where)) if isinstance(said, list | tuple) else str(said or "")


def text_parts(parts: Sequence[Any], where: str) -> list[str]:
    """The texts of a message's content parts, in OpenAI's form. Raises InvalidRequestError for parts of other types."""
    texts = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "refusal" and isinstance(part.get(kind), str):
            texts.append(part[kind])
            continue
        if kind == "prompt_embeds":
            raise InvalidRequestError(
                f"{where}[{index}] has the type 'prompt_embeds': embeddings have no token ids and no text, and only "
                "what generates from a conversation (LLM.chat, POST /v1/chat/completions) takes them"
            )
        if isinstance(kind, str) and kind not in ("text", "input_text", "output_text"):
            raise InvalidRequestError(
                f"{where}[{index}] has the type {kind!r:.50}: multimodal input is not supported, give "
                "{'type': 'text', 'text': '...'}"
            )
        if kind is None or not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{where}[{index}] must be {{'type': 'text', 'text': '...'}}")
        texts.append(part["text"])
    return texts


def _as_template_part(part: str | Mapping[str, Any]) -> dict[str, Any]:
    """The part as type text. Its other fields are kept: templates of some models read a language, for example."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {**part, "type": "text", "text": part["text" if "text" in part else "refusal"]}


def _plain_mappings(name: str, values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise InvalidRequestError(f"{name} must be a list of dicts, not {type(values).__name__}")
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise InvalidRequestError(
                f"{name}[{index}] must be a dict (for a tool: its JSON schema), not {value!r:.100}"
            )
    return [_plain_mapping(value) for value in values]


_AS_THEY_ARE = (type(None), str, int, float, bool)


def _plain_mapping(values: Mapping[Any, Any], *, has_absent: bool = False) -> dict[Any, Any]:
    """has_absent: entries that are None are left out."""
    plain = {}
    for key, value in values.items():
        if value is None and has_absent:
            continue
        kept = value if type(value) in _AS_THEY_ARE else _plain(value)
        plain[key if type(key) in _AS_THEY_ARE else _plain(key)] = kept
    return plain


def _plain(value: Any) -> Any:
    """A copy made of JSON's types only, since a template must not reach an object's methods."""
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return _plain_mapping(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"


def _mark_end(chat: list[dict[str, Any]]) -> str:
    """Appends _CONTINUE_HERE to the last message's text, and returns the text without it."""
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_HERE
        return content
    for part in reversed(content or ()):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _CONTINUE_HERE
            return text
    raise InvalidRequestError("continue_final_message needs a final message with text to go on with")


def _cut_at_mark(rendered: str, final_text: str) -> str:
    mark = _CONTINUE_HERE.strip()
    at = rendered.rfind(mark)
    if at < 0 or final_text.strip() not in rendered:
        raise InvalidRequestError(
            "continue_final_message cannot work with this chat template: the final message does not appear in "
            "what it renders"
        )
    # The mark ends in a space: if that is missing, the template trims messages, so trailing spaces are trimmed here.
    keeps_spaces = rendered.startswith(_CONTINUE_HERE, at)
    return rendered[:at] if keeps_spaces else rendered[:at].rstrip()


def check_template(template: str) -> None:
    """Raises InvalidRequestError if the text is no template; that a model's messages fit it only rendering shows."""
    renderer().outputs(template)


def load_template(option: str | None) -> str | None:
    """The template of the option chat_template: the text itself, or a file's content. Raises OptionError."""
    if option is None:
        return None
    is_text = "{" in option or "\n" in option
    try:
        template = option if is_text else read_text(option)
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"chat_template={option}: neither a template nor a file that can be read ({error})") from None
    try:
        check_template(template)
    except InvalidRequestError as error:
        raise OptionError(f"chat_template{'' if is_text else f'={option}'}: {error}") from None
    return template
