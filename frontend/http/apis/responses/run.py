"""A response while it is generated: it runs on the engine, adds to its items, and sends its events to connections.

    core's step --> ResponseRun.on_step --> OutputItems --> EventLog --> Follower --> connection.write_chunk

A foreground response ends with its connection, and a slow reader gets fewer and larger events. A background response
continues without a connection, and keeps its events for later readers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

from headrace.frontend.client.request_stream import RequestStream
from headrace.frontend.http.apis.openai.answer import AnswerContext, TextAnswer
from headrace.frontend.http.apis.openai.bodies import TokenLogprob, chat_logprobs
from headrace.frontend.http.apis.responses.items import NO_SERVERS, NO_TOOLS, ClientTool, Item, OutputItems
from headrace.frontend.http.server.connection import Connection
from headrace.frontend.http.server.errors import ApiError
from headrace.frontend.http.server.event_stream import KEEP_ALIVE
from headrace.frontend.http.server.generation import Generator, PreparedRequest, took_too_long
from headrace.frontend.request.message import num_reasoning_tokens
from headrace.frontend.text.formats.parser import OutputParser
from headrace.ipc.failure import HeadraceError, let_interrupts_pass

logger = logging.getLogger(__name__)
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
_encode = msgspec.json.encode


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Token counts over all turns of a response on the engine."""

    input_tokens: int = 0
    input_tokens_details: InputTokensDetails = msgspec.field(default_factory=InputTokensDetails)
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = msgspec.field(default_factory=OutputTokensDetails)
    total_tokens: int = 0


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response: what was requested, and the result."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


class EventLog:
    """The events of a response; an event's place is its sequence_number."""

    def __init__(self, *, keeps: bool) -> None:
        """keeps: events that every follower has read stay in the log."""
        self.keeps = keeps
        self._events: list[bytes] = []
        self._first = 0
        self.num_bytes = 0
        self.followers: list[Follower] = []
        self.has_ended = False

    @property
    def end(self) -> int:
        """The place of the next event."""
        return self._first + len(self._events)

    def add(self, kind: str, fields: dict[str, Any]) -> None:
        event = {"type": kind, "sequence_number": self.end, **fields}
        data = b"event: " + kind.encode() + b"\ndata: " + _encode(event) + b"\n\n"
        self._events.append(data)
        self.num_bytes += len(data)

    def since(self, place: int) -> bytes:
        """The events from `place` on; unless the log keeps events, they are removed."""
        data = b"".join(self._events[max(0, place - self._first) :])
        if not self.keeps:
            self._first, self._events, self.num_bytes = self.end, [], 0
        return data

    def flush(self) -> None:
        for follower in self.followers:
            follower.flush()

    def close(self) -> None:
        self.has_ended = True
        self.flush()


