"""The scheduler and its loop, against an executor that checks every plan and the content of every block."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from engine_parts import EOS, LAYERS, VOCAB_SIZE, SteppedCore, make_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.engine.sessions import ClientGone
from headrace.core.schedule.block_tables import PrefixHit
from headrace.core.schedule.plan_builder import PlanBuilder
from headrace.core.schedule.policies import PrefillLimits, prefill_share
from headrace.core.schedule.refusal import Refusal
from headrace.core.schedule.requests import Request, WaitingQueue
from headrace.core.schedule.scheduler import HASHED_AT_ONCE, Scheduler, SchedulerConfig
from headrace.executor.testing.null import NullExecutor, NullModel
from headrace.ipc.messages import Abort, FinishReason, Generate, Goodbye, ResetPrefixCache, Sampling


def model(**changes: object) -> NullModel:
    return NullModel(**{"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "check": True, **changes})  # type: ignore[arg-type]


@pytest.fixture(autouse=True, scope="module")
def every_remembered_refusal_holds():
    """What is not looked up again could not have been admitted."""
    stands, admit, admitting = Refusal.stands, Scheduler._admit_waiting, list[Scheduler]()

    def noted(scheduler: Scheduler, builder: PlanBuilder) -> None:
        admitting[:] = [scheduler]
        admit(scheduler, builder)

    def checked(refusal: Refusal, request: Request, num_running: int) -> bool:
        is_refused = stands(refusal, request, num_running)
        (scheduler,) = admitting
        assert not is_refused or scheduler._lacks_blocks(request, Scheduler._look_up(scheduler, request))
        return is_refused

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_admit_waiting", noted)
        patch.setattr(Refusal, "stands", checked)
        yield


PROMPTS = st.lists(st.integers(3, 6), min_size=1, max_size=40)  # few token ids, so that prefixes repeat

REQUEST = st.fixed_dictionaries(
    {
        "prompt": PROMPTS,
        "max_tokens": st.integers(1, 30),
        "priority": st.integers(-2, 2),
        "salt": st.sampled_from(["", "a"]),
        "ignore_eos": st.booleans(),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
        "output_interval": st.sampled_from([1, 1, 3, 99]),
    }
)
EVENT = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 1), REQUEST),
    st.tuples(st.just("add"), st.integers(0, 1), REQUEST),
    st.tuples(st.just("turn"), st.integers(1, 5), st.none()),
    st.tuples(st.just("abort"), st.integers(0, 1), st.integers(0, 20)),
    st.tuples(st.just("reset"), st.integers(0, 1), st.none()),
)
LIMITS = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(17, 40),
        "windows": st.sampled_from(LAYERS),
        "state_pages": st.sampled_from([1, 3]),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.sampled_from([8, 16, 64]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "enable_prefix_caching": st.booleans(),
        "prefix_caching_hash_algo": st.sampled_from(["sha256", "xxhash", "builtin"]),
        "enable_chunked_prefill": st.booleans(),
        "prompt_logprobs_cost": st.sampled_from([0.0, 0.5, 20.0]),
    }
)


@settings(max_examples=80, deadline=None)
@given(limits=LIMITS, events=st.lists(EVENT, max_size=30), eos_after=st.sampled_from([0, 0, 3]))
def test_every_request_ends_exactly_once_and_no_block_is_lost(limits, events, eos_after):
    if not limits["enable_chunked_prefill"]:
        limits = {**limits, "max_num_batched_tokens": 64}
    core = SteppedCore(model(eos_after_tokens=eos_after), **limits)
    clients = [core.open(), core.open()]
    added: list[list[dict]] = [[], []]
    for kind, number, detail in events:
        if kind == "add":
            clients[number].add(
                len(added[number]),
                detail["prompt"],
                priority=detail["priority"],
                cache_salt=detail["salt"],
                max_tokens=detail["max_tokens"],
                ignore_eos=detail["ignore_eos"],
                prompt_logprobs=detail["prompt_logprobs"],
                output_interval=detail["output_interval"],
            )
            added[number].append(detail)
        elif kind == "abort":
            clients[number].send(Abort(slots=(detail,)))
        elif kind == "reset":
            clients[number].send(ResetPrefixCache(call=1))
        else:
            for _ in range(number):
                if not core.inbox.empty() or core.loop.has_work:
                    core.loop.turn()
                    core.loop.scheduler.check()
    core.run_until_idle()
    for client, requests in zip(clients, added, strict=True):
        assert Counter(finish.slot for finish in client.finishes()) == Counter(range(len(requests)))
        tokens = client.tokens()
        for finish in client.finishes():
            request, count = requests[finish.slot], len(tokens.get(finish.slot, []))
            room = 64 - len(request["prompt"])
            if finish.reason == FinishReason.LENGTH:
                assert count == min(request["max_tokens"], room)
            elif finish.reason == FinishReason.STOP:
                assert tokens[finish.slot][-1] == EOS
                assert not request["ignore_eos"]
            else:
                assert finish.reason == FinishReason.ABORT
    pool = core.loop.scheduler.pool
    assert pool.num_available == pool.num_blocks - 1


def test_preemption_recomputes_and_gives_the_same_tokens():
    roomy, tight = SteppedCore(model(), num_blocks=64), SteppedCore(model(), num_blocks=17)
    prompts = [[3 + i, 4, 5, 6, 7] * 3 for i in range(4)]
    results = []
    for core in (roomy, tight):
        client = core.open()
        for slot, prompt in enumerate(prompts):
            client.add(slot, prompt, max_tokens=25)
        core.run_until_idle()
        results.append(client.tokens())
    assert roomy.loop.scheduler.num_preemptions == 0
    assert tight.loop.scheduler.num_preemptions > 0
    assert results[0] == results[1]


def test_prompt_logprobs_are_told_once_even_after_a_preemption():
    core = SteppedCore(model(), num_blocks=17, max_num_batched_tokens=16)
    client = core.open()
    for slot in range(4):
        client.add(slot, [3 + slot, 4, 5, 6, 7] * 3, max_tokens=25, prompt_logprobs=0)
    core.run_until_idle()
    assert core.loop.scheduler.num_preemptions > 0
    runs = [run for message in client.outputs() for run in message.prompt_logprobs]
    for slot in range(4):
        told = [p for run in runs if run.slot == slot for p in range(run.start, run.start + len(run.rows.token_ids))]
        assert told == list(range(1, 15))


def test_a_repeated_prompt_comes_from_the_cache_but_for_its_last_token():
    core = SteppedCore()
    client = core.open()
    client.add(0, [5] * 16, max_tokens=1)
    core.run_until_idle()
    client.add(1, [5] * 16, max_tokens=1)
    client.add(2, [5] * 19, max_tokens=1)
    core.run_until_idle()
    assert client.cached() == {0: 0, 1: 12, 2: 16}


def test_equal_prompts_of_one_step_share_their_blocks():
    core = SteppedCore(max_num_batched_tokens=32)
    client = core.open()
    for slot in range(3):
        client.add(slot, [7] * 16, max_tokens=1)
    core.loop.turn()
    assert client.cached() == {0: 0, 1: 12, 2: 12}


def test_another_salt_shares_nothing():
    core = SteppedCore()
    client = core.open()
    for slot, salt in enumerate(["", "tenant-a", "tenant-a", "tenant-b"]):
        client.add(slot, [5] * 16, max_tokens=1, cache_salt=salt)
        core.run_until_idle()
    assert client.cached() == {0: 0, 1: 0, 2: 12, 3: 0}


def test_a_long_prompt_is_hashed_as_far_as_it_is_cached_and_computed():
    core = SteppedCore(model(), num_blocks=700, max_model_len=2048, max_num_batched_tokens=64)
    client, prompt = core.open(), [3 + i % 50 for i in range(2000)]
    client.add(0, prompt, max_tokens=1)
    core.loop.turn()
    (request,) = core.loop.scheduler.rows.requests[:1]
    size = core.loop.scheduler.config.block_size
    assert len(request.block_hashes) <= HASHED_AT_ONCE < 2000 // size
    core.run_until_idle()
    client.add(1, prompt, max_tokens=1)
    core.run_until_idle()
    assert client.cached()[1] == (2000 - 1) // size * size


def test_a_request_that_lacks_blocks_is_not_looked_up_again_while_nothing_changes(monkeypatch):
    core = SteppedCore(model(), num_blocks=17, max_num_batched_tokens=64)
    client = core.open()
    lookups: list[int] = []
    look_up = core.loop.scheduler._look_up

    def counted(request: Request) -> PrefixHit:
        lookups.append(request.slot)
        return look_up(request)

    monkeypatch.setattr(core.loop.scheduler, "_look_up", counted)
    client.add(0, [3] * 20, max_tokens=40, ignore_eos=True)
    core.loop.turn()
    client.add(1, [4] * 60, max_tokens=1)
    core.run_until_idle()
    assert lookups.count(1) == 2  # when it came, and when the first request had gone
    assert Counter(finish.slot for finish in client.finishes()) == {0: 1, 1: 1}


def test_generated_tokens_are_cached_too():
    core = SteppedCore()
    client = core.open()
    client.add(0, [5] * 6, max_tokens=10)
    core.run_until_idle()
    answer = client.tokens()[0]
    client.add(1, [5] * 6 + answer + [9], max_tokens=1)
    core.run_until_idle()
    assert client.cached()[1] == 12  # the last generated token was never computed


def test_a_long_prompt_does_not_hold_up_short_ones():
    core = SteppedCore(max_num_batched_tokens=16, max_model_len=200, num_blocks=200, max_num_seqs=8)
    client = core.open()
    client.add(0, [5] * 150, max_tokens=1)
    core.loop.turn()
    for slot in (1, 2):
        client.add(slot, [6, 7, 8, slot + 3], max_tokens=1)
    core.loop.turn()
    assert set(client.tokens()) == {1, 2}, "short prompts wait for the long one"


def test_a_long_prompt_alone_takes_the_whole_step():
    core = SteppedCore(max_num_batched_tokens=16, max_model_len=200, num_blocks=200)
    client = core.open()
    client.add(0, [5] * 48, max_tokens=1)
    for _ in range(3):
        core.loop.turn()
    assert len(client.finishes()) == 1


@pytest.mark.parametrize(
    ("start", "others", "steps"),
    [
        (0, 0, [10] * 10),  # 10 tokens and a half of each more are 15 of 16
        (0, 8, [5 + 8] * 8),  # what decodes leave
        (50, 0, [16, 16, 16, 11, 10, 10, 10, 10, 1]),  # the first 49 are reported by nobody
        (99, 0, [16] * 6 + [4]),
    ],
)
def test_a_step_computes_fewer_tokens_where_it_reports_their_log_probabilities(start, others, steps):
    computed = []

    class Recorder(NullExecutor):
        def submit(self, plan):
            computed.append(plan.total_tokens)
            super().submit(plan)

    options = {"max_num_batched_tokens": 16, "max_num_seqs": 16, "max_model_len": 200, "num_blocks": 400}
    core = SteppedCore(executor_class=Recorder, prompt_logprobs_cost=0.5, **options)
    client = core.open()
    for slot in range(others):
        client.add(1 + slot, [4, 5], max_tokens=60)
    if others:
        core.loop.turn()
        computed.clear()
    client.add(0, [5] * 100, max_tokens=1, prompt_logprobs=0, prompt_logprob_start=start)
    core.run_until_idle()
    assert computed[: len(steps)] == steps


def test_decodes_go_on_while_a_long_prompt_is_computed():
    core = SteppedCore(max_num_batched_tokens=16, max_model_len=200, num_blocks=200)
    client = core.open()
    client.add(0, [4, 5], max_tokens=50)
    core.loop.turn()
    client.add(1, [5] * 150, max_tokens=1)
    for _ in range(5):
        core.loop.turn()
    assert len(client.tokens()[0]) == 6


def test_priority_policy_serves_smaller_numbers_first():
    order = {}
    for policy in ("fcfs", "priority"):
        core = SteppedCore(max_num_seqs=1, scheduling_policy=policy)
        client = core.open()
        for slot, priority in enumerate([5, 0, -3, 0]):
            client.add(slot, [4, 5], max_tokens=2, priority=priority)
        core.run_until_idle()
        order[policy] = [finish.slot for finish in client.finishes()]
    assert order == {"fcfs": [0, 1, 2, 3], "priority": [2, 1, 3, 0]}


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [0, 3, 4, 1, 2]), ("priority", [0, 2, 3, 4, 1])])
def test_what_had_begun_at_an_engine_that_died_goes_before_what_waits_for_its_first_token(
    policy: str, order: list[int]
) -> None:
    core = SteppedCore(max_num_seqs=1, scheduling_policy=policy)
    client = core.open()
    client.add(0, [4, 5], max_tokens=4)
    core.loop.turn()
    client.add(1, [4, 5], max_tokens=2)
    client.add(2, [4, 5], max_tokens=2, priority=-1)
    for slot in (3, 4):
        client.add(slot, [4, 5, 6, 7], max_tokens=4, num_resumed_tokens=2, seed=1)
    core.run_until_idle()
    assert [finish.slot for finish in client.finishes()] == order


def test_priority_policy_preempts_the_least_important():
    core = SteppedCore(num_blocks=17, scheduling_policy="priority", max_num_seqs=4)
    client = core.open()
    for slot, priority in enumerate([0, 9, 1, 2]):
        client.add(slot, [4 + slot] * 14, max_tokens=25, priority=priority)
    core.run_until_idle()
    preempted = {finish.slot: finish.num_preemptions for finish in client.finishes()}
    assert preempted[1] > 0
    assert preempted[0] == 0


def test_without_chunked_prefill_a_prompt_is_computed_whole():
    core = SteppedCore(enable_chunked_prefill=False, max_num_batched_tokens=64)
    client = core.open()
    for slot in range(3):
        client.add(slot, [4 + slot] * 40, max_tokens=3)
    core.loop.turn()
    assert set(client.tokens()) == {0}
    core.run_until_idle()
    assert len(client.finishes()) == 3


def test_stop_token_ids_end_a_request_and_are_named():
    core = SteppedCore()
    client = core.open()
    client.add(0, [4, 5, 6], max_tokens=10)
    core.run_until_idle()
    tokens = client.tokens()[0]
    index = next(i for i, token in enumerate(tokens) if token not in tokens[:i] and i >= 2)
    client.add(1, [4, 5, 6], max_tokens=10, stop_token_ids=(tokens[index],))
    client.add(2, [4, 5, 6], max_tokens=10, stop_token_ids=(tokens[index],), min_tokens=index + 1)
    core.run_until_idle()
    finishes = {finish.slot: finish for finish in client.finishes()}
    assert client.tokens()[1] == tokens[: index + 1]
    assert (finishes[1].reason, finishes[1].stop_token) == (FinishReason.STOP, tokens[index])
    assert len(client.tokens()[2]) > index + 1


def test_min_tokens_puts_off_the_end_of_sequence():
    core = SteppedCore(model(eos_after_tokens=2))
    client = core.open()
    client.add(0, [4, 5], max_tokens=6)
    client.add(1, [4, 5], max_tokens=6, min_tokens=2)
    client.add(2, [4, 5], max_tokens=6, ignore_eos=True)
    core.run_until_idle()
    assert {slot: len(tokens) for slot, tokens in client.tokens().items()} == {0: 2, 1: 6, 2: 6}


def test_a_client_that_leaves_takes_only_its_own_requests():
    core = SteppedCore()
    leaving, staying = core.open(), core.open()
    leaving.add(0, [4, 5, 6], max_tokens=50)
    staying.add(0, [4, 5, 6], max_tokens=5)
    core.loop.turn()
    leaving.send(Goodbye())
    core.run_until_idle()
    assert leaving.finishes() == []
    assert [finish.reason for finish in staying.finishes()] == [FinishReason.LENGTH]
    assert core.loop.stats().num_running == 0


def test_a_vanished_client_is_freed_while_its_requests_wait_and_run():
    core = SteppedCore(max_num_seqs=1)
    client = core.open()
    for slot in range(3):
        client.add(slot, [4, 5, slot + 3], max_tokens=50)
    core.loop.turn()
    core.inbox.put((1, ClientGone()))
    core.run_until_idle()
    assert core.loop.stats().num_waiting == 0


def test_a_failed_row_fails_its_request_only_and_its_blocks_are_not_reused():
    core = SteppedCore(model(fail_token_id=9))
    client = core.open()
    client.add(0, [9] * 12, max_tokens=5)
    client.add(1, [4] * 12, max_tokens=5)
    core.run_until_idle()
    finishes = {finish.slot: finish for finish in client.finishes()}
    assert finishes[0].reason == FinishReason.FAILED
    assert "told to fail" in finishes[0].failure.message
    assert finishes[1].reason == FinishReason.LENGTH
    client.add(2, [9] * 12, max_tokens=5)
    core.run_until_idle()
    assert client.cached()[2] == 0


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([], {}, "empty"),
        ([3] * 64, {}, "64 tokens; with max_model_len 64 at most 63"),
        ([3, 100, 4], {}, r"prompt_token_ids[1] is 100, outside the vocabulary of 100"),
        ([3], {"allowed_token_ids": (5, 100)}, "allowed_token_ids has token 100, outside the vocabulary of 100"),
        ([3], {"bad_words": ((5,), (6, -1))}, "bad_words is -1; it must lie in [0, 2147483647]"),
        ([3], {"bad_words": ((5,), ())}, "bad_words has a word of no tokens"),
        ([3], {"logit_bias": {100: 1.0}}, "logit_bias has token 100, outside the vocabulary of 100"),
        ([3], {"logit_bias": {5: math.inf}}, "; it must lie in [-inf, 1e+09]"),
        ([3], {"logit_bias": {5: math.nan}}, "; it must lie in [-inf, 1e+09]"),
        ([3, -1], {}, r"prompt_token_ids[1] is -1"),
        ([3], {"temperature": float("nan")}, "temperature is nan"),
        ([3], {"temperature": -1.0}, "temperature is -1.0"),
        ([3], {"top_p": 0.0}, "top_p is 0.0"),
        ([3], {"top_k": -5}, "top_k is -5"),
        ([3], {"max_tokens": 0}, "max_tokens is 0"),
        ([3], {"min_tokens": 9}, "min_tokens is 9"),
        ([3], {"logprobs": 21}, "logprobs is 21"),
        ([3], {"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
    ],
)
def test_a_bad_request_is_rejected_by_name_and_disturbs_nobody(prompt, sampling, words):
    core = SteppedCore()
    client = core.open()
    client.add(0, [4, 5], max_tokens=3)
    client.add(1, prompt, **sampling)
    core.run_until_idle()
    finishes = {finish.slot: finish for finish in client.finishes()}
    assert finishes[1].reason == FinishReason.REJECTED
    assert words in finishes[1].failure.message
    assert finishes[0].reason == FinishReason.LENGTH


def test_a_full_queue_rejects_with_a_time_to_come_back():
    core = SteppedCore(max_num_seqs=1, max_waiting_requests=2)
    client = core.open()
    for slot in range(4):
        client.add(slot, [4, 5], max_tokens=3)
    core.run_until_idle()
    reasons = {finish.slot: finish.reason for finish in client.finishes()}
    rejected = [slot for slot, reason in reasons.items() if reason == FinishReason.REJECTED]
    assert rejected == [2, 3]
    assert all(f.failure.retry_after_s >= 1 for f in client.finishes() if f.failure)


def test_limits_that_could_never_run_a_request_are_refused():
    plan, _ = make_plan()
    config = SchedulerConfig(num_blocks=16, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32)
    with pytest.raises(ValueError, match="15 blocks of 4 tokens cannot hold one request of max_model_len 64; 16"):
        Scheduler(config)
    assert plan.block_size == config.block_size


@given(st.integers(1, 10_000), st.integers(0, 4096), st.integers(1, 4096), st.booleans())
def test_a_prefill_share_is_positive_and_within_the_budget(missing, budget, step, others_wait):
    share = prefill_share(missing, budget, PrefillLimits(step), others_wait)
    assert 0 <= share <= min(missing, budget)
    assert share > 0 or budget == 0


def test_a_waiting_request_that_is_removed_is_no_longer_set_aside() -> None:
    queue, requests = WaitingQueue(), [_waiting(arrival) for arrival in range(3)]
    for request in requests:
        queue.push(request)
    queue.set_aside()
    queue.set_aside()
    queue.remove(requests[0])
    assert (queue.aside, len(queue)) == ([requests[1]], 2)
    queue.take_back()
    assert [queue.pop() for _ in range(2)] == requests[1:]
    assert (queue.aside, len(queue)) == ([], 0)


def _waiting(arrival: int) -> Request:
    prompt = np.array([1], np.int32)
    task = Generate(sampling=Sampling(max_tokens=1))
    request = Request(client=1, slot=arrival, request_id="", token_ids=prompt, task=task, seed=0)
    request.arrival, request.order = arrival, (0, arrival)
    return request
