"""Adapters against peft's forward pass, not merged: random factors on tiny random checkpoints of many families."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import quantised_checkpoints as made
import tiny_models
import torch
from model_driver import DictSource, Driver
from peft_adapters import PeftModels
from rank_threads import pool_for_each_rank, run_ranks
from safetensors.torch import load_file, save_file
from thinned import every, pairs
from tiny_mixtures import FAMILIES as MIXTURES
from tiny_models import TinyModel, state_of
from tiny_recurrent import FAMILIES as RECURRENT
from torch import Tensor

from headrace import LLM, LoRARequest, SamplingParams, kernels
from headrace.core.options.adapters import AdapterLimits
from headrace.core.options.engine_options import Options
from headrace.executor.adapters.slots import AdapterSlots
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.cpu.decoder import CpuDecoder, CpuDecoderPart
from headrace.executor.cpu.program import StepLimits
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.executor.parallel.rank_place import SINGLE, RankCoordinates, World
from headrace.executor.step.adapters import TokenAdapters
from headrace.ipc.adapters import RowAdapter
from headrace.ipc.failure import ModelError
from headrace.kernels.low_rank import LowRank, LowRankExperts, LowRankPart, SlotLimits

__all__ = ["pool_for_each_rank"]  # a fixture for all of these tests

LIMITS = AdapterLimits(max_loras=4, slots=6, max_rank=16, dtype="float32", target_modules=())
FAMILIES = (
    *("llama", "llama_biases", "qwen2", "qwen3", "gemma3", "phi3", "gpt2", "gptj", "gpt_neox", "falcon", "cohere"),
    *("opt", "glm", "starcoder2", "gemma4", "gemma4_experts", "gemma3n", "opt_projected_post_norm"),
)
PROMPTS = [[(7 * i + 3 * n) % 90 + 3 for i in range(length)] for n, length in enumerate((37, 5, 21, 9))]
NEW_TOKENS = 6


@cache
def reference(name: str) -> Any:
    return tiny_models.build(name)


def spec_of(model: Any) -> ArchSpec:
    return spec_from_config(model.config.to_dict() | {"architectures": [type(model).__name__]})


def make(name: str, kind: str, limits: AdapterLimits | None = LIMITS) -> tuple[Decoder | CpuDecoder, AdapterSlots]:
    model = reference(name)
    spec = spec_of(model)
    source = DictSource(state_of(model))
    decoder: Decoder | CpuDecoder
    if kind == "eager":
        decoder = Decoder(spec, source, torch.float32, choose=kernels.choose_reference, adapters=limits)
    else:
        decoder = CpuDecoder(spec, source, torch.float32, StepLimits(64, 8, 128, adapters=limits))
    return decoder, AdapterSlots(limits or LIMITS, decoder, SINGLE, lambda: DictSource(state_of(model)))


def check(answers: Sequence[list[int]], logits: Sequence[Tensor], models: PeftModels, names: Sequence[str]) -> None:
    for prompt, answer, rows, name in zip(PROMPTS, answers, logits, names, strict=False):
        expected = models.logits(name, prompt, answer)
        assert answer == expected.argmax(-1).tolist(), name
        assert float((rows - expected).abs().max()) <= 1e-4 * float(expected.abs().max()), name


@pytest.mark.parametrize(("name", "kind"), pairs(tuple(FAMILIES), ("eager", "program")))
def test_rows_with_and_without_adapters_in_one_batch_equal_peft(name: str, kind: str, tmp_path: Path) -> None:
    models = PeftModels(reference(name), tmp_path)
    decoder, slots = make(name, kind)
    for slot, adapter in ((0, "one"), (3, "two")):
        slots.load(slot, str(models.make(adapter, seed=slot, r=4 + slot)))
    uses = ((RowAdapter(0, 1.0),), (), (RowAdapter(3, 1.0),), (RowAdapter(0, 1.0),))
    answers, logits = Driver(decoder).greedy(PROMPTS, NEW_TOKENS, chunk=16, budget=48, adapters=uses)
    check(answers, logits, models, ("one", "", "two", "one"))
    plain = models.logits("", PROMPTS[0], answers[0])
    assert float((plain - logits[0]).abs().max()) > 1e-2 * float(plain.abs().max()), "the adapter changes nothing"


def test_factors_of_matrices_that_files_have_and_no_one_reads_are_passed_over(tmp_path: Path) -> None:
    """Of keys in a layer that reads the cache of another, which earlier versions of transformers had, and of towers of
    other media. Nothing but those is refused."""
    models = PeftModels(reference("gemma3n"), tmp_path)
    _, slots = make("gemma3n", "program")
    file = models.make("one") / "adapter_model.safetensors"
    tensors, needless = load_file(file), dict[str, Tensor]()
    for module in ("model.layers.4.self_attn.k_proj", "model.vision_tower.blocks.0.attn.qkv"):
        needless[f"base_model.model.{module}.lora_A.weight"] = torch.ones(4, 32)
        needless[f"base_model.model.{module}.lora_B.weight"] = torch.ones(8, 4)
    save_file(tensors | needless, file)
    slots.load(0, str(file.parent))
    save_file(needless, file)
    with pytest.raises(ModelError, match=r"has no matrices that adapters change under the names model\.layers\.4"):
        slots.load(1, str(file.parent))


@pytest.mark.parametrize(
    "tiny",
    [MIXTURES["laguna"], *(RECURRENT[name] for name in ("kimi_linear", "glm5_next", "bailing_hybrid"))],
    ids=lambda tiny: tiny.model_class,
)
def test_modules_that_transformers_calls_otherwise_than_files_do(tiny: TinyModel, tmp_path: Path) -> None:
    model = tiny_models.make(tiny)
    model.save_pretrained(tmp_path / "model")
    models = PeftModels(model, tmp_path)
    modules = r".*\.(self_attn\.(forget_gate\.)?|shared_experts\.)(?!kv_b)[a-z_]+_proj"
    adapter = models.make("one", target_modules=modules)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    options = {"dtype": "float32", "max_model_len": 64, "skip_tokenizer_init": True, "in_process": True}
    with LLM(str(tmp_path / "model"), enable_lora=True, **options) as llm:
        given = [LoRARequest("one", 1, str(adapter)), None, LoRARequest("one", 1, str(adapter)), None]
        outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=given)
    for prompt, output, name in zip(PROMPTS, outputs, ("one", "", "one", ""), strict=True):
        answer = list(output.outputs[0].token_ids)
        assert answer == models.logits(name, prompt, answer).argmax(-1).tolist()


VARIANTS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True, "r": 3},
    "patterns": {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7}, "alpha_pattern": {"o_proj": 3}},
    "dora": {"use_dora": True, "size": 0.1},
    "biases": {"bias": "all"},
    "bias_of_factors": {"lora_bias": True},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
    "head": {"target_modules": ["lm_head", "down_proj"]},
    "dora_of_head": {"target_modules": ["lm_head", "q_proj"], "use_dora": True, "size": 0.1},
    "dora_of_ends": {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "use_dora": True, "size": 0.1},
    "whole_ends": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"], "size": 0.1},
}


@pytest.mark.parametrize(("variant", "kind"), pairs(tuple(VARIANTS), ("eager", "program")))
def test_forms_of_adapters_equal_peft(variant: str, kind: str, tmp_path: Path) -> None:
    models = PeftModels(reference("llama_biases"), tmp_path)
    decoder, slots = make("llama_biases", kind)
    slots.load(2, str(models.make("one", **VARIANTS[variant])))
    uses = ((RowAdapter(2, 1.0),), (), (RowAdapter(2, 1.0),))
    answers, logits = Driver(decoder).greedy(PROMPTS[:3], NEW_TOKENS, chunk=16, adapters=uses)
    check(answers, logits, models, ("one", "", "one"))


@pytest.mark.parametrize("name", ["gpt2", "phi3", "gemma3"])
def test_dora_of_fused_and_transposed_matrices_equals_peft(name: str, tmp_path: Path) -> None:
    models = PeftModels(reference(name), tmp_path)
    decoder, slots = make(name, "program")
    slots.load(0, str(models.make("one", use_dora=True, size=0.1)))
    answers, logits = Driver(decoder).greedy(PROMPTS[:1], NEW_TOKENS, chunk=16, adapters=((RowAdapter(0, 1.0),),))
    check(answers, logits, models, ("one",))


@pytest.mark.parametrize("kind", ["eager", "program"])
def test_several_scaled_adapters_of_a_request_add_up(kind: str, tmp_path: Path) -> None:
    """The sum of two adapters is one whose factors are those of both side by side."""
    models = PeftModels(reference("llama"), tmp_path)
    decoder, slots = make("llama", kind)
    for slot, name in enumerate(("one", "two")):
        slots.load(slot, str(models.make(name, seed=slot)))
    models.add("sum", ("one", "two"), (0.5, -2.0))
    uses = ((RowAdapter(0, 0.5), RowAdapter(1, -2.0)), (RowAdapter(1, 1.0),), (RowAdapter(1, -2.0), RowAdapter(0, 0.5)))
    answers, logits = Driver(decoder).greedy(PROMPTS[:3], NEW_TOKENS, chunk=16, adapters=uses)
    check(answers, logits, models, ("sum", "two", "sum"))


@pytest.mark.parametrize("kind", ["eager", "program"])
def test_an_adapter_applies_from_its_position_on(kind: str, tmp_path: Path) -> None:
    """With a position after the prompt's keys and values were computed by the base, chunks do not matter."""
    models = PeftModels(reference("llama"), tmp_path)
    decoder, slots = make("llama", kind)
    slots.load(0, str(models.make("one")))
    prompt, found = PROMPTS[0], []
    for first in (0, 20, len(prompt) + NEW_TOKENS):
        for chunk in (64, 7):
            uses = ((RowAdapter(0, 1.0, first),),)
            found.append(Driver(decoder).greedy([prompt], NEW_TOKENS, chunk=chunk, adapters=uses))
    for (whole, rows), (parts, others) in zip(found[::2], found[1::2], strict=True):
        assert whole == parts
        assert torch.allclose(rows[0], others[0], atol=1e-4, rtol=1e-4)
    check(*found[0], models, ("one",))
    check(*found[4], models, ("",))
    assert not torch.allclose(found[2][1][0], found[0][1][0], rtol=1e-2)
    assert not torch.allclose(found[2][1][0], found[4][1][0], rtol=1e-2)


