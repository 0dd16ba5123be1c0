"""`CoreClient`: one session with a core. All methods must be called in its asyncio loop unless they say otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from headrace import __version__
from headrace.frontend.client.control import QUICK_S, AsyncControls, Call
from headrace.frontend.client.engine_process import EngineProcess, is_local, listener_of
from headrace.frontend.client.request import RequestStream
from headrace.frontend.client.request_table import RequestTable
from headrace.frontend.client.transport import CONNECTION_LOST, Transport, ZmqTransport
from headrace.frontend.request.parameters.pooling_params import PoolingParams
from headrace.frontend.request.parameters.sampling_params import SamplingParams
from headrace.frontend.request.parameters.thinking import thinking_of
from headrace.frontend.request.parameters.token_rules import tokenized_fields
from headrace.frontend.request.pooling_prompts import check_pooling
from headrace.frontend.request.prompts import Prompt, check_request, checked_name, checked_priority
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.frontend.text.tokenizer_cache import load_bundle, store_bundle
from headrace.ipc.failure import (
    EngineDeadError,
    Failure,
    HeadraceError,
    InvalidRequestError,
    QueueFullError,
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


class RequestClient(Protocol):
    """Submits requests to one or several engines."""

    @property
    def welcome(self) -> Welcome: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        priority: int = 0,
        *,
        max_tokens: int | None = None,
    ) -> RequestStream: ...

    def abort_stream(self, stream: RequestStream) -> None: ...


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
        self.send = transport.send
        self.requests = RequestTable(self.send)
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
        self.rescue: Callable[[list[RequestStream], Failure], None] | None = None
        """Called with the unfinished requests when the core has died, to continue them on other engines."""
        self.on_dead: Callable[[Failure], None] | None = None
        self.on_load: Callable[[Load], None] | None = None
        """Called with each Load."""
        self.on_prefixes: Callable[[PrefixEvents], None] | None = None
        """Called with each PrefixEvents; see `follow_prefixes`."""
        self.on_draining: Callable[[], None] | None = None
        """Called when the core has announced that it accepts no new requests."""
        self.on_welcome: Callable[[Welcome], None] | None = None
        """Called when the core has sent another Welcome, as it has loaded other weights."""

    @classmethod
    async def connect(cls, address: str, timeout_s: float = CONNECT_TIMEOUT_S) -> CoreClient:
        """Connects to the core at `address`. Raises EngineDeadError, AddressError, or ModelError (its tokenizer)."""
        client = cls(ZmqTransport(address))
        await client.start(timeout_s)
        return client

    async def start(self, timeout_s: float = CONNECT_TIMEOUT_S, *, with_tokenizer: bool = True) -> None:
        """Opens the session, and fetches the tokenizer if `with_tokenizer`. Closes the session if that fails."""
        self._loop = asyncio.get_running_loop()
        self._welcome = self._loop.create_future()
        self._transport.open(self._on_message, self._on_closed)
        try:
            self._transport.send(Hello(schema_hash=SCHEMA_HASH, version=__version__, pid=os.getpid()))
            self.welcome = await self._within(timeout_s, self._welcome, "welcome this client")
            self._process = EngineProcess.find(self.welcome.pid)
            self.requests.stream_interval = self.welcome.stream_interval
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
        bundle = load_bundle(info)
        if bundle is None:
            bundle = await self.call(FetchTokenizer, timeout_s)
            if not isinstance(bundle, TokenizerBundle):
                raise EngineDeadError(f"the engine-core at {self._transport.address} did not send its tokenizer")
            store_bundle(info, bundle)
        self.tokenizer = Tokenizer(bundle)

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        priority: int = 0,
        *,
        max_tokens: int | None = None,
    ) -> RequestStream:
        """Checks and sends a request whose prompt is tokenised. `params` must not be changed afterwards.

        max_tokens: the result of `check_request`, if the caller has already called it.
        Raises InvalidRequestError and QueueFullError before anything is sent, and EngineDeadError.
        """
        self.check_alive()
        request_id, priority = checked_name(request_id), checked_priority(priority)
        if self._transport.is_full:
            why = "the engine-core reads nothing, and this client's send queue is full"
            raise QueueFullError.from_failure(
                Failure(message=why, type="QueueFullError", process="client", phase="submit", retry_after_s=1.0)
            )
        if isinstance(params, PoolingParams):
            task = check_pooling(prompt, params, self.welcome)
        elif max_tokens is None:
            max_tokens = check_request(prompt, params, self.welcome)
        if request_id in self.requests:
            raise InvalidRequestError(f"a request with the id {request_id!r} is running; ids must be unique")
        if priority and not self.welcome.reads_priority and not self._has_warned_of_priority:
            self._has_warned_of_priority = True
            logger.warning("a request's priority has no effect: the engine has scheduling_policy=fcfs, not priority")
        if isinstance(params, PoolingParams):
            stream: RequestStream = self.requests.add_to_pool(request_id, prompt, params, task, priority)
        else:
            stream = self._generate(request_id, prompt, params, max_tokens or 0, priority)
        if self.request_counts is not None:
            self.request_counts.follow(stream)
        return stream

    def _generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams, max_tokens: int, priority: int
    ) -> RequestStream:
        tokenized = tokenized_fields(params, self.tokenizer, self.welcome.vocab_size)
        if (thinking := thinking_of(params, prompt, self.tokenizer, self.welcome)) is not None:
            tokenized["thinking"] = thinking
        return self.requests.add(
            request_id,
            prompt,
            params,
            max_tokens=max_tokens,
            priority=priority,
            tokenizer=self.tokenizer,
            tokenized=tokenized,
        )

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

    def abort_stream(self, stream: RequestStream) -> None:
        """Ends one request with finish_reason `abort`; does nothing once it has ended."""
        if stream.table is not None:
            stream.table.abort_stream(stream)

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
        if self.rescue is not None and not self._closed:
            self.rescue(self.requests.release_all(), failure)
        else:
            self.requests.fail_all(failure, EngineDeadError)
        for waiting in (*self._calls.values(), self._welcome):
            if waiting is not None and not waiting.done():
                waiting.set_exception(EngineDeadError.from_failure(failure))
                waiting.exception()  # else asyncio logs one that nobody waits for: `failure` tells it already
        if self.on_dead is not None and not self._closed:
            self.on_dead(failure)

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
        self._transport.send(Goodbye())
        self._transport.close()
        self.fail(Failure(message="this client is closed", type="Closed", process="client", phase="close"))

    def follow_prefixes(self) -> None:
        """Asks the core to report the content of its prefix cache from now on, to `on_prefixes`."""
        self._transport.send(FollowPrefixes())

    async def engine(self) -> Welcome:
        return self.welcome

    async def call(self, kind: type[Call], timeout_s: float | None = QUICK_S, **fields: Any) -> Any:
        if self.failure is not None:
            raise EngineDeadError.from_failure(self.failure)
        call, self._next_call = self._next_call, self._next_call + 1
        future = self._calls[call] = self._loop.create_future()
        try:
            self._transport.send(kind(call=call, **fields))
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
            if self.on_load is not None:
                self.on_load(message)
        elif isinstance(message, PrefixEvents):
            if self.on_prefixes is not None:
                self.on_prefixes(message)
        elif isinstance(message, Reply):
            self._on_reply(message)
        elif isinstance(message, Welcome):
            self._on_welcome(message)
        elif isinstance(message, Refused):
            self._on_refused(message)
        elif isinstance(message, Draining):
            self.draining = True
            if self.on_draining is not None:
                self.on_draining()
        elif isinstance(message, EngineFailed):
            self.fail(message.failure)
        elif isinstance(message, Dismissed):
            self.fail(message.failure)
            self._transport.close()

    def _on_welcome(self, message: Welcome) -> None:
        """The first Welcome replies to Hello; a later one reports changes."""
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(message)
            return
        self.welcome = message
        if self.on_welcome is not None:
            self.on_welcome(message)

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
