"""`headrace bench latency` and `throughput`, which measure an engine without an HTTP server."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.core.options.adapters import max_loras_of
from headrace.core.options.engine_options import Options
from headrace.core.options.parsing import options_from_arguments, struct_from_arguments
from headrace.frontend.bench.options import LatencyOptions, ResultOptions, ThroughputOptions, WorkloadOptions
from headrace.frontend.bench.results import record as records
from headrace.frontend.bench.results.metrics import columns, metric_table, number, percentile, summary
from headrace.frontend.bench.traffic.workload import PromptMaker, TextTokenizer, make_workload
from headrace.frontend.client.engine_metrics import by_name
from headrace.frontend.request.lora_request import LoRARequest
from headrace.ipc.failure import InvalidRequestError, OptionError

if TYPE_CHECKING:
    from headrace.frontend.api.llm import LLM
    from headrace.frontend.request.outputs import RequestMetrics
    from headrace.frontend.request.parameters.sampling_params import SamplingParams
    from headrace.frontend.text.tokenizer import Tokenizer

PERCENTILES = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)


def bench_latency(arguments: argparse.Namespace) -> int:
    """Times batches of one shape, each with new prompts. Raises OptionError."""
    asked, result = struct_from_arguments(arguments, LatencyOptions), struct_from_arguments(arguments, ResultOptions)
    options = options_from_arguments(arguments)
    if "enable_prefix_caching" not in vars(arguments):  # off by default as in vLLM, so that prompts are computed
        options = msgspec.structs.replace(options, enable_prefix_caching=False)
    records.check_writable(result)
    record = records.new_record("latency", result, records.given(asked, options), options.seed or 0)
    with open_engine(options) as llm:
        check_length(llm, asked.input_len, asked.output_len)
        maker = PromptMaker(llm.engine.vocab_size)
        params = sampling_params(asked.n, asked.output_len, detokenize=not asked.disable_detokenize)
        numbers = random.Random(options.seed or 0)
        seconds: list[float] = []
        metrics: list[RequestMetrics] = []
        total = asked.num_iters_warmup + asked.num_iters
        with progress(total, "batch", result) as bar:
            for index in range(total):
                prompts = [maker.draw(numbers, asked.input_len) for _ in range(asked.batch_size)]
                began_s = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                took_s = time.perf_counter() - began_s
                bar.update()
                bar.set_postfix_str(f"{took_s:.3f} s, {asked.batch_size * asked.output_len / took_s:,.0f} out tok/s")
                if index >= asked.num_iters_warmup:
                    seconds.append(took_s)
                    metrics += [output.metrics for output in outputs if output.metrics is not None]
        record["engine"] = engine_facts(llm)
    record["results"] = latency_figures(seconds, metrics, asked)
    record["samples"] = {
        "latencies": seconds,
        "requests": [{"ttft_s": m.first_token_latency, "e2e_s": m.total_s} for m in metrics],
    }
    print(latency_table(record["results"], asked))
    return finish(record, result)


def latency_figures(
    seconds: Sequence[float], metrics: Sequence[RequestMetrics], asked: LatencyOptions
) -> dict[str, Any]:
    """vLLM's fields, and figures of the time to first token and per output token. seconds: per batch."""
    ordered = sorted(seconds)
    ttft_ms = [1e3 * (m.first_token_latency or 0.0) for m in metrics]
    rest_ms = [1e3 * ((m.total_s or 0.0) - (m.first_token_latency or 0.0)) for m in metrics]
    tpot_ms = [each / (asked.output_len - 1) for each in rest_ms] if asked.output_len > 1 else []
    return {
        "avg_latency": sum(ordered) / len(ordered),
        "percentiles": {f"{each:g}": percentile(ordered, each) for each in PERCENTILES},
        "output_throughput": asked.batch_size * asked.n * asked.output_len * len(ordered) / sum(ordered),
        **summary("e2el", [1e3 * each for each in ordered], PERCENTILES),
        **summary("ttft", ttft_ms, PERCENTILES),
        **summary("tpot", tpot_ms, PERCENTILES),
    }


def latency_table(figures: dict[str, Any], asked: LatencyOptions) -> str:
    shown = {key: value for key, value in figures.items() if not key.startswith(("p25_", "p75_"))}
    return (
        f"{asked.num_iters} batches of {asked.batch_size} x {asked.input_len} tokens in, {asked.output_len} out\n"
        + metric_table(shown, ("e2el", "ttft", "tpot"))
        + f"\n  output tokens/s: {number(figures['output_throughput'])}"
    )