def test_base_rows_are_bitwise_those_of_a_batch_and_of_a_model_without_adapters(tmp_path: Path) -> None:
    models = PeftModels(reference("qwen3"), tmp_path)
    decoder, slots = make("qwen3", "program")
    plain, _ = make("qwen3", "program", limits=None)
    for slot in range(4):
        slots.load(slot, str(models.make(f"adapter {slot}", seed=slot, r=2 + slot)))
    mixed = ((RowAdapter(1, 1.0),), (), (RowAdapter(0, 1.0), RowAdapter(3, 0.3)), (RowAdapter(2, 0.0),))
    _, logits = Driver(decoder).greedy(PROMPTS, NEW_TOKENS, chunk=8, budget=20, adapters=mixed)
    _, alone = Driver(plain).greedy(PROMPTS, NEW_TOKENS, chunk=8, budget=20)
    assert torch.equal(logits[1], alone[1])
    assert torch.equal(logits[3], alone[3]), "a scale of 0"
    for nth in (0, 2):  # a row's answer does not depend on the others
        _, own = Driver(decoder).greedy([PROMPTS[nth]], NEW_TOKENS, chunk=64, adapters=(mixed[nth],))
        assert torch.equal(own[0], logits[nth])
    slots.drop(1)
    _, emptied = Driver(decoder).greedy(PROMPTS[:2], NEW_TOKENS, chunk=8, adapters=mixed[:2])
    _, alone = Driver(plain).greedy(PROMPTS[:2], NEW_TOKENS, chunk=8)
    assert torch.equal(emptied[0], alone[0]), "a slot that was emptied"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_do_not_depend_on_the_number_of_rows_of_a_slot(dtype: str, tmp_path: Path) -> None:
    """With factors that are longer than what is prefetched at once."""
    model = tiny_models.build("llama", hidden_size=320, intermediate_size=1056)
    source, used = DictSource(state_of(model)), getattr(torch, dtype)
    limits = msgspec.structs.replace(LIMITS, dtype=dtype)
    decoder = CpuDecoder(spec_of(model), source, used, StepLimits(128, 8, 128, adapters=limits))
    slots, models = AdapterSlots(limits, decoder, SINGLE, lambda: source), PeftModels(model, tmp_path)
    for slot, rank in enumerate((9, 16)):
        slots.load(slot, str(models.make(f"adapter {slot}", seed=slot, r=rank)))
    uses = ((RowAdapter(0, 0.7),), (), (RowAdapter(1, 1.0), RowAdapter(0, 1.0)), (RowAdapter(0, 1.0),))
    _, logits = Driver(decoder).greedy(PROMPTS, NEW_TOKENS, chunk=64, adapters=uses)
    for nth, prompt in enumerate(PROMPTS):
        _, own = Driver(decoder).greedy([prompt], NEW_TOKENS, chunk=3, adapters=(uses[nth],))
        assert torch.equal(own[0], logits[nth])


