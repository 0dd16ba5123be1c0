"""What the files of sentence-transformers beside a model say about its vectors.

    Transformer, Pooling, Dense ...     vectors of texts; of a CrossEncoder scores of pairs
    Transformer, SpladePooling          one value for each token of the vocabulary (sparse_encoder)
    Transformer, Dense ...              vectors of tokens, which are compared (late_interaction_folder.py)
    Transformer                         the model's own classifier, or nothing that is known here
    Transformer, LogitScore             whether the next token would be yes: a score

    1_Pooling/config.json               of which tokens a vector is made: flags before version 5.4, one word since
    2_Dense/config.json                 sizes and activation of a layer, whose weights are beside it; likewise LayerNorm
    sparse_linear.pt, colbert_linear.pt the layers of bge-m3's two other outputs

`sentence_files.py` has the other files. A module of another class is refused by name, since it would change every
vector, and so is a way of pooling that is not known. A Pooling config that says no way is read as
sentence-transformers' class reads it: MEAN.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.executor.checkpoints.late_interaction_folder import (
    has_original,
    of_modules,
    of_settings,
    original_layer,
)
from headrace.executor.checkpoints.sentence_files import (
    GENERAL,
    MODULES,
    GeneralSettings,
    Module,
    TransformerSettings,
    check_names,
    general_settings,
    given_value,
    is_size,
    modules_of,
    object_in,
    read_json,
    transformer_settings,
)
from headrace.executor.models.heads import HeadActivation, HeadLayer, HeadLinear, HeadNorm, HeadUnitLength
from headrace.ipc.failure import ModelError
from headrace.ipc.messages import LateInteraction, PairChat
from headrace.ipc.process.regular_files import is_there

logger = logging.getLogger(__name__)

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
MAX_SIM = "maxsim"
"""How vectors of tokens are compared; pylate writes it, cosine or dot."""
DOCUMENT = "document"
"""The name of the prompt of texts that are no queries, where vectors of tokens are compared."""
ACTIVATIONS: dict[str, HeadActivation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
"""Of torch's modules, by class."""
CLASS_ACTIVATIONS: Mapping[str, str] = {**ACTIVATIONS, "Softmax": "softmax"}
"""Of scores; torch's modules, by class."""
NORM_EPS = 1e-5
SPLADE_ACTIVATIONS = {"relu": "log1p_relu", "log1p_relu": "log1p_log1p_relu"}
"""Of SpladePooling's config, which all logits pass before log(1 + x): one of `FUNCTIONS` (executor/pooling/head.py)."""
CROSS_ENCODER, LATE_INTERACTION = "CrossEncoder", "MultiVectorEncoder"
"""Kinds of models (`GeneralSettings.kind`)."""
POOLED, OF_TOKENS, SCORES = "sentence_embedding", "token_embeddings", "scores"
"""What modules call vectors of texts, those of tokens, and scores."""


class Scores(NamedTuple):
    """How a cross-encoder of sentence-transformers scores pairs."""

    activation: str | None = None
    """One of `FUNCTIONS` (executor/pooling/head.py); None: as the model's config says."""
    by_layers: bool = False
    """Of the layers behind the pooling; else of the model's own classifier, or of `token_ids`."""
    token_ids: tuple[int, ...] = ()
    """The token whose logit is the score, and perhaps one whose logit is taken from it."""
    chat: PairChat | None = None
    """How pairs are put through the chat template; None: they are not."""


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
    scores: Scores | None = None
    """None: it is no cross-encoder."""
    kept: int | None = None
    """How many values of a text's vector are kept once it is scaled; None: all."""


def sentence_folder(folder: Path) -> SentenceFolder | None:
    """None for a folder without these files. Raises ModelError, naming the file, for what cannot be followed."""
    found = [module for module in modules_of(folder) if module.kind != "Dropout"]
    kinds, general = [module.kind for module in found], general_settings(folder)
    if found and kinds[0] == "Transformer" and not is_there(found[0].folder):
        raise ModelError(
            f"{folder / MODULES} names {found[0].folder} as the folder of its Transformer; it is not there"
        )
    match kinds:
        case ["MLMTransformer" | "Transformer", "SpladePooling"]:
            return _splade(folder, found, general)
        case ["Transformer", "LogitScore"]:
            return _of_logits(folder, found, general)
        case ["Transformer"]:
            return _classifying(folder, found[0], general)
    if "Pooling" not in kinds:
        return _late_interaction(folder, found, general)
    if kinds[:2] != ["Transformer", "Pooling"] or not {"Dense", "LayerNorm", "Normalize"} >= set(kinds[2:]):
        raise ModelError(
            f"{folder / MODULES} has the modules {', '.join(kinds)}; computed are Transformer, Pooling, then any of "
            "Dense, LayerNorm and Normalize"
        )
    return _pooling(folder, found, general)


