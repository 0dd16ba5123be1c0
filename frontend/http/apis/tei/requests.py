"""Requests of text-embeddings-inference, and what is run for them. Texts are cut unless a request says otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.openai.prompts import check_text_length
from headrace.frontend.http.apis.pooling.chunks import Pooled
from headrace.frontend.http.apis.pooling.embeddings import SparseValue, pairs_of
from headrace.frontend.http.apis.pooling.pooled import (
    Dimensions,
    EmptyListError,
    Input,
    Model,
    PooledAnswer,
    PoolingContext,
    PoolingUsage,
    PromptName,
    RequestId,
    TextOptions,
    Write,
    check_count,
    checked_params,
    most_encoded,
    names_of,
    pooling_of,
    prepare_vectors,
    prompts_of,
    ready,
)
from headrace.frontend.http.apis.pooling.scores import Pairs, prepare_pairs, task_of_scores
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.errors import bad_field
from headrace.frontend.http.server.generation import PreparedRequest
from headrace.frontend.request.pair_prompts import tokenize_pairs
from headrace.frontend.request.parameters.pooling_params import PoolingParams
from headrace.frontend.request.pooling_prompts import most_tokens
from headrace.frontend.request.prompts import Prompt, Tokenization

Truncate = Annotated[
    bool | None, Meta(description="Cut texts that are too long, instead of refusing them; default: true")
]
Direction = Annotated[
    Literal["Left", "Right", "left", "right"] | None, Meta(description="Side on which texts are cut; default: Right")
]
RawScores = Annotated[bool | None, Meta(description="Return logits, not probabilities; default: false")]


class Truncation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    truncate: Truncate = None
    truncation_direction: Direction = None

    @property
    def side(self) -> Literal["left", "right"]:
        return "left" if self.truncation_direction in ("Left", "left") else "right"

    @property
    def kept(self) -> int | None:
        """`PoolingParams.truncate_prompt_tokens`"""
        return None if self.truncate is False else -1


class TeiRequest(Truncation, kw_only=True):
    model: Model = None
    request_id: RequestId = None


class TeiInputs(TeiRequest):
    inputs: Input
    prompt_name: PromptName = None


class TeiEmbedRequest(TeiInputs):
    """POST /embed"""

    normalize: Annotated[bool | None, Meta(description="Scale vectors to length 1; default: true")] = None
    dimensions: Dimensions = None


class TeiEmbedAllRequest(TeiInputs):
    """POST /embed_all"""


class TeiEmbedSparseRequest(TeiInputs):
    """POST /embed_sparse"""


class TeiPredictRequest(TeiRequest):
    """POST /predict"""

    inputs: Annotated[
        str | list[str | list[str]],
        Meta(description="A text; a pair of texts; or a list with a list of one text or two for each input"),
    ]
    raw_scores: RawScores = None


class TeiRerankRequest(TeiRequest):
    """POST /rerank"""

    query: Annotated[str, Meta(description="The text to which texts are to be relevant")]
    texts: Annotated[list[str], Meta(description="The texts that are ordered")]
    raw_scores: RawScores = None
    return_text: Annotated[bool | None, Meta(description="Return the texts too; default: false")] = None


class TeiSimilarityInputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    source_sentence: str
    sentences: list[str]


class TeiSimilarityParameters(Truncation, kw_only=True):
    prompt_name: PromptName = None


class TeiSimilarityRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /similarity"""

    inputs: TeiSimilarityInputs
    parameters: TeiSimilarityParameters | None = None
    model: Model = None
    request_id: RequestId = None


class TeiPrediction(msgspec.Struct):
    score: float
    label: str


class TeiRank(msgspec.Struct, omit_defaults=True):
    index: int
    score: float
    text: str | None = None


def prepare_embed(
    request: TeiEmbedRequest, engine: Engine, options: ServeOptions, context: PoolingContext
) -> PreparedRequest:
    of_vectors = {"use_activation": request.normalize is not False, "dimensions": request.dimensions}
    return _prepared(request, {"task": "embed", **of_vectors}, engine, options, context, _lists)


def prepare_embed_all(
    request: TeiEmbedAllRequest, engine: Engine, options: ServeOptions, context: PoolingContext
) -> PreparedRequest:
    _, pooling = pooling_of(engine, request.model or engine.names[0], "embeddings")
    activates = None if pooling.late_interaction is not None else False

    return _prepared(request, {"task": "token_embed", "use_activation": activates}, engine, options, context, _lists)


def prepare_embed_sparse(
    request: TeiEmbedSparseRequest, engine: Engine, options: ServeOptions, context: PoolingContext
) -> PreparedRequest:
    def write(streams: Sequence[Pooled], usage: PoolingUsage) -> list[list[SparseValue]]:
        return [pairs_of(stream.parts[0]) for stream in streams]

    return _prepared(request, {"task": "embed_sparse"}, engine, options, context, write)


def _lists(streams: Sequence[Pooled], usage: PoolingUsage) -> list[Any]:
    return [stream.parts[0].tolist() for stream in streams]


