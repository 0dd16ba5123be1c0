"""Families whose layers keep a state per sequence against transformers, from the files that it saves: token by token,
with chunked prefill and preemption, and prompts around the sizes of blocks and chunks."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny_models
import torch
from all_at_once import TIGHT, generate_all_at_once, shared_prefix
from multimodal_models import WITH_STATES
from rank_threads import RankThreads, pool_for_each_rank
from safetensors.torch import load_file, save_file
from thinned import every, pairs, thinned
from tiny_recurrent import FAMILIES
from torch import Tensor

from headrace import LLM, HeadraceError, SamplingParams
from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.sources.sharded_state import save
from headrace.executor.models.arch import Kept
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.kv_cache import block_bytes, cache_groups
from headrace.executor.parallel.rank_place import RankCoordinates

__all__ = ["pool_for_each_rank"]  # a fixture for all of these tests

THREADS = f"{RankThreads.__module__}:{RankThreads.__name__}"
NEW_TOKENS = 10
LENGTHS = (1, 3, 15, 16, 17, 63, 64, 65, 257, 700)
EACH_KIND = (
    *("lfm2_moe", "mamba2", "qwen3_5", "jamba", "kimi_linear", "minimax", "falcon_h1", "inkling", "qwen4_exp"),
)
"""A family of each kind of layers, and of those beside attention. With all others, prompts of any length take long."""
LONGEST = ("inkling", "qwen4_exp")
"""`make test` has their answers on two ranks, and with drafts."""
PARAMS = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)


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


@torch.inference_mode()
def expected(name: str, prompt: list[int], answer: list[int]) -> Tensor:
    """transformers' logits for each token of the answer, without a cache: [tokens of the answer, vocab_size]"""
    logits: Tensor = model_of(name)(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].float()


def expect_answers(name: str, prompts: list[list[int]], outputs: list[Any]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        assert answer == expected(name, prompt, answer).argmax(-1).tolist()
    assert len({token for output in outputs for token in output.outputs[0].token_ids}) > NEW_TOKENS


@pytest.mark.parametrize(("most_length", "most"), [(257, 20), pytest.param(700, 64, marks=pytest.mark.system)])
@pytest.mark.parametrize("name", thinned(FAMILIES, lambda name: name in EACH_KIND and name not in LONGEST))
def test_greedy_tokens_equal_transformers(folder: Path, name: str, most_length: int, most: int) -> None:
    """Of short and long prompts, computed in one step or in chunks that end anywhere."""
    params = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(2, 128, (length,), generator=generator).tolist() for length in LENGTHS if length <= most_length
    ]
    for tokens, asked in ((1024, params), (40, PARAMS)):
        with LLM(str(saved(folder, name)), **(TIGHT | {"max_model_len": 768, "max_num_batched_tokens": tokens})) as llm:
            expect_answers(name, prompts, generate_all_at_once(llm, prompts, asked))


def test_inklings_published_keys_describe_the_model_of_transformers(folder: Path) -> None:
    config = json.loads((saved(folder, "inkling") / "config.json").read_text())
    kinds, ffns = config["layer_types"], config["mlp_layer_types"]
    own = {
        "local_layer_ids": [index for index, kind in enumerate(kinds) if kind == "hybrid_sliding"],
        "dense_mlp_idx": ffns.index("sparse"), "dense_intermediate_size": config["intermediate_size"],
        "intermediate_size": config["moe_intermediate_size"], "sconv_kernel_size": config["conv_kernel_size"],
        "model_max_length": config["max_position_embeddings"], "use_embed_norm": True, "use_sconv": True,
        "use_gate_bias": True, "use_global_scale": True, "norm_after_topk": True, "gate_activation": "sigmoid",
        "shared_expert_sink": True, "inference_moe_w13_interleaved": True, "q_bias": False, "o_bias": False,
        "v_head_dim": config["head_dim"], "swa_v_head_dim": config["swa_head_dim"], "model_type": "inkling_model",
    }  # fmt: skip
    theirs = (
        "layer_types", "mlp_layer_types", "moe_intermediate_size", "conv_kernel_size", "max_position_embeddings"
    )  # fmt: skip
    published = {key: value for key, value in config.items() if key not in theirs} | own
    assert spec_from_config(published) == spec_from_config(config)
    padded = published | {"vocab_size": 100, "padded_vocab_size": 128}
    spec = spec_from_config(padded)
    assert (spec.vocab_size, spec.stored_vocab) == (100, 128)
    assert spec == spec_from_config(config | {"unpadded_vocab_size": 100})