def _pooling(folder: Path, found: list[Module], general: GeneralSettings) -> SentenceFolder:
    transformer, pooled, *behind = found
    file = pooled.folder / "config.json"
    pooling = read_json(file)
    if not isinstance(pooling, dict):
        raise ModelError(f"{file} is missing or no JSON object: it says how {folder.name} pools")
    settings, prompts = _of_texts(transformer), general.prompts
    if given_value(pooling, "include_prompt", bool, file) is False and any(prompts.values()):
        raise ModelError(f"{file} leaves prompts out of the pooled tokens (include_prompt), which is not computed here")
    is_cross = general.kind == CROSS_ENCODER
    for module in behind:
        is_last = module is behind[-1]
        check_names(module, POOLED, ends=SCORES if is_cross and is_last and module.kind == "Dense" else "")
    if is_cross and (not behind or behind[-1].kind != "Dense"):
        raise ModelError(f"{folder / MODULES} has no Dense at its end, which makes the scores of a {CROSS_ENCODER}")
    normalizes = bool(behind) and behind[-1].kind == "Normalize"
    return SentenceFolder(
        tokens=_tokens(pooling, file),
        normalizes=normalizes,
        width=given_value(pooling, "word_embedding_dimension", int, file)
        or given_value(pooling, "embedding_dimension", int, file),
        max_tokens=settings.max_tokens,
        lower_case=settings.lower_case,
        layers=_layers(behind[:-1] if normalizes else behind),
        prompts=prompts,
        default_prompt=general.default_prompt,
        similarity=_similarity(folder, general, SIMILARITIES[0]),
        of_tokens=_of_one_file(folder, "colbert_linear"),
        weights_of_tokens=_of_one_file(folder, "sparse_linear", rows=1, activation="relu") or (),
        scores=Scores(_class_activation(folder), by_layers=True) if is_cross else None,
        kept=None if is_cross else general.truncate_dim,
    )


def model_folder(folder: Path) -> Path:
    """Where the model's own files are: in the folder itself or, as sentence-transformers saved it before version 2, in
    the folder of its Transformer module. Raises ModelError for a modules.json that cannot be followed."""
    if is_there(folder / "config.json"):
        return folder
    first = next(iter(modules_of(folder)), None)
    return first.folder if first is not None and first.kind == "Transformer" else folder


def folder_of_modules(folder: Path) -> Path:
    """The folder whose `model_folder` this one is."""
    above = folder.parent
    is_inner = not is_there(folder / MODULES) and is_there(above / MODULES) and model_folder(above) == folder
    return above if is_inner else folder


def _of_texts(transformer: Module, *tasks: str, whole: bool = True) -> TransformerSettings:
    """whole: queries and documents have no lengths of their own. Raises ModelError for what is of others."""
    settings = transformer_settings(transformer.folder, tasks or ("feature-extraction",))
    if settings.chat is not None:
        raise ModelError(
            f"{settings.file} puts texts through the chat template (modality_config has message), which is not "
            "computed here"
        )
    if whole and settings.query_expansion is not None:
        raise ModelError(f"{settings.file} has query_expansion, which is of models that compare vectors of tokens")
    if whole and (settings.query_length or settings.document_length):
        raise ModelError(
            f"{settings.file} has query_length or document_length, which are followed where vectors of tokens are "
            "compared; max_seq_length is of all texts"
        )
    return settings


def _of_one_file(
    folder: Path, name: str, rows: int | None = None, activation: HeadActivation = "identity"
) -> tuple[HeadLayer, ...] | None:
    """A linear layer of a model's width whose tensors are in a file of their own; None if there is no such file."""
    file, config = folder / f"{name}.pt", read_json(folder / "config.json")
    if not is_there(file) or not isinstance(config, dict) or not is_size(config.get("hidden_size")):
        return None
    width = config["hidden_size"]
    return (HeadLinear("", rows or width, width, True, activation, str(file)),)


