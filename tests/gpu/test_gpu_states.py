"""Models whose layers keep a state per sequence on GPU ranks, with the CPU in the GPU's place and without graphs: the
tokens are transformers', in little memory, by several ranks and with drafts. `pretend_cases.py` has graphs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from all_at_once import TIGHT, generate_all_at_once, shared_prefix
from gpu_parts import GpuOnCpu, HostBackend
from gpu_rank_threads import GpuRankThreads
from thinned import thinned
from tiny_recurrent import FAMILIES

from headrace import LLM, SamplingParams
from headrace.core.options.engine_options import Options
from headrace.core.options.resolve import resolve
from headrace.core.schedule.features.drafts import drafting_of
from headrace.executor.gpu.hardware.device import GpuFacts
from headrace.executor.gpu.rank import GpuRank
from headrace.ipc.failure import ModelError

NAMES = ("lfm2", "lfm2_moe", "mamba2", "falcon_h1", "nemotron_h", "qwen3_next", "kimi_linear", "minimax")
QUARTERS = [thinned(NAMES, NAMES[first::4].__contains__) for first in range(4)]
"""In turn: `make test` has each family in one of four tests, and `make test-system` in all."""
TWO_STAGES = ("qwen3_next",)
REFUSED = {
    "jamba": "Mamba's selective scan",
    "recurrent_gemma": "gated linear recurrent units",
    "zamba2": "a transformer that layers share",
}
ONE = "gpu_parts:GpuOnCpuExecutor"
THREADS = f"{GpuRankThreads.__module__}:{GpuRankThreads.__name__}"
EAGER: dict[str, Any] = TIGHT | {"device": "cpu", "enforce_eager": True}
PARAMS = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@cache
def saved(folder: Path, name: str) -> Path:
    tiny_models.make(FAMILIES[name]).save_pretrained(folder / name)
    return folder / name


@cache
def greedy(name: str) -> list[list[int]]:
    model = tiny_models.make(FAMILIES[name])
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": False}
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=10, **settings)[0, len(prompt) :].tolist()
        for prompt in shared_prefix(128)
    ]


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", QUARTERS[0])
def test_tokens_in_little_memory_are_transformers(folder: Path, name: str) -> None:
    """The memory of two rows' states and of the tokens of little more than one: chunks of prompts, and preemption."""
    path = saved(folder, name)
    groups = tiny_models.cache_groups_of(path, TIGHT["max_model_len"], TIGHT["block_size"])
    blocks = tiny_models.blocks_of_one_request(path, TIGHT) + groups[-1].pages + 3
    with LLM(str(path), **EAGER, distributed_executor_backend=ONE, num_gpu_blocks_override=blocks) as llm:
        outputs = generate_all_at_once(llm, shared_prefix(128), PARAMS)
        preempted = llm.get_stats().num_preemptions
    assert tokens_of(outputs) == greedy(name)
    assert preempted > 0 or len(groups) == 1


@pytest.mark.parametrize("name", QUARTERS[1])
def test_a_request_starts_from_the_state_that_another_has_left(folder: Path, name: str) -> None:
    prompts = shared_prefix(128)
    with LLM(str(saved(folder, name)), **EAGER, distributed_executor_backend=ONE) as llm:
        found, cached = list[list[int]](), list[int]()
        for prompt in (*prompts, prompts[0]):  # one after another
            (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
            found += tokens_of([output])
            cached.append(output.num_cached_tokens or 0)
    assert found == [*greedy(name), greedy(name)[0]]
    assert cached[:2] == [0, 0]
    assert cached[3] == 48, "the whole blocks of its prompt"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *thinned(((name, "tensor") for name in NAMES), lambda case: case[0] in NAMES[3::4]),
        # What a stage has is a number of layers, whatever they are.
        *(pytest.param(name, "pipeline", marks=() if name in TWO_STAGES else pytest.mark.system) for name in NAMES),
    ],
)
def test_two_ranks_give_the_tokens_of_transformers(folder: Path, name: str, kind: str) -> None:
    with LLM(
        str(saved(folder, name)), **EAGER, distributed_executor_backend=THREADS, **{f"{kind}_parallel_size": 2}
    ) as llm:
        assert tokens_of(generate_all_at_once(llm, shared_prefix(128), PARAMS)) == greedy(name)


@pytest.mark.parametrize("name", QUARTERS[2])
@pytest.mark.usefixtures("drafts_at_any_cost")
def test_drafts_change_no_token(folder: Path, name: str) -> None:
    prompts = [[20, 21, 22, 23] * 6, [20, 21, 22] * 14, [21] * 20, list(range(20, 60))]
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, allowed_token_ids=[20, 21, 22])
    engine = EAGER | {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    answers = []
    for backend, more in (("uni", {}), (ONE, {"speculative_config": config})):
        with LLM(str(saved(folder, name)), **engine, distributed_executor_backend=backend, **more) as llm:
            answers.append(tokens_of(generate_all_at_once(llm, prompts, params)))
            stats = llm.get_stats()
    assert answers[0] == answers[1]
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_room_for_the_inputs_of_drafts_is_part_of_what_rows_take(folder: Path) -> None:
    asked = Options(
        model=str(saved(folder, "lfm2")),
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=32,
    )
    rank = GpuOnCpu(asked)
    plan = resolve(asked, rank.describe(str))
    reading = rank.load(plan, str)
    rank.allocate(30, plan.max_model_len)
    drafts = rank.residence._cache.draft_bytes
    assert drafts == 3 * 5 * plan.most_drafts * 32 * 4, "three layers of 32 channels, and the row of padding"
    assert reading.state_bytes >= rank.steps.state.nbytes + drafts


@pytest.mark.parametrize("config", [None, {"method": "ngram", "num_speculative_tokens": 12}])
def test_no_row_has_more_drafts_than_there_is_room_for(folder: Path, config: Any) -> None:
    """Those that a grammar forces included, of which a GPU's steps have more than a CPU's."""
    model = str(saved(folder, "lfm2"))
    asked = Options(model=model, skip_tokenizer_init=True, max_num_seqs=64, speculative_config=config)
    rank = GpuOnCpu(asked)
    plan = resolve(asked, rank.describe(str))
    assert plan.model.device_bytes
    assert drafting_of(plan)._most_drafts == plan.most_drafts > 8


@pytest.mark.parametrize("name", REFUSED)
def test_layers_without_kernels_are_refused_by_their_kind(folder: Path, name: str) -> None:
    asked = Options(model=str(saved(folder, name)), skip_tokenizer_init=True)
    gpu = GpuFacts("NVIDIA H200", (9, 0), 8 << 30, 7 << 30)
    rank = GpuRank(asked, torch.device("cuda", 0), HostBackend(gpu))  # type: ignore[arg-type]
    with pytest.raises(
        ModelError, match=rf"has {REFUSED[name]}, which a CPU alone computes so far: use device=cpu\. Of"
    ):
        rank.describe(str)
