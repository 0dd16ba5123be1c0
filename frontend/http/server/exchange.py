"""One HTTP request and its response: the body read within its limits, answers and errors written as JSON.

Large bodies, which would block the event loop, are decoded and tokenised in worker threads. The bytes of bodies that
are being read or decoded are bounded over all connections. The number of values in one body is bounded too, and counted
before any object is created: msgspec and Python hold the GIL while they create objects. The garbage collector holds it
while it traverses them, so it is paused while these threads work.
"""

from __future__ import annotations

import asyncio
import codecs
import collections
import contextlib
import functools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

import msgspec

from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.adapters import AdapterFinder
from headrace.frontend.http.server.connection import DISCARD_S, EXTENSION, Connection
from headrace.frontend.http.server.errors import ApiError, UnknownModelError
from headrace.frontend.text.template_renderer import without_blocking
from headrace.frontend.tracing.tracer import tokenizing
from headrace.ipc.failure import HeadraceError
from headrace.ipc.process.gc_pauses import CollectorHold
from headrace.ipc.process.resources import give_back_freed_memory

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]
JSON: Headers = ((b"content-type", b"application/json"),)

INLINE_BYTES = 16 << 10
INLINE_CONTAINERS = 256
"""A body of at most this many bytes, and this many strings, lists and objects, is processed in the event loop."""
MOST_SEPARATORS = 1 << 20
"""Most commas in a body, about one per value (mostly token ids); commas within strings count too."""
MOST_CONTAINERS = 1 << 16
"""Most strings, lists and objects in a body: they take more time and memory than numbers."""
_NUM_THREADS = 2
_BODIES_IN_MEMORY = 8
"""How many bodies of the largest allowed size may be in memory at a time, over all connections."""
_COUNT_BYTES = 1 << 20
_TRIM_BYTES = 1 << 20
_TRIM_AFTER_S = 0.2
"""Until then, threads and frames that worked on the request have let go of its memory, and others may have ended."""
_OF_PAGES = (b"origin", b"referer")
_LONGEST_HOLD_S = 10.0
"""Longest time without a garbage collection while large bodies follow one another."""


class _LargeWork(ThreadPoolExecutor):
    """Threads for work that creates many objects at once; the garbage collector is paused while they work."""

    def __init__(self) -> None:
        super().__init__(_NUM_THREADS, thread_name_prefix="large-body")
        self._hold = CollectorHold(_LONGEST_HOLD_S)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return super().submit(self._run, fn, *args, **kwargs)

    def _run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        with self._hold:
            return fn(*args, **kwargs)


class LargeBodies:
    """Limits and worker threads for the bodies of all connections of a process. Called only in the event loop."""

    def __init__(self, max_body_bytes: int, num_tenants: int = 1) -> None:
        """num_tenants: how many share the memory; each has its part, and room for one body."""
        self._most_bytes = _BODIES_IN_MEMORY * max_body_bytes
        self._share_bytes = max(self._most_bytes // num_tenants, max_body_bytes)
        self._bytes_of: collections.Counter[str] = collections.Counter()
        self._num_bytes = 0
        self.threads: Executor = _LargeWork()
        self._is_trim_due = False

    def reserve(self, num_bytes: int, tenant: str = "") -> None:
        """Counts bytes of a body as in memory until `release`. Raises ApiError (429) if that is too much, in total or
        for the tenant."""
        if self._num_bytes + num_bytes > self._most_bytes or self._bytes_of[tenant] + num_bytes > self._share_bytes:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                "the bodies of other requests fill the memory that this server has for them; try again",
                type="rate_limit_error",
                code="too_many_bodies",
                retry_after_s=1.0,
            )
        self._num_bytes += num_bytes
        self._bytes_of[tenant] += num_bytes

    def release(self, num_bytes: int, tenant: str = "") -> None:
        self._num_bytes -= num_bytes
        self._bytes_of[tenant] -= num_bytes

    def run(self, body: bytes, make: Callable[[bytes], T]) -> Awaitable[T]:
        """Returns make(body), run in a thread unless the body is small. Raises ApiError, and what `make` raises, which
        may be called twice (`without_blocking`)."""
        if len(body) <= INLINE_BYTES and num_containers(body) <= INLINE_CONTAINERS:
            return without_blocking(functools.partial(make, body))
        return asyncio.get_running_loop().run_in_executor(self.threads, _make, [body], make)

    async def work(self, num_bytes: int, make: Callable[[], T]) -> T:
        """Returns make(), run in a thread if it works on more than INLINE_BYTES of decoded data. It may be called twice
        (`without_blocking`)."""
        if num_bytes <= INLINE_BYTES:
            return await without_blocking(make)
        return await asyncio.get_running_loop().run_in_executor(self.threads, make)

    def give_back(self, num_bytes: int) -> None:
        """Called when a request ends whose body or answer had this many bytes: soon returns freed memory to the system,
        if that was more than _TRIM_BYTES."""
        if num_bytes > _TRIM_BYTES and not self._is_trim_due:
            self._is_trim_due = True
            asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        self._is_trim_due = False
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self.threads.submit(give_back_freed_memory)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)


