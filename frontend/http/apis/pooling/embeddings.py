"""POST /v1/embeddings (OpenAI's API, with vLLM's fields) and POST /pooling (vLLM's): vectors in several encodings."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.openai.prompts import cache_salt
from headrace.frontend.http.apis.pooling.chunks import Pooled
from headrace.frontend.http.apis.pooling.conversations import TextFields
from headrace.frontend.http.apis.pooling.pooled import (
    Dimensions,
    PooledAnswer,
    PoolingContext,
    PoolingUsage,
    PromptName,
    TextOptions,
    Write,
    checked_params,
    pooling_of,
    prepare_vectors,
)
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.decoding.foreign_fields import ANY, Neutral
from headrace.frontend.http.server.errors import bad_field
from headrace.frontend.http.server.exchange import Headers
from headrace.frontend.http.server.generation import PreparedRequest
from headrace.frontend.request.pooling_outputs import PoolingOutput
from headrace.frontend.request.pooling_prompts import prompt_of_type
from headrace.frontend.request.vector_encodings import Endianness, NumberType, as_bytes
from headrace.ipc.failure import InvalidRequestError


class EncodedRequest(TextFields, kw_only=True):
    """The fields of /v1/embeddings and /pooling."""

    encoding_format: Annotated[
        Literal["float", "base64", "bytes", "bytes_only"] | None,
        Meta(
            description="base64: the bytes of embed_dtype; bytes: a body of bytes alone, whose header metadata has the "
            "rest as JSON; bytes_only: without that header; default: float"
        ),
    ] = None
    embed_dtype: Annotated[
        NumberType | None, Meta(description="Type of the numbers in base64 and bytes; default: float32")
    ] = None
    endianness: Annotated[
        Endianness | None, Meta(description="Order of the bytes in base64 and bytes; default: little-endian")
    ] = None
    dimensions: Dimensions = None
    use_activation: Annotated[
        bool | None, Meta(description="Scale vectors to length 1; default: the model's own setting")
    ] = None
    prompt_name: PromptName = None
    input_type: Annotated[
        str | None, Meta(description="As Cohere's: search_query, search_document, ...; or the name of a prompt")
    ] = None


class EmbeddingRequest(EncodedRequest):
    """POST /v1/embeddings"""

    task: Annotated[
        str | None,
        Meta(description="What the vectors are for, as Jina's API has it: the name of one of the model's adapters"),
    ] = None


class PoolingRequest(EncodedRequest):
    """POST /pooling"""

    task: Annotated[
        str | None,
        Meta(
            description="embed, token_embed, embed_sparse, classify or token_classify, or several joined by &; "
            "default: the model's first"
        ),
    ] = None
    step_tag_id: Annotated[
        int | None, Meta(description="Of token_classify: only the values of this token are returned")
    ] = None
    returned_token_ids: Annotated[
        list[int] | None, Meta(description="Of token_classify: which of a token's values are returned")
    ] = None


EMBEDDING_NEUTRAL: Mapping[str, Neutral] = {
    "padding": Neutral("nothing is padded", ("do_not_pad",)),
    "mm_processor_kwargs": Neutral("models read text alone", ({},)),
    "normalize": Neutral("the former name of use_activation", ()),
    "stream": Neutral("vectors are answered whole", (False,)),
    "metadata": Neutral("nothing depends on it", (ANY,), is_harmless=True),
}
"""Fields of OpenAI's and vLLM's APIs that these requests lack."""
POOLING_NEUTRAL: Mapping[str, Neutral] = {
    **EMBEDDING_NEUTRAL,
    "data": Neutral("there are no plugins that read it: give input", ()),
}


class EmbeddingItem(msgspec.Struct):
    index: int
    object: str
    embedding: list[float] | str


class EmbeddingResponse(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: PoolingUsage


class SparseValue(msgspec.Struct):
    index: int
    value: float


class PoolingItem(msgspec.Struct):
    index: int
    object: str
    data: Any
    """Numbers, a list of them for each token, or base64; pairs of a sparse vector; by task if there are several."""


class PoolingResponse(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    data: list[PoolingItem]
    usage: PoolingUsage


class EncodedItem(msgspec.Struct):
    """What the header `metadata` says of a vector in a body of bytes."""

    index: int
    start: int
    end: int
    """Its bytes are body[start:end]."""
    shape: list[int]
    embed_dtype: str
    endianness: str


class EncodedMetadata(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    data: list[EncodedItem]
    usage: PoolingUsage


def prepare_embedding(
    request: EmbeddingRequest, engine: Engine, id: str, options: ServeOptions, tenant: str
) -> PreparedRequest:
    """Checks and tokenises a request, ready to be run. Raises ApiError and InvalidRequestError."""
    model = request.model or engine.names[0]
    asked = request.model
    if request.task is not None:
        if request.task not in engine.adapters:
            known = ", ".join(engine.adapters) or "none"
            raise bad_field("task", f"task is {request.task!r:.100}, and the model's adapters are: {known}")
        asked = f"{engine.names[0]}:{request.task}"

    def write(streams: Sequence[Pooled], usage: PoolingUsage) -> EmbeddingResponse:
        items = [
            EmbeddingItem(index, "embedding", _told(stream.parts[0], request)) for index, stream in enumerate(streams)
        ]
        return EmbeddingResponse(id, "list", int(time.time()), model, items, usage)

    context = PoolingContext(id, cache_salt(request, tenant), request.priority, asked)
    return _prepared(request, "embed", engine, options, context, write)


def prepare_pooling(
    request: PoolingRequest, engine: Engine, id: str, options: ServeOptions, tenant: str
) -> PreparedRequest:
    """As `prepare_embedding`."""
    model = request.model or engine.names[0]

    def write(streams: Sequence[Pooled], usage: PoolingUsage) -> PoolingResponse:
        items = []
        for index, stream in enumerate(streams):
            told = {
                kind: pairs_of(part) if kind == "embed_sparse" else _told(part, request)
                for kind, part in zip(stream.kinds, stream.parts, strict=True)
            }
            items.append(PoolingItem(index, "pooling", told if len(told) > 1 else next(iter(told.values()))))
        return PoolingResponse(id, "list", int(time.time()), model, items, usage)

    context = PoolingContext(id, cache_salt(request, tenant), request.priority, request.model)
    return _prepared(request, request.task, engine, options, context, write)


def _prepared(
    request: EmbeddingRequest | PoolingRequest,
    task: str | None,
    engine: Engine,
    options: ServeOptions,
    context: PoolingContext,
    write: Write,
) -> PreparedRequest:
    model = request.model or engine.names[0]
    welcome, pooling = pooling_of(engine, model, "embeddings")
    try:
        named = prompt_of_type(request.input_type, welcome) if request.prompt_name is None else request.prompt_name
    except InvalidRequestError as error:
        raise bad_field("input_type", str(error)) from error

    params = checked_params(
        pooling,
        model,
        task=task or pooling.kinds[0],
        dimensions=request.dimensions,
        use_activation=request.use_activation,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        step_tag_id=getattr(request, "step_tag_id", None),
        returned_token_ids=getattr(request, "returned_token_ids", None),
        prompt_name=named,
    )
    if request.encoding_format in ("bytes", "bytes_only") and "&" in (params.task or ""):
        raise bad_field(
            "encoding_format", "encoding_format: bytes are for a single task; use float or base64 for several"
        )
    answer = PooledAnswer(write)
    if request.encoding_format in ("bytes", "bytes_only"):
        answer = BytesAnswer(request, context.id, model, with_metadata=request.encoding_format == "bytes")
    how = TextOptions(request.truncation_side, special=request.add_special_tokens is not False)
    given, request.input = request.input, ""  # frees it with the prompts: it may be large, and is not read again
    return prepare_vectors(given, params, engine, options, context, answer, how)


def _told(part: PoolingOutput, request: EncodedRequest) -> Any:
    if request.encoding_format != "base64":
        return part.tolist()
    return base64.b64encode(_encoded(part, request)).decode()


def _encoded(part: PoolingOutput, request: EncodedRequest) -> bytes | memoryview:
    kind, endianness = request.embed_dtype or "float32", request.endianness or "little"
    return as_bytes(part.values, kind, endianness)


def pairs_of(part: PoolingOutput) -> list[SparseValue]:
    """A sparse vector's token ids and weights."""
    flat: list[Any] = part.values.tolist()
    return [SparseValue(int(flat[at]), flat[at + 1]) for at in range(0, len(flat), 2)]


