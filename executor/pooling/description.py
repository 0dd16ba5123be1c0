"""What a model's folder and the options say about its tasks: whether it generates, and how it pools.

runner=pooling, or by rule: a folder of sentence-transformers or a GGUF file made of one, a model without a head, an
encoder, a classifier
|-- a classifier's architecture         > classify, or token_classify of each token
|-- SpladePooling                       > embed (over the vocabulary), embed_sparse
|-- ColBERT's or pylate's settings      > token_embed
`-- any other                           > embed, token_embed; bge-m3 also embed_sparse, token_classify
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.options.pooler_config import PoolerConfig, pooler_config_of
from headrace.executor.checkpoints.checkpoint import Checkpoint
from headrace.executor.checkpoints.sentence_files import most_of_tokenizer, tells_texts_apart
from headrace.executor.checkpoints.sentence_folder import (
    SentenceFolder,
    class_activation,
    folder_of_modules,
    sentence_folder,
)
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import has_no_head
from headrace.executor.models.families.llama_bidirectional import POOLINGS
from headrace.executor.models.heads import Classifier, HeadLayer, HeadLinear, HeadNorm
from headrace.executor.pooling.output import PooledOutput
from headrace.executor.pooling.pooler import JOINT, TOKEN_POOLINGS, reads_all
from headrace.executor.pooling.yes_no import YesNo, classifier_of, yes_no_of
from headrace.ipc.failure import ModelError, OptionError
from headrace.ipc.messages import Pooling

IDENTITY = "identity"


@dataclass(frozen=True)
class Tasks:
    """What requests may ask a model for."""

    generates: bool = True
    pooling: Pooling | None = None
    max_tokens: int | None = None
    """Most tokens of a prompt by the folder's own files; None: as many as the model takes."""
    outputs: Mapping[str, PooledOutput] = field(default_factory=dict)
    """By kind, how its results are made."""


GENERATES = Tasks()


def tasks_of(checkpoint: Checkpoint, options: Options, spec: ArchSpec) -> Tasks:
    """Raises ModelError and OptionError for what is not computed here.

    runner=auto pools if the folder has sentence-transformers' files, if its config names a model without a head or with
    a classifier, or an encoder, or with convert. runner=generate with convert=embed does both.
    """
    config, folder = pooler_config_of(options.pooler_config), None
    if options.runner != "generate":
        folder = _folder_of(checkpoint, pools=options.runner == "pooling" or not spec.is_causal)
    if options.runner == "generate" and not spec.is_causal:
        raise ModelError(
            f"the tokens of {checkpoint.name} attend to the tokens after them, so that it cannot generate: use "
            "runner=pooling"
        )
    yes_no = None
    if options.runner != "generate" and options.convert in ("auto", "classify"):
        yes_no = yes_no_of((options.model, str(checkpoint.config.get("_name_or_path", ""))), checkpoint.config)
    scores = folder.scores if folder is not None and options.convert in ("auto", "classify") else None
    if yes_no is None and scores is not None and scores.token_ids:
        yes_no = YesNo(scores.token_ids, None)
    if yes_no is not None and spec.classifier is None:
        heads = (*spec.names.lm_heads, spec.names.embedding)
        spec = replace(spec, classifier=classifier_of(yes_no, heads, spec.vocab_size, spec.embedding_width))
    if scores is not None and spec.classifier is None:
        spec = replace(spec, classifier=_of_layers(folder, spec))
    by_itself = not spec.is_causal or spec.classifier is not None or has_no_head(checkpoint.config)
    pools = options.runner == "pooling" or (
        options.runner == "auto" and (folder is not None or by_itself or options.convert not in ("auto", "none"))
    )
    if not pools and options.convert in ("auto", "none"):
        if options.pooler_config:
            raise OptionError("pooler_config is of models that pool: add runner=pooling, or leave it out")
        return GENERATES
    if options.convert == "none" and folder is None and not by_itself:
        raise OptionError(
            f"convert=none leaves {checkpoint.name} as it is, a model that generates, and runner={options.runner} asks "
            "for one that pools: use convert=embed, or leave it out"
        )
    if options.convert == "classify" and spec.classifier is None:
        raise OptionError(
            f"convert=classify makes classes with the classifier of a model, and {spec.architecture} has none; "
            "architectures with one end with ForSequenceClassification or ForTokenClassification"
        )
    if spec.classifier is not None and pools and options.convert != "embed":
        tasks = _classifying(checkpoint, config, folder, spec)
        if yes_no is None or tasks.pooling is None:
            return tasks
        chat = scores.chat if scores is not None and yes_no.pair_format is None else None
        pooling = msgspec.structs.replace(tasks.pooling, pair_format=yes_no.pair_format, pair_chat=chat)
        return replace(tasks, pooling=pooling)
    return _embedding(checkpoint, config, folder, spec, pools=pools)


