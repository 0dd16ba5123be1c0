"""A conversation that is kept within max_model_len by dropping its oldest turns."""

from __future__ import annotations

import json
from typing import Any, Protocol

import msgspec

from headrace.frontend.request.parameters.sampling_params import FIELDS, SamplingParams, nearest
from headrace.ipc.failure import InvalidRequestError

ANSWER_TOKENS = 512
"""Tokens reserved for an answer if max_tokens is not set, but at most a quarter of max_model_len."""
SETTABLE = tuple(each.name for each in FIELDS.values() if each.field.flag)
"""Sampling fields that a user of `headrace chat` may set."""


class Turn(msgspec.Struct):
    question: str
    answer: str = ""


class Renderer(Protocol):
    """The tokenizer methods that a conversation uses."""

    def get_chat_template(self, chat_template: Any, tools: Any) -> Any:
        """Raises InvalidRequestError when the model has none."""
        ...

    def apply_chat_template(self, conversation: Any, *, add_generation_prompt: bool) -> Any: ...


class Conversation:
    """A system message and the turns after it. Between `ask` and `answered` the last turn is open."""

    def __init__(self, tokenizer: Renderer, max_model_len: int, *, system: str | None = None) -> None:
        """Raises InvalidRequestError when the model has no chat template."""
        tokenizer.get_chat_template(None, None)
        self._tokenizer, self._max_model_len = tokenizer, max_model_len
        self.system = system
        self.turns: list[Turn] = []

    def ask(self, question: str, max_tokens: int | None) -> tuple[list[int], int]:
        """Opens a turn. Returns the prompt's token ids, and how many of the oldest turns were dropped to make it fit.

        Raises InvalidRequestError, and leaves the conversation as it was, when the template refuses it or when the
        question alone is too long.
        """
        longest = self._max_model_len
        room = min(longest // 4, ANSWER_TOKENS) if max_tokens is None else min(max_tokens, longest // 2)
        turns = [*self.turns, Turn(question)]
        token_ids = self._token_ids(turns)
        while len(token_ids) + room > longest and len(turns) > 1:
            del turns[0]
            token_ids = self._token_ids(turns)
        if len(token_ids) >= longest:
            raise InvalidRequestError(
                f"the message makes {len(token_ids)} tokens with the system message and the template, and "
                f"max_model_len is {longest}: shorten it"
            )
        num_dropped = len(self.turns) + 1 - len(turns)
        self.turns = turns
        return token_ids, num_dropped

    def answered(self, answer: str) -> None:
        """Closes the turn. With an empty answer the turn is removed."""
        if answer:
            self.turns[-1].answer = answer
        else:
            self.turns.pop()

    def undo(self) -> bool:
        """Removes the last turn; returns False if there is none."""
        return bool(self.turns and self.turns.pop())

    def reset(self) -> None:
        """Removes all turns; keeps the system message."""
        self.turns = []

    def messages(self) -> list[dict[str, str]]:
        """The conversation in the form of OpenAI's API."""
        return self._messages(self.turns)

    def to_json(self, model: str) -> str:
        content = {"model": model, "messages": self.messages()}
        return json.dumps(content, ensure_ascii=False, indent=2) + "\n"

    def _messages(self, turns: list[Turn]) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in turns:
            messages.append({"role": "user", "content": turn.question})
            if turn.answer:
                messages.append({"role": "assistant", "content": turn.answer})
        return messages

    def _token_ids(self, turns: list[Turn]) -> list[int]:
        messages = self._messages(turns)
        token_ids: list[int] = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return token_ids


def with_param(params: SamplingParams, name: str, text: str, defaults: SamplingParams) -> SamplingParams:
    """A copy with one field set from text. Raises InvalidRequestError, which names the field."""
    if name not in SETTABLE:
        raise InvalidRequestError(f"unknown parameter {name!r}{nearest(name, list(SETTABLE))}")
    if not text:
        raise InvalidRequestError(f"{name} is {getattr(params, name)!r}; to set it, give a value, or `default`")
    changed = params.clone()
    setattr(changed, name, getattr(defaults, name) if text == "default" else _value(text))
    try:
        changed.verify()
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error).replace("SamplingParams.", "")) from None
    return changed


def _value(text: str) -> Any:
    """The text parsed as JSON or as None, True or False; otherwise the text itself (a stop string, say)."""
    if text in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[text]
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
