"""The engine as a thread of the user's process: the same messages, the same answers, the same failures."""

from __future__ import annotations

import json
import threading

import pytest

from headrace import LLM, EngineDeadError, SamplingParams
from headrace.frontend.http.apis.openai.parameters import sampling_params
from headrace.frontend.http.apis.openai.requests import CompletionRequest
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.decoding.decoder import RequestDecoder
from headrace.frontend.request.checks import check
from headrace.frontend.request.parameters.sampling_params import RequestOutputKind
from headrace.frontend.request.prompts import Prompt
from headrace.ipc.failure import OptionError, RequestFailedError

NULL = {"distributed_executor_backend": "headrace.executor.testing.null:NullExecutor", "skip_tokenizer_init": True}


def test_a_thread_and_a_child_give_the_same_tokens():
    params = SamplingParams(max_tokens=20, temperature=0)
    prompts = [[5, 6, 7], [8], [9] * 40]
    answers = []
    for in_process in (True, False):
        with LLM("null", in_process=in_process, **NULL) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


# vLLM's tests/entrypoints/openai/test_stop_token_ids.py
def test_tokens_that_end_answers_may_be_set_for_all_requests():
    prompt, params = [5, 6, 7], SamplingParams(max_tokens=20, temperature=0)
    with LLM("null", in_process=True, **NULL) as llm:
        tokens = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    with LLM("null", in_process=True, override_generation_config={"eos_token_id": tokens[3]}, **NULL) as llm:
        (ended,) = llm.generate([prompt], params, use_tqdm=False)[0].outputs
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (tokens[:4], "stop", None)
    stops = {"temperature": 0, "max_tokens": 20, "stop_token_ids": [tokens[9], tokens[6]]}
    with LLM("null", in_process=True, override_generation_config=stops, **NULL) as llm:
        (stopped,) = llm.generate([prompt], use_tqdm=False)[0].outputs
        welcome = llm.engine
    assert (stopped.token_ids, stopped.stop_reason) == (tokens[:7], tokens[6])
    for given, joined in ((None, stops["stop_token_ids"]), ([1, tokens[6]], [1, tokens[6], tokens[9]])):
        body = {"model": "null", "prompt": prompt, "stop_token_ids": given}
        request = RequestDecoder(strict=True).decode(json.dumps(body).encode(), CompletionRequest)
        assert sampling_params(request, welcome, ServeOptions()).stop_token_ids == joined


# vLLM's tests/entrypoints/openai/chat_completion/test_serving_chat.py, of max_tokens
def test_a_server_gives_no_more_than_max_new_tokens():
    with LLM("null", in_process=True, override_generation_config={"max_new_tokens": 5}, **NULL) as llm:
        outputs = llm.generate([[5, 6, 7]], use_tqdm=False)
        welcome = llm.engine
    assert len(outputs[0].outputs[0].token_ids) == 5
    for asked, given in ((None, 5), (3, 3), (9, 5)):
        body = {"model": "null", "prompt": [5], "max_tokens": asked, "min_tokens": 2}
        request = RequestDecoder(strict=True).decode(json.dumps(body).encode(), CompletionRequest)
        chosen = sampling_params(request, welcome, ServeOptions(), max_tokens=asked)
        assert (chosen.max_tokens, chosen.min_tokens) == (given, 2)


def test_a_crash_ends_the_call_with_its_cause():
    with LLM("null", in_process=True, hf_overrides={"crash_token_id": 77}, **NULL) as llm:
        with pytest.raises(EngineDeadError, match="told to crash"):
            llm.generate([[77]], use_tqdm=False)
        with pytest.raises(EngineDeadError, match="told to crash"):
            llm.generate([[5]], use_tqdm=False)


def test_a_start_that_fails_leaves_no_thread():
    before = threading.active_count()
    with pytest.raises(OptionError, match="no_such"):
        LLM("null", in_process=True, hf_overrides={"no_such": 1}, **NULL)
    assert threading.active_count() == before


def test_closing_ends_the_threads():
    before = threading.active_count()
    LLM("null", in_process=True, **NULL).close()
    assert threading.active_count() == before


@pytest.mark.parametrize("kind", list(RequestOutputKind), ids=lambda kind: kind.name)
@pytest.mark.parametrize("params", [{}, {"n": 2}, {"max_tokens": 1}], ids=str)
def test_a_request_that_fails_raises_however_it_is_read(kind, params):
    params = SamplingParams(output_kind=kind, **params)
    with LLM("null", in_process=True, hf_overrides={"fail_token_id": 13}, **NULL) as llm:
        with pytest.raises(RequestFailedError):
            llm.generate([[5, 13]], params, use_tqdm=False)
        with pytest.raises(RequestFailedError):
            list(llm.stream([5, 13], params))
        with pytest.raises(RequestFailedError):
            llm._background.run(_last_output(llm._client, params))


async def _last_output(client, params):
    """As AsyncLLM.generate reads a request."""
    async for output in client.submit(check("own name", Prompt(token_ids=[5, 13]), params, client)):
        assert not output.finished