def _of_layers(folder: SentenceFolder | None, spec: ArchSpec) -> Classifier:
    """The layers behind the pooling of a folder's modules, which make scores."""
    if folder is None or folder.scores is None or not folder.scores.by_layers:
        raise ModelError(
            f"the folder's settings say that {spec.architecture} has a classifier (transformer_task), and it has none; "
            "architectures with one end with ForSequenceClassification"
        )
    _check_pooling_type(folder.tokens, "the model's folder")
    rows = _width_behind(folder.layers, spec.embedding_width * len(folder.tokens.split(JOINT)))
    return Classifier(folder.tokens, folder.layers, rows)


def _folder_of(checkpoint: Checkpoint, *, pools: bool) -> SentenceFolder | None:
    """pools: whether it does so whatever its files say. A GGUF file of a decoder may say that nothing is pooled."""
    if checkpoint.gguf is not None and checkpoint.config_folder is None:
        found = checkpoint.gguf.pooling
        return found if pools or found is None or found.tokens != "ALL" else None
    return sentence_folder(folder_of_modules(checkpoint.config_folder or checkpoint.path))


def _classifying(checkpoint: Checkpoint, config: PoolerConfig, folder: SentenceFolder | None, spec: ArchSpec) -> Tasks:
    classifier = spec.classifier
    assert classifier is not None
    if config.task == "token_classify" and classifier.tokens == "LAST":  # as vLLM computes it of each token instead
        classifier = replace(classifier, tokens="ALL")
    of_tokens = classifier.tokens == "ALL"
    kind = "token_classify" if of_tokens else "classify"
    if config.task not in (None, kind):
        raise OptionError(f"pooler_config.task is {config.task}; this classifier's task is {kind}")
    if config.tokens not in (None, classifier.tokens) and not (of_tokens and config.tokens == "STEP"):
        raise OptionError(
            f"pooler_config asks for pooling type {config.tokens}; this classifier is of {classifier.tokens} tokens"
        )
    if config.step_tag_id is not None and not of_tokens:
        raise OptionError("pooler_config.step_tag_id chooses among the tokens of a text; this classifier is of texts")
    outside = [each for each in config.returned_token_ids or () if each >= classifier.num_labels]
    if outside or (config.returned_token_ids and not of_tokens):
        raise OptionError(
            f"pooler_config.returned_token_ids is {config.returned_token_ids}; it chooses among the values of a token, "
            f"and this classifier has {classifier.num_labels} of each {'token' if of_tokens else 'text'}"
        )
    return Tasks(
        generates=False,
        pooling=Pooling(
            kinds=(kind,),
            tokens="LAST" if of_tokens else classifier.tokens,
            width=classifier.num_labels,
            activate=config.use_activation is not False,
            reads_all=of_tokens or reads_all(classifier.tokens),
            lower_case=folder is not None and folder.lower_case,
            labels=_labels(checkpoint.config, classifier.num_labels),
            has_token_types=_has_token_types(checkpoint, spec),
            prompts={} if folder is None else folder.prompts,
            default_prompt=None if folder is None else folder.default_prompt,
            step_tag_id=config.step_tag_id,
            returned_token_ids=tuple(config.returned_token_ids or ()),
        ),
        max_tokens=_most_tokens(checkpoint, folder, spec),
        outputs={
            kind: PooledOutput(
                classifier.tokens,
                classifier.layers,
                _class_activation(checkpoint.config, folder, classifier.num_labels),
                config.logit_mean or 0.0,
                config.logit_sigma or 1.0,
                classifier.head_first,
            )
        },
    )


def _most_tokens(checkpoint: Checkpoint, folder: SentenceFolder | None, spec: ArchSpec) -> int | None:
    """`Tasks.max_tokens`. Of an encoder without sentence-transformers' files its tokenizer says it, as for
    sentence-transformers, and for vLLM where positions are learned."""
    if folder is not None:
        return folder.max_tokens
    if spec.is_causal or checkpoint.gguf is not None:
        return None
    return most_of_tokenizer(checkpoint.config_folder or checkpoint.path)


def _has_token_types(checkpoint: Checkpoint, spec: ArchSpec) -> bool:
    """Whether the second text of a pair has a token type of its own."""
    if spec.token_types <= 1 or checkpoint.gguf is not None:
        return spec.token_types > 1
    return tells_texts_apart(checkpoint.config_folder or checkpoint.path)


