"""Workloads and schedules of `headrace bench`: lengths, sharing, seeds, and faults named by file, line and field."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_tokenizers import byte_level_tokenizer

from headrace.frontend.bench.options import TrafficOptions, WorkloadOptions
from headrace.frontend.bench.traffic.workload import BenchRequest, FileTokenizer, PromptMaker, make_workload, schedule
from headrace.ipc.failure import OptionError

SHIPPED = Path(__file__).parents[2] / "benchmarks" / "workloads"


def make(maker: PromptMaker | None = None, **options: Any) -> list[BenchRequest]:
    return make_workload(WorkloadOptions(**options), maker or PromptMaker(1000))


def test_random_prompts_have_the_lengths_asked_for_and_follow_the_seed() -> None:
    asked = {"num_prompts": 200, "random_input_len": 100, "random_output_len": 40, "random_range_ratio": 0.5}
    requests = make(**asked)
    assert requests == make(**asked)
    assert requests != make(**asked, seed=1)
    lengths = [len(request.prompt) for request in requests]
    assert lengths == [request.num_prompt_tokens for request in requests]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert statistics.fmean(lengths) == pytest.approx(100, abs=10)
    assert {20 <= request.output_len <= 60 for request in requests} == {True}
    assert all(3 <= int(token) < 1000 for request in requests for token in request.prompt)


def test_a_shared_prefix_is_shared() -> None:
    requests = make(num_prompts=5, random_prefix_len=30, random_input_len=10)
    assert len({tuple(request.prompt[:30]) for request in requests}) == 1
    assert len({tuple(request.prompt[30:]) for request in requests}) == 5


def test_repeated_prefixes_are_as_many_as_asked_for() -> None:
    requests = make(
        dataset_name="prefix_repetition",
        num_prompts=12,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_prefix_len=20,
        prefix_repetition_suffix_len=4,
    )
    prefixes = [tuple(request.prompt[:20]) for request in requests]
    assert {prefixes.count(prefix) for prefix in prefixes} == {4}
    assert all(len(request.prompt) == 24 for request in requests)
    with pytest.raises(OptionError, match="must be at least 3"):
        make(dataset_name="prefix_repetition", num_prompts=2, prefix_repetition_num_prefixes=3)


def test_with_a_tokenizer_prompts_are_texts_of_that_many_tokens(tmp_path: Path) -> None:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(str(tmp_path))
    requests = make(PromptMaker(10, tokenizer), num_prompts=20, random_input_len=50)
    for request in requests:
        assert isinstance(request.prompt, str)
        assert len(tokenizer.encode(request.prompt)) == request.num_prompt_tokens
    lengths = [request.num_prompt_tokens or 0 for request in requests]
    assert statistics.fmean(lengths) == pytest.approx(50, rel=0.1)


@pytest.mark.parametrize(
    ("name", "dataset", "more"),
    [
        ("chat.jsonl", "custom", {}),
        ("conversations.json", "sharegpt", {}),
        ("bursts.csv", "burstgpt", {}),
        ("trace.jsonl", "timed_trace", {"timed_trace_sec_multiplier": 0.001}),
        ("mix.json", "mixed", {}),
    ],
)
def test_shipped_workloads_load_and_are_repeated_to_the_number_asked_for(
    name: str, dataset: Any, more: dict[str, Any]
) -> None:
    asked = {"dataset_name": dataset, "dataset_path": str(SHIPPED / name), **more}
    requests = make(**asked, num_prompts=500)
    assert len(requests) == 500
    assert requests == make(**asked, num_prompts=500)
    assert 0 < len(make(**asked, num_prompts=500, no_oversample=True)) <= 500
    assert all(request.output_len > 0 and request.prompt for request in requests)


def test_a_trace_keeps_its_times_and_its_shared_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 5000, "input_length": 40, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 4000, "input_length": 36, "output_length": 2, "hash_ids": [1, 9]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = make(
        dataset_name="timed_trace", dataset_path=str(path), num_prompts=2, timed_trace_sec_multiplier=0.001
    )
    assert (first.at_s, second.at_s) == (0.0, 1.0)
    assert (len(first.prompt), len(second.prompt)) == (36, 40)
    assert first.prompt[:16] == second.prompt[:16]
    assert first.prompt[16:32] != second.prompt[16:32]
    assert schedule([first, second], TrafficOptions(self_timed=True), 0) == [0.0, 1.0]


def test_a_mix_holds_its_parts_by_weight() -> None:
    requests = make(dataset_name="mixed", dataset_path=str(SHIPPED / "mix.json"), num_prompts=100)
    parts = json.loads((SHIPPED / "mix.json").read_text())["parts"]
    total = sum(part["weight"] for part in parts.values())
    for name, part in parts.items():
        share = sum(request.part == name for request in requests)
        assert share == pytest.approx(100 * part["weight"] / total, abs=1)


@pytest.mark.parametrize(
    ("dataset", "text", "sentence"),
    [
        ("custom", '{"prompt": "a"}\n{"promt": "b"}', "line 2: unknown field promt; did you mean prompt?"),
        ("custom", '{"prompt": "a", "colour": 3}', "line 1: unknown field colour; known: prompt, output_tokens"),
        ("custom", '{"prompt": 3}', "line 1: `prompt` must be a text or a list of token ids"),
        ("custom", '{"prompt": "a", "output_tokens": 0}', "line 1: `output_tokens` must be a whole number over 0"),
        ("custom", "hello", "line 1: it is no JSON object"),
        ("custom", "", "it holds no request"),
        ("sharegpt", "{}", "is a list of conversations"),
        ("sharegpt", "[{}]", "conversation 1 has no list `conversations`"),
        ("sharegpt", '[{"conversations": [{"value": 3}]}]', "conversation 1 has no list"),
        ("sharegpt", "nonsense", "it is not JSON"),
        ("burstgpt", "a,b\n1,2\n", "column Timestamp is missing; it has a, b"),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\n1,x,2\n", "line 2: Timestamp, Request tokens"),
        ("timed_trace", '{"timestamp": 1}', "line 1: field input_length must be a number"),
        ("timed_trace", '{"timestamp": -1, "input_length": 1, "output_length": 1}', "line 1: field timestamp"),
        ("mixed", '{"part": {}}', "missing required field `parts`|unknown field `part`"),
        ("mixed", '{"parts": {"a": {"weight": 0}}}', "each weight is over 0"),
        ("mixed", '{"parts": {"a": {"random_input_length": 3}}}', "part a: unknown option random_input_length"),
        ("mixed", '{"parts": {"a": {"dataset_name": "mixed", "dataset_path": "x"}}}', "a mix cannot hold a mix"),
    ],
)
def test_a_fault_in_a_file_is_named(dataset: Any, text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text(text)
    with pytest.raises(OptionError, match=sentence.replace("?", r"\?").replace("(", r"\(")):
        make(dataset_name=dataset, dataset_path=str(path))


REQUESTS = [BenchRequest([1], 1, 1)] * 2000


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (4.0, 0.5), (0.25, 2.0), (math.inf, 0.0)])
def test_intervals_are_gamma_distributed_and_the_load_is_exact(burstiness: float, variation: float) -> None:
    due_s = schedule(REQUESTS, TrafficOptions(request_rate=50.0, burstiness=burstiness), seed=0)
    assert due_s is not None
    assert due_s == sorted(due_s)
    assert due_s[-1] == pytest.approx(len(REQUESTS) / 50.0)
    intervals = [after - before for before, after in itertools.pairwise(due_s)]
    # The coefficient of variation of a gamma distribution of shape k is 1 / sqrt(k).
    assert statistics.pstdev(intervals) / statistics.fmean(intervals) == pytest.approx(variation, rel=0.1, abs=1e-6)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_begins_and_ends_at_its_rates(strategy: Any) -> None:
    options = TrafficOptions(
        ramp_up_strategy=strategy, ramp_up_start_rps=10.0, ramp_up_end_rps=100.0, burstiness=math.inf
    )
    due_s = schedule(REQUESTS, options, seed=0)
    assert due_s is not None
    assert due_s[1] - due_s[0] == pytest.approx(0.1, rel=0.01)
    assert due_s[-1] - due_s[-2] == pytest.approx(0.01, rel=0.01)
    middle = due_s[1000] - due_s[999]
    assert middle == pytest.approx(1 / 55 if strategy == "linear" else 1 / math.sqrt(1000), rel=0.01)


def test_no_rate_is_all_at_once() -> None:
    assert schedule(REQUESTS, TrafficOptions(), seed=0) is None


def test_the_shipped_workloads_are_what_their_script_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(SHIPPED / "make.py"), str(tmp_path)], check=True, timeout=60)
    for made in tmp_path.iterdir():
        assert made.read_bytes() == (SHIPPED / made.name).read_bytes(), made.name
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in SHIPPED.iterdir()} - {"make.py"}
