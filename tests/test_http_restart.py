"""An engine that dies is started again, and what it had not begun to answer is answered by the next."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from http_server import engine_of, metric, serving, wait_until
from test_http_lifecycle import COMPLETIONS, SLOW, streaming


@pytest.mark.parametrize("processes", ["1", "2"])
def test_an_engine_is_started_again_when_that_was_asked_for(processes):
    with (
        serving("--restart-engine", "2", "--api-server-count", processes, null_model=SLOW) as server,
        server.client() as client,
    ):
        with streaming(client) as lines:
            engine_of(server).kill()
            assert '"code":"engine_dead"' in [line for line in lines if line][-2]
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


def test_an_engine_that_dies_too_often_ends_the_server_and_fails_what_waited_with_the_cause():
    with serving("--restart-engine", "1", null_model={"crash_step": 1}) as server, server.client() as client:
        answer = client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 5}, timeout=30)
        assert "told to crash in step 1" in answer.json()["error"]["message"]
        assert server.wait_exit() == 70
