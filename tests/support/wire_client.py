"""A client of an engine core's socket that uses only ipc/, for tests that inspect the messages themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import zmq

from headrace.ipc.codec import Codec, Tensor
from headrace.ipc.messages import (
    SCHEMA_HASH,
    AddRequest,
    CoreMessage,
    EngineStats,
    Finish,
    Generate,
    GetStats,
    Hello,
    Reply,
    Sampling,
    StepOutputs,
    Welcome,
)
from headrace.ipc.transport.sockets import new_dealer

M = TypeVar("M")


def request_message(slot: int, **fields: Any) -> AddRequest:
    """A short request, with these fields of the message."""
    given: dict[str, Any] = {
        "request_id": f"r{slot}",
        "prompt_token_ids": Tensor.of("int32", [5]),
        "task": Generate(sampling=Sampling(max_tokens=8)),
        **fields,
    }
    return AddRequest(slot=slot, **given)


class WireClient:
    """A blocking client with a deadline on every receive."""

    def __init__(self, address: str, *, greet: bool = True) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = new_dealer(self._context, address)
        self.socket.connect(address)
        self._codec: Codec[CoreMessage] = Codec(CoreMessage)
        self.heard: list[Any] = []
        if greet:
            self.send(Hello(schema_hash=SCHEMA_HASH, version="test", pid=1))
            self.welcome = self.receive(Welcome)

    def send(self, message: Any) -> None:
        self.socket.send_multipart(self._codec.encode(message))

    def add(self, slot: int, prompt: list[int], **sampling: Any) -> None:
        task = Generate(sampling=Sampling(**{"max_tokens": 8, **sampling}))
        self.send(request_message(slot, prompt_token_ids=Tensor.of("int32", prompt), task=task))

    def receive(self, kind: type[M], where: Callable[[M], bool] = lambda message: True, timeout_s: float = 10.0) -> M:
        """Waits for the next message of this kind that `where` accepts. All received messages are kept in `heard`."""
        end_s = time.monotonic() + timeout_s
        while (left_s := end_s - time.monotonic()) > 0 and self.socket.poll(int(left_s * 1e3) + 1):
            message = self._codec.decode(self.socket.recv_multipart())
            self.heard.append(message)
            if isinstance(message, kind) and where(message):
                return message
        raise AssertionError(f"no such {kind.__name__} within {timeout_s} s; heard {self.heard[-3:]}")

    def finish(self, slot: int, timeout_s: float = 10.0) -> Finish:
        def has(message: StepOutputs) -> bool:
            return any(finish.slot == slot for finish in message.finished)

        message = self.receive(StepOutputs, has, timeout_s)
        return next(finish for finish in message.finished if finish.slot == slot)

    def stats(self) -> EngineStats:
        self.send(GetStats(call=7))
        reply = self.receive(Reply)
        assert isinstance(reply.result, EngineStats)
        return reply.result

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()

    def __enter__(self) -> WireClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