def _make(only: list[bytes], make: Callable[[bytes], T]) -> T:
    try:
        check_num_values(only[0])
        return make(only.pop())
    except (ApiError, HeadraceError) as error:
        only.clear()
        raise error.with_traceback(None) from None  # the frames of its traceback refer to the decoded body


def check_num_values(body: bytes) -> None:
    """Raises ApiError (413) for a body with too many values. Counts in slices, so that other threads run in between."""
    separators = containers = 0
    for start in range(0, len(body), _COUNT_BYTES):
        part = body[start : start + _COUNT_BYTES]
        separators += part.count(b",")
        containers += num_containers(part)
        if separators > MOST_SEPARATORS or containers > MOST_CONTAINERS:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body has more than {MOST_SEPARATORS} commas, or more than {MOST_CONTAINERS} texts, lists and "
                "objects: spread it over several requests",
                code="body_too_large",
            )


def num_containers(part: bytes) -> int:
    """Approximate number of strings, lists and objects that begin in this part of a body."""
    return (part.count(b'"') - part.count(b'\\"')) // 2 + part.count(b"[") + part.count(b"{")


def as_utf8(body: bytes, charset: str) -> bytes:
    """A body in UTF-8 without a byte order mark. JSON is UTF-8, but .NET and PowerShell also send UTF-16, marks, and
    Latin-1 with its name. charset: the content type's; empty if it names none. Raises ApiError."""
    found = json.detect_encoding(body)  # from a mark, or from where the zeros are
    if found == "utf-8-sig":
        return body[len(codecs.BOM_UTF8) :]
    charset = charset if found == "utf-8" else found
    if charset.lower() in ("", "utf-8", "utf8", "us-ascii"):
        return body
    try:
        if codecs.lookup(charset).name not in _CHARSETS:
            raise LookupError
        return body.decode(charset).encode()
    except (LookupError, UnicodeError):
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            f"the body is not text in the content type's charset {charset[:40]!r}; send UTF-8",
            code="invalid_json",
        ) from None


