"""Adapters beside what else an engine does: drafts, constraints, sleep, new weights, states and GGUF files; as peft."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from gguf.constants import GGMLQuantizationType as Kind
from model_driver import DictSource, Driver
from peft_adapters import PeftModels
from rank_threads import RankThreads, pool_for_each_rank
from test_adapters import EXPERTS
from thinned import every
from tiny_gguf import save_gguf
from tiny_mixtures import FAMILIES as MIXTURES
from tiny_models import state_of
from tiny_recurrent import FAMILIES

from headrace import LLM, HeadraceError, LoRARequest, SamplingParams, StructuredOutputsParams
from headrace.core.options.adapters import AdapterLimits
from headrace.core.options.engine_options import Options
from headrace.executor.adapters.slots import AdapterSlots
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.cpu.decoder import CpuDecoder
from headrace.executor.cpu.program import StepLimits
from headrace.executor.models.families import spec_from_config
from headrace.executor.parallel.rank_place import SINGLE
from headrace.ipc.adapters import RowAdapter

__all__ = ["pool_for_each_rank"]  # a fixture for all of these tests
ENGINE: dict[str, Any] = {
    "in_process": True,
    "dtype": "float32",
    "enable_lora": True,
    "max_loras": 3,
    "use_tqdm_on_load": False,
    "max_num_seqs": 4,
    "max_model_len": 128,
    "kv_cache_memory_bytes": 1 << 24,
}
PARAMS = SamplingParams(temperature=0, max_tokens=10, logprobs=0, ignore_eos=True, detokenize=False)
PROMPTS = [[(7 * i + 3 * n) % 90 + 3 for i in range(length)] for n, length in enumerate((23, 9))]
FORMS: dict[str, dict[str, Any]] = {"plain": {}, "dora": {"use_dora": True, "size": 0.1}, "biases": {"bias": "all"}}
"""The last two depend on the model's weights too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    for seed in (0, 1):
        tiny_models.save("llama_biases", folder / f"{seed}", seed=seed, tokenizer=True)
    return folder


@pytest.fixture(scope="module")
def models(folder: Path) -> PeftModels:
    models = PeftModels(tiny_models.build("llama_biases"), folder)
    for seed, (name, config) in enumerate(FORMS.items()):
        models.make(name, seed=seed, **config)
    return models


@pytest.fixture(scope="module")
def loras(models: PeftModels) -> list[LoRARequest]:
    return [LoRARequest(name, number, str(models.folder / name)) for number, name in enumerate(FORMS, 1)]


def expect(llm: LLM, models: PeftModels, lora: LoRARequest | None, prompts: list[list[int]] = PROMPTS) -> None:
    """Greedy tokens and their log probabilities are peft's."""
    for prompt, output in zip(prompts, llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=lora), strict=True):
        (answer,) = output.outputs
        wanted = models.logits("" if lora is None else lora.lora_name, prompt, answer.token_ids)
        assert answer.token_ids == wanted.argmax(-1).tolist(), lora
        found = [position[token].logprob for position, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        assert found == pytest.approx(wanted.log_softmax(-1).amax(-1).tolist(), abs=1e-3)


@pytest.mark.usefixtures("drafts_at_any_cost")
def test_drafts_of_an_adapters_requests_are_checked_with_it(
    folder: Path, models: PeftModels, loras: list[LoRARequest]
) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with LLM(str(folder / "0"), **ENGINE, speculative_config=drafts) as llm:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
        given = [loras[0], None, loras[1]]
        for output, lora in zip(
            llm.generate([PROMPTS[0]] * 3, params, use_tqdm=False, lora_request=given), given, strict=True
        ):
            wanted = models.logits("" if lora is None else lora.lora_name, PROMPTS[0], output.outputs[0].token_ids)
            assert output.outputs[0].token_ids == wanted.argmax(-1).tolist()
        stats = llm.get_stats()
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_constraints_choose_among_an_adapters_tokens(
    folder: Path, models: PeftModels, loras: list[LoRARequest]
) -> None:
    letters = "abcdefghij"
    with LLM(str(folder / "0"), **ENGINE) as llm:
        ids = [llm.get_tokenizer().encode(letter)[0] for letter in letters]
        params = SamplingParams(
            temperature=0, max_tokens=1, structured_outputs=StructuredOutputsParams(regex=f"[{letters}]")
        )
        found = {}
        for lora in (None, *loras):
            name = "" if lora is None else lora.lora_name
            outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=lora)
            found[name] = [output.outputs[0].text for output in outputs]
            wanted = [int(models.logits(name, prompt, [0])[0, ids].argmax()) for prompt in PROMPTS]
            assert found[name] == [letters[each] for each in wanted]
        assert len({tuple(texts) for texts in found.values()}) > 1, "adapters choose others"


