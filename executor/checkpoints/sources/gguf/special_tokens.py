"""The special tokens that a GGUF file names, and the tokens that end an answer, as llama.cpp decides them.

A file names an eos, and may name an end of turn (eot) and of message (eom). llama.cpp also ends at tokens that it knows
by their text, since many files name the end of a document alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from headrace.executor.checkpoints.sources.gguf.header import GGUFHeader, StringArray
from headrace.ipc.failure import ModelError

KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of tokenizer.ggml.token_type."""
DEFAULTS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "llama": {"bos": 1, "eos": 2, "unknown": 0},
        "gpt2": {"bos": 11, "eos": 11},
        "t5": {"eos": 1, "unknown": 2, "padding": 0},
        "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
    }
)
"""Token ids of files that do not name them, by tokenizer.ggml.model and role. gpt2's are Falcon's: they hold only for
a control token, since in other vocabularies this id is a comma."""
ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Roles that end an answer."""
KNOWN_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
        *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend▁of▁sentence\uff5c>", "[e~["),
    )
)
FIM_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Texts of tokens around files in the prompts of code models, for files of which no key names the token."""
AFTER_CHANNELS = (("<|return|>", "<|flush|>"), ("<|call|>", "<|calls|>"))
"""A vocabulary with an end of each kind (gpt-oss, Solar) has `<|end|>` for the end of a channel, after which the answer
goes on."""
WITH_ORDINARY_EOS = ("<|tool_response>", "<|plamo:eos|>")
"""In a vocabulary with one of these, `</s>` is text (Gemma 4, PLaMo)."""


def special_token_id(metadata: Mapping[str, Any], role: str, num_tokens: int) -> int | None:
    """The token of a role (bos, eos, unknown, padding, ...). An id outside the vocabulary is not looked at."""
    token_id = metadata.get(f"{KEY}{role}_token_id")
    if isinstance(token_id, int) and 0 <= token_id < num_tokens:
        return token_id
    kind = str(metadata.get(f"{KEY}model"))
    token_id = DEFAULTS.get(kind, {}).get(role)
    if token_id is None or token_id >= num_tokens:
        return None
    types = metadata.get(f"{KEY}token_type")
    is_control = types is not None and len(types) > token_id and types[token_id] == CONTROL
    return token_id if kind != "gpt2" or is_control else None


def end_token_ids(header: GGUFHeader) -> list[int]:
    """In order: the tokens that the file names as ends, then those known by their text."""
    metadata = header.metadata
    tokens = metadata.get(f"{KEY}tokens")
    if not isinstance(tokens, StringArray):
        return [each for role in ENDS if isinstance(each := metadata.get(f"{KEY}{role}_token_id"), int)]
    named = [special_token_id(metadata, role, len(tokens)) for role in ENDS]
    wanted = {*KNOWN_ENDS, *WITH_ORDINARY_EOS, *(text for texts in FIM_ENDS.values() for text in texts)}
    encoded = {text.encode(): text for text in wanted}
    found = {encoded[token]: index for token, index in tokens.places(encoded).items()}
    for index, role in enumerate(ENDS):
        if named[index] is None:
            named[index] = next((found[text] for text in FIM_ENDS.get(role, ()) if text in found), None)
    listed = metadata.get(f"{KEY}eos_token_ids")  # Ollama's
    if isinstance(listed, np.ndarray):
        named += [each for each in listed.tolist() if 0 <= each < len(tokens)]
    known = sorted(found[text] for text in KNOWN_ENDS if text in found)
    ends = dict.fromkeys(each for each in (*named, *known) if each is not None)
    if all(any(found.get(text) in ends for text in texts) for texts in AFTER_CHANNELS):
        ends.pop(found.get("<|end|>", -1), None)
    if any(found.get(text) in ends for text in WITH_ORDINARY_EOS):
        ends.pop(found.get("</s>", -1), None)
    return list(ends)


def token_types(header: GGUFHeader, texts: Sequence[str]) -> list[int]:
    """The type of each token. One that is known as an end by its text is a control token, whatever the file says.

    Raises ModelError if the file has types for fewer tokens than it has.
    """
    held = header.metadata.get(f"{KEY}token_type")
    if held is not None and len(held) < len(texts):
        raise ModelError(f"{header.path}: {KEY}token_type has {len(held)} entries for {len(texts)} tokens")
    types: list[int] = [NORMAL] * len(texts) if held is None else held.tolist()[: len(texts)]
    for token_id in end_token_ids(header):
        if texts[token_id] in KNOWN_ENDS:
            types[token_id] = CONTROL
    return types
