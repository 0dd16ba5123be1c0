"""Beam search against transformers', and against vLLM's rules written out over transformers' logits."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM

from headrace import LLM, AsyncLLM, BeamSearchParams, InvalidRequestError
from headrace.frontend.api.beam_search import beam_search
from headrace.frontend.request.prompts import Prompt

PROMPTS = [[5, 6, 7], [9, 8, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44], [200]]
EOS = 42


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.save("llama", tmp_path_factory.mktemp("beams") / "model", eos_token_id=EOS))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", max_model_len=64, in_process=True, skip_tokenizer_init=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def model(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("width", [1, 3, 8])
def test_beams_of_one_length_are_those_of_transformers(llm: LLM, model: Any, width: int) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=10, ignore_eos=True)
    for prompt, found in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            **{"num_beams": width, "num_return_sequences": width, "max_new_tokens": 10, "do_sample": False},
            **{"eos_token_id": None, "pad_token_id": 0, "length_penalty": 1.0},
            **{"return_dict_in_generate": True, "output_scores": True},
        )
        assert [each.tokens for each in found.sequences] == expected.sequences.tolist()
        assert {each.finish_reason for each in found.sequences} == {"length"}
        if width > 1:  # else it is no beam search there, and has no scores
            scores = [each.cum_logprob / 10 for each in found.sequences]
            assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)


@torch.inference_mode()
def searched(model: Any, prompt: list[int], width: int, steps: int, penalty: float) -> list[tuple[list[int], float]]:
    """vLLM's rules: (tokens, log-probability), best first."""

    def score(each: tuple[list[int], float]) -> float:
        length = len(each[0]) - (each[0][-1] == EOS)
        return each[1] / length**penalty

    beams: list[tuple[list[int], float]] = [(prompt, 0.0)]
    complete: list[tuple[list[int], float]] = []
    for _ in range(steps):
        extended: list[tuple[list[int], float]] = []
        for tokens, logprob in beams:
            found = model(torch.tensor([tokens])).logits[0, -1].double().log_softmax(0).topk(2 * width)
            for value, token in zip(*(each.tolist() for each in found), strict=True):
                (complete if token == EOS else extended).append(([*tokens, token], logprob + value))
        beams = sorted(extended, key=score, reverse=True)[:width]
    return sorted(complete + beams, key=score, reverse=True)[:width]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5])
def test_ends_and_length_penalty_are_vllms(llm: LLM, model: Any, penalty: float) -> None:
    found = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=4, max_tokens=8, length_penalty=penalty))
    for prompt, output in zip(PROMPTS, found, strict=True):
        expected = searched(model, prompt, 4, 8, penalty)
        assert [each.tokens for each in output.sequences] == [tokens for tokens, _ in expected]
        assert [each.cum_logprob for each in output.sequences] == pytest.approx(
            [each for _, each in expected], abs=1e-4
        )
        for each in output.sequences:
            ended = each.tokens[-1] == EOS
            assert (each.finish_reason, each.stop_reason) == (("stop", EOS) if ended else ("length", None))
            assert len(each.logprobs) == len(each.tokens) - len(prompt)


def test_some_beams_end_with_an_end_of_sequence_token(llm: LLM) -> None:
    found = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=8, max_tokens=8, length_penalty=0.0))
    assert {each.finish_reason for output in found for each in output.sequences} == {"stop", "length"}


def test_a_search_ends_where_the_models_length_does(llm: LLM) -> None:
    (found,) = llm.beam_search([[7] * 60], BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True))
    assert [len(each.tokens) for each in found.sequences] == [64, 64]


