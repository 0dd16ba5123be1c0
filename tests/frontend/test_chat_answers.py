"""Answers of `LLM.chat` and `AsyncLLM.chat` are read for tool calls and reasoning, as the server's are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_core import MemoryCore, memory_core
from fake_tokenizers import bundle_of, byte_level_tokenizer

from headrace import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from headrace.ipc.failure import OptionError

TEMPLATE = '{# <tool_call> "arguments" #}{{ messages[-1].content }}{{ "<think>" if opened }}'
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
SAID = 'Sure.<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>'
ASKED: Any = [{"role": "user", "content": "How warm is it?"}]
LONG = SamplingParams(max_tokens=200)
ON_CUE: Any = {"chat_template": TEMPLATE, "tools": [WEATHER]}


@pytest.fixture
def core() -> Iterator[MemoryCore]:
    """Says SAID, whose markers are special tokens, to whatever it is asked; with a thought where the prompt ends so."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    said, thought = tokenizer.encode(SAID).ids, tokenizer.encode("hm</think>").ids
    opened = tokenizer.encode("<think>").ids

    def next_token(prompt: list[int], seed: int, position: int) -> int:
        answer = [*thought, *said] if prompt[-len(opened) :] == opened else said
        return answer[position] if position < len(answer) else 2

    with memory_core(bundle_of(tokenizer), next_token) as running:
        yield running


@pytest.fixture
def llm(core: MemoryCore) -> Iterator[LLM]:
    with LLM.attach(core.transport) as attached:
        yield attached


def calls_in(message: Any) -> list[tuple[str, Any]]:
    return [(each.function.name, json.loads(each.function.arguments)) for each in message.tool_calls]


def test_calls_of_a_chat_with_tools_are_in_its_message(llm: LLM) -> None:
    for request in llm.chat([ASKED, ASKED], LONG, use_tqdm=False, **ON_CUE):
        (output,) = request.outputs
        assert output.text == SAID.replace("<tool_call>", "").replace("</tool_call>", ""), "as generate gives it"
        assert output.message is not None
        assert (output.message.content, calls_in(output.message)) == ("Sure.", [("get_weather", {"city": "Zürich"})])


def test_a_chat_without_tools_or_parsers_has_no_message(llm: LLM) -> None:
    (request,) = llm.chat(ASKED, LONG, use_tqdm=False, chat_template=TEMPLATE)
    assert request.outputs[0].message is None
    (request,) = llm.chat(ASKED, LONG, use_tqdm=False, tool_call_parser="none", **ON_CUE)
    assert request.outputs[0].message is None


def test_reasoning_is_read_where_a_parser_is_named(llm: LLM) -> None:
    opened: Any = {"chat_template_kwargs": {"opened": True}}
    (request,) = llm.chat(ASKED, LONG, use_tqdm=False, reasoning_parser="qwen3", **opened, **ON_CUE)
    message = request.outputs[0].message
    assert message is not None
    assert (message.reasoning, message.content, len(message.tool_calls)) == ("hm", "Sure.", 1)
    with pytest.raises(OptionError, match="reasoning_parser=quen"):
        llm.chat(ASKED, LONG, use_tqdm=False, reasoning_parser="quen", chat_template=TEMPLATE)


def test_a_stop_string_ends_what_is_read(llm: LLM) -> None:
    params = SamplingParams(max_tokens=200, stop=["Zü"])
    (request,) = llm.chat(ASKED, params, use_tqdm=False, **ON_CUE)
    message = request.outputs[0].message
    assert message is not None
    assert [each.function.arguments for each in message.tool_calls] == ['{"city": "']


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_the_last_output_of_an_async_chat_has_the_message(core: MemoryCore, kind: RequestOutputKind) -> None:
    async def chat() -> list[Any]:
        async with await AsyncLLM.attach(core.transport) as llm:
            params = SamplingParams(max_tokens=200, output_kind=kind)
            return [each.outputs[0] async for each in llm.chat(ASKED, params, **ON_CUE)]

    outputs = asyncio.run(chat())
    assert [each.message for each in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert calls_in(outputs[-1].message) == [("get_weather", {"city": "Zürich"})]
