"""A helper program whose worker is ended by a signal while half of its answer is in the channel."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import msgspec

from headrace.ipc.process.helper import WorkerEnded, WorkerReady, run_helper

ANSWER_BYTES = 64 << 20
"""More than a channel holds that nobody reads."""


class EndBy(msgspec.Struct, frozen=True, tag=True):
    signal: int


class Answered(msgspec.Struct, frozen=True, tag=True):
    content: bytes


Message = EndBy | Answered | WorkerReady | WorkerEnded


class _Work:
    def begin(self, lane: int, former: int) -> None:
        pass

    def do(self, message: Any) -> Answered:
        threading.Thread(target=_end, args=(message.signal,), daemon=True).start()
        return Answered(bytes(ANSWER_BYTES))

    def is_bloated(self) -> bool:
        return False


def _end(signal: int) -> None:
    time.sleep(0.5)
    os.kill(os.getpid(), signal)


if __name__ == "__main__":
    run_helper(Message, lambda channel: _Work())
