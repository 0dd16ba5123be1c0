"""`headrace bench serve`: an open-loop load on any server with OpenAI's API, or for vectors or scores."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from headrace.core.options.option import secret_text
from headrace.core.options.parsing import struct_from_arguments
from headrace.frontend.bench.options import (
    SHAPING,
    BodyOptions,
    SamplingOptions,
    ServingResultOptions,
    TargetOptions,
    TrafficOptions,
    WorkloadOptions,
)
from headrace.frontend.bench.results import record as records
from headrace.frontend.bench.results.metrics import (
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    serving_figures,
    serving_table,
)
from headrace.frontend.bench.traffic.http_client import ExchangeError, Pool, Target, Whole
from headrace.frontend.bench.traffic.load import Load, LoadResult, ProgressBar
from headrace.frontend.bench.traffic.workload import (
    BenchRequest,
    FileTokenizer,
    PromptMaker,
    check_traffic,
    make_workload,
    schedule,
)
from headrace.frontend.cli.engine_arguments import as_flag_error
from headrace.frontend.client.event_loop import run_async
from headrace.frontend.request.parameters.sampling_params import SamplingParams
from headrace.ipc.failure import HeadraceError, InvalidRequestError, OptionError
from headrace.ipc.transport.hosts import host_port

T = TypeVar("T")
READY_PERIOD_S = 0.2
_CHAT = "openai-chat"
_EMBEDDED_CHAT, _RERANK, _INFINITY = "openai-embeddings-chat", "vllm-rerank", "infinity-embeddings"
_POOLING = {
    "openai-embeddings": "/v1/embeddings",
    _EMBEDDED_CHAT: "/v1/embeddings",
    "vllm-pooling": "/pooling",
    _INFINITY: "/embeddings",
    _RERANK: "/v1/rerank",
}
"""Backends whose answers are vectors or scores."""
_PATHS = {"openai": "/v1/completions", "vllm": "/v1/completions", _CHAT: "/v1/chat/completions", **_POOLING}
_OF_TEXTS = (_CHAT, _EMBEDDED_CHAT, _RERANK, _INFINITY)
"""Backends that take no token ids."""
_SAMPLED = tuple(name for name, _, _ in SHAPING)


class ServerError(HeadraceError):
    """The server under test cannot be used at all."""


class ServingRun(NamedTuple):
    """All options of a `headrace bench serve`."""

    target: TargetOptions
    workload: WorkloadOptions
    traffic: TrafficOptions
    sampling: BodyOptions
    result: ServingResultOptions


def bench_serve(arguments: argparse.Namespace) -> int:
    """Returns exit status 0 if any request succeeded, else 1. Raises OptionError before anything is sent, and
    ServerError."""
    asked = ServingRun(
        target=struct_from_arguments(arguments, TargetOptions),
        workload=struct_from_arguments(arguments, WorkloadOptions),
        traffic=struct_from_arguments(arguments, TrafficOptions),
        sampling=struct_from_arguments(arguments, SamplingOptions),
        result=struct_from_arguments(arguments, ServingResultOptions),
    )
    check(asked)
    requests, traffic = requests_of(asked)
    if asked.target.backend in _OF_TEXTS and any(isinstance(request.prompt, list) for request in requests):
        requests = run_async(lambda: _as_texts(asked, requests))
    due_s = schedule(requests, traffic, asked.workload.seed)
    record = records.new_record("serve", asked.result, records.given(*asked), asked.workload.seed)
    outcome = run_async(lambda: _run(asked, requests, due_s))
    load, model, server = outcome
    shown = dict.fromkeys(
        parse_metrics(asked.result.percentile_metrics), parse_percentiles(asked.result.metric_percentiles)
    )
    limits = parse_goodput(asked.traffic.goodput)
    record |= {
        "model_id": model,
        "backend": asked.target.backend,
        "server": server,
        "num_prompts": len(requests),
        "request_rate": "inf" if math.isinf(asked.traffic.request_rate) else asked.traffic.request_rate,
        "burstiness": str(asked.traffic.burstiness),
        "max_concurrency": asked.traffic.max_concurrency,
        "results": serving_figures(load, requests, goodput=limits, shown=shown),
        "samples": {"requests": [_sample(outcome, requests[outcome.index]) for outcome in load.outcomes]},
    }
    print(serving_table(record))
    path = records.save(record, asked.result)
    if path is not None:
        print(f"\nwrote {path}")
    return 0 if record["results"]["completed"] else 1


def check(asked: ServingRun) -> None:
    """Checks the whole command line. Raises OptionError."""
    check_traffic(asked.traffic)
    parse_goodput(asked.traffic.goodput)
    parse_metrics(asked.result.percentile_metrics)
    parse_percentiles(asked.result.metric_percentiles)
    records.parse_pairs(asked.target.header, "header")
    if not (asked.target.request_id_prefix or "x").isprintable():
        raise OptionError("--request-id-prefix must be of printable characters")
    records.check_writable(asked.result)
    _check_sampling(asked.sampling)
    _check_inputs(asked)
    for name in ("model", "stream", "prompt", "messages"):
        if name in asked.sampling.extra_body:
            raise OptionError(f"--extra-body: {name} is what the benchmark sets itself")


def _check_inputs(asked: ServingRun) -> None:
    """Raises OptionError where backend and requests are not of one kind."""
    backend, dataset = asked.target.backend, asked.workload.dataset_name
    if (backend == _RERANK) != (dataset == "random-rerank"):
        raise OptionError(
            f"--backend {backend} with --dataset-name {dataset}: {_RERANK} orders a query's documents, which "
            "random-rerank has alone"
        )
    if asked.workload.random_batch_size > 1 and (backend not in _POOLING or backend == _EMBEDDED_CHAT):
        raise OptionError(f"--random-batch-size: a request of --backend {backend} has one prompt")
    given = [name for name in (*_SAMPLED, "logprobs") if getattr(asked.sampling, name) is not None]
    if backend in _POOLING and (given or asked.sampling.ignore_eos):
        name = (given or ["ignore_eos"])[0].replace("_", "-")
        raise OptionError(f"--{name} is of sampling, and --backend {backend} samples nothing: leave it out")


def _check_sampling(options: BodyOptions) -> None:
    """Raises OptionError for sampling options that a server would refuse in every request."""
    given = {name: getattr(options, name) for name in _SAMPLED if getattr(options, name) is not None}
    try:
        SamplingParams(**given)
    except InvalidRequestError as error:
        raise as_flag_error(error) from None


def requests_of(asked: ServingRun) -> tuple[list[BenchRequest], TrafficOptions]:
    """The workload, and the traffic options with `self_timed` decided. Raises OptionError."""
    tokenizer = None if asked.target.tokenizer is None else FileTokenizer(asked.target.tokenizer)
    maker = PromptMaker(asked.workload.random_vocab_size, tokenizer)
    requests = make_workload(asked.workload, maker)
    traffic = asked.traffic
    if traffic.self_timed is None:
        is_free = math.isinf(traffic.request_rate) and traffic.ramp_up_strategy is None
        traffic = msgspec.structs.replace(traffic, self_timed=asked.workload.dataset_name == "timed_trace" and is_free)
    return requests, traffic


def target_of(options: TargetOptions) -> Target:
    """The server's address and headers, with an API key from the environment. Raises OptionError."""
    headers = records.parse_pairs(options.header, "header")
    key = secret_text(os.environ.get("OPENAI_API_KEY") or os.environ.get("HEADRACE_API_KEY") or "")
    if key and "authorization" not in {name.lower() for name in headers}:
        headers["Authorization"] = f"Bearer {key}"
    return Target(
        options.base_url or f"http://{host_port(options.host, options.port)}", headers, insecure=options.insecure
    )


