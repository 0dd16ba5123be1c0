"""Requests outlive their engines: what comes after a move is what would have come without."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from fleet_parts import Session

from headrace import SamplingParams, StructuredOutputsParams
from headrace.core.engine.engine import EngineThread
from headrace.core.options.parsing import parse_options
from headrace.frontend.client.request_stream import RequestStream
from headrace.frontend.fleet.decisions import Affinity, RouterOptions
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.request.checks import check
from headrace.frontend.request.embeds import tensor_of
from headrace.frontend.request.outputs import RequestOutput
from headrace.frontend.request.prompts import Prompt
from headrace.ipc.codec import Tensor
from headrace.ipc.failure import EngineDeadError, Failure, HeadraceError, QueueFullError
from headrace.ipc.messages import Finish, FinishReason, Load
from headrace.ipc.prefix_names import PrefixKey, prefix_names
from headrace.ipc.row_inputs import RowInput, prompt_embeds_input

PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 30}}, "required": ["name"]}
LONG = {"max_tokens": 60, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "seeded": {"seed": 5, **LONG},
    "greedy": {"temperature": 0.0, **LONG},
    "log-probabilities": {"seed": 6, "logprobs": 3, **LONG},
    "prompt log-probabilities": {"seed": 7, "prompt_logprobs": 2, **LONG},
    "three outputs": {"seed": 8, "n": 3, "logprobs": 1, **LONG},
    "a schema": {
        "seed": 9,
        "max_tokens": 60,
        "structured_outputs": StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
    },
    "penalties": {"seed": 10, "repetition_penalty": 1.3, "presence_penalty": 0.5, "min_tokens": 40, "max_tokens": 60},
    "a stop string": {"seed": 11, "stop": ["zzzz", "qqqq"], **LONG},
    "in pieces": {"seed": 12, "stream_interval": 7, **LONG},
}
PROMPT = list(range(20, 60))
SIZES: dict[str, Any] = {
    "block_size": 8,
    "max_num_seqs": 16,
    "max_model_len": 128,
    "num_gpu_blocks_override": 200,
}


@pytest.fixture(scope="module")
def thread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineThread]:
    folder = tiny_models.save("llama", tmp_path_factory.mktemp("model"), tokenizer=True)
    thread = EngineThread(parse_options(model=str(folder), dtype="float32", enable_prompt_embeds=True, **SIZES))
    # Starts what tries grammars, which ends with the engine.
    run(thread, [SamplingParams(max_tokens=2, structured_outputs=StructuredOutputsParams(regex="a"))])
    yield thread
    thread.stop()


def run(
    thread: EngineThread,
    params: list[SamplingParams],
    disturb: Callable[[EnginePool, list[Session], list[RequestStream]], Any] | None = None,
    *,
    num_engines: int = 2,
    options: RouterOptions | None = None,
    threads: Sequence[EngineThread] = (),
    inputs: tuple[RowInput, ...] = (),
) -> tuple[list[RequestOutput | HeadraceError], EnginePool, list[RequestStream]]:
    """The final outputs (or errors) of as many requests as there are params, begun on engine 0.

    disturb: called once, at the step with which each of them has ten tokens or more; threads: of the engines, where
    these are not all of one core.
    """

    async def main() -> Any:
        sessions = [Session(each) for each in threads or [thread] * num_engines]
        pool, disturbed = EnginePool(sessions, options), asyncio.Event()
        pool.start()
        await asyncio.wait_for(pool.started.wait(), 60)

        def look() -> None:
            assert disturb is not None
            if all(stream.num_tokens >= 10 for stream in streams):
                sessions[0].on_step = None
                disturb(pool, sessions, streams)
                disturbed.set()

        if disturb is not None:
            sessions[0].on_step = look
        streams = [
            pool.submit(
                check(str(index), Prompt(token_ids=PROMPT, inputs=inputs), each, pool), affinity=Affinity(rank=0)
            )
            for index, each in enumerate(params)
        ]
        try:
            if disturb is not None:
                await asyncio.wait_for(disturbed.wait(), 60)
            outputs = await asyncio.wait_for(
                asyncio.gather(*(stream.final() for stream in streams), return_exceptions=True), 60
            )
            return outputs, pool, streams
        finally:
            await pool.close(0.0)

    return asyncio.run(main())


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def told(output: Any) -> Any:
    assert isinstance(output, RequestOutput), output
    return (
        output.prompt_logprobs,
        [
            (each.text, each.token_ids, each.logprobs, each.finish_reason, each.cumulative_logprob)
            for each in output.outputs
        ],
    )


def close(one: Any, other: Any) -> bool:
    """Equal but for the last digits of log-probabilities: a prompt that is computed again rounds otherwise."""
    if isinstance(one, float):
        return one == pytest.approx(other, abs=1e-4)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(close, one, other))
    if hasattr(one, "logprob"):
        return close((one.logprob, one.rank, one.decoded_token), (other.logprob, other.rank, other.decoded_token))
    return bool(one == other)


def in_lock_step() -> None:
    """As a session's `on_step`: the core is never a step ahead of the client's loop."""


def kill_first(pool: EnginePool, sessions: list[Session], streams: list[RequestStream]) -> None:
    sessions[0].kill()


def test_requests_of_every_kind_go_on_with_the_same_tokens(thread: EngineThread) -> None:
    params = [SamplingParams(**each) for each in KINDS.values()]
    expected, _, _ = run(thread, params, num_engines=1)
    outputs, pool, _ = run(thread, params, kill_first)
    for name, output, undisturbed in zip(KINDS, outputs, expected, strict=True):
        assert close(told(output), told(undisturbed)), name
    assert pool.router.migrations == {"died": len(KINDS)}
    assert not pool.router.held
    assert all(not member.requests for member in pool.router.members.values())


def test_embeddings_go_on_with_their_request(thread: EngineThread) -> None:
    values = torch.randn(12, 64, generator=torch.Generator().manual_seed(3))
    given = (prompt_embeds_input(tensor_of(values), 20),)
    params = [SamplingParams(seed=1, **LONG), SamplingParams(seed=2, logprobs=1, **LONG)]
    expected, _, _ = run(thread, params, num_engines=1, inputs=given)
    outputs, pool, _ = run(thread, params, kill_first, inputs=given)
    assert close([told(each) for each in outputs], [told(each) for each in expected])
    assert pool.router.migrations == {"died": 2}
    others, _, _ = run(thread, params, num_engines=1)
    assert told(others[0]) != told(expected[0])


def test_an_engine_tells_how_long_it_took_to_compute_a_request_again(thread: EngineThread) -> None:
    """And counts the tokens that follow as what they are: decoded."""
    began_s = time.monotonic()
    (output,), _, _ = run(thread, [SamplingParams(seed=5, max_tokens=80, ignore_eos=True)], kill_first)
    took_s = time.monotonic() - began_s
    assert isinstance(output, RequestOutput)
    metrics = output.metrics
    assert metrics is not None
    assert metrics.prefill_s is not None
    assert metrics.decode_s is not None
    assert 0.0 < metrics.prefill_s < metrics.decode_s < took_s, "one step, and more than fifty"


def test_a_request_without_a_seed_goes_on_with_the_one_that_was_drawn(thread: EngineThread) -> None:
    outputs, _, (stream,) = run(thread, [SamplingParams(**LONG)], kill_first)
    seed = stream.sequences[0].seed
    assert seed is not None
    expected, _, _ = run(thread, [SamplingParams(seed=seed, **LONG)], num_engines=1)
    assert told(outputs[0]) == told(expected[0])


def test_a_silent_engine_loses_its_requests_and_what_it_says_later_is_ignored(thread: EngineThread) -> None:
    def freeze(pool: EnginePool, sessions: list[Session], streams: list[RequestStream]) -> None:
        sessions[0].is_deaf = True

    expected, _, _ = run(thread, [SamplingParams(seed=1, **LONG)], num_engines=1)
    options = RouterOptions(suspect_after_s=0.3)
    outputs, pool, _ = run(thread, [SamplingParams(seed=1, **LONG)], freeze, options=options)
    assert told(outputs[0]) == told(expected[0])
    assert pool.router.migrations["silent"] == 1


def test_a_paused_engine_says_so_and_keeps_its_requests(thread: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Load] = []
    monkeypatch.setattr(thread.port, "set_load", lambda load, clients: loads.append(load))
    tasks: list[asyncio.Task[None]] = []

    async def pause_for_a_while(pool: EnginePool) -> None:
        engine = pool.engines[0]
        assert engine.client is not None
        await engine.client.pause_generation("keep")
        await _until(lambda: loads[-1].is_paused)
        for _ in range(10):  # as a port over ZeroMQ tells it, again and again
            engine.on_load(loads[-1])
            await asyncio.sleep(0.1)
        await engine.client.resume_generation()

    def pause(pool: EnginePool, sessions: list[Session], streams: list[RequestStream]) -> None:
        sessions[0].on_step = in_lock_step  # or it might be done before it is asked to pause
        tasks.append(asyncio.ensure_future(pause_for_a_while(pool)))

    params = [SamplingParams(seed=1, max_tokens=80, ignore_eos=True)]
    expected, _, _ = run(thread, params, num_engines=1)
    outputs, pool, _ = run(thread, params, pause, options=RouterOptions(stalled_after_s=0.3))
    tasks[0].result()
    assert told(outputs[0]) == told(expected[0])
    assert not pool.router.migrations


def test_without_migrations_a_request_ends_with_its_engine(thread: EngineThread) -> None:
    (error,), _, _ = run(thread, [SamplingParams(**LONG)], kill_first, options=RouterOptions(max_migrations=0))
    assert isinstance(error, EngineDeadError)
    assert "this request ends with its engine (max_migrations is 0)" in str(error)
    assert "it was killed" in str(error)


def test_without_another_engine_a_request_fails_with_the_cause(thread: EngineThread) -> None:
    (error,), pool, _ = run(thread, [SamplingParams(**LONG)], kill_first, num_engines=1)
    assert isinstance(error, EngineDeadError)
    assert "it was killed" in str(error)
    assert pool.failure is not None


def test_an_abort_reaches_a_request_where_it_went(thread: EngineThread) -> None:
    def kill_and_abort(pool: EnginePool, sessions: list[Session], streams: list[RequestStream]) -> None:
        kill_first(pool, sessions, streams)
        sessions[1].on_step = in_lock_step  # or it might be done before the abort
        asyncio.get_running_loop().call_later(0.0, lambda: pool.abort(["0"]))

    (output,), pool, _ = run(thread, [SamplingParams(seed=3, max_tokens=80, ignore_eos=True)], kill_and_abort)
    assert isinstance(output, RequestOutput)
    assert output.outputs[0].finish_reason == "abort"
    assert not len(pool)


def test_a_request_that_one_engine_refuses_goes_to_another(thread: EngineThread) -> None:

    full = Failure(message="the queue is full", type=QueueFullError.__name__, retry_after_s=5.0)

    def refuse(pool: EnginePool, sessions: list[Session], streams: list[RequestStream]) -> None:
        client = pool.engines[0].client
        assert client is not None
        slot = streams[0].sequences[0].slot
        client.requests._on_finish(streams[0].sequences[0], Finish(slot=slot, reason=FinishReason.FAILED, failure=full))

    expected, _, _ = run(thread, [SamplingParams(seed=1, **LONG)], num_engines=1)
    outputs, pool, _ = run(thread, [SamplingParams(seed=1, **LONG)], refuse)
    assert told(outputs[0]) == told(expected[0])
    assert pool.router.migrations == {"refused": 1}


def test_a_frontend_chooses_by_what_others_have_left_in_the_engines_caches(thread: EngineThread) -> None:
    """And not only by what it has sent there itself."""

    async def main() -> tuple[int, str, dict[str, int]]:
        long = [5 + each % 90 for each in range(100)]
        sessions = [[Session(thread), Session(thread)] for _ in range(2)]
        pools = [EnginePool(each) for each in sessions]
        for pool in pools:
            pool.start()
            await asyncio.wait_for(pool.started.wait(), 60)
        first = pools[0].submit(check("first", Prompt(token_ids=long), SamplingParams(max_tokens=2), pools[0]))
        await asyncio.wait_for(first.final(), 60)
        key = PrefixKey(weights=next(iter(pools[0].router.members.values())).facts.weights)
        index, keys = pools[1].router.prefixes, prefix_names(bytes(Tensor.of("int32", long).data), key, 64)
        await asyncio.wait_for(_until(lambda: bool(index.holders(keys, -1))), 60)
        second = pools[1].submit(check("second", Prompt(token_ids=long), SamplingParams(max_tokens=2), pools[1]))
        expected = second.route.expected_cached_tokens
        await asyncio.wait_for(second.final(), 60)
        counts = pools[1].router.counts()
        for pool in pools:
            await pool.close(0.0)
        return expected, str(counts["choices"]), dict(counts["prompt_tokens"])

    expected, choices, tokens = asyncio.run(main())
    assert expected == 64
    assert "'prefix': 1" in choices
    assert 64 <= tokens["cached"] <= 96


@pytest.fixture(scope="module")
def trained_on(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of the same config, by the same name."""
    folder = tiny_models.save("llama", tmp_path_factory.mktemp("trained on") / "model", seed=1, tokenizer=True)
    return str(folder)


