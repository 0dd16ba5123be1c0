"""POST /score, /rerank and /classify: vLLM's APIs (/v1/rerank is Jina's, /v2/rerank Cohere's)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from headrace.frontend.client.pooling_stream import PoolingStream
from headrace.frontend.client.request_stream import RequestStream
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.openai.prompts import RESERVED, cache_salt, check_text_length
from headrace.frontend.http.apis.pooling.chunks import Pooled
from headrace.frontend.http.apis.pooling.conversations import TextFields
from headrace.frontend.http.apis.pooling.pooled import (
    PooledAnswer,
    PooledFields,
    PoolingContext,
    PoolingUsage,
    Side,
    TextOptions,
    Write,
    check_count,
    checked,
    checked_params,
    enough_of,
    most_encoded,
    pooling_of,
    prepare_vectors,
    prompts_of,
    ready,
)
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.decoding.foreign_fields import Neutral
from headrace.frontend.http.server.errors import ApiError, bad_field
from headrace.frontend.http.server.generation import PreparedRequest
from headrace.frontend.request.checks import CheckedRequest
from headrace.frontend.request.pair_prompts import (
    PairTemplate,
    late_prompts,
    query_vectors,
    scoring_task,
    shortened,
    similarity,
    tokenize_pairs,
)
from headrace.frontend.request.parameters.pooling_params import PoolingParams
from headrace.frontend.request.pooling_prompts import DOCUMENT, QUERY, cuts_left, most_tokens
from headrace.frontend.request.prompts import Tokenization
from headrace.frontend.text.chat_template import load_template, text_parts
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Pooling

Activation = Annotated[bool | None, Meta(description="Apply the classifier's activation; default: the model's setting")]
RawScores = Annotated[bool | None, Meta(description="Other servers' name of use_activation: false")]
Most = Annotated[
    Annotated[int, Meta(ge=0)] | None,
    Meta(description="Maximum number of tokens of each such text; 0: all; default: 0"),
]
OF_PAIRS = frozenset((*RESERVED, "tokenize", "chat_template_content_format"))
"""Names of a template's variables that requests do not set."""
Document = str | dict[str, Any]
Texts = Document | list[Document] | None


class ScoredFields(PooledFields, kw_only=True):
    """The fields of requests whose texts are scored in pairs."""

    instruction: Annotated[
        str | None, Meta(description="What relevance means, for rerankers that read an instruction")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Additional variables for the option chat_template, which writes pairs")
    ] = None
    max_tokens_per_query: Most = None
    max_tokens_per_doc: Most = None
    use_activation: Activation = None
    raw_scores: RawScores = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="Maximum number of tokens to keep, of both texts together; -1: as many as the model takes"),
    ] = None
    truncation_side: Side = None


class ScoreRequest(ScoredFields, kw_only=True):
    """POST /score"""

    queries: Annotated[Texts, Meta(description="A text, or as many as `documents` has")] = None
    documents: Annotated[
        Texts, Meta(description='The texts that are scored; each may be an object {"content": [{"type": "text", ...}]}')
    ] = None
    text_1: Annotated[Texts, Meta(description="Another name of `queries`; also data_1")] = None
    text_2: Annotated[Texts, Meta(description="Another name of `documents`; also data_2, items")] = None
    data_1: Texts = None
    data_2: Texts = None
    items: Texts = None


class RerankRequest(ScoredFields, kw_only=True):
    """POST /rerank"""

    query: Annotated[Document, Meta(description="The text to which documents are to be relevant")]
    documents: Annotated[
        list[Document],
        Meta(description='Texts, or objects {"text": ...} or {"content": [{"type": "text", "text": ...}]}'),
    ]
    top_n: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="How many of the best to return; 0: all")] = (
        None
    )
    return_documents: Annotated[bool | None, Meta(description="Return the documents' texts; default: true")] = None


class ClassifyRequest(TextFields, kw_only=True):
    """POST /classify"""

    use_activation: Activation = None
    raw_scores: RawScores = None


SCORE_NEUTRAL: Mapping[str, Neutral] = {
    "max_chunks_per_doc": Neutral("documents are read whole", (1,)),
    "rank_fields": Neutral("documents are texts, or have their text in the field text", (["text"],)),
}
"""Fields of Cohere's and Jina's rerankings that these requests lack."""