def test_qwen4_without_an_index_attends_to_all_tokens(folder: Path) -> None:
    config = json.loads((saved(folder, "qwen4_exp") / "config.json").read_text())
    plain = {key: value for key, value in config.items() if not key.startswith("indexer_")}
    mixers = [layer.mixer for layer in spec_from_config(plain).layers]
    assert [type(mixer).__name__ for mixer in mixers] == ["NGramDeltaRule", "Attention"] * 2
    without = spec_from_config({**plain, "ple_layer_ids": []})
    assert [type(layer.mixer).__name__ for layer in without.layers] == ["DeltaRule", "Attention"] * 2
    assert without.lookback == 0


@pytest.mark.parametrize("name", WITH_STATES)
def test_the_language_model_of_a_multimodal_folder_gives_its_tokens(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = WITH_STATES[name]().eval().float()
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    prompt = list(range(20, 50))
    with LLM(str(tmp_path), **TIGHT) as llm:
        answer = list(llm.generate([prompt], PARAMS, use_tqdm=False)[0].outputs[0].token_ids)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
    assert answer == logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_experts_without_a_gate_may_have_another_activation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = replace(FAMILIES["nemotron_h"], config=FAMILIES["nemotron_h"].config | {"mlp_hidden_act": "gelu"})
    monkeypatch.setitem(FAMILIES, "nemotron_h_gelu", kind)
    prompts = [list(range(2, 2 + length)) for length in (1, 17, 40)]
    with LLM(str(saved(tmp_path, "nemotron_h_gelu")), **TIGHT) as llm:
        expect_answers("nemotron_h_gelu", prompts, generate_all_at_once(llm, prompts, PARAMS))


def expect_answers_with_little_memory(folder: Path, name: str, **options: Any) -> None:
    """Of two rows' states, and of the tokens of little more than one."""
    path = saved(folder, name)
    groups = tiny_models.cache_groups_of(path, TIGHT["max_model_len"], TIGHT["block_size"])
    blocks = tiny_models.blocks_of_one_request(path, TIGHT) + groups[-1].pages + 3
    with LLM(str(path), **TIGHT, num_gpu_blocks_override=blocks, **options) as llm:
        outputs = generate_all_at_once(llm, shared_prefix(128), PARAMS)
    # A state alone has one size, whatever the number of tokens, and windows give blocks back.
    if len(groups) > 1 and not any(group.window for group in groups):
        assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    expect_answers(name, shared_prefix(128), outputs)


@pytest.mark.parametrize("name", thinned(FAMILIES, lambda name: name not in EACH_KIND or name in EACH_KIND[:3]))
def test_preempted_requests_answer_as_transformers_does(folder: Path, name: str) -> None:
    expect_answers_with_little_memory(folder, name)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *every(
            2,
            itertools.product(
                ("tensor",),
                (
                    *(
                        "lfm2_moe",
                        "lfm2_biases",
                        "mamba2",
                        "glm5_next",
                        "qwen3_next",
                        "qwen3_5_moe",
                        "falcon_h1",
                        "jamba",
                    ),
                    *("mamba2_one_group", "bamba", "kimi_linear", "minimax", "inkling", "qwen4_exp"),
                ),
            ),
        ),
        # Stages have whole layers, whatever is in them.
        *thinned(
            itertools.product(
                ("pipeline",),
                (
                    *("lfm2_biases", "lfm2_moe", "mamba2", "qwen3_next", "falcon_h1", "glm5_next", "inkling"),
                    "qwen4_exp",
                ),
            ),
            {("pipeline", "lfm2_moe"), ("pipeline", "qwen4_exp")}.__contains__,
        ),
    ],
)
def test_two_ranks_give_the_tokens_of_transformers(folder: Path, name: str, kind: str) -> None:
    ranks = {f"{kind}_parallel_size": 2, "distributed_executor_backend": THREADS}
    expect_answers_with_little_memory(folder, name, **ranks)


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(("mamba", "attention", "mlp", "mlp"), marks=pytest.mark.system),
        ("mlp", "mlp", "mamba", "attention"),
    ],
)
def test_layers_of_a_stage_may_keep_nothing(kinds: tuple[str, ...], tmp_path: Path) -> None:
    model = tiny_models.make(FAMILIES["nemotron_h"], layers_block_type=list(kinds))
    model.save_pretrained(tmp_path)
    prompts = shared_prefix(128)
    with LLM(str(tmp_path), **TIGHT, pipeline_parallel_size=2) as llm:
        outputs = generate_all_at_once(llm, prompts, PARAMS)
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
        assert answer == logits.argmax(-1).tolist()


