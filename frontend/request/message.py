"""Combines the events of a whole answer into a message: content, reasoning and tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from headrace.frontend.request.outputs import AnswerMessage, FunctionCall, ToolCall
from headrace.frontend.text.formats.events import AnswerPart
from headrace.frontend.text.tokenizer import Tokenizer


def message_of(events: Iterable[AnswerPart]) -> AnswerMessage:
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


def call_id(told: AnswerPart) -> str:
    """The call's id if the model wrote one, else a new random one."""
    made = uuid.uuid4().hex
    return told.id or (made[: told.id_length] if told.id_length else f"call_{made[:24]}")


def num_reasoning_tokens(tokenizer: Tokenizer | None, reasoning: str, num_output: int) -> int:
    """Number of tokens in the reasoning, without its markers; at most num_output, the output's number of tokens."""
    if not reasoning or tokenizer is None:
        return 0
    return min(tokenizer.count_tokens(reasoning), num_output)
