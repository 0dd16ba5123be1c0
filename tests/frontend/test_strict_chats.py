"""Tools with `strict` in `LLM.chat` and `AsyncLLM.chat`: calls fit their schemas as the server's do, or are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from example_tools import DETAILED
from fake_core import memory_core
from fake_tokenizers import bundle_of, byte_level_tokenizer
from schema_checks import validate

from headrace import LLM, AsyncLLM, InvalidRequestError, SamplingParams, StructuredOutputsParams

MARKER, MARKER_ID = "<tool_call>", tiny_models.VOCAB_SIZE - 1
TEMPLATE = '{# <tool_call> "arguments" #}{{ messages[-1].content }}'
STRICT = [{"type": "function", "function": {"name": "get_weather", "parameters": DETAILED, "strict": True}}]
ASKED: Any = [{"role": "user", "content": "the water"}]
HOW: Any = {"tools": STRICT, "chat_template": TEMPLATE}
ENGINE: dict[str, Any] = {
    "dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_model_len": 320, "num_gpu_blocks_override": 200,
    "in_process": True,
}  # fmt: skip


def to_call(**more: Any) -> SamplingParams:
    """The model writes the marker of a call wherever it may."""
    return SamplingParams(max_tokens=250, seed=3, temperature=1.0, logit_bias={MARKER_ID: 100.0}, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose last token is the marker: an added token that is text, as Qwen's is."""
    folder = Path(tiny_models.save("llama", tmp_path_factory.mktemp("model"), tokenizer=True))
    state = json.loads((folder / "tokenizer.json").read_text())
    (last,) = (token for token, token_id in state["model"]["vocab"].items() if token_id == MARKER_ID)
    del state["model"]["vocab"][last]
    state["model"]["merges"] = [pair for pair in state["model"]["merges"] if "".join(pair) != last]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    state["added_tokens"].append({"id": MARKER_ID, "content": MARKER, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(model=str(folder), **ENGINE) as llm:
        llm.chat(ASKED, to_call(), use_tqdm=False, **HOW)  # starts what tries grammars, which ends with the engine
        yield llm


def check(message: Any) -> None:
    assert message.tool_calls
    for call in message.tool_calls:
        assert call.function.name == "get_weather"
        validate(json.loads(call.function.arguments), DETAILED)


def test_calls_of_a_strict_tool_fit_its_schema(llm: LLM):
    outputs = llm.chat([ASKED, ASKED], [to_call(), to_call(stop=["</tool_call>"])], use_tqdm=False, **HOW)
    whole = [output for request in outputs for output in request.outputs if output.finish_reason == "stop"]
    assert whole
    for output in whole:
        check(output.message)
    llm.enqueue_chat(ASKED, to_call(stop=["</tool_call>"]), **HOW)
    (request,) = llm.wait_for_completion()
    check(request.outputs[0].message)


def test_an_answer_that_must_be_json_may_be_a_call_of_a_strict_tool(llm: LLM):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = StructuredOutputsParams(json=schema)
    for params in (to_call(structured_outputs=form, stop=["</tool_call>"]), SamplingParams(max_tokens=250, seed=5)):
        params.structured_outputs = form
        (request,) = llm.chat(ASKED, params, use_tqdm=False, **HOW)
        (output,) = request.outputs
        if output.finish_reason == "stop" and output.message.tool_calls:
            check(output.message)
        elif output.finish_reason == "stop":
            validate(json.loads(output.message.content), schema)
        assert params.structured_outputs is form, "the caller's parameters stay as they were"


def test_what_cannot_be_held_is_refused(llm: LLM):
    with pytest.raises(InvalidRequestError, match=r"`strict`, and nothing can hold calls to its schema"):
        llm.chat(ASKED, to_call(), use_tqdm=False, tools=STRICT, chat_template="{{ messages[-1].content }}")
    other = to_call(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(InvalidRequestError, match="can be a JSON schema alone"):
        llm.chat(ASKED, other, use_tqdm=False, **HOW)


def test_async_chats_are_refused_alike():
    async def chat() -> None:
        with memory_core(bundle_of(byte_level_tokenizer())) as core:
            async with await AsyncLLM.attach(core.transport) as llm:
                plain = {"tools": STRICT, "chat_template": "{{ messages[-1].content }}"}
                with pytest.raises(InvalidRequestError, match=r"`strict`, and nothing can hold calls to its schema"):
                    _ = [each async for each in llm.chat(ASKED, to_call(), **plain)]

    asyncio.run(chat())
