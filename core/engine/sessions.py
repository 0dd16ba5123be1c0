"""Sessions with clients: numbers clients, and answers what needs no loop; passes other messages to the loop's inbox.

Both ports (zmq_port.py, memory_port.py) carry messages and use one `Sessions`. It runs on the port's thread, so that a
client can attach quickly while a long step runs.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from headrace.core.adapters.loader import AdapterLoaded
from headrace.core.engine.gates import GateFailed, GateOpened
from headrace.ipc.codec import Frame, Tensor
from headrace.ipc.failure import Failure
from headrace.ipc.messages import (
    MOST_PROMPTS,
    SCHEMA_HASH,
    AddPrompts,
    AddRequest,
    ClientMessage,
    Control,
    CoreMessage,
    Dismissed,
    Draining,
    FetchTokenizer,
    Finish,
    FinishReason,
    Generate,
    GetStats,
    Goodbye,
    Hello,
    Refused,
    Reply,
    ResetPrefixCache,
    StepOutputs,
    TokenizerBundle,
    Welcome,
)
from headrace.ipc.ranges import INT64
from headrace.ipc.struct_types import threadsafe


class ClientGone(msgspec.Struct, frozen=True):
    """Not a wire message: the client left, or its process ended."""


class Undecodable(msgspec.Struct, frozen=True, kw_only=True):
    """Not a wire message: an AddRequest or AddPrompts that could not be read, of which only the slots are known."""

    slots: range
    why: str


class StopRequest(msgspec.Struct, frozen=True):
    """Not a wire message: stop the engine within `deadline_s`; running requests may finish until then."""

    deadline_s: float


class PeerStep(msgspec.Struct, frozen=True):
    """Not a wire message: other cores wait for this one's part of a step, or may no longer need it."""


class ExecutorFailed(msgspec.Struct, frozen=True):
    """Not a wire message: the executor or the port has failed, which ends the engine."""

    failure: Failure


InboxMessage = (
    ClientMessage
    | ClientGone
    | Undecodable
    | StopRequest
    | PeerStep
    | ExecutorFailed
    | GateOpened
    | GateFailed
    | AdapterLoaded
)
InboxItem = tuple[int, InboxMessage]


class Inbox:
    """The queue of messages to the loop: of each client in the order in which they came, and of several clients in
    turn, so that thousands of one do not delay a command of another. Limits the bytes that one client may have in it.

    Any thread may put messages, and one thread gets them. The port's thread counts the bytes put, the loop's thread
    those taken, each in its own dict, so neither needs a lock.
    """

    def __init__(self, max_client_bytes: int = 256 << 20) -> None:
        self._max_client_bytes = max_client_bytes
        self._arrived: queue.SimpleQueue[tuple[int, InboxMessage, int]] = queue.SimpleQueue()  # with its bytes
        self._sorted: dict[int, collections.deque[tuple[InboxMessage, int]]] = {}
        """By client; the next one to be served is first."""
        self._num_sorted = 0
        self._put_bytes: dict[int, int] = {}  # by client
        self._taken_bytes: dict[int, int] = {}

    def put(self, item: InboxItem) -> None:
        """Puts a message, without a limit. Client 0 is the engine itself."""
        self._arrived.put((*item, 0))

    def offer(self, client: int, message: InboxMessage) -> bool:
        """Puts a client's message. Returns False, and drops it, if the client would exceed its limit."""
        size_bytes = _size_bytes(message)
        put_bytes = self._put_bytes.get(client, 0) + size_bytes
        if put_bytes - self._taken_bytes.get(client, 0) > self._max_client_bytes:
            return False
        self._put_bytes[client] = put_bytes
        self._arrived.put((client, message, size_bytes))
        return True

    def empty(self) -> bool:
        return not self._num_sorted and self._arrived.empty()

    def qsize(self) -> int:
        """Any thread may ask."""
        return self._num_sorted + self._arrived.qsize()

    def get(self, timeout: float | None = None) -> InboxItem:
        """The next message; waits for one. Raises queue.Empty after `timeout` seconds."""
        while not self._arrived.empty():
            self._sort(*self._arrived.get())
        if not self._sorted:
            self._sort(*self._arrived.get(timeout=timeout))
        client, messages = next(iter(self._sorted.items()))
        message, size_bytes = messages.popleft()
        self._num_sorted -= 1
        del self._sorted[client]
        if messages:
            self._sorted[client] = messages
        if isinstance(message, ClientGone):
            self._put_bytes.pop(client, None)
            self._taken_bytes.pop(client, None)
        elif size_bytes:
            self._taken_bytes[client] = self._taken_bytes.get(client, 0) + size_bytes
        return client, message

    def _sort(self, client: int, message: InboxMessage, size_bytes: int) -> None:
        self._sorted.setdefault(client, collections.deque()).append((message, size_bytes))
        self._num_sorted += 1


_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda tensor: None)


def _size_bytes(message: InboxMessage) -> int:
    """Approximate memory of a message: a byte of msgpack may become an entry of eight bytes in a large list."""
    try:
        size_bytes = 512 + 8 * len(_ENCODER.encode(message))
    except OverflowError:  # a number beyond 64 bits, from a client in this process; it will be refused
        size_bytes = 512
    if isinstance(message, AddRequest):
        size_bytes += len(message.prompt_token_ids.data)
        if isinstance(message.task, Generate) and (form := message.task.sampling.structured_output) is not None:
            size_bytes -= 7 * len(form.text)  # a text takes one byte of memory per encoded byte
    return size_bytes


class _Beginning(msgspec.Struct, array_like=True):
    """The first fields of a message. What follows them is skipped, whatever it is."""

    kind: str
    number: int
    """A call or a slot."""


class _BeginningOfPrompts(msgspec.Struct, array_like=True):
    kind: str
    number: int
    count: int


_BEGINNING = msgspec.msgpack.Decoder(threadsafe(_Beginning))
_BEGINNING_OF_PROMPTS = msgspec.msgpack.Decoder(threadsafe(_BeginningOfPrompts))
_CALLS = frozenset(kind.__name__ for kind in (FetchTokenizer, GetStats, ResetPrefixCache, Control))

FAR_BEHIND = 64
"""Messages in the inbox above which the loop counts as behind: more than it handles in a turn."""
TRY_LATER = "read the answers that have come, and try again"
_NONE = Tensor.of("int32", [])


class Sessions:
    """Numbers and welcomes clients, and sends them the tokeniser; passes other messages to the loop's inbox."""

    def __init__(self, inbox: Inbox, welcome: Welcome, tokenizer: TokenizerBundle | None) -> None:
        self._inbox = inbox
        self.welcome = welcome
        """Sent to each new client."""
        self._tokenizer = tokenizer
        self._numbers = itertools.count(1)

    def greet(self, hello: Hello) -> tuple[int, Welcome] | Refused:
        """The new client's number and its Welcome; or a refusal that names both versions if they differ."""
        if hello.schema_hash != SCHEMA_HASH:
            return self.refuse(
                f"the client speaks Headrace {hello.version} (messages {hello.schema_hash}), this engine "
                f"{self.welcome.version} (messages {SCHEMA_HASH}): install the same version on both sides"
            )
        return next(self._numbers), self.welcome

    def receive(self, client: int, message: ClientMessage) -> CoreMessage | None:
        """Takes a message of a client that has had its Welcome. Returns the answer if the loop need not give it."""
        if isinstance(message, FetchTokenizer):
            if self._tokenizer is None:
                return Reply(
                    call=message.call,
                    failure=self._failure("this engine runs without a tokenizer (skip_tokenizer_init)"),
                )
            return Reply(call=message.call, result=self._tokenizer)
        if isinstance(message, Hello):
            return self.refuse("a second Hello in one session")
        if isinstance(message, AddPrompts):
            return self._receive_prompts(client, message)
        if isinstance(message, Goodbye):
            self.gone(client)
        elif not self._inbox.offer(client, message):
            failure = self._failure(f"this client has too much on its way to the engine; {TRY_LATER}")
            if isinstance(message, GetStats | ResetPrefixCache | Control):  # the client waits for a Reply
                return Reply(call=message.call, failure=failure)
            if not isinstance(message, AddRequest):
                return Refused(failure=failure, schema_hash=SCHEMA_HASH, version=self.welcome.version)
            return _too_much(failure, [message.slot])
        return None

    def _receive_prompts(self, client: int, message: AddPrompts) -> CoreMessage | None:
        """Puts each prompt into the inbox by itself, so that the loop handles and refuses it as any request."""
        try:
            requests = message.requests()
        except ValueError as error:
            return self._refuse_slots(client, message.first_slot, message.count, str(error))
        refused = [each.slot for each in requests if not self._inbox.offer(client, each)]
        failure = self._failure(f"this client has too much on its way to the engine; {TRY_LATER}")
        return _too_much(failure, refused) if refused else None

    def _refuse_slots(self, client: int, first: int, count: int, why: str) -> CoreMessage | None:
        """Returns the answer if the loop need not give it."""
        if first + count > INT64:  # no message can name them
            return self.refuse(why)
        news = Undecodable(slots=range(first, first + min(count, MOST_PROMPTS)), why=why)
        return None if self._inbox.offer(client, news) else self.refuse(why)

    @property
    def is_behind(self) -> bool:
        """The inbox has more than the loop handles in a turn: receiving more now only competes for the interpreter."""
        return self._inbox.qsize() > FAR_BEHIND

    def gone(self, client: int) -> None:
        self._inbox.put((client, ClientGone()))

    def dismissal(self, why: str) -> Dismissed:
        return Dismissed(failure=msgspec.structs.replace(self._failure(why), type="Dismissed"))

    def port_failed(self, failure: Failure) -> None:
        """The port can no longer receive messages, which ends the engine."""
        self._inbox.put((0, ExecutorFailed(failure)))

    def undecodable(self, client: int, header: Frame, why: str) -> CoreMessage | None:
        """Takes a client's message that could not be decoded, as a value has another type than its field. Returns the
        answer if the loop need not give it.

        What waits for an answer to the message gets it, if the message's beginning names that: a call gets a Reply, a
        request its Finish.
        """
        try:
            beginning = _BEGINNING.decode(header)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return self.refuse(why)
        if beginning.kind in _CALLS:
            return Reply(call=beginning.number, failure=self._failure(why))
        if beginning.kind == AddRequest.__name__:
            return self._refuse_slots(client, beginning.number, 1, why)
        if beginning.kind == AddPrompts.__name__:
            with contextlib.suppress(msgspec.MsgspecError):
                return self._refuse_slots(client, beginning.number, _BEGINNING_OF_PROMPTS.decode(header).count, why)
        return self.refuse(why)

    def refuse(self, why: str) -> Refused:
        return Refused(failure=self._failure(why), schema_hash=SCHEMA_HASH, version=self.welcome.version)

    def _failure(self, why: str) -> Failure:
        return Failure(message=why, type="ProtocolError", process="engine-core", pid=self.welcome.pid, phase="serve")


def _too_much(failure: Failure, slots: Sequence[int]) -> StepOutputs:
    """The end of requests that find no room in the inbox."""
    failure = msgspec.structs.replace(failure, type="QueueFullError", retry_after_s=1.0)
    finished = tuple(Finish(slot=slot, reason=FinishReason.REJECTED, failure=failure) for slot in slots)
    return StepOutputs(step=0, slots=_NONE, token_ids=_NONE, finished=finished)


class Broadcaster(ABC):
    """The part of a port that tells all clients something. Those are included that it is welcoming just then."""

    def __init__(self) -> None:
        self._greeting = threading.Lock()
        """Held while a client is welcomed and noted among `clients`."""
        self._draining: Draining | None = None
        """Sent after the Welcome to those that come later."""

    @property
    @abstractmethod
    def clients(self) -> list[int]: ...

    @abstractmethod
    def send(self, client: int, message: CoreMessage) -> None: ...

    def send_all(self, message: CoreMessage) -> None:
        with self._greeting:
            clients = self.clients
            if isinstance(message, Draining):
                self._draining = message
        for client in clients:
            self.send(client, message)
