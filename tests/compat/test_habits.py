"""Each line of the table of docs/coming-from-vllm.md, run; and what it says of AsyncLLM."""

from __future__ import annotations

import argparse
import ast
import asyncio
import dataclasses
import functools
import importlib
import inspect
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy
import openai
import pytest
from http_server import Server
from thinned import every
from tqdm import tqdm

from headrace import LLM, AsyncLLM, EngineArgs, EngineDeadError, InvalidRequestError, SamplingParams
from headrace.config import ReasoningConfig
from headrace.core.options.parsing import options_from_arguments, struct_from_arguments
from headrace.core.options.vllm_environment import take_vllm_variables
from headrace.frontend.cli.main import main
from headrace.frontend.http.options import ServeOptions, check_serve_options, with_environment
from headrace.utils import FlexibleArgumentParser
from headrace.v1.metrics.reader import Counter, Gauge, Histogram

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from-vllm.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|`]+) \| `(.+)` \|$", PAGE.partition("## Habits")[2].partition("\n## ")[0], re.MULTILINE)
COMMANDS = [row for row in ROWS if re.match(r"(\w+=\S+ )?headrace ", row[1])]
ASYNCHRONOUS = [row for row in ROWS if "engine." in row[1] and "llm_engine" not in row[1] and row not in COMMANDS]
HABITS = [row for row in ROWS if row not in COMMANDS and row not in ASYNCHRONOUS]
GREEDY = SamplingParams(temperature=0, max_tokens=4)
MESSAGES = [{"role": "user", "content": "hi"}]


def test_the_tables_are_found() -> None:
    assert len(HABITS) >= 20
    assert len(ASYNCHRONOUS) >= 15
    assert len(COMMANDS) >= 8


@pytest.fixture
def own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `import headrace.as_vllm` changes is as before after the test."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    monkeypatch.setenv("HEADRACE_AS_VLLM", "")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "vllm" or name == "headrace.as_vllm":
            del sys.modules[name]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize(("what", "line"), every(2, HABITS), ids=[what for what, _ in HABITS])
def test_a_habit_works_as_it_is_written(what: str, line: str, llm: LLM, client: openai.OpenAI) -> None:
    names: dict[str, Any] = {
        "LLM": LLM,
        "client": client,
        "import_module": importlib.import_module,
        "dataclasses": dataclasses,
        "msgspec": msgspec,
        "numpy": numpy,
        "llm": llm,
        "tokenizer": llm.get_tokenizer(),
        "greedy": GREEDY,
        "messages": MESSAGES,
        "functools": functools,
        "tqdm": tqdm,
        "Counter": Counter,
        "Histogram": Histogram,
        "EngineArgs": EngineArgs,
        "ReasoningConfig": ReasoningConfig,
        "calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        "FlexibleArgumentParser": FlexibleArgumentParser,
        "SamplingParams": SamplingParams,
    }
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = eval(line, names)
    assert result not in (False, []), what
    check_notes(what, warned)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def check_notes(what: str, warned: list[warnings.WarningMessage], printed: str = "") -> None:
    """A line that says so has a note about an option without effect, as a warning or printed."""
    if "with a note" in what:
        assert " has no effect: " in "\n".join([printed, *(str(each.message) for each in warned)]), what


def test_a_habit_of_async_llm_works_as_it_is_written(address: str) -> None:
    async def run() -> None:
        engine = await AsyncLLM.connect(address)
        names = {"engine": engine, "greedy": GREEDY, "EngineDeadError": EngineDeadError}
        for what, line in ASYNCHRONOUS:
            result = eval(compile(line, what, "eval", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
            if inspect.iscoroutine(result):
                result = await result
            assert result not in (False, None, []), what
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(("what", "line"), COMMANDS, ids=[what for what, _ in COMMANDS])
def test_a_command_is_taken_as_it_is_written(
    what: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line)
    environment: dict[str, str] = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    command = importlib.import_module(f"headrace.frontend.cli.commands.{words[1].replace('-', '_')}")
    ran: list[argparse.Namespace] = []

    def run(arguments: argparse.Namespace) -> int:
        ran.append(arguments)
        return 0

    monkeypatch.setattr(command, "run", run)
    assert main(words[1:]) == 0, capsys.readouterr().err
    (arguments,) = ran
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        options_from_arguments(arguments)
        if words[1] == "serve":
            take_vllm_variables(environment)
            serve_options = with_environment(struct_from_arguments(arguments, ServeOptions), environment)
            check_serve_options(serve_options)
            assert (serve_options.host == "0.0.0.0") == ("0.0.0.0" in line), what
    check_notes(what, warned, capsys.readouterr().err)


# tests/entrypoints/llm/test_generate.py, test_llm_enqueue
def test_what_is_enqueued_comes_in_order_and_once(llm: LLM) -> None:
    ids = llm.enqueue(["one", "two two", "three"], GREEDY)
    assert len(set(ids)) == 3
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [output.prompt for output in outputs] == ["one", "two two", "three"]
    assert all(output.finished for output in outputs)
    assert llm.wait_for_completion(use_tqdm=False) == []
    with pytest.raises(InvalidRequestError, match="lora_request must be a LoRARequest"):
        llm.enqueue("x", GREEDY, lora_request=object())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="output_type"):
        llm.wait_for_completion(dict)  # type: ignore[arg-type]


# tests/v1/metrics/test_engine_logger_apis.py, tests/v1/engine/test_llm_engine.py::test_engine_metrics
def test_metrics_are_objects_with_vllms_names_and_count(llm: LLM) -> None:
    def total(name: str) -> float:
        return next(m.value for m in llm.get_metrics() if isinstance(m, Counter | Gauge) and m.name == name)

    before = total("vllm:generation_tokens")
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert total("vllm:generation_tokens") == before + 8
    assert total("vllm:num_requests_running") == 0
    histograms = {m.name: m for m in llm.get_metrics() if isinstance(m, Histogram)}
    assert all(list(m.buckets)[-1] == "+Inf" and m.buckets["+Inf"] == m.count for m in histograms.values())
    steps = histograms["vllm:iteration_tokens_total"]
    assert steps.sum >= steps.count > 0
    assert any(m.name == "mine:prompt_tokens" for m in llm.get_metrics("mine"))


# examples/features/metrics_offline.py: which histograms there are is that of vLLM's loggers.
def test_requests_are_timed_in_histograms(llm: LLM) -> None:
    def all_metrics() -> tuple[dict[str, Histogram], dict[str, float]]:
        found = llm.get_metrics()
        ended = {m.labels["finished_reason"]: m.value for m in found if isinstance(m, Counter) and "success" in m.name}
        return {m.name.removeprefix("vllm:"): m for m in found if isinstance(m, Histogram)}, ended

    before, ended_before = all_metrics()
    outputs = llm.generate(["a", "b"], SamplingParams(temperature=0, max_tokens=7, ignore_eos=True), use_tqdm=False)
    streamed = list(llm.stream("c", SamplingParams(max_tokens=5, ignore_eos=True)))
    after, ended = all_metrics()
    new = {name: (m.count - before[name].count, m.sum - before[name].sum) for name, m in after.items()}
    assert new["inter_token_latency_seconds"][0] == 6 + 6 + 4
    assert new["request_generation_tokens"][0] == 3
    for name in ("time_to_first_token", "e2e_request_latency", "request_decode_time", "request_inference_time"):
        assert new[f"{name}_seconds"][0] == 3, name
        assert new[f"{name}_seconds"][1] > 0, name
    first_s = sum(output.metrics.first_token_latency for output in (*outputs, streamed[-1]))
    assert new["time_to_first_token_seconds"][1] == pytest.approx(first_s)
    assert new["request_params_n"] == (3, 3.0)
    num_cached = sum(output.num_cached_tokens for output in (*outputs, streamed[-1]))
    computed = new["request_prompt_tokens"][1] - num_cached
    assert new["request_prefill_kv_computed_tokens"] == (3, computed)
    buckets = [each["request_params_max_tokens"].buckets for each in (before, after)]
    assert [buckets[1][bound] - buckets[0][bound] for bound in ("2.0", "5.0", "10.0")] == [0, 1, 3]
    assert {reason for reason in ended if ended[reason] != ended_before[reason]} == {"length"}
    assert ended["length"] == ended_before["length"] + 3


def test_a_worker_extensions_methods_are_called_by_name_or_as_they_are(llm: LLM) -> None:
    from worker_extension import Extension

    assert llm.collective_rpc(Extension.add, args=(2, 5)) == [7]
    assert llm.call_extension({"a": 1}) == [{"echo": {"a": 1}}]
    for name in ("__init__", "missing", "_private"):
        with pytest.raises(Exception, match=rf"has no method {name}; it has handle, add"):
            llm.collective_rpc(name)


def test_arguments_that_ask_for_something_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="generate: mm_processor_kwargs is refused"):
        llm.generate("x", GREEDY, mm_processor_kwargs={"size": 1})
    with pytest.raises(InvalidRequestError, match="generate has no argument 'use_tqmd'"):
        llm.generate("x", GREEDY, use_tqmd=False)
    with pytest.raises(InvalidRequestError, match="chat: mm_processor_kwargs is refused"):
        llm.chat(MESSAGES, GREEDY, mm_processor_kwargs={"size": 1})
    with pytest.raises(AttributeError, match=r"apply_model.*no code is sent"):
        llm.apply_model(len)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"ModelConfig has no 'hf_config': the model's config\.json has it"):
        _ = llm.llm_engine.model_config.hf_config


# tests/v1/engine/test_async_llm.py
def test_async_llm_has_what_servers_ask_of_it(address: str) -> None:
    async def run() -> None:
        llm = await AsyncLLM.connect(address)
        assert (llm.is_running, llm.is_stopped, llm.errored) == (True, False, False)
        assert llm.model_config == await llm.get_model_config()
        assert llm.model_config.get_vocab_size() == (await llm.engine()).vocab_size
        assert not await llm.is_tracing_enabled()
        await llm.do_log_stats()
        long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        queue = await llm.add_request("mine", "hi", long)
        first = await queue.get()
        assert (first.request_id, first.finished) == ("mine", False)
        await llm.abort("mine", internal=True)
        async for output in queue:
            last = output
        assert last.outputs[0].finish_reason == "abort"
        running = asyncio.create_task(anext(llm.generate("hi", GREEDY, "other", trace_headers=None)))
        await llm.wait_for_requests_to_drain(drain_timeout=30)
        await running
        with pytest.raises(InvalidRequestError, match="data_parallel_rank is 3, and there is one engine"):
            await anext(llm.generate("hi", GREEDY, data_parallel_rank=3))
        with pytest.raises(InvalidRequestError, match="client_count is refused"):
            AsyncLLM.from_engine_args(EngineArgs(model="x"), client_count=2)
        await llm.close()
        assert (llm.is_running, llm.errored) == (False, False)

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.system
def test_two_hundred_loops_that_close_nothing_end(address: str) -> None:
    async def attach() -> None:
        llm = await AsyncLLM.connect(address)
        async for _ in llm.generate("hi", GREEDY):
            pass

    for _ in range(200):
        asyncio.run(attach())