def _splade(folder: Path, found: list[Module], general: GeneralSettings) -> SentenceFolder:
    """A masked language model whose logits are pooled (SPLADE, Formal et al. 2021)."""
    transformer, last = found
    file = last.folder / "config.json"
    pooling = read_json(file)
    if not isinstance(pooling, dict):
        raise ModelError(f"{file} is missing or no JSON object: it says how {folder.name} pools")
    strategy = given_value(pooling, "pooling_strategy", str, file) or "max"
    activation = given_value(pooling, "activation_function", str, file) or "relu"
    if strategy != "max":
        raise ModelError(f"{file} has the pooling_strategy {strategy!r:.100}, which is not computed here; known: max")
    if activation not in SPLADE_ACTIVATIONS:
        known = ", ".join(SPLADE_ACTIVATIONS)
        raise ModelError(f"{file} has the activation_function {activation!r:.100}; known: {known}")
    if (most := _general(folder).get("max_active_dims")) is not None:
        raise ModelError(
            f"{folder / GENERAL} has max_active_dims {most!r:.100}: only the largest values of a vector are kept, "
            "which is not computed here"
        )
    settings = _of_texts(transformer, "fill-mask")
    return SentenceFolder(
        tokens="MAX",
        normalizes=True,
        width=None,
        max_tokens=settings.max_tokens,
        lower_case=settings.lower_case,
        layers=(),
        prompts=general.prompts,
        default_prompt=general.default_prompt,
        similarity=_similarity(folder, general, "dot"),
        splade=SPLADE_ACTIVATIONS[activation],
    )


def _classifying(folder: Path, transformer: Module, general: GeneralSettings) -> SentenceFolder | None:
    """A model with a classifier of its own; None for another one without any module behind it."""
    tasks = ("sequence-classification", "feature-extraction")
    is_cross = general.kind == CROSS_ENCODER
    settings = _of_texts(transformer, *(tasks if is_cross else reversed(tasks)))
    return _scoring(general, settings, Scores(_class_activation(folder))) if settings.task == tasks[0] else None


def _of_logits(folder: Path, found: list[Module], general: GeneralSettings) -> SentenceFolder:
    """A model that generates, whose logits of the next token are scores."""
    transformer, last = found
    settings = transformer_settings(transformer.folder, ("text-generation",))
    file = last.folder / "config.json"
    config = read_json(file)
    given = config if isinstance(config, dict) else {}
    ids = (given.get("true_token_id"), given.get("false_token_id"))
    if not all(type(each) is int and each >= 0 for each in ids[: 1 if ids[1] is None else 2]):
        raise ModelError(
            f"{file} has true_token_id {ids[0]!r:.100} and false_token_id {ids[1]!r:.100}; ids are expected"
        )
    token_ids = tuple(each for each in ids if each is not None)
    if settings.chat is not None and any(general.prompts.values()):
        raise ModelError(
            f"{folder / GENERAL} has prompts, which become messages where pairs are put through a chat template; "
            "that is not computed here"
        )
    scores = Scores(_class_activation(folder) or "sigmoid", token_ids=token_ids, chat=settings.chat)
    return _scoring(general, settings, scores)


def _scoring(general: GeneralSettings, settings: TransformerSettings, scores: Scores) -> SentenceFolder:
    return SentenceFolder(
        tokens="LAST",
        normalizes=False,
        width=None,
        max_tokens=settings.max_tokens,
        lower_case=settings.lower_case,
        layers=(),
        prompts=general.prompts,
        default_prompt=general.default_prompt,
        similarity="cosine",
        scores=scores,
    )


def _class_activation(folder: Path) -> str | None:
    """Of scores, as versions 6 and later write it beside the model's config."""
    named = given_value(_general(folder), "activation_fn", str, folder / GENERAL)
    return None if named is None else class_activation(named, folder / GENERAL)


def class_activation(named: object, where: object) -> str:
    """One of `FUNCTIONS` (executor/pooling/head.py), by torch's name of a module. where: for messages. Raises
    ModelError."""
    kind = named.rpartition(".")[2] if isinstance(named, str) else ""
    if kind not in CLASS_ACTIVATIONS:
        raise ModelError(f"{where}: the activation of scores is {named!r:.100}; known: {', '.join(CLASS_ACTIVATIONS)}")
    return CLASS_ACTIVATIONS[kind]


