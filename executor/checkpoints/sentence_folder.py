"""What the files of sentence-transformers beside a model say about its vectors.

    modules.json                        the chain of modules, in order; each may have a folder
    1_Pooling/config.json               of which tokens a vector is made: flags before version 5.4, one word since
    2_Dense/config.json                 sizes and activation of a layer, whose weights are beside it; likewise LayerNorm
    sentence_bert_config.json           max_seq_length, do_lower_case
    config_sentence_transformers.json   prompts by name, the default one, how vectors are compared; of late interaction
                                        (pylate) also how queries and documents are written
    1_SpladePooling/config.json         behind a masked language model: one value for each token of the vocabulary
    artifact.metadata                   how ColBERT's own code writes texts; the checkpoint has its layer
    sparse_linear.pt, colbert_linear.pt the layers of bge-m3's two other outputs

A module of another class is refused by name, since it would change every vector, and so is a way of pooling that is not
known. A Pooling config that says no way is read as sentence-transformers' class reads it: MEAN.
"""

from __future__ import annotations

import json
import logging
import string
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from headrace.executor.models.heads import COLBERT, HeadActivation, HeadLayer, HeadLinear, HeadNorm
from headrace.ipc.failure import ModelError
from headrace.ipc.messages import LateInteraction
from headrace.ipc.process.regular_files import is_there, read_text

logger = logging.getLogger(__name__)
T = TypeVar("T")

