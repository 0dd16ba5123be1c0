"""GGUF files from the options to the engine: what is decided, what memory is counted, what mixed batches answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
from gguf.constants import GGMLQuantizationType as Kind
from plan_maker import PlanMaker
from tiny_gguf import save_gguf

from headrace.core.options.engine_options import Options
from headrace.core.options.memory import block_bytes
from headrace.core.options.plan import MemoryReading, Plan
from headrace.core.options.resolve import resolve
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.cpu.decoder import CpuDecoder
from headrace.executor.cpu.rank import CpuRank, check_weights_fit
from headrace.executor.models.families import spec_from_config
from headrace.ipc.failure import ModelError, OptionError
from headrace.ipc.process.host import HostMemory
from headrace.ipc.step import StepResult
from headrace.kernels.cpu import build
from headrace.kernels.registry import choose_reference

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))


@pytest.fixture(scope="module")
def q4_1_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(tiny_models.build("llama"), tmp_path_factory.mktemp("gguf") / "model.gguf", Kind.Q4_1)


def started(path: Path, **changes: Any) -> tuple[CpuRank, Plan, MemoryReading]:
    options = Options(model=str(path), block_size=4, max_num_seqs=8, skip_tokenizer_init=True, **changes)
    executor = CpuRank(options)
    plan = resolve(options, executor.describe(lambda name: None))
    reading = executor.load(plan, lambda name: None)
    executor.allocate(num_blocks=200, max_model_len=64)
    return executor, plan, reading


def test_a_gguf_file_is_not_quantised_again(q4_1_file: Path) -> None:
    with pytest.raises(OptionError, match=r"quantised already \(Q4_1\); leave it out"):
        started(q4_1_file, quantization="int8")


@pytest.mark.parametrize("cache_dtype", ["int8", "fp8_e4m3", "fp8_e5m2", "float32"])
def test_the_cache_takes_the_memory_that_the_core_counted(q4_1_file: Path, cache_dtype: str) -> None:
    executor, plan, _ = started(q4_1_file, kv_cache_dtype=cache_dtype)
    assert executor._runner is not None
    assert executor._runner._kv_cache.nbytes == 200 * block_bytes(plan)


def decided(plan: Plan) -> tuple[str, str]:
    return next((decision.value, decision.reason) for decision in plan.decisions if decision.name == "dtype")


def types_of(executor: CpuRank) -> set[str]:
    assert isinstance(executor._model, CpuDecoder)
    layers = executor._model._model.layers
    parts = [part for layer in layers for part in (layer.mixer["qkv"], layer.ffn["up"], layer.ffn["down"])]
    return {weight.type_name for part in parts for weight in part.weights}


def test_by_default_a_quantised_file_stays_packed(q4_1_file: Path) -> None:
    executor, plan, reading = started(q4_1_file)
    assert decided(plan) == ("bfloat16", "activations of a checkpoint of Q4_1; weights stay packed")
    assert types_of(executor) == {"Q4_1"}
    stored_bytes = open_checkpoint(Options(model=str(q4_1_file))).stored_bytes
    assert stored_bytes is not None
    assert abs(reading.weights_bytes / stored_bytes - 1) < 0.05


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "F32"), ("bfloat16", "BF16")])
def test_a_dtype_that_is_asked_for_dequantises(q4_1_file: Path, dtype: str, kind: str) -> None:
    executor, plan, reading = started(q4_1_file, dtype=dtype)
    assert decided(plan) == (dtype, "asked for; weights of Q4_1 are dequantised to it")
    assert types_of(executor) == {kind}
    assert reading.weights_bytes > 3 * q4_1_file.stat().st_size * (1 if kind == "F32" else 0.8)


def test_packed_weights_fit_where_dequantised_ones_would_not(q4_1_file: Path) -> None:
    checkpoint = open_checkpoint(Options(model=str(q4_1_file)))
    _, plan, _ = started(q4_1_file)
    spec, stored_bytes = spec_from_config(checkpoint.config), checkpoint.stored_bytes
    assert stored_bytes is not None
    memory = HostMemory(total_bytes=1 << 30, available_bytes=stored_bytes + 1)
    check_weights_fit(spec, plan, memory, stored_bytes)
    with pytest.raises(ModelError, match=r"billion of 2 bytes \(bfloat16\) need"):
        check_weights_fit(spec, plan, memory)
    with pytest.raises(ModelError, match=r"billion as stored \(Q4_1\) need 0\.00 GiB, and 0\.00 GiB of 1\.00 GiB"):
        check_weights_fit(spec, plan, HostMemory(1 << 30, stored_bytes - 1), stored_bytes)


def run(executor: CpuRank, requests: dict[int, dict[str, object]], steps: int = 8) -> dict[int, list[int]]:
    """The tokens that rows of requests get when they run together."""
    maker = PlanMaker(block_size=4)
    for row, sampling in requests.items():
        maker.enter(row, [row + 3, 7, 9, 11], **sampling)  # type: ignore[arg-type]
    for _ in range(steps):
        for row in requests:
            maker.compute(row)
        executor.submit(maker.plan())
        result: StepResult = executor.collect()
        assert not result.failures
        maker.sampled(result.rows, result.token_ids)
    return {row: maker.tokens[row][4:] for row in requests}


REQUESTS: dict[int, dict[str, object]] = {
    0: {"temperature": 0.0},
    1: {"temperature": 0.9, "seed": 5},
    2: {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "seed": 6},
    3: {"temperature": 1.2, "min_p": 0.05, "seed": 7},
    4: {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "seed": 8},
    5: {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    6: {"temperature": 1.0, "top_p": 0.5, "seed": 9, "min_tokens": 6},
}


def test_sampled_tokens_do_not_depend_on_what_else_is_in_the_batch(q4_1_file: Path) -> None:
    """Alone, simple rows are chosen within the program; beside others that change logits, after it."""
    together = run(started(q4_1_file)[0], REQUESTS)
    for row, sampling in REQUESTS.items():
        assert run(started(q4_1_file)[0], {row: sampling}) == {row: together[row]}, sampling
    assert len({tuple(tokens) for tokens in together.values()}) == len(REQUESTS)


def test_tokens_chosen_within_the_program_are_those_of_the_reference(
    q4_1_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, in_two = started(q4_1_file, dtype="float32")[0], started(q4_1_file, dtype="float32")[0]
    model = in_two._model
    assert isinstance(model, CpuDecoder)
    step = model.step

    def without_choice(arrays: object, kv_cache: object, draws: object) -> object:
        logits = step(arrays, kv_cache, draws)  # type: ignore[arg-type]
        return type(logits)(logits.sampled.clone(), logits.at)

    model.step = without_choice  # type: ignore[method-assign,assignment]
    chosen = run(executor, REQUESTS)
    monkeypatch.setattr("headrace.kernels.choose", choose_reference)
    assert chosen == run(in_two, REQUESTS)
