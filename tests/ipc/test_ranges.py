"""Every number of a request has a range, declared at its field, which the core holds clients to."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from engine_parts import EOS, VOCAB_SIZE, SteppedClient, SteppedCore

from headrace.ipc.codec import Tensor
from headrace.ipc.control import PauseGeneration
from headrace.ipc.messages import (
    Abort,
    AddRequest,
    Control,
    Finish,
    FinishReason,
    Generate,
    Goodbye,
    Pool,
    Reply,
    ResetPrefixCache,
    Sampling,
    Thinking,
)
from headrace.ipc.ranges import INT32, VOCABULARY, Range, names_marked, out_of_range, ranges_of

REQUEST = AddRequest(
    slot=0,
    request_id="r",
    prompt_token_ids=Tensor.of("int32", [5, 6, 7]),
    task=Generate(sampling=Sampling(max_tokens=4)),
)
NUMBERS = [(kind, name, span) for kind in (Sampling, AddRequest) for name, span in ranges_of(kind).items()]


def with_field(kind: type[Any], name: str, value: Any) -> AddRequest:
    if kind is AddRequest:
        return msgspec.structs.replace(REQUEST, **{name: value})
    changes = {"max_tokens": INT32} if name == "min_tokens" else {}
    sampling = msgspec.structs.replace(Sampling(max_tokens=4), **{**changes, name: value})
    return msgspec.structs.replace(REQUEST, task=Generate(sampling=sampling))


def answer(request: AddRequest) -> tuple[SteppedCore, SteppedClient, Finish]:
    """The core after it, its client, and the request's one terminal answer."""
    core = SteppedCore()
    client = core.open()
    client.send(request)
    core.run_until_idle()
    (finish,) = client.finishes()
    return core, client, finish


def test_every_number_of_a_request_has_a_range() -> None:
    for kind in (Sampling, AddRequest, Thinking):
        numeric = [
            f.name
            for f in msgspec.inspect.type_info(kind).fields  # type: ignore[attr-defined]
            if "IntType" in repr(f.type)
        ]
        structs = {"task", "thinking", "inputs"}
        lists = {*names_marked(kind, VOCABULARY), *structs}
        assert set(numeric) - lists <= set(ranges_of(kind)), f"{kind.__name__} has a number without a range"


@pytest.mark.parametrize(("kind", "name", "span"), NUMBERS)
def test_a_number_beyond_its_range_is_refused_by_name_with_the_range(kind: type, name: str, span: Range) -> None:
    step = 1 if isinstance(span.low, int) and isinstance(span.high, int) and name not in ("top_p", "min_p") else 0.01
    for value in (span.low - step, span.high + step if abs(span.high) < 1e30 else math.inf):
        _, _, finish = answer(with_field(kind, name, value))
        assert finish.reason is FinishReason.REJECTED
        assert finish.failure is not None
        assert finish.failure.message == f"{name} is {value}; it must lie in {span}"


@pytest.mark.parametrize(("kind", "name", "span"), NUMBERS)
def test_the_ends_of_every_range_are_survived(kind: type, name: str, span: Range) -> None:
    """They may be refused for another reason, such as the engine's max_logprobs."""
    for value in (span.low, span.high):
        core, client, finish = answer(with_field(kind, name, value))
        assert finish.reason in FinishReason
        client.add(1000, [5, 6], max_tokens=2)
        core.run_until_idle()
        assert client.finishes()[-1].slot == 1000