MODULES = "modules.json"
SETTINGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the Transformer module's settings, of which a folder has one."""
FLAGS = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_max_tokens": "MAX",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_mean_sqrt_len_tokens": "MEAN_SQRT_LEN",
    "pooling_mode_weightedmean_tokens": "WEIGHTED_MEAN",
    "pooling_mode_lasttoken": "LAST",
}
"""Old flags, in the order in which vectors lie side by side where several are on, and the name of the pooling type
(`executor/pooling/pooler.py`)."""
WORDS = {
    "cls": "CLS",
    "mean": "MEAN",
    "lasttoken": "LAST",
    "max": "MAX",
    "mean_sqrt_len_tokens": "MEAN_SQRT_LEN",
    "weightedmean": "WEIGHTED_MEAN",
}
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
ACTIVATIONS: dict[str, HeadActivation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
"""Of torch's modules, by class."""
NORM_EPS = 1e-5
_KNOWN = ("Transformer", "Pooling", "Dense", "LayerNorm", "Dropout", "Normalize", "MLMTransformer", "SpladePooling")
_PACKAGES = ("sentence_transformers", "pylate")
JINA_TRANSFORMER = "custom_st.Transformer"
"""Of Jina Embeddings 3: a Transformer that chooses among the tasks' factors (merged_tasks.py)."""
SPLADE_ACTIVATIONS = {"relu": "log1p_relu", "log1p_relu": "log1p_log1p_relu"}
"""Of SpladePooling's config, which all logits pass before log(1 + x): one of `FUNCTIONS` (executor/pooling/head.py)."""
LEAST_LENGTH = 3
"""Tokens of a text: its first one, a marker and its last one."""
MOST = (1 << 31) - 1
"""Of sizes and lengths in these files."""
COLBERT_METADATA = "artifact.metadata"
PUNCTUATION = tuple(string.punctuation)


class SentenceFolder(NamedTuple):
    tokens: str
    """The type of pooling, under vLLM's name if it has one; ALL: texts have no vector of their own, but their tokens
    have, which are compared."""
    normalizes: bool
    """Whether vectors are scaled to length 1."""
    width: int | None
    """The number of values of pooled states."""
    max_tokens: int | None
    """Most tokens of a text; None: as many as the model takes."""
    lower_case: bool
    """Whether texts are put in lower case before they are tokenised."""
    layers: tuple[HeadLayer, ...]
    """Layers behind the pooling, which change the vectors' width."""
    prompts: dict[str, str]
    """What is put before a text, by name."""
    default_prompt: str | None
    similarity: str
    """How vectors are compared."""
    late_interaction: LateInteraction | None = None
    splade: str = ""
    """The activation of vectors over the vocabulary; empty: vectors are of hidden states."""
    of_tokens: tuple[HeadLayer, ...] | None = None
    """Layers of tokens' vectors, where they are others than those of texts."""
    weights_of_tokens: tuple[HeadLayer, ...] = ()
    """Layers that give each token a weight; none: it has none."""


class _Module(NamedTuple):
    kind: str
    folder: Path


def sentence_folder(folder: Path) -> SentenceFolder | None:
    """None for a folder without these files. Raises ModelError, naming the file, for what cannot be followed."""
    found = _modules(folder)
    by_kind = {module.kind: module.folder for module in found}
    kinds = [module.kind for module in found if module.kind != "Dropout"]
    if kinds == ["MLMTransformer", "SpladePooling"]:
        return _splade(folder, by_kind)
    if "Pooling" not in by_kind:
        return _late_interaction(folder, found)
    begin, behind = kinds[:2], [kind for kind in kinds[2:] if kind != "Normalize"]
    if begin != ["Transformer", "Pooling"] or any(kind in _KNOWN[:2] for kind in behind) or "Normalize" in kinds[:-1]:
        raise ModelError(
            f"{folder / MODULES} has the modules {', '.join(kinds)}; computed are Transformer, Pooling, then layers of "
            "Dense and LayerNorm, then Normalize or nothing"
        )
    file = by_kind["Pooling"] / "config.json"
    pooling = _read(file)
    if not isinstance(pooling, dict):
        raise ModelError(f"{file} is missing or no JSON object: it says how {folder.name} pools")
    settings, prompts, default, similarity = _settings(folder, by_kind["Transformer"])
    if not pooling.get("include_prompt", True) and any(prompts.values()):
        raise ModelError(f"{file} leaves prompts out of the pooled tokens (include_prompt), which is not computed here")
    return SentenceFolder(
        tokens=_tokens(pooling, file),
        normalizes="Normalize" in by_kind,
        width=_given(pooling, "word_embedding_dimension", int, file)
        or _given(pooling, "embedding_dimension", int, file),
        max_tokens=_max_tokens(settings, by_kind["Transformer"]),
        lower_case=bool(settings.get("do_lower_case", False)),
        layers=tuple(_layer(module) for module in found if module.kind in ("Dense", "LayerNorm")),
        prompts=prompts,
        default_prompt=default,
        similarity=similarity,
        of_tokens=_of_one_file(folder, "colbert_linear"),
        weights_of_tokens=_of_one_file(folder, "sparse_linear", rows=1, activation="relu") or (),
    )


def model_folder(folder: Path) -> Path:
    """Where the model's own files are: in the folder itself or, as sentence-transformers saved it before version 2, in
    the folder of its Transformer module. Raises ModelError for a modules.json that cannot be followed."""
    if is_there(folder / "config.json"):
        return folder
    first = next(iter(_modules(folder)), None)
    return first.folder if first is not None and first.kind == "Transformer" else folder


def folder_of_modules(folder: Path) -> Path:
    """The folder whose `model_folder` this one is."""
    above = folder.parent
    is_inner = not is_there(folder / MODULES) and is_there(above / MODULES) and model_folder(above) == folder
    return above if is_inner else folder


def _settings(folder: Path, transformer: Path) -> tuple[dict[str, Any], dict[str, str], str | None, str]:
    """The Transformer module's settings, then those of `_general`."""
    own = next((each for name in SETTINGS if (each := _read(transformer / name)) is not None), None)
    return own if isinstance(own, dict) else {}, *_general(_general_file(folder), folder)


def _general_path(folder: Path) -> Path:
    return folder / "config_sentence_transformers.json"


def _general_file(folder: Path) -> dict[str, Any]:
    found = _read(_general_path(folder))
    return found if isinstance(found, dict) else {}


def _of_one_file(
    folder: Path, name: str, rows: int | None = None, activation: HeadActivation = "identity"
) -> tuple[HeadLayer, ...] | None:
    """A linear layer of a model's width whose tensors are in a file of their own; None if there is no such file."""
    file, config = folder / f"{name}.pt", _read(folder / "config.json")
    if not is_there(file) or not isinstance(config, dict) or not _is_size(config.get("hidden_size")):
        return None
    width = config["hidden_size"]
    return (HeadLinear("", rows or width, width, True, activation, str(file)),)


def _splade(folder: Path, by_kind: Mapping[str, Path]) -> SentenceFolder:
    """A masked language model whose logits are pooled (SPLADE, Formal et al. 2021)."""
    file = by_kind["SpladePooling"] / "config.json"
    pooling = _read(file)
    if not isinstance(pooling, dict):
        raise ModelError(f"{file} is missing or no JSON object: it says how {folder.name} pools")
    strategy = _given(pooling, "pooling_strategy", str, file) or "max"
    activation = _given(pooling, "activation_function", str, file) or "relu"
    if strategy != "max":
        raise ModelError(f"{file} has the pooling_strategy {strategy!r:.100}, which is not computed here; known: max")
    if activation not in SPLADE_ACTIVATIONS:
        known = ", ".join(SPLADE_ACTIVATIONS)
        raise ModelError(f"{file} has the activation_function {activation!r:.100}; known: {known}")
    settings, prompts, default, _ = _settings(folder, by_kind["MLMTransformer"])
    return SentenceFolder(
        tokens="MAX",
        normalizes=True,
        width=None,
        max_tokens=_max_tokens(settings, by_kind["MLMTransformer"]),
        lower_case=bool(settings.get("do_lower_case", False)),
        layers=(),
        prompts=prompts,
        default_prompt=default,
        similarity="dot",
        splade=SPLADE_ACTIVATIONS[activation],
    )


def _late_interaction(folder: Path, found: list[_Module]) -> SentenceFolder | None:
    """A model whose tokens' vectors are compared (ColBERT, Khattab and Zaharia 2020), as pylate saves it or as
    ColBERT's own code does; None for other folders."""
    kinds, config = [module.kind for module in found], _read(folder / "config.json")
    architectures = config.get("architectures") if isinstance(config, dict) else None
    is_original = isinstance(architectures, list) and architectures[:1] == [COLBERT]
    if kinds[:1] != ["Transformer"] and not is_original:
        return None
    transformer = found[0].folder if found else folder
    settings, prompts, default, _ = _settings(folder, transformer)
    layers = tuple(_layer(module) for module in found if module.kind in ("Dense", "LayerNorm"))
    if not layers and not is_original:
        return None
    if is_original and not layers:
        layers = (_original_layer(folder, config),)
    return SentenceFolder(
        tokens="ALL",
        normalizes=True,
        width=None,
        max_tokens=None,  # the settings' max_seq_length is of whatever text was tokenised last
        lower_case=bool(settings.get("do_lower_case", False)),
        layers=layers,
        prompts=prompts,
        default_prompt=default,
        similarity="dot",
        late_interaction=_written(folder, is_original=is_original),
    )


def _original_layer(folder: Path, config: Any) -> HeadLayer:
    metadata = _read(folder / COLBERT_METADATA)
    width = metadata.get("dim", 128) if isinstance(metadata, dict) else 128
    if not _is_size(width) or not _is_size(config.get("hidden_size")):
        raise ModelError(f"{folder / COLBERT_METADATA} has dim {width!r:.100}, which is no width of vectors")
    return HeadLinear("linear", width, config["hidden_size"], bias=False)


def _written(folder: Path, *, is_original: bool) -> LateInteraction:
    """How queries and documents are written: by ColBERT's metadata, by pylate's settings, and else by the defaults of
    pylate's class."""
    given, metadata = _general_file(folder), _read(folder / COLBERT_METADATA) if is_original else None
    original = metadata if isinstance(metadata, dict) else {}
    prefixes = ("[unused0]", "[unused1]") if is_original else ("[Q] ", "[D] ")

    def setting(name: str, own: str, default: Any, kind: type) -> Any:
        value = given.get(name) if given.get(name) is not None else original.get(own)
        value = default if value is None else value
        is_right = _is_size(value) and value >= LEAST_LENGTH if kind is int else isinstance(value, kind)
        if not is_right:
            raise ModelError(f"the settings of {folder.name} have {name} {value!r:.100}, which is no {kind.__name__}")
        return value

    words = _given(given, "skiplist_words", list, _general_path(folder))
    skipped = PUNCTUATION if words is None else tuple(map(str, words))
    return LateInteraction(
        query_prefix=setting("query_prefix", "query_token_id", prefixes[0], str),
        document_prefix=setting("document_prefix", "doc_token_id", prefixes[1], str),
        query_length=setting("query_length", "query_maxlen", 32, int),
        document_length=setting("document_length", "doc_maxlen", 180, int),
        fills_queries=setting("do_query_expansion", "", True, bool),
        fillers_are_seen=setting("attend_to_expansion_tokens", "attend_to_mask_tokens", False, bool),
        skipped=skipped if original.get("mask_punctuation", True) else (),
    )


def _modules(folder: Path) -> list[_Module]:
    modules = _read(folder / MODULES)
    if modules is None:
        return []
    if not (isinstance(modules, list) and all(isinstance(each, dict) for each in modules)):
        raise ModelError(f"{folder / MODULES} is no list of modules")
    found: list[_Module] = []
    for module in modules:
        package, _, kind = str(module.get("type", "")).rpartition(".")
        if f"{package}.{kind}" == JINA_TRANSFORMER and _has_tasks(folder):
            package = _PACKAGES[0]
        if kind not in _KNOWN or package.partition(".")[0] not in _PACKAGES:
            raise ModelError(
                f"{folder / MODULES} has the module {module.get('type')!r}, which is not computed here; known: "
                f"{', '.join(_KNOWN)} of sentence_transformers"
            )
        path = PurePosixPath(str(module.get("path", "")))
        if path.is_absolute() or ".." in path.parts:
            raise ModelError(f"{folder / MODULES} gives {kind} the path {str(path)!r}, which leaves the folder")
        found.append(_Module(kind, folder / path))
    return found


def _has_tasks(folder: Path) -> bool:
    config = _read(folder / "config.json")
    return isinstance(config, dict) and bool(config.get("lora_adaptations"))


def _layer(module: _Module) -> HeadLayer:
    file = module.folder / "config.json"
    config = _read(file)
    if not isinstance(config, dict):
        raise ModelError(f"{file} is missing or no JSON object: it says the layer's sizes")
    names = ("in_features", "out_features") if module.kind == "Dense" else ("dimension",)
    sizes = [config.get(name) for name in names]
    if not all(map(_is_size, sizes)):
        raise ModelError(f"{file} says no {' or '.join(names)}, whole numbers above 0")
    if module.kind == "LayerNorm":
        return HeadNorm("norm", sizes[0], NORM_EPS, folder=str(module.folder))  # type: ignore[arg-type]
    named = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    activation = ACTIVATIONS.get(str(named).rpartition(".")[2])
    if activation is None or not str(named).startswith("torch.nn."):
        raise ModelError(
            f"{file} has the activation_function {named!r:.100}; known: torch.nn's {', '.join(ACTIVATIONS)}"
        )
    if config.get("use_residual"):
        raise ModelError(f"{file} adds the layer's input to its output (use_residual), which is not computed here")
    bias = bool(config.get("bias", True))
    return HeadLinear("linear", sizes[1], sizes[0], bias, activation, str(module.folder))  # type: ignore[arg-type]


def _general(given: dict[str, Any], folder: Path) -> tuple[dict[str, str], str | None, str]:
    """Prompts by name, the name of the default one, and how vectors are compared."""
    file = _general_path(folder)
    prompts, default = given.get("prompts") or {}, _given(given, "default_prompt_name", str, file)
    if not (isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())):
        raise ModelError(f"{file} has prompts that are no texts by name")
    if default is not None and default not in prompts:
        raise ModelError(f"{file} has the default_prompt_name {default!r:.100}; its prompts are {', '.join(prompts)}")
    similarity = _given(given, "similarity_fn_name", str, file) or SIMILARITIES[0]
    if similarity not in SIMILARITIES:
        raise ModelError(f"{file} compares vectors by {similarity!r:.100}; known: {', '.join(SIMILARITIES)}")
    return {str(name): text for name, text in prompts.items()}, default, similarity


