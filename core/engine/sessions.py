"""Sessions with clients: what a core answers without its loop, and which client a message is from.

A port (zmq_port.py, memory_port.py) carries messages; `Sessions` is the conversation that both have. It runs on the
port's thread, so attaching is quick while a long step runs.
"""

from __future__ import annotations

import itertools
import queue

import msgspec

from headrace.core.engine.gates import GateFailed, GateOpened
from headrace.ipc.failure import Failure
from headrace.ipc.messages import (
    SCHEMA_HASH,
    ClientMessage,
    CoreMessage,
    Dismissed,
    FetchTokenizer,
    Goodbye,
    Hello,
    Refused,
    Reply,
    TokenizerBundle,
    Welcome,
)


class ClientGone(msgspec.Struct, frozen=True):
    """Not a wire message: the client left, or its process ended."""


class StopOrder(msgspec.Struct, frozen=True):
    """Not a wire message: end within `deadline_s`, letting running requests finish until then."""

    deadline_s: float


class ExecutorFailed(msgspec.Struct, frozen=True):
    """Not a wire message: what runs the model, or hears clients, is gone, and the engine ends with it."""

    failure: Failure


InboxMessage = ClientMessage | ClientGone | StopOrder | ExecutorFailed | GateOpened | GateFailed
Inbox = queue.SimpleQueue[tuple[int, InboxMessage]]


class Sessions:
    """Numbers clients, greets them, hands the tokeniser out; passes everything else on to the loop's inbox."""

    def __init__(self, inbox: Inbox, welcome: Welcome, tokenizer: TokenizerBundle | None) -> None:
        self._inbox = inbox
        self._welcome = welcome
        self._tokenizer = tokenizer
        self._numbers = itertools.count(1)

    def greet(self, hello: Hello) -> tuple[int, Welcome] | Refused:
        """A number for the new client and its Welcome; or a refusal that shows both versions."""
        if hello.schema_hash != SCHEMA_HASH:
            return self.refuse(
                f"the client speaks Headrace {hello.version} (messages {hello.schema_hash}), this engine "
                f"{self._welcome.version} (messages {SCHEMA_HASH}): install the same version on both sides"
            )
        return next(self._numbers), self._welcome

    def receive(self, client: int, message: ClientMessage) -> CoreMessage | None:
        """Takes a greeted client's message; the answer, where the loop is not needed for it."""
        if isinstance(message, FetchTokenizer):
            if self._tokenizer is None:
                return Reply(
                    call=message.call,
                    failure=self._failure("this engine runs without a tokenizer (skip_tokenizer_init)"),
                )
            return Reply(call=message.call, result=self._tokenizer)
        if isinstance(message, Hello):
            return self.refuse("a second Hello in one session")
        self._inbox.put((client, ClientGone() if isinstance(message, Goodbye) else message))
        return None

    def gone(self, client: int) -> None:
        self._inbox.put((client, ClientGone()))

    def dismissal(self) -> Dismissed:
        """For a client whose queue of answers was full."""
        why = "this client did not read its answers; its requests were ended, and it is served no more"
        return Dismissed(failure=msgspec.structs.replace(self._failure(why), type="Dismissed"))

    def port_failed(self, failure: Failure) -> None:
        """The port hears no client any more: the engine ends with it."""
        self._inbox.put((0, ExecutorFailed(failure)))

    def refuse(self, why: str) -> Refused:
        return Refused(failure=self._failure(why), schema_hash=SCHEMA_HASH, version=self._welcome.version)

    def _failure(self, why: str) -> Failure:
        return Failure(message=why, type="ProtocolError", process="engine-core", pid=self._welcome.pid, phase="serve")
