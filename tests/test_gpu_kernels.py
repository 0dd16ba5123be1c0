"""fp8 weights and batch invariance, which are ways of choosing kernels."""

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

from headrace.core.options import Options
from headrace.core.resolve import resolve
from headrace.executor.gpu import GpuExecutor
from headrace.executor.gpu_device import GpuFacts
from headrace.executor.gpu_kernels import batch_invariant, quantising, to_fp8
from headrace.executor.uniproc import make_executor
from headrace.ipc.failure import OptionError
from headrace.kernels.reference_attention import AttentionParams
from headrace.kernels.reference_quantised import QuantisedBothLinear, QuantisedLinear
from headrace.kernels.registry import choose_reference

GPU = GpuFacts("NVIDIA H200", (9, 0), 8 << 30, 7 << 30)


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
    packed = quantising(choose, vocab_size=99)("linear", shape=(32, 16))(weight, None)
    assert isinstance(packed, QuantisedBothLinear if name == "linear_fp8_dynamic" else QuantisedLinear)
    assert packed.nbytes == 32 * 16 + 32 * 4
    dense = quantising(choose, vocab_size=32)("linear", shape=(32, 16))(weight, None)
    assert dense.weight is weight, "the head stays as it is"
    assert asked[-1] == "linear"


def test_batch_invariance_is_asked_of_every_kernel_and_of_attention_at_each_call() -> None:
    facts_of, params_of = {}, []

    def choose(op: str, **facts: Any) -> Any:
        facts_of[op] = facts
        return lambda *arguments: params_of.append(arguments[-1])

    chosen = batch_invariant(choose)
    chosen("linear", shape=(4, 4))
    chosen("rms_norm", size=4)
    attend = chosen("paged_attention", head_dim=8)
    attend(None, None, None, None, AttentionParams(0.5, 7, 3.0))
    assert all(facts["batch_invariant"] for facts in facts_of.values())
    assert params_of == [AttentionParams(0.5, 7, 3.0, batch_invariant=True)]


def executor_of(model: Path, **options: Any) -> tuple[GpuExecutor, Any]:
    settings = {"dtype": "float32", "block_size": 4, "max_num_seqs": 4, "max_model_len": 64, **options}
    asked = Options(model=str(model), skip_tokenizer_init=True, **settings)
    executor = GpuExecutor(asked, torch.device("cpu"), HostBackend(GPU))
    executor.choose = choose_capturable
    plan = resolve(asked, executor.describe(lambda phase: None))
    reading = executor.load(plan, lambda phase: None)
    executor.allocate(num_blocks=64, max_model_len=64)
    return executor, reading


def test_an_fp8_model_takes_a_quarter_and_answers_nearly_as_its_float32_original(tmp_path: Path) -> None:
    model = tiny_models.save("llama", tmp_path)
    logprobs, sizes = [], []
    for options in ({}, {"quantization": "fp8"}):
        executor, reading = executor_of(model, **options)
        maker = PlanMaker(block_size=4)
        maker.enter(0, [7, 8, 9, 10], temperature=0.0, logprobs=-1, prompt_logprobs=-1)
        maker.compute(0)
        executor.submit(maker.plan())
        result = executor.collect()
        sizes.append(reading.weights_bytes)
        run = result.prompt_logprobs[0].rows
        order = np.argsort(run.token_ids.numpy()[:, 1:], axis=1)
        logprobs.append(np.take_along_axis(run.logprobs.numpy()[:, 1:], order, 1))
        executor.stop()
    embeddings = 2 * tiny_models.VOCAB_SIZE * 64 * 4
    assert (sizes[1] - embeddings) / (sizes[0] - embeddings) < 0.3
    difference = np.abs(np.exp(logprobs[0]) - np.exp(logprobs[1])).sum(1) / 2
    assert 0 < difference.max() < 0.5, "it is quantised, and not another model"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"quantization": "fp8"}, r"quantization=fp8 is computed on a GPU only, and the model runs on the CPU"),
        ({"batch_invariant": True}, r"batch_invariant is for GPUs, and the model runs on the CPU \(device=cpu\)"),
    ],
)
def test_on_a_cpu_both_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(OptionError, match=expected):
        make_executor(Options(device="cpu", **options))