@pytest.mark.system
def test_two_ranks_evict_adapters_alike(folder: Path, models: PeftModels, loras: list[LoRARequest]) -> None:
    """With room for one of three, each is read again for its turn, and both ranks have the same then."""
    options = ENGINE | {"in_process": False, "tensor_parallel_size": 2, "max_loras": 1, "max_cpu_loras": 1}
    with LLM(str(folder / "0"), **options, skip_tokenizer_init=True) as llm:
        for lora in (*loras, None, *reversed(loras)):
            expect(llm, models, lora)
        prompts = [[*prompt, 7 + number] for number, prompt in enumerate(PROMPTS * 3)]
        given = [*loras, *loras]
        together = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=given)
        for prompt, lora, output in zip(prompts, given, together, strict=True):
            (alone,) = llm.generate([prompt], PARAMS, use_tqdm=False, lora_request=lora)
            assert output.outputs[0].token_ids == alone.outputs[0].token_ids


def test_adapters_are_there_after_sleep(folder: Path, models: PeftModels, loras: list[LoRARequest]) -> None:
    with LLM(str(folder / "0"), **ENGINE, enable_sleep_mode=True) as llm:
        for level in (0, 1, 2):
            if level:
                llm.sleep(level)
                llm.wake_up()
            for lora in (None, *loras):
                expect(llm, models, lora)


def test_adapters_follow_new_weights(folder: Path, models: PeftModels, loras: list[LoRARequest]) -> None:
    """DoRA's factors are of the new matrices' norms, and biases in the place of the model's stay what they are."""
    base = tiny_models.build("llama_biases", seed=1)
    moved = PeftModels(base, folder)
    for lora in loras:
        moved.take(lora.lora_name)
    with LLM(str(folder / "0"), **ENGINE) as llm:
        for lora in loras:
            expect(llm, models, lora)
        llm.reload_weights(str(folder / "1"))
        for each in (None, *loras):
            expect(llm, moved, each)
        llm.reload_weights(str(folder / "0"))
        for each in (None, *loras):
            expect(llm, models, each)


def test_an_adapter_that_is_loaded_while_new_weights_are_read_follows_them(
    folder: Path, models: PeftModels, loras: list[LoRARequest]
) -> None:
    sources = [DictSource(state_of(tiny_models.build("llama_biases", seed=seed))) for seed in (0, 1)]
    spec = spec_from_config(json.loads((folder / "0" / "config.json").read_text()))
    limits = AdapterLimits(max_loras=2, slots=2, max_rank=8, dtype="float32", target_modules=())
    one, other = (
        CpuDecoder(spec, source, torch.float32, StepLimits(64, 8, 128, adapters=limits)) for source in sources
    )
    slots = AdapterSlots(limits, one, SINGLE, lambda: sources[0])
    slots.load(0, loras[1].lora_path)
    prepared = slots.prepared_for(other, lambda: sources[1])
    slots.load(1, loras[1].lora_path)
    slots.move_to(prepared)
    uses = ((RowAdapter(0, 1.0),), (RowAdapter(1, 1.0),))
    (first, second), logits = Driver(other).greedy([PROMPTS[0]] * 2, 6, chunk=16, adapters=uses)
    moved = PeftModels(tiny_models.build("llama_biases", seed=1), folder)
    moved.take("dora")
    wanted = moved.logits("dora", PROMPTS[0], first)
    assert first == second == wanted.argmax(-1).tolist()
    assert torch.equal(*logits)


