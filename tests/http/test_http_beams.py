"""Beam search and best_of over HTTP: what is found is what `LLM.beam_search` finds, in the form of any other answer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_models
from http_server import Server, ask, events_of, serving

from headrace import LLM, BeamSearchOutput, BeamSearchParams, SamplingParams

PROMPT = "the water of the mill"
ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "block_size": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("beams") / "model", tokenizer=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    with serving(str(folder), *flags, "--served-model-name", "m", attached=True) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def found_by(llm: LLM, prompt: str = PROMPT, **params: Any) -> BeamSearchOutput:
    (found,) = llm.beam_search([prompt], BeamSearchParams(**params))
    return found


def new_tokens(llm: LLM, found: BeamSearchOutput, prompt: str = PROMPT) -> list[list[int]]:
    start = len(llm.get_tokenizer().encode(prompt))
    return [each.tokens[start:] for each in found.sequences]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5])
def test_the_beams_of_completions_are_those_of_beam_search(llm: LLM, client: httpx.Client, penalty: float) -> None:
    found = found_by(llm, beam_width=4, max_tokens=9, length_penalty=penalty)
    body = {"prompt": PROMPT, "n": 4, "max_tokens": 9, "temperature": 0, "use_beam_search": True}
    shown_as = {"logprobs": 3, "return_token_ids": True, "return_tokens_as_token_ids": True}
    answer = ask(client, "/v1/completions", **body, **shown_as, length_penalty=penalty)
    choices = answer["choices"]
    assert [each["index"] for each in choices] == [0, 1, 2, 3]
    assert [each["token_ids"] for each in choices] == new_tokens(llm, found)
    assert [each["finish_reason"] for each in choices] == [each.finish_reason for each in found.sequences]
    for choice, sequence in zip(choices, found.sequences, strict=True):
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(sequence.cum_logprob, abs=1e-4)
        assert all(len(each) in (3, 4) for each in choice["logprobs"]["top_logprobs"])
        shown = choice["token_ids"][: -1 if sequence.finish_reason == "stop" else None]
        assert choice["text"] == llm.get_tokenizer().decode(shown)
    assert answer["usage"]["completion_tokens"] == sum(len(each["token_ids"]) for each in choices)


def test_several_prompts_and_a_width_beyond_n(llm: LLM, client: httpx.Client) -> None:
    prompts = [PROMPT, "a stone"]
    answer = ask(
        client,
        "/v1/completions",
        **{"prompt": prompts, "n": 2, "best_of": 5, "max_tokens": 6, "use_beam_search": True, "return_token_ids": True},
    )
    expected = [
        tokens
        for prompt in prompts
        for tokens in new_tokens(llm, found_by(llm, prompt, beam_width=5, max_tokens=6), prompt)[:2]
    ]
    assert [each["token_ids"] for each in answer["choices"]] == expected
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_of_beams_gives_what_the_whole_answer_has(client: httpx.Client, path: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 7, "n": 3, "use_beam_search": True, "ignore_eos": True}
    asked |= {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    whole = ask(client, path, **asked)
    with client.stream("POST", path, json={**asked, "stream": True}) as response:
        events = events_of(response)
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    expected = [each["text"] if "text" in each else each["message"]["content"] for each in whole["choices"]]
    assert [texts[index] for index in range(3)] == expected
    assert len(set(expected)) == 3


def test_chat_without_a_limit_searches_to_the_models_length(client: httpx.Client) -> None:
    answer = ask(
        client,
        "/v1/chat/completions",
        **{"messages": [{"role": "user", "content": PROMPT}], "use_beam_search": True, "ignore_eos": True},
    )
    assert answer["usage"]["total_tokens"] == ENGINE["max_model_len"]
    assert answer["choices"][0]["finish_reason"] == "length"


def test_best_of_gives_the_likeliest_of_what_is_sampled(llm: LLM, client: httpx.Client) -> None:
    sampled = SamplingParams(n=6, temperature=1.0, seed=5, max_tokens=8, logprobs=0)
    (output,) = llm.generate([PROMPT], sampled, use_tqdm=False)
    ranked = sorted(output.outputs, key=lambda each: (each.cumulative_logprob or 0.0) / len(each.token_ids))
    body = {"prompt": PROMPT, "n": 2, "best_of": 6, "temperature": 1.0, "seed": 5, "max_tokens": 8}
    answer = ask(client, "/v1/completions", **body)
    assert [each["text"] for each in answer["choices"]] == [each.text for each in reversed(ranked[-2:])]
    assert [each["index"] for each in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"n": 40}, "n", "needs twice as many log-probabilities"),
        ({"n": 3, "best_of": 2}, "best_of", "less than n"),
        ({"n": 2, "logprobs": 5}, "logprobs", "knows the likeliest 4"),
        ({"min_p": 0.5}, "min_p", "does nothing with use_beam_search"),
        ({"stop": "x"}, "stop", "does nothing with use_beam_search"),
        ({"guided_regex": "x"}, "guided_regex", "does nothing with use_beam_search"),
        ({"response_format": {"type": "json_object"}}, "response_format", "does nothing with use_beam_search"),
        ({"structured_outputs": {"regex": "x"}}, "structured_outputs.regex", "does nothing with use_beam_search"),
        ({"echo": True, "logprobs": 1}, "echo", "does nothing with use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "does nothing with use_beam_search"),
        ({"early_stopping": True}, "early_stopping", "goes on until"),
        ({"prompt": [100_000]}, "prompt", "100000"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty", "needs use_beam_search"),
        ({"use_beam_search": False, "best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"use_beam_search": False, "best_of": 100_000}, "best_of", "at most"),
    ],
)
def test_what_a_search_cannot_do_is_refused_by_name(
    client: httpx.Client, fields: dict[str, Any], param: str, said: str
) -> None:
    response = client.post("/v1/completions", json={"prompt": PROMPT, "use_beam_search": True, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert said in error["message"]


def test_what_asks_for_nothing_is_taken_with_beams(client: httpx.Client) -> None:
    neutral = {"top_p": 1.0, "top_k": -1, "presence_penalty": 0.0, "stop": [], "seed": 3, "logit_bias": None}
    body = {"prompt": PROMPT, "n": 2, "max_tokens": 4, "use_beam_search": True}
    assert (
        ask(client, "/v1/completions", **body, **neutral)["choices"]
        == ask(client, "/v1/completions", **body)["choices"]
    )


@pytest.mark.system
def test_a_batch_file_searches_too(folder: Path, llm: LLM, tmp_path: Path) -> None:
    body = {"model": "m", "prompt": PROMPT, "n": 2, "max_tokens": 5, "use_beam_search": True, "return_token_ids": True}
    sampled = {"model": "m", "prompt": PROMPT, "n": 1, "best_of": 3, "max_tokens": 5, "seed": 1, "temperature": 1}
    lines = [
        {"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": each}
        for index, each in enumerate((body, sampled))
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--served-model-name", "m"]
    command = [sys.executable, "-m", "headrace", "run-batch", *files, "--model", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    results = {each["custom_id"]: each for each in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    choices = results["0"]["response"]["body"]["choices"]
    expected = new_tokens(llm, found_by(llm, beam_width=2, max_tokens=5))
    assert [each["token_ids"] for each in choices] == expected
    assert len(results["1"]["response"]["body"]["choices"]) == 1
