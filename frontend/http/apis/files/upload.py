"""Reads a multipart body as it arrives: the file into the store, other fields into memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import PurePath

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from headrace.frontend.http.apis.files.store import FileStore
from headrace.frontend.http.server.errors import ApiError, bad_field, shortened
from headrace.frontend.http.server.generation import LoopTurn

_WRITE_BYTES = 1 << 20
_PARSED_AT_ONCE_BYTES = 1 << 14
"""Bytes per call of the parser, at worst some milliseconds: it checks each place where a boundary may begin."""
_MOST_FIELD_BYTES = 1 << 16
_MOST_PARTS = 32
_LONGEST_FILENAME = 255
_LONGEST_BOUNDARY = 70
"""RFC 2046, section 5.1.1."""


class Upload:
    """The upload of one body. Call `drop` unless its file is added to the store."""

    def __init__(self, store: FileStore, tenant: str, content_type: str) -> None:
        """Raises ApiError for a body that is not multipart/form-data."""
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not 0 < len(options.get(b"boundary", b"")) <= _LONGEST_BOUNDARY:
            raise ApiError(415, "the body must be multipart/form-data: fields purpose and file")
        self._store, self._tenant, self.id = store, tenant, store.new_id()
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.num_bytes = 0
        self._name, self._headers, self._header, self._value = "", dict[bytes, bytes](), b"", b""
        self._field, self._num_field_bytes, self._num_parts = bytearray(), 0, 0
        self._is_file = self._has_ended = False
        self._waiting = bytearray()
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._part_begin,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._data,
                "on_part_end": self._part_end,
                "on_end": self._end,
            },
        )

    async def read(self, parts: AsyncIterator[bytes]) -> None:
        """Reads the whole body. Raises ApiError, and FullError if the store is full."""
        try:
            turn = LoopTurn()
            async for part in parts:
                for start in range(0, len(part), _PARSED_AT_ONCE_BYTES):
                    self._parser.write(part[start : start + _PARSED_AT_ONCE_BYTES])
                    await turn.step()
                if len(self._waiting) >= _WRITE_BYTES:
                    await self._store.run(self._write)
            self._parser.finalize()
        except FormParserError as error:
            raise ApiError(400, f"the body is no multipart/form-data: {error}", code="invalid_multipart") from None
        if not self._has_ended:
            raise ApiError(400, "the body ends within a part", code="invalid_multipart")
        if self.filename is None:
            raise bad_field("file", "file is required: a part with a filename", "missing_required_parameter")
        await self._store.run(self._write)

    async def drop(self) -> None:
        await self._store.run(lambda: self._store.drop(self.id))

    def _write(self) -> None:
        """Writes the buffered bytes of the file. Runs in the store's thread."""
        self._store.grow(self._tenant, self.id, len(self._waiting))
        self._store.append(self.id, self._waiting)
        self.num_bytes += len(self._waiting)
        self._waiting.clear()

    # --- what the parser calls ----------------------------------------------------------------------------------------

    def _part_begin(self) -> None:
        self._headers, self._field, self._is_file = {}, bytearray(), False
        self._num_parts += 1
        if self._num_parts > _MOST_PARTS:
            raise ApiError(413, f"the body has more than {_MOST_PARTS} parts", code="body_too_large")

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode(errors="replace")
        filename = options.get(b"filename")
        if self._name != "file":
            return
        if self.filename is not None or filename is None:
            raise bad_field("file", "file must be one part with a filename")
        self._is_file = True
        # The client's name for the file is only shown, never used as a path; its folders are dropped.
        self.filename = shortened(PurePath(filename.decode(errors="replace")).name or "file", _LONGEST_FILENAME)

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._waiting += data[start:end]
            return
        self._num_field_bytes += end - start
        if self._num_field_bytes > _MOST_FIELD_BYTES:
            raise ApiError(413, "the fields beside the file are too large", code="body_too_large")
        self._field += data[start:end]

    def _part_end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._field.decode(errors="replace")

    def _end(self) -> None:
        self._has_ended = True