ODD = {"nine_heads": ("llama_gqa_tied", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3})}
"""Heads that two ranks divide with padding."""


def check_two_ranks(model: Any, models: PeftModels, path: str) -> None:
    """Rows with the adapter "one" and without, on two ranks that divide the model."""
    spec, source = spec_of(model), DictSource(state_of(model))
    uses = ((RowAdapter(0, 1.0),), (), (RowAdapter(0, 1.0),))

    def answer(place: RankCoordinates) -> tuple[list[list[int]], list[Tensor]]:
        decoder = CpuDecoderPart(spec, source, torch.float32, StepLimits(64, 8, 128, adapters=LIMITS), place=place)
        AdapterSlots(LIMITS, decoder, place, lambda: source).load(0, path)
        return Driver(decoder, place=place).greedy(PROMPTS[:3], NEW_TOKENS, chunk=16, adapters=uses)

    for answers, logits in run_ranks(World(2, 1, 64, 8, spec.hidden_size, spec.vocab_size), answer):
        check(answers, logits, models, ("one", "", "one"))


@pytest.mark.parametrize(
    ("name", "form"),
    every(
        2,
        [
            ("phi3", ""),
            ("nine_heads", ""),
            ("deepseek_v3_moe", "latent"),
            *(("llama_biases", form) for form in ("", "dora", "biases", "whole_ends", "dora_of_ends")),
        ],
    ),
)
def test_ranks_divide_the_factors_as_the_matrices(name: str, form: str, tmp_path: Path) -> None:
    kind, changes = ODD.get(name, (name, {}))
    model = tiny_models.build(kind, **changes)
    models = PeftModels(model, tmp_path)
    targets = {"target_modules": ["kv_b_proj", "q_b_proj", "o_proj"]} if form == "latent" else VARIANTS.get(form, {})
    path = str(models.make("one", **targets))
    check_two_ranks(model, models, path)


