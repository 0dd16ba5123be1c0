"""What was read of a whole answer: its content, its reasoning and the tools that it calls."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from headrace.frontend.api.outputs import AnswerMessage, FunctionCall, ToolCall
from headrace.frontend.text.formats.parser import Event
from headrace.frontend.text.tokenizer import Tokenizer


def message_of(events: Iterable[Event]) -> AnswerMessage:
    calls: list[ToolCall] = []
    content, reasoning = list[str](), list[str]()
    for each in events:
        if each.name:
            calls.append(ToolCall(call_id(each), FunctionCall(each.name, each.arguments)))
        elif each.call >= 0:
            calls[each.call].function.arguments += each.arguments
        content.append(each.content)
        reasoning.append(each.reasoning)
    said = "".join(content)
    return AnswerMessage(said if said or not calls else None, "".join(reasoning), calls)


def call_id(told: Event) -> str:
    """A call's own id, where the model writes one; else one that no other call has."""
    made = uuid.uuid4().hex
    return told.id or (made[: told.id_length] if told.id_length else f"call_{made[:24]}")


def num_reasoning_tokens(tokenizer: Tokenizer | None, reasoning: str, num_output: int) -> int:
    """Of an output of so many tokens; markers are not counted."""
    if not reasoning or tokenizer is None:
        return 0
    return min(tokenizer.count_tokens(reasoning), num_output)
