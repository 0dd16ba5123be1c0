"""Quantised checkpoints on the CPU: they compute what their dequantised weights do, packed, and bad ones are named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import published_models
import pytest
import quantised_checkpoints as made
import tiny_models
import torch
from model_driver import Driver
from rank_threads import pool_for_each_rank
from safetensors.torch import load_file, save_file
from test_cpu_decoder import LIMITS
from test_parallel_model import THREADS, first_logprobs
from thinned import every
from tiny_gguf import saved_state
from tiny_mixtures import FAMILIES as MIXTURES
from torch import Tensor
from transformers.integrations import mxfp4
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.cpu.decoder import CpuDecoder
from headrace.executor.cpu.weights import CpuLinear
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.ipc.failure import ModelError, OptionError
from headrace.kernels.cpu import build
from headrace.kernels.cpu.experts.moe import PackedExperts
from headrace.kernels.cpu.linear.linear import runtime
from headrace.kernels.grouped import InputRounding
from headrace.kernels.reference.quantised import REFERENCES, QuantisedLinear
from headrace.kernels.reference.rows import DenseLinear
from headrace.kernels.registry import choose_reference

__all__ = ["pool_for_each_rank"]  # a fixture

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

PROMPT = [5, 81, 17, 200, 33, 9, 264, 301, 12, 77]
MOST_ERROR = 1e-3
"""RMS error of logits over their spread where weights are exact and activations are rounded to 16 bits in blocks of 32
(relative 2^-15): tiny random models multiply that from layer to layer."""
EXACT_ERROR = 2e-5
"""The same where activations stay fp32: float codes."""


def opened(folder: Path, **options: Any) -> CpuDecoder:
    checkpoint = open_checkpoint(Options(model=str(folder), **options))
    spec = spec_from_config(checkpoint.config)
    return CpuDecoder(spec, checkpoint.weights(), torch.float32, LIMITS, keep_packed=True, used=runtime(num_threads=1))


MOST_PERPLEXITY_CHANGE = 1e-3


def exact_greedy(model: Any, steps: int) -> tuple[list[int], Tensor]:
    """Tokens after PROMPT and their logits in float64."""
    ids, logits = list(PROMPT), []
    with torch.no_grad():
        for _ in range(steps):
            logits.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1])
            ids.append(int(logits[-1].argmax()))
    return ids[len(PROMPT) :], torch.stack(logits)


def error_of(decoder: CpuDecoder | Decoder, model: Any, steps: int = 6) -> float:
    """Of the logits over their spread, after the greedy tokens were found equal."""
    expected, exact = exact_greedy(model, steps)
    (tokens,), (logits,) = Driver(decoder).greedy([PROMPT], steps, chunk=64)
    assert tokens == expected
    return relative_to_spread(logits, exact)


def kinds_of(decoder: CpuDecoder) -> set[str]:
    """The types of all matrices of layers."""
    found = set()
    for layer in decoder._model.layers:
        for held in (*layer.mixer.values(), *layer.ffn.values()):
            if isinstance(held, CpuLinear):
                found |= {weight.type_name for weight in held.weights}
            elif isinstance(held, PackedExperts):
                found |= {weight.type_name for weight in (*held.gate_up, *held.down)}
    return found


Case = tuple[Callable[[], tuple[dict[str, Any], made.Writer]], set[str], float]
CASES: dict[str, Case] = {
    "gptq 4 bits": (made.gptq, {"int4"}, MOST_ERROR),
    "gptq 4 bits, zeros": (lambda: made.gptq(symmetric=False), {"int4"}, MOST_ERROR),
    "gptq 8 bits": (lambda: made.gptq(8), {"int8"}, MOST_ERROR),
    "gptq 3 bits": (lambda: made.gptq(3), {"int4"}, MOST_ERROR),
    "gptq 2 bits, zeros": (lambda: made.gptq(2, symmetric=False), {"int4"}, MOST_ERROR),
    "gptq desc_act": (lambda: made.gptq(desc_act=True), {"int4"}, MOST_ERROR),
    "gptq rows, v2": (lambda: made.gptq(group=-1, symmetric=False, v2=True), {"int4"}, MOST_ERROR),
    "gptq planar 3 bits": (lambda: made.gptq(3, planar=True), {"int4"}, MOST_ERROR),
    "gptq planar 5 bits": (lambda: made.gptq(5, planar=True), {"int8"}, MOST_ERROR),
    "gptq planar 6 bits, desc_act": (lambda: made.gptq(6, planar=True, desc_act=True), {"int8"}, MOST_ERROR),
    "gptq planar 7 bits, zeros": (lambda: made.gptq(7, planar=True, symmetric=False), {"int8"}, MOST_ERROR),
    "awq": (made.awq, {"int4"}, MOST_ERROR),
    "fp8 matrix": (lambda: made.fp8("matrix"), {"e4m3"}, EXACT_ERROR),
    "fp8 rows": (lambda: made.fp8("rows"), {"e4m3"}, EXACT_ERROR),
    "fp8 blocks": (lambda: made.fp8("blocks"), {"e4m3"}, EXACT_ERROR),
    "fp8 exponents": (lambda: made.fp8("exponents"), {"e4m3"}, EXACT_ERROR),
    "fp8 exponents as bytes": (lambda: made.fp8("exponents as bytes"), {"e4m3"}, EXACT_ERROR),
    "fp8 divisors": (lambda: made.fp8("divisors"), {"e4m3"}, EXACT_ERROR),
    "modelopt fp8": (lambda: made.modelopt("FP8"), {"e4m3"}, EXACT_ERROR),
    "modelopt nvfp4": (lambda: made.modelopt("NVFP4"), {"float4"}, EXACT_ERROR),
    "modelopt mixed": (made.modelopt_mixed, {"e4m3", "float4"}, EXACT_ERROR),
    "quark fp8": (lambda: made.quark("fp8_e4m3"), {"e4m3"}, EXACT_ERROR),
    "quark int8": (lambda: made.quark("int8"), {"int8"}, MOST_ERROR),
    "quark int4": (lambda: made.quark("int4"), {"int4"}, MOST_ERROR),
    "quark uint4": (lambda: made.quark("uint4"), {"int4"}, MOST_ERROR),
    "quark mxfp4": (lambda: made.quark("fp4"), {"float4"}, EXACT_ERROR),
    "quark mxfp6 e2m3": (lambda: made.quark("fp6_e2m3"), {"e4m3"}, EXACT_ERROR),
    "quark mxfp6 e3m2": (lambda: made.quark("fp6_e3m2"), {"e4m3"}, EXACT_ERROR),
    "compressed W4A16": (lambda: made.compressed("W4A16", **made.W4), {"int4"}, MOST_ERROR),
    "compressed W4A16 zeros": (lambda: made.compressed("W4A16 zeros", **made.W4), {"int4"}, MOST_ERROR),
    "compressed W4A16 ordered": (lambda: made.compressed("W4A16 ordered", **made.W4), {"int4"}, MOST_ERROR),
    "compressed W3A16 zeros": (
        lambda: made.compressed("W3A16 zeros", **made.W3),
        {"int4"},
        MOST_ERROR,
    ),
    "compressed W5A16": (lambda: made.compressed("W5A16", **made.W5), {"int8"}, MOST_ERROR),
    "compressed W8A16": (lambda: made.compressed("W8A16", **made.W8), {"int8"}, MOST_ERROR),
    "compressed W8A8": (lambda: made.compressed("W8A8", **made.W8), {"int8"}, MOST_ERROR),
    "compressed W4A8": (lambda: made.compressed("W4A8", **made.W4), {"int4"}, MOST_ERROR),
    "compressed fp8": (lambda: made.compressed("fp8", **(made.W8 | {"type": "float"})), {"e4m3"}, EXACT_ERROR),
    "compressed mxfp8": (lambda: made.compressed("MXFP8", **made.F8), {"e4m3"}, EXACT_ERROR),
    "compressed nvfp4": (lambda: made.compressed("NVFP4", **made.F4), {"float4"}, EXACT_ERROR),
    "compressed mxfp4": (lambda: made.compressed("MXFP4", **made.F4), {"float4"}, EXACT_ERROR),
    "torchao int8": (lambda: made.torchao("Int8WeightOnly"), {"int8"}, MOST_ERROR),
    "torchao 4 bits, zeros": (lambda: made.torchao("IntxWeightOnly"), {"int4"}, MOST_ERROR),
    "torchao fp8": (lambda: made.torchao("Float8WeightOnly"), {"e4m3"}, EXACT_ERROR),
    "hqq 8 bits": (lambda: made.hqq(8), {"int8"}, MOST_ERROR),
    "hqq 4 bits": (lambda: made.hqq(4), {"int4"}, MOST_ERROR),
    "hqq 2 bits": (lambda: made.hqq(2), {"int4"}, MOST_ERROR),
    "bitsandbytes int8": (lambda: made.bitsandbytes("int8"), {"int8"}, MOST_ERROR),
    "bitsandbytes nf4": (lambda: made.bitsandbytes("nf4"), {"float4"}, EXACT_ERROR),
    "bitsandbytes nf4 double": (lambda: made.bitsandbytes("nf4 double"), {"float4"}, EXACT_ERROR),
    "bitsandbytes nf4 as bfloat16": (lambda: made.bitsandbytes("nf4 as bfloat16"), {"float4"}, EXACT_ERROR),
    "bitsandbytes fp4": (lambda: made.bitsandbytes("fp4"), {"float4"}, EXACT_ERROR),
}


@pytest.mark.parametrize("case", every(2, CASES))
def test_logits_are_those_of_the_dequantised_model_and_weights_stay_packed(case: str, tmp_path: Path) -> None:
    make, kinds, bound = CASES[case]
    model = made.write(tmp_path, tiny_models.build("llama"), *make())
    decoder = opened(tmp_path)
    assert kinds_of(decoder) == kinds
    assert error_of(decoder, model) < bound
    own, exact = made.perplexities(decoder, model)
    assert own == pytest.approx(exact, rel=MOST_PERPLEXITY_CHANGE)


def relative_to_spread(logits: Tensor, exact: Tensor) -> float:
    return float((logits.double() - exact).square().mean().sqrt() / exact.std())


@pytest.mark.parametrize("case", ["gptq 4 bits, zeros", "awq", "fp8 blocks", "compressed nvfp4", "compressed W8A8"])
def test_experts_stay_packed_too(case: str, tmp_path: Path) -> None:
    make, kinds, bound = CASES[case]
    model = made.write(tmp_path, tiny_models.build("qwen3_moe"), *make())
    decoder = opened(tmp_path)
    assert kinds_of(decoder) == kinds | {"F32"}, "the router stays in floats"
    assert error_of(decoder, model) < bound


def test_experts_whose_inputs_are_ordered_are_kept_as_floats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = made.write(tmp_path, tiny_models.build("qwen3_moe"), *made.gptq(desc_act=True))
    assert error_of(opened(tmp_path), model) < MOST_ERROR
    assert "each expert has its inputs in an order of its own" in caplog.text


@pytest.mark.parametrize("case", ["gptq desc_act", "awq"])
def test_op_by_op_the_weights_are_dequantised(case: str, tmp_path: Path) -> None:
    model = made.write(tmp_path, tiny_models.build("llama"), *CASES[case][0]())
    checkpoint = open_checkpoint(Options(model=str(tmp_path)))
    decoder = Decoder(spec_from_config(checkpoint.config), checkpoint.weights(), torch.float32, "cpu")
    assert error_of(decoder, model) < EXACT_ERROR


@pytest.mark.parametrize("case", ["gptq 4 bits", "awq", "bitsandbytes nf4"])
def test_matrices_that_are_stored_as_one_stay_packed_too(case: str, tmp_path: Path) -> None:
    model = made.write(
        tmp_path, tiny_models.build("phi3", hidden_size=64, intermediate_size=128, vocab_size=320), *CASES[case][0]()
    )
    decoder = opened(tmp_path)
    assert kinds_of(decoder) == CASES[case][1]
    assert error_of(decoder, model) < MOST_ERROR


@pytest.mark.parametrize(
    ("case", "layer"),
    [
        ("gptq 4 bits, zeros", QuantisedLinear),
        ("gptq 8 bits", QuantisedLinear),
        ("fp8 rows", QuantisedLinear),
        ("compressed W8A8", QuantisedLinear),
        ("gptq desc_act", DenseLinear),
        ("modelopt nvfp4", DenseLinear),
    ],
)
def test_a_gpus_kernels_take_the_packed_forms_that_they_know(case: str, layer: type, tmp_path: Path) -> None:
    model = made.write(tmp_path, tiny_models.build("llama"), *CASES[case][0]())
    checkpoint = open_checkpoint(Options(model=str(tmp_path)))
    spec = spec_from_config(checkpoint.config)

    def fast(op: str, **_: Any) -> Any:
        """The references of quantised products, as functions that pass for a device's own."""
        return partial(choose_reference(op)) if op in REFERENCES else choose_reference(op)

    decoder = Decoder(spec, checkpoint.weights(), torch.float32, "cpu", choose=fast)
    layers: Any = decoder._layers
    held = [part for each in layers for part in (each._held.mixer["output"], each._held.ffn["down"])]
    assert {type(part.weight) for part in held} == {layer}
    assert error_of(decoder, model) < EXACT_ERROR