@pytest.mark.parametrize("kind", ["mlp", "moe"])
def test_a_model_whose_layers_all_keep_nothing_is_refused(kind: str, tmp_path: Path) -> None:
    tiny_models.make(FAMILIES["nemotron_h"], layers_block_type=[kind] * 2).save_pretrained(tmp_path)
    with pytest.raises(
        HeadraceError, match="no layer of this NemotronHForCausalLM reads other tokens; at least one mus"
    ):
        LLM(str(tmp_path), **TIGHT)


def test_ranks_that_cannot_have_whole_groups_of_heads_are_refused(folder: Path) -> None:
    with pytest.raises(HeadraceError, match="8 heads in 2 groups cannot be divided among 4 ranks"):
        LLM(str(saved(folder, "mamba2")), **TIGHT, tensor_parallel_size=4)


LOGITS: dict[str, Any] = {"logprobs_mode": "raw_logits", "max_logprobs": -1}


def usual_error(name: str, llm: LLM) -> float:
    """The median over the tokens of answers of the largest difference of a logit from transformers', in standard
    deviations of the logits. Of a few tokens other experts are chosen."""
    prompts = shared_prefix(128)
    outputs = generate_all_at_once(llm, prompts, msgspec.structs.replace(PARAMS, logprobs=-1))
    differences = []
    for prompt, output in zip(prompts, outputs, strict=True):
        (answer,) = output.outputs
        found = torch.tensor([[row[token].logprob for token in sorted(row)] for row in answer.logprobs])
        wanted = expected(name, prompt, list(answer.token_ids))
        differences.append((found - wanted).abs().amax(1) / wanted.std())
    return float(torch.cat(differences).median())


@pytest.mark.parametrize("name", ["falcon_h1", "inkling"])
def test_scaled_logits_are_those_of_transformers(folder: Path, name: str) -> None:
    with LLM(str(saved(folder, name)), **TIGHT, **LOGITS) as llm:
        assert usual_error(name, llm) < 1e-4


@pytest.mark.parametrize(
    ("name", "dtype"),
    pairs(("lfm2", "qwen3_5", "jamba", "falcon_h1", "kimi_linear", "minimax"), ("int8", "fp8", "fp8_e5m2")),
)
def test_keys_of_8_bits_beside_states_give_logits_near_those_of_floats(folder: Path, name: str, dtype: str) -> None:
    with LLM(str(saved(folder, name)), **TIGHT, **LOGITS, kv_cache_dtype=dtype) as llm:
        assert 1e-5 < usual_error(name, llm) < (0.5 if dtype == "fp8_e5m2" else 0.25)


