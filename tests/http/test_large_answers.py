"""Answers of many tokens or log-probabilities are written where and when they keep no other request waiting."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
from thinned import every

from headrace.frontend.client.request_stream import RequestStream, SequenceState
from headrace.frontend.http.apis.openai import answer as answers
from headrace.frontend.http.apis.openai.answer import _PIECE_BYTES, AnswerContext, encoded, prompt_logprobs_are_complete
from headrace.frontend.http.apis.openai.bodies import (
    AssistantMessage,
    ChatChoice,
    ChatLogprobs,
    ChatResponse,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from headrace.frontend.http.apis.openai.chat import ChatAnswer
from headrace.frontend.http.apis.openai.requests import ChatCompletionRequest, ChatMessage
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server import event_stream
from headrace.frontend.http.server.event_stream import EventStream, KeepAlive
from headrace.frontend.http.server.generation import INLINE_TOKENS, Answer, Generator, PreparedRequest
from headrace.frontend.request.checks import CheckedRequest
from headrace.frontend.request.parameters.sampling_params import RequestOutputKind, SamplingParams
from headrace.frontend.request.prompts import Prompt
from headrace.ipc.codec import Tensor
from headrace.ipc.messages import LogprobRows


def stream_of(num_prompt: int, **params: Any) -> RequestStream:
    return RequestStream(CheckedRequest("r", Prompt(token_ids=[5] * num_prompt), SamplingParams(**params)), None)


def rows(count: int, width: int = 3) -> LogprobRows:
    """Of `count` positions."""
    return LogprobRows(
        token_ids=Tensor.from_numpy(np.tile(np.arange(width, dtype=np.int32), (count, 1))),
        logprobs=Tensor.from_numpy(np.full((count, width), -1.5, np.float32)),
        ranks=Tensor.from_numpy(np.ones(count, np.int32)),
    )


class NotesThread(Answer):
    """Notes the thread in which it is written."""

    def whole(self) -> list[bytes]:
        return [threading.current_thread().name.encode()]


@pytest.mark.parametrize(
    ("num_tokens", "params", "is_large"),
    [
        (100, {}, False),
        (INLINE_TOKENS + 1, {}, True),
        (100, {"logprobs": 20}, True),
        (1, {"prompt_logprobs": 20}, True),
    ],
)
def test_a_large_answer_is_written_in_another_thread(num_tokens: int, params: dict[str, int], is_large: bool) -> None:
    stream = stream_of(200, **params)
    stream.sequences[0].token_ids += [7] * num_tokens
    if "prompt_logprobs" in params:
        stream.add_prompt_logprobs(rows(199))
    prepared = PreparedRequest(None, "r", [], NotesThread())
    prepared.streams = [stream]
    with ThreadPoolExecutor(1, thread_name_prefix="pool") as threads:
        generator = Generator(KeepAlive(1.0), 0.0, None, None, threads)
        (name,) = asyncio.run(generator._whole(prepared))
    assert name.startswith(b"pool") == is_large


def test_what_a_large_answer_told_is_dropped_where_it_was_written() -> None:
    stream = stream_of(200, prompt_logprobs=20, logprobs=2)
    stream.add_prompt_logprobs(rows(199))
    sequence = stream.sequences[0]
    sequence.token_ids += [0] * 2000
    sequence.logprob_rows += [(rows(2000), nth) for nth in range(2000)]

    class Reads(NotesThread):
        def whole(self) -> list[bytes]:
            sequence.read(delta=False, tokenizer=None)
            assert len(stream.prompt_logprobs or ()) == 200
            assert len(sequence.logprobs_read) == 2000
            return super().whole()

    prepared = PreparedRequest(None, "r", [], Reads())
    prepared.streams = [stream]
    with ThreadPoolExecutor(1) as threads:
        asyncio.run(Generator(KeepAlive(1.0), 0.0, None, None, threads)._whole(prepared))
    assert not stream.prompt_logprobs
    assert not sequence.logprobs_read


def completion(num_choices: int, num_positions: int) -> CompletionResponse:
    choices = []
    for index in range(num_choices):
        top = [{f"token {each}": -0.5, '"': -9999.0} for each in range(num_positions)]
        numbers = list(range(num_positions))
        told = CompletionLogprobs(numbers, [-0.25] * num_positions, ["\0é]"] * num_positions, top)
        prompt = [None, *({"7": PromptLogprob(-1.5, 1, None)} for _ in range(num_positions))]
        choices.append(CompletionChoice(index, "te\0xt", told, "stop", prompt_logprobs=prompt, token_ids=[*numbers]))
    return CompletionResponse("id", "text_completion", 1, "model", choices, Usage(1, 2, 1))


def chat(num_choices: int, num_positions: int) -> ChatResponse:
    choices = []
    for index in range(num_choices):
        content = [TokenLogprob("a", -1.0, [97], [TopLogprob("b", -2.0, None)]) for _ in range(num_positions)]
        choices.append(ChatChoice(index, AssistantMessage("assistant", "text"), ChatLogprobs(content)))
    prompt = [None, *({"7": PromptLogprob(-1.5, 1, "x")} for _ in range(num_positions))]
    return ChatResponse(
        "id", "chat.completion", 1, "model", choices, Usage(1, 2, 1), prompt, list(range(num_positions))
    )


@pytest.mark.parametrize("make", every(2, [completion, chat]))
@pytest.mark.parametrize(("num_choices", "num_positions"), [(0, 0), (1, 0), (1, 3), (3, 1000), (1, 20_000), (700, 2)])
def test_a_response_in_pieces_is_what_it_is_in_one(
    make: Callable[[int, int], msgspec.Struct], num_choices: int, num_positions: int
) -> None:
    pieces = encoded(make(num_choices, num_positions))
    assert b"".join(pieces) == msgspec.json.encode(make(num_choices, num_positions))
    assert max(map(len, pieces)) < 2 * _PIECE_BYTES, "one piece after the other is written"


def test_no_call_writes_more_than_a_few_hundred_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one call writes, nobody else can interrupt."""
    longest = []
    encode = answers.encode

    def watched(value: Any) -> bytes:
        written = encode(value)
        longest.append(len(written))
        return written

    monkeypatch.setattr(answers, "encode", watched)
    for make in (completion, chat):
        for shape in ((1, 20_000), (700, 20)):
            encoded(make(*shape))
    assert len(longest) > 1000
    assert max(longest) < 40_000


