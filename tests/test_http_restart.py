"""An engine that dies: its clients hear why, and where that was asked for it is started again.

What it had not begun to answer is then answered by the next.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from http_server import address_of_engine, engine_of, metric, serving, wait_until
from test_http_lifecycle import COMPLETIONS, ENDLESS, SLOW, streaming


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_an_engine_that_dies_ends_its_streams_with_the_cause_and_the_server(processes, how):
    cause = {"raises": "told to crash", "is killed": "was killed by signal 9"}[how]
    options = ("--api-server-count", processes)
    with serving(*options, null_model={**SLOW, "crash_token_id": 99}) as server, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(streaming(stack.enter_context(server.client()))) for _ in range(6)]
        pool = stack.enter_context(ThreadPoolExecutor(1))
        if how == "raises":
            asked: dict[str, Any] = {"prompt": [5, 99]}
        else:
            asked = ENDLESS
        whole = pool.submit(stack.enter_context(server.client()).post, COMPLETIONS, json=asked)
        if how == "is killed":
            with server.client() as watcher:
                wait_until(lambda: metric(watcher, "headrace:num_requests_running") == 7, 10, "all to run")
            engine_of(server).kill()
        for lines in streams:
            *_, last, done = [line for line in lines if line]
            assert cause in last
            assert '"code":"engine_dead"' in last
            assert done == "data: [DONE]"
        answer = whole.result(10)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert cause in answer.json()["error"]["message"]
        assert server.wait_exit() == 70
        assert "the engine has ended: " in server.log


def test_servers_that_attached_end_with_their_engine():
    """Nobody can tell them the signal, but what this host shows of the process."""
    with serving(null_model=SLOW) as owner:
        address = address_of_engine(owner)
        with (
            serving("--engine", address, "--api-server-count", "2", attached=True) as server,
            server.client() as client,
            streaming(client) as lines,
        ):
            engine = engine_of(owner)
            engine.kill()
            last_event = [line for line in lines if line][-2]
            assert '"code":"engine_dead"' in last_event
            assert f"its process {engine.pid} ended without a word, as one does that is killed" in last_event
            assert server.wait_exit() == 70
            assert server.log.count("the engine has ended: ") == 1


@pytest.mark.parametrize("processes", ["1", "2"])
def test_an_engine_is_started_again_when_that_was_asked_for(processes):
    with (
        serving("--restart-engine", "2", "--api-server-count", processes, null_model=SLOW) as server,
        server.client() as client,
    ):
        with streaming(client) as lines:
            engine_of(server).kill()
            assert "was killed by signal 9" in [line for line in lines if line][-2]
        answers = []

        def served() -> bool:
            answers.append(client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 2}))
            return answers[-1].status_code == 200

        wait_until(served, 20, "the engine's return")
        assert {answer.status_code for answer in answers[:-1]} <= {503}
        server.signal()
        assert server.wait_exit() == 0


@pytest.mark.parametrize("processes", ["1", "2"])
def test_requests_that_brought_nothing_are_sent_to_the_engine_that_takes_over(processes):
    arguments = ("--restart-engine", "1", "--max-num-seqs", "1", "--api-server-count", processes)
    with (
        serving(*arguments, null_model=SLOW) as server,
        server.client() as client,
        server.client() as other,
        server.client() as watcher,
    ):
        asked = {"prompt": [7, 8], "max_tokens": 5, "ignore_eos": True, "logprobs": 0}
        expected = other.post(COMPLETIONS, json=asked).json()["choices"][0]["logprobs"]["tokens"]
        with ThreadPoolExecutor(1) as pool, streaming(client) as lines:
            waiting = pool.submit(other.post, COMPLETIONS, json=asked, timeout=30)
            wait_until(lambda: metric(watcher, "headrace:num_requests_waiting") == 1, 10, "a request that waits")
            engine_of(server).kill()
            assert '"code":"engine_dead"' in [line for line in lines if line][-2]
            answer = waiting.result(30)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["logprobs"]["tokens"] == expected


def test_a_request_that_kills_engines_is_sent_again_once():
    with serving("--restart-engine", "3", null_model={"crash_token_id": 9}) as server, server.client() as client:
        answer = client.post(COMPLETIONS, json={"prompt": [9], "max_tokens": 5}, timeout=30)
        assert answer.status_code in (500, 503)
        assert "told to crash" in answer.json()["error"]["message"]
        server.wait_log("are sent to the new engine(.|\n)*starting the engine again")


@pytest.mark.parametrize("processes", ["1", "2"])
def test_an_engine_that_dies_too_often_ends_the_server_and_fails_what_waited_with_the_cause(processes):
    options = ("--restart-engine", "1", "--api-server-count", processes)
    with serving(*options, null_model={"crash_step": 1}) as server, server.client() as client:
        answer = client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 5}, timeout=30)
        assert "told to crash in step 1" in answer.json()["error"]["message"]
        assert server.wait_exit() == 70
