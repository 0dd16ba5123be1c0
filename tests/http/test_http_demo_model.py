"""The demo model over HTTP: the same text as LLM's, exact usage, and transformers' log-probabilities."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from http_server import Server, address_of_engine, ask, metric, serving, stream

from headrace import LLM, SamplingParams, connect

pytestmark = pytest.mark.demo_model

PROMPTS = ["The capital of France is", "Water flows downhill because", "😀 ü 世界:"]
MESSAGES: list[Any] = [{"role": "user", "content": "Why is the sky blue?"}]
MAX_TOKENS = 10


@pytest.fixture(scope="module")
def server(demo_model_path: Path) -> Iterator[Server]:
    options = ("--model", str(demo_model_path), "--served-model-name", "demo", "--max-model-len", "512")
    with serving(*options, "--dtype", "float32", "--enable-tokenizer-info-endpoint", attached=True) as server:
        yield server


@pytest.fixture(scope="module")
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


@pytest.fixture(scope="module")
def llm(server: Server) -> Iterator[LLM]:
    """On the very engine of the server."""
    with connect(address_of_engine(server)) as llm:
        yield llm


def test_greedy_completions_are_llms(sdk, llm):
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    ours = llm.generate(PROMPTS, params, use_tqdm=False)
    answer = sdk.completions.create(model="demo", prompt=PROMPTS, max_tokens=MAX_TOKENS, temperature=0)
    assert [choice.text for choice in answer.choices] == [output.outputs[0].text for output in ours]
    assert answer.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in ours)
    assert answer.usage.completion_tokens == sum(len(output.outputs[0].token_ids) for output in ours)


def test_an_output_that_repeats_itself_ends_with_that_reason(server):
    loop = {"logit_bias": {"77": 100}, "repetition_detection": {"max_pattern_size": 2, "min_count": 4}}
    body = {"prompt": [5], "max_tokens": 60, "return_token_ids": True} | loop
    chat = {"model": "demo", "messages": MESSAGES, "max_tokens": 60} | loop
    with server.client() as client:
        counted = functools.partial(metric, client, "headrace:request_success_total", finished_reason="repetition")
        before = counted()
        choice = ask(client, "/v1/completions", **body)["choices"][0]
        assert (choice["token_ids"], choice["finish_reason"]) == ([77] * 4, "repetition")
        assert stream(client, "/v1/completions", body)[-1]["choices"][0]["finish_reason"] == "repetition"
        assert ask(client, "/v1/chat/completions", **chat)["choices"][0]["finish_reason"] == "repetition"
        assert counted() == before + 3


def test_tokenizer_info_is_what_a_client_needs_to_render_and_cut_text(server, llm):
    with server.client() as client:
        info = client.get("/tokenizer_info").json()
    tokenizer = llm.get_tokenizer()
    assert (info["bos_token"], info["eos_token"]) == (tokenizer.bos_token, tokenizer.eos_token)
    assert info["chat_template"] == tokenizer.get_chat_template()
    assert info["model_max_length"] == 512


def test_chat_is_llms_chat(sdk, llm):
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    ours = llm.chat(MESSAGES, params, use_tqdm=False)[0]
    ask = {"model": "demo", "messages": MESSAGES, "max_tokens": MAX_TOKENS, "temperature": 0}
    whole = sdk.chat.completions.create(**ask)
    assert whole.choices[0].message.content == ours.outputs[0].text
    assert whole.usage.prompt_tokens == len(ours.prompt_token_ids)
    events = sdk.chat.completions.create(**ask, stream=True)
    assert "".join(event.choices[0].delta.content for event in events) == ours.outputs[0].text


def test_a_seeded_sample_is_llms(sdk, llm):
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=MAX_TOKENS)
    ours = llm.generate(PROMPTS[:1], params, use_tqdm=False)[0]
    answer = sdk.completions.create(
        model="demo", prompt=PROMPTS[0], temperature=0.8, top_p=0.9, seed=7, max_tokens=MAX_TOKENS
    )
    assert answer.choices[0].text == ours.outputs[0].text


def test_the_process_that_speaks_http_is_small(server, sdk):
    """With the model's own tokenizer and template in use; torch and numpy are the engine's alone."""
    sdk.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=2)
    with server.client() as client:
        assert client.get("/metrics").status_code == client.get("/docs").status_code == 200
    process = psutil.Process(server.process.pid)
    assert process.memory_info().rss < 120e6
    mapped = {Path(region.path).name for region in process.memory_maps()}
    assert not [name for name in mapped if "torch" in name or "numpy" in name or "multiarray" in name]
    assert any("tokenizers" in name for name in mapped)


@pytest.mark.system
def test_log_probabilities_are_transformers(sdk, server, demo_model_path):
    """Of a prompt, as lm-eval asks for them (echo), and of what is generated after it; in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from headrace.executor.checkpoints.sources.gguf.file import GGUFFile

    file = GGUFFile(demo_model_path)
    weights = file.weights()
    model = LlamaForCausalLM(LlamaConfig(**file.config)).eval()
    model.load_state_dict({name: weights.get(name) for name in weights.names()}, strict=False)
    with server.client() as client:
        token_ids = client.post("/tokenize", json={"prompt": PROMPTS[0] + " Paris, and"}).json()["tokens"]
    ask = {"model": "demo", "prompt": token_ids, "logprobs": 1, "max_tokens": MAX_TOKENS, "temperature": 0}
    (choice,) = sdk.completions.create(**ask, echo=True, extra_body={"return_token_ids": True}).choices
    told, num_prompt = choice.logprobs, len(token_ids)
    token_ids = token_ids + choice.token_ids
    assert len(told.token_logprobs) == len(token_ids) == num_prompt + MAX_TOKENS
    with torch.inference_mode():
        logprobs = model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)
    assert told.token_logprobs[0] is None
    for position, token_id in enumerate(token_ids[1:], 1):
        assert told.token_logprobs[position] == pytest.approx(logprobs[position - 1, token_id].item(), abs=1e-3)
        best = logprobs[position - 1].max().item()
        assert max(told.top_logprobs[position].values()) == pytest.approx(best, abs=1e-3)
