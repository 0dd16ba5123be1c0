"""What a model that reads text alone is told of images and files that a tool has given.

A request with an image of the user's is refused: an answer would look as if the model had seen it. A tool's result is
otherwise: agents read screenshots and files by tools, and send the result with each later turn, so a refusal would end
the conversation for good. The model is told that something was there, and can say so or use another tool. (vLLM refuses
both, as of a model without images.)
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)
_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("image", "image_url", "input_image"), "an image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "a recording"),
    **dict.fromkeys(("video", "video_url"), "a video"),
    **dict.fromkeys(("document", "file", "input_file"), "a file"),
}
"""What a part of this type is, in the forms of all APIs."""


def readable(part: Any) -> Any:
    """A part of a tool's result, or a part of text that stands for one that the model cannot read."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _NAMES or _is_text(part):
        return part
    _note(kind)
    return {"type": "text", "text": f"[The tool gave {_NAMES[kind]} here, which you cannot see: you read text alone.]"}


def _is_text(part: dict[str, Any]) -> bool:
    """Whether it is a document of texts, in Anthropic's form."""
    source = part.get("source")
    return isinstance(source, dict) and source.get("type") in ("text", "content")


@functools.cache
def _note(kind: str) -> None:
    logger.warning(
        "a tool gave %s: models read text alone, so that they are told of it and do not see it", _NAMES[kind]
    )
