"""JSON objects with long lists of numbers, decoded in slices.

msgspec holds the GIL while it decodes a text, and a million numbers take so long that other streams visibly stall. So
a list of numbers, or of lists of numbers, is cut at commas, and other threads can run between two slices:

    [[1,2,3],[4,5,|6],[7],[8,|9,10]]     slices: [[1,2,3],[4,5]]  [[6],[7],[8]]  [[9,10]]
                                         each continues the last list of the slice before
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

SLICE_BYTES = 128 << 10
VALUE_PAUSE_S = 0.002
"""Pause between two values that each hold the GIL for long. Another thread needs the GIL several times to read, decode
and write one event, and without the pause would wait for a value each time."""
_OF_NUMBERS = b"0123456789-+.eE[], \t\r\n"
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode_json(text: bytes) -> Any:
    """Returns and raises what msgspec.json.decode does."""
    if len(text) <= SLICE_BYTES:
        return msgspec.json.decode(text)
    try:
        values = _OBJECT.decode(text)
        return {name: _decode_value(value) for name, value in values.items()}
    except (msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(text)  # not an object, or invalid; this error gives the position


def _decode_value(raw: msgspec.Raw) -> Any:
    if len(raw) > SLICE_BYTES:
        time.sleep(VALUE_PAUSE_S)
        text = bytes(raw).strip()
        if text.startswith(b"[") and not text.translate(None, _OF_NUMBERS):
            return _decode_numbers(text[1:-1])
    return msgspec.json.decode(raw)


def _decode_numbers(inside: bytes) -> list[Any]:
    """inside: the text between the brackets of a list."""
    values: list[Any] = []
    is_open = False  # the last value is a list that the next slice continues
    for part in _slices(inside):
        depth = is_open + part.count(b"[") - part.count(b"]")
        if depth not in (0, 1):
            raise msgspec.DecodeError("numbers are nested deeper than token ids are")
        more = _closed(part, was_open=is_open, is_open=depth == 1)
        if is_open:
            values[-1].extend(more.pop(0))
        values.extend(more)
        is_open = depth == 1
    return values


def _slices(inside: bytes) -> Iterator[bytes]:
    start = 0
    while (end := inside.find(b",", start + SLICE_BYTES)) >= 0:
        yield inside[start:end]
        start = end + 1
    yield inside[start:]


def _closed(part: bytes, *, was_open: bool, is_open: bool) -> Any:
    """Decodes a slice that begins within an inner list if was_open, and ends within one if is_open."""
    return msgspec.json.decode(b"%b%b%b" % (b"[[" if was_open else b"[", part, b"]]" if is_open else b"]"))
