"""Slips of scripts that call the API, each answered by an error that names the remedy."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from headrace import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    PoolingParams,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from headrace.ipc.failure import InvalidRequestError, OptionError

NULL = {"distributed_executor_backend": "headrace.executor.testing.null:NullExecutor", "skip_tokenizer_init": True}
PROMPT = {"prompt_token_ids": [5]}
CHAT = [{"role": "user", "content": "a"}]
COPIES = (pickle.dumps, copy.deepcopy, copy.copy)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("null", in_process=True, **NULL) as llm:
        yield llm


@pytest.mark.parametrize("copied", COPIES, ids=lambda each: f"{each.__module__}.{each.__name__}")
def test_objects_with_a_connection_are_neither_pickled_nor_copied(llm: LLM, copied: Any) -> None:
    with llm.stream(PROMPT, SamplingParams(max_tokens=1)) as stream:
        for held in (llm, LLMEngine(llm), stream, llm._client):
            with pytest.raises(TypeError, match=rf"^{type(held).__name__} is neither .*headrace\.connect\(address\)"):
                copied(held)


def test_an_async_llm_and_its_streams_are_neither_pickled_nor_copied(llm: LLM) -> None:
    async def main() -> None:
        async with AsyncLLM("null", **NULL) as engine:
            stream = await engine.add_request("1", PROMPT, SamplingParams(max_tokens=1))
            for held in (engine, stream):
                for copied in COPIES:
                    with pytest.raises(TypeError, match=rf"^{type(held).__name__} is .*AsyncLLM\.connect\(address\)"):
                        copied(held)
            for call in (
                lambda: anext(engine.generate(PROMPT, max_tokens=4)),
                lambda: anext(engine.chat(CHAT, max_tokens=4)),
                lambda: engine.add_request("2", PROMPT, max_tokens=4),
            ):
                with pytest.raises(TypeError, match=r"no argument 'max_tokens'; give it as SamplingParams\(max_to"):
                    await call()
            with pytest.raises(TypeError, match=r"encode has no argument 'dimensions'; give .* PoolingParams\(dimens"):
                await anext(engine.encode(PROMPT, dimensions=4))

    asyncio.run(main())


def test_a_parameter_without_its_name_is_asked_for_one() -> None:
    with pytest.raises(TypeError, match=r"by name, as in SamplingParams\(temperature=0\.5, .*which is 0\.5\?"):
        SamplingParams(0.5)  # type: ignore[misc]


def test_sampling_parameters_among_the_arguments_are_told_where_they_go(llm: LLM) -> None:
    for method, prompt in {"generate": PROMPT, "enqueue": PROMPT, "stream": PROMPT, "chat": CHAT}.items():
        for name in ("max_tokens", "max_token", "max_new_tokens"):
            with pytest.raises(TypeError, match=rf"{name}'; give it as SamplingParams\(max_tokens=4\)") as raised:
                getattr(llm, method)(prompt, **{name: 4})
            assert isinstance(raised.value, InvalidRequestError)
        with pytest.raises(TypeError, match=rf"{method} has no argument 'speed'"):
            getattr(llm, method)(prompt, speed=4)
    with pytest.raises(TypeError, match=r"'temperature'; give it as SamplingParams\(temperature=0\)"):
        llm.enqueue_chat(CHAT, temperature=0)
    for method in ("embed", "encode"):
        with pytest.raises(TypeError, match=r"'dimensions'; give it as PoolingParams\(dimensions=4\)"):
            getattr(llm, method)(PROMPT, dimensions=4)


@pytest.mark.parametrize(
    ("params", "slip", "meant"),
    [
        (SamplingParams(), "max_token", "max_tokens"),
        (SamplingParams(), "temprature", "temperature"),
        (SamplingParams(structured_outputs={"regex": "a"}), "structured_output", "structured_outputs"),
        (PoolingParams(), "dimension", "dimensions"),
        (BeamSearchParams(beam_width=2, max_tokens=3), "beam_with", "beam_width"),
        (StructuredOutputsParams(regex="a"), "choices", "choice"),
        (RepetitionDetectionParams(), "min_counts", "min_count"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_misspelt_attribute_is_refused_and_a_scripts_own_is_kept(params: Any, slip: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=f"has no field '{slip}'; did you mean '{meant}'"):
        setattr(params, slip, 5)
    params.mine, params._private_name = 1, 2
    setattr(params, meant, getattr(params, meant))
    assert (params.mine, params._private_name) == (1, 2)


def test_an_attribute_that_is_not_supported_is_refused_as_the_argument_is() -> None:
    params = SamplingParams()
    params.best_of = 1
    with pytest.raises(InvalidRequestError, match="best_of is not supported"):
        params.best_of = 2
    args = EngineArgs("null")
    args.max_model_length = 64  # type: ignore[attr-defined]
    with pytest.raises(OptionError, match="max_model_len"):
        LLM(**vars(args))
