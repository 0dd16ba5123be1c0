"""What the files of sentence-transformers beside a model say about its vectors.

    modules.json                     the chain of modules: Transformer, Pooling, Normalize; each may have a folder
    1_Pooling/config.json            of which tokens a vector is made: flags before version 5.4, one word since
    sentence_bert_config.json        max_seq_length, do_lower_case

A module of another class is refused by name, since it would change every vector, and so is a way of pooling that is not
known. A Pooling config that says no way is read as sentence-transformers' class reads it: MEAN.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from headrace.ipc.failure import ModelError
from headrace.ipc.process.regular_files import is_there, read_text

logger = logging.getLogger(__name__)

MODULES = "modules.json"
FLAGS = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_lasttoken": "LAST",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Old flags, and vLLM's name of the pooling type or, where it has none, sentence-transformers'."""
WORDS = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
_KNOWN = ("Transformer", "Pooling", "Normalize")


class SentenceFolder(NamedTuple):
    tokens: str
    """The type of pooling, under vLLM's name if it has one."""
    normalizes: bool
    """Whether vectors are scaled to length 1."""
    width: int | None
    """The vectors' number of values."""
    max_tokens: int | None
    """Most tokens of a text; None: as many as the model takes."""
    lower_case: bool
    """Whether texts are put in lower case before they are tokenised."""


def sentence_folder(folder: Path) -> SentenceFolder | None:
    """None for a folder without these files. Raises ModelError, naming the file, for what cannot be followed."""
    modules = _read(folder / MODULES)
    if modules is None:
        return None
    if not (isinstance(modules, list) and all(isinstance(each, dict) for each in modules)):
        raise ModelError(f"{folder / MODULES} is no list of modules")
    found: dict[str, Path] = {}
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _KNOWN:
            raise ModelError(
                f"{folder / MODULES} has the module {module.get('type')!r}, which is not computed here; known: "
                f"{', '.join(_KNOWN)}"
            )
        path = PurePosixPath(str(module.get("path", "")))
        if path.is_absolute() or ".." in path.parts:
            raise ModelError(f"{folder / MODULES} gives {kind} the path {str(path)!r}, which leaves the folder")
        found[kind] = folder / path
    if "Pooling" not in found:
        return None
    file = found["Pooling"] / "config.json"
    pooling = _read(file)
    if not isinstance(pooling, dict):
        raise ModelError(f"{file} is missing or no JSON object: it says how {folder.name} pools")
    own = _read(folder / "sentence_bert_config.json")
    settings = own if isinstance(own, dict) else {}
    return SentenceFolder(
        tokens=_tokens(pooling, file),
        normalizes="Normalize" in found,
        width=pooling.get("word_embedding_dimension", pooling.get("embedding_dimension")),
        max_tokens=settings.get("max_seq_length"),
        lower_case=bool(settings.get("do_lower_case", False)),
    )


def _tokens(pooling: dict[str, Any], file: Path) -> str:
    if (word := pooling.get("pooling_mode")) is not None:
        if not isinstance(word, str):
            raise ModelError(f"{file} has pooling_mode {word!r}: vectors of several kinds joined are not computed here")
        return WORDS.get(word, word)
    others = [key for key, on in pooling.items() if key.startswith("pooling_mode_") and key not in FLAGS and on]
    if others:
        raise ModelError(f"{file} asks for {', '.join(others)}, which is not known; known: {', '.join(FLAGS)}")
    chosen = [name for flag, name in FLAGS.items() if pooling.get(flag)]
    if len(chosen) > 1:
        raise ModelError(
            f"{file} asks for {' and '.join(chosen)}: vectors of several kinds joined are not computed here"
        )
    if chosen:
        return chosen[0]
    mean = next(flag for flag, name in FLAGS.items() if name == "MEAN")
    if not pooling.get(mean, True):
        raise ModelError(f"{file} says no way to pool: {mean} is false, and no other is true of {', '.join(FLAGS)}")
    logger.info("%s says no way to pool: vectors are the mean, which is sentence-transformers' default", file)
    return "MEAN"


def _read(file: Path) -> Any:
    if not is_there(file):
        return None
    try:
        return json.loads(read_text(file))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
