"""The newcomer's two commands: `headrace serve -dp 2`, and `kill -9` of an engine while streams run."""

from __future__ import annotations

import asyncio
import functools
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from http_server import Server, engines_of, events_of, metric, serving
from null_with_tokenizer import DEADLY_FORM
from patience import wait_until

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.ipc.failure import InvalidRequestError, OptionError

COMPLETIONS = "/v1/completions"
SLOW = {"step_delay_s": 0.02}
NUM_TOKENS = 300


def asked(number: int) -> dict[str, Any]:
    return {
        "prompt": [5, 6, 7 + number],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 1,
        "n": 1 + number % 2,
        "seed": number,
    }


def tokens_of(events: list[Any]) -> dict[int, list[str]]:
    tokens: dict[int, list[str]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        tokens.setdefault(choice["index"], []).extend((choice["logprobs"] or {"tokens": []})["tokens"])
    return tokens


def stream(server: Server, number: int, **fields: Any) -> dict[int, list[str]]:
    with server.client() as client, client.stream("POST", COMPLETIONS, json=asked(number) | fields) as response:
        assert response.status_code == 200
        return tokens_of(events_of(response))


@functools.cache
def undisturbed() -> list[dict[int, list[str]]]:
    """What the first six streams say: of any engine, since its tokens follow from prompt, seed and position."""
    with serving(null_model={}) as server, ThreadPoolExecutor(6) as pool:
        return list(pool.map(lambda each: stream(server, each), range(6)))


def busy_engine(server: Server, client: Any) -> psutil.Process:
    """One that has requests: the router may have given all to the other."""
    running = [metric(client, "headrace:num_requests_running", engine=str(rank)) for rank in range(2)]
    assert any(running)
    return sorted(engines_of(server), key=psutil.Process.create_time)[running.index(max(running))]


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.system)])
def test_streams_of_an_engine_that_is_killed_or_stopped_go_on_unchanged(number: signal.Signals) -> None:
    with serving("-dp", "2", null_model=SLOW) as server, server.client() as client, ThreadPoolExecutor(6) as pool:
        expected = undisturbed()
        assert {len(tokens) for each in expected for tokens in each.values()} == {NUM_TOKENS}
        assert len(engines_of(server)) == 2
        streams = [pool.submit(stream, server, each) for each in range(6)]
        wait_until(lambda: client.get("/load").json()["server_load"] == 6, 30, "all to run")
        victim = busy_engine(server, client)
        victim.send_signal(number)
        assert [each.result(60) for each in streams] == expected
        server.wait_log(r"moved from engine [01] to engine [01] \((died|silent)\)")
        reason = "died" if number == signal.SIGKILL else "silent"
        num_moved = metric(client, "headrace:router_migrations_total", reason=reason)
        assert num_moved > 0
        assert 0 < metric(client, "headrace:router_gap_seconds_count") <= num_moved
        stood_still_s = metric(client, "headrace:router_gap_seconds_sum") / num_moved
        assert stood_still_s > (0.0 if number == signal.SIGKILL else 1.0), "a stopped one is suspected after 2 s"
        assert metric(client, "headrace:router_choices_total") == 6
        if number == signal.SIGKILL:
            wait_until(lambda: len(engines_of(server)) == 2, 20, "the engine that takes its place")
            wait_until(lambda: metric(client, "headrace:engine_up") == 2, 20, "its return")
        else:
            server.wait_log(r"engine [01] at ipc://\S+ says nothing; it may be stopped")
            victim.send_signal(signal.SIGCONT)
            again = pool.submit(stream, server, 1)
            server.wait_log(r"engine [01] at ipc://\S+ has recovered: it was silent")
            assert again.result(60) == expected[1]


@pytest.mark.system
def test_requests_whose_engines_are_killed_at_the_same_moment_are_not_blamed() -> None:
    """They wait for an engine that is started again: moved to the other, whose end is not known yet, one would lose
    two."""
    with serving("-dp", "2", null_model=SLOW) as server, server.client() as client, ThreadPoolExecutor(2) as pool:
        expected = [undisturbed()[each] for each in (0, 2)]
        again = [pool.submit(stream, server, each) for each in (0, 2)]
        for rank in ("0", "1"):
            wait_until(lambda at=rank: metric(client, "headrace:num_requests_running", engine=at) == 1, 30, "both")
        server.signal(signal.SIGSTOP)  # so it hears of both deaths at once
        for engine in engines_of(server):
            engine.kill()
        wait_until(lambda: not engines_of(server), 30, "their end")
        server.signal(signal.SIGCONT)
        assert [each.result(60) for each in again] == expected
        assert metric(client, "headrace:router_quarantined_total") == 0


