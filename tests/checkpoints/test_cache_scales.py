"""Scales of an fp8 cache that checkpoints hold are those that keys and values are divided by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints as made
import tiny_models
import torch
from gpu_parts import HostBackend
from model_driver import Driver
from rank_threads import pool_for_each_rank
from safetensors.torch import load_file, save_file
from test_packed_engine import started
from test_parallel_model import THREADS, first_logprobs
from test_quantisation import PROMPT, opened, relative_to_spread

from headrace.core.options.engine_options import Options
from headrace.core.options.memory import block_bytes
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.gpu.hardware.device import GpuFacts
from headrace.executor.gpu.rank import GpuRank
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.ipc.failure import ModelError, OptionError
from headrace.kernels.cpu import build

__all__ = ["pool_for_each_rank"]  # a fixture

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

SAME_CODES_ERROR = 0.02
"""RMS error over the logits' spread of two computations of one cache: a code at a border is another in few places."""
ROUNDING_ERROR = 0.05
"""The same of values with 3 bits of mantissa."""
OWN = ((0.015, 0.02), (0.018, 0.03))
"""Of the keys and the values of each layer."""
NAMES = {
    "of attention": ("self_attn.k_scale", "self_attn.v_scale"),
    "of vLLM's layer": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    "of projections": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "of outputs": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
}


def checkpoint_with(folder: Path, scales: dict[str, torch.Tensor]) -> Path:
    made.write(folder, tiny_models.build("llama", num_hidden_layers=2), *made.fp8("rows"))
    file = folder / "model.safetensors"
    save_file(load_file(file) | scales, file)
    return folder


def named(kind: str = "of attention") -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{layer}.{name}": torch.tensor(scale)
        for layer, pair in enumerate(OWN)
        for name, scale in zip(NAMES[kind], pair, strict=True)
    }


@pytest.mark.parametrize("kind", NAMES)
def test_scales_are_found_by_every_name_that_tools_give_them(kind: str, tmp_path: Path) -> None:
    folder = checkpoint_with(tmp_path, named(kind))
    checkpoint = open_checkpoint(Options(model=str(folder)))
    found = checkpoint.cache_scales(spec_from_config(checkpoint.config))
    assert found == tuple(tuple((float(torch.tensor(scale)),) for scale in pair) for pair in OWN)


def test_one_scale_for_both_is_taken_twice(tmp_path: Path) -> None:
    both = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor([0.5]) for layer in range(2)}
    checkpoint = open_checkpoint(Options(model=str(checkpoint_with(tmp_path, both))))
    assert checkpoint.cache_scales(spec_from_config(checkpoint.config)) == (((0.5,), (0.5,)), ((0.5,), (0.5,)))


def of_heads(factors: Sequence[float] = (1.0, 1.3, 0.8, 1.1)) -> dict[str, torch.Tensor]:
    """As llm-compressor names and shapes those of its strategy attn_head: OWN with a factor for each of 4 heads."""
    return {name: scale * torch.tensor(factors)[:, None, None] for name, scale in named().items()}


@pytest.mark.parametrize("scales", [named, of_heads], ids=["of layers", "of heads"])
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_program_and_the_reference_divide_by_the_checkpoints_scales(
    scales: Any, stored: torch.dtype, tmp_path: Path
) -> None:
    folder = checkpoint_with(tmp_path, scales())
    program = opened(folder)
    checkpoint = open_checkpoint(Options(model=str(folder)))
    by_op = Decoder(program.spec, checkpoint.weights(), torch.float32, "cpu")
    own = checkpoint.cache_scales(program.spec)

    def logits(decoder: Any, **options: Any) -> torch.Tensor:
        driver = Driver(decoder, cache_dtype=stored, **options)
        return driver.greedy([PROMPT], 1, chunk=4)[1][0]

    assert relative_to_spread(logits(program, layer_scales=own), logits(by_op, layer_scales=own)) < SAME_CODES_ERROR
    # Scales that cut most values off: both compute the same wrong thing, and no other.
    small = (((1e-5,), (1e-5,)),) * 2
    cut = logits(by_op, layer_scales=small)
    assert relative_to_spread(logits(program, layer_scales=small), cut) < SAME_CODES_ERROR
    assert relative_to_spread(cut, logits(by_op)) > 10 * SAME_CODES_ERROR


