"""Adapters of modules that only some families have, against peft's forward pass: routers, both ends of a model, experts
beside others, what layers share, and attention to chosen keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from model_driver import DictSource, Driver
from peft_adapters import PeftModels
from rank_threads import RankThreads, pool_for_each_rank
from test_adapters import EXPERTS, LIMITS, NEW_TOKENS, PROMPTS, check_two_ranks, spec_of
from test_adapters_beside import ENGINE, PARAMS, expect, expect_refusal
from thinned import every
from tiny_families import FAMILIES as DENSE
from tiny_mixtures import FAMILIES as MIXTURES
from tiny_models import TINY_MODELS, TinyModel, state_of
from tiny_recurrent import FAMILIES as RECURRENT

from headrace import LLM, LoRARequest
from headrace.executor.adapters.slots import AdapterSlots
from headrace.executor.models.blocks.shared_transformer import SharedTransformer
from headrace.executor.models.decoder import Decoder
from headrace.executor.parallel.rank_place import SINGLE
from headrace.ipc.adapters import RowAdapter

__all__ = ["pool_for_each_rank"]  # a fixture for all of these tests
ALL: dict[str, TinyModel] = {**TINY_MODELS, **DENSE, **MIXTURES, **RECURRENT}
NONE: list[str] = []
THREADS = f"{RankThreads.__module__}:{RankThreads.__name__}"


def parameters(*names: str) -> dict[str, Any]:
    """Of modules that are no linear layers for peft."""
    return {"target_modules": NONE, "target_parameters": list(names)}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a router by transformers' name": ("mixtral", {}),
    "MiniMax": ("minimax", {}),
    "MiniMax M2": ("minimax_m2", {}),
    "a router in a linear layer": ("granitemoe", parameters("router.weight")),
    "Granite Hybrid's": ("granite_hybrid", parameters("router.weight")),
    "Kimi Linear's": ("kimi_linear", parameters("gate.weight")),
    "an embedding by transformers' name": ("bailing_hybrid", {"target_modules": ["embed_tokens", "q_proj"]}),
    "an embedding that is normed": ("inkling", {"target_modules": ["embed_tokens", "q_proj"]}),
    "experts beside those of every token": ("inkling", {"target_modules": NONE, "target_parameters": EXPERTS}),
    "experts beside some that do nothing": (
        "longcat_flash",
        {"target_modules": r".*\.(q_b_proj|mlps\.\d\.down_proj)", "target_parameters": EXPERTS},
    ),
    "experts that ids choose": ("deepseek_v4", {"target_modules": NONE, "target_parameters": EXPERTS}),
    "keys that an index chooses": ("deepseek_v32", {}),
    "with sinks": ("hy_v4", {}),
    "of pools": ("glm5_next", {}),
    "of layers before": ("glm_moe_dsa", {}),
    "of windows": ("dots3_note", {}),
    "a stream's end": ("qwen4_exp", {}),
    "shared blocks": ("zamba2", {}),
    "magnitudes of shared blocks": ("zamba2", {"use_dora": True, "size": 0.05}),
}


@pytest.mark.parametrize("case", every(2, CASES))
def test_what_peft_makes_of_a_familys_modules_is_computed(case: str, tmp_path: Path) -> None:
    name, config = CASES[case]
    model = tiny_models.make(ALL[name])
    model.save_pretrained(tmp_path / "model")
    models = PeftModels(model, tmp_path)
    lora = LoRARequest("a", 1, str(models.make("a", **{"size": 0.1, **config})))
    with LLM(str(tmp_path / "model"), **ENGINE, skip_tokenizer_init=True) as llm:
        for each in (None, lora):
            expect(llm, models, each, PROMPTS[:2])
        both = llm.generate([PROMPTS[0]] * 2, PARAMS, use_tqdm=False, lora_request=[lora, None])
    for output, which in zip(both, ("a", ""), strict=True):
        answer = list(output.outputs[0].token_ids)
        assert answer == models.logits(which, PROMPTS[0], answer).argmax(-1).tolist(), which
    changed = models.logits("a", *(given := (PROMPTS[0], answer))) - models.logits("", *given)
    assert float(changed.abs().max()) > 1e-2, "the adapter changes nothing"


SHARED: dict[str, dict[str, Any]] = {"biases": {"bias": "lora_only"}, "dora": {"use_dora": True}}


@pytest.mark.parametrize("kind", ["program", "two ranks", "op by op"])
@pytest.mark.parametrize("form", SHARED)
def test_layers_that_share_matrices_have_adapters_of_their_own(
    form: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "op by op":
        monkeypatch.setattr(SharedTransformer, "why_no_program", lambda *_: "the test wants none.")
    model = tiny_models.make(RECURRENT["zamba2"], add_bias_linear=True)
    model.save_pretrained(tmp_path / "model")
    models = PeftModels(model, tmp_path)
    lora = LoRARequest("a", 1, str(models.make("a", size=0.05, **SHARED[form])))
    threads = {"tensor_parallel_size": 2, "distributed_executor_backend": THREADS} if kind == "two ranks" else {}
    with LLM(str(tmp_path / "model"), **ENGINE, **threads, skip_tokenizer_init=True) as llm:
        for each in (None, lora):
            expect(llm, models, each)


@pytest.mark.parametrize("name", ["gemma3n_plain", "gemma4", "opt_projected_post_norm"])
def test_two_ranks_divide_what_is_at_a_models_ends(name: str, tmp_path: Path) -> None:
    model = tiny_models.make(ALL[name])
    models = PeftModels(model, tmp_path)
    path = str(models.make("one", size=0.1))
    check_two_ranks(model, models, path)


def test_a_model_beside_an_adapter_of_chosen_keys_has_the_bits_that_it_has_alone(tmp_path: Path) -> None:
    model = tiny_models.make(MIXTURES["deepseek_v32"])
    models, spec, source = PeftModels(model, tmp_path), spec_of(model), DictSource(state_of(model))
    with_adapters = Decoder(spec, source, torch.float32, adapters=LIMITS)
    AdapterSlots(LIMITS, with_adapters, SINGLE, lambda: source).load(0, str(models.make("one")))
    uses = ((RowAdapter(0, 1.0),), ())
    _, beside = Driver(with_adapters).greedy(PROMPTS[:2], NEW_TOKENS, chunk=16, adapters=uses)
    _, alone = Driver(Decoder(spec, source, torch.float32)).greedy(PROMPTS[:2], NEW_TOKENS, chunk=16)
    assert not torch.equal(beside[0], alone[0])
    assert torch.equal(beside[1], alone[1])


def test_what_takes_the_place_of_an_embedding_that_is_normed_is_refused(tmp_path: Path) -> None:
    model = tiny_models.make(RECURRENT["inkling"])
    model.save_pretrained(tmp_path / "model")
    path = PeftModels(model, tmp_path).make("a", target_modules=["embed_tokens", "q_proj"], use_dora=True)
    assert json.loads((path / "adapter_config.json").read_text())["use_dora"]
    expect_refusal(tmp_path / "model", path, r"takes the embedding's place \(modules_to_save, or DoRA\), which this")
