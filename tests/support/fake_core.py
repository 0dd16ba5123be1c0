"""A core without a model: it implements the message protocol, and its tokens are a function of the prompt and the seed.

`FakeCore` is the logic without I/O; `memory_core` and `zmq_core` run it in a thread behind the two transports. `Faults`
makes it fail in various ways.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from fake_tokenizers import bundle_of, byte_level_tokenizer
from tokenizers import Tokenizer as FastTokenizer

from headrace import LLM
from headrace.frontend.client.transport import MemoryTransport
from headrace.ipc.codec import Codec, CodecError, Tensor
from headrace.ipc.failure import Failure
from headrace.ipc.messages import (
    SCHEMA_HASH,
    Abort,
    AddRequest,
    Admitted,
    ClientMessage,
    CoreMessage,
    EngineFailed,
    EngineStats,
    FetchTokenizer,
    Finish,
    FinishReason,
    FollowPrefixes,
    GetStats,
    Goodbye,
    Hello,
    LogprobRows,
    PromptLogprobs,
    Refused,
    Reply,
    ResetPrefixCache,
    StepOutputs,
    TokenizerBundle,
    TokenizerInfo,
    Welcome,
)
from headrace.ipc.transport.engine_records import OwnRecord
from headrace.ipc.transport.sockets import bind_router, ipc_path, this_kernel

MAX_MODEL_LEN = 256
NextToken = Callable[[list[int], int, int], int]
"""(prompt token ids, seed, position in the output) -> token id"""


def hashed_token(prompt: list[int], seed: int, position: int) -> int:
    """A printable ASCII character of the byte-level alphabet, so that the text is readable."""
    digest = hashlib.sha256(repr((prompt, seed, position)).encode()).digest()
    return 3 + digest[0] % 94  # after the special tokens, the alphabet begins with the printable ASCII


def expected_text(llm: LLM, prompt_ids: list[int], count: int, seed: int = 0) -> str:
    """The text that a core with `hashed_token` generates."""
    return llm.get_tokenizer().decode([hashed_token(prompt_ids, seed, position) for position in range(count)])


@dataclass
class Faults:
    """The faults of a fake core."""

    die_after_steps: int | None = None
    """Stop without a message."""
    fail_after_steps: int | None = None
    """Send EngineFailed, then stop."""
    garbage_after_steps: int | None = None
    """Send bytes that are not a message."""
    schema_hash: str = SCHEMA_HASH
    """The schema hash that this core claims to have."""
    ignore_hello: bool = False
    ignore_stats: bool = False
    retry_after_s: float = 0.0
    """Reject every request, as a full queue does."""
    failing_prompts: tuple[int, ...] = ()
    """Fail requests that begin with this token after their first token."""
    wrong_tokenizer: bool = False
    """Send another tokenizer than the announced one."""


@dataclass
class Running:
    client: Any
    request: AddRequest
    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)


class FakeCore:
    """The logic of the core without I/O: it takes messages and returns (client, message) pairs. A step generates
    `tokens_per_step` tokens for each running request."""

    def __init__(
        self,
        bundle: TokenizerBundle | None = None,
        next_token: NextToken = hashed_token,
        *,
        faults: Faults | None = None,
        eos_token_id: int = 2,
        tokens_per_step: int = 1,
        **welcome: Any,
    ) -> None:
        self.bundle = bundle if bundle is not None else bundle_of(byte_level_tokenizer())
        self.next_token, self.faults = next_token, faults or Faults()
        self.eos_token_id, self.tokens_per_step = eos_token_id, tokens_per_step
        self.running: dict[tuple[Any, int], Running] = {}
        self.steps = 0
        self.received: list[ClientMessage] = []
        self.clients: set[Any] = set()
        vocab_size = FastTokenizer.from_buffer(self.bundle.tokenizer_json).get_vocab_size()
        encoded = msgspec.msgpack.encode(self.bundle)
        info = TokenizerInfo(content_hash=hashlib.sha256(encoded).hexdigest(), size_bytes=len(encoded))
        fields: dict[str, Any] = {
            "max_model_len": MAX_MODEL_LEN,
            "vocab_size": vocab_size,
            "tokenizer": info,
            **welcome,
        }
        self.welcome = _welcome(**fields)

    def take(self, client: Any, message: ClientMessage) -> list[tuple[Any, CoreMessage]]:
        self.received.append(message)
        if isinstance(message, Hello):
            return self._hello(client, message)
        if isinstance(message, AddRequest):
            return self._add(client, message)
        if isinstance(message, Abort):
            return [(client, self._end(client, slot)) for slot in message.slots if (client, slot) in self.running]
        if isinstance(message, Goodbye):
            self.forget(client)
            return []
        if isinstance(message, FetchTokenizer):
            bundle = TokenizerBundle(tokenizer_json=b"{}") if self.faults.wrong_tokenizer else self.bundle
            return [(client, Reply(call=message.call, result=bundle))]
        if isinstance(message, GetStats):
            if self.faults.ignore_stats:
                return []
            return [(client, Reply(call=message.call, result=self._stats()))]
        if isinstance(message, FollowPrefixes):
            return []
        assert isinstance(message, ResetPrefixCache)
        return [(client, Reply(call=message.call))]

    def forget(self, client: Any) -> None:
        self.clients.discard(client)
        for key in [key for key in self.running if key[0] == client]:
            del self.running[key]

    def step(self) -> list[tuple[Any, CoreMessage]]:
        """Runs a step and returns its outputs, one message per client."""
        self.steps += 1
        return [(client, self._step_of(client)) for client in {key[0] for key in self.running}]

    def _hello(self, client: Any, hello: Hello) -> list[tuple[Any, CoreMessage]]:
        if self.faults.ignore_hello:
            return []
        if hello.schema_hash != self.faults.schema_hash:
            failure = Failure(message="another version", process="engine-core")
            return [(client, Refused(failure=failure, schema_hash=self.faults.schema_hash, version="9.9.9"))]
        self.clients.add(client)
        return [(client, self.welcome)]

    def _add(self, client: Any, request: AddRequest) -> list[tuple[Any, CoreMessage]]:
        if self.faults.retry_after_s:
            failure = Failure(
                message="the queue is full", process="engine-core", retry_after_s=self.faults.retry_after_s
            )
            finish = Finish(slot=request.slot, reason=FinishReason.REJECTED, failure=failure)
            return [(client, _outputs(self.steps, [], [], finished=(finish,)))]
        prompt = request.prompt_token_ids.tolist()
        self.running[client, request.slot] = Running(client, request, prompt)
        return []

    def _end(self, client: Any, slot: int) -> StepOutputs:
        del self.running[client, slot]
        return _outputs(self.steps, [], [], finished=(Finish(slot=slot, reason=FinishReason.ABORT),))

    def _step_of(self, client: Any) -> StepOutputs:
        slots: list[int] = []
        token_ids, finished, admitted, prompt_logprobs = [], [], [], []
        rows: list[tuple[int, int, int]] = []
        for (owner, slot), running in list(self.running.items()):
            if owner != client:
                continue
            sampling = running.request.task.sampling
            if not running.token_ids:
                admitted.append(Admitted(slot=slot, num_cached_tokens=len(running.prompt) // 2))
                if sampling.prompt_logprobs is not None and len(running.prompt) > 1:
                    run = _logprob_rows([(each, sampling.prompt_logprobs) for each in running.prompt[1:]])
                    prompt_logprobs.append(PromptLogprobs(slot=slot, start=1, rows=run))
            elif running.prompt[0] in self.faults.failing_prompts:
                failure = Failure(message="the model gave NaN", process="engine-core", phase="step")
                finished.append(Finish(slot=slot, reason=FinishReason.FAILED, failure=failure))
                del self.running[owner, slot]
                continue
            for _ in range(self.tokens_per_step):
                token_id = self.next_token(running.prompt, sampling.seed or 0, len(running.token_ids))
                running.token_ids.append(token_id)
                if sampling.logprobs is not None:
                    rows.append((len(slots), token_id, sampling.logprobs))
                slots.append(slot)
                token_ids.append(token_id)
                finish = self._finish(slot, running, token_id)
                if finish is not None:
                    finished.append(finish)
                    del self.running[owner, slot]
                    break
        return _outputs(
            self.steps,
            slots,
            token_ids,
            finished=tuple(finished),
            admitted=tuple(admitted),
            prompt_logprobs=tuple(prompt_logprobs),
            logprob_indices=Tensor.of("int32", [row[0] for row in rows]) if rows else None,
            logprobs=_logprob_rows([row[1:] for row in rows]) if rows else None,
        )

    def _finish(self, slot: int, running: Running, token_id: int) -> Finish | None:
        sampling, count = running.request.task.sampling, len(running.token_ids)
        times = {"queued_s": 0.25, "prefill_s": 0.5, "decode_s": 1.0}
        if count > sampling.min_tokens:
            if token_id == self.eos_token_id and not sampling.ignore_eos:
                return Finish(slot=slot, reason=FinishReason.STOP, **times)
            if token_id in sampling.stop_token_ids:
                return Finish(slot=slot, reason=FinishReason.STOP, stop_token=token_id, **times)
        if count >= sampling.max_tokens:
            return Finish(slot=slot, reason=FinishReason.LENGTH, **times)
        return None

    def _stats(self) -> EngineStats:
        counts: Any = dict.fromkeys((each.name for each in msgspec.structs.fields(EngineStats) if each.required), 0)
        return EngineStats(**{**counts, "num_running": len(self.running), "steps": self.steps})


class MemoryCore:
    """A FakeCore in a thread of this process, with one client."""

    def __init__(self, core: FakeCore) -> None:
        self.core = core
        self.inbox: queue.SimpleQueue[ClientMessage | None] = queue.SimpleQueue()
        self.transport = MemoryTransport(self)
        self._steps_allowed = threading.Event()
        self._steps_allowed.set()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def open(self, hello: Hello, deliver: Callable[[CoreMessage], None]) -> int:
        self.inbox.put(hello)
        return 1

    def receive(self, client: int, message: ClientMessage) -> None:
        self.inbox.put(message)

    def pause(self) -> None:
        """No further step begins until `resume`."""
        self._steps_allowed.clear()

    def resume(self) -> None:
        self._steps_allowed.set()
        self.inbox.put(Abort(slots=()))  # wakes the thread

    def stop(self) -> None:
        self.inbox.put(None)
        self.thread.join(60)

    def _run(self) -> None:
        while True:
            idle = not self.core.running or not self._steps_allowed.is_set()
            with contextlib.suppress(queue.Empty):
                while True:
                    message = self.inbox.get() if idle else self.inbox.get_nowait()
                    if message is None:
                        return
                    for _, reply in self.core.take("client", message):
                        self.transport.push(reply)
                    idle = not self.core.running or not self._steps_allowed.is_set()
            for _, outputs in self.core.step():
                self.transport.push(outputs)
            if self.core.steps == self.core.faults.fail_after_steps:
                self.transport.push(EngineFailed(failure=_DEATH))
                return
            if self.core.steps == self.core.faults.die_after_steps:
                self.transport.push(_DEATH)
                return


class ZmqCore:
    """A FakeCore behind a real ROUTER socket, in a thread, for any number of clients."""

    def __init__(self, core: FakeCore, address: str = "") -> None:
        self.core = core
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket, self.address = bind_router(self._context, address)
        self._record = OwnRecord(self.address, this_kernel())
        self._record.set_ready()
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self._record.remove()
        self._stop.set()
        self.thread.join(60)

    def _run(self) -> None:
        codec: Codec[ClientMessage] = Codec(ClientMessage)
        try:
            while not self._stop.is_set():
                self._take_messages(codec)
                for client, outputs in self.core.step() if self.core.running else ():
                    self._send(client, codec.encode(outputs))
                faults, steps = self.core.faults, self.core.steps
                if steps and steps == faults.garbage_after_steps:
                    for client in self.core.clients:
                        self._send(client, [b"\xc1 no message"])
                if steps and steps == faults.fail_after_steps:
                    for client in self.core.clients:
                        self._send(client, codec.encode(EngineFailed(failure=_DEATH)))
                if steps and steps in (faults.die_after_steps, faults.fail_after_steps):
                    return
        finally:
            self._context.destroy(linger=200)
            if (path := ipc_path(self.address)) is not None:
                path.unlink(missing_ok=True)

    def _take_messages(self, codec: Codec[ClientMessage]) -> None:
        while self._socket.poll(0 if self.core.running else 20):
            client, *frames = self._socket.recv_multipart()
            try:
                message = codec.decode(frames)
            except CodecError:
                continue
            for receiver, reply in self.core.take(client, message):
                self._send(receiver, codec.encode(reply))

    def _send(self, client: bytes, frames: list[Any]) -> None:
        try:
            self._socket.send_multipart([client, *frames])
        except zmq.ZMQError:
            self.core.forget(client)


_DEATH = Failure(
    message="the engine-core ran out of memory", type="OutOfMemory", process="engine-core", pid=4711, phase="step"
)


@contextlib.contextmanager
def memory_core(*args: Any, **kwargs: Any) -> Iterator[MemoryCore]:
    core = MemoryCore(FakeCore(*args, **kwargs))
    with contextlib.ExitStack() as stack:
        stack.callback(core.stop)
        yield core


@contextlib.contextmanager
def zmq_core(*args: Any, address: str = "", **kwargs: Any) -> Iterator[ZmqCore]:
    core = ZmqCore(FakeCore(*args, **kwargs), address)
    with contextlib.ExitStack() as stack:
        stack.callback(core.stop)
        yield core


def _welcome(**fields: Any) -> Welcome:
    return Welcome(
        **{
            "version": "0.1.0",
            "pid": 1,
            "model": "fake",
            "served_model_names": ("fake",),
            "dtype": "float32",
            "block_size": 16,
            "num_blocks": 64,
            "max_num_seqs": 16,
            "max_logprobs": 5,
            "eos_token_ids": (2,),
            "generation_defaults": {"temperature": 0.5, "max_tokens": 8},
            "startup_s": {"load": 0.1},
            **fields,
        }
    )


def _outputs(step: int, slots: list[int], token_ids: list[int], **rest: Any) -> StepOutputs:
    return StepOutputs(step=step, slots=Tensor.of("int32", slots), token_ids=Tensor.of("int32", token_ids), **rest)


def _logprob_rows(wanted: list[tuple[int, int]]) -> LogprobRows:
    """Rows for pairs of (token id, number of likeliest tokens): the token has rank 2, the likeliest are 10, 11, ..."""
    width = 1 + max(count for _, count in wanted)
    ids: list[int] = []
    logprobs: list[float] = []
    for token_id, count in wanted:
        ids += [token_id, *range(10, 10 + count), *[-1] * (width - 1 - count)]
        logprobs += [-0.5, *(-0.25 * (rank + 1) for rank in range(count)), *[0.0] * (width - 1 - count)]
    shape = (len(wanted), width)
    return LogprobRows(
        token_ids=Tensor("int32", shape, Tensor.of("int32", ids).data),
        logprobs=Tensor("float32", shape, Tensor.of("float32", logprobs).data),
        ranks=Tensor.of("int32", [2] * len(wanted)),
    )
