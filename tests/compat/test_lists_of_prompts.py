"""Whatever has a length and can be iterated is a list: of prompts, of token ids, of messages, of parameters."""

from __future__ import annotations

import array
import asyncio
import collections
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from thinned import every

from headrace import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from headrace.ipc.failure import InvalidRequestError
from headrace.sampling_params import StructuredOutputsParams

GREEDY = SamplingParams(temperature=0, max_tokens=3)
TEXTS = ["hello", "hello there"]
IDS = [[5, 6, 7], [6, 7, 8]]


class Column:
    """A column of a library that is not installed here: no Sequence of Python's, and its elements are boxed."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)


class Boxed:
    """An element of a column of pyarrow's."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def as_py(self) -> Any:
        return self._value


class Table(Column):
    columns = ("prompt", "answer")


LISTS_OF_TEXTS: dict[str, Any] = {
    "array": np.array(TEXTS),
    "array of objects": np.array(TEXTS, dtype=object),
    "texts of numpy's": [np.str_(each) for each in TEXTS],
    "tuple": tuple(TEXTS),
    "deque": collections.deque(TEXTS),
    "keys": dict.fromkeys(TEXTS).keys(),
    "column": Column(TEXTS),
    "boxed": Column([Boxed(each) for each in TEXTS]),
    "dicts": np.array([{"prompt": np.str_(each), "multi_modal_data": {}} for each in TEXTS], dtype=object),
}
LISTS_OF_IDS: dict[str, Any] = {
    "array": np.array(IDS),
    "short integers": np.array(IDS, dtype=np.uint8),
    "tensor": torch.tensor(IDS),
    "arrays": [np.array(each) for each in IDS],
    "integers of numpy's": [list(map(np.int64, each)) for each in IDS],
    "ragged": np.array([np.array(IDS[0]), np.array(IDS[1])], dtype=object),
    "deques": collections.deque(map(collections.deque, IDS)),
    "columns": Column([Column(each) for each in IDS]),
    "dicts": Column([{"prompt_token_ids": np.array(each)} for each in IDS]),
}
ONE_PROMPT: dict[str, Any] = {
    "array": np.array(IDS[0]),
    "tensor": torch.tensor(IDS[0]),
    "integers of numpy's": list(map(np.int64, IDS[0])),
    "standard array": array.array("i", IDS[0]),
    "range": range(5, 8),
    "column": Column(IDS[0]),
    "dict": {"prompt_token_ids": torch.tensor(IDS[0]), "mm_processor_kwargs": {}},
}