def test_a_request_that_kills_its_engines_fails_with_the_cause_and_no_third_is_risked() -> None:
    with serving("-dp", "3", null_model={"crash_token_id": 99}) as server, server.client() as client:
        before = {each.pid for each in engines_of(server)}
        failed = client.post(COMPLETIONS, json={"prompt": [5, 99], "max_tokens": 2})
        assert failed.status_code == 503
        assert "two engines died" in failed.json()["error"]["message"]
        assert metric(client, "headrace:router_quarantined_total") == 1
        assert client.post(COMPLETIONS, json={"prompt": [5, 6], "max_tokens": 2}).status_code == 200
        wait_until(lambda: metric(client, "headrace:engine_up") == 3, 30, "those that died to be there again")
        assert len(before & {each.pid for each in engines_of(server)}) == 1


@pytest.mark.system
@pytest.mark.parametrize(
    "engines",
    [
        pytest.param(("-dp", "2"), id="two engines"),
        pytest.param(("--restart-engine", "5"), id="one that restarts"),
    ],
)
def test_a_form_that_kills_deep_in_its_answer_ends_no_other_stream(engines: tuple[str, str]) -> None:
    deadly = {"structured_outputs": {"regex": "[a-z]{200}"}, "prompt": "go on", "max_tokens": 200}
    arguments = (*engines, "--distributed-executor-backend", DEADLY_FORM)
    with serving(*arguments, null_model=SLOW) as server, server.client() as client, ThreadPoolExecutor(6) as pool:
        expected = undisturbed()
        streams = [pool.submit(stream, server, each) for each in range(6)]
        wait_until(lambda: client.get("/load").json()["server_load"] == 6, 30, "all to run")
        failed = client.post(COMPLETIONS, json=deadly, timeout=120)
        assert failed.status_code == 503
        assert "died while running this request" in failed.json()["error"]["message"]
        assert [each.result(120) for each in streams] == expected
        assert metric(client, "headrace:router_quarantined_total") == 1


@pytest.mark.system
def test_hit_rates_that_were_expected_stand_beside_those_that_came() -> None:
    prompt = list(range(5, 165))  # ten blocks
    with serving("-dp", "2", null_model={}) as server, server.client() as client:
        for _ in range(3):
            assert client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 2}).status_code == 200
        tokens = {
            kind: metric(client, "headrace:router_prompt_tokens_total", reason=kind)
            for kind in ("all", "expected", "cached")
        }
        assert tokens["all"] == 480
        assert tokens["expected"] == 2 * 128, "two chunks of 64, of all but the first request"
        assert 256 <= tokens["cached"] < 320


def test_a_request_may_name_its_engine_or_share_one_by_a_key() -> None:
    with serving("-dp", "2", null_model={}) as server, server.client() as client:

        def ask(headers: dict[str, str] | None = None, **more: Any) -> Any:
            return client.post(COMPLETIONS, json={"prompt": [5, 6], "max_tokens": 2, **more}, headers=headers)

        def chosen(reason: str) -> float:
            return metric(client, "headrace:router_choices_total", reason=reason)

        assert ask(data_parallel_rank=1).status_code == ask({"X-data-parallel-rank": "1"}).status_code == 200
        assert (chosen("rank"), metric(client, "headrace:request_success_total", engine="1")) == (2, 2)
        for bad, words in (({"data_parallel_rank": 2}, "2 engines"), ({"data_parallel_rank": -1}, "of rank 0, 1")):
            refused = ask(**bad)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "data_parallel_rank")
            assert words in refused.json()["error"]["message"]
        assert ask({"X-data-parallel-rank": "one"}).status_code == 400
        assert [ask(prompt_cache_key="talk").status_code for _ in range(3)] == [200] * 3
        assert chosen("session") == 2


