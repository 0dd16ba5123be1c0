"""Mixtures of experts beyond the tokens that every model is tested for: packed weights, ranks, what a step reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from gguf.constants import GGMLQuantizationType as Kind
from model_driver import DictSource, Driver
from rank_threads import pool_for_each_rank
from test_cpu_decoder import BF16_ERROR, PACKED_ERROR, program_of
from test_models import config_of, random_prompts, reference
from test_parallel_model import first_logprobs
from thinned import every
from tiny_gguf import save_gguf
from tiny_models import state_of
from torch import Tensor

from headrace.executor.checkpoints.sources.gguf.file import GGUFFile
from headrace.executor.cpu.decoder import CpuDecoder
from headrace.executor.cpu.weights import Blocks
from headrace.executor.gpu.kernels import Rounding, quantising, to_int4, to_int8
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.ipc.failure import OptionError
from headrace.kernels.cpu import build
from headrace.kernels.cpu.experts.moe import PackedExperts
from headrace.kernels.cpu.linear.linear import dequantise, quantise
from headrace.kernels.reference.quantised import dequantise as dequantise_parts
from headrace.kernels.registry import choose_reference

__all__ = ["pool_for_each_rank"]  # a fixture
pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
MIXTURE_ERROR = 2 * PACKED_ERROR
"""Rounded activations change the experts' shares too."""
FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"]


def logits_of(decoder: CpuDecoder | Decoder) -> Tensor:
    _, rows = Driver(decoder).greedy(random_prompts((30, 17, 50, 9, 2, 25, 12)), 1, chunk=32)
    return torch.cat(rows)


def error(found: Tensor, exact: Tensor) -> float:
    """Of the middle row: where two experts are near, rounding chooses the other now and then."""
    return float((found - exact).square().mean(-1).sqrt().median() / exact.std())


def stacks_of(decoder: CpuDecoder) -> list[PackedExperts]:
    layers = decoder._model.layers
    return [held for layer in layers for held in layer.ffn.values() if isinstance(held, PackedExperts)]


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", FAMILIES)
def test_experts_of_a_gguf_file_are_computed_as_they_are_stored(name: str, kind: Kind, tmp_path: Path) -> None:
    file = GGUFFile(save_gguf(reference(name), tmp_path / "model.gguf", kind))
    spec = spec_from_config(file.config)
    packed = program_of(spec, file.weights(), keep_packed=True)
    types = {weight.type_name for stack in stacks_of(packed) for weight in (*stack.gate_up, *stack.down)}
    assert types == {kind.name}
    exact = logits_of(program_of(spec, file.weights()))
    assert 0 < error(logits_of(packed), exact) < MIXTURE_ERROR
    assert 0 < error(logits_of(program_of(spec, file.weights(), torch.bfloat16, keep_packed=True)), exact) < BF16_ERROR


@pytest.mark.parametrize("bits", [8, 4])
def test_experts_quantised_as_they_are_read_are_the_dequantised_ones_and_the_router_stays(bits: int) -> None:
    spec, state = spec_from_config(config_of("qwen2_moe")), state_of(reference("qwen2_moe"))
    rounded = {}
    for name, weight in state.items():
        is_kept = weight.dim() < 2 or name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
        own = 8 if "embed" in name or "lm_head" in name else bits
        rounded[name] = weight if is_kept else dequantise(*quantise(weight, own, 32))
    small = program_of(spec, DictSource(state), blocks=Blocks(bits, (32,)))
    assert 0 < error(logits_of(small), logits_of(program_of(spec, DictSource(rounded)))) < MIXTURE_ERROR


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_gpus_experts_are_the_dequantised_ones_too_and_fp8_is_refused(kind: str) -> None:
    spec, state = spec_from_config(config_of("qwen2_moe")), state_of(reference("qwen2_moe"))
    rounded = {
        name: dequantise_parts(*(to_int8 if kind == "int8" else to_int4)(weight, 32))
        if weight.dim() > 1 and "layers" in name and not name.endswith(("mlp.gate.weight", "expert_gate.weight"))
        else weight
        for name, weight in state.items()
    }
    quantised = quantising(choose_reference, Rounding(kind, 32))
    small = Decoder(spec, DictSource(state), torch.float32, choose=quantised)
    exact = Decoder(spec, DictSource(rounded), torch.float32, choose=choose_reference)
    assert small.weight_bytes < 0.5 * exact.weight_bytes
    assert error(logits_of(small), logits_of(exact)) < 1e-4
    with pytest.raises(OptionError, match="quantization=fp8 is not supported for a mixture of experts"):
        Decoder(spec, DictSource(state), torch.float32, choose=quantising(choose_reference, Rounding("fp8", 32)))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_decode_step_reads_the_chosen_experts_and_the_shared_one_alone(name: str) -> None:
    spec = spec_from_config(config_of(name))
    decoder = program_of(spec, DictSource(state_of(reference(name))))
    driver, stacks, steps = Driver(decoder), stacks_of(decoder), 6
    prompt = [7, 8, 9, 10]

    def experts_read(new_tokens: int) -> list[int]:
        """Of each stack, for the prompt and the tokens after the first."""
        before = [int(stack.experts_read) for stack in stacks]
        driver.greedy([prompt], new_tokens, chunk=len(prompt))
        return [int(stack.experts_read) - count for stack, count in zip(stacks, before, strict=True)]

    decode = [many - few for many, few in zip(experts_read(1 + steps), experts_read(1), strict=True)]
    read_bytes = sum(count * stack.expert_bytes for count, stack in zip(decode, stacks, strict=True)) / steps
    mixtures = [layer.ffn for layer in spec.layers if isinstance(layer.ffn, Experts)]
    wanted = sum(each.routing.num_chosen * each.inner + each.shared_inner for each in mixtures)
    held = sum(each.num_experts * each.inner + each.shared_inner for each in mixtures)
    share = read_bytes / sum(stack.nbytes for stack in stacks)
    print(
        f"{name}: a decode step reads {read_bytes:.0f} bytes of experts, {share:.3f} of all; chosen {wanted / held:.3f}"
    )
    assert share == pytest.approx(wanted / held, rel=0.01)


@pytest.mark.parametrize("name", every(2, ["qwen2_moe", "mixtral"]))
@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str)
def test_packed_experts_are_divided_among_ranks(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    threads = {"distributed_executor_backend": "rank_threads:RankThreads", "tensor_parallel_size": 2}
    sizes = {"moe_intermediate_size": 64, "intermediate_size": 128}
    if options:
        path = tiny_models.save(name, tmp_path / "model", **sizes)
    else:
        path = save_gguf(tiny_models.build(name, **sizes), tmp_path / "model.gguf", Kind.Q8_0)
    ranks, one = first_logprobs(path, **threads, **options), first_logprobs(path, **options)
    assert ranks == pytest.approx(one, abs=0.1)
    assert len(one) > 50
