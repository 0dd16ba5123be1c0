"""How texts are written whose tokens' vectors are compared (ColBERT, Khattab and Zaharia 2020), by a folder's files.

sentence_bert_config.json           of sentence-transformers from version 6 on: query_length, document_length,
2_MultiVectorMask/config.json       query_expansion; tokens without a vector
config_sentence_transformers.json   of pylate: the same under names of its own, and markers of queries and documents
artifact.metadata                   of ColBERT's own code; the checkpoint has its layer
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from headrace.executor.checkpoints.sentence_files import (
    GENERAL,
    Module,
    TransformerSettings,
    given_value,
    is_size,
    read_json,
)
from headrace.executor.models.heads import COLBERT, HeadLayer, HeadLinear
from headrace.ipc.failure import ModelError
from headrace.ipc.messages import LateInteraction

LEAST_LENGTH = 3
"""Tokens of a text: its first one, a marker and its last one."""
METADATA = "artifact.metadata"
OWN_WIDTH = 128
WIDTHS = ("colbert_dim", "dim", "projection_dim")
"""Keys of config.json with the width of vectors, of folders without metadata, as vLLM reads them."""
PUNCTUATION = tuple(string.punctuation)
EXPANSION = {"strategy", "length", "attend", "token"}
TASKS = ("query", "document")


def of_modules(settings: TransformerSettings, mask: Module | None) -> LateInteraction:
    """As sentence-transformers' own class writes texts: their markers are prompts. mask: the MultiVectorMask; None:
    there is none, so that only tokens that are attended to have a vector. Raises ModelError."""
    skipped, tasks = _skiplist(mask) if mask is not None else ((), ())
    filled, longest, attend, filler = None, settings.query_length, False, ""
    if (given := settings.query_expansion) is not None:
        file = settings.file
        if unknown := sorted(given.keys() - EXPANSION):
            raise ModelError(
                f"{file} has query_expansion with {unknown[0]!r:.100}; known: {', '.join(sorted(EXPANSION))}"
            )
        strategy, length = given.get("strategy"), given_value(given, "length", int, file)
        if strategy not in ("fixed", "min") or length is None:
            raise ModelError(
                f"{file} has the query_expansion {given!r:.200}; a strategy fixed or min and a length are expected"
            )
        attend, filler = bool(given.get("attend")), given_value(given, "token", str, file) or ""
        if strategy == "fixed":
            longest = length
        elif longest is not None:
            longest = max(longest, length)
        filled = length if mask is not None or attend else None
    return LateInteraction(
        query_length=longest,
        document_length=settings.document_length,
        filled_length=filled,
        filler=filler,
        fillers_are_seen=attend,
        skipped=skipped if "document" in tasks else (),
        skipped_of_queries=skipped if "query" in tasks else (),
    )


def _skiplist(mask: Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words without a vector, and of which texts they are left out."""
    file = mask.folder / "config.json"
    config = read_json(file)
    given = config if isinstance(config, dict) else {}
    if given.get("keep_only_token_ids"):
        raise ModelError(f"{file} has keep_only_token_ids, which is of images, and models take text here")
    words, tasks = given_value(given, "skiplist_words", list, file) or [], given.get("skiplist_tasks", ["document"])
    named = [tasks] if isinstance(tasks, str) else tasks
    if not isinstance(named, list) or not set(map(str, named)) <= set(TASKS):
        raise ModelError(f"{file} has the skiplist_tasks {tasks!r:.100}; known: {', '.join(TASKS)}")
    return tuple(map(str, words)), tuple(named)


def has_original(folder: Path) -> bool:
    """Whether ColBERT's own code wrote the folder."""
    config = read_json(folder / "config.json")
    architectures = config.get("architectures") if isinstance(config, dict) else None
    return isinstance(architectures, list) and architectures[:1] == [COLBERT]


def original_layer(folder: Path) -> HeadLayer:
    """Of a folder that ColBERT's own code wrote. Raises ModelError."""
    metadata, config = read_json(folder / METADATA), read_json(folder / "config.json")
    said = metadata.get("dim") if isinstance(metadata, dict) else None
    width = next((each for each in (said, *map(config.get, WIDTHS)) if each is not None), None)
    if width is None:
        width = _stored_width(folder)
    if not is_size(width) or not is_size(config.get("hidden_size")):
        raise ModelError(f"{folder / METADATA} has dim {width!r:.100}, which is no width of vectors")
    return HeadLinear("linear", width, config["hidden_size"], bias=False)


def _stored_width(folder: Path) -> int:
    """Of the layer itself, or ColBERT's own."""
    file = folder / "model.safetensors"
    if not file.is_file():
        return OWN_WIDTH
    from headrace.executor.checkpoints.sources.safetensors_weights import open_sound_files

    (weights,) = open_sound_files([file], "lazy")
    return weights.shape("linear.weight")[0] if "linear.weight" in weights.names else OWN_WIDTH


def of_settings(folder: Path, *, is_original: bool) -> LateInteraction:
    """By ColBERT's metadata, by pylate's settings, and else by the defaults of pylate's class. Raises ModelError."""
    general, metadata = read_json(folder / GENERAL), read_json(folder / METADATA) if is_original else None
    given = general if isinstance(general, dict) else {}
    original = metadata if isinstance(metadata, dict) else {}
    prefixes = ("[unused0]", "[unused1]") if is_original else ("[Q] ", "[D] ")

    def setting(name: str, own: str, default: Any, kind: type) -> Any:
        value = given.get(name) if given.get(name) is not None else original.get(own)
        value = default if value is None else value
        is_right = is_size(value) and value >= LEAST_LENGTH if kind is int else isinstance(value, kind)
        if not is_right:
            raise ModelError(f"the settings of {folder.name} have {name} {value!r:.100}, which is no {kind.__name__}")
        return value

    words = given_value(given, "skiplist_words", list, folder / GENERAL)
    skipped = PUNCTUATION if words is None else tuple(map(str, words))
    length = setting("query_length", "query_maxlen", 32, int)
    return LateInteraction(
        query_prefix=setting("query_prefix", "query_token_id", prefixes[0], str),
        document_prefix=setting("document_prefix", "doc_token_id", prefixes[1], str),
        query_length=length,
        document_length=setting("document_length", "doc_maxlen", 180, int),
        filled_length=length if setting("do_query_expansion", "", True, bool) else None,
        fillers_are_seen=setting("attend_to_expansion_tokens", "attend_to_mask_tokens", False, bool),
        skipped=skipped if original.get("mask_punctuation", True) else (),
    )
