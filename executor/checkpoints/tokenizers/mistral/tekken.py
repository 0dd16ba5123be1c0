"""tekken.json: special tokens, and after them a vocabulary in tiktoken's form.

It is published with the models of https://huggingface.co/mistralai; for its fields see mistral_common's Tekkenizer.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.executor.checkpoints.checkpoint import read_json
from headrace.executor.checkpoints.tokenizers.byte_level import byte_level_tokenizer
from headrace.ipc.failure import ModelError

UNNAMED = "<SPECIAL_{}>"
FIRST_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of files of versions up to v7, which do not list them."""


def tekken_tokenizer(path: Path) -> Any:
    """Converts to a tokenizer of the `tokenizers` library. Raises ModelError, naming the file, if it is not valid."""
    ranks, special, pattern = _read(path, read_json(path))
    return byte_level_tokenizer(path, ranks, pattern, first=special)


def _read(path: Path, content: Mapping[str, Any]) -> tuple[dict[bytes, int], list[str], str]:
    """(rank of each token, special tokens in order of their ids, regular expression that splits text)."""
    try:
        config = content["config"]
        pattern, num_special = str(config["pattern"]), int(config["default_num_special_tokens"])
        size = int(config["default_vocab_size"]) - num_special
        listed = content.get("special_tokens")
        named = dict(enumerate(FIRST_SPECIAL))
        if listed is not None:
            named = {int(each["rank"]): str(each["token_str"]) for each in listed}
        entries = content["vocab"][:size]
        ranks = {base64.b64decode(each["token_bytes"], validate=True): int(each["rank"]) for each in entries}
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ModelError(f"{path} is no tokenizer of Mistral's: {type(error).__name__}: {error}") from None
    special = [named.get(index, UNNAMED.format(index)) for index in range(num_special)]
    if sorted(ranks.values()) != list(range(size)) or max(named, default=0) >= num_special:
        raise ModelError(
            f"{path} has {len(ranks)} tokens and {len(named)} special ones; its config says {size} and {num_special}"
        )
    return ranks, special, pattern
