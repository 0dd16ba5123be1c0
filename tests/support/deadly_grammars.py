"""The program that reads grammars, with libraries that crash: a form whose text holds [Zz] is deadly.

Its matcher ends the process at one token, hangs at another, or ends the process while the mask after a third is made.
One with [Xx] ends the process that compiles it, after a while. One with [Ww] is compiled for ever, and one with [Vv]
for ever without computing.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from headrace.core.structured_output.helper import following
from headrace.core.structured_output.helper.process import GrammarMessage, _Work
from headrace.ipc.process.helper import Helper, run_helper

DEADLY = "[Zz]"
DEADLY_TO_COMPILE = "[Xx]"
COMPUTING, WAITING = "[Ww]", "[Vv]"
MOST_COMPUTING_S = following.MOST_COMPUTING_S / 4
"""What takes longer in this program has no end: tests wait for that, in processor seconds."""
TOKENS = "DEADLY_TOKENS"
"""An environment variable: the ids of the three tokens."""


def deadly_helper(original: Helper, crashes: int, hangs: int, crashes_later: int) -> Helper:
    """As the original, whose libraries crash at these tokens."""
    here = os.path.dirname(__file__)
    return Helper(
        __name__,
        GrammarMessage,
        original._num_lanes,
        beginning=original._beginning,
        environment={
            "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]),
            TOKENS: f"{crashes} {hangs} {crashes_later}",
        },
        pass_fds=original._pass_fds,
        answers_soon=tuple(original._looking),
    )


def crash() -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)
    signal.pause()


class DeadlyMatcher:
    """As the library's, but for certain tokens."""

    def __init__(self, backend: DeadlyBackend, matcher: Any, *, is_deadly: bool) -> None:
        self.backend, self.matcher, self._is_deadly = backend, matcher, is_deadly
        self.crashes_later = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)

    def copy(self) -> DeadlyMatcher:
        return DeadlyMatcher(self.backend, self.matcher.copy(), is_deadly=self._is_deadly)

    def accept(self, token_id: int) -> bool:
        if self._is_deadly:
            crashes, hangs, crashes_later = map(int, os.environ[TOKENS].split())
            if token_id == crashes:
                crash()
            while token_id == hangs:
                pass
            self.crashes_later |= token_id == crashes_later
        return bool(self.matcher.accept(token_id))


class DeadlyBackend:
    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def compile(self, wanted: Any) -> DeadlyMatcher:
        if DEADLY_TO_COMPILE in wanted.text:
            time.sleep(0.3)
            os.abort()
        while COMPUTING in wanted.text:
            pass
        while WAITING in wanted.text:
            time.sleep(1)
        return DeadlyMatcher(self, self._backend.compile(wanted), is_deadly=DEADLY in wanted.text)

    def fill(self, positions: Any, masks: Any) -> None:
        if any(matcher.crashes_later for matcher, *_ in positions):
            crash()
        self._backend.fill([(matcher.matcher, at, drafts) for matcher, at, drafts in positions], masks)


class _DeadlyWork(_Work):
    def _backend(self, name: str) -> Any:
        if name not in self._made:
            made = super()._backend(name)
            self._made[name] = DeadlyBackend(made)  # type: ignore[assignment]
        return self._made[name]


if __name__ == "__main__":
    following.MOST_COMPUTING_S = MOST_COMPUTING_S
    run_helper(GrammarMessage, _DeadlyWork)