def _class_activation(config: dict[str, Any], folder: SentenceFolder | None, num_labels: int) -> str:
    """What the folder or the config names for cross-encoders, else as vLLM's by problem_type, else by the number of
    labels."""
    if folder is not None and folder.scores is not None and folder.scores.activation is not None:
        return folder.scores.activation
    own = config.get("sentence_transformers") or {}
    if not isinstance(own, dict):
        raise ModelError(f"the config's sentence_transformers is {own!r:.100}; an object is expected")
    named = own.get("activation_fn") or config.get("sbert_ce_default_activation_function")
    if named is not None:
        return class_activation(named, "the config")
    match config.get("problem_type"):
        case "regression":
            return IDENTITY
        case "multi_label_classification":
            return "sigmoid"
    return "sigmoid" if num_labels == 1 else "softmax"


def _labels(config: dict[str, Any], num_labels: int) -> tuple[str, ...]:
    given = config.get("id2label")
    named = {str(key): str(label) for key, label in given.items()} if isinstance(given, dict) else {}
    return tuple(named.get(str(number), f"LABEL_{number}") for number in range(num_labels))


def _embedding(
    checkpoint: Checkpoint, config: PoolerConfig, folder: SentenceFolder | None, spec: ArchSpec, *, pools: bool
) -> Tasks:
    """pools: nothing is generated beside it."""
    if config.logit_mean is not None or config.logit_sigma is not None:
        raise OptionError(
            f"pooler_config.logit_mean and logit_sigma are of scores of a classifier, and {checkpoint.name} embeds"
        )
    if (folder is not None and folder.splade) or _names_splade(checkpoint):
        return _over_vocabulary(checkpoint, config, folder, spec)
    width = spec.embedding_width
    late = None if folder is None else folder.late_interaction
    if late is not None and (late.filled_length or 0) > spec.max_positions:
        raise ModelError(
            f"the folder's settings fill queries up to {late.filled_length} tokens, and the model takes at most "
            f"{spec.max_positions}"
        )
    if folder is not None and folder.width not in (None, width):
        raise ModelError(
            f"the folder's Pooling module makes vectors of {folder.width} values, and the model of {width}"
        )
    by_config = POOLINGS.get(str(checkpoint.config.get("pooling")), "LAST" if spec.has_head else "CLS")
    tokens = config.tokens or (folder.tokens if folder is not None else by_config)
    _check_pooling_type(tokens, "pooler_config" if config.tokens else "the model's folder")
    needs_all = reads_all(tokens)
    if tokens == "ALL" and config.task == "embed":
        raise OptionError(
            f"pooler_config.task is embed, and {checkpoint.name} has vectors of tokens alone: token_embed"
        )
    if needs_all and not pools:
        raise OptionError(
            f"pooling type {tokens} reads all tokens of a prompt, beside which nothing is generated: add runner=pooling"
        )
    activate = config.use_activation
    if activate is None:
        activate = folder is None or folder.normalizes
    outputs = _outputs(tokens, folder, checkpoint, pools=pools)
    if config.task not in (None, *outputs):
        raise OptionError(f"pooler_config.task is {config.task}, and {checkpoint.name} embeds: {' or '.join(outputs)}")
    kinds = (config.task,) if config.task else tuple(outputs)
    widths = {
        kind: _width_behind(output.layers, width * len(output.tokens.split(JOINT))) for kind, output in outputs.items()
    }
    widths |= {kind: min(widths[kind], output.kept) for kind, output in outputs.items() if output.kept is not None}
    width = widths[kinds[0]]
    dimensions = _dimensions(checkpoint)
    if config.dimensions is not None:
        _check_dimensions(config.dimensions, width, dimensions)
    pooling = Pooling(
        kinds=kinds,
        tokens=tokens,
        width=width,
        dimensions=dimensions,
        default_dimensions=config.dimensions,
        activate=activate,
        reads_all=needs_all,
        lower_case=folder is not None and folder.lower_case,
        has_token_types=_has_token_types(checkpoint, spec),
        prompts={} if folder is None else folder.prompts,
        default_prompt=None if folder is None else folder.default_prompt,
        similarity="cosine" if folder is None else folder.similarity,
        late_interaction=late,
        widths=tuple(widths[kind] for kind in kinds),
        flat=tuple(kind for kind in kinds if outputs[kind].is_flat),
        longest=config.max_embed_len,
    )
    return Tasks(not pools, pooling, _most_tokens(checkpoint, folder, spec), outputs)


def _check_pooling_type(tokens: str, where: str) -> None:
    ways = tokens.split(JOINT)
    if not set(ways) <= set(TOKEN_POOLINGS) or (len(ways) > 1 and "ALL" in ways):
        raise ModelError(
            f"{where} asks for pooling type {tokens}, which is not computed here yet; known: "
            f"{', '.join(TOKEN_POOLINGS)}"
        )


