"""What `quantization` and `kv_cache_dtype` ask of the CPU program: float weights and caches made small as they come."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from model_driver import DictSource, Driver
from rounded_cache import RoundedCache
from test_cpu_decoder import LIMITS, relative_error
from test_models import config_of, random_prompts, reference, reference_logits, state_of
from thinned import every

from headrace.core.options.engine_options import Options
from headrace.core.options.resolve import resolve
from headrace.executor.cpu.decoder import CpuDecoder
from headrace.executor.cpu.rank import CpuRank
from headrace.executor.cpu.weights import Blocks
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.ipc.failure import ModelError, OptionError
from headrace.kernels.cpu import build
from headrace.kernels.cpu.linear.linear import dequantise, quantise, quantise_wide, runtime
from headrace.kernels.grouped import GroupedWeight, fit_half
from headrace.kernels.registry import choose_reference

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

SAME_WEIGHTS_ERROR = 1e-3
"""RMS error over the logits' spread when only activations are rounded, to 16 bits."""
CACHE_ERROR = {torch.int8: 0.05, torch.float8_e4m3fn: 0.2}
"""The same of a cache: these random models double its rounding (3 bits of mantissa in fp8). A wrong scale gives 1."""


def program(name: str, state: dict[str, Any] | None = None, **options: Any) -> CpuDecoder:
    source = DictSource(state or state_of(reference(name)))
    return CpuDecoder(
        spec_from_config(config_of(name)), source, torch.float32, LIMITS, used=runtime(num_threads=1), **options
    )


def logits_of(decoder: CpuDecoder | Decoder, **options: Any) -> tuple[list[list[int]], list[torch.Tensor]]:
    return Driver(decoder, **options).greedy(random_prompts((60, 17)), 4, chunk=64)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_as_read_computes_the_dequantised_weights(bits: int) -> None:
    name, group = "qwen3", 32
    blocks = Blocks(bits, (group,))
    state = state_of(reference(name))
    rounded = {}
    for key, weight in state.items():
        if weight.dim() == 2 and weight.shape[1] % group == 0:
            own = 8 if "embed" in key or "lm_head" in key else bits
            rounded[key] = dequantise(*quantise(weight, own, group))
        else:
            rounded[key] = weight
    small, exact = program(name, blocks=blocks), program(name, rounded)
    assert small.weight_bytes < 0.4 * exact.weight_bytes
    error = spread = 0.0
    for ours, theirs in zip(logits_of(small)[1], logits_of(exact)[1], strict=True):
        error += (ours[0] - theirs[0]).square().mean().item()  # later rows may follow another token
        spread += theirs[0].var().item()
    assert 0 < (error / spread) ** 0.5 < SAME_WEIGHTS_ERROR
    types = {
        weight.type_name
        for layer in small._model.layers
        for weight in (*layer.mixer["qkv"].weights, *layer.ffn["down"].weights)
    }
    assert types == {"Q8_0" if bits == 8 else "Q4_1"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("bits", "rounds_inputs"), [(8, False), (8, True), (4, False)])
def test_weights_that_are_not_finite_are_named_and_not_made_codes(bits: int, rounds_inputs: bool, value: float) -> None:
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.v_proj.weight", "lm_head.weight"):
        state = dict(state_of(reference("llama")))
        state[name] = state[name].clone()
        state[name][6, 3] = value
        with pytest.raises(ModelError, match=f"{name} holds infinities or NaN, which cannot be quantised"):
            program("llama", state, blocks=Blocks(bits, (32,), rounds_inputs=rounds_inputs))


def test_rows_that_no_group_divides_stay_floats_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        decoder = program("llama3", blocks=Blocks(8, (128,)))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1, "one warning"
    assert said[0].startswith("kept as floats, as groups of 128 do not divide rows: ")
    assert relative_error(decoder, reference("llama3")) < 0.05


def test_a_matrix_has_the_first_of_the_groups_that_divides_its_rows() -> None:
    state = state_of(reference("llama3"))
    widths = {weight.shape[1] for weight in state.values() if weight.dim() == 2}
    assert {width % 64 for width in widths} == {0, 32}, "one of each kind"
    both, small = (program("llama3", state, blocks=Blocks(8, sizes, rounds_inputs=True)) for sizes in ((64, 32), (32,)))
    for ours, theirs in zip(both._model.layers, small._model.layers, strict=True):
        for key in ("qkv", "down"):
            block = "mixer" if key == "qkv" else "ffn"
            (mine,), (other,) = (getattr(each, block)[key].weights for each in (ours, theirs))
            expected = 64 if mine.descriptor.k % 64 == 0 else 32
            assert (mine.descriptor.group, other.descriptor.group) == (expected, 32)
    coarse, fine = (relative_error(each, reference("llama3")) for each in (both, small))
    assert fine < coarse < 2 * fine