def models_of(asked: ServingRun, model: str, count: int) -> list[str]:
    """The model that each of `count` requests names: one of the adapters, if there are any."""
    adapters = asked.target.lora_modules
    if not adapters:
        return [model] * count
    if asked.target.lora_assignment == "round-robin":
        return [adapters[number % len(adapters)] for number in range(count)]
    return random.Random(asked.workload.seed).choices(adapters, k=count)


def body_of(asked: ServingRun, model: str, request: BenchRequest) -> dict[str, Any]:
    """The body of the request, before its encoding as JSON."""
    if asked.target.backend in _POOLING:
        return {"model": model, **_inputs_of(asked.target.backend, request), **asked.sampling.extra_body}
    fields = {name: value for name in _SAMPLED if (value := getattr(asked.sampling, name)) is not None}
    if asked.sampling.ignore_eos:
        fields["ignore_eos"] = True
    common = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if asked.target.backend == _CHAT:
        if asked.sampling.logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": asked.sampling.logprobs}
        prompt: dict[str, Any] = {
            "messages": [{"role": "user", "content": request.prompt}],
            "max_completion_tokens": request.output_len,
        }
    else:
        if asked.sampling.logprobs is not None:
            fields["logprobs"] = asked.sampling.logprobs
        prompt = {"prompt": request.prompt, "max_tokens": request.output_len}
    return {**common, **prompt, **fields, **asked.sampling.extra_body}