def test_a_batch_of_llm_survives_the_death_of_an_engine() -> None:
    null: dict[str, Any] = {"distributed_executor_backend": "headrace.executor.testing.null:NullExecutor"}
    params = [SamplingParams(max_tokens=60, ignore_eos=True, seed=each) for each in range(12)]
    prompts = [[5, each] for each in range(12)]
    with LLM(
        "null", data_parallel_size=2, skip_tokenizer_init=True, hf_overrides={"step_delay_s": 0.02}, **null
    ) as llm:
        expected = [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]
        daemons = [each for each in psutil.Process().children() if "headrace.core.process.daemon" in each.cmdline()]
        assert len(daemons) == 2
        cores = [set(each.cpu_affinity()) for each in daemons]  # type: ignore[attr-defined]
        assert len(psutil.Process().cpu_affinity()) < 2 or not cores[0] & cores[1]  # type: ignore[attr-defined]
        llm.enqueue(prompts, params)
        wait_until(lambda: llm.get_stats().num_generated_tokens > 12 * 60 + 24, 20, "tokens of all")
        daemons[0].kill()
        outputs = llm.wait_for_completion(use_tqdm=False)
        assert [each.outputs[0].token_ids for each in outputs] == expected


def test_metrics_of_several_engines_are_each_engines_own() -> None:
    null: dict[str, Any] = {"distributed_executor_backend": "headrace.executor.testing.null:NullExecutor"}
    prompts = [[5, each, 7] for each in range(8)]
    with LLM("null", data_parallel_size=2, skip_tokenizer_init=True, **null) as llm:
        llm.generate(prompts, SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
        found = llm.get_metrics()

    def by_engine(name: str) -> dict[str, Any]:
        return {each.labels["engine"]: each for each in found if each.name == f"vllm:{name}"}

    tokens, requests = by_engine("generation_tokens"), by_engine("request_generation_tokens")
    assert tokens.keys() == requests.keys() == {"0", "1"}
    assert sum(each.value for each in tokens.values()) == 8 * 5
    assert [each.value for each in tokens.values()] == [each.sum for each in requests.values()]
    assert all(each.value for each in tokens.values()), "both had some"


def test_two_fresh_engines_share_equal_requests_and_each_is_had_by_its_rank() -> None:
    """After one that was measured at an engine, which must not draw all to itself."""
    null: dict[str, Any] = {"distributed_executor_backend": "headrace.executor.testing.null:NullExecutor"}
    params = SamplingParams(max_tokens=100, ignore_eos=True)

    async def main() -> list[int]:
        llm = AsyncLLM(
            "null",
            data_parallel_size=2,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            hf_overrides={"step_delay_s": 0.01},
            **null,
        )
        try:
            async for _ in llm.generate({"prompt_token_ids": list(range(5, 120))}, params, "first"):
                pass
            streams = [llm.generate({"prompt_token_ids": [5, 6, 7]}, params, str(each)) for each in range(4)]
            await asyncio.gather(*(anext(each) for each in streams))
            members = [llm._client.route_of(str(each)).member for each in range(4)]
            await asyncio.gather(*(llm.abort(str(each)) for each in range(4)))
            for rank in (1, 0, 1):
                named = llm.generate({"prompt_token_ids": [5]}, params, f"of {rank}", data_parallel_rank=rank)
                await anext(named)
                assert llm._client.route_of(f"of {rank}").member.facts.rank == rank  # type: ignore[union-attr]
                await named.aclose()
            with pytest.raises(InvalidRequestError, match="data_parallel_rank is 2, and there are 2 engines"):
                await anext(llm.generate({"prompt_token_ids": [5]}, params, data_parallel_rank=2))
            return sorted(each.facts.rank for each in members if each is not None)
        finally:
            await llm.close()

    assert asyncio.run(main()) == [0, 0, 1, 1]


def test_what_cannot_be_several_engines_is_refused() -> None:
    with pytest.raises(OptionError, match="leave in_process out"):
        LLM("null", in_process=True, data_parallel_size=2)
    with pytest.raises(OptionError, match="data_parallel_rank=1: all of data_parallel_size are started here"):
        LLM("null", data_parallel_size=2, data_parallel_rank=1)