def test_a_stream_goes_on_only_where_the_same_weights_are(trained_on: str, tmp_path: Path) -> None:
    """Of two engines that were started from one folder, one after it was given other weights."""
    folder, threads = tiny_models.save("llama", tmp_path / "model", tokenizer=True), list[EngineThread]()
    try:
        threads.append(EngineThread(parse_options(model=str(folder), dtype="float32", **SIZES)))
        folder.rename(tmp_path / "former")
        shutil.copytree(trained_on, folder)
        threads.append(EngineThread(parse_options(model=str(folder), dtype="float32", **SIZES)))
        (error,), pool, _ = run(threads[0], [SamplingParams(seed=1, **LONG)], kill_first, threads=threads)
        assert isinstance(error, EngineDeadError)
        assert len(pool.router.members) == 1
    finally:
        for each in threads:
            each.stop()


def test_other_models_under_one_name_are_told_and_other_tokenizers_loudly(
    thread: EngineThread, caplog: pytest.LogCaptureFixture
) -> None:
    null = "headrace.executor.testing.null:NullExecutor"
    name = thread._core.welcome.model
    other = EngineThread(parse_options(model="null", served_model_name=(name,), distributed_executor_backend=null))
    try:
        with caplog.at_level(logging.WARNING):
            run(thread, [SamplingParams(max_tokens=1)], threads=[thread, thread])
            assert not caplog.text
            run(thread, [SamplingParams(max_tokens=1)], threads=[thread, other])
        said = f"engine 1 has null, and others serve {name} under the same name with another tokenizer"
        assert caplog.text.count(said) == 1
    finally:
        other.stop()