def test_a_stage_takes_the_layers_of_an_adapter_that_are_its_own(tmp_path: Path) -> None:
    model = reference("llama_biases")
    path = str(PeftModels(model, tmp_path).make("one", **VARIANTS["whole_ends"]))
    spec, source = spec_of(model), DictSource(state_of(model))
    tables = []
    for rank in range(2):
        place = RankCoordinates.of(rank, 1, 2)
        decoder = CpuDecoderPart(spec, source, torch.float32, StepLimits(64, 8, 128, adapters=LIMITS), place=place)
        facts = AdapterSlots(LIMITS, decoder, place, lambda: source).load(0, path)
        tables.append((facts.identity, set(decoder.adapter_tables)))
    assert tables[0][0] == tables[1][0]
    assert "model.embed_tokens" in tables[0][1] - tables[1][1]
    assert "lm_head" in tables[1][1] - tables[0][1]
    assert not {name for name in tables[0][1] & tables[1][1] if "layers" in name}


QUANTISED: dict[str, tuple[Callable[[], Any], float]] = {
    "gptq": (made.gptq, 1e-3),
    "awq": (made.awq, 1e-3),
    "fp8": (lambda: made.fp8("rows"), 2e-5),
    "W8A16": (lambda: made.compressed("W8A16", **made.W8), 1e-3),
    "nvfp4": (lambda: made.compressed("NVFP4", **made.F4), 2e-5),
    "nf4": (lambda: made.bitsandbytes("nf4"), 2e-5),
}