@pytest.mark.parametrize("scales", [named, of_heads], ids=["of layers", "of heads"])
def test_the_first_scale_is_of_keys_and_the_second_of_values(scales: Any, tmp_path: Path) -> None:
    folder = checkpoint_with(tmp_path, scales())
    checkpoint = open_checkpoint(Options(model=str(folder)))
    spec = spec_from_config(checkpoint.config)
    decoder = Decoder(spec, checkpoint.weights(), torch.float32, "cpu")
    exact = Driver(decoder)
    scaled = Driver(decoder, cache_dtype=torch.float8_e4m3fn, layer_scales=checkpoint.cache_scales(spec))
    for driver in (exact, scaled):
        driver.greedy([PROMPT], 1, chunk=64)
    for name, scale in zip(("keys", "values"), checkpoint.cache_scales(spec)[0], strict=True):
        expected, stored = (getattr(driver.cache, name)[0].float() for driver in (exact, scaled))
        written = expected.isfinite()
        assert written.sum() == len(PROMPT) * spec.layers[0].mixer.cache.num_heads * expected.shape[-1]
        found = (stored * torch.tensor(scale)[:, None, None])[written]
        assert relative_to_spread(found, expected[written].double()) < ROUNDING_ERROR


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"kv_cache_dtype": "fp8"}, OWN),
        ({"kv_cache_dtype": "fp8_e5m2"}, OWN),
        ({"kv_cache_dtype": "fp8", "calculate_kv_scales": True}, ()),
        ({"kv_cache_dtype": "int8"}, ()),
        ({}, ()),
    ],
)
def test_an_fp8_cache_has_them_unless_they_are_to_be_calculated(
    asked: dict[str, Any], expected: tuple[tuple[float, float], ...], tmp_path: Path
) -> None:
    executor, plan, _ = started(checkpoint_with(tmp_path, named()), **asked)
    assert executor._runner is not None
    cache = executor._runner._kv_cache
    assert [(found.key, found.value) for found in cache.layer_scales] == [pytest.approx(own) for own in expected]
    assert cache.nbytes == 200 * block_bytes(plan), "no memory for scales of rows beside them"
    assert bool(cache.key_scales) == (cache.keys[0].itemsize == 1 and not expected)


@pytest.mark.parametrize("held", ["keys alone", "of three heads", "of one layer"])
def test_what_is_not_a_number_for_each_layer_or_head_is_calculated_and_that_is_said(
    held: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scales = named()
    if held == "keys alone":
        scales = {name: scale for name, scale in scales.items() if "k_scale" in name}
    elif held == "of one layer":
        scales = {name: scale for name, scale in scales.items() if "layers.0" in name}
    else:
        scales = {name: torch.full((3,), 0.1) for name in scales}
    executor, _, _ = started(checkpoint_with(tmp_path, scales), kv_cache_dtype="fp8")
    assert executor._runner is not None
    assert not executor._runner._kv_cache.layer_scales
    assert executor._runner._kv_cache.key_scales
    assert "scales of a quantised cache (model.layers.0.self_attn.k_scale ...) have no effect" in caplog.text


@pytest.mark.parametrize("asked", ["fp8", "fp8_e5m2"])
def test_a_gpu_takes_scales_of_layers_and_of_heads(asked: Any, tmp_path: Path) -> None:
    gpu = HostBackend(GpuFacts("A GPU", (9, 0), 4 << 30, 3 << 30))

    def rows_with_scales(folder: Path, **options: Any) -> int:
        wanted = Options(model=str(folder), skip_tokenizer_init=True, kv_cache_dtype=asked, **options)
        return GpuRank(wanted, torch.device("cuda", 0), gpu).describe(lambda phase: None).kv_rows_per_token

    for kind, scales in (("even", named()), ("own", of_heads())):
        folder = checkpoint_with(tmp_path / kind, scales)
        assert rows_with_scales(folder) == 0
        assert rows_with_scales(folder, calculate_kv_scales=True) == 2 * 2 * 4


def test_ranks_divide_by_the_scales_of_their_own_heads(tmp_path: Path) -> None:
    # The smaller ones cut values off, so that a head which took another's would be seen.
    folder = checkpoint_with(tmp_path / "own", of_heads((1.0, 1e-3, 2e-3, 5e-4)))
    even = checkpoint_with(tmp_path / "even", named())
    options = {"dtype": "float32", "kv_cache_dtype": "fp8"}
    two = first_logprobs(folder, **options, distributed_executor_backend=THREADS, tensor_parallel_size=2)
    one = first_logprobs(folder, **options)
    assert two == pytest.approx(one, abs=0.06)
    assert one != pytest.approx(first_logprobs(even, **options), abs=0.12)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_scale_that_is_no_number_above_0_is_named(scale: float, tmp_path: Path) -> None:
    scales = named() | {"model.layers.1.self_attn.v_scale": torch.tensor(scale)}
    with pytest.raises(ModelError, match=r"cache model\.layers\.1\.self_attn\.v_scale is .*; a number above 0"):
        started(checkpoint_with(tmp_path, scales), kv_cache_dtype="fp8")


def test_calculated_scales_of_another_cache_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="calculate_kv_scales=True needs an fp8 cache, and kv_cache_dtype is auto"):
        started(checkpoint_with(tmp_path, named()), calculate_kv_scales=True)
