"""A model shared among ranks answers as it does alone: tensor and pipeline parallel, every architecture."""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from all_at_once import generate_all_at_once
from gguf.constants import GGMLQuantizationType as Kind
from model_driver import DictSource
from rank_threads import RankThreads, pool_for_each_rank, run_ranks
from thinned import every
from tiny_gguf import save_gguf

from headrace import LLM, SamplingParams
from headrace.executor.cpu import decoder as cpu_decoder
from headrace.executor.cpu import rank as cpu_rank
from headrace.executor.cpu.program import StepLimits
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.executor.parallel.rank_place import RankCoordinates, World
from headrace.ipc.failure import ModelError, OptionError
from headrace.ipc.step import StepPlan
from headrace.kernels import registry
from headrace.kernels.cpu import build

__all__ = ["pool_for_each_rank"]  # a fixture for all of these tests

THREADS = f"{RankThreads.__module__}:{RankThreads.__name__}"
WORLDS = [(2, 1), (4, 1), (1, 2), (2, 2)]
# Little memory and small steps: prompts are read in chunks, and requests give way to each other.
TIGHT: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_batched_tokens": 40,
    "max_num_seqs": 6,
    "max_model_len": 96,
    "skip_tokenizer_init": True,
}
# Nothing of these divides by 2 or by 4: heads, key/value heads, inner sizes, vocabularies.
ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "nine_heads": (
        "llama_gqa_tied",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 90},
    ),
    "one_key_head": ("llama_biases", {"hidden_size": 60, "num_attention_heads": 5, "intermediate_size": 37}),
    "odd_norms": ("gemma3_capped_scaled", {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "odd_opt": ("opt", {"hidden_size": 40, "word_embed_proj_dim": 40, "num_attention_heads": 5, "ffn_dim": 33}),
    "odd_vocabulary": ("qwen3", {"vocab_size": 323, "intermediate_size": 50}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def saved(folder: Path, name: str) -> Path:
    kind, changes = ODD.get(name, (name, {"hidden_size": 48} if name == "llama_gqa_tied" else {}))
    return tiny_models.save(kind, folder / name, **changes)


def prompts_of(lengths: tuple[int, ...] = (61, 2, 40, 17, 33)) -> list[list[int]]:
    """The third goes on as the first does, for the prefix cache."""
    numbers = random.Random(7)
    prompts = [[numbers.randrange(2, tiny_models.VOCAB_SIZE) for _ in range(length)] for length in lengths]
    prompts[2][:32] = prompts[0][:32]
    return prompts


def tight(model: Path) -> dict[str, Any]:
    return TIGHT | {"num_gpu_blocks_override": tiny_models.blocks_of_one_request(model, TIGHT) + 4}


def generate(model: Path, **options: Any) -> tuple[list[list[int]], int]:
    """The tokens of every prompt, and how many tokens of prompts were found in the prefix cache."""
    params = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
    with LLM(str(model), in_process=True, **(tight(model) | options)) as llm:
        outputs = generate_all_at_once(llm, prompts_of(), params)
        assert sum(o.metrics.num_preemptions for o in outputs if o.metrics) > 0
        few = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        outputs += llm.generate(prompts_of()[:1], few, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs], sum(o.num_cached_tokens or 0 for o in outputs)


@cache
def alone(folder: Path, name: str) -> list[list[int]]:
    return generate(saved(folder, name))[0]


@pytest.fixture(params=["program", "op by op"])
def computed_as(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    registry._log_refusal.cache_clear()  # which tells each reason once
    if request.param == "op by op":
        monkeypatch.setattr(cpu_rank, "why_not", lambda spec, dtype, place: "the test says so.")
    return str(request.param)


# What is computed op by op differs from the program in how ranks meet, not in which worlds there are.
MIXTURES = {name for name in tiny_models.TINY_MODELS if "moe" in name or "mixtral" in name}
DENSE = sorted(tiny_models.TINY_MODELS.keys() - MIXTURES)
CASES = [(name, "program", *world) for name in DENSE for world in WORLDS]
CASES += [(name, "program", *world) for name in sorted(MIXTURES) for world in ((2, 1), (2, 2))]
CASES += [(name, "op by op", 2, 2) for name in (*DENSE, "qwen2_moe", "olmoe_gqa")]
CASES += [(name, "op by op", 4, 1) for name in ("llama_biases", "opt_projected_post_norm", "gemma3")]
CASES += [(name, "program", *world) for name in ODD for world in ((2, 1), (4, 1), (3, 2))]
CASES += [(name, "op by op", 4, 1) for name in ODD]


EVERY_WORLD = {"llama_biases", "qwen2_moe", "odd_vocabulary"}
"""A dense model, one of experts and what divides by nothing: in every world. `make test` has all others in the largest
world alone."""


SAME_SHARES = {
    *("llama3", "llama_linear", "llama_yarn", "llama_dynamic", "mistral", "opt_plain", "qwen2_window"),
    *("smollm3_window", "mixtral_window", "qwen3_moe_some_dense"),
    *("llama", "mistral_window", "opt", "qwen2", "qwen3", "smollm3", "gemma3_capped_scaled"),
    *("gemma2", "deepseek_v2_moe", "olmoe_gqa", "qwen2_moe_some_dense", "qwen3_moe", "mixtral"),
    *("nine_heads", "odd_opt"),
}
"""What differs from another in positions, windows, norms or the order of layers, none of which ranks divide."""


def marked(name: str, computed_as: str, tp_size: int, pp_size: int) -> Any:
    largest = (3, 2) if name in ODD else (2, 2)
    is_long = name not in EVERY_WORLD and (computed_as == "op by op" or (tp_size, pp_size) != largest)
    is_long |= name in SAME_SHARES
    is_long |= name == "llama_biases" and computed_as == "op by op"  # the odd vocabulary's model is a dense one too
    return pytest.param(name, computed_as, tp_size, pp_size, marks=[pytest.mark.system] if is_long else [])


@pytest.mark.parametrize(
    ("name", "computed_as", "tp_size", "pp_size"), [marked(*case) for case in CASES], indirect=["computed_as"]
)
def test_ranks_together_answer_like_one(
    folder: Path, name: str, computed_as: str, tp_size: int, pp_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, num_cached = generate(
        saved(folder, name),
        distributed_executor_backend=THREADS,
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=pp_size,
    )
    assert tokens == alone(folder, name)
    if name != "llama_dynamic":
        assert num_cached > 0
        has_no_program = name.startswith("olmoe") and tp_size > 1
        runs_op_by_op = computed_as == "op by op" or bool(build.why_not()) or has_no_program
        assert ("the model runs op by op" in caplog.text) == runs_op_by_op


FOUR: dict[str, Any] = {
    "distributed_executor_backend": THREADS,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
}


def test_sampling_and_its_reports_are_those_of_one(folder: Path, computed_as: str) -> None:
    params = [
        SamplingParams(max_tokens=20, temperature=1.5, seed=3, top_p=0.9, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=0.8, seed=4, top_k=5, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=0, logprobs=3, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=0, prompt_logprobs=2, min_tokens=5),
        SamplingParams(max_tokens=20, temperature=0, presence_penalty=1.0),
    ]
    answers = []
    for options in ({}, FOUR):
        with LLM(str(saved(folder, "qwen3")), in_process=True, **(tight(saved(folder, "qwen3")) | options)) as llm:
            answers.append(llm.generate(prompts_of(), params, use_tqdm=False))
    for one, many in zip(*answers, strict=True):
        assert many.outputs[0].token_ids == one.outputs[0].token_ids
    assert numbers(answers[1][2].outputs[0].logprobs) == pytest.approx(
        numbers(answers[0][2].outputs[0].logprobs), abs=1e-4
    )
    assert numbers(answers[1][3].prompt_logprobs) == pytest.approx(numbers(answers[0][3].prompt_logprobs), abs=1e-4)


def numbers(positions: Any) -> list[float]:
    """Every logprob of every position, in order of token id."""
    return [row[token].logprob for row in positions if row for token in sorted(row)]


def test_steps_fill_the_stages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight, submit = [], RankThreads.submit

    def counted(self: RankThreads, plan: StepPlan) -> None:
        submit(self, plan)
        in_flight.append(len(self._steps))

    monkeypatch.setattr(RankThreads, "submit", counted)
    tokens, _ = generate(saved(folder, "smollm3"), distributed_executor_backend=THREADS, pipeline_parallel_size=4)
    assert tokens == alone(folder, "smollm3")
    assert max(in_flight) >= 3


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama_gqa_tied", "bfloat16"), ("opt_projected_post_norm", "float16"), ("gemma2", "bfloat16")],
)
def test_half_precision_is_near_that_of_one(folder: Path, name: str, dtype: str, computed_as: str) -> None:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    found = []
    for options in ({}, FOUR):
        with LLM(
            str(saved(folder, name)), in_process=True, **(tight(saved(folder, name)) | options | {"dtype": dtype})
        ) as llm:
            found.append(numbers(llm.generate(prompts_of(), params, use_tqdm=False)[0].prompt_logprobs))
    assert found[1] == pytest.approx(found[0], abs=0.25 if dtype == "bfloat16" else 0.05)
    assert len(found[0]) == 60


NINE_HEADS: dict[str, Any] = {"hidden_size": 288, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 32}
FLOATS = "a rank's share of the rows of weights of type Q8_0 is no whole number of blocks; they are kept in bfloat16"


def first_logprobs(path: Path, **options: Any) -> list[float]:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with LLM(str(path), in_process=True, **(TIGHT | {"dtype": "auto", "num_gpu_blocks_override": 16} | options)) as llm:
        return numbers(llm.generate(prompts_of()[:3], params, use_tqdm=False)[0].prompt_logprobs)


@pytest.mark.parametrize(
    ("config", "tp_size", "said"),
    every(
        2,
        [
            ({"intermediate_size": 128}, 2, ""),
            ({}, 2, "it has 128 for 96 inner columns of an MLP"),
            ({}, 4, FLOATS),  # a head of 16 columns is half a block
            (NINE_HEADS, 2, "it has 12 for 9 query heads, 4 for 3 key/value heads, 128 for 96 inner columns of an MLP"),
            (NINE_HEADS, 4, "it has 12 for 9 query heads, 4 for 3 key/value heads, 128 for 96 inner columns of an MLP"),
        ],
    ),
)
def test_packed_weights_are_divided_between_blocks_or_turned_into_floats(
    tmp_path: Path, config: dict[str, Any], tp_size: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    if build.why_not():
        pytest.skip(str(build.why_not()))
    path = save_gguf(tiny_models.build("llama", **config), tmp_path / "q8.gguf", Kind.Q8_0)
    one = first_logprobs(path)
    ranks = first_logprobs(path, distributed_executor_backend=THREADS, tensor_parallel_size=tp_size)
    assert ranks == pytest.approx(one, abs=0.25 if said == FLOATS else 0.06)
    assert said in caplog.text
    assert (FLOATS in caplog.text) == (said == FLOATS)


@pytest.mark.parametrize("options", [{"quantization": "int8", "kv_cache_dtype": "int8"}, {"quantization": "int4"}])
def test_weights_quantised_as_they_are_read_are_those_of_one(tmp_path: Path, options: dict[str, Any]) -> None:
    if build.why_not():
        pytest.skip(str(build.why_not()))
    path = tiny_models.save("llama", tmp_path / "model", **NINE_HEADS)
    one = first_logprobs(path, **options)
    ranks = first_logprobs(path, distributed_executor_backend=THREADS, tensor_parallel_size=4, **options)
    assert ranks == pytest.approx(one, abs=0.06)


@pytest.mark.parametrize("name", ["llama_biases", "opt_projected_post_norm", "gemma3", "qwen2_moe"])
@pytest.mark.parametrize("kind", ["program", "op by op"])
def test_each_rank_reads_its_share_and_together_all(name: str, kind: str) -> None:
    model = tiny_models.build(name)
    state = tiny_models.state_of(model)
    spec = spec_from_config(model.config.to_dict() | {"architectures": [type(model).__name__]})
    world = World(2, 2, 8, 8, spec.hidden_size, spec.vocab_size)

    def count(place: RankCoordinates) -> int:
        source = DictSource(state)
        if kind == "program":
            cpu_decoder.CpuDecoderPart(spec, source, torch.float32, StepLimits(8, 8, 8), place=place)
        else:
            Decoder(spec, source, torch.float32, place=place)
        return source.elements_read

    read = run_ranks(world, count)
    whole = sum(tensor.numel() for tensor in state.values())
    tied = sum(t.numel() for n, t in state.items() if spec.tied_head and "embed_tokens" in n)
    whole_on_each = re.compile(r"norm|positions|project_|mlp\.gate\.|shared_expert_gate")
    repeated = sum(tensor.numel() for key, tensor in state.items() if whole_on_each.search(key))
    keys = sum(t.numel() for n, t in state.items() if "k_proj" in n or "v_proj" in n)
    assert whole <= sum(read) <= whole + tied + repeated + (keys if spec.mixers[0].cache.num_heads == 1 else 0)
    assert max(read) - repeated < 0.5 * (whole - repeated)


@pytest.mark.system
def test_worker_processes_answer_like_one(folder: Path) -> None:
    tokens, num_cached = generate(saved(folder, "nine_heads"), tensor_parallel_size=2)
    assert tokens == alone(folder, "nine_heads")
    assert num_cached > 0


def test_layers_can_be_given_out_by_hand(folder: Path) -> None:
    options = {"distributed_executor_backend": THREADS, "pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    tokens, _ = generate(saved(folder, "gemma3"), pipeline_layer_partition=[1, 3], **options)
    assert tokens == alone(folder, "gemma3")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "llama",
        {"tensor_parallel_size": 5},
        "4 attention heads cannot be divided among 5 ranks: each needs at least one",
    ),
    ("llama_tiny_vocabulary", {"tensor_parallel_size": 4}, "a vocabulary of 9 cannot be divided among 4 tensor-parall"),
    ("llama", {"pipeline_parallel_size": 3}, "3 pipeline stages cannot share a model of 2 layers"),
    (
        "llama",
        {"pipeline_parallel_size": 2, "pipeline_layer_partition": [1, 3]},
        "pipeline_layer_partition 1,3 gives out 4 layers; the model has 2, and every stage needs at least one",
    ),
    (
        "llama",
        {"pipeline_layer_partition": [1, 1]},
        "pipeline_layer_partition 1,1 names 2 stages, but pipeline_parallel_size is 1",
    ),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_a_model_that_the_ranks_cannot_share_is_refused(
    folder: Path, name: str, options: dict[str, Any], message: str
) -> None:
    if name == "llama_tiny_vocabulary":
        model = tiny_models.save("llama", folder / name, vocab_size=9)
    else:
        model = saved(folder, name)
    backend = THREADS if len(options) > 1 or "pipeline_layer_partition" not in options else "uni"
    with pytest.raises((ModelError, OptionError), match=message):
        LLM(str(model), in_process=True, distributed_executor_backend=backend, **(TIGHT | options))