class Follower:
    """Writes a response's events to one connection, from a given place on."""

    def __init__(self, log: EventLog, connection: Connection, place: int = 0) -> None:
        self._log, self._connection, self._place = log, connection, place
        self.is_open = False
        self.last_write_s = time.monotonic()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the last event has been written."""
        log.followers.append(self)

    @property
    def is_behind(self) -> bool:
        """Whether the client has not read what was written, or the response has not begun."""
        return not self.is_open or self._connection.congested

    def open(self, on_writable: Callable[[], None]) -> None:
        """Called when the response has begun. on_writable: called now, and when a slow client has caught up."""
        self.is_open = True
        self._connection.on_writable, self._connection.on_half_closed = on_writable, self.keep_alive
        on_writable()

    def close(self) -> None:
        self.is_open = False
        self._connection.on_writable = self._connection.on_half_closed = None
        self._log.followers.remove(self)

    def flush(self) -> None:
        if self.is_behind:
            return
        if self._place < self._log.end:
            data, self._place = self._log.since(self._place), self._log.end
            self.last_write_s = time.monotonic()
            self._connection.write_chunk(data)
        if self._log.has_ended and not self.ended.done():
            self.ended.set_result(None)

    def keep_alive(self) -> None:
        if not self.is_behind:
            self.last_write_s = time.monotonic()
            self._connection.write_chunk(KEEP_ALIVE)


class ResponseRun:
    """One response; `run` is its whole life. Everything happens in the event loop."""

    def __init__(
        self,
        response: ResponseObject,
        generator: Generator,
        log: EventLog | None,
        save: Callable[[ResponseObject], Awaitable[bool]],
        *,
        with_encrypted: bool = False,
        servers: Mapping[str, str] = NO_SERVERS,
        asked_for: Collection[str] = (),
        tools: Mapping[str, ClientTool] = NO_TOOLS,
    ) -> None:
        """log: receives the events; None: nobody reads them. save: stores the response, before its last event is sent;
        False if the response was cancelled meanwhile. servers, asked_for, tools: see OutputItems."""
        self.response, self.log, self._save = response, log, save
        self._generator = generator
        self.items = OutputItems(
            self._tell, with_encrypted=with_encrypted, servers=servers, asked_for=asked_for, tools=tools
        )
        self.usage = ResponseUsage()
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done at the first token, or at the end."""
        self.error: BaseException | None = None
        self._turn: TurnAnswer | None = None
        self.is_cut = False
        """Another turn would follow, but max_output_tokens are used up."""

    async def run(
        self,
        work: PreparedRequest,
        next_turn: NextTurn | None = None,
        listings: Sequence[Item] = (),
        approved: Sequence[Item] = (),
        deadline_s: float | None = None,
    ) -> None:
        """Runs until the response is complete, failed or cancelled, and saved.

        next_turn: see `NextTurn`. listings: the items with MCP servers' tools, which come first. approved: calls that
        are carried out first; then next_turn's prompt replaces `work`. deadline_s: for the end (monotonic)."""
        self._tell_response("created")
        if self.response.status == "queued":
            self._tell_response("queued")
        try:
            async with asyncio.timeout_at(_of_loop(deadline_s)):
                await self._begin()
                for item in listings:
                    self.items.add_listing(item)
                for item in approved:
                    self.items.begin_call(item)
                following: PreparedRequest | None = work
                if approved and next_turn is not None:
                    following = await next_turn(self)
                finish_reason: str | None = None
                while following is not None:
                    finish_reason = await self._generate(following)
                    following = None if next_turn is None or finish_reason == "length" else await next_turn(self)
                finish_reason = "length" if self.is_cut else finish_reason
            self.items.finish(is_complete=finish_reason != "length")
            if finish_reason == "length":
                self.response.incomplete_details = {"reason": "max_output_tokens"}
            await self._end("incomplete" if finish_reason == "length" else "completed")
        except asyncio.CancelledError:
            self.response.status = "cancelled"
            raise
        except BaseException as error:
            let_interrupts_pass(error)
            self.error = error if not isinstance(error, TimeoutError) else took_too_long()
            if not isinstance(self.error, ApiError | HeadraceError):
                logger.exception("a response could not be finished")
            await self._fail(ApiError.of(self.error))
        finally:
            if not self.begun.done():
                self.begun.set_result(None)
            if self.log is not None:
                self.log.close()

    def take_news(self) -> None:
        """Turns new output into events and sends them; waits if all clients are behind and events are not kept."""
        log = self.log
        if self._turn is not None and (log is None or log.keeps or not all(each.is_behind for each in log.followers)):
            self._turn.read(self.items)
        if log is not None:
            log.flush()

    # --- as the engine's listener -----------------------------------------------------------------------------------

    def on_step(self, stream: RequestStream) -> None:
        if not self.begun.done():
            self.begun.set_result(None)
        if self.log is None and stream.params.logprobs is None:
            return
        try:
            self.take_news()
        except BaseException as error:  # raising would end the caller, the loop of all requests
            let_interrupts_pass(error)
            logger.exception("an event could not be written")
            self._turn = None
            self.error = self.error or error

    def fail(self, error: BaseException) -> None:
        """Nothing to do: `_generate` raises the error."""

    def close(self) -> None:
        self._turn = None

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _generate(self, work: PreparedRequest) -> str | None:
        """Runs one prompt to the end of its output. Returns the finish reason."""
        async with self._generator.running(work):
            turn = work.answer
            assert isinstance(turn, TurnAnswer), "as `create` makes it"
            turn.attach(work.streams)
            self._turn = turn
            work.events = self
            if turn.sequence.has_news():  # output that came before this listener was set
                self.on_step(work.streams[0])
            await work.ended
            if work.error is not None:
                raise work.error
            if self.error is not None:
                raise self.error
            turn.read(self.items)
            turn.count(self.usage)
            self.items.close("incomplete" if turn.is_cut else "completed")
            return turn.sequence.finish_reason

    async def _begin(self) -> None:
        if self.response.status == "queued":
            self.response.status = "in_progress"
            await self._save(self.response)
        self._tell_response("in_progress")

    async def _end(self, status: Status) -> None:
        self.response.status, self.response.output = status, self.items.done
        self.response.usage = self.usage
        self.response.completed_at = int(time.time()) if status == "completed" else None
        if await self._save(self.response):
            self._tell_response(status)
        else:
            self.response.status = "cancelled"

    async def _fail(self, error: ApiError) -> None:
        self.items.close("incomplete")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self.response.error = {"code": code, "message": error.body.message}
        await self._end("failed")

    def _tell_response(self, kind: str) -> None:
        if self.log is not None:
            self._tell(kind, response=self.response)
            self.log.flush()

    def _tell(self, kind: str, **fields: Any) -> None:
        if self.log is not None:
            self.log.add(f"response.{kind}", fields)


