"""POST /score, /rerank and /classify: vLLM's APIs (/v1/rerank is Jina's, /v2/rerank Cohere's)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.frontend.client.pooling_stream import PoolingStream
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.openai.prompts import MOST_TRUNCATED, cache_salt, check_text, tokenize_texts
from headrace.frontend.http.apis.pooling.embeddings import EmbeddingUsage, check_prompt, items_of
from headrace.frontend.http.process.options import ServeOptions
from headrace.frontend.http.server.decoding.foreign_fields import Neutral
from headrace.frontend.http.server.errors import ApiError, bad_field
from headrace.frontend.http.server.generation import Answer, PreparedRequest
from headrace.frontend.request.pair_prompts import scoring_task, similarity, tokenize_pairs
from headrace.frontend.request.parameters.pooling_params import PoolingParams
from headrace.frontend.request.pooling_prompts import NOT_POOLING, as_pooled, cut_to_pool, most_tokens
from headrace.frontend.request.prompts import Prompt, Tokenization, packed
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Welcome

Model = Annotated[str | None, Meta(description="A served model, see GET /v1/models; default: the first of them")]
Activation = Annotated[bool | None, Meta(description="Apply the classifier's activation; default: the model's setting")]
Truncation = Annotated[
    Annotated[int, Meta(ge=-1)] | None,
    Meta(description="Maximum number of tokens to keep, of both texts together; -1: as many as the model takes"),
]
Side = Annotated[
    Literal["left", "right"] | None, Meta(description="Side on which tokens are removed: left or right; default: right")
]
Priority = Annotated[
    int | None, Meta(description="Scheduling priority, lower values first; needs --scheduling-policy priority")
]
Salt = Annotated[str | None, Meta(description="Cached prefixes are shared only among requests with the same salt")]
RequestId = Annotated[str | None, Meta(description="Id of the request; also the header X-Request-Id")]
User = Annotated[str | None, Meta(description="Accepted without effect")]
Instruction = Annotated[str | None, Meta(description="What relevance means, for rerankers that read an instruction")]
Document = str | dict[str, Any]


class ScoreRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /score"""

    model: Model = None
    queries: Annotated[str | list[str] | None, Meta(description="A text, or as many as `documents` has")] = None
    documents: Annotated[str | list[str] | None, Meta(description="The texts that are scored")] = None
    text_1: Annotated[str | list[str] | None, Meta(description="Another name of `queries`; also data_1")] = None
    text_2: Annotated[str | list[str] | None, Meta(description="Another name of `documents`; also data_2, items")] = (
        None
    )
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    items: str | list[str] | None = None
    instruction: Instruction = None
    use_activation: Activation = None
    truncate_prompt_tokens: Truncation = None
    truncation_side: Side = None
    priority: Priority = None
    cache_salt: Salt = None
    request_id: RequestId = None
    user: User = None


class RerankRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /rerank"""

    model: Model = None
    query: Annotated[str, Meta(description="The text to which documents are to be relevant")]
    documents: Annotated[list[Document], Meta(description='Texts, or objects {"text": ...}')]
    top_n: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="How many of the best to return; 0: all")] = (
        None
    )
    return_documents: Annotated[bool | None, Meta(description="Return the documents' texts; default: true")] = None
    instruction: Instruction = None
    use_activation: Activation = None
    truncate_prompt_tokens: Truncation = None
    truncation_side: Side = None
    priority: Priority = None
    cache_salt: Salt = None
    request_id: RequestId = None
    user: User = None


class ClassifyRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /classify"""

    model: Model = None
    input: Annotated[
        str | list[str | int | list[int]],
        Meta(description="A text, a list of texts, a list of token ids, or a list of such lists"),
    ]
    use_activation: Activation = None
    truncate_prompt_tokens: Truncation = None
    truncation_side: Side = None
    add_special_tokens: Annotated[bool | None, Meta(description="Add special tokens to texts; default: true")] = None
    priority: Priority = None
    cache_salt: Salt = None
    request_id: RequestId = None
    user: User = None


SCORE_NEUTRAL: Mapping[str, Neutral] = {
    "max_tokens_per_query": Neutral("truncate_prompt_tokens limits both texts together", (0,)),
    "max_tokens_per_doc": Neutral("truncate_prompt_tokens limits both texts together", (0,)),
}
"""Fields of vLLM's scores that these requests lack."""


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
    usage: EmbeddingUsage


class RerankDocument(msgspec.Struct):
    text: str


class RerankResult(msgspec.Struct, omit_defaults=True):
    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankResponse(msgspec.Struct):
    id: str
    model: str
    usage: EmbeddingUsage
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
    usage: EmbeddingUsage