def bench_throughput(arguments: argparse.Namespace) -> int:
    """Submits all requests of a workload at once. Raises OptionError."""
    asked, result = struct_from_arguments(arguments, ThroughputOptions), struct_from_arguments(arguments, ResultOptions)
    workload, options = struct_from_arguments(arguments, WorkloadOptions), options_from_arguments(arguments)
    records.check_writable(result)
    record = records.new_record("throughput", result, records.given(asked, workload, options), workload.seed)
    with open_engine(options) as llm:
        # Only datasets of texts need a tokenizer; random prompts are drawn as token ids.
        tokenizer = text_tokenizer(llm) if workload.dataset_name in ("sharegpt", "custom") else None
        maker = PromptMaker(llm.engine.vocab_size, tokenizer)
        requests = make_workload(workload, maker)
        params = [
            sampling_params(asked.n, request.output_len, detokenize=not asked.disable_detokenize)
            for request in requests
        ]
        prompts, loras = [request.prompt for request in requests], adapters_for(asked.lora_path, options, len(requests))
        if (warm := asked.num_warmups) > 0:
            llm.generate(prompts[:warm], params[:warm], use_tqdm=False, lora_request=loras and loras[:warm])
            llm.reset_prefix_cache()
        began_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=shows_progress(result), lora_request=loras)
        elapsed_s = time.perf_counter() - began_s
        record["engine"] = engine_facts(llm)
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    ttft_ms = [1e3 * (m.first_token_latency or 0.0) for m in metrics]
    record["results"] = {
        "elapsed_time": elapsed_s,
        "num_requests": len(requests),
        "total_num_tokens": num_input + num_output,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "requests_per_second": len(requests) / elapsed_s,
        "tokens_per_second": (num_input + num_output) / elapsed_s,
        "output_tokens_per_second": num_output / elapsed_s,
        **summary("ttft", ttft_ms, PERCENTILES),
        **summary("e2el", [1e3 * (m.total_s or 0.0) for m in metrics], PERCENTILES),
    }
    record["samples"] = {
        "requests": [
            {
                "num_prompt_tokens": len(output.prompt_token_ids),
                "num_output_tokens": sum(len(each.token_ids) for each in output.outputs),
                "ttft_s": None if output.metrics is None else output.metrics.first_token_latency,
                "e2e_s": None if output.metrics is None else output.metrics.total_s,
                "end_s": None if output.metrics is None else output.metrics.total_s,
            }
            for output in outputs
        ]
    }
    print(throughput_table(record["results"]))
    return finish(record, result)


def adapters_for(path: str | None, options: Options, count: int) -> list[LoRARequest] | None:
    """An adapter for each of `count` requests, in turns under max_loras names; None for no path."""
    if path is None:
        return None
    named = [LoRARequest(f"lora-{number}", number, path) for number in range(1, max_loras_of(options) + 1)]
    return [named[number % len(named)] for number in range(count)]


def throughput_table(figures: dict[str, Any]) -> str:
    rows = [
        ["requests/s", number(figures["requests_per_second"])],
        ["total tokens/s", number(figures["tokens_per_second"])],
        ["output tokens/s", number(figures["output_tokens_per_second"])],
    ]
    head = (
        f"{figures['num_requests']:,} requests, {figures['total_input_tokens']:,} tokens in, "
        f"{figures['total_output_tokens']:,} out, in {figures['elapsed_time']:.2f} s"
    )
    return head + "\n" + columns(rows)


def open_engine(options: Options) -> LLM:
    """Starts an engine with these options."""
    from headrace.frontend.api.llm import LLM

    chosen = {name: getattr(options, name) for name in options.__struct_fields__}
    return LLM(chosen.pop("model") or None, **chosen)


def sampling_params(n: int, output_len: int, *, detokenize: bool) -> SamplingParams:
    """Parameters with which every output has exactly `output_len` tokens."""
    from headrace.frontend.request.parameters.sampling_params import SamplingParams

    return SamplingParams(
        n=n, temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=output_len, detokenize=detokenize
    )


def check_length(llm: LLM, input_len: int, output_len: int) -> None:
    """Raises OptionError if prompt and output together exceed max_model_len."""
    if input_len + output_len > llm.engine.max_model_len:
        raise OptionError(
            f"--input-len={input_len} and --output-len={output_len} are more than the model's length of "
            f"{llm.engine.max_model_len} tokens"
        )


def text_tokenizer(llm: LLM) -> TextTokenizer | None:
    """The engine's tokenizer, adapted for workloads; None if it has none."""
    try:
        return _EngineTokenizer(llm.get_tokenizer())
    except InvalidRequestError:
        return None


class _EngineTokenizer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.ordinary_ids = [each for each in range(len(tokenizer)) if each not in tokenizer.special_ids]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)


def engine_facts(llm: LLM) -> dict[str, Any]:
    """The engine's Welcome, without the tokenizer, and its statistics at the end of the run."""
    facts = {name: msgspec.to_builtins(value) for name, value in msgspec.structs.asdict(llm.engine).items()}
    del facts["tokenizer"]
    return {**facts, "stats": by_name(llm.get_stats())}


def shows_progress(result: ResultOptions) -> bool:
    return not result.disable_tqdm and sys.stderr.isatty()


def progress(total: int, unit: str, result: ResultOptions) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit=unit, dynamic_ncols=True, disable=not shows_progress(result))


def finish(record: dict[str, Any], result: ResultOptions) -> int:
    """Writes the record if the options ask for it, and prints where. Returns the exit status."""
    if drafts := record.get("engine", {}).get("stats", {}).get("num_draft_tokens"):
        accepted = record["engine"]["stats"]["num_accepted_tokens"]
        print(f"\nspeculation: {accepted} of {drafts} draft tokens were right, {accepted / drafts:.1%}")
    path = records.save(record, result)
    if path is not None:
        print(f"\nwrote {path}")
    return 0
