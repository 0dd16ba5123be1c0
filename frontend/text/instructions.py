"""Puts a conversation's instructions (messages of the roles system and developer) where its chat template shows them.

Templates differ: some show a system message anywhere, some the first one alone, some refuse any other, and some have no
system message at all. Many leave a role that they do not know out without a word. So the placings below are tried on a
copy of the conversation with short texts, in this order, and the first in which every instruction appears is taken:

    as they are                 if the template names the role developer
    as system messages          where they stand
    in the first message        all of them joined, as the system message at the beginning
    in the first user message   before its text

Agents, which always give instructions, also send several user messages in a row, and a user's text, such as a reminder,
right behind a tool's result. Templates in which the user and the assistant have to alternate refuse both, so such
messages are joined for these: users' to one, and the text behind a result to the result.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from headrace.frontend.text.chat_template import Message, render_chat
from headrace.frontend.text.template_renderer import TemplateLimitError
from headrace.ipc.failure import InvalidRequestError

ROLES = ("system", "developer")
_MARK = "HeadraceInstruction"
_BETWEEN = "\n\n"
_SERVICE_LINE = re.compile(r"x-anthropic-[\w-]+:[^\n]*(?:\n|$)")
"""A line that Claude Code puts before its system prompt for Anthropic's service, such as x-anthropic-billing-header. It
may change at each request: no prefix behind it would ever be found in the cache."""


def may_move(messages: Sequence[Message]) -> bool:
    """Whether `place_instructions` may change something: there are instructions, or a text behind a tool's result."""
    before = None
    for message in messages:
        role = message.get("role")
        if role in ROLES or (before, role) == _BEHIND_RESULT:
            return True
        before = role
    return False


def place_instructions(
    template: str, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
) -> Sequence[Message]:
    """The messages with their instructions placed; as they are if no placing shows all of them.

    render: renders a conversation with the template. Raises InvalidRequestError where the template refuses it."""
    messages = _without_service_lines(messages)
    places = [index for index, message in enumerate(messages) if _instructs(message)]
    is_usual = not places or (places == [0] and messages[0]["role"] == "system" and _shows_system(template))
    pairs = set(itertools.pairwise(message.get("role") for message in messages))
    if is_usual and _BEHIND_RESULT not in pairs and not (places and _USERS in pairs):
        return messages
    marked, marks = _marked(messages)
    for place in (_as_they_are, *_PLACINGS) if "developer" in template else _PLACINGS:
        try:
            told = render(place(marked))
        except TemplateLimitError:
            raise
        except InvalidRequestError:
            continue
        if all(mark in told for mark in marks):
            return place(messages)
    return messages


def _without_service_lines(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages; of the first, if it instructs, without the lines for Anthropic's service."""
    if not messages or not _instructs(messages[0]) or not _SERVICE_LINE.match(text_of(messages[0]["content"])):
        return messages
    content = messages[0]["content"]
    parts = list(content) if not isinstance(content, str) else [content]
    while parts and (found := _SERVICE_LINE.match(text_of(parts[:1]))) is not None:
        rest = text_of(parts[:1])[found.end() :]
        parts[:1] = [rest if isinstance(parts[0], str) else {**parts[0], "text": rest}] if rest else []
    kept = parts if not isinstance(content, str) else "".join(parts)
    return [{**messages[0], "content": kept}, *messages[1:]] if kept else messages[1:]


@functools.lru_cache(maxsize=64)
def _shows_system(template: str) -> bool:
    """Whether the template shows a system message at the beginning."""
    probe = [{"role": "system", "content": f"{_MARK}."}, {"role": "user", "content": "x"}]
    try:
        return f"{_MARK}." in render_chat(template, probe, add_generation_prompt=True)
    except TemplateLimitError:
        raise
    except InvalidRequestError:
        return False


def text_of(content: Any) -> str:
    """A message's content as one text. Parts that are no text count as none: they are refused elsewhere."""
    if isinstance(content, str):
        return content
    return "\n".join(_part_texts(content)) if isinstance(content, list | tuple) else ""


def _part_texts(parts: Sequence[Any]) -> Iterator[str]:
    for part in parts:
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else part
        if isinstance(text, str):
            yield text


def _instructs(message: Message) -> bool:
    return message.get("role") in ROLES and bool(text_of(message.get("content")))


def _marked(messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """A copy with short texts, and the mark that stands in the place of each instruction."""
    marked: list[Message] = []
    marks: list[str] = []
    for message in messages:
        content = message.get("content")
        text = "x"
        if _instructs(message):
            text = f"{_MARK}{len(marks)}."
            marks.append(text)
        short: Any = content
        if isinstance(content, str) and content:
            short = text
        elif isinstance(content, list | tuple) and content:
            short = [{"type": "text", "text": text}]
        marked.append({**message, "content": short} if "content" in message else message)
    return marked, marks


def _as_they_are(messages: Sequence[Message]) -> list[Message]:
    return list(messages)


def _as_system(messages: Sequence[Message]) -> list[Message]:
    return [{**each, "role": "system"} if each.get("role") == "developer" else each for each in messages]


def _in_first(messages: Sequence[Message]) -> list[Message]:
    said, rest = _apart(messages)
    return [{"role": "system", "content": said}, *rest] if said else rest


def _in_user(messages: Sequence[Message]) -> list[Message]:
    said, rest = _apart(messages)
    for index, message in enumerate(rest):
        if said and message.get("role") == "user":
            content = _joined(said, message.get("content"))
            return [*rest[:index], {**message, "content": content}, *rest[index + 1 :]]
    return [{"role": "user", "content": said}, *rest] if said else rest


def _apart(messages: Sequence[Message]) -> tuple[str, list[Message]]:
    """The instructions, joined, and the other messages."""
    said = [text_of(message.get("content")) for message in messages if _instructs(message)]
    return _BETWEEN.join(said), [message for message in messages if message.get("role") not in ROLES]


def _joining(place: Placing, *pairs: tuple[str, str]) -> Placing:
    """The placing, with messages of such roles in a row joined to one of the first role."""

    def joined(messages: Sequence[Message]) -> list[Message]:
        kept: list[Message] = []
        for message in place(messages):
            if kept and (kept[-1].get("role"), message.get("role")) in pairs:
                kept[-1] = {**kept[-1], "content": _joined(kept[-1].get("content"), message.get("content"))}
            else:
                kept.append(message)
        return kept

    return joined


def _joined(first: Any, second: Any) -> Any:
    """Two contents as one: texts with an empty line between them, and parts where one of them has parts."""
    if isinstance(first, str) and isinstance(second, str):
        return _BETWEEN.join(filter(None, (first, second)))
    return [*_parts(first), *_parts(second)]


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content or ())


Placing = Callable[[Sequence[Message]], list[Message]]
_USERS, _BEHIND_RESULT = ("user", "user"), ("tool", "user")
_PLACINGS: tuple[Placing, ...] = tuple(
    _joining(place, *pairs)
    for place in (_as_system, _in_first, _in_user)
    for pairs in ((), (_BEHIND_RESULT,), (_USERS,), (_USERS, _BEHIND_RESULT))
)
