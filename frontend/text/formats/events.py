"""What a parser tells of an answer, piece by piece."""

from __future__ import annotations

import msgspec


class AnswerPart(msgspec.Struct, frozen=True):
    """A parsed piece: content, reasoning, the name of a call, or a part of its arguments."""

    content: str = ""
    reasoning: str = ""
    call: int = -1
    """Index of the call that the name or the arguments belong to, from 0; -1 for content and reasoning."""
    name: str = ""
    id: str = ""
    """The call's id, if the model wrote one."""
    id_length: int = 0
    """Length of the id to generate if the model wrote none; 0 for any length."""
    arguments: str = ""


def merged(events: list[AnswerPart]) -> list[AnswerPart]:
    """Joins neighbouring events of one kind, and drops empty ones."""
    if len(events) == 1 and events[0].arguments:
        return events
    runs: list[list[AnswerPart]] = []
    for event in events:
        if not (event.content or event.reasoning or event.name or event.arguments):
            continue
        if runs and _goes_on(runs[-1][-1], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _goes_on(last: AnswerPart, event: AnswerPart) -> bool:
    if event.arguments:
        return last.call == event.call and not event.name
    return bool((last.content and event.content) or (last.reasoning and event.reasoning))


def _joined(run: list[AnswerPart]) -> AnswerPart:
    return msgspec.structs.replace(
        run[0],
        content="".join(each.content for each in run),
        reasoning="".join(each.reasoning for each in run),
        arguments="".join(each.arguments for each in run),
    )
