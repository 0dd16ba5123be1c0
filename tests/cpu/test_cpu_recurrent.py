"""Models whose layers keep a state per sequence, as CPU programs: the log-probabilities of prompts and of new tokens
are bitwise the same in any chunks, alone and in a batch, with one thread and two, and are those of the ops one by one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
from all_at_once import TIGHT, generate_all_at_once
from tiny_recurrent import FAMILIES, LFM2, tiny

from headrace import LLM, SamplingParams
from headrace.executor.cpu.decoder import CpuDecoder
from headrace.executor.models.blocks import StateMixer

MODELS = {
    "lfm2": FAMILIES["lfm2"],
    "a convolution last": tiny(
        "Lfm2", **(LFM2 | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]})
    ),
    "lfm2_moe": FAMILIES["lfm2_moe"],
    "mamba2": FAMILIES["mamba2"],
}
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3, prompt_logprobs=3)
PROMPTS = [[2 + (7 * i * i + size) % 125 for i in range(size)] for size in (50, 33, 7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, folder: Path) -> str:
    path = folder / request.param.replace(" ", "_")
    if not path.exists():
        tiny_models.make(MODELS[request.param]).save_pretrained(path)
    return str(path)


def values(model: str, prompts: list[list[int]], **options: Any) -> list[Any]:
    """Each prompt's log-probabilities, of its own tokens and of new ones."""
    with LLM(model, **(TIGHT | {"max_num_seqs": 3} | options)) as llm:
        outputs = generate_all_at_once(llm, prompts, PARAMS)
    found = []
    for output in outputs:
        known = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        found.append([sorted((token, each.logprob) for token, each in (at or {}).items()) for at in known])
    return found


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of the steps that ran as programs."""
    counts: list[int] = []
    step = CpuDecoder.step

    def counted(self: CpuDecoder, arrays: Any, *rest: Any) -> Any:
        counts.append(len(arrays.token_ids))
        return step(self, arrays, *rest)

    monkeypatch.setattr(CpuDecoder, "step", counted)
    return counts


def test_chunks_batches_and_threads_change_no_bit(
    model: str, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = values(model, PROMPTS, max_num_batched_tokens=128)
    assert max(steps) == sum(map(len, PROMPTS)), "all prompts in one step of a program"
    for size in (3, 16, 17):
        assert values(model, PROMPTS, max_num_batched_tokens=size) == whole, size
    alone = [values(model, [prompt], max_num_batched_tokens=1, max_num_seqs=1)[0] for prompt in PROMPTS]
    assert alone == whole
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert values(model, PROMPTS, max_num_batched_tokens=128) == whole


def test_programs_compute_what_the_ops_do_one_by_one(
    model: str, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = values(model, PROMPTS[:1])[0]
    assert steps
    steps.clear()
    for block in StateMixer.__subclasses__():
        monkeypatch.setattr(block, "why_no_program", lambda *_: "the ops are compared.")
    ops = values(model, PROMPTS[:1])[0]
    assert not steps
    for one, other in zip(program, ops, strict=True):
        assert dict(one).keys() == dict(other).keys()
        assert all(abs(value - dict(other)[token]) < 1e-4 for token, value in one)
