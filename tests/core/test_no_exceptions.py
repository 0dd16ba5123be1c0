"""A library's panic, an exit and a cancellation are no Exceptions. Raised by what others wrote, they fail the work that
was asked for, and neither the engine, its threads, nor other requests."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import types
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import zmq

from headrace import LLM, AsyncLLM, EngineDeadError, OptionError, SamplingParams
from headrace.core.schedule.features.feature import StepFeature
from headrace.executor.sampling.logits_processors import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor
from headrace.executor.testing.null import NullExecutor
from headrace.frontend.api.streaming_input import StreamingInput
from headrace.frontend.client.own_engine import run_in_process
from headrace.frontend.client.transport import MemoryTransport
from headrace.ipc.failure import EngineStartError, HeadraceError
from headrace.ipc.plugins import load_class, made
from headrace.ipc.step import StepPlan
from headrace.ipc.transport.sockets import CutShortError, send_whole


class PanicException(BaseException):
    """As a library in Rust raises it."""


KINDS = {each.__name__: each for each in (PanicException, SystemExit, asyncio.CancelledError, GeneratorExit)}
kinds = pytest.mark.parametrize("kind", KINDS)
ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "skip_tokenizer_init": True, "in_process": True}
NULL: dict[str, Any] = {"skip_tokenizer_init": True}


def raised(wanted: str, where: str) -> None:
    """wanted: "PLACE KIND"."""
    place, _, kind = wanted.partition(" ")
    if place == where:
        raise KINDS[kind]("as was asked")


def asked(params: Any) -> str:
    return str((params.extra_args or {}).get("raises", ""))


class Raising(LogitsProcessor):
    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        raised(asked(sampling_params), "validate")

    def __init__(self, *arguments: Any) -> None:
        self.asked: dict[int, str] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        for index in batch_update.removed if batch_update else ():
            self.asked.pop(index, None)
        for index, params, _, _ in batch_update.added if batch_update else ():
            self.asked[index] = asked(params)
            raised(asked(params), "update")

    def apply(self, logits: Any) -> Any:
        for each in self.asked.values():
            raised(each, "apply")
        return logits


class RaisingForOne(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        raised(asked(params), "make")

        def process(output: list[int], logits: Any) -> Any:
            raised(asked(params), "process")
            return logits

        return process


class Extension:
    def leave(self, kind: str) -> None:
        raise KINDS[kind]("as was asked")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tiny_models.save("llama", tmp_path_factory.mktemp("model"))
    processors = [f"{__name__}:{each.__name__}" for each in (Raising, RaisingForOne)]
    extension = f"{__name__}:Extension"
    with LLM(str(folder), **ENGINE, logits_processors=processors, worker_extension_cls=extension) as llm:
        yield llm


@kinds
@pytest.mark.parametrize("place", ["validate", "update", "apply", "make", "process"])
def test_a_logits_processor_fails_its_request_alone(llm: LLM, place: str, kind: str) -> None:
    plain = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    (expected,) = llm.generate([[5, 6, 7]], plain, use_tqdm=False)
    bad = SamplingParams(max_tokens=4, extra_args={"raises": f"{place} {kind}"})
    ids = llm.enqueue([[5, 6, 7]], plain, use_tqdm=False)
    with pytest.raises(HeadraceError, match="as was asked"):
        llm.generate([[9, 8]], bad, use_tqdm=False)
    (neighbour,) = llm.wait_for_completion(use_tqdm=False)
    assert neighbour.request_id in ids
    assert neighbour.outputs[0].token_ids == expected.outputs[0].token_ids


@kinds
def test_a_worker_extension_fails_its_call_alone(llm: LLM, kind: str) -> None:
    with pytest.raises(HeadraceError, match=f"{kind}: as was asked"):
        llm.collective_rpc("leave", args=(kind,))
    assert llm.generate([[5]], SamplingParams(max_tokens=2), use_tqdm=False)


@kinds
def test_a_module_that_raises_while_it_is_imported_is_a_wrong_option(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"leaves_with_{kind.lower()}.py").write_text(
        f"import asyncio\nclass PanicException(BaseException): ...\n"
        f"raise {KINDS[kind].__module__.partition('.')[0] + '.' if kind == 'CancelledError' else ''}{kind}('at import')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OptionError, match=f"cannot be loaded: {kind}: at import"):
        load_class("logits_processors", f"leaves_with_{kind.lower()}:Anything")


@kinds
def test_a_step_feature_that_cannot_be_made_is_a_wrong_option(kind: str) -> None:
    def __init__(self: Any) -> None:
        raise KINDS[kind]("as was asked")

    leaving = type("Leaving", (StepFeature,), {"__init__": __init__})
    entry: Any = types.SimpleNamespace(name="its", value="value", load=lambda: leaving)
    with pytest.raises(OptionError, match=r"the step feature its, value, cannot be made.*as was asked"):
        made(entry, "step feature", StepFeature)


class Leaving(NullExecutor):
    """Raises in the step, or while it loads, what its model's `crash_step` or `load_delay_s` stand for."""

    def submit(self, plan: StepPlan) -> None:
        raise SystemExit(0)


class NeverThere(NullExecutor):
    def describe(self, report: Any) -> Any:
        raise SystemExit(0)


def test_an_executor_that_exits_in_a_step_is_an_engine_that_died() -> None:
    deaths: queue.SimpleQueue[Any] = queue.SimpleQueue()
    backend = f"{__name__}:Leaving"
    engine = run_in_process("null", {**NULL, "distributed_executor_backend": backend})
    engine.on_exit(deaths.put)
    with LLM.attach(MemoryTransport(engine.port)) as llm:
        with pytest.raises(EngineDeadError, match="SystemExit"):
            llm.generate([[5]], SamplingParams(max_tokens=2), use_tqdm=False)
        assert deaths.get(timeout=30).type == "SystemExit"
    engine.stop()


def test_an_executor_that_exits_at_the_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    with pytest.raises(EngineStartError, match="SystemExit"):
        LLM("null", **NULL, distributed_executor_backend=f"{__name__}:NeverThere")


@pytest.mark.parametrize("error", [KeyboardInterrupt, PanicException, MemoryError])
def test_a_message_that_is_interrupted_is_ended(error: type[BaseException]) -> None:
    """Else the next one would be taken for its rest."""
    sent: list[tuple[bytes, int]] = []

    def send(frame: bytes, flags: int = 0, **_: Any) -> None:
        if frame == b"breaks":
            raise error("here")
        sent.append((frame, flags))

    sock: Any = types.SimpleNamespace(send=send)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else CutShortError):
        send_whole(sock, b"to", [b"first", b"breaks"])
    last, flags = sent[-1]
    assert not last
    assert not flags & zmq.SNDMORE


@kinds
def test_input_that_raises_ends_its_request(kind: str) -> None:
    async def pieces() -> AsyncGenerator[StreamingInput, None]:
        yield StreamingInput(prompt={"prompt_token_ids": [5, 6]})
        raise KINDS[kind]("as was asked")

    async def test() -> None:
        llm = await AsyncLLM.attach(MemoryTransport(engine.port))
        try:
            async for _ in llm.generate(pieces(), SamplingParams(max_tokens=2), "id"):
                pass
        finally:
            llm.shutdown()

    backend = "headrace.executor.testing.null:NullExecutor"
    engine = run_in_process("null", {**NULL, "distributed_executor_backend": backend})
    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(KINDS[kind], match="as was asked"):
            loop.run_until_complete(asyncio.wait_for(test(), 60))
    finally:
        loop.close()
        engine.stop()