class ScoreItem(msgspec.Struct):
    index: int
    object: str
    score: float


class ScoreResponse(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    data: list[ScoreItem]
    usage: PoolingUsage


class RerankDocument(msgspec.Struct):
    text: str


class RerankResult(msgspec.Struct, omit_defaults=True):
    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankResponse(msgspec.Struct):
    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]


class ClassItem(msgspec.Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyResponse(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    data: list[ClassItem]
    usage: PoolingUsage


def prepare_score(
    request: ScoreRequest, engine: Engine, id: str, options: ServeOptions, tenant: str
) -> PreparedRequest:
    """Raises ApiError and InvalidRequestError."""
    first_name, first = _given(request, ("queries", "text_1", "data_1"))
    second_name, second = _given(request, ("documents", "text_2", "data_2", "items"))
    ones, others = (
        [text_of(each, name if len(given) == 1 else f"{name}[{index}]") for index, each in enumerate(given)]
        for name, given in ((first_name, _listed(first)), (second_name, _listed(second)))
    )
    for param, texts in ((first_name, ones), (second_name, others)):
        if not texts:
            raise bad_field(param, f"{param} is an empty list: give a text or a list of texts")
    if len(ones) not in (1, len(others)):
        raise bad_field(
            first_name,
            f"{first_name} has {len(ones)} texts and {second_name} {len(others)}: give one text, or as many as there",
        )
    pairs = list(zip(ones * len(others) if len(ones) == 1 else ones, others, strict=True))
    model = request.model or engine.names[0]

    def write(scores: Sequence[float], usage: PoolingUsage) -> ScoreResponse:
        items = [ScoreItem(index, "score", score) for index, score in enumerate(scores)]
        return ScoreResponse(id, "list", int(time.time()), model, items, usage)

    return _prepared(request, pairs, (first_name, second_name), engine, options, (id, tenant), write)


def prepare_rerank(
    request: RerankRequest, engine: Engine, id: str, options: ServeOptions, tenant: str
) -> PreparedRequest:
    """Raises ApiError and InvalidRequestError."""
    if not request.documents:
        raise bad_field("documents", "documents is an empty list: give at least one text")
    texts = [text_of(each, f"documents[{index}]") for index, each in enumerate(request.documents)]
    model = request.model or engine.names[0]
    shows = request.return_documents is not False

    def write(scores: Sequence[float], usage: PoolingUsage) -> RerankResponse:
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
        results = [
            RerankResult(index, scores[index], RerankDocument(texts[index]) if shows else None) for index in best
        ]
        return RerankResponse(id, model, usage, results)

    query = text_of(request.query, "query")
    pairs = [(query, text) for text in texts]
    return _prepared(request, pairs, ("query", "documents"), engine, options, (id, tenant), write)


def prepare_classify(
    request: ClassifyRequest, engine: Engine, id: str, options: ServeOptions, tenant: str
) -> PreparedRequest:
    """Raises ApiError and InvalidRequestError."""
    model = request.model or engine.names[0]
    _, pooling = pooling_of(engine, model, "classes")
    params = _params(request, "classify", pooling, model)
    how, labels = TextOptions(request.truncation_side, special=request.add_special_tokens is not False), pooling.labels

    def write(streams: Sequence[Pooled], usage: PoolingUsage) -> ClassifyResponse:
        found = []
        for index, stream in enumerate(streams):
            probs = [float(each) for each in stream.vectors or ()]
            label = labels[max(range(len(probs)), key=probs.__getitem__)]
            found.append(ClassItem(index, label, probs, len(probs)))
        return ClassifyResponse(id, "list", int(time.time()), model, found, usage)

    context = PoolingContext(id, cache_salt(request, tenant), request.priority, request.model)
    return prepare_vectors(request.input, params, engine, options, context, PooledAnswer(write), how)


def _prepared(
    request: ScoredFields,
    pairs: Sequence[tuple[str, str]],
    names: tuple[str, str],
    engine: Engine,
    options: ServeOptions,
    who: tuple[str, str],
    write: Callable[[Sequence[float], PoolingUsage], msgspec.Struct],
) -> PreparedRequest:
    """who: the response's id, and the tenant."""
    model = request.model or engine.names[0]
    _, pooling = pooling_of(engine, model, "scores")
    params = _params(request, task_of_scores(engine, model), pooling, model)
    context = PoolingContext(who[0], cache_salt(request, who[1]), request.priority, request.model)
    most, tokenizer = (request.max_tokens_per_query or 0, request.max_tokens_per_doc or 0), engine.connected.tokenizer
    if tokenizer is not None:
        pairs = shortened(pairs, most, tokenizer, functools.partial(enough_of, tokenizer=tokenizer, from_left=False))
    variables = request.chat_template_kwargs or {}
    asked = Pairs(pairs, names, params, request.truncation_side, request.instruction, variables)
    return prepare_pairs(asked, engine, options, context, write)


class Pairs(NamedTuple):
    """Pairs of texts to be scored."""

    pairs: Sequence[tuple[str, str]]
    names: tuple[str, str]
    """The fields of both texts, for errors."""
    params: PoolingParams
    side: Literal["left", "right"] | None = None
    instruction: str | None = None
    variables: Mapping[str, Any] = MappingProxyType({})
    """For the option chat_template."""


_template = functools.lru_cache(maxsize=4)(load_template)


def _pair_template(asked: Pairs, options: ServeOptions, pooling: Pooling | None) -> PairTemplate | None:
    """What writes pairs: the server's template, of a model that reads both texts; None: the tokenizer, or the model's
    own form. Raises ApiError for what would have no effect."""
    template, instruction = _template(options.chat_template), asked.instruction
    if template is not None and asked.params.task == "classify":
        said = {} if instruction is None else {"instruction": instruction}
        if reserved := sorted(OF_PAIRS & asked.variables.keys()):
            raise bad_field("chat_template_kwargs", f"chat_template_kwargs.{reserved[0]} is set by the server")
        return PairTemplate(template, {**said, **asked.variables})
    if asked.variables:
        raise bad_field("chat_template_kwargs", "no template writes this server's pairs (its option chat_template)")
    form = None if pooling is None else pooling.pair_format
    if instruction is not None and (form is None or not any("{instruction}" in each for each in form.segments)):
        raise bad_field("instruction", "this model reads no instruction beside a query and a document: leave it out")
    return None


def prepare_pairs(
    asked: Pairs,
    engine: Engine,
    options: ServeOptions,
    context: PoolingContext,
    write: Callable[[Sequence[float], PoolingUsage], msgspec.Struct | list[Any]],
) -> PreparedRequest:
    """Scores pairs by the task of their parameters. write: makes the response of their scores. Raises ApiError and
    InvalidRequestError."""
    pairs, names, params, side, instruction, _ = asked
    client = engine.connected
    welcome = client.welcome
    template = _pair_template(asked, options, welcome.pooling)
    check_count(names[1], pairs, options)
    if client.tokenizer is None:
        raise bad_field(names[1], "this engine runs without a tokenizer, and scores are of texts")
    how = Tokenization(truncation_side=side)
    kept, most = most_tokens(how, params, welcome), most_encoded(params, welcome)
    if kept is not None:
        from_left = cuts_left(how, client.tokenizer)
        enough = {text: enough_of(text, kept, client.tokenizer, from_left=from_left) for text in _texts(pairs)}
        pairs = [(enough[first], enough[second]) for first, second in pairs]
    for index, (first, second) in enumerate(pairs):
        check_text_length(first, client.tokenizer, most, names[0])
        check_text_length(second, client.tokenizer, most, f"{names[1]}[{index}]")
    if params.task == "token_embed":
        return _late(pairs, asked, engine, context, write)
    if params.task == "classify":
        prompts = tokenize_pairs(pairs, client.tokenizer, welcome, kept, how, instruction, params.prompt_name, template)
        of_prompts = [f"{names[1]}[{index}]" for index in range(len(pairs))]
        return ready(engine, prompts, of_prompts, params, context, PooledAnswer(_of_values(write)))
    pooling = welcome.pooling
    assert pooling is not None, "it embeds"
    places = {text: at for at, text in enumerate(_texts(pairs))}
    prompts = prompts_of(list(places), params, engine, TextOptions(side, param=names[1]))

    def of_texts(streams: Sequence[Pooled], usage: PoolingUsage) -> Any:
        vectors = [stream.vectors for stream in streams if stream.vectors is not None]
        return write([similarity(pooling, vectors[places[a]], vectors[places[b]]) for a, b in pairs], usage)

    return ready(engine, prompts, [names[1]] * len(prompts), params, context, PooledAnswer(of_texts))


def _texts(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """The texts of pairs, each once."""
    return list(dict.fromkeys(text for pair in pairs for text in pair))


def _of_values(write: Callable[[Sequence[float], PoolingUsage], Any]) -> Write:
    """Writes what is made of each prompt's one value."""

    def of_values(streams: Sequence[Pooled], usage: PoolingUsage) -> Any:
        return write([each.vectors[0] for each in streams if each.vectors is not None], usage)

    return of_values


def _late(
    pairs: Sequence[tuple[str, str]],
    asked: Pairs,
    engine: Engine,
    context: PoolingContext,
    write: Callable[[Sequence[float], PoolingUsage], Any],
) -> PreparedRequest:
    """Late interaction: the queries run first, and each document then brings its query's vectors with it."""
    client, how = engine.connected, Tokenization(truncation_side=asked.side)
    queries = list(dict.fromkeys(query for query, _ in pairs))
    prompts = late_prompts(queries, asked.params, client, how, QUERY)
    documents = late_prompts([document for _, document in pairs], asked.params, client, how, DOCUMENT)
    of_documents = [f"{asked.names[1]}[{index}]" for index in range(len(pairs))]
    requests = checked(engine, documents, of_documents, asked.params, context)
    answer = PooledAnswer(_of_values(write))
    prepared = ready(engine, prompts, [asked.names[0]] * len(prompts), asked.params, context, answer)

    def compared(streams: Sequence[RequestStream]) -> Sequence[CheckedRequest]:
        found = [query_vectors(stream.parts[0]) for stream in streams if isinstance(stream, PoolingStream)]
        of_query, replace = dict(zip(queries, found, strict=True)), msgspec.structs.replace
        return [
            replace(request, pooling_task=replace(request.pooling_task, compared_with=of_query[query]))
            for request, (query, _) in zip(requests, pairs, strict=True)
            if request.pooling_task is not None
        ]

    prepared.then = compared
    return prepared


def task_of_scores(engine: Engine, model: str) -> str:
    """Raises ApiError (404) if the model makes no scores."""
    welcome, _ = pooling_of(engine, model, "scores")
    try:
        return scoring_task(welcome)
    except InvalidRequestError as error:
        raise ApiError(404, f"the model {model!r:.200} makes no scores: {error}", code="not_found") from error


def _params(request: ScoredFields | ClassifyRequest, task: str, pooling: Pooling, model: str) -> PoolingParams:
    activates = request.use_activation
    if request.raw_scores is not None:
        if activates is request.raw_scores:
            raise bad_field("raw_scores", "raw_scores is given beside use_activation, which says the opposite")
        activates = False if request.raw_scores else activates

    kept = request.truncate_prompt_tokens
    return checked_params(pooling, model, task=task, use_activation=activates, truncate_prompt_tokens=kept)


def _given(request: ScoreRequest, names: tuple[str, ...]) -> tuple[str, Any]:
    """The one field of these that the request has, and its value."""
    found = [name for name in names if getattr(request, name) is not None]
    if len(found) != 1:
        raise bad_field(names[0], f"give one of {', '.join(names)}" + (f", not {' and '.join(found)}" if found else ""))
    return found[0], getattr(request, found[0])


def _listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def text_of(document: Document, param: str) -> str:
    """The text of a document in any of its forms. Raises ApiError."""
    if isinstance(document, str):
        return document
    found = document.get("text", document.get("content"))
    if isinstance(found, list):
        try:
            found = "\n".join(text_parts(found, f"{param}.content"))
        except InvalidRequestError as error:
            raise bad_field(param, str(error), "unsupported_parameter") from error
    if not isinstance(found, str):
        raise bad_field(
            param, 'a document is a text, or an object {"text": ...} or {"content": [{"type": "text", "text": ...}]}'
        )
    return found