@pytest.mark.parametrize("case", every(2, QUANTISED))
def test_adapters_of_quantised_models_see_the_inputs_unquantised(case: str, tmp_path: Path) -> None:
    """As peft computes them beside the same weights, dequantised."""
    write, bound = QUANTISED[case]
    model = made.write(tmp_path, tiny_models.build("llama"), *write())
    models = PeftModels(model, tmp_path)
    path = str(models.make("one"))
    checkpoint = open_checkpoint(Options(model=str(tmp_path)))
    limits = StepLimits(64, 8, 128, adapters=LIMITS)
    decoder = CpuDecoder(
        spec_from_config(checkpoint.config), checkpoint.weights(), torch.float32, limits, keep_packed=True
    )
    AdapterSlots(LIMITS, decoder, SINGLE, checkpoint.weights).load(0, path)
    answers, logits = Driver(decoder).greedy(PROMPTS[:1], NEW_TOKENS, chunk=16, adapters=((RowAdapter(0, 1.0),),))
    expected = models.logits("one", PROMPTS[0], answers[0])
    assert answers[0] == expected.argmax(-1).tolist()
    assert float(((logits[0] - expected) ** 2).mean().sqrt() / expected.std()) < bound


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize("kind", ["rows", "blocks"])
def test_adapters_of_an_fp8_mixture_see_the_inputs_unquantised(kind: str, tmp_path: Path) -> None:
    """As peft computes them beside the same experts, dequantised."""
    model = made.write(tmp_path, tiny_models.build("qwen3_moe"), *made.fp8(kind))
    models = PeftModels(model, tmp_path)
    path = str(models.make("one", target_modules=["o_proj", "q_proj"], target_parameters=EXPERTS))
    checkpoint = open_checkpoint(Options(model=str(tmp_path)))
    limits = StepLimits(64, 8, 128, adapters=LIMITS)
    decoder = CpuDecoder(
        spec_from_config(checkpoint.config), checkpoint.weights(), torch.float32, limits, keep_packed=True
    )
    AdapterSlots(LIMITS, decoder, SINGLE, checkpoint.weights).load(0, path)
    uses = ((RowAdapter(0, 1.0),), ())
    answers, logits = Driver(decoder).greedy(PROMPTS[:2], NEW_TOKENS, chunk=16, adapters=uses)
    for name, prompt, answer, found in zip(("one", ""), PROMPTS, answers, logits, strict=False):
        expected = models.logits(name, prompt, answer)
        assert answer == expected.argmax(-1).tolist()
        assert float(((found - expected) ** 2).mean().sqrt() / expected.std()) < 1e-3
    assert float((logits[0] - models.logits("", PROMPTS[0], answers[0])).abs().max()) > 1e-2


LATENT: dict[str, list[str]] = {
    "up": ["kv_b_proj"],
    "all": ["kv_b_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj", "down_proj"],
    "others": ["kv_a_proj_with_mqa", "q_a_proj"],
}
"""Modules of latent attention that adapters change. All answers are of both forms, absorbed and expanded."""