def test_adapters_of_experts_follow_them_to_other_ranks(tmp_path: Path) -> None:
    """With copies of some experts, and one adapter that is loaded once they have moved."""
    model = tiny_models.build("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    models = PeftModels(model, tmp_path)
    targets = {"target_modules": ["o_proj"], "target_parameters": EXPERTS}
    loras = [LoRARequest(f"a{n}", n, str(models.make(f"a{n}", seed=n, **targets))) for n in (1, 2)]
    balanced: dict[str, Any] = {
        **{"tensor_parallel_size": 2, "distributed_executor_backend": f"{RankThreads.__module__}:RankThreads"},
        **{"enable_expert_parallel": True, "enable_eplb": True},
        "eplb_config": {"step_interval": 4, "window_size": 3, "num_redundant_experts": 3},
    }
    with LLM(str(tmp_path / "model"), **ENGINE, **balanced, skip_tokenizer_init=True) as llm:
        for each in (loras[0], None, loras[0], loras[1], loras[0]):
            expect(llm, models, each)
        balance = llm.get_stats().expert_balance
        assert balance is not None
        assert balance.rearrangements > 2


RECURRENT = {
    "mamba2": ["in_proj"],
    "lfm2": ["in_proj", "out_proj", "q_proj", "w2"],
    "qwen3_5": ["in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "down_proj"],
    "granite_hybrid_dense": ["in_proj", "out_proj", "v_proj"],
    "falcon_h1": ["in_proj", "k_proj", "up_proj"],
}


@pytest.mark.parametrize("name", every(2, RECURRENT))
def test_linears_of_layers_with_a_state_take_adapters(name: str, tmp_path: Path) -> None:
    model = tiny_models.make(FAMILIES[name])
    model.save_pretrained(tmp_path / "model")
    models = PeftModels(model, tmp_path)
    lora = LoRARequest("a", 1, str(models.make("a", target_modules=RECURRENT[name], size=0.1)))
    with LLM(str(tmp_path / "model"), **ENGINE, skip_tokenizer_init=True) as llm:
        for each in (None, lora):
            expect(llm, models, each)


def test_adapters_of_gguf_models_see_the_weights_of_the_file(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    file = save_gguf(model, tmp_path / "model.gguf", Kind.Q4_1)
    weights = open_checkpoint(Options(model=str(file))).weights()
    stored = copy.deepcopy(model)
    state = {name: weights.get(name).float() for name in weights.names()}
    assert not stored.load_state_dict(state, strict=False).unexpected_keys
    assert not torch.equal(stored.state_dict()["lm_head.weight"], model.state_dict()["lm_head.weight"])
    models = PeftModels(stored, tmp_path)
    lora = LoRARequest("a", 1, str(models.make("a")))
    with LLM(str(file), **ENGINE, skip_tokenizer_init=True) as llm:
        for each in (None, lora):
            expect(llm, models, each)


SCALED_LINEARS = ["in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "the model's biases": ("falcon_h1_normed", {"bias": "lora_only", "target_modules": SCALED_LINEARS}),
    "their own biases": ("falcon_h1", {"lora_bias": True, "target_modules": SCALED_LINEARS}),
    "biases where there are none": ("minimax", {"lora_bias": True, "target_modules": ["q_proj", "out_proj", "o_proj"]}),
    "experts": ("minimax", {"target_modules": ["o_proj"], "target_parameters": EXPERTS}),
    "biases of values": ("mimo_v2", {"lora_bias": True, "target_modules": ["v_proj"]}),
}
"""Of models that multiply the results of matrices: what an adapter adds to these is multiplied too."""


@pytest.mark.parametrize("case", SCALED)
def test_what_is_added_to_results_that_a_model_multiplies_is_multiplied_too(case: str, tmp_path: Path) -> None:
    name, config = SCALED[case]
    model = tiny_models.make(FAMILIES[name] if name in FAMILIES else MIXTURES[name])
    model.save_pretrained(tmp_path / "model")
    models = PeftModels(model, tmp_path)
    lora = LoRARequest("a", 1, str(models.make("a", size=0.1, **config)))
    with LLM(str(tmp_path / "model"), **ENGINE, skip_tokenizer_init=True) as llm:
        for each in (None, lora):
            expect(llm, models, each)


@pytest.mark.parametrize(("name", "inner"), [("nemotron_h", 48), ("nemotron_h", 32), ("nemotron_h_latent", 48)])
def test_adapters_of_stacked_experts_without_a_gate_equal_peft(name: str, inner: int, tmp_path: Path) -> None:
    """Whose two matrices are square, or one like the other transposed."""
    model = tiny_models.make(FAMILIES[name], moe_intermediate_size=inner)
    model.save_pretrained(tmp_path / "model")
    models, both = PeftModels(model, tmp_path), ["experts.up_proj", "experts.down_proj"]
    targets = {"both": both, "up": both[:1], "down": both[1:]}
    with LLM(str(tmp_path / "model"), **ENGINE, skip_tokenizer_init=True) as llm:
        for number, (which, parameters) in enumerate(targets.items(), 1):
            path = models.make(which, seed=number, target_modules=["q_proj"], target_parameters=parameters)
            lora = LoRARequest(which, number, str(path))
            if inner == 32 and which != "both":  # as the hidden size
                with pytest.raises(HeadraceError, match="which of the experts' two matrices it is for cannot be told"):
                    llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False, lora_request=lora)
            else:
                expect(llm, models, lora)


def expect_refusal(model: Path, adapter: Path, words: str) -> None:
    lora = LoRARequest("a", 1, str(adapter))
    with LLM(str(model), **ENGINE, skip_tokenizer_init=True) as llm, pytest.raises(HeadraceError, match=words):
        llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False, lora_request=lora)


def test_a_bias_beside_a_head_whose_logits_are_multiplied_is_refused(tmp_path: Path) -> None:
    model = tiny_models.make(FAMILIES["granite_hybrid_dense"], logits_scaling=4.0)
    model.save_pretrained(tmp_path / "model")
    path = PeftModels(model, tmp_path).make("a", target_modules=["lm_head"], lora_bias=True)
    expect_refusal(tmp_path / "model", path, r"lm_head has a bias \(lora_bias\), and the model multiplies its logits")


def test_a_file_whose_matrices_contain_multipliers_takes_no_adapters(tmp_path: Path) -> None:
    """Nothing says by what peft's factors are to be multiplied."""
    model = tiny_models.make(FAMILIES["falcon_h1"], tie_word_embeddings=False)
    file = save_gguf(model, tmp_path / "model.gguf")
    path = PeftModels(model, tmp_path).make("a", target_modules=["q_proj"])
    expect_refusal(file, path, "has the model's multipliers in its matrices, and does not say what")
