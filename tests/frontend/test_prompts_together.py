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
from headrace.frontend.api.pooling_calls import pooling_params_for
from headrace.frontend.client.pooling_stream import PoolingStream
from headrace.frontend.client.request_table import RequestTable
from headrace.frontend.request.checks import NO_TOKENS, CheckedRequest
from headrace.frontend.request.prompts import Prompt
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import MOST_PROMPTS, Abort, AddPrompts, AddRequest, ClientMessage, FollowPrefixes, Pool

EMBED = Pool(kinds=("embed",))


def stream_of(name: str, token_ids: Sequence[int] = (5,), *, pool: Pool = EMBED, salt: str = "") -> PoolingStream:
    prompt = Prompt(token_ids=token_ids, cache_salt=salt)
    return PoolingStream(CheckedRequest(name, prompt, NO_TOKENS, pooling_task=pool))


def in_loop(run: Callable[[], None]) -> None:
    async def main() -> None:
        run()
        await asyncio.sleep(0)  # the next turn

    asyncio.run(main())


def test_those_that_differ_in_their_tokens_alone_are_one_message() -> None:
    together, alone = list[ClientMessage](), list[ClientMessage]()
    prompts = {"a": [5, 6], "b": [7], "c": [8] * 300}

    async def run() -> None:
        table, other = RequestTable(together.append), RequestTable(alone.append)
        for name, token_ids in prompts.items():
            table.add(stream_of(name, token_ids))
        assert not together
        for name, token_ids in prompts.items():
            other.add(stream_of(name, token_ids))
            await asyncio.sleep(0)  # the next turn

    asyncio.run(run())
    (message,) = together
    assert isinstance(message, AddPrompts)
    assert message.requests() == [
        msgspec.structs.replace(each, output_interval=1) for each in alone if isinstance(each, AddRequest)
    ]  # how many tokens are sent together is of those that generate


def test_those_of_a_turn_can_be_sent_before_it_ends_and_are_sent_once() -> None:
    sent = list[ClientMessage]()

    def run() -> None:
        table = RequestTable(sent.append)
        for name in ("a", "b"):
            table.add(stream_of(name))
        table.flush()
        assert [type(each) for each in sent] == [AddPrompts]
        table.add(stream_of("c"))

    in_loop(run)
    assert [type(each) for each in sent] == [AddPrompts, AddRequest]


def test_what_differs_besides_has_a_message_of_its_own_in_the_order_of_the_calls() -> None:
    sent = list[ClientMessage]()

    def run() -> None:
        table = RequestTable(sent.append)
        table.add(stream_of("a"))
        table.add(stream_of("b"))
        table.add(stream_of("c", salt="other"))
        table.add(stream_of("d", pool=Pool(kinds=("token_embed",))))
        table.add(second := stream_of("e", pool=Pool(kinds=("token_embed",))))
        table.abort_stream(second)
        table.add(stream_of("f", pool=Pool(kinds=("token_embed",))))
        table.send(FollowPrefixes())
        table.add(stream_of("g"))
        table.release_all()

    in_loop(run)
    found = [
        each.request_ids if isinstance(each, AddPrompts) else getattr(each, "request_id", type(each)) for each in sent
    ]
    assert found == [("a", "b"), "c", ("d", "e"), Abort, "f", FollowPrefixes]


def test_a_message_has_a_bounded_number_of_prompts() -> None:
    sent = list[Any]()

    def run() -> None:
        table = RequestTable(sent.append)
        for number in range(MOST_PROMPTS + 1):
            table.add(stream_of(str(number)))

    in_loop(run)
    assert isinstance(sent[1], AddRequest)
    assert (sent[0].count, sent[1].slot) == (MOST_PROMPTS, MOST_PROMPTS)


def test_requests_that_cannot_be_sent_end_with_the_error_and_leave_nothing() -> None:
    streams = [stream_of(name) for name in "ab"]

    def fails(message: ClientMessage) -> None:
        raise MemoryError("none left")

    table = RequestTable(fails)

    def run() -> None:
        for stream in streams:
            table.add(stream)

    in_loop(run)
    assert len(table) == 0
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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([PoolingParams()], "there are 2 prompts and 1 pooling_params; give one for each"),
        ([PoolingParams(), "b"], "must be a PoolingParams, or a list with one for each prompt, not"),
        ({"dimensions": 2}, "must be a PoolingParams, or a list with one for each prompt, not"),
    ],
)
def test_numbers_of_pooling_params_must_match(given: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        pooling_params_for(given, 2, "embed")
    assert len(pooling_params_for(None, 2, "embed")) == len(pooling_params_for([PoolingParams()] * 2, 2, "embed")) == 2
