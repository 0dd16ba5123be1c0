"""The asynchronous face, on a core in memory."""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from fake_core import FakeCore, Faults, MemoryCore, hashed_token, memory_core, zmq_core

from headrace import (
    AsyncLLM,
    BeamSearchParams,
    EngineDeadError,
    HeadraceError,
    InvalidRequestError,
    RequestOutputKind,
    SamplingParams,
)
from headrace.frontend.api.streaming_input import StreamingInput
from headrace.ipc.messages import Abort, AddRequest

pytestmark = pytest.mark.usefixtures("private_cache")

LONG = SamplingParams(max_tokens=200)


@asynccontextmanager
async def attached(**kwargs: Any) -> AsyncIterator[tuple[MemoryCore, AsyncLLM]]:
    core = MemoryCore(FakeCore(**kwargs))
    llm = await AsyncLLM.attach(core.transport)
    try:
        yield core, llm
    finally:
        await llm.close()
        core.stop()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """The coroutine function as a test with a deadline."""

    def synchronous() -> None:
        asyncio.run(asyncio.wait_for(test(), 30))

    synchronous.__name__ = test.__name__
    return synchronous


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


@run
async def test_outputs_are_cumulative_by_default() -> None:
    async with attached() as (_, llm):
        outputs = [output async for output in llm.generate("Hello", SamplingParams(max_tokens=20))]
        tokens = [hashed_token([42, 71, 78, 78, 81], 0, position) for position in range(20)]
        assert outputs[-1].outputs[0].token_ids == tokens
        assert outputs[-1].outputs[0].text == (await llm.get_tokenizer()).decode(tokens)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for output in outputs:
            assert outputs[-1].outputs[0].text.startswith(output.outputs[0].text)


@run
async def test_chat_is_the_template_and_generate() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    params = SamplingParams(max_tokens=5)
    async with attached() as (_, llm):
        outputs = [output async for output in llm.chat(messages, params)]
        assert outputs[-1].prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        given = {"prompt_token_ids": outputs[-1].prompt_token_ids}
        assert [output async for output in llm.generate(given, params)][-1].outputs == outputs[-1].outputs
        with pytest.raises(InvalidRequestError, match="no argument 'template'"):
            await anext(llm.chat(messages, template="x"))
        with pytest.raises(InvalidRequestError, match="LoRA"):
            await anext(llm.chat(messages, lora_request=object()))  # type: ignore[arg-type]


@run
async def test_deltas_join_to_the_final_text() -> None:
    async with attached() as (_, llm):
        params = SamplingParams(max_tokens=20, output_kind=RequestOutputKind.DELTA)
        deltas = [output.outputs[0].text async for output in llm.generate("Hello", params)]
        params = SamplingParams(max_tokens=20, output_kind=RequestOutputKind.FINAL_ONLY)
        (final,) = [output.outputs[0].text async for output in llm.generate("Hello", params)]
        assert "".join(deltas) == final


@run
async def test_a_slow_reader_gets_fewer_and_larger_outputs() -> None:
    async with attached() as (core, llm):
        params = SamplingParams(max_tokens=100, output_kind=RequestOutputKind.DELTA)
        stream = llm.generate("Hello", params)
        first = await anext(stream)
        await until(lambda: not core.core.running)
        rest = [output async for output in stream]
        assert len(rest) <= 2
        assert len(first.outputs[0].token_ids) + sum(len(each.outputs[0].token_ids) for each in rest) == 100


@run
async def test_many_requests_at_once_do_not_mix() -> None:
    async with attached() as (_, llm):

        async def final(token_id: int) -> list[int]:
            params = SamplingParams(max_tokens=10, output_kind=RequestOutputKind.FINAL_ONLY)
            (output,) = [output async for output in llm.generate([token_id], params)]
            return output.outputs[0].token_ids

        found = await asyncio.gather(*(final(token_id) for token_id in range(100)))
        expected = [[hashed_token([token_id], 0, position) for position in range(10)] for token_id in range(100)]
        assert found == expected


@pytest.mark.parametrize("ids", [None, 5, ["a", None], np.array(1)])
def test_what_is_no_request_id_is_refused_by_abort(ids: object) -> None:
    async def test() -> None:
        async with attached() as (_, llm):
            with pytest.raises(InvalidRequestError, match="abort: request_id must be one or several texts, not"):
                await llm.abort(ids)  # type: ignore[arg-type]

    asyncio.run(test())


@run
async def test_what_is_no_request_id_is_refused_for_a_prompt_in_pieces() -> None:
    async def pieces() -> AsyncGenerator[StreamingInput, None]:
        yield StreamingInput("Hello")

    async with attached() as (_, llm):
        for no_id in (["a"], 5):
            with pytest.raises(InvalidRequestError, match="request_id must be a string"):
                await anext(llm.generate(pieces(), request_id=no_id))  # type: ignore[arg-type]


