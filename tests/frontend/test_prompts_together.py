"""Requests that pool and are submitted together: few messages, and in every other way requests by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from null_with_tokenizer import BACKEND, VOCAB_SIZE

from headrace import LLM, HeadraceError, PoolingParams, RequestFailedError
from headrace.core.engine.sessions import Sessions
from headrace.frontend.client.pooling_stream import PoolingStream
from headrace.frontend.client.request_table import RequestTable
from headrace.frontend.request.checks import NO_TOKENS, CheckedRequest
from headrace.frontend.request.prompts import Prompt
from headrace.ipc.messages import MOST_PROMPTS, Abort, AddPrompts, AddRequest, ClientMessage, Pool

EMBED = Pool(kinds=("embed",))


def stream_of(name: str, token_ids: Sequence[int] = (5,), *, pool: Pool = EMBED, salt: str = "") -> PoolingStream:
    prompt = Prompt(token_ids=token_ids, cache_salt=salt)
    return PoolingStream(CheckedRequest(name, prompt, NO_TOKENS, pool=pool))


def in_loop(run: Callable[[], None]) -> None:
    async def main() -> None:
        run()

    asyncio.run(main())


def test_those_that_differ_in_their_tokens_alone_are_one_message() -> None:
    together, alone = list[ClientMessage](), list[ClientMessage]()
    prompts = {"a": [5, 6], "b": [7], "c": [8] * 300}

    def run() -> None:
        table = RequestTable(together.append)
        with table.together():
            for name, token_ids in prompts.items():
                table.add(stream_of(name, token_ids))
            assert not together
        other = RequestTable(alone.append)
        for name, token_ids in prompts.items():
            other.add(stream_of(name, token_ids))

    in_loop(run)
    (message,) = together
    assert isinstance(message, AddPrompts)
    assert message.requests() == [
        msgspec.structs.replace(each, output_interval=1) for each in alone if isinstance(each, AddRequest)
    ]  # how many tokens are sent together is of those that generate


def test_what_differs_besides_has_a_message_of_its_own_in_the_order_of_the_calls() -> None:
    sent = list[ClientMessage]()

    def run() -> None:
        table = RequestTable(sent.append)
        with table.together():
            table.add(stream_of("a"))
            table.add(stream_of("b"))
            with table.together():
                table.add(stream_of("c", salt="other"))
            table.add(stream_of("d", pool=Pool(kinds=("token_embed",))))
            table.add(second := stream_of("e", pool=Pool(kinds=("token_embed",))))
            table.abort_stream(second)
            table.add(stream_of("f", pool=Pool(kinds=("token_embed",))))

    in_loop(run)
    found = [
        each.request_ids if isinstance(each, AddPrompts) else getattr(each, "request_id", type(each)) for each in sent
    ]
    assert found == [("a", "b"), "c", ("d", "e"), Abort, "f"]


def test_a_message_has_a_bounded_number_of_prompts() -> None:
    sent = list[Any]()

    def run() -> None:
        table = RequestTable(sent.append)
        with table.together():
            for number in range(MOST_PROMPTS + 1):
                table.add(stream_of(str(number)))

    in_loop(run)
    assert isinstance(sent[1], AddRequest)
    assert (sent[0].count, sent[1].slot) == (MOST_PROMPTS, MOST_PROMPTS)


def test_requests_that_cannot_be_sent_end_with_the_error_and_leave_nothing() -> None:
    streams = [stream_of(name) for name in "ab"]

    def fails(message: ClientMessage) -> None:
        raise MemoryError("none left")

    def run() -> None:
        table = RequestTable(fails)
        with table.together():
            for stream in streams:
                table.add(stream)
        assert len(table) == 0

    in_loop(run)
    for stream in streams:
        assert isinstance(stream.error, RequestFailedError)
        assert "none left" in str(stream.error)


def test_a_list_reaches_the_core_as_one_message_and_each_text_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    received = list[ClientMessage]()
    receive = Sessions.receive

    def noted(self: Sessions, client: int, message: ClientMessage) -> Any:
        received.append(message)
        return receive(self, client, message)

    monkeypatch.setattr(Sessions, "receive", noted)
    overrides = {"vocab_size": VOCAB_SIZE, "vector_width": 6, "max_model_len": 64}
    with LLM(
        "null", in_process=True, distributed_executor_backend=BACKEND, hf_overrides=overrides, use_tqdm_on_load=False,
        max_client_requests=7,
    ) as llm:  # fmt: skip
        prompts = [[5, 6 + number % 3] for number in range(30)]
        together = [each.outputs.embedding for each in llm.embed(prompts, use_tqdm=False)]
        kinds = [type(each) for each in received if isinstance(each, AddPrompts | AddRequest)]
        assert kinds[0] is AddPrompts
        assert together == [llm.embed(each, use_tqdm=False)[0].outputs.embedding for each in prompts]
        params = [PoolingParams(use_activation=number % 2 == 0) for number in range(2)]
        llm.embed(prompts[:2], pooling_params=params, use_tqdm=False)
        with pytest.raises(HeadraceError, match=r"prompts\[1\]"):
            llm.embed([[5], [10**6]], use_tqdm=False)