def _outputs(
    tokens: str, folder: SentenceFolder | None, checkpoint: Checkpoint, *, pools: bool
) -> dict[str, PooledOutput]:
    """What a model that embeds makes, the default kind first."""
    layers = () if folder is None else folder.layers
    kept = None if folder is None else folder.kept
    outputs = {} if tokens == "ALL" else {"embed": PooledOutput(tokens, layers, kept=kept)}
    if not pools:
        return outputs
    of_tokens = layers if folder is None or folder.of_tokens is None else folder.of_tokens
    if JOINT in tokens:  # the layers take the vectors side by side
        of_tokens = ()
    is_m3 = folder is not None and folder.of_tokens is not None
    skipped = _tokens_of(checkpoint, "bos_token_id") if is_m3 else ()
    outputs["token_embed"] = PooledOutput("ALL", of_tokens, skipped=skipped)
    if folder is not None and folder.weights_of_tokens:
        special = _tokens_of(checkpoint, "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
        weights = folder.weights_of_tokens
        outputs["embed_sparse"] = PooledOutput("ALL", weights, IDENTITY, is_sparse=True, skipped=special)
        ends = _tokens_of(checkpoint, "bos_token_id", "eos_token_id")  # alone, as vLLM: one weight for each other token
        outputs["token_classify"] = PooledOutput("ALL", weights, IDENTITY, is_flat=True, skipped=ends)
    return outputs


def _tokens_of(checkpoint: Checkpoint, *names: str) -> tuple[int, ...]:
    """Those of the config's values that are token ids."""
    given = (checkpoint.config.get(name) for name in names)
    return tuple(each for each in given if isinstance(each, int) and 0 <= each < 1 << 31)


def _width_behind(layers: Sequence[HeadLayer], width: int) -> int:
    """The number of values behind the layers. Raises ModelError for one that takes another number than comes in."""
    for layer in layers:
        if isinstance(layer, HeadLinear | HeadNorm):
            taken = layer.columns if isinstance(layer, HeadLinear) else layer.size
            if taken != width:
                raise ModelError(f"the layer in {layer.folder} takes {taken} values, and {width} come in")
        if isinstance(layer, HeadLinear):
            width = layer.rows
    return width


def _names_splade(checkpoint: Checkpoint) -> bool:
    """Whether the config has vLLM's name of such models, which hf_overrides may give."""
    return "BertSpladeSparseEmbeddingModel" in (checkpoint.config.get("architectures") or ())


def _over_vocabulary(
    checkpoint: Checkpoint, config: PoolerConfig, folder: SentenceFolder | None, spec: ArchSpec
) -> Tasks:
    """SPLADE (Formal et al. 2021): one value for each token of the vocabulary, most of them 0."""
    if not spec.vocabulary_layers:
        raise ModelError(f"{spec.architecture} has no layer over the vocabulary here, which SpladePooling pools")
    if config.task not in (None, "embed"):
        raise OptionError(f"pooler_config.task is {config.task}; a model with SpladePooling has embed")
    if config.tokens not in (None, "MAX"):
        raise OptionError(
            f"pooler_config asks for pooling type {config.tokens}; a model with SpladePooling has its own"
        )
    output = PooledOutput(
        "MAX",
        spec.vocabulary_layers,
        folder.splade if folder is not None and folder.splade else "log1p_relu",
        head_first=True,
    )
    pooling = Pooling(
        kinds=("embed", "embed_sparse"),
        tokens="MAX",
        width=spec.vocab_size,
        activate=config.use_activation is not False,
        reads_all=True,
        lower_case=folder is not None and folder.lower_case,
        has_token_types=_has_token_types(checkpoint, spec),
        prompts={} if folder is None else folder.prompts,
        default_prompt=None if folder is None else folder.default_prompt,
        similarity="dot",
    )
    outputs = {"embed": output, "embed_sparse": replace(output, is_sparse=True)}
    return Tasks(False, pooling, _most_tokens(checkpoint, folder, spec), outputs)


def _dimensions(checkpoint: Checkpoint) -> tuple[int, ...] | None:
    """The model's own statement, under vLLM's names (they may be given as hf_overrides)."""
    if listed := checkpoint.config.get("matryoshka_dimensions"):
        if not isinstance(listed, list) or not all(type(each) is int and each > 0 for each in listed):
            raise ModelError(f"the config's matryoshka_dimensions are {listed!r:.100}; a list of sizes is expected")
        return tuple(listed)
    return () if checkpoint.config.get("is_matryoshka") else None


def _check_dimensions(asked: int, width: int, dimensions: tuple[int, ...] | None) -> None:
    if dimensions is None:
        raise OptionError(
            f"pooler_config.dimensions is {asked}, and the model's config says nothing of is_matryoshka or "
            'matryoshka_dimensions; hf_overrides={"is_matryoshka": true} says it'
        )
    if asked > width or (dimensions and asked not in dimensions):
        allowed = ", ".join(map(str, dimensions)) or f"1 to {width}"
        raise OptionError(f"pooler_config.dimensions is {asked}; this model's are {allowed}")