def _of_loop(time_s: float | None) -> float | None:
    """Converts a monotonic time to that of the event loop."""
    return None if time_s is None else asyncio.get_running_loop().time() + time_s - time.monotonic()


NextTurn = Callable[[ResponseRun], Awaitable[PreparedRequest | None]]
"""Called when a turn is complete: returns the next prompt of the same response, None if it ends."""


class TurnAnswer(TextAnswer):
    """The output for one prompt of a response, as it becomes items."""

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context)
        self._several_calls = context.request.parallel_tool_calls is not False

    def attach(self, streams: Sequence[RequestStream]) -> None:
        super().attach(streams)
        (self._stream,) = streams
        (self.sequence,) = self._stream.sequences
        self._parser = self.new_parser() or OutputParser(None, None)
        self._reasoning: list[str] = []
        self._untold: list[TokenLogprob] = []
        """Log-probabilities of tokens whose text has not been sent yet, or that have none."""
        self._has_ended = False

    def read(self, items: OutputItems) -> None:
        """Passes new output to the items."""
        if self._has_ended or not self.sequence.has_news():
            return
        output = self.sequence.read(delta=True, tokenizer=self._stream.tokenizer)
        self._has_ended = output.finish_reason is not None
        events = self._parser.read(output.text, output.finish_reason, output.stop_reason)
        if output.logprobs is not None:
            most = self._stream.params.logprobs or 0
            self._untold += chat_logprobs(output.token_ids, output.logprobs, self.spell, most).content
        for told in events:
            if told.call > 0 and not self._several_calls:
                continue
            if told.reasoning:
                self._reasoning.append(told.reasoning)
            if told.content or told.reasoning or told.call >= 0:
                of_text = self._take_logprobs(told.content or told.reasoning)
                if not told.reasoning or self.has_reasoning:
                    items.take(told, of_text if told.content else [])
        if events and events[-1].call >= 0:
            self._untold.clear()

    @property
    def is_cut(self) -> bool:
        """Whether the last item is incomplete: the output was cut, and what was cut is part of the response."""
        sequence = self.sequence
        if self._parser.num_calls > 1 and not self._several_calls:
            return False
        return sequence.finish_reason == "length" or self._parser.is_cut_by(sequence.stop_reason)

    def _take_logprobs(self, text: str) -> list[TokenLogprob]:
        """Takes the log-probabilities of a text's tokens: without markers before it, a possible stop string after it,
        or tokens that were read together with it and belong to the next text."""
        if not text or not self._untold:
            return []
        untold, self._untold = self._untold, []
        begin = "".join(each.token for each in untold).find(text)
        if begin < 0:  # a character that spans several tokens
            return untold
        found, at = [], 0
        for each in untold:
            if at >= begin + len(text):
                self._untold.append(each)
            elif at + len(each.token) > begin:
                found.append(each)
            at += len(each.token)
        return found

    def count(self, usage: ResponseUsage) -> None:
        num_prompt, num_output = len(self._stream.prompt.token_ids or ()), len(self.sequence.token_ids)
        usage.input_tokens += num_prompt
        usage.input_tokens_details.cached_tokens += self._stream.num_cached_tokens or 0
        usage.output_tokens += num_output
        usage.total_tokens += num_prompt + num_output
        thought = num_reasoning_tokens(self._stream.tokenizer, "".join(self._reasoning), num_output)
        usage.output_tokens_details.reasoning_tokens += thought