def test_gpt_oss_is_read_from_its_stacks_of_4_bit_floats_which_the_program_keeps(tmp_path: Path) -> None:
    model = tiny_models.build("gpt_oss", hidden_size=64, intermediate_size=64, vocab_size=320)
    state, stored = model.state_dict(), dict[str, Tensor]()
    for name, tensor in state.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor.clone()
            continue
        rows = tensor.transpose(1, 2).flatten(0, 1).contiguous()  # [experts * out, in]
        exponents, scales = made.mxfp4_scales(rows)
        codes, _ = made.in_fp4(rows, scales)
        count, _, out = tensor.shape
        blocks, exponents = codes.view(count, out, -1, 16), exponents.view(count, out, -1)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        state[name] = mxfp4.convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    config = model.config.to_dict() | {"architectures": ["GptOssForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    model.load_state_dict(state)
    model.config._experts_implementation = "eager"
    checkpoint = open_checkpoint(Options(model=str(tmp_path)))
    by_op = Decoder(spec_from_config(checkpoint.config), checkpoint.weights(), torch.float32, "cpu")
    assert error_of(by_op, model.double()) < EXACT_ERROR
    decoder = opened(tmp_path)
    assert kinds_of(decoder) == {"float4", "F32"}
    assert error_of(decoder, model) < MOST_ERROR


@pytest.mark.parametrize("beside", [True, False], ids=["beside the section", "in it"])
def test_experts_of_deepseek_v4_are_read_from_4_bit_floats(beside: bool, tmp_path: Path) -> None:
    """In the published layout: experts in bytes of two codes, most other matrices in blocks, all scales exponents."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 64)
    model = tiny_models.make(MIXTURES["deepseek_v4"], vocab_size=320, q_lora_rank=32, **sizes)
    state, section = saved_state(model), {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
    stored, read = dict(state), Fp8Dequantize(None)
    for name, tensor in state.items():
        start = name.removesuffix(".weight")
        if ".experts." in name and ".shared_experts." not in name:
            exponents, scales = made.mxfp4_scales(tensor)
            stored[name] = made.in_fp4(tensor, scales)[0].view(torch.int8)
        elif re.search(r"\.(wq_[ab]|wkv|wo_[ab]|w[123])\.weight$", name) and ".compressor." not in name:
            blocks = torch.nn.functional.pad(tensor, (0, -tensor.shape[1] % 32, 0, -tensor.shape[0] % 32))
            largest = blocks.abs().unflatten(1, (-1, 32)).unflatten(0, (-1, 32)).amax((1, 3))
            exponents = ((largest / 448).log2().ceil() + 127).to(torch.uint8)
            wide = (exponents.float() - 127).exp2().repeat_interleave(32, 0).repeat_interleave(32, 1)
            stored[name] = (tensor / wide[: tensor.shape[0], : tensor.shape[1]]).to(torch.float8_e4m3fn)
        else:
            continue
        stored[f"{start}.scale"] = exponents.view(torch.float8_e8m0fnu)
        state[name] = read._dequantize_one(stored[name], stored[f"{start}.scale"], torch.float32)
    assert {each.dtype for each in stored.values()} >= {torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu}
    for folder, tensors, quantisation in (("published", stored, section), ("floats", state, None)):
        (tmp_path / folder).mkdir()
        save_file({name: each.contiguous() for name, each in tensors.items()}, tmp_path / folder / "model.safetensors")
        config = model.config.to_dict() | {"architectures": ["DeepseekV4ForCausalLM"]}
        if quantisation is not None:
            where = config if beside else quantisation
            where["expert_dtype"], config["quantization_config"] = "fp4", quantisation
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    expected = type(model).from_pretrained(tmp_path / "floats").eval()
    expected.config._experts_implementation = "eager"
    checkpoint = open_checkpoint(Options(model=str(tmp_path / "published")))
    weights = checkpoint.weights()
    assert weights.packed("model.layers.0.mlp.experts.0.gate_proj.weight").kind == "float4"
    decoder = Decoder(spec_from_config(checkpoint.config), weights, torch.float32, "cpu")
    assert error_of(decoder, expected.double()) < EXACT_ERROR


QKV_CHUNKS = 2
"""Chunks of a fused matrix, as many as MiMo V2.5's layers of full attention have key/value heads."""


BLOCKS_OF_CHUNKS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "of each chunk": lambda fused: made.in_fp8_by_chunk(fused, 32, 32, QKV_CHUNKS),
    "in one grid": lambda fused: made.in_fp8(fused, 32, 32),
}


@pytest.mark.parametrize("blocks", BLOCKS_OF_CHUNKS)
def test_fused_matrices_of_mimo_v2_5_are_read_by_chunk(blocks: str, tmp_path: Path) -> None:
    """In the published layout: Q0 K0 V0 Q1 K1 V1, with a number of rows in each chunk that is no whole number of
    blocks."""
    model = published_models.twin_of("mimo_v2_5")
    folder, state = published_models.save("mimo_v2_5", tmp_path / "model"), dict(model.state_dict())
    stored = load_file(folder / "model.safetensors")
    for index in range(model.config.num_hidden_layers):
        names = [f"model.layers.{index}.self_attn.{each}_proj.weight" for each in "qkv"]
        parts = [state[name].chunk(QKV_CHUNKS) for name in names]
        fused = torch.cat([part[chunk] for chunk in range(QKV_CHUNKS) for part in parts])
        at = f"model.layers.{index}.self_attn.qkv_proj.weight"
        stored[at], scales, values = BLOCKS_OF_CHUNKS[blocks](fused)
        stored[f"{at}_scale_inv"] = scales
        own = -(-len(fused) // QKV_CHUNKS // 32) * QKV_CHUNKS
        assert (len(scales) == own) == (blocks == "of each chunk"), "the two differ"
        sizes = [len(part[0]) for part in parts]
        chunks = [chunk.split(sizes) for chunk in values.chunk(QKV_CHUNKS)]
        state |= {name: torch.cat(part) for name, part in zip(names, zip(*chunks, strict=True), strict=True)}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    section = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    config = published_models.config_of("mimo_v2_5") | {"quantization_config": section}
    (folder / "config.json").write_text(json.dumps(config))
    model.load_state_dict(state)
    model.config._experts_implementation = "eager"
    decoder = opened(folder)
    assert "e4m3" in kinds_of(decoder)
    assert error_of(decoder, model.double()) < EXACT_ERROR


@pytest.mark.parametrize("name", ["step3", "step3p5"])
def test_stacks_of_experts_in_fp8_have_stacks_of_scales(name: str, tmp_path: Path) -> None:
    folder = published_models.save(name, tmp_path / "model")
    exact, codes = load_file(folder / "model.safetensors"), {}
    for at, tensor in exact.items():
        if not at.endswith(("moe.gate_proj.weight", "moe.up_proj.weight", "moe.down_proj.weight")):
            codes[at] = tensor
            continue
        parts = zip(*(made.in_fp8(each, 32, 32) for each in tensor), strict=True)
        codes[at], codes[f"{at}_scale_inv"], exact[at] = (torch.stack(part) for part in parts)
    save_file(exact, folder / "model.safetensors", metadata={"format": "pt"})
    prompt = [each % exact["lm_head.weight"].shape[0] for each in PROMPT]
    (expected,), (exact_logits,) = Driver(opened(folder)).greedy([prompt], 6, chunk=64)
    save_file(codes, folder / "model.safetensors", metadata={"format": "pt"})
    section = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    config = published_models.config_of(name) | {"quantization_config": section}
    (folder / "config.json").write_text(json.dumps(config))
    (tokens,), (logits,) = Driver(opened(folder)).greedy([prompt], 6, chunk=64)
    assert tokens == expected
    assert relative_to_spread(logits, exact_logits) < EXACT_ERROR


@pytest.mark.parametrize("scales", ["rows", "matrix", "halves"])
def test_a_stack_of_gates_and_ups_in_fp8_has_one_of_scales(scales: str, tmp_path: Path) -> None:
    """As Granite 4's are published by its makers, with compressed-tensors: a scale for each row. Others have one for
    the whole matrix, or for gate and up."""
    model = tiny_models.build("granitemoe", vocab_size=320)
    model.save_pretrained(tmp_path)
    exact, codes = load_file(tmp_path / "model.safetensors"), {}
    for at, tensor in exact.items():
        if not at.endswith(("_moe.input_linear.weight", "_moe.output_linear.weight")):
            codes[at] = tensor
            continue
        high = tensor.shape[1]
        rows = {"rows": 1, "matrix": high, "halves": high // 2 if "input" in at else high}[scales]
        parts = zip(*(made.in_fp8(each, rows, 1 << 20) for each in tensor), strict=True)
        codes[at], codes[f"{at}_scale"], exact[at] = (torch.stack(part) for part in parts)
    save_file(exact, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (expected,), (exact_logits,) = Driver(opened(tmp_path)).greedy([PROMPT], 6, chunk=64)
    save_file(codes, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    section, _ = made.compressed("fp8", **(made.W8 | {"type": "float"}))
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    decoder = opened(tmp_path)
    assert "e4m3" in kinds_of(decoder)
    (tokens,), (logits,) = Driver(decoder).greedy([PROMPT], 6, chunk=64)
    assert tokens == expected
    assert relative_to_spread(logits, exact_logits) < EXACT_ERROR


def test_what_a_gptq_config_says_of_single_modules_counts(tmp_path: Path) -> None:
    (config, four), (_, eight) = made.gptq(4), made.gptq(8, 16 * 4)
    config |= {"dynamic": {r"+:.*\.mlp\.down_proj": {"bits": 8, "group_size": -1}, r"-:.*k_proj": {}}}
    _, eight = made.gptq(8, -1)
    model = made.write(
        tmp_path,
        tiny_models.build("llama"),
        config,
        lambda module, weight: (eight if "down_proj" in module else four)(module, weight),
        skip=("k_proj",),
    )
    decoder = opened(tmp_path)
    assert kinds_of(decoder) == {"int4", "int8", "F32"}
    assert error_of(decoder, model) < MOST_ERROR


def test_compressed_tensors_stores_each_module_by_its_target_and_leaves_what_it_ignores(tmp_path: Path) -> None:
    config, four = made.compressed("W4A16", **made.W4)
    _, eight = made.compressed("fp8")
    first = {"targets": ["re:.*down_proj$"], "weights": made.W8 | {"type": "float"}, "format": "float-quantized"}
    config["config_groups"] = {"group_0": config["config_groups"]["group_0"], "group_1": first}
    config["ignore"] = ["lm_head", "re:.*v_proj"]
    model = made.write(
        tmp_path,
        tiny_models.build("llama"),
        config,
        lambda module, weight: (eight if "down_proj" in module else four)(module, weight),
        skip=("v_proj",),
    )
    decoder = opened(tmp_path)
    assert kinds_of(decoder) == {"int4", "e4m3", "F32"}
    assert error_of(decoder, model) < MOST_ERROR


def test_a_target_by_name_takes_precedence_over_an_expression(tmp_path: Path) -> None:
    """As compressed-tensors chooses, whatever the order of the groups."""
    config, four = made.compressed("W4A16", **made.W4)
    _, eight = made.compressed("fp8")
    of_four = config["config_groups"]["group_0"] | {"targets": ["re:.*_proj$"]}
    by_name = {"targets": [f"{Q_PROJ}"], "weights": made.W8 | {"type": "float"}, "format": "float-quantized"}
    config["config_groups"] = {"group_0": of_four, "group_1": by_name}
    model = made.write(
        tmp_path, tiny_models.build("llama"), config, lambda module, w: (eight if module == Q_PROJ else four)(module, w)
    )
    assert error_of(opened(tmp_path), model) < MOST_ERROR


def test_modelopts_config_may_lie_beside_the_models(tmp_path: Path) -> None:
    model = made.write(tmp_path, tiny_models.build("llama"), *made.modelopt("FP8"))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    beside = {"producer": {"name": "modelopt", "version": "0.31"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert error_of(opened(tmp_path, quantization="modelopt"), model) < EXACT_ERROR


def test_a_quantised_module_that_a_mixed_config_does_not_name_is_named(tmp_path: Path) -> None:
    config, writer = made.modelopt_mixed()
    config["quantized_layers"].pop("model.layers.1.mlp.up_proj")
    config["quantized_layers"]["model.layers.0.mlp"] = config["quantized_layers"].pop("model.layers.0.mlp.up_proj")
    made.write(
        tmp_path,
        tiny_models.build("llama"),
        config,
        lambda module, weight: made.modelopt("NVFP4")[1](module, weight) if "mlp" in module else writer(module, weight),
    )
    with pytest.raises(
        ModelError, match=r"layers\.1\.mlp\.up_proj is quantised, and .* quantized_layers does not name"
    ):
        opened(tmp_path)


def test_modelopts_config_may_name_its_producer_alone(tmp_path: Path) -> None:
    """As that of Qwen3-32B-FP8-Static-PerTensor."""
    config = {
        "config_groups": {
            "group_0": {
                "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
                "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
            }
        },
        **{"ignore": ["lm_head"], "quant_algo": "FP8", "kv_cache_scheme": "FP8"},
        "producer": {"name": "modelopt", "version": "0.31.0"},
    }
    model = made.write(tmp_path, tiny_models.build("llama"), config, made.modelopt("FP8")[1])
    assert error_of(opened(tmp_path), model) < EXACT_ERROR


@pytest.mark.parametrize(
    ("layout", "writer"),
    [
        ("auto_round:auto_gptq", partial(made.gptq, symmetric=False)),
        ("auto_round:auto_awq", made.awq),
        ("auto_round:gptqmodel", partial(made.gptq, v2=True)),
        ("auto_round", partial(made.gptq, 2, symmetric=False, v2=True)),
        ("auto_round", partial(made.gptq, 5, symmetric=False, v2=True)),
    ],
)
def test_autoround_stores_in_the_layouts_of_gptq_and_awq_and_its_own(layout: str, writer: Any, tmp_path: Path) -> None:
    config, write_one = writer()
    config = {"quant_method": "auto-round", "bits": config["bits"], "group_size": 32, "packing_format": layout}
    model = made.write(tmp_path, tiny_models.build("llama"), config, write_one)
    assert error_of(opened(tmp_path, quantization="inc"), model) < MOST_ERROR


@pytest.fixture(scope="module")
def gptq_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gptq")
    made.write(folder, tiny_models.build("llama"), *made.gptq())
    return folder


def changed(folder: Path, into: Path, **config: Any) -> dict[str, Tensor]:
    """A copy of the checkpoint with another quantization_config; returns the tensors."""
    whole = json.loads((folder / "config.json").read_text())
    whole["quantization_config"] |= config
    (into / "config.json").write_text(json.dumps(whole))
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("asked", ["gptq", "gptq_marlin", None])
def test_vllms_names_of_the_format_may_be_asked_for(gptq_folder: Path, asked: str | None) -> None:
    assert open_checkpoint(Options(model=str(gptq_folder), quantization=asked)).quantisation is not None


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("awq", "quantization=awq does not fit this checkpoint, whose weights are stored as gptq"),
        ("squeezellm", "quantization=squeezellm is not supported: vLLM took it out in 0.8; quantise the model anew"),
        ("gqtp", r"quantization=gqtp is unknown; did you mean gptq\? known: gguf, int8, int4, fp8, "),
    ],
)
def test_another_format_than_the_checkpoints_is_refused(gptq_folder: Path, asked: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        open_checkpoint(Options(model=str(gptq_folder), quantization=asked))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "aqlm"}, r"by the method aqlm, which is not supported: vLLM took it out in 0\.10"),
        ({"quant_method": "mystery"}, "by the method mystery, which is not supported: known: auto-round, "),
        ({"quant_method": "gtpq"}, "by the method gtpq, which is not supported: did you mean gptq[?] known: auto-"),
        ({"bits": 9}, "GPTQ weights of 9 bits are not supported; 2 to 8 bits are"),
        ({"bits": "four"}, "the GPTQ config's bits is 'four'; a whole number is expected"),
        ({"checkpoint_format": "marlin"}, "in the layout marlin, which is one kernel's own"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    gptq_folder: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    save_file(changed(gptq_folder, tmp_path, **config), tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        open_checkpoint(Options(model=str(tmp_path)))


Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"bits": 8}, {}, rf"weight {Q_PROJ}.weight has shape \[64, 32\], but the config needs \[64, 64\]"),
        ({"group_size": 48}, {}, f"weights of {Q_PROJ} do not fit their config: groups of 48 do not divide 64 inputs"),
        (
            {"group_size": 64},
            {},
            rf"{Q_PROJ} do not fit their config: scales are \[2, 64\], and \[64, 64\] of 4 ",
        ),
        ({}, {"scales": None}, f"the quantised weights of {Q_PROJ} lack {Q_PROJ}.scales"),
        ({}, {"qzeros": torch.zeros(1, 8, dtype=torch.int32)}, r"zero points are \[1, 8\]; \[2, 8\] is expected"),
        ({}, {"scales": torch.full((2, 64), torch.nan).half()}, f"the scales of {Q_PROJ} are not all finite"),
        ({}, {"g_idx": torch.arange(64, dtype=torch.int32) % 3}, "g_idx does not have 32 inputs in each of 2 groups"),
    ],
)
def test_config_and_tensors_that_disagree_are_named_before_serving(
    gptq_folder: Path, tmp_path: Path, config: dict[str, Any], change: dict[str, Tensor | None], message: str
) -> None:
    tensors = changed(gptq_folder, tmp_path, **config)
    for part, tensor in change.items():
        tensors.pop(f"{Q_PROJ}.{part}", None)
        if tensor is not None:
            tensors[f"{Q_PROJ}.{part}"] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("case", "part", "tensor", "message"),
    every(
        2,
        [
            (
                "fp8 matrix",
                "weight_scale",
                None,
                f"weights of {Q_PROJ} lack {Q_PROJ}.weight_scale; their scheme is fp8",
            ),
            (
                "fp8 blocks",
                "weight_scale_inv",
                torch.ones(1, 1),
                r"scales are \[1, 1\], and \[64, 64\] in blocks of 32 x 64",
            ),
            (
                "fp8 rows",
                "weight_scale",
                torch.ones(3),
                r"scales are \[3\]; \[64, 64\] needs one, or one for each row",
            ),
            ("fp8 rows", "weight", torch.full((64, 64), torch.nan).to(torch.float8_e4m3fn), "hold NaN"),
            (
                "modelopt nvfp4",
                "weight_scale_2",
                None,
                f"the quantised weights of {Q_PROJ} lack {Q_PROJ}.weight_scale_2",
            ),
            (
                "compressed W4A16",
                "weight_scale",
                torch.ones(64, 3).half(),
                r"scales are \[64, 3\], and \[64, 64\] in groups",
            ),
            (
                "quark int4",
                "weight_scale",
                torch.ones(3, 64),
                r"scales are \[3, 64\], and \[64, 64\] in groups of 32",
            ),
            ("hqq 4 bits", "W_q", torch.zeros(3, 32).byte(), r"W_q is \[3, 32\], and \[64, 64\] of 4 bits in"),
            ("hqq 4 bits", "scale", torch.ones(5, 1), "scale has 5 numbers, and there are 128 groups"),
            ("hqq 4 bits", "axis", torch.tensor(0), "its own axis is 0, and the config's is 1"),
            ("hqq 4 bits", "nbits", torch.tensor(8), "its own nbits is 8, and the config's is 4"),
            ("hqq 4 bits", "group_size", torch.tensor([64]), r"its own group_size is \[64\], and the config's is 32"),
            ("torchao int8", "_weight_scale", None, "lack .*_weight_scale"),
            ("compressed W8A8 static", "input_scale", None, f"lack {Q_PROJ}.input_scale"),
            (
                "compressed W8A8 static",
                "input_scale",
                torch.zeros(1),
                r"the scale of its inputs is 0\.0; a number above 0",
            ),
            ("bitsandbytes nf4", "weight.absmax", None, f"lack {Q_PROJ}.weight.absmax"),
            ("bitsandbytes nf4", "weight", torch.zeros(9, 1).byte(), r"9 bytes cannot be \[64, 64\] codes of 4 bits"),
        ],
    ),
)
def test_each_format_names_tensors_that_do_not_fit(
    case: str, part: str, tensor: Tensor | None, message: str, tmp_path: Path
) -> None:
    static = made.compressed("W8A8", InputRounding(0.03), **made.W8)
    made.write(tmp_path, tiny_models.build("llama"), *(CASES[case][0]() if case in CASES else static))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(f"{Q_PROJ}.{part}", None)
    if tensor is not None:
        tensors[f"{Q_PROJ}.{part}"] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        opened(tmp_path)


def test_a_config_of_quantised_weights_over_floats_is_refused(tmp_path: Path) -> None:
    folder = tiny_models.save("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": made.gptq()[0]}))
    with pytest.raises(ModelError, match=r"weights are quantised \(gptq\), and none of them is stored so"):
        opened(folder)


