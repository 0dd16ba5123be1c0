"""What waits when its LLM is closed, forgotten or forked ends: with its outputs so far, or with an error."""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_core import MemoryCore, expected_text, memory_core
from fake_llm import core, llm
from patience import wait_until, within

from headrace import LLM, HeadraceError, SamplingParams
from headrace.frontend.api import sync_stream
from headrace.frontend.client.background import BackgroundLoop
from headrace.frontend.text.template_renderer import TemplateRenderer, renderer

__all__ = ["core", "llm"]  # fixtures
pytestmark = pytest.mark.usefixtures("private_cache")
LONG = SamplingParams(max_tokens=60)


class InThread:
    """A call on a thread of its own, and what it returned or raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def run() -> None:
            try:
                self._outcome.put(call())
            except BaseException as error:
                self._outcome.put(error)

        threading.Thread(target=run, daemon=True).start()

    def outcome(self) -> Any:
        return self._outcome.get(timeout=within(20.0))


def test_a_stream_that_is_read_slowly_ends_when_its_llm_is_closed(
    llm: LLM, core: MemoryCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_stream, "MOST_UNREAD", 1)
    core.pause()
    stream = llm.stream("Hello", LONG)
    wait_until(lambda: bool(core.core.running), 20.0, "the request's start")
    for num_unread in (1, 2, 2, 2):
        for _, outputs in core.core.step():
            core.transport.push(outputs)
        wait_until(lambda num=num_unread: stream._outputs.qsize() == num, 20.0, "an output")
    llm.close()
    pieces = InThread(lambda: list(stream)).outcome()
    text = "".join(piece.outputs[0].text for piece in pieces)
    assert pieces[-1].outputs[0].finish_reason == "abort"
    assert text == expected_text(llm, pieces[0].prompt_token_ids, 4)


def test_a_stream_may_be_read_by_several_threads(llm: LLM) -> None:
    stream = llm.stream("Hello", LONG)
    readers = [InThread(lambda: list(stream)) for _ in range(3)]
    pieces = [piece for reader in readers for piece in reader.outcome()]
    assert sum(len(piece.outputs[0].token_ids) for piece in pieces) == 60


def test_a_stream_that_another_thread_closes_ends(llm: LLM, core: MemoryCore) -> None:
    core.pause()
    stream = llm.stream("Hello", LONG)
    reader = InThread(lambda: list(stream))
    stream.close()
    assert reader.outcome() == []


def test_a_stream_keeps_its_llm(core: MemoryCore) -> None:
    pieces = list(LLM.attach(core.transport).stream("Hello", LONG))
    assert pieces[-1].outputs[0].finish_reason == "length"
    assert sum(len(piece.outputs[0].token_ids) for piece in pieces) == 60


@pytest.fixture
def background() -> Iterator[BackgroundLoop]:
    running = BackgroundLoop("test")
    yield running
    running.stop()


async def for_ever() -> None:
    await asyncio.Event().wait()


def test_a_wait_ends_when_the_loop_is_stopped(background: BackgroundLoop) -> None:
    waits = [InThread(lambda: background.run(for_ever())) for _ in range(3)]
    wait_until(lambda: len(asyncio.all_tasks(background.loop)) == 3, 20.0, "the waits")
    background.stop()
    for wait in waits:
        assert str(wait.outcome()) == "this LLM is closed"


def test_a_wait_that_begins_while_the_loop_stops_ends(background: BackgroundLoop) -> None:
    background.loop.call_soon_threadsafe(background.loop.stop)
    background._is_stopping = True
    background._thread.join(within(20.0))
    assert str(InThread(lambda: background.run(for_ever())).outcome()) == "this LLM is closed"
    assert str(InThread(lambda: background.take(queue.SimpleQueue())).outcome()) == "this LLM is closed"


def test_a_call_to_a_stopped_loop_is_refused(background: BackgroundLoop) -> None:
    background.stop()
    with pytest.raises(HeadraceError, match="this LLM is closed"):
        background.run(for_ever())


def test_what_has_ended_as_the_loop_stops_is_returned(background: BackgroundLoop) -> None:
    async def last() -> str:
        background._is_stopping = True
        background.loop.stop()
        return "done"

    assert InThread(lambda: background.run(last())).outcome() == "done"


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_its_parents_client(llm: LLM, core: MemoryCore) -> None:
    core.pause()
    stream, context = llm.stream("Hello", LONG), multiprocessing.get_context("fork")
    said = context.SimpleQueue()

    def child() -> None:
        for call in (lambda: next(stream), lambda: llm.generate("Hello"), llm.get_stats):
            try:
                call()
            except HeadraceError as error:
                said.put(str(error))

    process = context.Process(target=child)
    process.start()
    process.join(within(20.0))
    process.kill()
    assert process.exitcode == 0
    assert all("was forked from it" in said.get() for _ in range(3))
    core.resume()
    assert sum(len(piece.outputs[0].token_ids) for piece in stream) == 60


def test_the_process_that_renders_templates_ends_with_its_last_user() -> None:
    own = TemplateRenderer()
    own.use()
    own.use()
    own.outputs("hello")
    pid = own.pid
    own.leave()
    assert own.pid == pid is not None
    own.leave()
    assert own.pid is None


def test_closing_an_llm_leaves_the_templates_of_another_alone(llm: LLM) -> None:
    llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=2), use_tqdm=False)
    pid = renderer().pid
    with memory_core() as other, LLM.attach(other.transport):
        pass
    assert renderer().pid == pid is not None