@pytest.mark.parametrize("kind", ["eager", "program"])
def test_adapters_of_latent_attention_equal_peft(kind: str, tmp_path: Path) -> None:
    models = PeftModels(reference("deepseek_v3_moe"), tmp_path)
    (decoder, slots), (plain, _) = (make("deepseek_v3_moe", kind, limits=each) for each in (LIMITS, None))
    for slot, (name, targets) in enumerate(LATENT.items()):
        slots.load(slot, str(models.make(name, seed=slot, r=3 + slot, target_modules=targets)))
    prompts, names = [PROMPTS[0], PROMPTS[0], PROMPTS[2], PROMPTS[0]], ("", "up", "all", "others")
    uses = ((), (RowAdapter(0, 1.0),), (RowAdapter(1, 1.0),), (RowAdapter(2, 1.0),))
    for chunk in (64, 5):
        answers, logits = Driver(decoder).greedy(prompts, NEW_TOKENS, chunk=chunk, budget=64, adapters=uses)
        for prompt, name, answer, rows in zip(prompts, names, answers, logits, strict=True):
            expected = models.logits(name, prompt, answer)
            assert answer == expected.argmax(-1).tolist(), name
            assert float((rows - expected).abs().max()) <= 1e-4 * float(expected.abs().max()), name
        if kind == "program":
            _, alone = Driver(plain).greedy(prompts[:1], NEW_TOKENS, chunk=chunk)
            assert torch.equal(logits[0], alone[0]), "the model alone beside others"
    changed = models.logits("up", PROMPTS[0], answers[1]) - models.logits("", PROMPTS[0], answers[1])
    assert float(changed.abs().max()) > 1e-2


@pytest.mark.parametrize("kind", ["eager", "program"])
def test_several_scaled_adapters_of_latent_attention_add_up(kind: str, tmp_path: Path) -> None:
    models = PeftModels(reference("deepseek_v3_moe"), tmp_path)
    decoder, slots = make("deepseek_v3_moe", kind)
    for slot, name in enumerate(("one", "two")):
        slots.load(slot, str(models.make(name, seed=slot, target_modules=LATENT["up"])))
    models.add("sum", ("one", "two"), (0.5, -2.0))
    uses = ((RowAdapter(0, 0.5), RowAdapter(1, -2.0)),)
    answers, logits = Driver(decoder).greedy(PROMPTS[:1], NEW_TOKENS, chunk=64, adapters=uses)
    check(answers, logits, models, ("sum",))


def test_what_latent_attention_cannot_take_is_refused(tmp_path: Path) -> None:
    models = PeftModels(reference("deepseek_v3_moe"), tmp_path)
    _, slots = make("deepseek_v3_moe", "program")
    dora = models.make("dora", target_modules=LATENT["up"], use_dora=True)
    with pytest.raises(ModelError, match=r"dora: biases and magnitudes \(DoRA\) of the matrix of keys"):
        slots.load(0, str(dora))
    activated = models.make("activated", target_modules=LATENT["up"], alora_invocation_tokens=[5, 6])
    with pytest.raises(ModelError, match=r"kv_b_proj: an activated adapter changes tokens from one on"):
        slots.load(0, str(activated))


