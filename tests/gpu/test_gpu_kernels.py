"""Quantised weights and batch invariance, which are ways of choosing kernels; and quantised caches."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from gpu_parts import HostBackend, choose_capturable
from plan_maker import PlanMaker
from thinned import every

from headrace.core.options.engine_options import Options
from headrace.core.options.memory import block_bytes
from headrace.core.options.resolve import resolve
from headrace.executor.gpu.hardware.device import GpuFacts
from headrace.executor.gpu.kernels import Rounding, batch_invariant, quantising, to_fp8, to_int4, to_int8
from headrace.executor.gpu.rank import GpuRank
from headrace.executor.parallel.rank_place import SINGLE
from headrace.executor.placement.make_rank import make_rank
from headrace.ipc.failure import OptionError
from headrace.kernels.cpu.linear.linear import quantise, quantise_wide
from headrace.kernels.cpu.linear.reference import dequantise as from_gguf
from headrace.kernels.grouped import GroupedWeight, fit_half
from headrace.kernels.reference.attention import AttentionParams, CacheScales
from headrace.kernels.reference.quantised import QuantisedBothLinear, QuantisedLinear, dequantise
from headrace.kernels.registry import choose_reference

GPU = GpuFacts("NVIDIA H200", (9, 0), 8 << 30, 7 << 30)
FP8 = Rounding("fp8", 32)


def test_rows_are_rounded_to_the_nearest_of_448_steps_of_their_own_scale() -> None:
    weight = torch.randn(9000, 24, generator=torch.Generator().manual_seed(1)) * torch.logspace(-4, 4, 9000)[:, None]
    weight[7] = 0
    codes, scales = to_fp8(weight)
    assert codes.dtype is torch.float8_e4m3fn
    back = codes.float() * scales
    # Three bits of mantissa: half a step is a sixteenth of a value, or of the smallest normal one, 2**-6 of the scale.
    bound = torch.maximum(weight.abs() / 16, scales * 2**-10 * 1.001)
    assert bool(((back - weight).abs() <= bound).all())
    assert torch.allclose(back.abs().amax(1), weight.abs().amax(1), rtol=1e-6), "the largest of a row is kept"


@pytest.mark.parametrize("name", ["linear_fp8_dynamic", "linear_fp8"])
def test_fp8_is_multiplied_as_it_is_where_the_device_can(name: str) -> None:
    asked: list[str] = []

    def choose(op: str, **facts: Any) -> Any:
        asked.append(op)
        reference = choose_reference(op)
        return partial(reference) if op == name else reference

    weight = torch.randn(32, 16)
    packed = quantising(choose, FP8)("linear", shape=(32, 16), role="matrix")(weight, None)
    assert isinstance(packed, QuantisedBothLinear if name == "linear_fp8_dynamic" else QuantisedLinear)
    assert packed.nbytes == 32 * 16 + 32 * 4
    dense = quantising(choose, FP8)("linear", shape=(32, 16), role="head")(weight, None)
    assert dense.weight is weight, "the head stays as it is"
    assert asked[-1] == "linear"


def test_batch_invariance_is_asked_of_every_kernel_and_of_attention_at_each_call() -> None:
    facts_of, params_of = {}, []

    def choose(op: str, **facts: Any) -> Any:
        facts_of[op] = facts
        return lambda *arguments: params_of.append(arguments[4:])

    chosen = batch_invariant(choose)
    chosen("linear", shape=(4, 4))
    chosen("rms_norm", size=4)
    attend = chosen("paged_attention", head_dim=8)
    scales = CacheScales(2.0, 3.0)
    attend(None, None, None, None, AttentionParams(0.5, 7, 3.0), scales)
    assert all(facts["batch_invariant"] for facts in facts_of.values())
    assert params_of == [(AttentionParams(0.5, 7, 3.0, batch_invariant=True), scales)], "the scales go along"
    with pytest.raises(OptionError, match="latent attention on a GPU"):
        chosen("latent_attention", latent_dim=4)


def executor_of(model: Path, **options: Any) -> tuple[GpuRank, Any]:
    settings = {"dtype": "float32", "block_size": 4, "max_num_seqs": 4, "max_model_len": 64, **options}
    asked = Options(model=str(model), skip_tokenizer_init=True, **settings)
    executor = GpuRank(asked, torch.device("cpu"), HostBackend(GPU))
    executor.choose = choose_capturable
    plan = resolve(asked, executor.describe(lambda phase: None))
    reading = executor.load(plan, lambda phase: None)
    executor.allocate(num_blocks=64, max_model_len=64)
    return executor, reading


def probabilities(executor: Any) -> np.ndarray:
    """[positions, vocab_size]: what follows each token of a prompt of several blocks, computed in two pieces."""
    maker = PlanMaker(block_size=4)
    maker.enter(0, [7, 8, 9, 10, 11, 12, 13, 14, 15, 16], temperature=0.0, prompt_logprobs=-1)
    rows = []
    for count in (6, None):
        maker.compute(0, count)
        executor.submit(maker.plan())
        rows += [run.rows for run in executor.collect().prompt_logprobs]
    executor.stop()
    parts = []
    for run in rows:
        order = np.argsort(run.token_ids.numpy()[:, 1:], axis=1)
        parts.append(np.exp(np.take_along_axis(run.logprobs.numpy()[:, 1:], order, 1)))
    return np.concatenate(parts)


def furthest(some: np.ndarray, others: np.ndarray) -> float:
    """The largest total variation of two rows."""
    return float(np.abs(some - others).sum(1).max() / 2)


@pytest.mark.parametrize(
    ("quantization", "share", "bound"), every(3, [("int4", 0.2, 0.6), ("fp8", 0.3, 0.5), ("int8", 0.3, 0.05)])
)
def test_a_quantised_model_takes_less_and_answers_nearly_as_its_float32_original(
    quantization: str, share: float, bound: float, tmp_path: Path
) -> None:
    model = tiny_models.save("llama", tmp_path)
    whole, reading = executor_of(model)
    quantised, smaller = executor_of(model, quantization=quantization)
    embeddings = 2 * tiny_models.VOCAB_SIZE * 64 * 4
    assert (smaller.weights_bytes - embeddings) / (reading.weights_bytes - embeddings) < share
    assert 0 < furthest(probabilities(whole), probabilities(quantised)) < bound, "quantised, and not another model"


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("offset", "fits"), [(0.1, True), (10, False)])
def test_int8_and_int4_are_the_weights_that_the_cpu_computes(group: int, offset: float, fits: bool) -> None:
    """offset: of a row, whose range float16 holds or not."""
    weight = torch.randn(70, 256, generator=torch.Generator().manual_seed(2)) * torch.logspace(-2, 3, 70)[:, None]
    weight[3] = 0
    weight[4] = 0.25
    weight[5] = weight[5].abs() + offset
    assert fit_half(weight, 8, group)
    assert dequantise(*to_int8(weight, group)).equal(from_gguf(*quantise(weight, 8, group)))
    assert fit_half(weight, 4, group) == fits
    found, stored = dequantise(*to_int4(weight, group)), (quantise if fits else quantise_wide)(weight, 4, group)
    expected = stored.floats() if isinstance(stored, GroupedWeight) else from_gguf(*stored)
    assert bool(((found - expected).abs() <= 1e-6 * weight.abs().amax(1, keepdim=True)).all())
    small = weight * 2.0**-24
    assert not fit_half(small, 8, group)
    assert torch.allclose(
        dequantise(*to_int8(small, group)), quantise_wide(small, 8, group).floats(), rtol=1e-6, atol=0
    )


def test_rows_that_groups_do_not_divide_stay_as_they_are_which_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chosen = quantising(choose_reference, Rounding("int4", 32))
    weight = torch.randn(32, 48)
    for _ in range(2):
        assert chosen("linear", shape=(32, 48), role="matrix")(weight, None).weight is weight
    assert [record.getMessage() for record in caplog.records] == [
        "matrices with rows of 48 weights are not quantised, as groups of 32 do not divide them"
    ]
    packed = chosen("linear", shape=(32, 64), role="matrix")(torch.randn(32, 64), None)
    assert packed.nbytes == 32 * 32 + 32 * 2 * (2 + 4)


# --- quantised caches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv_cache_dtype", "bound"), every(3, [("fp8", 0.1), ("fp8_e5m2", 0.2), ("int8", 0.03)]))
def test_a_quantised_cache_answers_nearly_as_a_whole_one_and_as_the_cpus(
    kv_cache_dtype: str, bound: float, tmp_path: Path
) -> None:
    model = tiny_models.save("qwen3", tmp_path)
    whole, found = (
        probabilities(executor_of(model)[0]),
        probabilities(executor_of(model, kv_cache_dtype=kv_cache_dtype)[0]),
    )
    assert 0 < furthest(whole, found) < bound
    asked = Options(
        model=str(model), device="cpu", skip_tokenizer_init=True, dtype="float32", block_size=4, max_num_seqs=4,
        max_model_len=64, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    on_the_cpu = make_rank(asked, SINGLE)
    on_the_cpu.load(resolve(asked, on_the_cpu.describe(lambda phase: None)), lambda phase: None)
    on_the_cpu.allocate(num_blocks=64, max_model_len=64)
    assert furthest(probabilities(on_the_cpu), found) < bound / 5, "the same roundings; the CPU's queries are in bf16"


def test_a_quantised_cache_is_allocated_with_its_scales_and_counted_with_them(tmp_path: Path) -> None:
    model = tiny_models.save("llama", tmp_path)
    executor, _ = executor_of(model, kv_cache_dtype="int8")
    cache = executor.steps.steps._kv_cache
    assert cache.keys[0].dtype is torch.int8
    assert cache.nbytes == 64 * block_bytes(executor._plan)
    assert executor.steps.steps._kv_cache.layers[1].scales.keys is cache.key_scales[1]


def test_on_a_cpu_fp8_is_refused(tmp_path: Path) -> None:
    folder = str(tiny_models.save("llama", tmp_path))
    options = Options(model=folder, device="cpu", quantization="fp8", skip_tokenizer_init=True)
    rank = make_rank(options, SINGLE)
    plan = resolve(options, rank.describe(lambda name: None))
    with pytest.raises(OptionError, match="quantization=fp8 of float weights is computed on a GPU only"):
        rank.load(plan, lambda name: None)