@run
async def test_the_number_of_an_adapter_must_be_one() -> None:
    async with attached() as (_, llm):
        for call in (llm.remove_lora, llm.pin_lora):
            with pytest.raises(InvalidRequestError, match="lora_id must be the number of a LoRARequest, not"):
                await call(["a"])  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["cancel", "break", "abort"])
def test_ending_early_aborts_the_request(how: str) -> None:
    endless = SamplingParams(max_tokens=None)

    async def test() -> None:
        async with attached(max_model_len=1_000_000) as (core, llm):
            core.pause()

            async def read() -> list[str | None]:
                return [output.outputs[0].finish_reason async for output in llm.generate("Hello", endless, "mine")]

            if how == "break":
                core.resume()
                stream = llm.generate("Hello", endless, "mine")
                await anext(stream)
                core.pause()
                await stream.aclose()  # type: ignore[attr-defined]
            else:
                reading = asyncio.create_task(read())
                await until(lambda: bool(core.core.running))
                if how == "cancel":
                    reading.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await reading
                else:
                    await llm.abort("mine")
                    assert (await reading)[-1] == "abort"
            await until(lambda: not core.core.running)
            aborts = [message for message in core.core.received if isinstance(message, Abort) and message.slots]
            assert [abort.slots for abort in aborts] == [(0,)]

    asyncio.run(asyncio.wait_for(test(), 30))


@run
async def test_a_running_requests_id_is_refused_and_an_ended_ones_is_free() -> None:
    async with attached() as (core, llm):
        core.pause()
        first = asyncio.create_task(anext(llm.generate("Hello", LONG, "same")))
        await until(lambda: bool(core.core.running))
        with pytest.raises(InvalidRequestError, match="'same' is running"):
            await anext(llm.generate("Hello", LONG, "same"))
        assert len(core.core.running) == 1
        core.resume()
        await first
        await llm.abort(["same", "unknown"])
        assert (await anext(llm.generate("Hello", LONG, "same"))).request_id == "same"


@run
async def test_a_callers_own_ids_are_never_those_of_requests_without_one() -> None:
    """Callers count their requests, and abort those that have ended to be sure."""
    async with attached() as (core, llm):
        core.pause()
        own = [await llm.add_request(str(number), "Hello", LONG) for number in range(8)]
        without = [asyncio.create_task(anext(llm.generate("Hello", LONG))) for _ in range(4)]
        beams = llm.beam_search("Hello", "beams", BeamSearchParams(beam_width=2, max_tokens=3))
        search = asyncio.create_task(anext(beams))
        await until(lambda: len(core.core.running) == 13)
        await llm.abort([str(number) for number in range(100)])
        core.resume()
        for each in without:
            assert (await each).outputs[0].finish_reason != "abort"
        assert len((await search).outputs) == 2
        for stream in own:
            assert (await stream.final()).outputs[0].finish_reason == "abort"


@run
async def test_one_id_is_not_had_by_requests_of_two_kinds() -> None:
    async with attached() as (core, llm):
        core.pause()
        params = BeamSearchParams(beam_width=1, max_tokens=2)
        search = asyncio.create_task(anext(llm.beam_search("Hello", "a", params)))
        running = asyncio.create_task(anext(llm.generate("Hello", LONG, "b")))
        await until(lambda: len(core.core.running) == 2)
        with pytest.raises(InvalidRequestError, match="'a' is running"):
            await anext(llm.generate("Hello", LONG, "a"))
        with pytest.raises(InvalidRequestError, match="'b' is running"):
            await anext(llm.beam_search("Hello", "b", params))
        core.resume()
        await asyncio.gather(search, running)


@run
async def test_a_bad_request_leaves_others_alone() -> None:
    async with attached() as (core, llm):
        with pytest.raises(InvalidRequestError, match="empty"):
            await anext(llm.generate("", LONG))
        with pytest.raises(InvalidRequestError, match="must be a SamplingParams"):
            await anext(llm.generate("Hello", {"temperature": 1}))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="priority must be an integer"):
            await anext(llm.generate("Hello", LONG, priority="high"))  # type: ignore[arg-type]
        assert not any(isinstance(message, AddRequest) for message in core.core.received)
        await anext(llm.generate("Hello", LONG))


@run
async def test_a_core_that_dies_ends_streams_and_health() -> None:
    async with attached(faults=Faults(fail_after_steps=3)) as (_, llm):
        await llm.check_health()
        with pytest.raises(EngineDeadError, match="ran out of memory"):
            async for _output in llm.generate("Hello", LONG):
                pass
        with pytest.raises(EngineDeadError, match="ran out of memory"):
            await llm.check_health()
        assert (llm.errored, llm.is_running, llm.is_stopped) == (True, False, True)
        assert isinstance(llm.dead_error, EngineDeadError)
        assert "ran out of memory" in str(llm.dead_error)


