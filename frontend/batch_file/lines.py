"""Answers the lines of a batch, with a limit on requests in flight.

Lines are decoded, checked and answered by the server's own code, so a batch gives the same answers as the server.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from headrace.frontend.batch_file.file import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RERANKINGS,
    RESPONSES,
    SCORES,
    BatchRequest,
    BatchResult,
    Results,
    answered,
    check_url,
    custom_id_of,
    decode_line,
    failed,
    has_changed,
)
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.fleet.migrations import QUARANTINED
from headrace.frontend.http.apis.openai.chat import prepare_chat
from headrace.frontend.http.apis.openai.completions import prepare_completion
from headrace.frontend.http.apis.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    SharedFields,
)
from headrace.frontend.http.apis.pooling.conversations import take_messages
from headrace.frontend.http.apis.pooling.embeddings import EmbeddingRequest, prepare_embedding
from headrace.frontend.http.apis.pooling.scores import RerankRequest, ScoreRequest, prepare_rerank, prepare_score
from headrace.frontend.http.apis.responses.create import ResponseParts, check_request, whole
from headrace.frontend.http.apis.responses.requests import ResponsesRequest
from headrace.frontend.http.server.decoding.decoder import RequestDecoder
from headrace.frontend.http.server.errors import ApiError, bad_field
from headrace.frontend.http.server.generation import PreparedRequest
from headrace.ipc.failure import EngineDeadError, HeadraceError, QueueFullError

_RETRY_AFTER_S = 0.2
T = TypeVar("T")


class Prepare(Protocol):
    def __call__(self, body: bytes, make: Callable[[bytes], T]) -> Awaitable[T]: ...


async def _at_once(body: bytes, make: Callable[[bytes], T]) -> T:
    return make(body)


class Slots(Protocol):
    """Limits how many lines are answered at once, as asyncio.Semaphore does."""

    async def acquire(self) -> object: ...
    def release(self) -> None: ...


class LineAnswers:
    """Answers the lines of one batch."""

    def __init__(
        self,
        parts: ResponseParts,
        decoder: RequestDecoder,
        engine_for: Callable[[str | None], Engine],
        *,
        tenant: str = "",
        url: str | None = None,
        done: Sequence[Results] = (),
        decode: Prepare = _at_once,
        prepare: Prepare = _at_once,
    ) -> None:
        """engine_for: returns an engine that serves a model; an EngineDeadError from it ends the run. url: the only
        endpoint that lines may name. done: existing results. decode, prepare: run the decoding of lines and of their
        bodies, for example on another thread."""
        self._parts, self._decoder, self._tenant, self._url = parts, decoder, tenant, url
        self._engine_for, self._decode, self._prepare_body = engine_for, decode, prepare
        self._done_ids = {custom_id: id for results in done for custom_id, id in results.done_ids.items()}
        self._done_lines = set[int]().union(*(results.done_lines for results in done))
        self._seen_ids: set[str] = set()

    async def run(
        self, lines: Iterable[tuple[int, bytes]], slots: Slots, record: Callable[[int, BatchResult | None], None]
    ) -> None:
        """record: called with each line's position and its result, or None if it already has one. Raises an
        ExceptionGroup that contains EngineDeadError or what `record` raised."""

        async def run_one(place: int, number: int, line: bytes) -> None:
            try:
                record(place, await self._result_of(number, line))
            finally:
                slots.release()

        async with asyncio.TaskGroup() as tasks:
            for place, (number, line) in enumerate(lines):
                await slots.acquire()
                tasks.create_task(run_one(place, number, line))

    async def _result_of(self, number: int, line: bytes) -> BatchResult | None:
        """None if the line already has a result. Raises EngineDeadError."""
        request_id = request = None
        runs_again = False
        try:
            request = await self._decode(line, decode_line)
            custom_id: str | None = request.custom_id
            if request.custom_id in self._seen_ids:
                raise bad_field("custom_id", f"custom_id {request.custom_id!r:.100} is already used by an earlier line")
            self._seen_ids.add(request.custom_id)
            done_id = self._done_ids.get(request.custom_id)
            if done_id is not None and not has_changed(request, done_id):
                return None
            runs_again = done_id is not None
            check_url(request, self._url)
            request_id = uuid.uuid4().hex
            body = await self._answer(request, request_id)
        except (ApiError, HeadraceError) as error:
            if isinstance(error, EngineDeadError) and not _is_its_own(error):
                raise
            custom_id = custom_id_of(line)
            done: Any = self._done_lines if custom_id is None else self._done_ids
            if not runs_again and (number if custom_id is None else custom_id) in done:
                return None
            return failed(custom_id, request, request_id, number, ApiError.of(error))
        return answered(request, request_id, body)

    async def _answer(self, request: BatchRequest, request_id: str) -> bytes:
        """The response's JSON. Raises ApiError and HeadraceError."""
        answer = await self._prepared_answer(request, request_id)
        while True:
            try:
                return await answer()
            except QueueFullError as error:  # other clients use the engine too
                retry_after_s = error.failure.retry_after_s if error.failure is not None else 0.0
                await asyncio.sleep(max(retry_after_s, _RETRY_AFTER_S))

    async def _prepared_answer(self, request: BatchRequest, request_id: str) -> Callable[[], Awaitable[bytes]]:
        """A function that returns the response's JSON, and may be called again after a QueueFullError."""
        body = bytes(request.body)
        if request.url == RESPONSES:
            response = await self._prepare_body(body, self._response_request)
            name = f"resp_{response.request_id or request_id}"
            return lambda: whole(self._parts, response, self._engine_for(response.model), name, self._tenant)
        prepared = await self._prepare_body(body, lambda body: self._prepared(request.url, body, request_id))
        return lambda: self._parts.generator.complete(prepared)

    def _response_request(self, body: bytes) -> ResponsesRequest:
        request = self._decoder.decode(body, ResponsesRequest)
        _check_whole(request, ("stream", "stream_options", "background"))
        check_request(request, self._parts.store)
        self._engine_for(request.model)
        return request

    def _prepared(self, url: str, body: bytes, request_id: str) -> PreparedRequest:
        kind, prefix, prepare = _WORK[url]
        request, chat = self._decoder.decode(body, kind), self._parts.chat
        generates = isinstance(request, GenerationRequest)
        if generates:
            _check_whole(request, ("stream", "stream_options"))
        id, engine = f"{prefix}-{request.request_id or request_id}", self._engine_for(request.model)
        if isinstance(request, EmbeddingRequest):
            take_messages(request, engine, chat.prompts)
            if request.encoding_format in ("bytes", "bytes_only"):
                raise bad_field("encoding_format", "encoding_format: a batch gives JSON: ask for float or base64")
        return prepare(request, engine, id, chat if generates else chat.options, self._tenant)


_WORK: Mapping[str, tuple[type[Any], str, Callable[..., PreparedRequest]]] = {
    CHAT: (ChatCompletionRequest, "chatcmpl", prepare_chat),
    COMPLETIONS: (CompletionRequest, "cmpl", prepare_completion),
    EMBEDDINGS: (EmbeddingRequest, "embd", prepare_embedding),
    **dict.fromkeys(SCORES, (ScoreRequest, "embd", prepare_score)),
    **dict.fromkeys(RERANKINGS, (RerankRequest, "rerank", prepare_rerank)),
}
"""By endpoint: its body, the prefix of its answers' ids, and what prepares it."""


def _is_its_own(error: EngineDeadError) -> bool:
    """Whether this line itself killed engines: retried later, it would kill the next ones."""
    return error.failure is not None and error.failure.type == QUARANTINED


def _check_whole(request: SharedFields, names: Sequence[str]) -> None:
    """Raises ApiError for fields that ask for a streamed or background response."""
    for name in names:
        value = getattr(request, name)
        if value not in (None, False):
            raise bad_field(name, f"{name}: a batch gives whole answers; leave it out")
