"""Families with experts or latent attention against transformers, from the files that it saves: token by token, with
chunked prefill, preemption and the prefix cache at once."""

from __future__ import annotations

import copy
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from all_at_once import TIGHT, generate_all_at_once, shared_prefix
from model_driver import DictSource
from rank_threads import RankThreads, pool_for_each_rank
from safetensors.torch import load_file, save_file
from test_models import config_of, reference, reference_logits
from thinned import every, pairs
from tiny_mixtures import FAMILIES
from tiny_models import state_of
from torch import Tensor
from transformers import Dots3NoteTextConfig

from headrace import LLM, HeadraceError, SamplingParams
from headrace.core.options.parsing import parse_options
from headrace.executor.cpu.rank import CpuRank
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.ipc.failure import OptionError
from headrace.ipc.messages import EngineStats

__all__ = ["pool_for_each_rank"]  # a fixture for all of these tests

THREADS = f"{RankThreads.__module__}:{RankThreads.__name__}"
NEW_TOKENS = 10


class Counting(DictSource):
    """Notes which tensors are read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.read: set[str] = set()

    def read_part(self, name: str, rows: slice | None, columns: slice | None) -> Tensor:
        self.read.add(name)
        return super().read_part(name, rows, columns)


NOT_DIVIDED = {"minimax_m3"}
"""Models whose attention tensor-parallel ranks do not share."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@cache
def model_of(name: str) -> Any:
    return tiny_models.make(FAMILIES[name])


@cache
def saved(folder: Path, name: str) -> Path:
    model_of(name).save_pretrained(folder / name)
    return folder / name