def _inputs_of(backend: str, request: BenchRequest) -> dict[str, Any]:
    """Texts are cut to the model's length, as vLLM's benchmark has them cut."""
    cut = {} if backend == _INFINITY else {"truncate_prompt_tokens": -1}
    if backend == _RERANK:
        return {"query": request.prompt, "documents": request.more, **cut}
    if backend == _EMBEDDED_CHAT:
        return {"messages": [{"role": "user", "content": request.prompt}], **cut}
    return {"input": [request.prompt, *request.more] if request.more else request.prompt, **cut}


async def _as_texts(asked: ServingRun, requests: list[BenchRequest]) -> list[BenchRequest]:
    """Converts prompts of token ids to text with the server's tokenizer, for an API that takes no token ids."""
    target, pool = _pool_of(asked.target)
    try:
        model = _model_of(asked.target, await _models(pool, target, asked.target), target)
        # About 30 ms for each prompt of 1024 tokens.
        print(f"drawing {len(requests)} prompts with the server's own tokenizer", file=sys.stderr)
        ordinary_ids = PromptMaker(asked.workload.random_vocab_size).ids
        return await as_texts(requests, ServerTokenizer(pool, target, model, ordinary_ids), asked.workload.seed)
    finally:
        await pool.close()


def _pool_of(options: TargetOptions) -> tuple[Target, Pool]:
    target = target_of(options)
    return target, Pool(
        target,
        connect_timeout_s=options.connect_timeout,
        stall_timeout_s=options.stall_timeout,
        request_timeout_s=options.request_timeout,
    )


def _model_of(options: TargetOptions, models: Any, target: Target) -> str:
    return options.served_model_name or options.model or _first_model(models, target)


async def _run(
    asked: ServingRun, requests: list[BenchRequest], due_s: list[float] | None
) -> tuple[LoadResult, str, dict[str, Any]]:
    target, pool = _pool_of(asked.target)
    try:
        models = await _models(pool, target, asked.target)
        model = _model_of(asked.target, models, target)
        path = asked.target.endpoint or _PATHS[asked.target.backend]
        encoder = msgspec.json.Encoder()
        models_asked = models_of(asked, model, len(requests))
        bodies = [
            target.post(path, encoder.encode(body_of(asked, name, request)), _request_id(asked.target, number))
            for number, (name, request) in enumerate(zip(models_asked, requests, strict=True))
        ]
        if asked.traffic.num_warmups:
            warmup = [bodies[at % len(bodies)] for at in range(asked.traffic.num_warmups)]
            bound = asked.traffic.max_concurrency
            streams = asked.target.backend not in _POOLING
            await Load(pool, warmup, due_s=None, max_concurrency=bound, keep_text=False, streams=streams).run()
        load = Load(
            pool,
            bodies,
            due_s=due_s,
            max_concurrency=asked.traffic.max_concurrency,
            keep_text=asked.result.save_detailed,
            streams=asked.target.backend not in _POOLING,
        )
        bar = ProgressBar(len(requests), shown=not asked.result.disable_tqdm and sys.stderr.isatty())
        if asked.target.profile:
            await _tell(pool, target, "/start_profile")
        try:
            result = await load.run(bar.tick)
        finally:
            bar.close(load)
            if asked.target.profile:
                await _tell(pool, target, "/stop_profile")
        return result, model, {"url": target.url, "models": models, "version": await _json(pool, target, "/version")}
    finally:
        await pool.close()


def _request_id(options: TargetOptions, number: int) -> str:
    return "" if options.request_id_prefix is None else f"X-Request-Id: {options.request_id_prefix}{number}\r\n"


async def _tell(pool: Pool, target: Target, path: str) -> None:
    """Posts an empty body to the path. Raises ServerError unless the server answers 200."""
    reader = Whole()
    try:
        await pool.send(target.post(path, b""), reader)
    except ExchangeError as error:
        raise ServerError(f"--profile: {target.url}{path}: {error}") from None
    if reader.status != 200:
        answered = reader.body.decode(errors="replace")[:300]
        raise ServerError(f"--profile: {target.url}{path} answered {reader.status}: {answered}")


