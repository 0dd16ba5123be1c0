"""How often a client asks to be told of tokens, and that it times those that come together as what they are."""

from __future__ import annotations

import array
import asyncio
from typing import Any

import pytest

from headrace import RequestOutputKind, SamplingParams
from headrace.frontend.http import metrics
from headrace.frontend.http.metrics import RequestMeter
from headrace.frontend.prompts import Prompt
from headrace.frontend.request import RequestStream
from headrace.frontend.request_table import UNREAD_TOKENS, RequestTable
from headrace.ipc.messages import AddRequest, ClientMessage

DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY


def added(**params: Any) -> tuple[AddRequest, RequestStream]:
    sent: list[ClientMessage] = []

    async def add() -> RequestStream:
        table = RequestTable(sent.append)
        prompt = Prompt(text=None, token_ids=[1, 2])
        return table.add("a", prompt, SamplingParams(**params), max_tokens=9, priority=0, tokenizer=None)

    stream = asyncio.run(add())
    (message,) = sent
    assert isinstance(message, AddRequest)
    return message, stream


@pytest.mark.parametrize(
    ("params", "news_every"),
    [
        ({"output_kind": DELTA}, 1),
        ({"output_kind": CUMULATIVE}, 1),
        ({"output_kind": FINAL_ONLY}, UNREAD_TOKENS),
        ({"output_kind": FINAL_ONLY, "stop": "x"}, 1),  # which is looked for at each token
    ],
)
def test_only_what_is_read_at_its_end_is_told_seldom(params: dict[str, Any], news_every: int) -> None:
    assert added(**params)[0].news_every == news_every


def test_tokens_that_come_together_count_as_so_many_intervals() -> None:
    stream = added(output_kind=FINAL_ONLY)[1]
    block = memoryview(array.array("d", [0.0] * 1000))
    meter = RequestMeter(block)
    for now_s, count in ((1.0, 1), (1.8, 8), (1.9, 1)):
        stream.sequences[0].token_ids += [7] * count
        meter.on_step(stream, now_s)
    first, end = metrics._INTER_TOKEN, metrics._INTER_TOKEN_SUM
    assert sum(block[first:end]) == 9
    assert max(block[first:end]) == 9, "all nine are of 0.1 s"
    assert block[end] == pytest.approx(0.9)
