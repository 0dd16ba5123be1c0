"""The routes of files and batches."""

from __future__ import annotations

import functools
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.frontend.batch_file.file import ANY_ENDPOINT, ENDPOINTS
from headrace.frontend.http.apis.files.batches import WINDOW_S, Batch, FilesState
from headrace.frontend.http.apis.files.store import (
    LEAST_EXPIRY_S,
    MOST_EXPIRY_S,
    BatchObject,
    ExpiresAfter,
    FileObject,
    FullError,
    RequestCounts,
    no_room,
)
from headrace.frontend.http.apis.files.upload import Upload
from headrace.frontend.http.server.access import Access
from headrace.frontend.http.server.api import Api
from headrace.frontend.http.server.decoding.decoder import decode_query
from headrace.frontend.http.server.engines import engine_for
from headrace.frontend.http.server.errors import ApiError, bad_field
from headrace.frontend.http.server.exchange import Exchange
from headrace.frontend.http.server.route_spec import get, post, route
from headrace.frontend.http.server.shared_database import StoreError
from headrace.frontend.http.server.state import ServerState

logger = logging.getLogger(__name__)
_READ_BYTES = 1 << 18


class CreateBatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/batches"""

    input_file_id: str
    endpoint: Annotated[str, Meta(description=f"{ANY_ENDPOINT}; every line's url")]
    completion_window: Annotated[str, Meta(description="Time limit: 24h. Requests that have no answer by then expire")]
    metadata: Annotated[
        Annotated[dict[str, str], Meta(max_length=16)] | None, Meta(description="Returned with the batch")
    ] = None
    output_expires_after: Annotated[
        ExpiresAfter | None, Meta(description="When its output and error files are deleted; default: never")
    ] = None


class FileList(msgspec.Struct):
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class BatchList(msgspec.Struct):
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedFile(msgspec.Struct):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class FilesQuery(msgspec.Struct):
    purpose: str | None = None
    limit: int = 10_000
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class BatchesQuery(msgspec.Struct):
    limit: int = 20
    after: str | None = None


# --- files ------------------------------------------------------------------------------------------------------------


async def upload(state: ServerState, exchange: Exchange) -> None:
    store = state.of(FilesState).store
    if not store.most_bytes:
        raise ApiError(HTTPStatus.NOT_FOUND, "this server keeps no files (its option file_store_bytes is 0)")
    reading = Upload(store, exchange.tenant, exchange.header(b"content-type") or "")
    kept = False
    try:
        try:
            await reading.read(exchange.parts())
        except FullError as error:
            raise no_room(error) from None
        except OSError as error:
            logger.warning("a file could not be written to %s: %s", store.folder, error)
            raise StoreError(f"the server's file store cannot be used now: {error.strerror}") from error
        file = _file_of(reading)
        await store.add(exchange.tenant, file)
        kept = True
    finally:
        if not kept:
            await reading.drop()
    await exchange.answer(file)


def _file_of(reading: Upload) -> FileObject:
    fields = dict(reading.fields)
    purpose, now = fields.pop("purpose", None), int(time.time())
    if purpose is None:
        raise bad_field("purpose", "purpose is required", "missing_required_parameter")
    if purpose != "batch":
        raise bad_field("purpose", f"purpose is {purpose!r:.80}; files are for batches here: it must be batch")
    anchor, seconds = fields.pop("expires_after[anchor]", None), fields.pop("expires_after[seconds]", None)
    if (anchor is None) != (seconds is None) or anchor not in (None, "created_at"):
        raise bad_field("expires_after", "expires_after must be {anchor: created_at, seconds: ...}")
    if seconds is not None and not (seconds.isdecimal() and LEAST_EXPIRY_S <= int(seconds[:9]) <= MOST_EXPIRY_S):
        raise bad_field("expires_after", f"expires_after.seconds must be {LEAST_EXPIRY_S} to {MOST_EXPIRY_S}")
    for name in fields:
        raise bad_field(name, f"unknown field {name!r:.80}", "unknown_parameter")
    return FileObject(
        id=reading.id,
        bytes=reading.num_bytes,
        created_at=now,
        filename=reading.filename or "",
        purpose=purpose,
        expires_at=None if seconds is None else now + int(seconds),
    )


async def files(state: ServerState, exchange: Exchange) -> None:
    query = decode_query(exchange.query(), FilesQuery)
    found = await state.of(FilesState).store.files(exchange.tenant)
    found = [file for file in found if query.purpose in (None, file.purpose)]
    if query.order == "desc":
        found.reverse()
    await exchange.answer(_page(found, query.limit, 10_000, query.after, FileList))


async def file(state: ServerState, exchange: Exchange) -> None:
    await exchange.answer(await _file(state, exchange, exchange.scope["path_params"]["file_id"], "file_id"))


async def delete(state: ServerState, exchange: Exchange) -> None:
    id = exchange.scope["path_params"]["file_id"]
    if not await state.of(FilesState).store.delete(exchange.tenant, id):
        raise _no_file(id, "file_id")
    await exchange.answer(DeletedFile(id))


async def content(state: ServerState, exchange: Exchange) -> None:
    store = state.of(FilesState).store
    found = await _file(state, exchange, exchange.scope["path_params"]["file_id"], "file_id")
    try:
        opened = await store.run(lambda: store.path(found.id).open("rb"))
    except FileNotFoundError:  # deleted meanwhile
        raise _no_file(found.id, "file_id") from None
    with opened:
        headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % found.bytes)]
        await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
        while data := await store.run(lambda: opened.read(_READ_BYTES)):
            await exchange.send({"type": "http.response.body", "body": data, "more_body": True})
        await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})


async def _file(state: ServerState, exchange: Exchange, id: str, param: str) -> FileObject:
    found = await state.of(FilesState).store.file(exchange.tenant, id)
    if found is None:
        raise _no_file(id, param)
    return found


def _no_file(id: str, param: str) -> ApiError:
    why = f"no file {id!r:.200}: it was deleted, has expired, or never existed"
    return ApiError(HTTPStatus.NOT_FOUND, why, param=param, code="not_found")


# --- batches ----------------------------------------------------------------------------------------------------------


async def create_batch(state: ServerState, exchange: Exchange) -> None:
    request = await exchange.prepare(lambda body: state.decoder.decode(body, CreateBatch))
    if request.endpoint not in ENDPOINTS:
        raise bad_field("endpoint", f"endpoint is {request.endpoint!r:.80}; it must be {ANY_ENDPOINT}")
    if request.completion_window != "24h":
        raise bad_field("completion_window", "completion_window must be 24h")
    state.check_accepting()
    client = engine_for(state.pool, None).connected
    asked = await _file(state, exchange, request.input_file_id, "input_file_id")
    if asked.purpose != "batch":
        raise bad_field("input_file_id", f"{asked.id} is a file of purpose {asked.purpose}; it must be batch")
    now = int(time.time())
    batch = BatchObject(
        id=f"batch_{uuid.uuid4().hex}",
        endpoint=request.endpoint,
        input_file_id=asked.id,
        completion_window=request.completion_window,
        status="validating",
        created_at=now,
        expires_at=now + int(WINDOW_S),
        request_counts=RequestCounts(),
        metadata=request.metadata,
        output_expires_after=request.output_expires_after,
    )
    try:
        await state.of(FilesState).store.add_batch(exchange.tenant, batch)
    except FullError as error:
        raise ApiError(
            HTTPStatus.TOO_MANY_REQUESTS,
            str(error),
            type="rate_limit_error",
            code="too_many_batches",
            retry_after_s=60.0,
        ) from None
    body = msgspec.json.encode(batch)
    state.of(FilesState).start(Batch(state, exchange.tenant, batch), client.welcome.max_num_seqs // 2)
    await exchange.answer(body)


async def batches(state: ServerState, exchange: Exchange) -> None:
    query = decode_query(exchange.query(), BatchesQuery)
    found = await state.of(FilesState).store.batches(exchange.tenant)
    found.reverse()
    await exchange.answer(_page(found, query.limit, 100, query.after, BatchList))


async def batch(state: ServerState, exchange: Exchange) -> None:
    id = exchange.scope["path_params"]["batch_id"]
    await exchange.answer(_found(await state.of(FilesState).store.batch(exchange.tenant, id), id))


async def cancel_batch(state: ServerState, exchange: Exchange) -> None:
    id = exchange.scope["path_params"]["batch_id"]
    found = _found(await state.of(FilesState).store.cancel_batch(exchange.tenant, id), id)
    if found.status != "cancelling":
        why = f"the batch has ended: it is {found.status}"
        raise ApiError(HTTPStatus.CONFLICT, why, param="batch_id", code="invalid_value")
    state.of(FilesState).cancel(id)
    await exchange.answer(found)


def _found(batch: BatchObject | None, id: str) -> BatchObject:
    if batch is None:
        raise ApiError(HTTPStatus.NOT_FOUND, f"no batch {id!r:.200}", param="batch_id", code="not_found")
    return batch


def _page(
    found: Sequence[Any], limit: int, most: int, after: str | None, kind: Callable[..., FileList | BatchList]
) -> Any:
    if not 1 <= limit <= most:
        raise bad_field("limit", f"limit is {limit}; it must be 1 to {most}")
    if after is not None:
        places = [place for place, each in enumerate(found) if each.id == after]
        if not places:
            raise bad_field("after", f"after: nothing has the id {after!r:.100}")
        found = found[places[0] + 1 :]
    page = list(found[:limit])
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return kind(page, first, last, len(found) > len(page))


_get, _post = functools.partial(get, access=Access.CLIENT), functools.partial(post, access=Access.CLIENT)
ROUTES = (
    _post(
        "/v1/files",
        upload,
        "Upload a file of requests for a batch",
        None,
        FileObject,
        (400, 403, 404, 408, 413, 415),
        form={
            "type": "object",
            "properties": {
                "purpose": {"type": "string", "enum": ["batch"]},
                "file": {"type": "string", "format": "binary"},
            },
            "required": ["purpose", "file"],
        },
    ),
    _get("/v1/files", files, "List files", FileList, query=FilesQuery, refusals=(400,)),
    _get("/v1/files/{file_id}", file, "Retrieve a file's description", FileObject, refusals=(404,)),
    route("DELETE", "/v1/files/{file_id}", delete, "Delete a file", DeletedFile, refusals=(404,), access=Access.CLIENT),
    _get("/v1/files/{file_id}/content", content, "Retrieve a file's content", refusals=(404,)),
    _post(
        "/v1/batches",
        create_batch,
        "Create a batch: run the requests of a file in the background",
        CreateBatch,
        BatchObject,
        (400, 404, 413, 415, 429, 503),
    ),
    _get("/v1/batches", batches, "List batches", BatchList, query=BatchesQuery, refusals=(400,)),
    _get("/v1/batches/{batch_id}", batch, "Retrieve a batch and its progress", BatchObject, refusals=(404,)),
    _post(
        "/v1/batches/{batch_id}/cancel",
        cancel_batch,
        "Cancel a batch; the results so far are kept",
        None,
        BatchObject,
        (404, 409),
    ),
)
API = Api(routes=ROUTES, states=(FilesState,))
