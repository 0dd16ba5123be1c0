"""A prompt that comes in pieces, and loggers of one's own: what vLLM's tests of AsyncLLM demand of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import pytest

from headrace import AsyncLLM, InvalidRequestError, RequestOutput, RequestOutputKind, SamplingParams
from headrace.engine.protocol import StreamingInput
from headrace.frontend.request.outputs import FlatLogprobs

DELTA = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
PIECES = ("Hello, my name is", " Bob and I work", " at the mill")


def attached(address: str, work: Any) -> Any:
    async def run() -> Any:
        llm = await AsyncLLM.connect(address)
        try:
            return await work(llm)
        finally:
            await llm.close()

    return asyncio.run(asyncio.wait_for(run(), 60))


async def bunched(*pieces: Any) -> AsyncGenerator[StreamingInput, None]:
    for piece in pieces:
        yield piece if isinstance(piece, StreamingInput) else StreamingInput(prompt=piece)


async def taken(outputs: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in outputs]


def token_ids(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.outputs[0].token_ids]


# tests/v1/e2e/general/test_streaming_input.py: bunched, spaced, equivalence, close_signals_completion
def test_pieces_are_answered_in_turn_whether_they_come_together_or_apart(address: str) -> None:
    async def work(llm: AsyncLLM) -> None:
        answered = asyncio.Event()

        async def spaced() -> AsyncGenerator[StreamingInput, None]:
            for piece in PIECES:
                answered.clear()
                yield StreamingInput(prompt=piece)
                await answered.wait()

        together = await taken(llm.generate(bunched(*PIECES), DELTA, "same"))
        apart: list[RequestOutput] = []
        async for output in llm.generate(spaced(), DELTA, "same"):
            apart.append(output)
            if len(token_ids(apart)) in (5, 10, 15):
                answered.set()
        for outputs in (together, apart):
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert len(token_ids(outputs)) == 15
        assert token_ids(together) == token_ids(apart)
        assert (await llm.get_stats()).num_running == 0

    attached(address, work)


# tests/v1/streaming_input/test_scheduler_streaming.py: the last sampled token is not kept, all others are
def test_an_answer_is_part_of_the_next_prompt_but_for_its_last_token(address: str) -> None:
    async def work(llm: AsyncLLM) -> None:
        tokenizer = await llm.get_tokenizer()
        outputs = await taken(llm.generate(bunched(*PIECES[:2]), DELTA, "session"))
        first, second = token_ids(outputs)[:5], token_ids(outputs)[5:]
        prompt = [*tokenizer.encode(PIECES[0]), *first[:-1], *tokenizer.encode(PIECES[1])]
        (whole,) = await taken(llm.generate({"prompt_token_ids": prompt}, _final(DELTA)))
        assert whole.outputs[0].token_ids == second
        assert outputs[-1].prompt_token_ids == prompt
        assert outputs[-1].num_cached_tokens is not None
        cumulative = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        told = await taken(llm.generate(bunched(*PIECES[:2]), cumulative))
        assert told[-1].outputs[0].token_ids == [*first, *second]
        assert [len(output.outputs[0].token_ids) for output in told] == sorted(
            len(output.outputs[0].token_ids) for output in told
        )

    attached(address, work)


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
@pytest.mark.parametrize("is_flat", [False, True])
def test_log_probabilities_are_those_of_all_answers(address: str, kind: RequestOutputKind, is_flat: bool) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=5, ignore_eos=True, logprobs=1, flat_logprobs=is_flat, output_kind=kind
    )

    async def work(llm: AsyncLLM) -> None:
        told = await taken(llm.generate(bunched(*PIECES), params))
        rows: list[Any] = []
        for output in told:
            found = output.outputs[0].logprobs or ()
            assert isinstance(found, FlatLogprobs) == is_flat or not found
            rows = [*rows, *found] if kind is RequestOutputKind.DELTA else list(found)
            chosen = token_ids(told) if kind is RequestOutputKind.DELTA else output.outputs[0].token_ids
            total = sum(row[token].logprob for row, token in zip(rows, chosen, strict=False))
            assert output.outputs[0].cumulative_logprob == pytest.approx(total)
        assert len(rows) == 15
        plain = StreamingInput(PIECES[1], sampling_params=params.clone())
        plain.sampling_params.logprobs = None
        mixed = await taken(llm.generate(bunched(PIECES[0], plain), params))
        five = sum(row[token].logprob for row, token in zip(rows[:5], chosen[:5], strict=True))
        assert mixed[-1].outputs[0].cumulative_logprob == pytest.approx(five)

    attached(address, work)


def _final(params: SamplingParams) -> SamplingParams:
    twin = params.clone()
    twin.output_kind = RequestOutputKind.FINAL_ONLY
    return twin


# test_streaming_input.py: empty_generator, single_chunk, per_chunk_sampling_params, delayed_generator_exit, reuse
def test_sessions_of_no_and_of_one_piece_and_parameters_of_a_piece(address: str) -> None:
    async def work(llm: AsyncLLM) -> None:
        assert await taken(llm.generate(bunched(), DELTA, "again")) == []
        assert len(token_ids(await taken(llm.generate(bunched("one"), DELTA, "again")))) == 5
        short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        outputs = await taken(llm.generate(bunched("one", StreamingInput("two", short), "three"), DELTA, "again"))
        assert len(token_ids(outputs)) == 5 + 2 + 5

        answered = asyncio.Event()

        async def ends_late() -> AsyncGenerator[StreamingInput, None]:
            yield StreamingInput("one")
            await answered.wait()

        told: list[RequestOutput] = []
        async for output in llm.generate(ends_late(), DELTA, "late"):
            told.append(output)
            if len(token_ids(told)) == 5:
                answered.set()
        assert (told[-1].finished, told[-1].outputs[0].token_ids, told[-2].finished) == (True, [], False)

    attached(address, work)


# test_streaming_input.py: error_propagation, cancel_output_stream, abort_queued_inputs
def test_an_error_of_the_generator_and_an_end_of_the_reader_end_the_session(address: str) -> None:
    closed: list[str] = []

    async def failing() -> AsyncGenerator[StreamingInput, None]:
        yield StreamingInput("one")
        raise KeyError("the microphone is gone")

    async def endless() -> AsyncGenerator[StreamingInput, None]:
        try:
            while True:
                yield StreamingInput("more")
                await asyncio.sleep(0)
        finally:
            closed.append("endless")

    async def work(llm: AsyncLLM) -> None:
        with pytest.raises(KeyError, match="microphone"):
            await taken(llm.generate(failing(), DELTA, "failing"))
        outputs = llm.generate(endless(), DELTA, "endless")
        await anext(outputs)
        await outputs.aclose()
        assert closed == ["endless"]
        aborted: list[RequestOutput] = []
        long = SamplingParams(max_tokens=150, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        async for output in llm.generate(endless(), long, "endless"):
            aborted.append(output)
            await llm.abort("endless")
        assert aborted[-1].finished
        assert aborted[-1].outputs[0].finish_reason == "abort"
        await llm.wait_for_requests_to_drain(30)

    attached(address, work)


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("asked", [(None, 2), (2, None, 1), (None, None, 0)])
def test_log_probabilities_stand_at_their_tokens_though_a_piece_asks_for_none(
    address: str, asked: tuple[int | None, ...], is_flat: bool
) -> None:
    def params(num: int | None) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=num, flat_logprobs=is_flat)

    async def work(llm: AsyncLLM) -> None:
        pieces = [StreamingInput(text, params(num)) for text, num in zip(PIECES, asked, strict=False)]
        last = (await taken(llm.generate(bunched(*pieces), params(None), "partly")))[-1].outputs[0]
        assert last.logprobs is not None
        assert len(last.logprobs) == len(last.token_ids) == 3 * len(asked)
        for nth, token_id in enumerate(last.token_ids):
            assert (token_id in last.logprobs[nth]) == (asked[nth // 3] is not None)

    attached(address, work)


def test_outputs_have_the_texts_of_all_pieces_and_the_last_what_the_others_have(address: str) -> None:
    async def work(llm: AsyncLLM) -> None:
        async def late() -> AsyncGenerator[StreamingInput, None]:
            yield StreamingInput(PIECES[0])
            yield StreamingInput(PIECES[1])
            await asyncio.sleep(0.3)  # after the answer

        outputs = await taken(llm.generate(late(), DELTA, "texts"))
        assert outputs[0].prompt == PIECES[0]
        assert outputs[-1].prompt == PIECES[0] + PIECES[1]
        assert outputs[-1].num_cached_tokens == outputs[-2].num_cached_tokens is not None

    attached(address, work)


@pytest.mark.parametrize("answered", [0, 1])
def test_a_session_that_is_aborted_while_it_waits_for_a_piece_says_so(address: str, answered: int) -> None:
    async def work(llm: AsyncLLM) -> None:
        waits = asyncio.Event()

        async def pieces() -> AsyncGenerator[StreamingInput, None]:
            for text in PIECES[:answered]:
                yield StreamingInput(text)
            waits.set()
            await asyncio.Event().wait()

        session = asyncio.create_task(taken(llm.generate(pieces(), DELTA, "aborted")))
        await waits.wait()
        while (await llm.get_stats()).num_finished < answered:
            await asyncio.sleep(0.01)
        await llm.abort("aborted")
        last = (await session)[-1]
        assert last.finished
        assert last.outputs[0].finish_reason == "abort"
        assert last.request_id == "aborted"

    attached(address, work)


@pytest.mark.parametrize("piece", [None, "the mill", 5, ValueError("no piece")])
def test_what_is_no_piece_ends_its_session_by_name(address: str, piece: Any) -> None:
    async def work(llm: AsyncLLM) -> None:
        async def pieces() -> AsyncGenerator[Any, None]:
            yield StreamingInput(PIECES[0])
            yield piece
            yield StreamingInput(PIECES[1])

        with pytest.raises(InvalidRequestError, match="generator must yield StreamingInput"):
            await taken(llm.generate(pieces(), DELTA, "odd"))

    attached(address, work)


# test_streaming_input.py::test_streaming_input_validation_errors
def test_what_fits_no_session_is_refused(address: str) -> None:
    async def work(llm: AsyncLLM) -> None:
        for params in (
            SamplingParams(n=2),
            SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY),
            SamplingParams(stop="x"),
        ):
            with pytest.raises(InvalidRequestError, match="Input streaming not currently supported"):
                await taken(llm.generate(bunched("one"), params))
            with pytest.raises(InvalidRequestError, match="Input streaming not currently supported"):
                await taken(llm.generate(bunched(StreamingInput("one", params)), DELTA))
        with pytest.raises(InvalidRequestError, match="a prompt is a string"):
            await taken(llm.generate(bunched(7), DELTA))

    attached(address, work)


# test_streaming_input.py::test_streaming_input_multiple_concurrent_sessions
def test_sessions_run_beside_each_other(address: str) -> None:
    async def work(llm: AsyncLLM) -> None:
        sessions: list[Coroutine[Any, Any, list[RequestOutput]]] = [
            taken(llm.generate(bunched(f"session {number}", " goes on"), DELTA, f"s{number}")) for number in range(3)
        ]
        assert [len(token_ids(outputs)) for outputs in await asyncio.gather(*sessions)] == [10, 10, 10]

    attached(address, work)