_UNICODE = ("utf-8", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")
_CHARSETS = frozenset({*_UNICODE, "iso8859-1", "iso8859-15", "cp1252"})
_CHARSET = re.compile(r"charset\s*=\s*\"?([\w.:-]+)", re.IGNORECASE)
_JSON_TYPE = re.compile(r"\s*(application/([\w!#$&^.+-]+\+)?json|text/json)\s*(;.*)?", re.IGNORECASE | re.ASCII)
"""JSON by its media type (RFC 6839, 3.1): application/json, application/*+json, and text/json of old clients."""
_MOST_TYPES = 16
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


class _ContentType(NamedTuple):
    is_json: bool
    charset: str
    """Empty if it names none."""


@functools.lru_cache(_MOST_TYPES)  # a server's clients send the same one with each request
def _read_type(value: bytes) -> _ContentType:
    text = value.decode("latin-1")
    named = _CHARSET.search(text)
    return _ContentType(_JSON_TYPE.fullmatch(text) is not None, named.group(1) if named else "")


class ClientGoneError(Exception):
    """The client disconnected before its request was complete, so no response can be sent."""


class Exchange:
    """One request and its response. A handler receives it and must answer it exactly once."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        options: ServeOptions,
        bodies: LargeBodies,
        finder: AdapterFinder,
    ) -> None:
        """finder: looks for a model that is not served."""
        self.scope, self.receive, self._finder = scope, receive, finder
        self._bodies = bodies
        self._send = send
        self.headers: Mapping[bytes, bytes] = dict(reversed(scope["headers"]))
        """Of several of a name, the first."""
        # Removed from the scope, to which the connection refers: a reference cycle would keep both alive.
        self.connection: Connection = scope["extensions"].pop(EXTENSION)
        self._tells_id = options.enable_request_id_headers
        self.headers_at_start: Callable[[], Awaitable[list[tuple[bytes, bytes]]]] | None = None
        """Called when the response begins; returns headers to add to it."""
        self._name: str | None = None
        self._max_body_bytes, self._read_timeout_s = options.max_body_bytes, options.read_timeout
        self._num_body_bytes = self._num_answer_bytes = 0
        self._body_is_read = scope["method"] in ("GET", "HEAD", "OPTIONS")
        self.status = 0
        """HTTP status of the response; 0 until it has begun."""
        self.error_body: Callable[[ApiError], bytes] = ApiError.json
        """Encodes the errors of this route."""
        self.takes_any_type = False
        """`RouteSpec.takes_any_type` of this route."""
        self.tenant = ""
        """Identifies the request's API key without revealing it; empty without a key."""

    @property
    def started(self) -> bool:
        """Whether the response has begun."""
        return self.status != 0

    async def send(self, message: Any) -> None:
        self.status = self.status or message["status"]
        if message["type"] == "http.response.start":
            headers = message["headers"]
            if b"content-length" in dict(headers):  # a whole answer, whose body follows
                self.connection.hold_head()
            if self.headers_at_start is not None:
                message = {**message, "headers": (headers := [*headers, *await self.headers_at_start()])}
            if self._tells_id:
                with contextlib.suppress(ApiError):  # an invalid id has been refused, and is not sent back
                    message = {**message, "headers": [*headers, (b"x-request-id", self.request_id().encode())]}
        self._num_answer_bytes += len(message.get("body", b""))
        await self._send(message)

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    def query(self) -> str:
        text: str = self.scope["query_string"].decode("latin-1")
        return text

    async def prepare(self, make: Callable[[bytes], T]) -> T:
        """Returns make(JSON body), run in a thread if the body is large, and once more if it names a model that is
        found only now. Raises ApiError and ClientGoneError."""
        only = list[bytes]()  # emptied at the end: an error's traceback refers to this frame, and would keep the body
        try:
            with tokenizing():
                only.append(await self._json_body())
                try:
                    return await self._bodies.run(only[0], make)
                except UnknownModelError as error:
                    await self._finder.find(error)
                return await self._bodies.run(only[0], make)
        finally:
            only.clear()
            self._bodies.release(self._num_body_bytes, self.tenant)

    async def parts(self) -> AsyncIterator[bytes]:
        """Yields a body of any size, for a handler that bounds and stores it. Raises ApiError and ClientGoneError."""
        while True:
            try:
                async with asyncio.timeout(self._read_timeout_s):
                    part = await self._part()
            except TimeoutError:
                raise ApiError(
                    HTTPStatus.REQUEST_TIMEOUT, f"nothing of the body came for {self._read_timeout_s:g} s"
                ) from None
            if part is None:
                return
            yield part

    def close(self) -> None:
        """Frees memory, once the response is written or the client has left."""
        self._bodies.give_back(max(self._num_body_bytes, self._num_answer_bytes))

    async def _json_body(self) -> bytes:
        charset = ""
        is_json = b"content-type" in self.headers
        for name, value in self.scope["headers"]:
            if name == b"content-type":
                found = _read_type(value)
                charset, is_json = charset or found.charset, is_json and found.is_json
        # Any other type could come from a form of a foreign web page, which browsers send without a CORS preflight.
        if not is_json and not (self.takes_any_type and not self._is_of_a_page()):
            raise ApiError(  # the status that OpenAI's clients and vLLM's know
                HTTPStatus.BAD_REQUEST,
                "Unsupported Media Type: the body must be JSON, sent with Content-Type: application/json",
                code="unsupported_media_type",
            )
        if (coding := self.headers.get(b"content-encoding") or b"identity").strip().lower() != b"identity":
            told = coding[:40].decode("latin-1")
            raise ApiError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"the body is sent with Content-Encoding: {told}, which is not read here; send it as it is",
                code="unsupported_encoding",
            )
        return as_utf8(await self._read_body(), charset)

    def _is_of_a_page(self) -> bool:
        """Whether a browser sent the request for a web page. Browsers add Origin to every POST (`null` if the origin is
        hidden), and a page can suppress neither that header nor those that begin with Sec-Fetch-."""
        return any(name in _OF_PAGES or name.startswith(b"sec-fetch-") for name, _ in self.scope["headers"])

    def request_id(self, named: str | None = None) -> str:
        """The request's id: the client's, else a new one; the same at each call. Raises ApiError for an invalid id.

        named: the id in the body, if any, which takes precedence over the header.
        """
        name = named or self._name
        if name is None and (value := self.headers.get(b"x-request-id")) is not None:
            name = value.decode("latin-1")
        if name is None:
            import uuid

            name = self._name = uuid.uuid4().hex
            return name
        if not _REQUEST_ID.fullmatch(name):
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                "request_id must be 1 to 256 printable ASCII characters without spaces",
                param="request_id",
                code="invalid_value",
            )
        self._name = name
        return name

    async def answer(self, body: Any, status: int = 200) -> None:
        """Sends a response: a struct, or bytes that already are JSON."""
        await send_json(self.send, status, body if isinstance(body, bytes) else msgspec.json.encode(body))

    async def answer_text(self, body: bytes, content_type: str) -> None:
        headers = [(b"content-type", content_type.encode()), (b"content-length", b"%d" % len(body))]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def refuse(self, error: ApiError) -> None:
        """Answers with an error. If the body is not read to its end, discards the rest and closes the connection."""
        if self._body_is_read:
            await send_json(self.send, error.status, self.error_body(error), error.headers())
            return
        headers = [*error.headers(), (b"connection", b"close")]
        await send_json(self.send, error.status, self.error_body(error), headers, more_body=True)
        if error.status != HTTPStatus.REQUEST_TIMEOUT:  # a client that timed out gets no more time
            with contextlib.suppress(TimeoutError, ClientGoneError):
                async with asyncio.timeout(DISCARD_S):
                    while await self._part() is not None:
                        pass
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _read_body(self) -> bytes:
        length = self.headers.get(b"content-length")
        if length is not None and int(length) > self._max_body_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(None if self.connection.has_whole_body else self._read_timeout_s):
                while (part := await self._part()) is not None:
                    # first: a part may be larger than the memory for all, and to try again would not help then
                    if self._num_body_bytes + len(part) > self._max_body_bytes:
                        raise self._too_large()
                    self._bodies.reserve(len(part), self.tenant)
                    self._num_body_bytes += len(part)
                    parts.append(part)
        except TimeoutError:
            raise ApiError(
                HTTPStatus.REQUEST_TIMEOUT, f"the body took longer than {self._read_timeout_s:g} s to arrive"
            ) from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _part(self) -> bytes | None:
        """The next part of the body; None after its end."""
        if self._body_is_read:
            return None
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self._body_is_read = not message.get("more_body", False)
        body: bytes = message.get("body", b"")
        return body

    def _too_large(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than {self._max_body_bytes} bytes (the server's option max_body_bytes)",
            code="body_too_large",
        )


async def send_json(
    send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = (), *, more_body: bool = False
) -> None:
    fixed = [*JSON, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body, "more_body": more_body})


async def send_pieces(send: Send, pieces: list[bytes], headers: Headers) -> None:
    """Sends a response in pieces, and frees each once it is sent. headers: besides its length."""
    fixed = [*headers, (b"content-length", b"%d" % sum(map(len, pieces)))]
    await send({"type": "http.response.start", "status": 200, "headers": fixed})
    pieces.reverse()
    while pieces:
        await send({"type": "http.response.body", "body": pieces.pop(), "more_body": bool(pieces)})
