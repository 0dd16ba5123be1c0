"""OpenAI's batch files: one line per request, and one per result.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": ...},
     "error": null}

The `id` of a result is made from its request's custom_id, url and body, so that a run that goes on can tell whether a
request has changed since. A failed request has its status and the API's error in `response` (null if the line is not a
valid request), and the same error with the line's number in `error`. Each result is one write to a file opened for
appending, so an interrupted file consists of whole lines, except perhaps the last, which is removed when the file is
opened again.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import io
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from headrace.frontend.http.server.decoding.decoder import RequestDecoder
from headrace.frontend.http.server.errors import ApiError, bad_field
from headrace.ipc.failure import HeadraceError, OptionError
from headrace.ipc.process.regular_files import open_file
from headrace.ipc.struct_types import threadsafe

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
SCORES, RERANKINGS = ("/score", "/v1/score"), ("/rerank", "/v1/rerank", "/v2/rerank")
ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS, *SCORES, *RERANKINGS)
ANY_ENDPOINT = ", ".join(ENDPOINTS[:-1]) + f" or {ENDPOINTS[-1]}"

MOST_ERRORS = 50
"""How many errors to report for a file without a valid request."""


class BatchRequest(msgspec.Struct, kw_only=True):
    """One line of the input. Its body is decoded by the server's code."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchResponse(msgspec.Struct, kw_only=True):
    status_code: int
    request_id: str
    body: Any
    """Raw JSON, as the server would have responded."""


class BatchError(msgspec.Struct, kw_only=True):
    code: str | None
    message: str
    param: str | None
    """The field that was wrong."""
    line: int | None
    """The line of the input, counted from 1; None if the error is not about one line."""


class BatchResult(msgspec.Struct, kw_only=True):
    """One line of the output."""

    id: str
    custom_id: str | None
    """None if the line has no readable custom_id."""
    response: BatchResponse | None
    error: BatchError | None


def decode_line(line: bytes) -> BatchRequest:
    """Decodes and checks a line. Raises ApiError, which names the field."""
    # RequestDecoder gives precise errors but decodes to plain data, not msgspec.Raw: the line is decoded again below.
    try:
        request = RequestDecoder(strict=True).decode(line, _Envelope)
    except ApiError as error:
        error.body.message = error.body.message.replace("the body", "the line")
        raise
    if request.method != "POST":
        raise bad_field("method", f"method is {request.method!r:.50}; it must be POST")
    if request.url not in ENDPOINTS:
        raise bad_field("url", f"url is {request.url!r:.100}; it must be {ANY_ENDPOINT}")
    if not request.custom_id:
        raise bad_field("custom_id", "custom_id is empty; each line needs its own")
    return msgspec.json.decode(line, type=threadsafe(BatchRequest))


class _Envelope(msgspec.Struct, kw_only=True):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


def custom_id_of(line: bytes) -> str | None:
    """The custom_id of an invalid line, if it can be read."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    name = found.get("custom_id") if isinstance(found, dict) else None
    return name if isinstance(name, str) else None


def answered(request: BatchRequest, request_id: str, body: bytes) -> BatchResult:
    response = BatchResponse(status_code=200, request_id=request_id, body=msgspec.Raw(body))
    return BatchResult(id=result_id(request), custom_id=request.custom_id, response=response, error=None)


def failed(
    custom_id: str | None, request: BatchRequest | None, request_id: str | None, line: int, error: ApiError
) -> BatchResult:
    """`request` and `request_id` are None if the line is not a valid request."""
    response = None
    if request_id is not None:
        response = BatchResponse(status_code=error.status, request_id=request_id, body=msgspec.Raw(error.json()))
    told = BatchError(
        code=error.body.code, message=f"line {line}: {error.body.message}", param=error.body.param, line=line
    )
    new_id = f"batch_req_{uuid.uuid4().hex}" if request is None else result_id(request)
    return BatchResult(id=new_id, custom_id=custom_id, response=response, error=told)


def result_id(request: BatchRequest) -> str:
    """The id of a request's result. Two spellings of the same JSON have different ids."""
    content = msgspec.json.encode((request.custom_id, request.url, request.body))
    return _OWN_ID + hashlib.sha256(content).hexdigest()[:40]