@pytest.mark.parametrize(
    ("name", "options"),
    every(
        2,
        [
            *(
                (name, {"mamba_cache_dtype": "bfloat16"})
                for name in ("lfm2", "mamba2", "qwen3_5", "jamba", "kimi_linear")
            ),
            ("falcon_h1", {"mamba_cache_dtype": "float16"}),
            ("inkling", {"mamba_cache_dtype": "bfloat16"}),
            ("recurrent_gemma", {"mamba_cache_dtype": "bfloat16"}),
            ("minimax", {"mamba_ssm_cache_dtype": "bfloat16"}),
            ("mamba2", {"mamba_cache_dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}),
        ],
    ),
)
def test_states_of_16_bits_give_logits_near_those_of_floats(folder: Path, name: str, options: dict[str, Any]) -> None:
    with LLM(str(saved(folder, name)), **TIGHT, **LOGITS, **options) as llm:
        assert 1e-5 < usual_error(name, llm) < 0.1


def test_pages_have_no_more_room_for_8_bits_or_states_of_16_than_they_need(folder: Path) -> None:
    spec = spec_from_config(json.loads((saved(folder, "qwen3_5") / "config.json").read_text()))
    halved = replace(spec, history_type="bfloat16", state_type="bfloat16")
    found = {}
    for key, each, dtype in (("", spec, torch.bfloat16), ("8", spec, torch.int8), ("16", halved, torch.bfloat16)):
        groups = cache_groups(each, 64, element_bytes=dtype.itemsize)
        found[key] = (groups[-1].pages, block_bytes(each, 16, dtype, groups=groups))
    (pages, size), (of_8, less), (of_16, same) = found[""], found["8"], found["16"]
    assert (pages * size, less) == (of_8 * less * 4 // 3, size // 2), "scales are a sixth of a page, and units whole"
    assert (same, of_16) == (size, -(-pages // 2))


def test_a_state_of_a_declared_type_keeps_it_whatever_the_options_say(folder: Path) -> None:
    spec = spec_from_config(json.loads((saved(folder, "mamba2") / "config.json").read_text()))
    halved = replace(spec, history_type="bfloat16", state_type="bfloat16")
    mixer: Any = spec.layers[0].mixer

    class Exact(type(mixer)):  # type: ignore[misc]
        def state(self, tp_size: int) -> tuple[Kept, ...]:
            history, state = super().state(tp_size)
            return history, replace(state, dtype="float32")

    exact = Exact(**{each.name: getattr(mixer, each.name) for each in fields(mixer)})
    own = replace(halved, layers=tuple(replace(each, mixer=exact) for each in spec.layers))
    assert {tuple(kept.dtype for kept in layer) for layer in halved.own_states(1)} == {("bfloat16", "bfloat16")}
    assert {tuple(kept.dtype for kept in layer) for layer in own.own_states(1)} == {("bfloat16", "float32")}


@pytest.mark.parametrize(
    "name",
    [*every(2, ["lfm2", "glm5_next", "mamba2", "jamba", "qwen3_5", "falcon_h1", "minimax"]), "inkling", "qwen4_exp"],
)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["lfm2", "mamba2"])
def test_a_page_has_room_for_its_part_of_a_state_on_every_rank(folder: Path, name: str, dtype: torch.dtype) -> None:
    spec = spec_from_config(json.loads((saved(folder, name) / "config.json").read_text()))
    for ranks in (1, 2):
        groups = cache_groups(spec, tp_size=ranks)
        state = groups[-1]
        assert state.kind == "state"
        floats = sum(kept.elements for layer in spec.own_states(ranks) for kept in layer)
        for rank in range(ranks):
            page = block_bytes(spec, 16, dtype, RankCoordinates.of(rank, ranks, 1), groups)
            assert page * state.pages >= 4 * floats


@pytest.mark.parametrize("name", [pytest.param("lfm2", marks=pytest.mark.system), "mamba2"])
def test_weights_that_are_dropped_or_read_again_answer_as_before(folder: Path, name: str) -> None:
    path, prompts = saved(folder, name), shared_prefix(128)
    with LLM(str(path), **TIGHT, enable_sleep_mode=True) as llm:
        expect_answers(name, prompts, llm.generate(prompts, PARAMS, use_tqdm=False))
        llm.sleep(2)
        llm.wake_up()
        expect_answers(name, prompts, llm.generate(prompts, PARAMS, use_tqdm=False))
        llm.reload_weights()
        expect_answers(name, prompts, llm.generate(prompts, PARAMS, use_tqdm=False))


@pytest.mark.parametrize(
    ("name", "config", "dropped", "words"),
    [
        (
            "mamba2",
            {"use_bias": True},
            "",
            r"no weight backbone\.layers\.0\.mixer\.in_proj\.bias; .* in 64 of its rows",
        ),
        ("mamba2", {"conv_kernel": 3}, "", r"rows of weight backbone\.layers\.0\.mixer\.conv1d\.weight have shape"),
        (
            "mamba2_one_group",
            {"use_bias": False},
            "",
            r"no place for: \S*\.0\.mixer\.in_proj\.bias, \S*0\.mixer\.out_proj",
        ),
        ("inkling", {}, "layers.1.mlp.gate.global_scale", r"no weight model\.layers\.1\.mlp\.gate\.global_scale"),
        ("qwen4_exp", {"seed": 7}, "", r"layers\.0\.ple\.ple_embedding\.layer_multipliers is .* its config makes"),
        ("qwen4_exp", {}, "ngram_embedding.shard_3.weight", r"ngram_embedding\.weight has shape"),
        ("lfm2", {}, "layers.0.conv.in_proj.weight", r"no weight model\.layers\.0\.conv\.in_proj\.weight"),
        ("mamba2", {}, "layers.1.mixer.in_proj.weight", r"no weight backbone\.layers\.1\.mixer\.in_proj\.weight"),
    ],
)
def test_errors_name_the_tensors_of_the_file(
    folder: Path, tmp_path: Path, name: str, config: dict[str, Any], dropped: str, words: str
) -> None:
    path = saved(folder, name)
    tensors = load_file(path / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if not dropped or not key.endswith(dropped)}
    save_file(kept, tmp_path / "model.safetensors")
    whole = json.loads((path / "config.json").read_text(encoding="utf-8")) | config
    (tmp_path / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    with pytest.raises(HeadraceError, match=words):
        LLM(str(tmp_path), **TIGHT)


@pytest.mark.parametrize("kind", ["in_proj.weight", "conv1d.weight", "conv1d.bias"])
def test_whole_numbers_are_named_by_the_tensor_of_the_file(folder: Path, tmp_path: Path, kind: str) -> None:
    path, name = saved(folder, "mamba2"), f"backbone.layers.1.mixer.{kind}"
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {name: tensors[name].to(torch.int8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(HeadraceError, match=rf"the weight {re.escape(name)} is stored as int8; a type of floats"):
        LLM(str(tmp_path), **TIGHT)


def test_a_length_that_the_config_does_not_limit_is_told_as_what_is_taken(folder: Path) -> None:
    with pytest.raises(HeadraceError, match=r"max_model_len=2000 is more than the 1024 tokens that .* takes here"):
        LLM(str(saved(folder, "mamba2")), **(TIGHT | {"max_model_len": 2000}))


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "inkling", "qwen4_exp"])
def test_random_weights(folder: Path, name: str) -> None:
    path = str(saved(folder, name))
    with LLM(path, **TIGHT, load_format="dummy") as llm:
        assert len(llm.generate([[5, 6, 7]], PARAMS, use_tqdm=False)[0].outputs[0].token_ids) == NEW_TOKENS


@pytest.mark.parametrize("name", ["lfm2_biases", "lfm2_moe", "mamba2"])
def test_ranks_answer_from_files_of_their_own_parts(folder: Path, name: str, tmp_path: Path) -> None:
    ranks = {"tensor_parallel_size": 2}
    save(Options(model=str(saved(folder, name)), **ranks), tmp_path / "sharded")
    prompts = shared_prefix(128)
    with LLM(str(tmp_path / "sharded"), **TIGHT, **ranks, distributed_executor_backend=THREADS) as llm:
        expect_answers(name, prompts, llm.generate(prompts, PARAMS, use_tqdm=False))