def _tokens(pooling: dict[str, Any], file: Path) -> str:
    if (word := pooling.get("pooling_mode")) is not None:
        words = [word] if isinstance(word, str) else word
        if not isinstance(words, list) or not words or not all(isinstance(each, str) for each in words):
            raise ModelError(f"{file} has pooling_mode {word!r:.100}; a word or a list of words is expected")
        return "+".join(WORDS.get(str(each), str(each)) for each in words)
    others = [key for key, on in pooling.items() if key.startswith("pooling_mode_") and key not in FLAGS and on]
    if others:
        raise ModelError(f"{file} asks for {', '.join(others)}, which is not known; known: {', '.join(FLAGS)}")
    if chosen := [name for flag, name in FLAGS.items() if pooling.get(flag)]:
        return "+".join(chosen)
    mean = next(flag for flag, name in FLAGS.items() if name == "MEAN")
    if not pooling.get(mean, True):
        raise ModelError(f"{file} says no way to pool: {mean} is false, and no other is true of {', '.join(FLAGS)}")
    logger.info("%s names no pooling: mean pooling is used, which is sentence-transformers' default", file)
    return "MEAN"


def _read(file: Path) -> Any:
    if not is_there(file):
        return None
    try:
        return json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _max_tokens(settings: Mapping[str, Any], folder: Path) -> int | None:
    return _given(settings, "max_seq_length", int, folder)


def _given(given: Mapping[str, Any], key: str, kind: type[T], where: Path) -> T | None:
    """A file's value of a key, None where it has none; a whole number is a size. where: for messages."""
    value = given.get(key)
    if value is None or (_is_size(value) if kind is int else isinstance(value, kind)):
        return value
    wanted = f"a whole number from 1 to {MOST}" if kind is int else f"a {kind.__name__}"
    raise ModelError(f"{where} has the {key} {value!r:.100}; {wanted} is expected")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST
