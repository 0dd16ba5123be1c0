"""`CoreClient`: one session with a core. All methods must be called in its asyncio loop unless they say otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from headrace import __version__
from headrace.frontend.client.control import QUICK_S, AsyncControls, Call
from headrace.frontend.client.engine_process import EngineProcess, is_local, listener_of
from headrace.frontend.client.pooling_stream import PoolingStream
from headrace.frontend.client.request_stream import RequestListener, RequestStream
from headrace.frontend.client.request_table import RequestTable
from headrace.frontend.client.tokenizers_in_advance import take
from headrace.frontend.client.transport import CONNECTION_LOST, Transport, ZmqTransport
from headrace.frontend.request.checks import CheckedRequest
from headrace.frontend.request.prompts import ModelFacts
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.frontend.text.tokenizer_cache import load_bundle, store_bundle
from headrace.ipc.adapters import AdapterInfo, Adapters
from headrace.ipc.failure import (
    EngineDeadError,
    Failure,
    HeadraceError,
    QueueFullError,
    let_interrupts_pass,
)
from headrace.ipc.messages import (
    SCHEMA_HASH,
    CoreMessage,
    Dismissed,
    Draining,
    EngineFailed,
    FetchTokenizer,
    FollowPrefixes,
    Goodbye,
    Hello,
    Load,
    PrefixEvents,
    Refused,
    Reply,
    StepOutputs,
    TokenizerBundle,
    Welcome,
)

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0


class RequestClient(ModelFacts, Protocol):
    """Submits requests to one or several engines."""

    def submit(self, request: CheckedRequest, listener: RequestListener | None = None) -> RequestStream: ...


class CoreListener:
    """Hears of one session with a core, in the client's loop. This one takes nothing over."""

    def on_lost(self, streams: Sequence[RequestStream], failure: Failure) -> None:
        """The core is lost, and with it these unfinished requests: continues or ends each."""
        for stream in streams:
            stream.fail(EngineDeadError.from_failure(failure))

    def on_refused(self, stream: RequestStream, failure: Failure) -> bool:
        """The core does not take the request, which others may: whether one does."""
        return False

    def on_load(self, load: Load) -> None: ...

    def on_prefixes(self, events: PrefixEvents) -> None:
        """See `CoreClient.follow_prefixes`."""

    def on_draining(self) -> None:
        """The core has announced that it accepts no new requests."""

    def on_welcome(self, welcome: Welcome) -> None:
        """The core has sent another Welcome, as it has loaded other weights."""

    def on_adapters(self, infos: Sequence[AdapterInfo]) -> None:
        """The core's registry of adapters has changed; the Welcome has it too."""


class CoreClient(AsyncControls):
    """Submits requests and returns their streams; sends commands and waits for the replies.

    When the core dies every wait ends at once: streams and commands raise EngineDeadError with the cause.
    """

    def __init__(self, transport: Transport, *, cause_grace_s: float = 0.0) -> None:
        """cause_grace_s: after a lost connection, how long to wait for `fail` to be called with a better cause.

        The parent of a core sets it: its supervisor knows how the process ended, the connection only that it did.
        """
        self._transport = transport
        self._cause_grace_s = cause_grace_s
        self.listener = CoreListener()
        self.requests = RequestTable(transport.send, self._take_over)
        self._next_call = 0
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._welcome: asyncio.Future[Welcome] | None = None
        self.failure: Failure | None = None
        """Why the session has ended; None while it is open."""
        self._closed = False
        self.draining = False
        """The core has announced that it accepts no new requests."""
        self._process: EngineProcess | None = None
        self._has_warned_of_priority = False
        self.last_heard_s = 0.0
        """When the last message arrived (monotonic seconds). While requests run, one arrives about every second."""
        self.last_step_s = 0.0
        """When the last StepOutputs arrived (monotonic seconds)."""
        self.last_worked_s = 0.0
        """When `look_at_process` last found the core's process at work (monotonic seconds)."""
        self.load: Load | None = None
        """The core's last Load, which it sends while it runs requests of this client."""
        self.tokenizer: Tokenizer | None = None

    @classmethod
    async def connect(cls, address: str, timeout_s: float = CONNECT_TIMEOUT_S) -> CoreClient:
        """Connects to the core at `address`. Raises EngineDeadError, AddressError, or ModelError (its tokenizer)."""
        client = cls(ZmqTransport(address))
        await client.start(timeout_s)
        return client

    async def start(self, timeout_s: float = CONNECT_TIMEOUT_S, *, with_tokenizer: bool = True) -> None:
        """Opens the session, and fetches the tokenizer if `with_tokenizer`. Closes the session if that fails."""
        self._loop = asyncio.get_running_loop()
        self._welcome, self._ended = self._loop.create_future(), asyncio.Event()
        self._transport.open(self._on_message, self._on_closed)
        try:
            self._transport.send(Hello(schema_hash=SCHEMA_HASH, version=__version__, pid=os.getpid()))
            self.welcome = await self._within(timeout_s, self._welcome, "welcome this client")
            self._process = EngineProcess.find(self.welcome.pid)
            self.requests.stream_interval = self.welcome.stream_interval
            self._note_adapters()
            if with_tokenizer:
                await self._get_tokenizer(timeout_s)
        except BaseException:
            self._welcome.cancel()  # nobody waits for it, so an error in it would be logged as never retrieved
            await self.close()
            raise

    async def _get_tokenizer(self, timeout_s: float) -> None:
        info = self.welcome.tokenizer
        if info is None:
            return
        begun = take(info)
        if begun is not None and (tokenizer := await asyncio.to_thread(begun.result)) is not None:
            self.tokenizer = tokenizer
            return
        bundle = load_bundle(info)
        if bundle is None:
            bundle = await self.call(FetchTokenizer, timeout_s)
            if not isinstance(bundle, TokenizerBundle):
                raise EngineDeadError(f"the engine-core at {self._transport.address} did not send its tokenizer")
            store_bundle(info, bundle)
        self.tokenizer = Tokenizer(bundle)

    def submit(self, request: CheckedRequest, listener: RequestListener | None = None) -> RequestStream:
        """Sends a request that was checked, whose id no running one has. listener: hears of each step, in place of a
        reader of the stream, which then gives the last output alone.

        Raises InvalidRequestError and QueueFullError before anything is sent, and EngineDeadError.
        """
        if self.failure is not None or self.draining:
            self.check_alive()
        if self._transport.is_full:
            why = "the engine-core reads nothing, and this client's send queue is full"
            raise QueueFullError.from_failure(
                Failure(message=why, type="QueueFullError", process="client", phase="submit", retry_after_s=1.0)
            )
        if request.priority and not self.welcome.reads_priority and not self._has_warned_of_priority:
            self._has_warned_of_priority = True
            logger.warning("a request's priority has no effect: the engine has scheduling_policy=fcfs, not priority")
        stream = (
            RequestStream(request, self.tokenizer)
            if request.pooling_task is None
            else PoolingStream(request, self.welcome.pooling)
        )
        stream.listener = listener
        self.requests.add(stream)
        return stream

    @property
    def is_elsewhere(self) -> bool:
        """Whether the core runs on another host."""
        return self._transport.address.startswith("tcp://") and not is_local(self._transport.address)

    @property
    def is_ending(self) -> bool:
        """Whether the core runs here and its process ends or has ended, which the connection may not say yet."""
        return self._process is not None and is_local(self._transport.address) and self._process.is_ending

    def look_at_process(self) -> None:
        """Updates `last_worked_s`, if the core runs on this host. Call a few times a second while the core is silent;
        the first call only remembers how much processor time was used."""
        if self._process is not None and is_local(self._transport.address) and self._process.has_worked():
            self.last_worked_s = time.monotonic()

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """Ends these requests with finish_reason `abort`; ids that are not running are ignored."""
        self.requests.abort((request_ids,) if isinstance(request_ids, str) else request_ids)

    def check_alive(self) -> None:
        """Raises EngineDeadError if the session has ended or the core is draining."""
        if self.failure is not None:
            raise EngineDeadError.from_failure(self.failure)
        if self.draining:
            raise EngineDeadError("the engine is shutting down and takes no new requests")

    def fail(self, failure: Failure) -> None:
        """Marks the core as dead, with the cause: ends every stream and wait. Only the first call has an effect."""
        if self.failure is not None:
            return
        self.failure = failure
        self._ended.set()
        lost, listener = self.requests.release_all(), CoreListener() if self._closed else self.listener
        try:
            listener.on_lost(lost, failure)
        except BaseException as error:  # no request may wait for it
            let_interrupts_pass(error)
            logger.exception("the requests of a lost engine could not be moved")
            CoreListener().on_lost([stream for stream in lost if stream.table is None], failure)
        for waiting in (*self._calls.values(), self._welcome):
            if waiting is not None and not waiting.done():
                waiting.set_exception(EngineDeadError.from_failure(failure))
                waiting.exception()  # else asyncio logs one that nobody waits for: `failure` tells it already

    async def until_lost(self) -> Failure:
        """Waits for the end of the session. Returns the cause."""
        await self._ended.wait()
        assert self.failure is not None, "it has ended"
        return self.failure

    def fail_threadsafe(self, failure: Failure) -> None:
        """Calls `fail` from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits
            self._loop.call_soon_threadsafe(self.fail, failure)

    async def close(self) -> None:
        """`leave`, as a coroutine: callers in another thread run it in the client's loop."""
        self.leave()

    def leave(self) -> None:
        """Ends the session: unfinished requests are aborted, here and in the core. May be called again."""
        if self._closed:
            return
        self._closed = True
        if self.failure is None:
            self.requests.abort_all()
        self.requests.send(Goodbye())
        self._transport.close()
        self.fail(Failure(message="this client is closed", type="Closed", process="client", phase="close"))

    def follow_prefixes(self) -> None:
        """Asks the core to report the content of its prefix cache from now on, to the listener."""
        self.requests.send(FollowPrefixes())

    async def engine(self) -> Welcome:
        return self.welcome

    async def call(self, kind: type[Call], timeout_s: float | None = QUICK_S, **fields: Any) -> Any:
        if self.failure is not None:
            raise EngineDeadError.from_failure(self.failure)
        call, self._next_call = self._next_call, self._next_call + 1
        future = self._calls[call] = self._loop.create_future()
        try:
            self.requests.send(kind(call=call, **fields))
            return await self._within(timeout_s, future, f"answer {kind.__name__}")
        finally:
            del self._calls[call]

    async def _within(self, timeout_s: float | None, waiting: Awaitable[Any], what: str) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await waiting
        except TimeoutError:
            silent = Failure(
                message=f"the engine-core at {self._transport.address} did not {what} within {timeout_s:g} s"
            )
            pid = listener_of(self._transport.address)
            process = self._process or (EngineProcess.find(pid) if pid is not None else None)
            raise EngineDeadError.from_failure(process.explain(silent) if process is not None else silent) from None

    def _on_message(self, message: CoreMessage) -> None:
        self.last_heard_s = time.monotonic()
        if isinstance(message, StepOutputs):
            self.last_step_s = self.last_heard_s
            self.requests.on_step(message)
        elif isinstance(message, Load):
            self.load = message
            self.listener.on_load(message)
        elif isinstance(message, PrefixEvents):
            self.listener.on_prefixes(message)
        elif isinstance(message, Reply):
            self._on_reply(message)
        elif isinstance(message, Welcome):
            self._on_welcome(message)
        elif isinstance(message, Adapters):
            self._on_adapters(message)
        elif isinstance(message, Refused):
            self._on_refused(message)
        elif isinstance(message, Draining):
            self.draining = True
            self.listener.on_draining()
        elif isinstance(message, EngineFailed):
            self.fail(message.failure)
        elif isinstance(message, Dismissed):
            self.fail(message.failure)
            self._transport.close()

    def _take_over(self, stream: RequestStream, failure: Failure) -> bool:
        return self.listener.on_refused(stream, failure)

    def _on_welcome(self, message: Welcome) -> None:
        """The first Welcome replies to Hello; a later one reports changes."""
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(message)
            return
        self.welcome = message
        self.listener.on_welcome(message)

    def _on_adapters(self, message: Adapters) -> None:
        if self._welcome is None or not self._welcome.done():
            return  # the Welcome that follows has them
        self.welcome = msgspec.structs.replace(self.welcome, adapters=message.adapters)
        self._note_adapters()
        self.listener.on_adapters(message.adapters)

    def _note_adapters(self) -> None:
        # Of several paths of a name, the first is meant by the name alone.
        self.requests.adapters = {info.name: info.path for info in reversed(self.welcome.adapters)}

    def _on_closed(self, failure: Failure) -> None:
        if self._cause_grace_s:
            self._loop.call_later(self._cause_grace_s, self.fail, failure)
        elif self._process is not None and failure.type == CONNECTION_LOST and not self.draining:
            self._process.explain_soon(failure, self.fail)
        else:
            self.fail(failure)

    def _on_reply(self, reply: Reply) -> None:
        waiting = self._calls.get(reply.call)
        if waiting is None or waiting.done():
            return
        if reply.failure is not None:
            waiting.set_exception(HeadraceError.from_failure(reply.failure))
        else:
            waiting.set_result(reply.result)

    def _on_refused(self, refused: Refused) -> None:
        if self._welcome is None or self._welcome.done():
            logger.warning("the engine-core refused a message: %s", refused.failure.message)
        elif refused.schema_hash == SCHEMA_HASH:
            self._welcome.set_exception(EngineDeadError.from_failure(refused.failure))
        else:
            self._welcome.set_exception(
                EngineDeadError(
                    f"the engine-core at {self._transport.address} is headrace {refused.version} with message schema "
                    f"{refused.schema_hash}, and this client is headrace {__version__} with {SCHEMA_HASH}: install the "
                    "same version on both sides"
                )
            )