@run
async def test_an_engine_that_lives_has_no_cause_of_death_to_tell() -> None:
    async with attached() as (_, llm):
        assert (llm.errored, str(llm.dead_error)) == (False, "the engine is alive")


@run
async def test_closing_ends_what_runs() -> None:
    async with attached() as (core, llm):
        core.pause()
        reading = asyncio.create_task(anext(llm.generate("Hello", LONG)))
        await until(lambda: bool(core.core.running))
        await llm.close()
        assert (await reading).outputs[0].finish_reason == "abort"
        with pytest.raises(HeadraceError, match="closed"):
            await llm.check_health()


@run
async def test_shutdown_is_no_coroutine_and_ends_what_runs() -> None:
    async with attached() as (core, llm):
        core.pause()
        reading = asyncio.create_task(anext(llm.generate("Hello", LONG)))
        await until(lambda: bool(core.core.running))
        llm.shutdown()
        assert (await reading).outputs[0].finish_reason == "abort"
        with pytest.raises(HeadraceError, match="closed"):
            await llm.check_health()


def test_shutdown_leaves_nothing_to_a_loop_that_runs_no_more() -> None:
    """As after an exception that ended it."""
    core, loop = MemoryCore(FakeCore()), asyncio.new_event_loop()
    llm = loop.run_until_complete(AsyncLLM.attach(core.transport))
    llm.shutdown()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loop.close()
        gc.collect()
    core.stop()
    assert not [each for each in warned if "never awaited" in str(each.message)]


def test_another_loop_is_told() -> None:
    async def attach() -> tuple[MemoryCore, AsyncLLM]:
        core = MemoryCore(FakeCore())
        return core, await AsyncLLM.attach(core.transport)

    core, llm = asyncio.run(attach())
    with pytest.raises(HeadraceError, match="another asyncio loop"):
        asyncio.run(llm.check_health())
    core.stop()


@pytest.mark.parametrize("ended", [True, False])
def test_it_may_be_closed_in_another_loop(ended: bool) -> None:
    """As a script does that runs asyncio once for its requests and once more to close, or closes in a thread."""

    async def in_two_loops(core: MemoryCore) -> None:
        llm = await AsyncLLM.attach(core.transport)
        core.pause()
        reading = asyncio.create_task(anext(llm.generate("Hello", LONG)))
        await until(lambda: bool(core.core.running))
        await asyncio.to_thread(asyncio.run, llm.close())
        assert (await reading).outputs[0].finish_reason == "abort"

    with memory_core() as core:
        if ended:
            llm = asyncio.run(AsyncLLM.attach(core.transport))
            for _ in range(2):
                asyncio.run(llm.close())
            assert llm.is_stopped
            assert not llm._stop_engines.alive
        else:
            asyncio.run(in_two_loops(core))


@run
async def test_a_second_task_that_waits_for_an_output_is_refused() -> None:
    async with attached() as (core, llm):
        core.pause()
        stream = await llm.add_request("r", "Hello", LONG)
        first = asyncio.create_task(stream.get())
        await until(lambda: stream._waiter is not None)
        with pytest.raises(HeadraceError, match="request r: another task waits"):
            await stream.get()
        first.cancel()
        second = asyncio.create_task(stream.get())
        core.resume()
        assert (await second).request_id == "r"


@run
async def test_long_texts_are_tokenised_too() -> None:
    async with attached() as (_, llm):
        with pytest.raises(InvalidRequestError, match="maximum model length of 256"):
            await anext(llm.generate("x " * 10_000, LONG))


@run
async def test_connect_speaks_over_a_socket() -> None:
    with zmq_core() as core:
        llm = await AsyncLLM.connect(core.address)
        assert (await llm.engine()).model == "fake"
        assert (await llm.get_default_sampling_params()).max_tokens == 8
        outputs = [output async for output in llm.generate("Hello")]
        assert outputs[-1].outputs[0].finish_reason == "length"
        await llm.reset_prefix_cache()
        assert (await llm.get_stats()).num_running == 0
        await llm.close()


def test_one_that_is_not_closed_when_its_loop_ends_detaches() -> None:
    async def attach(address: str) -> None:
        llm = await AsyncLLM.connect(address)
        async for _ in llm.generate("Hello"):
            break

    with zmq_core() as core, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(attach(core.address))
        gc.collect()
        gc.freeze()  # what other tests hold is not walked through each round
        num_descriptors, rounds = num_open(), 12
        for _ in range(rounds):
            asyncio.run(attach(core.address))
            gc.collect()
        # The core, which is in this process too, closes its end of a connection some time after the client's.
        asyncio.run(until(lambda: num_open() < num_descriptors + rounds // 2))
        asyncio.run(until(lambda: not core.core.running))
    assert {each.category for each in caught if "was not closed" in str(each.message)} == {ResourceWarning}


def num_open() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