def test_ranks_divide_packed_weights_between_groups(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made.write(tmp_path, tiny_models.build("llama"), *made.gptq(symmetric=False))
    one = first_logprobs(tmp_path, dtype="float32")
    two = first_logprobs(tmp_path, dtype="float32", distributed_executor_backend=THREADS, tensor_parallel_size=2)
    assert two == pytest.approx(one, abs=0.06)
    assert "it has 128 for 96 inner columns of an MLP" in caplog.text
    assert "no whole number of blocks" not in caplog.text
    staged = first_logprobs(tmp_path, dtype="float32", distributed_executor_backend=THREADS, pipeline_parallel_size=2)
    assert staged == pytest.approx(one, abs=0.06)


@pytest.mark.parametrize("case", ["gptq rows, v2", "quark int8", "fp8 rows"])
def test_ranks_share_the_scale_of_a_row(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made.write(tmp_path, tiny_models.build("llama"), *CASES[case][0]())
    one = first_logprobs(tmp_path, dtype="float32")
    two = first_logprobs(tmp_path, dtype="float32", distributed_executor_backend=THREADS, tensor_parallel_size=2)
    assert two == pytest.approx(one, abs=0.06)
    assert "it has 128 for 96 inner columns of an MLP" in caplog.text, "blocks of 32 for each rank, and no whole rows"
    assert "they are kept in" not in caplog.text


def test_ranks_turn_what_is_ordered_across_them_into_floats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made.write(tmp_path, tiny_models.build("llama"), *made.gptq(desc_act=True))
    one = first_logprobs(tmp_path, dtype="float32")
    two = first_logprobs(tmp_path, dtype="float32", distributed_executor_backend=THREADS, tensor_parallel_size=2)
    assert two == pytest.approx(one, abs=0.06)
    assert "weights of type int4 in groups of 32 is no whole number of blocks; they are kept in float32" in caplog.text
