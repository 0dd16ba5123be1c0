"""Answers of many tokens or log-probabilities are written where and when they keep no other request waiting."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from headrace.frontend.api.inputs.prompts import Prompt
from headrace.frontend.api.parameters.sampling_params import RequestOutputKind, SamplingParams
from headrace.frontend.client.request import RequestStream, SequenceState
from headrace.frontend.http.openai import generation
from headrace.frontend.http.openai.generation import INLINE_TOKENS, EventStream, Generator, KeepAlive, PreparedRequest
from headrace.frontend.http.openai.responses import prompt_is_told
from headrace.ipc.codec import Tensor
from headrace.ipc.messages import LogprobRows


def stream_of(num_prompt: int, **params: Any) -> RequestStream:
    return RequestStream("r", Prompt(token_ids=[5] * num_prompt), SamplingParams(**params), None, 0)


def rows(count: int, width: int = 3) -> LogprobRows:
    """Of `count` positions."""
    return LogprobRows(
        token_ids=Tensor.from_numpy(np.tile(np.arange(width, dtype=np.int32), (count, 1))),
        logprobs=Tensor.from_numpy(np.full((count, width), -1.5, np.float32)),
        ranks=Tensor.from_numpy(np.ones(count, np.int32)),
    )


class Answer:
    """Notes the thread in which it is written."""

    def whole(self) -> bytes:
        return threading.current_thread().name.encode()


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
    prepared = PreparedRequest(engine=None, jobs=[], answer=Answer(), streams=False)
    with ThreadPoolExecutor(1, thread_name_prefix="pool") as threads:
        generator = Generator(KeepAlive(1.0), 0.0, None, None, threads)
        name = asyncio.run(generator._whole(prepared, [stream]))
    assert name.startswith(b"pool") == is_large


def test_log_probabilities_of_a_prompt_take_the_users_form_when_they_are_read() -> None:
    stream = stream_of(8, prompt_logprobs=2)
    for count in (3, 4):
        assert not prompt_is_told(stream)
        stream.add_prompt_logprobs(rows(count))
    assert prompt_is_told(stream)
    told = stream.prompt_logprobs
    assert told is not None
    assert told[0] is None
    assert [list(position) for position in told[1:]] == [[0, 1, 2]] * 7
    assert stream.prompt_logprobs is told, "what was read once is not made again"


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
    monkeypatch.setattr(generation, "TURN_S", -1.0)  # each share is one output's

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