def _prepared(
    request: TeiInputs,
    fields: Mapping[str, Any],
    engine: Engine,
    options: ServeOptions,
    context: PoolingContext,
    write: Write,
) -> PreparedRequest:
    """fields: of PoolingParams, besides those that all these requests have."""
    model = request.model or engine.names[0]
    _, pooling = pooling_of(engine, model, "embeddings")
    kept, named = request.kept, request.prompt_name
    params = checked_params(pooling, model, truncate_prompt_tokens=kept, prompt_name=named, **fields)
    how = TextOptions(request.side, param="inputs")
    return prepare_vectors(request.inputs, params, engine, options, context, PooledAnswer(write), how)


def prepare_predict(
    request: TeiPredictRequest, engine: Engine, options: ServeOptions, context: PoolingContext
) -> PreparedRequest:
    model, (is_batch, inputs) = request.model or engine.names[0], _predicted(request.inputs)
    _, pooling = pooling_of(engine, model, "classes")
    params = _class_params("classify", request.raw_scores, request.kept, engine, model)
    check_count("inputs", inputs, options)
    names, prompts = names_of("inputs", len(inputs)), list[Prompt]()
    for texts, param in zip(inputs, names, strict=True):
        prompts += _one_or_pair(texts, params, engine, request.side, param)

    def write(streams: Sequence[Pooled], usage: PoolingUsage) -> list[Any]:
        found = []
        for stream in streams:
            scores = stream.parts[0].tolist()
            told = [TeiPrediction(score, label) for score, label in zip(scores, pooling.labels, strict=True)]
            found.append(sorted(told, key=lambda each: -each.score))
        return found if is_batch else found[0]

    return ready(engine, prompts, names, params, context, PooledAnswer(write))


def _predicted(inputs: Any) -> tuple[bool, list[list[str]]]:
    """Whether they are several, and the one text or two of each. Raises ApiError."""
    if isinstance(inputs, str):
        return False, [[inputs]]
    if not inputs:
        raise EmptyListError("inputs", "give a text, a pair of texts, or a list of lists of them")
    is_batch = not isinstance(inputs[0], str)
    several = inputs if is_batch else [inputs]
    for index, texts in enumerate(several):
        if not (isinstance(texts, list) and len(texts) in (1, 2) and all(isinstance(each, str) for each in texts)):
            where = f"inputs[{index}]" if is_batch else "inputs"
            raise bad_field(where, f"{where} must be a list of one text, or of the two of a pair")
    return is_batch, several


def _one_or_pair(texts: list[str], params: PoolingParams, engine: Engine, side: Any, param: str) -> list[Prompt]:
    client, how = engine.connected, Tokenization(truncation_side=side)
    if not all(texts):
        raise bad_field(param, f"{param} has an empty text; give at least one token")
    if len(texts) == 1 or client.tokenizer is None:
        return prompts_of(texts, params, engine, TextOptions(side, param=param))
    for text in texts:
        check_text_length(text, client.tokenizer, most_encoded(params, client.welcome), param)
    kept = most_tokens(how, params, client.welcome)
    return tokenize_pairs(
        [(texts[0], texts[1])], client.tokenizer, client.welcome, kept, how, prompt_name=params.prompt_name
    )


def prepare_rerank(
    request: TeiRerankRequest, engine: Engine, options: ServeOptions, context: PoolingContext
) -> PreparedRequest:
    if not request.texts:
        raise EmptyListError("texts", "give at least one text")
    model = request.model or engine.names[0]
    params = _class_params(task_of_scores(engine, model), request.raw_scores, request.kept, engine, model)

    def write(scores: Sequence[float], usage: PoolingUsage) -> list[TeiRank]:
        best = sorted(range(len(scores)), key=lambda index: -scores[index])
        shows = bool(request.return_text)
        return [TeiRank(index, scores[index], request.texts[index] if shows else None) for index in best]

    pairs = [(request.query, text) for text in request.texts]
    return prepare_pairs(Pairs(pairs, ("query", "texts"), params, request.side), engine, options, context, write)


def prepare_similarity(
    request: TeiSimilarityRequest, engine: Engine, options: ServeOptions, context: PoolingContext
) -> PreparedRequest:
    """A bi-encoder's similarity. The prompt is put before all texts."""
    given = request.parameters or TeiSimilarityParameters()
    if not request.inputs.sentences:
        raise EmptyListError("inputs.sentences", "give at least one text")
    model = request.model or engine.names[0]
    _, pooling = pooling_of(engine, model, "embeddings")
    kept, named = given.kept, given.prompt_name
    params = checked_params(pooling, model, task="embed", truncate_prompt_tokens=kept, prompt_name=named)

    def write(scores: Sequence[float], usage: PoolingUsage) -> list[float]:
        return list(scores)

    pairs = [(request.inputs.source_sentence, text) for text in request.inputs.sentences]
    names = ("inputs.source_sentence", "inputs.sentences")
    return prepare_pairs(Pairs(pairs, names, params, given.side), engine, options, context, write)


def _class_params(task: str, raw_scores: bool | None, kept: int | None, engine: Engine, model: str) -> PoolingParams:
    _, pooling = pooling_of(engine, model, "classes")
    activates = False if raw_scores else None
    return checked_params(pooling, model, task=task, use_activation=activates, truncate_prompt_tokens=kept)