Write = Callable[[Sequence[PoolingStream], EmbeddingUsage], msgspec.Struct]


class PooledAnswer(Answer):
    """Writes the response of all vectors. It is never streamed."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def whole(self) -> list[bytes]:
        streams = [stream for stream in self.streams if isinstance(stream, PoolingStream)]
        num_tokens = sum(len(stream.prompt.token_ids or ()) for stream in streams)
        return [msgspec.json.encode(self._write(streams, EmbeddingUsage(num_tokens, num_tokens)))]


Scored = ScoreRequest | RerankRequest


def prepare_score(
    request: ScoreRequest, engine: Engine, options: ServeOptions, name: str, tenant: str
) -> PreparedRequest:
    """Raises ApiError and InvalidRequestError."""
    first_name, first = _given(request, ("queries", "text_1", "data_1"))
    second_name, second = _given(request, ("documents", "text_2", "data_2", "items"))
    ones, others = ([each] if isinstance(each, str) else each for each in (first, second))
    for param, texts in ((first_name, ones), (second_name, others)):
        if not texts:
            raise bad_field(param, f"{param} is an empty list: give a text or a list of texts")
    if len(ones) not in (1, len(others)):
        raise bad_field(
            first_name,
            f"{first_name} has {len(ones)} texts and {second_name} {len(others)}: give one text, or as many as there",
        )
    pairs = list(zip(ones * len(others) if len(ones) == 1 else ones, others, strict=True))
    id, model = f"embd-{name}", request.model or engine.names[0]

    def write(scores: Sequence[float], usage: EmbeddingUsage) -> ScoreResponse:
        items = [ScoreItem(index, "score", score) for index, score in enumerate(scores)]
        return ScoreResponse(id, "list", int(time.time()), model, items, usage)

    return _prepared(request, pairs, (first_name, second_name), engine, options, (id, tenant), write)


def prepare_rerank(
    request: RerankRequest, engine: Engine, options: ServeOptions, name: str, tenant: str
) -> PreparedRequest:
    """Raises ApiError and InvalidRequestError."""
    if not request.documents:
        raise bad_field("documents", "documents is an empty list: give at least one text")
    texts = [_text_of(each, index) for index, each in enumerate(request.documents)]
    id, model = f"rerank-{name}", request.model or engine.names[0]
    shows = request.return_documents is not False

    def write(scores: Sequence[float], usage: EmbeddingUsage) -> RerankResponse:
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
        results = [
            RerankResult(index, scores[index], RerankDocument(texts[index]) if shows else None) for index in best
        ]
        return RerankResponse(id, model, usage, results)

    pairs = [(request.query, text) for text in texts]
    return _prepared(request, pairs, ("query", "documents"), engine, options, (id, tenant), write)


def prepare_classify(
    request: ClassifyRequest, engine: Engine, options: ServeOptions, name: str, tenant: str
) -> PreparedRequest:
    """Raises ApiError and InvalidRequestError."""
    assert engine.client is not None
    client, model, id = engine.client, request.model or engine.names[0], f"classify-{name}"
    welcome = client.welcome
    params = _params(request, "classify", welcome, model)
    items = items_of(request.input)
    _check_count("input", items, options)
    how = Tokenization(truncation_side=request.truncation_side)
    if isinstance(items[0], str):
        most = welcome.max_model_len * (1 if request.truncate_prompt_tokens is None else MOST_TRUNCATED)
        texts = [as_pooled(each, welcome, "classify") for each in items]
        special = request.add_special_tokens is not False
        encoded = tokenize_texts(texts, client.tokenizer, special=special, max_tokens=most, param="input")
        prompts = [Prompt(text=text, token_ids=ids) for text, ids in zip(texts, encoded, strict=True)]
    else:
        prompts = [Prompt(token_ids=packed(each)) for each in items]
    cut_to_pool(prompts, [params] * len(prompts), client.tokenizer, how, welcome)
    labels = welcome.pooling.labels if welcome.pooling is not None else ()

    def write(streams: Sequence[PoolingStream], usage: EmbeddingUsage) -> ClassifyResponse:
        found = []
        for index, stream in enumerate(streams):
            probs = [float(each) for each in stream.vectors or ()]
            label = labels[max(range(len(probs)), key=probs.__getitem__)]
            found.append(ClassItem(index, label, probs, len(probs)))
        return ClassifyResponse(id, "list", int(time.time()), model, found, usage)

    names = ["input"] if len(prompts) == 1 else [f"input[{index}]" for index in range(len(prompts))]
    return _ready(engine, prompts, names, params, (id, cache_salt(request, tenant), request.priority), write)


def _prepared(
    request: Scored,
    pairs: Sequence[tuple[str, str]],
    names: tuple[str, str],
    engine: Engine,
    options: ServeOptions,
    who: tuple[str, str],
    write: Callable[[Sequence[float], EmbeddingUsage], msgspec.Struct],
) -> PreparedRequest:
    """who: the response's id, and the tenant."""
    assert engine.client is not None
    client, model = engine.client, request.model or engine.names[0]
    welcome = client.welcome
    _check_count(names[1], pairs, options)
    try:
        task = scoring_task(welcome)
    except InvalidRequestError as error:
        raise ApiError(404, f"the model {model!r:.200} makes no scores: {error}", code="not_found") from error
    params = _params(request, task, welcome, model)
    most = welcome.max_model_len * (1 if request.truncate_prompt_tokens is None else MOST_TRUNCATED)
    if client.tokenizer is None:
        raise bad_field(names[1], "this engine runs without a tokenizer, and scores are of texts")
    for index, (first, second) in enumerate(pairs):
        check_text(first, client.tokenizer, most, names[0])
        check_text(second, client.tokenizer, most, f"{names[1]}[{index}]")
    how = Tokenization(truncation_side=request.truncation_side)
    told = (who[0], cache_salt(request, who[1]), request.priority)
    if task == "classify":
        kept = most_tokens(how, params, welcome)
        prompts = tokenize_pairs(pairs, client.tokenizer, welcome, kept, how, request.instruction)
        of_prompts = [f"{names[1]}[{index}]" for index in range(len(pairs))]

        def of_pairs(streams: Sequence[PoolingStream], usage: EmbeddingUsage) -> msgspec.Struct:
            return write([each.vectors[0] for each in streams if each.vectors is not None], usage)

        return _ready(engine, prompts, of_prompts, params, told, of_pairs)
    pooling = welcome.pooling
    assert pooling is not None, "it embeds"
    places = {text: at for at, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
    texts = [as_pooled(text, welcome, "embed") for text in places]
    encoded = tokenize_texts(texts, client.tokenizer, special=True, max_tokens=most, param=names[1])
    prompts = [Prompt(text=text, token_ids=ids) for text, ids in zip(texts, encoded, strict=True)]
    cut_to_pool(prompts, [params] * len(prompts), client.tokenizer, how, welcome)

    def of_texts(streams: Sequence[PoolingStream], usage: EmbeddingUsage) -> msgspec.Struct:
        vectors = [stream.vectors for stream in streams if stream.vectors is not None]
        return write([similarity(pooling, vectors[places[a]], vectors[places[b]]) for a, b in pairs], usage)

    return _ready(engine, prompts, [names[1]] * len(prompts), params, told, of_texts)


def _ready(
    engine: Engine,
    prompts: Sequence[Prompt],
    names: Sequence[str],
    params: PoolingParams,
    told: tuple[str, str, int | None],
    write: Write,
) -> PreparedRequest:
    """names: the prompts' fields, for errors. told: the response's id, the cache salt, and the priority. Raises
    ApiError."""
    assert engine.client is not None
    id, salt, priority = told
    for prompt, param in zip(prompts, names, strict=True):
        prompt.cache_salt = salt
        check_prompt(prompt, params, engine.client.welcome, param)
    return PreparedRequest(engine, id, prompts, [params] * len(prompts), PooledAnswer(write), priority=priority or 0)


def _params(request: Scored | ClassifyRequest, task: str, welcome: Welcome, model: str) -> PoolingParams:
    if welcome.pooling is None:
        raise ApiError(404, f"the model {model!r:.200} generates: {NOT_POOLING}", code="not_found")
    try:
        params = PoolingParams(
            task=task,
            use_activation=request.use_activation,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
        )
        params.to_wire(welcome.pooling, model)
    except InvalidRequestError as error:
        raise bad_field("model", str(error).removeprefix("PoolingParams.")) from error
    return params


def _check_count(name: str, items: Sequence[Any], options: ServeOptions) -> None:
    if len(items) > options.max_prompts:
        raise bad_field(name, f"{len(items)} inputs; this server takes at most {options.max_prompts} at once")


def _given(request: ScoreRequest, names: tuple[str, ...]) -> tuple[str, Any]:
    """The one field of these that the request has, and its value."""
    found = [name for name in names if getattr(request, name) is not None]
    if len(found) != 1:
        raise bad_field(names[0], f"give one of {', '.join(names)}" + (f", not {' and '.join(found)}" if found else ""))
    return found[0], getattr(request, found[0])


def _text_of(document: Document, index: int) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise bad_field(f"documents[{index}]", 'a document is a text, or an object {"text": ...}')
    return text