@pytest.mark.parametrize("cache_dtype", CACHE_ERROR)
def test_a_scaled_cache_stays_close(cache_dtype: torch.dtype) -> None:
    name = "llama3"
    prompts = random_prompts((60, 17))
    answers, logits = logits_of(program(name), cache_dtype=cache_dtype)
    error = spread = 0.0
    for prompt, answer, rows in zip(prompts, answers, logits, strict=True):
        exact = reference_logits(reference(name), prompt, answer)
        error += (rows - exact).square().mean().item()
        spread += exact.var().item()
    assert 0 < (error / spread) ** 0.5 < CACHE_ERROR[cache_dtype]


BF16_ATTENTION_ERROR = 2**-7
"""Over the logits' spread, where the program's attention rounds queries and softmax weights to bf16 (2^-9)."""


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("by", ["reference", "program"])
def test_a_scaled_cache_is_transformers_with_rounded_keys_and_values(by: str, cache_dtype: torch.dtype) -> None:
    # In one layer what is stored is rounded alike. What attention errs by makes other codes of values in the next.
    model = tiny_models.build("llama3", num_hidden_layers=1)
    spec = spec_from_config(model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    source = DictSource(state_of(model))
    decoder: Decoder | CpuDecoder
    if by == "program":
        decoder = CpuDecoder(spec, source, torch.float32, LIMITS, used=runtime(num_threads=1))
    else:
        decoder = Decoder(spec, source, torch.float32, "cpu", choose=choose_reference)
    prompts = random_prompts((60, 17))
    for prompt, answer, rows in zip(prompts, *logits_of(decoder, cache_dtype=cache_dtype), strict=True):
        ids = torch.tensor([prompt + answer[:-1]])
        with torch.inference_mode():
            rounded = model(ids, past_key_values=RoundedCache(cache_dtype)).logits[0, len(prompt) - 1 :]
        exact = reference_logits(model, prompt, answer)
        error, lost = (((rows - other).square().mean().sqrt() / other.std()).item() for other in (rounded, exact))
        assert error < (BF16_ATTENTION_ERROR if by == "program" else 1e-5)
        assert lost > (0.5 if cache_dtype == torch.int8 else 5) * BF16_ATTENTION_ERROR, "rounding is seen"


def test_what_runs_op_by_op_refuses_what_programs_do(tmp_path: Path) -> None:
    tiny_models.save("llama_dynamic", tmp_path)
    for asked in ({"quantization": "int8"}, {"kv_cache_dtype": "int8"}, {"batch_invariant": True}):
        options = Options(model=str(tmp_path), skip_tokenizer_init=True, **asked)  # type: ignore[arg-type]
        executor = CpuRank(options)
        plan = resolve(options, executor.describe(lambda name: None))
        with pytest.raises(OptionError, match=r"needs the CPU kernels' program, which cannot run .* rotary scaling"):
            executor.load(plan, lambda name: None)


@pytest.mark.parametrize("bits", every(2, [8, 4]))
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("power", [24, -24, 12], ids=str)
def test_a_model_whose_matrices_are_scaled_apart_answers_as_it_does_unscaled(name: str, bits: int, power: int) -> None:
    """up by 2^-power and down by 2^power: the same function, whose codes are the same; float16 holds no such steps."""
    state = dict(state_of(reference(name)))
    scaled = {key: _scaled(key, weight, power) for key, weight in state.items()}
    blocks = Blocks(bits, (32,))
    plain = logits_of(program(name, state, blocks=blocks))[1]
    apart = logits_of(program(name, scaled, blocks=blocks))[1]
    exact = logits_of(program(name, scaled))[1]
    for ours, theirs, floats in zip(apart, plain, exact, strict=True):
        spread = floats[0].std()
        most = (theirs[0] - floats[0]).square().mean().sqrt()  # of rounding to codes
        assert (ours[0] - floats[0]).square().mean().sqrt() < 1.5 * most + SAME_WEIGHTS_ERROR * spread


def _scaled(key: str, weight: torch.Tensor, power: int) -> torch.Tensor:
    if key.endswith("up_proj.weight"):
        return weight * 2.0**-power
    return weight * 2.0**power if key.endswith("down_proj.weight") else weight


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "values",
    [
        pytest.param(lambda w: w * 1e-8, id="small"),
        pytest.param(lambda w: w * 1e7, id="large"),
        pytest.param(lambda w: w * 1e-8 + 1, id="near one value"),
        pytest.param(lambda w: torch.full_like(w, -3e-9), id="one small value"),
        pytest.param(torch.zeros_like, id="zeros"),
        pytest.param(lambda w: torch.cat([w[:8], w[8:] * 1e-8]), id="some rows small"),
    ],
)
def test_codes_are_within_half_a_step_whatever_the_magnitude(bits: int, values: Any) -> None:
    weight = values(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).double()).float()
    fits = fit_half(weight, bits, 32)
    stored = (quantise if fits else quantise_wide)(weight, bits, 32)
    found = stored.floats() if isinstance(stored, GroupedWeight) else dequantise(*stored)
    groups = weight.double().view(16, 2, 32)
    span = groups.abs().amax(-1) / 127 if bits == 8 else (groups.amax(-1) - groups.amin(-1)) / 15
    error = (found.double().view(16, 2, 32) - groups).abs().amax(-1)
    assert bool((error <= 0.6 * span + 1e-6 * groups.abs().amax(-1)).all())
