"""Multipart bodies that keep their parser busy: what runs beside them has its turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from processor_time import TRIES
from thinned import every

from headrace.frontend.http.apis.files.store import FileStore
from headrace.frontend.http.apis.files.upload import Upload

HEAD = b'--B\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
PART_BYTES, NUM_PARTS = 1 << 20, 3
"""More than comes from a connection at once."""


@pytest.mark.parametrize(
    "piece", every(3, [b"\r\n--Bx", b"\r\n--B\r", b"\r\n--B-x"]), ids=["letters", "ends", "dashes"]
)
def test_a_file_that_is_full_of_its_boundary_leaves_others_their_turns(tmp_path: Path, piece: bytes) -> None:
    """Counted in processor seconds of the event loop's thread."""
    content = piece * (PART_BYTES // len(piece))

    async def parts() -> AsyncIterator[bytes]:
        yield HEAD
        for _ in range(NUM_PARTS):
            yield content
        yield b"\r\n--B--\r\n"

    async def longest_turn_s(store: FileStore) -> float:
        upload = Upload(store, "", "multipart/form-data; boundary=B")
        reading, longest_s = asyncio.create_task(upload.read(parts())), 0.0
        while not reading.done():
            began_s = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - began_s)
        await reading
        assert store.path(upload.id).read_bytes() == content * NUM_PARTS
        return longest_s

    store = FileStore(str(tmp_path / "files"), 1 << 30)
    try:
        assert any(asyncio.run(longest_turn_s(store)) < 0.06 for _ in range(TRIES))
    finally:
        store.close()