def test_log_probabilities_of_a_prompt_take_the_users_form_when_they_are_read() -> None:
    stream = stream_of(8, prompt_logprobs=2)
    for count in (3, 4):
        assert not prompt_logprobs_are_complete(stream)
        stream.add_prompt_logprobs(rows(count))
    assert prompt_logprobs_are_complete(stream)
    told = stream.prompt_logprobs
    assert told is not None
    assert told[0] is None
    assert [list(position) for position in told[1:]] == [[0, 1, 2]] * 7
    assert stream.prompt_logprobs is told, "what was read once is not made again"


def test_a_request_that_has_ended_waits_for_no_garbage_collection() -> None:
    async def run() -> weakref.ref[RequestStream]:
        running = PreparedRequest(None, "r", [], Answer())
        stream = stream_of(3)
        stream.listener = running
        running.streams.append(stream)
        running.abort()
        return weakref.ref(stream)

    gc.disable()
    try:
        assert asyncio.run(run())() is None
    finally:
        gc.enable()


class Wire:
    """A connection and the events on it, in one."""

    congested, on_writable = False, None

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write_chunk(self, data: bytes) -> None:
        self.writes.append(data)

    def delta(self, stream: RequestStream, sequence: SequenceState) -> bytes:
        sequence.read(delta=True, tokenizer=None)
        return b"%d " % sequence.index

    def end(self) -> bytes:
        return b"end"

    def failure(self, error: BaseException) -> bytes:
        raise AssertionError("nothing fails here")


def test_events_of_many_outputs_leave_in_shares_and_each_output_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "TURN_S", -1.0)  # each share is one output's

    async def run() -> Wire:
        wire = Wire()
        events = EventStream(wire, wire)
        stream = stream_of(1, n=4, output_kind=RequestOutputKind.DELTA)
        events.attach([stream])
        events.open()
        for _ in range(3):  # before the last output has had its turn, the first ones have news again
            for sequence in stream.sequences:
                sequence.token_ids.append(7)
            events.on_step(stream)
            await asyncio.sleep(0)
        for sequence in stream.sequences:
            sequence.finish("length", None)
        events.on_step(stream)
        await events.ended
        return wire

    wire = asyncio.run(run())
    assert [write.split()[0] for write in wire.writes[:4]] == [b"0", b"1", b"2", b"3"]
    assert all(len(write.split()) == 1 for write in wire.writes[:-1])
    assert wire.writes[-1].endswith(b"end")


def test_an_answer_in_progress_keeps_no_messages() -> None:
    request = ChatCompletionRequest(messages=[ChatMessage(role="user", content="x" * 1000)])
    engine = types.SimpleNamespace(connected=types.SimpleNamespace(tokenizer=None), names=["m"])
    num_held = sys.getrefcount(request)
    answer = ChatAnswer(AnswerContext(request, "r", engine, ServeOptions()))
    assert answer.model == "m"
    assert sys.getrefcount(request) == num_held