def _late_interaction(folder: Path, found: list[Module], general: GeneralSettings) -> SentenceFolder | None:
    """A model whose tokens' vectors are compared (ColBERT, Khattab and Zaharia 2020), as sentence-transformers or
    pylate save it or as ColBERT's own code does; None for folders without modules."""
    kinds, is_original = [module.kind for module in found], has_original(folder)
    if not found and not is_original:
        return None
    is_own = general.kind == LATE_INTERACTION
    ends = sorted(kind for kind in kinds[1:] if kind not in ("Dense", "LayerNorm"))
    layers = _layers([module for module in found[1:] if module.kind != "Normalize"])
    if (found and kinds[0] != "Transformer") or ends != sorted(set(ends) & {"Normalize", "MultiVectorMask"}):
        raise ModelError(
            f"{folder / MODULES} has the modules {', '.join(kinds)}; where vectors of tokens are compared, computed "
            "are Transformer, then layers of Dense and LayerNorm, then Normalize, MultiVectorMask, both or neither"
        )
    if not (is_own or is_original or layers):
        raise ModelError(
            f"{folder / MODULES} has the modules {', '.join(kinds)}: none says how a text's vector is made"
        )
    if "Normalize" in kinds and any(kind in ("Dense", "LayerNorm") for kind in kinds[kinds.index("Normalize") :]):
        raise ModelError(f"{folder / MODULES} has a layer behind Normalize, which is not computed here")
    if is_own:
        for module in found[1:]:
            if module.kind != "MultiVectorMask":
                check_names(module, OF_TOKENS)
    settings = _of_texts(found[0] if found else Module("Transformer", folder), whole=False)
    mask = next((module for module in found if module.kind == "MultiVectorMask"), None)
    late = of_modules(settings, mask) if is_own else of_settings(folder, is_original=is_original)
    if general.similarity and general.similarity.lower() not in (MAX_SIM, *SIMILARITIES[:2]):
        raise ModelError(f"{folder / GENERAL} compares vectors by {general.similarity!r:.100}; known: {MAX_SIM}")
    return SentenceFolder(
        tokens="ALL",
        normalizes="Normalize" in kinds or not is_own,
        width=None,
        # The settings' max_seq_length that pylate writes is of whatever text was tokenised last.
        max_tokens=settings.max_tokens if is_own else None,
        lower_case=settings.lower_case,
        layers=layers or ((original_layer(folder),) if is_original else ()),
        prompts=general.prompts,
        default_prompt=general.default_prompt or (DOCUMENT if is_own and DOCUMENT in general.prompts else None),
        similarity="dot",
        late_interaction=late,
    )


def _layers(found: Sequence[Module]) -> tuple[HeadLayer, ...]:
    return tuple(_layer(module) for module in found if module.kind in ("Dense", "LayerNorm", "Normalize"))


def _layer(module: Module) -> HeadLayer:
    if module.kind == "Normalize":
        return HeadUnitLength()
    file = module.folder / "config.json"
    config = read_json(file)
    if not isinstance(config, dict):
        raise ModelError(f"{file} is missing or no JSON object: it says the layer's sizes")
    names = ("in_features", "out_features") if module.kind == "Dense" else ("dimension",)
    sizes = [config.get(name) for name in names]
    if not all(map(is_size, sizes)):
        raise ModelError(f"{file} says no {' or '.join(names)}, whole numbers above 0")
    if module.kind == "LayerNorm":
        return HeadNorm("norm", sizes[0], NORM_EPS, folder=str(module.folder))  # type: ignore[arg-type]
    named = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    activation = ACTIVATIONS.get(str(named).rpartition(".")[2])
    if activation is None or not str(named).startswith("torch.nn."):
        raise ModelError(
            f"{file} has the activation_function {named!r:.100}; known: torch.nn's {', '.join(ACTIVATIONS)}"
        )
    columns, rows = sizes
    return HeadLinear(
        "linear",
        rows,  # type: ignore[arg-type]
        columns,  # type: ignore[arg-type]
        given_value(config, "bias", bool, file) is not False,
        activation,
        str(module.folder),
        given_value(config, "use_residual", bool, file) or False,
    )


def _similarity(folder: Path, general: GeneralSettings, usual: str) -> str:
    found = general.similarity or usual
    if found not in SIMILARITIES:
        raise ModelError(f"{folder / GENERAL} compares vectors by {found!r:.100}; known: {', '.join(SIMILARITIES)}")
    return found


def _general(folder: Path) -> Mapping[str, Any]:
    return object_in(folder / GENERAL)


def _tokens(pooling: dict[str, Any], file: Path) -> str:
    if (word := pooling.get("pooling_mode")) is not None:
        words = [word] if isinstance(word, str) else word
        if not isinstance(words, list) or not words or not all(isinstance(each, str) for each in words):
            raise ModelError(f"{file} has pooling_mode {word!r:.100}; a word or a list of words is expected")
        return "+".join(WORDS.get(str(each), str(each)) for each in words)
    for key in pooling:
        if key.startswith("pooling_mode_"):
            given_value(pooling, key, bool, file)
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