_OWN_ID = "batch_req_of_"
"""Begins an id that `result_id` has made; other programs make other ones."""


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields each line that is not blank, with its number from 1. Raises OptionError."""
    try:
        with open_file(path) as file:
            for number, line in enumerate(_as_utf8(file), 1):
                if line.strip():
                    yield number, line
    except UnicodeError as error:
        raise OptionError(
            f"the input file {path} begins as UTF-16 or UTF-32 does and is not: {error}; write it as UTF-8 (iconv -t "
            "UTF-8)"
        ) from None
    except OSError as error:
        raise OptionError(f"cannot read the input file {path}: {(error.strerror or str(error)).lower()}") from None


def _as_utf8(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file in UTF-8 without a byte order mark. PowerShell writes UTF-16. Raises UnicodeError."""
    first = file.peek(4)[:4] if isinstance(file, io.BufferedReader) else b""
    encoding = json.detect_encoding(first)  # from a mark, or from where the zeros are
    if encoding.startswith(("utf-16", "utf-32")):
        text = io.TextIOWrapper(file, encoding, newline="\n")
        yield from (line.removeprefix("\ufeff").encode() for line in text)
    else:
        yield from (line.removeprefix(codecs.BOM_UTF8) if at == 0 else line for at, line in enumerate(file))


def check_url(request: BatchRequest, url: str | None) -> None:
    """url: the only endpoint that lines may name, or None for any. Raises ApiError."""
    if url not in (None, request.url):
        raise bad_field("url", f"url is {request.url!r:.100}; the batch is for {url}")


def why_none(path: Path, url: str) -> list[BatchError]:
    """The errors of the first lines, if no line of the file is a valid request; else []. Raises OptionError."""
    errors: list[BatchError] = []
    for number, line in read_lines(path):
        try:
            check_url(decode_line(line), url)
            return []
        except ApiError as error:
            if len(errors) < MOST_ERRORS and (told := failed(None, None, None, number, error).error) is not None:
                errors.append(told)
    why = f"the file has no lines: each is a request, {{custom_id: ..., method: POST, url: {url}, body: ...}}"
    return errors or [BatchError(code="empty_file", message=why, param=None, line=None)]


class Results:
    """The output file, opened for appending."""

    def __init__(self, path: Path, *, resume: bool, overwrite: bool = False) -> None:
        """With `resume` results are added to an existing file, with `overwrite` it is emptied.

        Raises OptionError if the file is not a batch result file, or exists without either option.
        """
        self._path = path
        self.done_ids: dict[str, str] = {}
        """The ids of the results that requests already have, by custom_id."""
        self.done_lines: set[int] = set()
        """Numbers of the lines without a custom_id that already have a result."""
        self.num_errors = 0
        """How many of the existing results are errors."""
        if path.is_dir():
            raise OptionError(f"cannot write the output file {path}: it is a folder")
        try:
            if not (resume or overwrite) and path.exists() and path.stat().st_size:
                raise OptionError(
                    f"{path} has results already: go on with --resume, begin anew with --overwrite, or name another"
                )
            self._is_file = not path.exists() or path.is_file()
            if not self._is_file and resume:
                raise OptionError(f"--resume: {path} is no regular file, so the results in it cannot be read")
            begin = os.O_TRUNC if overwrite else 0
            how = os.O_RDWR | os.O_CREAT | os.O_APPEND | begin if self._is_file else os.O_WRONLY
            self._descriptor = os.open(path, how | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OptionError(
                f"cannot write the output file {path}: {(error.strerror or str(error)).lower()}"
            ) from None
        try:
            if self._is_file:
                self._read(path)
        except BaseException:
            self.close()
            raise

    def append(self, result: BatchResult) -> None:
        """Writes one result. Raises HeadraceError, for example on a full disk; the partial line is removed then."""
        line = msgspec.json.encode(result) + b"\n"
        whole_bytes = os.fstat(self._descriptor).st_size
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                if self._is_file:
                    os.ftruncate(self._descriptor, whole_bytes)
            raise HeadraceError(
                f"cannot write the output file {self._path}: {(error.strerror or str(error)).lower()}; what it has "
                "stays, and --resume goes on from there"
            ) from error

    def close(self) -> None:
        os.close(self._descriptor)

    def _read(self, path: Path) -> None:
        whole_bytes = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # an incomplete line: the run before ended while writing it
                whole_bytes += len(line)
                try:
                    result = msgspec.json.decode(line, type=threadsafe(BatchResult))
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise OptionError(
                        f"{path}, line {number}, is no batch result ({error}): name another output file"
                    ) from None
                self.num_errors += result.error is not None
                if result.custom_id is not None:
                    self.done_ids[result.custom_id] = result.id
                elif result.error is not None and result.error.line is not None:
                    self.done_lines.add(result.error.line)
        os.ftruncate(self._descriptor, whole_bytes)


def has_changed(request: BatchRequest, done_id: str) -> bool:
    """Whether the result with this id is of another body or url than the request's. Results of other programs tell
    nothing of it, and count as the request's."""
    return done_id.startswith(_OWN_ID) and done_id != result_id(request)