STACKED = ("qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "deepseek_v3_moe")


def _packed_op_by_op(name: str) -> tuple[Decoder, AdapterSlots]:
    """As a CPU's rank computes what is no program: with the CPU's kernels."""
    model = reference(name)
    decoder = Decoder(spec_of(model), source := DictSource(state_of(model)), torch.float32, adapters=LIMITS)
    return decoder, AdapterSlots(LIMITS, decoder, SINGLE, lambda: source)


@pytest.mark.parametrize(
    ("name", "kind"),
    every(
        2,
        [
            *((name, "program") for name in STACKED),
            ("qwen2_moe", "eager"),
            ("qwen2_moe", "op by op"),
            ("gemma4_experts", "eager"),
            ("gemma4_experts", "program"),
        ],
    ),
)
def test_adapters_of_stacked_experts_equal_peft(name: str, kind: str, tmp_path: Path) -> None:
    models = PeftModels(reference(name), tmp_path)
    decoder, slots = _packed_op_by_op(name) if kind == "op by op" else make(name, kind)
    targets = {"target_modules": ["o_proj", "q_proj"], "target_parameters": EXPERTS}
    for slot in (0, 2):
        slots.load(slot, str(models.make(f"adapter {slot}", seed=slot, r=2 + slot, **targets)))
    uses = ((RowAdapter(2, 1.0),), (), (RowAdapter(0, 1.0),), (RowAdapter(2, 1.0),))
    answers, logits = Driver(decoder).greedy(PROMPTS, NEW_TOKENS, chunk=16, adapters=uses)
    check(answers, logits, models, ("adapter 2", "", "adapter 0", "adapter 2"))
    if kind == "program":
        plain, _ = make(name, "program", limits=None)
        _, alone = Driver(plain).greedy(PROMPTS, NEW_TOKENS, chunk=16)
        assert torch.equal(logits[1], alone[1])


@pytest.mark.parametrize("choose", [kernels.choose, kernels.choose_reference])
def test_tables_of_experts_that_move_have_the_parts_of_those_that_are_there(choose: Callable[..., Any]) -> None:
    hidden, inner, generator = 16, 8, torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def of_one(rows: int, columns: int) -> LowRank:
        return LowRank(rows, random(2, columns), (LowRankPart(0, 0, random(rows, 2)),))

    gate_up, down, x = random(2, 2 * inner, hidden), random(2, hidden, inner), random(6, hidden)
    all_of_them = [(of_one(2 * inner, hidden), of_one(hidden, inner)) for _ in range(4)]
    ids, shares = torch.tensor([[0, 1], [1, 0], [0, -1]] * 2), torch.full((6, 2), 0.5)
    tokens = TokenAdapters(np.array([[0, 0, 0, -1, 1, 0]], np.int32), np.ones((1, 6), np.float32))
    facts = {"hidden": hidden, "inner": inner, "num_experts": 2, "activation": "silu", "has_biases": False}
    make_experts = choose("experts", device=torch.device("cpu"), dtype=torch.float32, **facts)

    def adapted(own: list[int] | None) -> tuple[Any, Any]:
        adapted, table = make_experts(gate_up, down, "silu").adaptable(SlotLimits(torch.float32, 2, 1, 2), own)
        return adapted, table

    moving, table = adapted([2, 0])
    table.put(0, table.pack(LowRankExperts(*map(tuple, zip(*all_of_them, strict=True)))))
    for own in ([2, 0], [3, 1], [0, 3]):
        table.move(own)
        there, fixed = adapted(None)
        fixed.put(0, fixed.pack(LowRankExperts(*map(tuple, zip(*(all_of_them[each] for each in own), strict=True)))))
        found, wanted = (each.apply_adapted(x, ids, shares, tokens) for each in (moving, there))
        assert torch.equal(found, wanted)
    table.put(0, None)
    table.move([1, 2])
    assert torch.equal(moving.apply_adapted(x, ids, shares, tokens), moving.apply(x, ids, shares))


def test_adapters_of_single_experts_are_those_of_the_stack(tmp_path: Path) -> None:
    """In the form of peft's files beside transformers 4: a pair of factors for each expert's matrix."""
    models = PeftModels(reference("qwen3_moe"), tmp_path)
    stacked = models.make("one", target_modules=["o_proj"], target_parameters=EXPERTS)
    single = tmp_path / "single"
    single.mkdir()
    (single / "adapter_config.json").write_text((stacked / "adapter_config.json").read_text())
    tensors = dict[str, Tensor]()
    for key, tensor in load_file(stacked / "adapter_model.safetensors").items():
        if ".experts." not in key:
            tensors[key] = tensor
            continue
        start, count, is_a = key.partition(".experts.")[0], 5, "lora_A" in key
        inner = "base_layer" in key
        each = tensor.unflatten(0, (count, -1)) if is_a else tensor.unflatten(1, (-1, count)).permute(2, 0, 1)
        for expert, own in enumerate(each):
            halves = {"down_proj": own} if not inner else {"gate_proj": own, "up_proj": own}
            if inner and not is_a:
                halves = dict(zip(("gate_proj", "up_proj"), own.chunk(2), strict=True))
            for name, part in halves.items():
                factor = "A" if is_a else "B"
                tensors[f"{start}.experts.{expert}.{name}.lora_{factor}.weight"] = part.contiguous().clone()
    save_file(tensors, single / "adapter_model.safetensors")
    decoder, slots = make("qwen3_moe", "program")
    slots.load(0, str(single))
    answers, logits = Driver(decoder).greedy(PROMPTS[:2], NEW_TOKENS, chunk=16, adapters=((RowAdapter(0, 1.0),),) * 2)
    check(answers, logits, models, ("one", "one"))


def _as_before_0_19_1(path: Path, folder: Path, changed: Sequence[str] = ("gate_up", "down"), **config: Any) -> str:
    """The adapter as peft saved it then: A and B of each expert transposed, in each other's place."""
    folder.mkdir()
    told = json.loads((path / "adapter_config.json").read_text()) | {"peft_version": "0.18.1"} | config
    (folder / "adapter_config.json").write_text(json.dumps(told))
    tensors, count = load_file(path / "adapter_model.safetensors"), 5
    for key in [key for key in tensors if key.endswith("experts.lora_A.weight") or key.endswith("layer.lora_A.weight")]:
        if ("gate_up" if "base_layer" in key else "down") not in changed:
            continue
        other = key.replace("lora_A", "lora_B")
        a, b = tensors[key].unflatten(0, (count, -1)), tensors[other].unflatten(1, (-1, count))  # [e r i], [o r e]
        tensors[key] = b.permute(2, 1, 0).flatten(0, 1).contiguous()
        tensors[other] = a.permute(2, 1, 0).flatten(1).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


SQUARE: list[dict[str, Any]] = [{}, {"moe_intermediate_size": 64}, {"moe_intermediate_size": 32}]
"""No matrix of experts is square; the down projection is; both projections' stack is."""


@pytest.mark.parametrize("config", SQUARE)
def test_experts_of_earlier_pefts_have_the_same_answer(config: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 48} | config
    model = tiny_models.build("qwen3_moe", **sizes)
    models, source = PeftModels(model, tmp_path), DictSource(state_of(model))
    path = models.make("one", target_modules=["o_proj"], target_parameters=EXPERTS)
    decoder = CpuDecoder(spec_of(model), source, torch.float32, StepLimits(64, 8, 128, adapters=LIMITS))
    slots = AdapterSlots(LIMITS, decoder, SINGLE, lambda: source)
    slots.load(0, _as_before_0_19_1(path, tmp_path / "earlier"))
    slots.load(1, str(path))
    uses = ((RowAdapter(0, 1.0),), (RowAdapter(1, 1.0),))
    answers, logits = Driver(decoder).greedy(PROMPTS[:2], NEW_TOKENS, chunk=16, adapters=uses)
    check(answers, logits, models, ("one", "one"))
    if not config:
        with pytest.raises(ModelError, match="factors of one have each other's shapes, those of another do not"):
            slots.load(2, _as_before_0_19_1(path, tmp_path / "mixed", ["down"]))


def test_factors_of_experts_have_no_higher_rank_than_the_config_says(tmp_path: Path) -> None:
    """Kernels have room for max_lora_rank, which the config was held to."""
    path = PeftModels(reference("qwen3_moe"), tmp_path).make(
        "one", r=4, target_modules=["o_proj"], target_parameters=EXPERTS
    )
    tensors = load_file(path / "adapter_model.safetensors")
    for key in [each for each in tensors if ".experts." in each]:
        tensors[key] = torch.cat([tensors[key]] * 8, dim=0 if "lora_A" in key else 1)
    save_file(tensors, path / "adapter_model.safetensors")
    _, slots = make("qwen3_moe", "program")
    with pytest.raises(ModelError, match="has factors of rank 32, and the config says 4 at most"):
        slots.load(0, str(path))


def test_square_experts_alone_are_refused_if_their_order_is_not_known(tmp_path: Path) -> None:
    model = tiny_models.build("qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    source = DictSource(state_of(model))
    path = PeftModels(model, tmp_path).make("one", target_modules=["o_proj"], target_parameters=EXPERTS[1:])
    decoder = CpuDecoder(spec_of(model), source, torch.float32, StepLimits(64, 8, 128, adapters=LIMITS))
    slots = AdapterSlots(LIMITS, decoder, SINGLE, lambda: source)
    slots.load(0, str(path))
    for number, version in enumerate(("0.18.1", "0.19.0", None)):
        earlier = _as_before_0_19_1(path, tmp_path / f"{number}", peft_version=version)
        with pytest.raises(ModelError, match=rf"cannot be told by their shapes.*peft {version or 'an unknown'}"):
            slots.load(1, earlier)