def test_weights_that_are_read_anew_make_an_engine_another(thread: EngineThread, trained_on: str) -> None:
    async def main() -> list[set[str]]:
        pool = EnginePool([Session(thread), Session(thread)])
        pool.start()
        await asyncio.wait_for(pool.started.wait(), 60)
        seen = []

        def versions() -> set[str]:
            return {member.facts.version for member in pool.router.members.values()}

        seen.append(versions())
        client = pool.engines[0].client
        assert client is not None
        for path in (trained_on, None):
            await client.reload_weights(path)
            await asyncio.wait_for(_until(lambda: len(versions()) == 1 and versions() != seen[-1]), 60)
            seen.append(versions())
        await pool.close(0.0)
        return seen

    before, meanwhile, after = asyncio.run(main())
    assert before == after != meanwhile


class Foreign(Session):
    """Of an engine that somebody else runs: nobody knows whether it will be there again."""

    is_awaited = False  # type: ignore[assignment]


def test_requests_wait_for_one_of_several_foreign_engines_when_none_is_left(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(seed=5, **LONG)

    async def main(comes_back: bool) -> Any:
        sessions = [Foreign(thread, num_lives=2 if comes_back else 100) for _ in range(2)]
        pool = EnginePool(sessions)
        pool.start()
        await asyncio.wait_for(pool.started.wait(), 60)

        def look() -> None:
            has_it = stream.route.member if stream.route is not None else None
            if stream.num_tokens < 10 or has_it is None:
                return
            for session in sessions:
                session.on_step = None
                if not comes_back:
                    session.open = _nobody  # type: ignore[method-assign]
            for index in (1 - has_it.facts.rank, has_it.facts.rank):  # or two would have died with it
                sessions[index].kill()

        for session in sessions:
            session.on_step = look
        stream = pool.submit(check("0", Prompt(token_ids=PROMPT), params, pool))
        try:
            return await asyncio.wait_for(stream.final(), 60)
        finally:
            await pool.close(0.0)

    ((expected,), _, _) = run(thread, [params])
    assert close(told(asyncio.run(main(True))), told(expected))
    monkeypatch.setattr("headrace.frontend.fleet.requests.HELD_S", 0.3)
    with pytest.raises(EngineDeadError, match="it was killed"):
        asyncio.run(main(False))


async def _nobody() -> Any:
    raise EngineDeadError("nobody listens there")


class Late(Foreign):
    """Of an engine that is not there at first."""

    num_misses = 3

    async def open(self) -> Any:
        if self.num_misses:
            self.num_misses -= 1
            raise EngineDeadError("nobody listens there yet")
        return await super().open()


@pytest.mark.system
def test_of_several_foreign_engines_some_may_come_after_the_start(thread: EngineThread) -> None:
    async def main(sessions: list[Session], num_engines: int) -> HeadraceError | None:
        pool = EnginePool(sessions)
        pool.start()
        try:
            dead = asyncio.ensure_future(pool.dead.wait())
            started = asyncio.ensure_future(pool.started.wait())
            await asyncio.wait([dead, started], timeout=60, return_when=asyncio.FIRST_COMPLETED)
            if dead.done():
                assert pool.failure is not None
                assert not started.done()
                return HeadraceError.from_failure(pool.failure)
            await asyncio.wait_for(_until(lambda: len(pool.router.members) == num_engines), 60)
            return None
        finally:
            await pool.close(0.0)

    assert asyncio.run(main([Foreign(thread, num_lives=9), Late(thread, num_lives=9)], 2)) is None
    for none_there in ([Late(thread, num_lives=9)], [Late(thread, num_lives=9), Late(thread, num_lives=9)]):
        assert "nobody listens there yet" in str(asyncio.run(main(list(none_there), 0)))