@pytest.mark.parametrize("nan", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
def test_no_range_holds_a_nan(nan: str) -> None:
    _, _, finish = answer(with_field(Sampling, nan, math.nan))
    assert finish.reason is FinishReason.REJECTED


@pytest.mark.parametrize("token_ids", [(-1,), (-5,), (-(2**31),), (VOCAB_SIZE,), (2**63 - 1,)])
@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_token_ids_outside_the_vocabulary_are_refused(name: str, token_ids: tuple[int, ...]) -> None:
    _, _, finish = answer(with_field(Sampling, name, token_ids))
    assert finish.reason is FinishReason.REJECTED


@pytest.mark.parametrize("limit", [2**31 - 1, 2**30])
def test_a_min_tokens_beyond_the_models_length_ends_at_its_length(limit: int) -> None:
    sampling = Sampling(max_tokens=limit, min_tokens=limit, stop_token_ids=(EOS,))
    _, client, finish = answer(msgspec.structs.replace(REQUEST, task=Generate(sampling=sampling)))
    assert finish.reason is FinishReason.LENGTH
    assert len(client.tokens()[0]) == 64 - 3


def test_a_top_k_beyond_the_vocabulary_keeps_all_of_it_so_that_no_device_sees_it() -> None:
    core = SteppedCore()
    client = core.open()
    client.add(0, [5, 6], top_k=INT32, max_tokens=8)
    core.loop.turn()
    (request,) = [each for each in core.loop.scheduler.rows.requests if each is not None]
    assert request.sampling.top_k == 0


def test_a_request_to_pool_is_refused_in_a_sentence() -> None:
    _, _, finish = answer(msgspec.structs.replace(REQUEST, task=Pool(kinds=("embed",))))
    assert finish.reason is FinishReason.REJECTED
    assert finish.failure is not None
    assert "this engine's tasks for null are generate" in finish.failure.message


def test_names_have_a_longest_length() -> None:
    assert out_of_range(REQUEST) is None
    problem = out_of_range(msgspec.structs.replace(REQUEST, cache_salt="x" * 5000))
    assert problem == "cache_salt has a length of 5000; at most 4096 is taken"


def test_what_a_client_sends_after_a_request_is_taken_after_it() -> None:
    core = SteppedCore()
    other, leaving = core.open(), core.open()
    other.add(0, [5, 6, 7], max_tokens=30)
    core.loop.turn()
    leaving.add(0, [5, 6, 7], max_tokens=30)
    leaving.send(Goodbye())
    core.loop.turn()
    assert core.loop.scheduler.num_running + len(core.loop.scheduler.waiting) == 1, "the request outlived its client"
    core.run_until_idle()


def test_a_command_between_two_requests_of_a_client_is_carried_out_between_them() -> None:
    core = SteppedCore()
    client = core.open()
    client.add(0, [5, 6, 7], max_tokens=30)
    core.loop.turn()
    client.add(1, [5, 6, 7])
    client.send(Abort(slots=(1,)))
    client.send(ResetPrefixCache(call=1))
    client.add(2, [5, 6, 7])
    client.send(Abort(slots=(2,)))
    core.loop.turn()
    ends = [
        message.call if isinstance(message, Reply) else ("end", finish.slot)
        for message in client.heard
        for finish in (getattr(message, "finished", ()) or (None,))
        if isinstance(message, Reply) or finish is not None
    ]
    assert ends == [("end", 1), 1, ("end", 2)]


def test_requests_that_left_a_blocked_queue_are_not_kept() -> None:
    core = SteppedCore()
    client = core.open()
    client.send(Control(call=1, command=PauseGeneration(mode="keep")))
    for slot in range(1000):
        client.add(slot, [5, 6, 7])
        client.send(Abort(slots=(slot,)))
    core.run_until_idle()
    assert len(client.finishes()) == 1000
    assert len(core.loop.scheduler.waiting._heap) <= 64


def test_a_client_that_sends_faster_than_the_loop_takes_is_rejected_request_by_request_and_others_are_not() -> None:
    core = SteppedCore(max_client_inbox_mb=0.05)
    flood, other = core.open(), core.open()
    for slot in range(200):
        flood.add(slot, [5, 6], max_tokens=1)
    other.add(0, [5, 6], max_tokens=1)
    assert core.inbox.qsize() < 100
    core.run_until_idle()
    assert sorted(finish.slot for finish in flood.finishes()) == list(range(200)), "a request has no terminal answer"
    rejected = [finish for finish in flood.finishes() if finish.reason is FinishReason.REJECTED]
    assert 100 < len(rejected) < 200
    assert rejected[0].failure is not None
    assert (rejected[0].failure.type, rejected[0].failure.retry_after_s) == ("QueueFullError", 1.0)
    assert [finish.reason for finish in other.finishes()] == [FinishReason.LENGTH]
    flood.add(200, [5, 6], max_tokens=1)
    core.run_until_idle()
    assert flood.finishes()[-1].reason is FinishReason.LENGTH


def test_a_client_may_have_so_many_unfinished_requests_and_no_more() -> None:
    core = SteppedCore(max_client_requests=3)
    greedy, other = core.open(), core.open()
    for slot in range(5):
        greedy.add(slot, [5, 6], max_tokens=20)
    other.add(0, [5, 6], max_tokens=20)
    core.run_until_idle()
    reasons = {finish.slot: finish.reason for finish in greedy.finishes()}
    assert [reasons[slot] for slot in (3, 4)] == [FinishReason.REJECTED] * 2
    assert FinishReason.REJECTED not in [reasons[slot] for slot in range(3)]
    assert len(other.finishes()) == 1