def expect_answers_of_transformers(folder: Path, name: str, **options: Any) -> EngineStats:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    path = saved(folder, name)
    has_windows = len(tiny_models.cache_groups_of(path, TIGHT["max_model_len"])) > 1
    blocks = tiny_models.blocks_of_one_request(path, TIGHT) + (6 if has_windows else 4)
    with LLM(str(path), **TIGHT, num_gpu_blocks_override=blocks, **options) as llm:
        outputs = generate_all_at_once(llm, shared_prefix(128), params)
        assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
        (again,) = llm.generate(shared_prefix(128)[:1], params, use_tqdm=False)
        stats = llm.get_stats()
    assert again.num_cached_tokens
    outputs.append(again)
    for prompt, output in zip([*shared_prefix(128), shared_prefix(128)[0]], outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        assert answer == reference_logits(model_of(name), prompt, answer).argmax(-1).tolist()
    assert len({token for output in outputs for token in output.outputs[0].token_ids}) > NEW_TOKENS
    return stats


@pytest.mark.parametrize("name", every(2, FAMILIES))
def test_greedy_tokens_equal_transformers(folder: Path, name: str) -> None:
    expect_answers_of_transformers(folder, name)


@pytest.mark.system
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_two_ranks_give_the_tokens_of_transformers(folder: Path, name: str, kind: str) -> None:
    if kind == "tensor" and name in NOT_DIVIDED:
        pytest.skip("tensor-parallel ranks cannot divide it")
    ranks = {f"{kind}_parallel_size": 2, "distributed_executor_backend": THREADS}
    expect_answers_of_transformers(folder, name, **ranks)


EXPERT_PARALLEL = {
    "tensor_parallel_size": 2, "distributed_executor_backend": THREADS, "enable_expert_parallel": True
}  # fmt: skip


@pytest.mark.parametrize("name", every(2, ["glm4_moe", "gpt_oss", "longcat_flash", "llama4"]))
def test_ranks_that_have_whole_experts_answer_as_transformers_does(folder: Path, name: str) -> None:
    """As one program and op by op; four experts of each rank, and shared experts that are divided by rows. LongCat's
    experts are in an FFN of another kind, and some do nothing."""
    expect_answers_of_transformers(folder, name, **EXPERT_PARALLEL)


@pytest.mark.parametrize("name", ["glm4_moe", "llama4"])
def test_neighbours_among_experts_may_be_of_different_ranks(folder: Path, name: str) -> None:
    """As one program and op by op."""
    expect_answers_of_transformers(folder, name, **EXPERT_PARALLEL, expert_placement_strategy="round_robin")


BALANCED = EXPERT_PARALLEL | {
    "enable_eplb": True, "eplb_config": {"step_interval": 4, "window_size": 3, "num_redundant_experts": 2}
}  # fmt: skip


@pytest.mark.parametrize("name", every(2, ["gpt_oss", "glm4_moe", "llama4", "longcat_flash"]))
def test_experts_that_change_ranks_between_steps_answer_as_transformers_does(folder: Path, name: str) -> None:
    """As one program and op by op; with biases, and with copies of two experts of each layer."""
    balance = expect_answers_of_transformers(folder, name, **BALANCED).expert_balance
    assert balance is not None
    assert balance.rearrangements > 2
    assert 0 < balance.min <= balance.p50 <= 1


def test_copies_of_experts_make_no_result_depend_on_what_is_computed_beside_it(folder: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
    config = {"num_redundant_experts": 4}
    with LLM(str(saved(folder, "glm4_moe")), **TIGHT, **(BALANCED | {"eplb_config": config})) as llm:
        alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in shared_prefix(128)]
        together = generate_all_at_once(llm, shared_prefix(128), params)
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs, "to the bit"


def test_packed_experts_change_ranks_as_they_are(folder: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    answers = []
    for options in (EXPERT_PARALLEL, BALANCED):
        packed = {"quantization": "int8", "quantization_group_size": 32}
        with LLM(str(saved(folder, "glm4_moe")), **TIGHT, **options, **packed) as llm:
            outputs = llm.generate(shared_prefix(128), params, use_tqdm=False)
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
            balance = llm.get_stats().expert_balance
    assert answers[0] == answers[1]
    assert balance is not None
    assert balance.rearrangements


def test_a_stage_balances_its_own_experts(folder: Path) -> None:
    balance = expect_answers_of_transformers(folder, "minimax_m2", **BALANCED, pipeline_parallel_size=2).expert_balance
    assert balance is not None
    assert balance.rearrangements


def test_experts_are_balanced_on_cpus_alone(folder: Path) -> None:
    options = parse_options(model=str(saved(folder, "glm4_moe")), **BALANCED)
    rank = CpuRank(options, RankCoordinates.of_options(0, options))
    rank._device = torch.device("cuda")
    with pytest.raises(OptionError, match="enable_eplb moves experts between ranks on CPUs, not on cuda"):
        rank.describe(lambda _: None)


def test_expert_parallelism_that_would_divide_nothing_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="needs tensor_parallel_size=2 or more"):
        LLM(str(saved(folder, "glm4_moe")), **TIGHT, enable_expert_parallel=True)
    with pytest.raises(OptionError, match="expert_placement_strategy=round_robin is of experts that are divided whole"):
        LLM(str(saved(folder, "glm4_moe")), **TIGHT, expert_placement_strategy="round_robin")
    with pytest.raises(OptionError, match="a LlamaForCausalLM has no experts to divide"):
        LLM(str(tiny_models.save("llama", tmp_path / "llama")), **TIGHT, **EXPERT_PARALLEL)


@pytest.mark.parametrize(("in_turn", "experts"), [(False, [[0, 1], [2, 3, 4]]), (True, [[0, 2, 4], [1, 3]])])
def test_a_rank_reads_its_own_experts_alone(folder: Path, in_turn: bool, experts: list[list[int]]) -> None:
    spec, state = spec_from_config(config_of("mixtral")), state_of(reference("mixtral"))
    read = []
    for rank in range(2):
        place = RankCoordinates(rank, 2, expert_parallel=True, experts_in_turn=in_turn)
        source = Counting(state)
        Decoder(spec, source, torch.float32, place=place)
        numbers = {int(each.split(".experts.")[1].split(".")[0]) for each in source.read if ".experts." in each}
        read.append(sorted(numbers))
    assert read == experts


OWN_NAMES = {
    "deepseek_v4": (
        ("model.embed_tokens.", "embed."), ("model.hc_head.hc_", "hc_head_"), (".attn.norm.", ".attn.kv_norm."),
        ("model.layers.", "layers."), ("model.norm.", "norm."),
    ),
    "hy_v4": (
        (".hc_pre.hc_attn_layer.", ".hc_attn_layer.hc_pre."), (".hc_pre.hc_mlp_layer.", ".hc_mlp_layer.hc_pre."),
        (".hc_pre.hc_head.hc_head_", ".hc_head.hc_pre.hc_head_"), (".mlp.linear_gate.", ".mlp.gate_proj."),
        (".shared_experts.linear_gate.", ".shared_experts.gate_proj."),
    ),
}  # fmt: skip
"""Publishers' names, from those of them that transformers saves otherwise."""


@pytest.mark.parametrize(("name", "of"), pairs(OWN_NAMES, ("publisher", "transformers")))
def test_files_have_the_publishers_names_or_those_of_transformers(
    folder: Path, name: str, of: str, tmp_path: Path
) -> None:
    state = load_file(saved(folder, name) / "model.safetensors")
    for old, new in OWN_NAMES[name]:
        state = {key.replace(old, new): each for key, each in state.items()}
    if of == "transformers":
        state = {key: each.contiguous().clone() for key, each in model_of(name).state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    shutil.copy(saved(folder, name) / "config.json", tmp_path)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    with LLM(str(tmp_path), **TIGHT) as llm:
        outputs = llm.generate(shared_prefix(128), params, use_tqdm=False)
    for prompt, output in zip(shared_prefix(128), outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        assert answer == reference_logits(model_of(name), prompt, answer).argmax(-1).tolist()


def test_a_name_that_two_tensors_of_a_file_have_is_refused(folder: Path, tmp_path: Path) -> None:
    path = saved(folder, "hy_v4")
    state = load_file(path / "model.safetensors")
    sinks = "model.layers.0.self_attn.learnable_sink_param"
    state["model.layers.0.self_attn.sinks"] = state[sinks].clone()
    save_file(state, tmp_path / "model.safetensors")
    shutil.copy(path / "config.json", tmp_path)
    with pytest.raises(HeadraceError, match=f"holds model.layers.0.self_attn.sinks twice, once as {sinks}"):
        LLM(str(tmp_path), **TIGHT)


def test_a_table_of_experts_is_whole_numbers(folder: Path, tmp_path: Path) -> None:
    """Of dummy weights too. One that names no expert, or is of floats, is refused."""
    path, params = saved(folder, "deepseek_v4"), SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    with LLM(str(path), **TIGHT, load_format="dummy") as llm:
        assert len(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids) == 3
    state, shown = load_file(path / "model.safetensors"), "model.layers.0.mlp.gate.tid2eid"
    name = next(name for name in state if name.endswith("tid2eid"))
    shutil.copy(path / "config.json", tmp_path)
    for table, message in (
        (state[name] + 6, "names experts outside 0 .. 7"),
        (state[name] + (1 << 40), "holds numbers that int32 has not"),
        (state[name].float(), "is stored as float32; whole numbers are expected"),
    ):
        save_file(state | {name: table}, tmp_path / "model.safetensors")
        with pytest.raises(HeadraceError, match=f"{shown} {message}"):
            LLM(str(tmp_path), **TIGHT)


def test_experts_of_a_file_without_a_correction_are_chosen_by_their_scores(folder: Path, tmp_path: Path) -> None:
    """A.X-K1's published files have none, and a norm of each layer, which the dense ones do not use."""
    path, model = saved(folder, "axk1"), copy.deepcopy(model_of("axk1"))
    state = load_file(path / "model.safetensors")
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
            del state[name]
    norm = "model.layers.0.post_mlp_layernorm.weight"
    assert norm not in state
    save_file(state | {norm: torch.full((32,), 7.0)}, tmp_path / "model.safetensors")
    shutil.copy(path / "config.json", tmp_path)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    with LLM(str(tmp_path), **TIGHT) as llm:
        outputs = llm.generate(shared_prefix(128), params, use_tqdm=False)
    changed = 0
    for prompt, output in zip(shared_prefix(128), outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        assert answer == reference_logits(model, prompt, answer).argmax(-1).tolist()
        changed += answer != reference_logits(model_of("axk1"), prompt, answer).argmax(-1).tolist()
    assert changed, "the correction matters"


@pytest.mark.parametrize("name", every(2, ["hy_v4", "deepseek_v4"]))
@pytest.mark.usefixtures("drafts_at_any_cost")
def test_drafts_change_no_token(folder: Path, name: str) -> None:
    """Of few tokens, so that some drafts are accepted and others are not."""
    prompts = [[20, 21, 22, 23] * 6, [20, 21, 22] * 14, [21] * 20, list(range(20, 60))]
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, allowed_token_ids=[20, 21, 22])
    engine = TIGHT | {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    answers = []
    for speculative_config in ({}, config):
        with LLM(str(saved(folder, name)), **engine, speculative_config=speculative_config) as llm:
            outputs = generate_all_at_once(llm, prompts, params)
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
            drafted = llm.get_stats()
    assert answers[0] == answers[1]
    assert 0 < drafted.num_accepted_tokens < drafted.num_draft_tokens


@pytest.mark.system
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - NOT_DIVIDED))
def test_two_ranks_answer_as_transformers_does(folder: Path, name: str) -> None:
    expect_answers_of_transformers(folder, name, tensor_parallel_size=2, distributed_executor_backend=THREADS)


DOTS3_NOTE = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "q_lora_rank": 24, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 24, "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1, "moe_layer_freq": [0, 1, 1, 0, 1, 1], "sliding_window_size": 20, "use_dsa": True,
    "use_sliding_window": True, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 40, "swa_head_dim": 20, "swa_qk_nope_head_dim": 12, "swa_qk_rope_head_dim": 8,
    "swa_v_head_dim": 12, "rope_theta": 1e6, "swa_rope_theta": 1e4, "index_topk": 12, "index_head_dim": 16,
    "index_n_heads": 16, "max_position_embeddings": 1024,
}  # fmt: skip
"""In the fields of published configs."""


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"use_dsa": False},
        {"use_dsa": None},
        {"use_sliding_window": False},
        {"moe_layer_freq": 2},
        {"swa_qk_rope_head_dim": None},
        {"rope_theta": None, "swa_rope_theta": None},
        {"sliding_window_size": None},
    ],
    ids=str,
)
def test_a_published_dots3_note_is_what_transformers_reads_of_it(changed: dict[str, Any]) -> None:
    named = {"architectures": ["Dots3NoteForCausalLM"]}
    given = {key: each for key, each in (DOTS3_NOTE | changed).items() if each is not None}
    filled = json.loads(json.dumps(Dots3NoteTextConfig(**copy.deepcopy(given)).to_dict(), default=str))
    assert spec_from_config(given | named) == spec_from_config(filled | named)
    assert spec_from_config({"text_config": filled} | named) == spec_from_config(filled | named)
