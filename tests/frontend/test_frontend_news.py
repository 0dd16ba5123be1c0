"""How often a client asks to be told of tokens, and that it times those that come together as what they are."""

from __future__ import annotations

import array
import asyncio
import itertools
from typing import Any

import pytest
from null_with_tokenizer import BACKEND
from source_tree import PYTHONPATH

from headrace import AsyncLLM, RequestOutputKind, SamplingParams
from headrace.frontend.client.request_metrics import INTER_TOKEN, INTER_TOKEN_SUM, RequestMeter
from headrace.frontend.client.request_stream import RequestStream, one_row
from headrace.frontend.client.request_table import UNREAD_TOKENS, RequestTable
from headrace.frontend.fleet.decisions import RoutedRequest
from headrace.frontend.request.checks import CheckedRequest
from headrace.frontend.request.prompts import Prompt
from headrace.ipc.messages import AddRequest, ClientMessage

DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
ROWS = one_row(([7], [-1.0], 1))
"""Log-probabilities of one token."""


def added(stream_interval: int = 1, **params: Any) -> tuple[AddRequest, RequestStream]:
    sent: list[ClientMessage] = []

    async def add() -> RequestStream:
        table = RequestTable(sent.append)
        table.stream_interval = stream_interval
        prompt = Prompt(text=None, token_ids=[1, 2])
        stream = RequestStream(CheckedRequest("a", prompt, SamplingParams(**params), max_tokens=9), None)
        table.add(stream)
        return stream

    stream = asyncio.run(add())
    (message,) = sent
    assert isinstance(message, AddRequest)
    return message, stream


@pytest.mark.parametrize(
    ("params", "output_interval"),
    [
        ({"output_kind": DELTA}, 1),
        ({"output_kind": CUMULATIVE}, 1),
        ({"output_kind": FINAL_ONLY}, UNREAD_TOKENS),
        ({"output_kind": FINAL_ONLY, "stop": "x"}, 1),  # which is looked for at each token
        ({"output_kind": DELTA, "stream_interval": 5}, 5),
        ({"output_kind": DELTA, "stream_interval": 5, "stop": "x"}, 1),
        ({"output_kind": FINAL_ONLY, "stream_interval": 5}, UNREAD_TOKENS),
    ],
)
def test_only_what_is_read_at_its_end_is_told_seldom(params: dict[str, Any], output_interval: int) -> None:
    assert added(**params)[0].output_interval == output_interval


def test_tokens_that_come_together_count_as_so_many_intervals() -> None:
    stream = added(output_kind=FINAL_ONLY)[1]
    block, gaps = memoryview(array.array("d", [0.0] * 1000)), list[float]()
    meter = RequestMeter(block, gaps.append)
    for now_s, count in ((1.0, 1), (1.8, 8), (1.9, 1)):
        stream.sequences[0].token_ids += [7] * count
        meter.on_step(stream, now_s)
    first, end = INTER_TOKEN, INTER_TOKEN_SUM
    assert sum(block[first:end]) == 9
    assert max(block[first:end]) == 9, "all nine are of 0.1 s"
    assert block[end] == pytest.approx(0.9)
    assert not gaps


def test_a_gap_is_counted_once_for_each_loss_of_an_engine_after_the_first_token() -> None:
    stream = added(output_kind=DELTA)[1]
    gaps = list[float]()
    meter = RequestMeter(memoryview(array.array("d", [0.0] * 1000)), gaps.append)
    stream.route = RoutedRequest("null", stream, num_prompt_tokens=1)
    for now_s, num_migrations in ((1.0, 1), (1.1, 1), (1.5, 2), (1.6, 2), (3.6, 4), (3.7, 4)):
        stream.sequences[0].token_ids.append(7)
        stream.route.num_migrations = num_migrations
        meter.on_step(stream, now_s)
    assert gaps == pytest.approx([0.4, 2.0])


MORE: tuple[dict[str, Any], ...] = ({}, {"logprobs": 0}, {"stop": ["no such text"]})
"""With the last two the core tells each token."""


@pytest.mark.parametrize("more", MORE)
def test_a_reader_hears_of_the_first_token_of_every_fourth_and_of_the_end(more: dict[str, Any]) -> None:
    _, stream = added(stream_interval=4, output_kind=DELTA, **more)
    told = []
    for count in range(1, 11):
        stream.sequences[0].token_ids.append(7)
        if more.get("logprobs") is not None:
            stream.sequences[0].logprob_rows.append((ROWS, 0))
        stream.touched = True
        stream.notify(float(count))
        if stream._news:
            told.append((count, len(stream._read().outputs[0].token_ids)))
    assert told == [(1, 1), (5, 4), (9, 4)]
    stream.sequences[0].finish("length", None)
    stream.num_unfinished = 0
    stream.notify(11.0)
    assert len(stream._read().outputs[0].token_ids) == 1


def test_the_option_reaches_readers_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is late gets larger pieces, never smaller ones."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    engine: dict[str, Any] = {"distributed_executor_backend": BACKEND, "hf_overrides": {"step_delay_s": 0.002}}

    async def read() -> None:
        async with AsyncLLM("null", stream_interval=4, **engine) as llm:
            for kind, more in itertools.product((DELTA, CUMULATIVE), MORE):
                params = SamplingParams(max_tokens=12, ignore_eos=True, output_kind=kind, **more)
                outputs = [output.outputs[0] async for output in llm.generate({"prompt_token_ids": [5, 6]}, params)]
                counts = [len(output.token_ids) for output in outputs]
                if kind is CUMULATIVE:
                    counts = [counts[0], *(after - before for before, after in itertools.pairwise(counts))]
                assert sum(counts) == 12
                assert len(counts) <= 4
                assert all(count >= 4 for count in counts[1:-1])

    asyncio.run(read())
