"""Tokenizers that are read while their engine still loads its weights: reading one takes a tenth of a second."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from headrace.frontend.text.tokenizer import Tokenizer
from headrace.frontend.text.tokenizer_cache import load_bundle
from headrace.ipc.failure import let_interrupts_pass
from headrace.ipc.messages import TokenizerInfo

_read: dict[str, Future[Tokenizer | None]] = {}
"""By content hash, until somebody takes it."""


def read_in_advance(info: TokenizerInfo) -> None:
    """Begins to read the tokenizer, if the cache has a copy of it. Thread-safe."""
    future: Future[Tokenizer | None] = Future()
    if _read.setdefault(info.content_hash, future) is future:
        threading.Thread(target=_run, args=(info, future), name="tokenizer", daemon=True).start()


def take(info: TokenizerInfo) -> Future[Tokenizer | None] | None:
    """The tokenizer that is being read, or None for want of a copy; None if nobody has begun. It is given out once.
    Thread-safe."""
    return _read.pop(info.content_hash, None)


def _run(info: TokenizerInfo, future: Future[Tokenizer | None]) -> None:
    found = None
    try:
        bundle = load_bundle(info)
        found = None if bundle is None else Tokenizer(bundle)
    except BaseException as error:  # whoever needs the tokenizer will meet it, too
        let_interrupts_pass(error)
    finally:
        future.set_result(found)
