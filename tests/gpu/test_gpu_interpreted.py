"""The whole of a GPU's step, with its Triton kernels interpreted on the CPU, gives the tokens of the CPU's path.

The interpreter is chosen by an environment variable before triton is imported, hence the process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import interpreted_decode
import pytest
import torch
from interpreted_decode import cache_of, limits_of, load_adapters, model_and_spec, quantised, source_of, tokens_of
from triton_cases import why_not_interpreted

from headrace.executor.cpu.runner import ModelRunner
from headrace.executor.models.decoder import Decoder
from headrace.executor.step.batch import BatchState
from headrace.kernels.registry import choose_reference

pytestmark = pytest.mark.system

if reason := why_not_interpreted():
    pytest.skip(reason, allow_module_level=True)

RUNNER = Path(interpreted_decode.__file__)
NAMES = (
    *("llama_biases+linear", "qwen3", "gemma2"),
    *("deepseek_v2_moe", "gpt_oss", "gemma3n", "solar"),
    *("llama_gqa_tied+cache_fp8_e4m3", "qwen3+cache_int8", "llama_gqa_tied+int8", "llama_gqa_tied+int4"),
    *("llama_biases+adapters", "qwen3+adapters"),
    *("lfm2_biases", "mamba2", "qwen3_5"),
)
FUSED = {"activate_and_multiply", "embed", "paged_attention", "rms_norm", "rotary_and_write"}
EXPERTS = {"embed", "experts", "rms_norm", "route_experts"}
SERVED = {
    "deepseek_v2_moe": EXPERTS | {"activate_and_multiply", "latent_attention", "rotary", "write_cache"},
    "gpt_oss": EXPERTS | {"paged_attention", "rotary_and_write"},
    "gemma3n": FUSED | {"rotary"},
    "lfm2_biases": FUSED | {"convolve"},
    "mamba2": {"convolve", "scan", "embed", "rms_norm"},
    "qwen3_5": FUSED | {"convolve", "linear_attention"},
}


def outcome_of(name: str) -> dict[str, list[list[int]]]:
    """Of a process of its own, as a case takes half a minute on an idle core."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(RUNNER), name], capture_output=True, text=True, timeout=280, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    outcome: dict[str, list[list[int]]] = json.loads(result.stdout)
    return outcome


def runner_of(name: str) -> tuple[ModelRunner, int, int]:
    """Of a CPU's path, without programs; the pages of a row's state, and the cache groups with block tables."""
    model, _, kind = name.partition("+")
    built, spec = model_and_spec(model, kind)
    limits, chosen = limits_of(kind), quantised(choose_reference, kind)
    decoder = Decoder(spec, source_of(built, spec), torch.float32, choose=chosen, adapters=limits)
    if limits is not None:
        load_adapters(built, spec, decoder, limits)
    cache, pages = cache_of(spec, kind)
    batch = BatchState(2, 32, 16, factors=cache.factors, state_pages=pages)
    return ModelRunner(decoder, cache, batch, vocab_size=spec.vocab_size), pages, len(cache.factors)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_through_interpreted_kernels_are_the_cpu_paths(name: str) -> None:
    outcome = outcome_of(name)
    kind = name.partition("+")[2]
    runner, pages, groups = runner_of(name)
    assert outcome["tokens"] == tokens_of(runner.step, kind, pages, groups)
    if kind == "adapters":
        assert {"slotted_low_rank", "linear"} <= set(outcome["served"])
        without = tokens_of(runner_of(name)[0].step)
        assert outcome["tokens"][0] != without[0], "the adapters change nothing"
        assert outcome["tokens"][1] == without[1], "a row without adapters has other tokens"
    linear = {f"linear_{kind}".removesuffix("_linear")} if kind in ("int8", "int4", "linear") else set()
    assert set(outcome["served"]) >= SERVED.get(name, FUSED) | linear, "what is not served by Triton is not tested here"
