"""A model shared among ranks answers as it does alone: tensor and pipeline parallel, every architecture."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from rank_threads import RankThreads

from headrace import LLM, SamplingParams
from headrace.executor import cpu_decoder, uniproc
from headrace.ipc.failure import ModelError, OptionError
from headrace.kernels.cpu.linear import runtime

THREADS = f"{RankThreads.__module__}:{RankThreads.__name__}"
WORLDS = [(2, 1), (4, 1), (1, 2), (2, 2)]
# Little memory and small steps: prompts are read in chunks, and requests give way to each other.
TIGHT: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 8,
    "num_gpu_blocks_override": 26,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 6,
    "max_model_len": 96,
    "skip_tokenizer_init": True,
}
DIVISIBLE: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8}
CHANGES = {"llama_gqa_tied": DIVISIBLE, "qwen2": DIVISIBLE}
"""What four ranks can share, where the tiny model as it is would not."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def saved(folder: Path, name: str) -> Path:
    return tiny_models.save(name, folder / name, **CHANGES.get(name, {}))


def prompts_of(lengths: tuple[int, ...] = (61, 2, 40, 17, 33)) -> list[list[int]]:
    """The third goes on as the first does, for the prefix cache."""
    numbers = random.Random(7)
    prompts = [[numbers.randrange(2, tiny_models.VOCAB_SIZE) for _ in range(length)] for length in lengths]
    prompts[2][:32] = prompts[0][:32]
    return prompts


def generate(model: Path, **options: Any) -> tuple[list[list[int]], int]:
    """The tokens of every prompt, and how many tokens of prompts were found in the prefix cache."""
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM(str(model), in_process=True, **(TIGHT | options)) as llm:
        outputs = llm.generate(prompts_of(), params, use_tqdm=False)
        outputs += llm.generate(prompts_of()[:1], params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs], sum(o.num_cached_tokens or 0 for o in outputs)


@cache
def alone(folder: Path, name: str) -> list[list[int]]:
    return generate(saved(folder, name))[0]


@pytest.fixture(autouse=True)
def pool_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks in processes have: in one process they would wait for each other within a common pool's regions."""
    monkeypatch.setattr(cpu_decoder, "runtime", runtime.__wrapped__)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")


@pytest.fixture(params=["program", "op by op"])
def computed_as(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "op by op":
        monkeypatch.setattr(uniproc, "why_not", lambda spec, dtype, place: "the test says so.")
    return str(request.param)


@pytest.mark.parametrize("name", sorted(tiny_models.TINY_MODELS))
@pytest.mark.parametrize(("tp_size", "pp_size"), WORLDS)
def test_ranks_together_answer_like_one(folder: Path, name: str, tp_size: int, pp_size: int, computed_as: str) -> None:
    tokens, num_cached = generate(
        saved(folder, name),
        distributed_executor_backend=THREADS,
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=pp_size,
    )
    assert tokens == alone(folder, name)
    assert num_cached > 0 or name == "llama_dynamic"


def test_layers_can_be_given_out_by_hand(folder: Path) -> None:
    options = {"distributed_executor_backend": THREADS, "pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    tokens, _ = generate(saved(folder, "gemma3"), pipeline_layer_partition=[1, 3], **options)
    assert tokens == alone(folder, "gemma3")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"tensor_parallel_size": 3}, "4 attention heads and 4 key/value heads cannot be divided among 3 ranks"),
    ("llama_odd_mlp", {"tensor_parallel_size": 4}, "an MLP's inner size of 90 cannot be divided among 4 tensor-paral"),
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
    if name == "llama_odd_mlp":
        model = tiny_models.save("llama", folder / name, intermediate_size=90)
    else:
        model = saved(folder, name)
    backend = THREADS if len(options) > 1 or "pipeline_layer_partition" not in options else "uni"
    with pytest.raises((ModelError, OptionError), match=message):
        LLM(str(model), in_process=True, distributed_executor_backend=backend, **(TIGHT | options))