async def _models(pool: Pool, target: Target, options: TargetOptions) -> Any:
    """The server's list of models; None if it has none and the options name the model. Waits for the server as long as
    the options allow. Raises ServerError."""
    end_s = time.monotonic() + options.ready_check_timeout_sec
    mended = "is the server running there? --model names one without asking, --ready-check-timeout-sec waits for it"
    while True:
        try:
            reader = Whole()
            await pool.send(target.get("/v1/models"), reader)
            if reader.status == 200:
                return json.loads(reader.body)
            problem = f"it answered {reader.status}"
            if reader.status == 401:
                mended = "a key of its clients is read from OPENAI_API_KEY in the environment, or HEADRACE_API_KEY"
                break
        except ExchangeError as error:
            problem = str(error)
        except ValueError:
            problem = "its list of models is not JSON"
        if time.monotonic() >= end_s:
            break
        await asyncio.sleep(READY_PERIOD_S)
    if options.model is None and options.served_model_name is None:
        raise ServerError(f"{target.url} does not say which models it serves ({problem}); {mended}")
    return None


def _first_model(models: Any, target: Target) -> str:
    try:
        return str(models["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ServerError(f"{target.url} serves no model by its own list; name one with --model") from None


async def _json(pool: Pool, target: Target, path: str) -> Any:
    """A JSON document of the server; None if there is none at this path."""
    reader = Whole()
    try:
        await pool.send(target.get(path), reader)
        return json.loads(reader.body) if reader.status == 200 else None
    except (ExchangeError, ValueError):
        return None


def _sample(outcome: Any, request: BenchRequest) -> dict[str, Any]:
    """The raw sample of one request, without empty fields."""
    sample = {key: value for key, value in msgspec.to_builtins(outcome).items() if value not in (None, "", [])}
    sample["asked_tokens"] = request.output_len
    if request.part:
        sample["part"] = request.part
    if outcome.num_prompt_tokens is None and request.num_prompt_tokens is not None:
        sample["num_prompt_tokens"] = request.num_prompt_tokens
    return {key: round(value, 6) if isinstance(value, float) else _rounded(value) for key, value in sample.items()}


def _rounded(value: Any) -> Any:
    return [round(each, 6) for each in value] if isinstance(value, list) else value


class ServerTokenizer:
    """A TextTokenizer that asks the server. Constructed in the pool's event loop, used from another thread."""

    def __init__(self, pool: Pool, target: Target, model: str, ordinary_ids: Sequence[int]) -> None:
        self._pool, self._target, self._model = pool, target, model
        self.ordinary_ids = ordinary_ids
        self._loop = asyncio.get_running_loop()

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self._ask("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        return tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._ask("/detokenize", {"tokens": list(token_ids)})["prompt"]
        return text

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(self._answer(path, body), self._loop).result()

    async def _answer(self, path: str, body: dict[str, Any]) -> Any:
        """The server's answer as JSON. Raises OptionError."""
        reader = Whole()
        try:
            await self._pool.send(self._target.post(path, msgspec.json.encode({"model": self._model, **body})), reader)
            if reader.status == 200:
                return json.loads(reader.body)
            problem = f"answered {reader.status}: {reader.body.decode(errors='replace')[:300]}"
        except (ExchangeError, ValueError) as error:
            problem = f"failed: {error}"
        raise OptionError(
            f"the API takes texts, and {self._target.url}{path}, which would make them of the tokens that were drawn, "
            f"{problem}; give --tokenizer FOLDER, or --random-vocab-size where tokens are unknown there, or a dataset "
            "of texts"
        )


async def as_texts(requests: Sequence[BenchRequest], tokenizer: ServerTokenizer, seed: int) -> list[BenchRequest]:
    """Converts prompts of token ids to texts of as many tokens, as far as possible. Raises OptionError."""
    maker, numbers = PromptMaker(0, tokenizer), random.Random(seed)

    def make() -> list[BenchRequest]:
        texts = []
        for request in requests:
            if isinstance(request.prompt, list):
                parts = [each for each in (request.prompt, *request.more) if isinstance(each, list)]
                first, *more = (maker.prompt(each, numbers) for each in parts)
                length = request.num_prompt_tokens if more else first[1]
                texts.append(
                    request._replace(prompt=first[0], num_prompt_tokens=length, more=tuple(text for text, _ in more))
                )
            else:
                texts.append(request)
        return texts

    return await asyncio.to_thread(make)