def test_a_prompt_as_long_as_the_context_is_refused_as_any_request_is(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    for prompt, said in (
        ([5] * 64, r"prompt \(length 64\) .* maximum model length of 64"),
        ([10**6], "out of vocabulary"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            llm.beam_search([[5, 6], prompt], params)


def test_prompts_in_groups_answer_as_together(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    assert llm.beam_search(PROMPTS, params, concurrency_limit=1) == llm.beam_search(PROMPTS, params)


def test_the_asynchronous_face_gives_one_output(llm: LLM, folder: str) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)

    async def search() -> list[Any]:
        options = {"dtype": "float32", "max_model_len": 64, "skip_tokenizer_init": True}
        async with AsyncLLM(folder, **options) as other:
            return [output async for output in other.beam_search(PROMPTS[0], "name", params)]

    (output,) = asyncio.run(search())
    (expected,) = llm.beam_search([PROMPTS[0]], params)
    assert [[*PROMPTS[0], *each.token_ids] for each in output.outputs] == [each.tokens for each in expected.sequences]
    assert output.request_id == "name"


def test_abort_ends_a_search_with_the_sequences_so_far(folder: str) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True)

    async def last(llm: AsyncLLM) -> Any:
        return [output async for output in llm.beam_search(PROMPTS[0], "name", params)][-1]

    async def abort() -> tuple[Any, Any]:
        async with AsyncLLM(folder, dtype="float32", max_model_len=64, skip_tokenizer_init=True) as llm:
            searching = asyncio.create_task(last(llm))
            while "name" not in llm._sessions:
                await asyncio.sleep(0)
            with pytest.raises(InvalidRequestError, match="ids must be unique"):
                await last(llm)
            await llm.abort("name")
            aborted = await searching
            return aborted, await last(llm)  # the name is free again

    aborted, whole = asyncio.run(abort())
    assert {each.finish_reason for each in aborted.outputs} == {"abort"}
    assert {each.finish_reason for each in whole.outputs} == {"length"}
    assert max(len(each.token_ids) for each in aborted.outputs) < 50


def test_fields_of_newer_versions_that_ask_for_nothing_pass() -> None:
    """tests/samplers/test_beam_search_online.py of vLLM makes such."""
    params = BeamSearchParams(2, 4, structured_outputs=None, watermarking=None, allowed_token_ids=None)
    assert params == BeamSearchParams(beam_width=2, max_tokens=4, skip_special_tokens=True)


def test_numbers_of_numpy_are_plain() -> None:
    params = BeamSearchParams(np.int64(2), np.int32(4), temperature=np.float32(0.5), length_penalty=np.float64(2))
    assert params == BeamSearchParams(2, 4, temperature=0.5, length_penalty=2.0)
    assert {type(each) for each in (params.beam_width, params.max_tokens)} == {int}
    with pytest.raises(InvalidRequestError, match="must be an integer of at least 1"):
        BeamSearchParams(np.float64(2), 4)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"allowed_token_ids": [5]}, "allowed_token_ids = [5]: is not supported"),
        ({"beam_width": 0}, "beam_width = 0: must be an integer of at least 1"),
        ({"max_tokens": None}, "max_tokens = None: must be an integer"),
        ({"length_penalty": float("nan")}, "length_penalty = nan: must be a finite number"),
        ({"length_penalty": 10**400}, "must be a finite number"),
        ({"temperature": -1.0}, "temperature = -1.0: must be at least 0"),
        ({"ignore_eos": 1}, "ignore_eos = 1: must be True or False"),
        ({"beam_width": 11}, "beam_width = 11: needs twice as many log-probabilities per token"),
    ],
)
def test_a_bad_value_is_refused_by_name(llm: LLM, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.beam_search([[5]], BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **fields}))
    assert said in str(caught.value)


class Aborting:
    """The pool of engines, except that one of its requests is aborted once it was sent."""

    def __init__(self, client: Any, nth: int) -> None:
        self._client, self._left = client, nth

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def submit(self, request: Any, listener: Any) -> Any:
        stream = self._client.submit(request, listener)
        self._left -= 1
        if not self._left:
            asyncio.get_running_loop().call_soon(stream.abort)
        return stream


@pytest.mark.parametrize(("nth", "length"), [(1, 0), (2, 0), (3, 1), (9, 2)])
def test_a_search_of_which_a_step_is_aborted_ends_with_its_sequences_so_far(llm: LLM, nth: int, length: int) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)
    prompts = [Prompt(token_ids=[5, 6, 7]), Prompt(token_ids=[9, 8, 7])]
    client: Any = Aborting(llm._client, nth)
    found = llm._background.run(beam_search(client, prompts, params, map(str, itertools.count(1000))))
    ends = [{(each.finish_reason, len(each.tokens) - 3) for each in output.sequences} for output in found]
    assert {("abort", length)} in ends
    assert {("length", 10)} in ends
