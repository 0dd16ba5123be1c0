"""Adapters by vLLM's Python API: each request gets its own, and outputs say which."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from null_adapters import write
from null_with_tokenizer import BACKEND, VOCAB_SIZE

from headrace import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    HeadraceError,
    InvalidRequestError,
    LoRARequest,
    RequestFailedError,
    RequestOutput,
    SamplingParams,
)
from headrace.core.engine.engine import EngineThread
from headrace.core.options.parsing import parse_options
from headrace.frontend.client.transport import MemoryTransport

OPTIONS: dict[str, Any] = {"distributed_executor_backend": BACKEND, "hf_overrides": {"vocab_size": VOCAB_SIZE}}
GREEDY = SamplingParams(temperature=0, max_tokens=6)
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def thread() -> Iterator[EngineThread]:
    thread = EngineThread(parse_options(model="null", enable_lora=True, max_loras=4, max_cpu_loras=8, **OPTIONS))
    yield thread
    thread.stop()


@pytest.fixture
def llm(thread: EngineThread) -> Iterator[LLM]:
    with LLM.attach(MemoryTransport(thread.port)) as llm:
        yield llm
        for number in llm.list_loras():
            assert llm.remove_lora(number)


@pytest.fixture
def sql(tmp_path: Path) -> LoRARequest:
    return LoRARequest("sql", 1, write(tmp_path / "sql", "sql"))


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_each_prompt_has_the_adapter_of_its_place(llm: LLM, sql: LoRARequest, tmp_path: Path) -> None:
    chat = LoRARequest("chat", 2, write(tmp_path / "chat", "chat"))
    outputs = llm.generate(["a", "a", "a"], GREEDY, use_tqdm=False, lora_request=[None, sql, chat])
    base, with_sql, with_chat = tokens(outputs)
    assert base != with_sql != with_chat != base
    assert [output.lora_request for output in outputs] == [None, sql, chat]
    assert [output.outputs[0].lora_request for output in outputs] == [None, sql, chat]
    assert tokens(llm.generate(["a", "a"], GREEDY, use_tqdm=False, lora_request=sql)) == [with_sql, with_sql]
    assert tokens(llm.generate("a", GREEDY, use_tqdm=False)) == [base]


def test_every_way_to_ask_takes_an_adapter(llm: LLM, sql: LoRARequest) -> None:
    base, adapted = tokens(llm.generate(["a", "a"], GREEDY, use_tqdm=False, lora_request=[None, sql]))
    llm.enqueue("a", GREEDY, sql)
    assert tokens(llm.wait_for_completion(use_tqdm=False)) == [adapted]
    with llm.stream("a", GREEDY, lora_request=sql) as stream:
        assert [token for output in stream for token in output.outputs[0].token_ids] == adapted
    llm.llm_engine.add_request("1", "a", GREEDY, lora_request=sql)
    last = llm.llm_engine.step()
    while not last[-1].finished:
        last = llm.llm_engine.step()
    assert tokens(last) == [adapted]
    for ask in (
        lambda lora: tokens(llm.chat(HELLO, GREEDY, use_tqdm=False, lora_request=lora)),
        lambda lora: [each.tokens for each in llm.beam_search("a", BeamSearchParams(2, 4), lora)[0].sequences],
        lambda lora: llm.enqueue_chat([HELLO], GREEDY, lora_request=lora) and tokens(llm.wait_for_completion()),
    ):
        plain, other = ask(None), ask(sql)
        assert plain != other
        assert ask([None]) == plain
    assert llm.beam_search("a", BeamSearchParams(2, 4), sql)[0].sequences[0].lora_request == sql
    assert base != adapted


def test_an_async_llm_takes_an_adapter(thread: EngineThread, llm: LLM, sql: LoRARequest) -> None:
    (adapted,) = tokens(llm.generate("a", GREEDY, use_tqdm=False, lora_request=sql))

    async def last(outputs: Any) -> RequestOutput:
        async for output in outputs:
            found = output
        return found

    async def main() -> None:
        async with await AsyncLLM.attach(MemoryTransport(thread.port)) as mine:
            assert await mine.add_lora(LoRARequest("sql", 7, sql.lora_path)) is False, "another client has loaded it"
            assert await mine.list_loras() == {7}
            found = await last(mine.generate("a", GREEDY, lora_request=LoRARequest("sql", 7)))
            assert tokens([found]) == [adapted]
            assert found.lora_request == sql
            assert tokens([await last(mine.chat(HELLO, GREEDY, lora_request=sql))]) != tokens(
                [await last(mine.chat(HELLO, GREEDY))]
            )
            stream = await mine.add_request("r", "a", GREEDY, lora_request=sql)
            assert tokens([await stream.final()]) == [adapted]
            beams = await last(mine.beam_search("a", "b", BeamSearchParams(2, 4), sql))
            assert beams.lora_request == beams.outputs[0].lora_request == sql

    asyncio.run(main())


def test_adapters_are_added_listed_pinned_and_removed(llm: LLM, sql: LoRARequest, tmp_path: Path) -> None:
    assert llm.list_loras() == set()
    assert llm.llm_engine.add_lora(sql) is True
    assert llm.llm_engine.add_lora(sql) is False
    chat = LoRARequest("chat", 5, write(tmp_path / "chat", "chat"))
    llm.generate("a", GREEDY, use_tqdm=False, lora_request=chat)
    assert llm.llm_engine.list_loras() == {1, 5}, "one that a request brought is there too"
    assert llm.llm_engine.pin_lora(5) is True
    with pytest.raises(InvalidRequestError, match="Pinning failed"):
        llm.pin_lora(9)
    assert llm.llm_engine.remove_lora(1) is True
    assert llm.remove_lora(1) is False
    assert llm.remove_lora(9) is False
    assert llm.list_loras() == {5}
    with pytest.raises(InvalidRequestError, match=r"there is no adapter sql; known: chat"):
        llm.generate("a", GREEDY, use_tqdm=False, lora_request=LoRARequest("sql", 1))
    with pytest.raises(InvalidRequestError, match="say where it is"):
        llm.add_lora(LoRARequest("sql", 1))
    with pytest.raises(InvalidRequestError, match="lora_request must be a LoRARequest, not str"):
        llm.add_lora("sql")  # type: ignore[arg-type]


def test_an_adapter_of_another_client_gets_a_free_number(thread: EngineThread, llm: LLM, sql: LoRARequest) -> None:
    with LLM.attach(MemoryTransport(thread.port)) as other:
        other.add_lora(sql)
        numbers = llm.list_loras()
        assert len(numbers) == 1
        assert llm.remove_lora(*numbers) is True
        assert other.list_loras() == set()


def test_the_same_name_with_another_path_is_another_adapter(llm: LLM, sql: LoRARequest, tmp_path: Path) -> None:
    namesake = LoRARequest("sql", 2, write(tmp_path / "other", "other"))
    first, second, again = tokens(llm.generate(["a"] * 3, GREEDY, use_tqdm=False, lora_request=[sql, namesake, sql]))
    assert first == again != second
    alone = LoRARequest("alone", 3, namesake.lora_path)
    assert tokens(llm.generate("a", GREEDY, use_tqdm=False, lora_request=alone)) == [second]
    assert llm.remove_lora(1) is True, "by either number of the name"
    assert llm.remove_lora(2) is False


def test_an_adapter_is_read_again_in_place_once_for_each_object(llm: LLM, sql: LoRARequest, tmp_path: Path) -> None:
    first = tokens(llm.generate("a", GREEDY, use_tqdm=False, lora_request=sql))
    write(tmp_path / "sql", "changed")
    assert tokens(llm.generate("a", GREEDY, use_tqdm=False, lora_request=sql)) == first, "nobody asked to read it again"
    in_place = LoRARequest("sql", 1, sql.lora_path, load_inplace=True)
    before = llm.get_stats().adapters
    second = tokens(llm.generate(["a"] * 20, GREEDY, use_tqdm=False, lora_request=in_place))
    after = llm.get_stats().adapters
    assert before is not None
    assert after is not None
    assert after.num_loads == before.num_loads + 1
    assert second == [second[0]] * 20
    assert second[0] != first[0]
    fresh = LoRARequest("fresh", 2, write(tmp_path / "fresh", "changed"))
    assert tokens(llm.generate("a", GREEDY, use_tqdm=False, lora_request=fresh)) == [second[0]]


def test_an_adapter_that_cannot_be_read_fails_its_own_requests(llm: LLM, sql: LoRARequest, tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match=r"adapter gone .*could not be loaded"):
        llm.add_lora(LoRARequest("gone", 2, str(tmp_path / "gone")))
    assert llm.list_loras() == set()
    with pytest.raises(RequestFailedError, match=r"prompts\[1\].*adapter gone .*could not be loaded"):
        llm.generate(
            ["a", "a"], GREEDY, use_tqdm=False, lora_request=[sql, LoRARequest("gone", 2, str(tmp_path / "gone"))]
        )
    assert llm.generate("a", GREEDY, use_tqdm=False, lora_request=sql)[0].finished
    shutil.rmtree(sql.lora_path)
    assert llm.generate("a", GREEDY, use_tqdm=False, lora_request=sql)[0].finished, "it is in memory"


def test_what_is_no_adapter_is_refused_before_anything_runs(llm: LLM) -> None:
    for wrong in (object(), "sql", [LoRARequest("a", 1, "/a")] * 3):
        with pytest.raises(InvalidRequestError, match=r"lora_request"):
            llm.generate(["a", "a"], GREEDY, use_tqdm=False, lora_request=wrong)


def test_an_engine_without_adapters_says_what_to_do(sql: LoRARequest) -> None:
    with LLM("null", in_process=True, **OPTIONS) as llm:
        with pytest.raises(InvalidRequestError, match=r"the adapter 'sql', and LoRA is not enabled.*enable_lora"):
            llm.generate("a", GREEDY, use_tqdm=False, lora_request=sql)
        with pytest.raises(HeadraceError, match="enable_lora"):
            llm.add_lora(sql)
        assert llm.list_loras() == set()


def test_metrics_have_vllms_gauge(llm: LLM, sql: LoRARequest) -> None:
    llm.add_lora(sql)
    found = {metric.name: metric for metric in llm.get_metrics()}
    info = found["vllm:lora_requests_info"]
    assert info.labels.items() >= {"max_lora": "4", "running_lora_adapters": "", "waiting_lora_adapters": ""}.items()
    assert found["vllm:adapters_registered"].value == 1  # type: ignore[attr-defined]
    assert found["vllm:adapter_loads"].value >= 1  # type: ignore[attr-defined]
