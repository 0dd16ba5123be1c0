"""Struct types are made ready for conversions by one thread at a time.

When msgspec (0.22) is first asked to convert to a struct type, it shares what it knows of it before it knows all, and
runs Python code meanwhile: another thread that converts to the type then ends the process with a segmentation fault, as
the first requests of a server did that came at once.
"""

from __future__ import annotations

import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")
_ready = set[object]()
_making_ready = threading.RLock()


def threadsafe(kind: T) -> T:
    """The type itself, of which msgspec knows all from then on. Every type that contains structs is passed through this
    on its way to msgspec, except where a module that makes a decoder is imported."""
    if kind not in _ready:
        with _making_ready:
            msgspec.msgpack.Decoder(kind)
            _ready.add(kind)
    return kind
