"""Weights that several engines read again: all of them get them, or none."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import pytest
import tiny_models

from headrace import LLM, SamplingParams
from headrace.frontend.fleet.decisions import Affinity
from headrace.ipc.control import ReloadWeights
from headrace.ipc.failure import HeadraceError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [f"the {each} of the mill and the" for each in "abcdefghijklmnop"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Of two models that differ in their weights alone."""
    first, second = (
        tiny_models.save("llama", tmp_path_factory.mktemp("model"), seed=seed, tokenizer=True) for seed in range(2)
    )
    return str(first), str(second)


@pytest.fixture(scope="module")
def engines(folders: tuple[str, str]) -> Iterator[LLM]:
    with LLM(
        folders[0], data_parallel_size=2, dtype="float32", max_model_len=64, num_gpu_blocks_override=40,
        enable_sleep_mode=True,
    ) as llm:  # fmt: skip
        yield llm


@pytest.fixture
def llm(engines: LLM, folders: tuple[str, str]) -> LLM:
    engines.reload_weights(folders[0])
    return engines


def of_engine(llm: LLM, index: int, name: str, *arguments: Any) -> Any:
    """The result of a method of the client of one engine."""
    return llm._background.run(getattr(llm._client.engines[index].client, name)(*arguments))


def answers(llm: LLM) -> list[list[int]]:
    """Of each engine, which all give the same."""
    client, found = llm._client, list[list[list[int]]]()
    for index in range(2):
        with mock.patch.object(client, "submit", partial(client.submit, affinity=Affinity(rank=index))):
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        found.append([list(each.outputs[0].token_ids) for each in outputs])
    assert found[0] == found[1]
    return found[0]


def differing(one: list[list[int]], other: list[list[int]]) -> int:
    return sum(each != also for each, also in zip(one, other, strict=True))


def test_one_engine_that_cannot_reload_keeps_all_at_their_weights(llm: LLM, folders: tuple[str, str]) -> None:
    first = answers(llm)
    of_engine(llm, 1, "sleep")
    with pytest.raises(HeadraceError, match=r"1 of 2 engines cannot use them, so all keep .* weights sleep") as caught:
        llm.reload_weights(folders[1])
    assert llm._client.engines[1].name in str(caught.value)
    of_engine(llm, 1, "wake_up")
    assert answers(llm) == first
    with pytest.raises(HeadraceError, match=r"2 of 2 engines cannot use them.*engine 1: the model missing was"):
        llm.reload_weights("missing")
    assert answers(llm) == first
    llm.reload_weights(folders[1])
    second = answers(llm)
    assert differing(first, second) == len(PROMPTS)
    llm.reload_weights()
    assert answers(llm) == first


def test_weights_that_were_prepared_and_forgotten_are_never_used(llm: LLM, folders: tuple[str, str]) -> None:
    first = answers(llm)
    for part in ("forget", "sleep", "prepare"):
        of_engine(llm, 0, "control", ReloadWeights(path=folders[1], part="prepare"), None)
        assert answers(llm) == first
        if part == "sleep":
            of_engine(llm, 0, "sleep")
            of_engine(llm, 0, "wake_up")
        else:
            of_engine(llm, 0, "control", ReloadWeights(path=folders[0], part=part), None)
        if part != "prepare":
            with pytest.raises(HeadraceError, match="no weights are prepared here"):
                of_engine(llm, 0, "control", ReloadWeights(part="use"), None)
        else:
            of_engine(llm, 0, "control", ReloadWeights(path=folders[0], part="use"), None)
        assert answers(llm) == first


def test_reloads_at_once_leave_all_engines_at_the_same_weights(llm: LLM, folders: tuple[str, str]) -> None:
    of_weights = list[list[list[int]]]()
    for each in (folders[1], folders[0]):
        llm.reload_weights(each)
        of_weights.append(answers(llm))
    with ThreadPoolExecutor() as threads:
        for _ in range(3):
            for reloaded in [threads.submit(llm.reload_weights, each) for each in folders * 2]:
                reloaded.result()
            assert answers(llm) in of_weights  # which of them is last is chance