class BytesAnswer(PooledAnswer):
    """The vectors' bytes, one after another."""

    def __init__(self, request: EncodedRequest, id: str, model: str, *, with_metadata: bool) -> None:
        super().__init__(self._bytes, self._headers)
        self._request, self._id, self._model, self._with_metadata = request, id, model, with_metadata

    def _bytes(self, streams: Sequence[Pooled], usage: PoolingUsage) -> bytes:
        return b"".join(_encoded(stream.parts[0], self._request) for stream in streams)

    def _headers(self, usage: PoolingUsage) -> Headers:
        headers = [(b"content-type", b"application/octet-stream")]
        if not self._with_metadata:
            return headers
        kind, endianness = self._request.embed_dtype or "float32", self._request.endianness or "little"
        items, start = list[EncodedItem](), 0
        shape: list[int]
        for index, part in enumerate(stream.parts[0] for stream in self.pooled):
            end = start + len(part.values) * NUM_BYTES[kind]
            shape = [len(part.values)] if part.width is None else [len(part.values) // part.width, part.width]
            items.append(EncodedItem(index, start, end, shape, kind, endianness))
            start = end
        metadata = EncodedMetadata(self._id, "list", int(time.time()), self._model, items, usage)
        return [*headers, (b"metadata", msgspec.json.encode(metadata))]


NUM_BYTES: Mapping[NumberType, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