@pytest.mark.parametrize("kind", every(2, LISTS_OF_TEXTS))
def test_lists_of_texts_are_prompts(llm: LLM, kind: str) -> None:
    outputs = llm.generate(LISTS_OF_TEXTS[kind], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == TEXTS


@pytest.mark.parametrize("kind", LISTS_OF_IDS)
def test_lists_of_token_ids_are_prompts(llm: LLM, kind: str) -> None:
    outputs = llm.generate(LISTS_OF_IDS[kind], GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == IDS
    assert {type(token) for output in outputs for token in output.prompt_token_ids} == {int}


@pytest.mark.parametrize("kind", ONE_PROMPT)
def test_one_list_of_token_ids_is_one_prompt_in_every_call(llm: LLM, address: str, kind: str) -> None:
    prompt = ONE_PROMPT[kind]
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    llm.enqueue(prompt, GREEDY)
    (queued,) = llm.wait_for_completion(use_tqdm=False)
    *_, streamed = llm.stream(prompt, GREEDY)
    engine = llm.llm_engine
    engine.add_request(f"a {kind}", prompt, GREEDY)
    stepped = [each for _ in range(4) for each in engine.step()]
    (beams,) = llm.beam_search(prompt, BeamSearchParams(2, 1))

    async def run() -> Any:
        async with await AsyncLLM.connect(address) as other:
            async for each in other.beam_search(prompt, None, BeamSearchParams(2, 1)):
                assert each.prompt_token_ids == IDS[0]
            return [each async for each in other.generate(prompt, GREEDY, "r")][-1]

    answered = [output, queued, streamed, stepped[-1], asyncio.run(run())]
    assert [each.prompt_token_ids for each in answered] == [IDS[0]] * len(answered)
    assert beams.sequences[0].tokens[:3] == IDS[0]


def test_enqueued_and_searched_prompts_are_lists_too(llm: LLM) -> None:
    assert len(llm.enqueue(np.array(TEXTS), GREEDY)) == 2
    assert [output.prompt for output in llm.wait_for_completion(use_tqdm=False)] == TEXTS
    assert len(llm.beam_search(Column(TEXTS), BeamSearchParams(2, 1))) == 2  # type: ignore[arg-type]
    assert llm.generate(np.array([]), use_tqdm=False) == llm.generate(set(), use_tqdm=False) == []


CONVERSATION = [{"role": "user", "content": "Hello there"}]


@pytest.mark.parametrize(
    "messages",
    [
        np.array(CONVERSATION, dtype=object),
        collections.deque(CONVERSATION),
        tuple(CONVERSATION),
        Column(CONVERSATION),
        [{"role": "user", "content": np.array([{"type": "text", "text": "Hello there"}], dtype=object)}],
        [{"role": "user", "content": "Hello there", "tool_calls": np.array([])}],
    ],
)
def test_conversations_and_their_parts_are_lists_too(llm: LLM, address: str, messages: Any) -> None:
    (expected,) = llm.chat(CONVERSATION, GREEDY, use_tqdm=False)
    (answer,) = llm.chat(messages, GREEDY, use_tqdm=False)
    several = llm.chat(Column([messages, messages]), Column([GREEDY, GREEDY]), use_tqdm=False)  # type: ignore[arg-type]

    async def run() -> Any:
        async with await AsyncLLM.connect(address) as other:
            return [each async for each in other.chat(messages, GREEDY)][-1]

    for each in (answer, *several, asyncio.run(run())):
        assert (each.prompt_token_ids, each.outputs[0].text) == (expected.prompt_token_ids, expected.outputs[0].text)


def test_parameters_and_priorities_may_be_lists_of_any_kind(llm: LLM) -> None:
    params = np.array([SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)], dtype=object)
    outputs = llm.generate(np.array(TEXTS), params, priority=np.array([1, 0]), use_tqdm=False)  # type: ignore[arg-type]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2]
    given: Any = {
        "stop": np.array(["a", "b"]),
        "stop_token_ids": torch.tensor([1, 2]),
        "bad_words": collections.deque(["c"]),
        "allowed_token_ids": np.arange(4),
        "logprob_token_ids": range(2),
    }
    found = SamplingParams(**given)
    assert (found.stop, found.stop_token_ids, found.bad_words) == (["a", "b"], [1, 2], ["c"])
    assert (found.allowed_token_ids, found.logprob_token_ids) == ([0, 1, 2, 3], [0, 1])
    assert StructuredOutputsParams(choice=np.array(["a", "b"])).choice == ["a", "b"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "nothing",
    [
        {"multi_modal_data": {}},
        {"multi_modal_data": None, "mm_processor_kwargs": {}, "multi_modal_uuids": {}},
        {"multi_modal_data": {"image": []}, "multi_modal_uuids": {"image": None}},
        {"multi_modal_data": [], "prompt_embeds": None, "cache_salt": None},
        {"multi_modal_data": np.array([])},
    ],
)
def test_empty_fields_of_a_prompt_ask_for_nothing(llm: LLM, nothing: dict[str, Any]) -> None:
    for prompt, ids in (({"prompt": "hello"}, None), ({"prompt_token_ids": IDS[0]}, IDS[0])):
        (output,) = llm.generate({**prompt, **nothing}, GREEDY, use_tqdm=False)
        assert ids in (None, output.prompt_token_ids)


def test_empty_arguments_ask_for_nothing(llm: LLM) -> None:
    outputs = llm.generate(TEXTS, GREEDY, use_tqdm=False, lora_request=[None, None], mm_processor_kwargs={})  # type: ignore[arg-type]
    assert len(outputs) == 2
    with pytest.raises(InvalidRequestError, match="mm_processor_kwargs is refused"):
        llm.generate(TEXTS, GREEDY, use_tqdm=False, mm_processor_kwargs={"num_crops": 4})


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (b"hello", "not bytes"),
        (bytearray(b"hello"), "not bytearray"),
        (np.array("hello"), "not ndarray"),
        (iter(TEXTS), "not list_iterator"),
        (5, "not int"),
        (list, "not type"),
        (Table(TEXTS), "Table is a table: give one of its columns"),
        (["hello", None], r"prompts\[1\]: .*not NoneType"),
        (["hello", b"x"], r"prompts\[1\]: .*not bytes"),
        (np.array([1.0, 2.0]), r"prompts\[0\]: .*not float"),
        ([{"prompt": "a", "multi_modal_data": {"image": "cat.png"}}], "multi_modal_data.*not supported"),
        ({"prompt": ["a"]}, "'prompt' must be a string, not list"),
        ({"prompt_token_ids": "a"}, "'prompt_token_ids' must be a list of integers, not str"),
        (np.array([True, False]), "no token id"),
    ],
)
def test_what_is_no_list_is_refused_by_its_type(llm: LLM, prompts: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        llm.generate(prompts, GREEDY, use_tqdm=False)


def test_a_call_for_one_prompt_refuses_a_list_of_any_kind(llm: LLM) -> None:
    for prompts in (np.array(TEXTS), np.array(IDS), collections.deque(TEXTS), Column(TEXTS)):
        with pytest.raises(InvalidRequestError, match="one prompt, not a list of 2"):
            llm.stream(prompts, GREEDY)
