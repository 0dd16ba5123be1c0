"""Content parts of messages that are embeddings: where they stand in the rendered and tokenised conversation.

Before rendering, each part of type prompt_embeds becomes the text PLACE. In the rendered text, a special token of the
tokenizer stands for it, so that the texts on both sides are tokenised as beside any special token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.frontend.request.embeds import decoded
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.codec import Tensor
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Welcome
from headrace.ipc.row_inputs import PLACEHOLDER, RowInput, prompt_embeds_input

PLACE = "<prompt_embeds>"
"""vLLM's placeholder. Other text may not contain it."""
KIND = "prompt_embeds"


def take_parts(content: Sequence[Any], welcome: Welcome, found: list[Tensor]) -> list[Any]:
    """The parts with PLACE in the place of embeddings, which are added to `found`. Raises InvalidRequestError."""
    taken: list[Any] = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != KIND:
            taken.append(part)
            continue
        data = part.get("data")
        if not isinstance(data, str) or not data:
            raise InvalidRequestError(
                "prompt_embeds content part requires a non-empty `data` field with base64-encoded tensor bytes."
            )
        found.append(decoded(data, welcome))
        taken.append({"type": "text", "text": PLACE})
    return taken


def has_parts(content: Any) -> bool:
    return isinstance(content, list | tuple) and any(
        isinstance(part, Mapping) and part.get("type") == KIND for part in content
    )


def check_placeholders(content: Any) -> None:
    """Raises InvalidRequestError if a message's own text contains PLACE."""
    for part in [content] if isinstance(content, str) else content or ():
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str) and PLACE in text:
            raise InvalidRequestError(
                f"Text content may not contain the reserved placeholder {PLACE!r}. This placeholder is used internally "
                "to mark `prompt_embeds` splice positions in the tokenized prompt."
            )


def without_parts(
    conversation: Sequence[Mapping[str, Any]], welcome: Welcome
) -> tuple[Sequence[Mapping[str, Any]], list[Tensor]]:
    """A conversation with PLACE in the place of embeddings, and the embeddings. Raises InvalidRequestError."""
    found: list[Tensor] = []
    if not any(isinstance(message, Mapping) and has_parts(message.get("content")) for message in conversation):
        return conversation, found
    taken = []
    for message in conversation:
        content = message.get("content") if isinstance(message, Mapping) else None
        check_placeholders(content)
        if has_parts(content):
            message = {**message, "content": take_parts(content or (), welcome, found)}
        taken.append(message)
    return taken, found


def splice(
    text: str, parts: Sequence[Tensor], tokenizer: Tokenizer, encode: Callable[[str], Sequence[int]]
) -> tuple[list[int], tuple[RowInput, ...]]:
    """The token ids and inputs of a rendered text. encode: tokenises a whole text. Raises InvalidRequestError."""
    pieces = text.split(PLACE)
    if len(pieces) != len(parts) + 1:
        raise InvalidRequestError(
            f"Expected {len(parts)} prompt_embeds placeholder spans in the rendered prompt, found {len(pieces) - 1}: "
            "the model's chat template leaves parts out or repeats them"
        )
    mark = next((each for each in tokenizer.special_tokens.items() if each[0] not in text), None)
    if mark is None:
        raise InvalidRequestError(
            "prompt_embeds in messages need a special token of the tokenizer to mark their places"
        )
    marked = encode(mark[0].join(pieces))
    token_ids, inputs, rest = list[int](), list[RowInput](), iter(parts)
    for each in marked:
        if each != mark[1]:
            token_ids.append(each)
            continue
        if (values := next(rest, None)) is None:
            raise InvalidRequestError("the tokenizer writes its special tokens otherwise than as one token each")
        if values.shape[0]:
            inputs.append(prompt_embeds_input(values, len(token_ids)))
        token_ids += [PLACEHOLDER] * values.shape[0]
    return token_ids, tuple(inputs)
