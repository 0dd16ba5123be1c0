"""The helper program whose processes read clients' grammars: two try them (trial.py), one follows them (following.py).

Reading a tokenizer takes seconds, so the program reads it once and forks the processes (`ipc/process/helper.py`). What
ends one of them ends no other, and the next is forked within milliseconds.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from headrace.core.structured_output.backend import Backend, Vocabulary, make_backend
from headrace.core.structured_output.helper.following import Follow, Followed, Following, Prepare, Prepared, Restarted
from headrace.core.structured_output.helper.trial import LANES, Candidate, Trying, Verdict, stack_bytes
from headrace.ipc.failure import HeadraceError
from headrace.ipc.process.helper import Helper, WorkerEnded, WorkerReady, run_helper
from headrace.ipc.transport.channel import Channel
from headrace.ipc.wait import Deadline

FOLLOWING = len(LANES)
"""The lane after those of trials."""


class Beginning(msgspec.Struct, frozen=True, tag=True):
    vocabulary: Vocabulary
    backend: str
    """The library to load before the first fork. Others are loaded by the process that needs them."""
    masks_fd: int
    """The file with the memory in which masks are written."""


GrammarMessage = (
    Beginning | Candidate | Verdict | Prepare | Prepared | Follow | Followed | Restarted | WorkerReady | WorkerEnded
)


def grammar_helper(vocabulary: Vocabulary, backend: str, masks_fd: int) -> Helper:
    """The program, which starts with the first grammar. backend: the library that most grammars need."""
    beginning = Beginning(vocabulary, backend, masks_fd)
    return Helper(
        __name__,
        GrammarMessage,
        FOLLOWING + 1,
        beginning=beginning,
        pass_fds=(masks_fd,),
        answers_soon=(FOLLOWING,),
    )


class _Work:
    """The work of each process."""

    def __init__(self, channel: Channel) -> None:
        beginning: Beginning = channel.receive(Deadline(None))
        self._vocabulary = vocabulary = beginning.vocabulary
        self._made: dict[str, Backend] = {}
        with contextlib.suppress(HeadraceError):  # the first grammar gets the error
            self._backend(beginning.backend)
        self._trying = Trying(self._backend, self._made, vocabulary.vocab_size)
        self._following = Following(self._backend, beginning.masks_fd, vocabulary.vocab_size)

    def begin(self, lane: int, former: int) -> None:
        self._lane = self._following if lane == FOLLOWING else self._trying
        self._lane.begin(former)

    def do(self, message: Any) -> Any:
        return self._lane.do(message)

    def is_bloated(self) -> bool:
        return False

    def _backend(self, name: str) -> Backend:
        if name not in self._made:
            self._made[name] = make_backend(name, self._vocabulary)
        return self._made[name]


if __name__ == "__main__":
    # A trial has half the stack of what follows its form then: what recurses too deeply ends there.
    run_helper(GrammarMessage, _Work, stack_bytes={**dict.fromkeys(LANES, stack_bytes()), FOLLOWING: 2 * stack_bytes()})
