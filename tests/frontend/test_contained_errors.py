"""An error while a client works ends what it concerns, with its cause: one request, or the session. Nothing waits for
ever, and nothing is left behind."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
from fake_core import FakeCore, MemoryCore, memory_core, zmq_core
from fake_tokenizers import bundle_of, byte_level_tokenizer
from source_tree import PYTHONPATH
from tqdm import tqdm

from headrace import LLM, BeamSearchParams, EngineDeadError, InvalidRequestError, RequestFailedError, SamplingParams
from headrace.core.process.child_output import StartLine, is_watched
from headrace.frontend.client.background import BackgroundLoop
from headrace.frontend.client.client import CoreClient, CoreListener
from headrace.frontend.client.request_stream import RequestListener, RequestStream
from headrace.frontend.client.request_table import RequestTable
from headrace.frontend.client.transport import Transport, ZmqTransport
from headrace.frontend.fleet.decisions import Affinity
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.fleet.sources import Attached, Source
from headrace.frontend.request.checks import CheckedRequest, check
from headrace.frontend.request.prompts import Prompt
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.codec import Codec
from headrace.ipc.failure import Failure, HeadraceError
from headrace.ipc.messages import Abort, AddRequest, ClientMessage, Progress

pytest_plugins = "fake_llm"
pytestmark = [pytest.mark.usefixtures("private_cache"), pytest.mark.timeout(120)]

T = TypeVar("T")
LONG = SamplingParams(max_tokens=200)
NULL = {"distributed_executor_backend": "headrace.executor.testing.null:NullExecutor", "skip_tokenizer_init": True}


@pytest.fixture
def llm(core: MemoryCore) -> Iterator[LLM]:
    with LLM.attach(core.transport) as llm:
        yield llm


def within(call: Callable[[], T], timeout_s: float = 30.0) -> T:
    """The result of a call that would otherwise hang this test."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert not thread.is_alive(), "the call waits for ever"
    if errors:
        raise errors[0]
    return results[0]


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


# --- the session --------------------------------------------------------------------------------------------------


class Panic(BaseException):
    """As a library written in Rust raises."""


@pytest.fixture(params=["zmq", "memory"])
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    if request.param == "zmq":
        with zmq_core() as core:
            yield ZmqTransport(core.address)
    else:
        with memory_core() as memory:
            yield memory.transport


@pytest.mark.parametrize("error", [KeyError("no such thing"), Panic("no such thing")], ids=repr)
def test_an_error_at_a_message_ends_the_session_with_its_cause(
    transport: Transport, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise error

    async def test() -> None:
        client = CoreClient(transport)
        await client.start()
        monkeypatch.setattr(client.requests, "on_step", fail)
        streams = [client.submit(check(name, Prompt(token_ids=[5]), LONG, client)) for name in "ab"]
        for stream in streams:
            with pytest.raises(EngineDeadError, match=r"failed at a StepOutputs message.*no such thing"):
                await stream.final()
        with pytest.raises(EngineDeadError, match="no such thing"):
            await client.get_stats()

    run(test())


# --- one request --------------------------------------------------------------------------------------------------


class BrokenDetokenizer:
    """Fails at its nth call."""

    def __init__(self, calls: int, error: type[BaseException]) -> None:
        self._calls, self._error = calls, error

    def extend(self, token_ids: list[int]) -> str:
        self._calls -= 1
        if self._calls < 0:
            raise self._error("no text for this token")
        return "x" * len(token_ids)

    def finish(self) -> str:
        return ""


def broken_table(params: SamplingParams, calls: int, error: type[BaseException]) -> tuple[FakeCore, Any, list[Any]]:
    """A core, a table with three requests, and their streams. The second has a broken detokeniser."""
    bundle = bundle_of(byte_level_tokenizer())
    core = FakeCore(bundle, lambda prompt, seed, position: 77)
    table = RequestTable(lambda message: core.take("client", message))
    streams = [
        RequestStream(CheckedRequest(name, Prompt(token_ids=[7]), params, max_tokens=9), Tokenizer(bundle))
        for name in "abc"
    ]
    for stream in streams:
        table.add(stream)
    for sequence in streams[1].sequences:
        sequence.detokenizer = BrokenDetokenizer(calls, error)  # type: ignore[assignment]
    return core, table, streams


@pytest.mark.parametrize("error", [ValueError, Panic])
@pytest.mark.parametrize(
    ("params", "calls"),
    [
        (SamplingParams(stop="never", max_tokens=9), 0),
        (SamplingParams(stop="never", max_tokens=9), 3),
        (SamplingParams(max_tokens=9), 0),  # at the end
        (SamplingParams(max_tokens=9, n=2), 0),
        (SamplingParams(max_tokens=9, repetition_detection={"max_pattern_size": 1, "min_count": 3}), 0),
    ],
    ids=["the first of a stop string", "a later one", "its end", "its end, of two outputs", "a repetition"],
)
def test_a_detokenizer_that_fails_ends_its_request_alone(
    params: SamplingParams, calls: int, error: type[BaseException]
) -> None:
    core, table, streams = broken_table(params, calls, error)
    for _ in range(12):
        for _, message in core.step():
            table.on_step(message)
    assert [stream.done for stream in streams] == [True, True, True]
    assert not core.running, "the core still computes what nobody reads"
    assert len(table) == 0
    assert isinstance(streams[1].error, RequestFailedError)
    assert "no text for this token" in str(streams[1].error)
    for stream in (streams[0], streams[2]):
        assert stream.error is None
        for sequence in stream.sequences:
            assert sequence.token_ids == [77] * len(sequence.token_ids)
            assert len(sequence.token_ids) == (3 if params.repetition_detection else 9)


def test_an_abort_whose_text_cannot_be_made_still_ends_the_request() -> None:
    core, table, streams = broken_table(SamplingParams(max_tokens=9), 0, ValueError)
    for _, message in core.step():
        table.on_step(message)
    table.abort_all()
    assert [stream.done for stream in streams] == [True, True, True]
    assert isinstance(streams[1].error, RequestFailedError)
    assert not core.running


def test_a_listener_of_steps_that_fails_ends_its_request_alone() -> None:
    core, table, streams = broken_table(SamplingParams(max_tokens=9), 99, ValueError)

    told: list[RequestStream] = []

    class Failing(RequestListener):
        def on_step(self, stream: RequestStream, now_s: float) -> None:
            raise OSError("cannot be written")

        def on_done(self, stream: RequestStream) -> None:
            told.append(stream)

    streams[1].listener = Failing()
    for _ in range(12):
        for _, message in core.step():
            table.on_step(message)
    assert told == [streams[1]]
    assert isinstance(streams[1].error, RequestFailedError)
    assert "cannot be written" in str(streams[1].error)
    assert [len(stream.sequences[0].token_ids) for stream in streams] == [9, 1, 9]


def test_a_listener_that_aborts_another_request_of_the_step_ends_it_once() -> None:
    core, table, streams = broken_table(SamplingParams(max_tokens=9), 99, ValueError)
    ended: list[RequestStream] = []

    class Aborting(RequestListener):
        def on_step(self, stream: RequestStream, now_s: float) -> None:
            streams[2].abort()

    class Counting(RequestListener):
        def on_done(self, stream: RequestStream) -> None:
            ended.append(stream)

    streams[0].listener, streams[2].listener = Aborting(), Counting()
    for _ in range(3):
        for _, message in core.step():
            table.on_step(message)
    assert ended == [streams[2]]
    assert streams[2].sequences[0].finish_reason == "abort"
    assert not streams[0].done


# --- the end of an engine -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyError("no such thing"), Panic("no such thing")], ids=repr)
def test_a_listener_that_fails_at_the_end_of_an_engine_leaves_no_request_waiting(
    transport: Transport, error: BaseException
) -> None:
    class Failing(CoreListener):
        def on_lost(self, streams: Sequence[RequestStream], failure: Failure) -> None:
            raise error

    async def test() -> None:
        client = CoreClient(transport)
        await client.start()
        client.listener = Failing()
        streams = [client.submit(check(name, Prompt(token_ids=[5]), LONG, client)) for name in "ab"]
        client.fail(Failure(message="it is gone", type="SIGKILL"))  # before the loop could read any output
        for stream in streams:
            with pytest.raises(EngineDeadError, match="it is gone"):
                await stream.final()
        await client.close()

    run(test())


@pytest.mark.parametrize("error", [KeyError("no such thing"), Panic("no such thing")], ids=repr)
def test_an_engine_that_cannot_be_connected_is_not_waited_for(error: BaseException) -> None:
    class Failing(Source):
        comes_back = False  # type: ignore[assignment]

        async def open(self) -> CoreClient:
            raise error

    with pytest.raises(type(error), match="no such thing"):
        run(EnginePool([Failing()]).open())


@pytest.mark.parametrize("error", [KeyError("no such thing"), Panic("no such thing")], ids=repr)
def test_a_request_that_cannot_be_moved_does_not_keep_the_others(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines, of which the one with all requests ends."""

    async def test() -> None:
        pool = EnginePool([Attached(each.address) for each in cores])
        await pool.open()
        requests = [check(name, Prompt(token_ids=[5]), LONG, pool) for name in "abc"]
        streams = [pool.submit(each, affinity=Affinity(rank=0)) for each in requests]
        first, second = (engine.client for engine in pool.engines)
        assert first is not None
        assert second is not None
        adopt = second.requests.adopt

        def fail_first(stream: RequestStream) -> None:
            if stream is streams[0]:
                raise error
            adopt(stream)

        monkeypatch.setattr(second.requests, "adopt", fail_first)
        first.fail(Failure(message="it is gone", type="SIGKILL"))
        with pytest.raises(RequestFailedError, match="no such thing"):
            await streams[0].final()
        for stream in streams[1:]:
            assert len((await stream.final()).outputs[0].token_ids) == 200
        assert not len(pool)
        await pool.close(0.0)

    with zmq_core() as one, zmq_core() as other:
        cores = one, other
        run(test())


# --- values that no message can hold ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"priority": True}, "priority must be an integer"),
        ({"priority": 1.5}, "priority must be an integer"),
        ({"priority": "high"}, "priority must be an integer"),
        ({"priority": 2**63}, "priority must be an integer"),
        ({"priority": None}, "priority must be an integer"),
        ({"name": 5}, "request_id must be a string"),
        ({"name": None}, "request_id must be a string"),
        ({"name": b"a"}, "request_id must be a string"),
        ({"name": ("a",)}, "request_id must be a string"),
        ({"name": "\ud800"}, "cannot be sent"),
        ({"prompt": Prompt(token_ids=[5], cache_salt="\ud800")}, "cannot be sent"),
    ],
    ids=str,
)
def test_what_no_message_can_hold_is_refused_and_its_id_is_free(changes: dict[str, Any], said: str) -> None:
    async def test() -> None:
        client = await CoreClient.connect(core.address)
        given = {"name": "a", "prompt": Prompt(token_ids=[5]), "params": SamplingParams(max_tokens=3), **changes}
        with pytest.raises(InvalidRequestError, match=said):
            client.submit(check(facts=client, **given))
        assert len(client.requests) == 0
        given |= {"prompt": Prompt(token_ids=[5]), "priority": 0, "name": "a"}
        assert (await client.submit(check(facts=client, **given)).final()).finished
        await client.close()

    with zmq_core() as core:
        run(test())


@pytest.mark.parametrize("of", [np.int64, np.int32, np.uint8])
def test_numbers_of_numpy_are_made_plain(of: Callable[[int], Any]) -> None:
    params = SamplingParams(
        n=of(2),
        max_tokens=of(3),
        min_tokens=of(1),
        seed=of(4),
        top_k=of(5),
        logprobs=of(1),
        temperature=np.float32(0.5),
        top_p=np.float64(0.5),
        stop_token_ids=[of(3)],
        logit_bias={of(9): np.float64(1.0)},
        stream_interval=of(2),
    )
    changed = SamplingParams(max_tokens=3)
    changed.n, changed.stream_interval = of(2), of(2)

    async def test() -> None:
        client = await CoreClient.connect(core.address)
        for index, each in enumerate((params, changed, SamplingParams(max_tokens=3))):
            stream = client.submit(check(str(index), Prompt(token_ids=[5]), each, client, of(1)))
            output = await stream.final()
            assert len(output.outputs) == each.n
            assert {type(sequence.slot) for sequence in stream.sequences} == {int}
        await client.close()

    with zmq_core() as core:
        run(test())
    assert type(params.n) is int
    assert type(params.temperature) is float


def test_a_text_of_a_class_of_its_own_is_sent_as_a_text() -> None:
    async def test() -> None:
        client = await CoreClient.connect(core.address)
        stream = client.submit(check(np.str_("a"), Prompt(token_ids=[5]), SamplingParams(max_tokens=3), client))
        assert (await stream.final()).request_id == "a"
        await client.close()

    with zmq_core() as core:
        run(test())


def test_a_number_of_numpy_is_no_array_on_the_wire() -> None:
    with pytest.raises(TypeError, match="int64 has no wire format"):
        Codec(ClientMessage).encode(Abort(slots=(np.int64(5),)))


@pytest.mark.parametrize("path", [5, b"x", ["x"], True])
def test_a_path_of_a_wrong_type_is_refused(llm: LLM, path: Any) -> None:
    with pytest.raises(InvalidRequestError, match="weights_path must be"):
        within(lambda: llm.reload_weights(path))


CHAT: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.wake_up([5]),
        lambda llm: llm.start_profile(5),
        lambda llm: llm.pause_generation("abort", clear_cache=1),
        lambda llm: llm.pause_generation(5),
        lambda llm: llm.sleep("deep"),
        lambda llm: llm.call_extension({5: 6}),
        *(lambda llm, value=value: llm.call_extension({"a": value}) for value in (object(), 1 << 70, "\ud800")),
        lambda llm: llm.reload_weights("\ud800"),
        lambda llm: llm.start_profile("\ud800"),
        lambda llm: llm.chat(CHAT, chat_template="\ud800"),
        lambda llm: llm.chat([{"role": "user", "content": "\ud800"}], chat_template="{{ messages[0].content }}"),
        lambda llm: llm.chat(CHAT, chat_template="{{ '\\ud83d' }}"),
        lambda llm: llm.collective_rpc("m", args=(object(),)),
        lambda llm: llm.collective_rpc("m", args=5),
        lambda llm: llm.collective_rpc("m", kwargs=["a"]),
        *(lambda llm, wait=wait: llm.collective_rpc("m", wait) for wait in ([1], "1", True, 0, float("nan"))),
        lambda llm: llm.wake_up(5),
        lambda llm: llm.wake_up([[5]]),
        lambda llm: llm.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=3), concurrency_limit="1"),
        lambda llm: llm.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=3), concurrency_limit=True),
    ],
)
def test_a_command_with_a_value_of_a_wrong_type_is_refused(llm: LLM, call: Callable[[LLM], Any]) -> None:
    with pytest.raises(InvalidRequestError):
        within(lambda: call(llm))


def test_enqueue_leaves_nothing_behind_if_a_request_cannot_be_sent() -> None:
    with zmq_core() as core, LLM.connect(core.address) as llm:
        with pytest.raises(InvalidRequestError, match="cannot be sent"):
            llm.enqueue(["one", "two", {"prompt": "three", "cache_salt": "\ud800"}], LONG)
        assert within(lambda: llm.generate("four", use_tqdm=False))[0].finished
        added = [each.slot for each in core.core.received if isinstance(each, AddRequest)]
        aborted = [slot for each in core.core.received if isinstance(each, Abort) for slot in each.slots]
        assert sorted(aborted) == [*added[:2], 2], "the slot of the one that was not sent is free too"


# --- the user's code ----------------------------------------------------------------------------------------------


class BrokenBar:
    """A progress bar whose method fails."""

    def __init__(self, method: str) -> None:
        self._method = method
        self.threads: set[int] = set()

    def __call__(self, **given: Any) -> BrokenBar:
        self._do("__call__")
        return self

    def _do(self, method: str) -> None:
        self.threads.add(threading.get_ident())
        if method == self._method:
            raise ValueError("nobody looks")

    def update(self, count: int) -> None:
        self._do("update")

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self._do("set_postfix_str")

    def close(self) -> None:
        self._do("close")


@pytest.mark.parametrize("method", ["update", "set_postfix_str", "close"])
def test_a_progress_bar_that_fails_does_not_disturb_the_requests(llm: LLM, method: str) -> None:
    bar = BrokenBar(method)
    outputs = within(lambda: llm.generate(["a", "b"], SamplingParams(max_tokens=5), use_tqdm=bar))
    assert all(output.finished for output in outputs)
    llm.enqueue(["a", "b"], SamplingParams(max_tokens=5))
    assert len(within(lambda: llm.wait_for_completion(use_tqdm=bar))) == 2


def test_a_progress_bar_that_cannot_be_made_is_the_callers_error(llm: LLM) -> None:
    with pytest.raises(ValueError, match="nobody looks"):
        within(lambda: llm.generate("a", use_tqdm=BrokenBar("__call__")))
    assert within(lambda: llm.generate("a", use_tqdm=False))[0].finished


def test_a_progress_bar_runs_on_the_callers_thread(llm: LLM) -> None:
    bar = BrokenBar("none")
    llm.generate(["a", "b"], SamplingParams(max_tokens=5), use_tqdm=bar)
    assert bar.threads == {threading.get_ident()}


@pytest.mark.parametrize("shown", [True, tqdm], ids=["ours", "the user's"])
def test_a_closed_standard_error_does_not_disturb_the_requests(shown: Any) -> None:
    """As in `script.py 2>&1 | head -1`."""
    with zmq_core() as core:
        made = subprocess.run(
            [sys.executable, "-c", _WRITES_TO_CLOSED_PIPE, core.address, "tqdm" if shown is tqdm else ""],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            timeout=60,
            check=True,
            text=True,
        )
    assert made.stdout == "2 finished\n"


class _Written(io.StringIO):
    """What a script may have in the place of a standard error: it can be written to, and nothing else."""

    @property
    def isatty(self) -> Any:  # type: ignore[override]
        raise AttributeError("isatty")

    flush = fileno = isatty


@pytest.mark.parametrize("kind", ["closed", "none", "bare"])
def test_an_unusual_standard_error_does_not_disturb_the_requests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    stream = _Written() if kind == "bare" else io.StringIO()
    if kind == "closed":
        stream.close()
    monkeypatch.setattr(sys, "stderr", None if kind == "none" else stream)
    assert not is_watched()
    with StartLine(None) as line:
        line.show(Progress(phase="load weights", seconds=0.1))
    assert len(llm.generate(["a", "b"], SamplingParams(max_tokens=5))) == 2


_WRITES_TO_CLOSED_PIPE = """
import os, sys
from tqdm import tqdm
from headrace import LLM, SamplingParams

reads, writes = os.pipe()
os.close(reads)
os.dup2(writes, 2)
with LLM.connect(sys.argv[1]) as llm:
    outputs = llm.generate(["a", "b"], SamplingParams(max_tokens=5), use_tqdm=tqdm if sys.argv[2] else True)
os.write(1, f"{sum(output.finished for output in outputs)} finished\\n".encode())
os._exit(0)  # Python itself would complain that it cannot flush standard error
"""


def test_a_call_that_waits_is_refused_on_the_clients_own_thread(llm: LLM) -> None:
    stream = llm.stream("a", LONG)
    llm.llm_engine.add_request("r", "a", LONG)
    heard: list[BaseException] = []
    done = threading.Event()

    def callback() -> None:
        for call in (
            llm.get_stats,
            lambda: llm.generate("a", use_tqdm=False),
            lambda: next(stream),
            llm.llm_engine.step,
        ):
            try:
                call()  # type: ignore[operator]
            except HeadraceError as error:
                heard.append(error)
        done.set()

    llm._background.call_soon(callback)
    assert done.wait(30), "the client waits for itself"
    assert [str(error).startswith("this call waits for the client") for error in heard] == [True] * 4
    assert within(lambda: llm.generate("a", use_tqdm=False))[0].finished


def test_a_callback_cannot_end_the_clients_thread(llm: LLM) -> None:
    llm._background.call_soon(sys.exit, 3)
    assert within(lambda: llm.generate("a", use_tqdm=False))[0].finished


def test_a_loop_that_is_stopped_ends_its_thread() -> None:
    background = BackgroundLoop("test")
    background.stop()
    assert background.loop.is_closed()


# --- more requests than the engine takes --------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "n"), [(3, 1), (3, 2), (1, 1)])
def test_a_batch_of_more_requests_than_a_client_may_have_runs_in_turns(limit: int, n: int) -> None:
    params = SamplingParams(max_tokens=4, n=n, temperature=1, seed=1, ignore_eos=True)
    prompts = [[5 + each] for each in range(20)]
    with LLM("null", in_process=True, max_client_requests=limit, **NULL) as llm:
        outputs = within(lambda: llm.generate(prompts, params, use_tqdm=False))
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(each.token_ids) for output in outputs for each in output.outputs] == [4] * 20 * n
    assert [output.request_id for output in outputs] == [str(each) for each in range(20)]


def test_a_batch_of_which_nothing_fits_is_refused() -> None:
    params = SamplingParams(n=2, max_tokens=1000, ignore_eos=True)  # the first output is not over before the second
    with (
        LLM("null", in_process=True, max_client_requests=1, hf_overrides={"step_delay_s": 0.02}, **NULL) as llm,
        pytest.raises(HeadraceError, match="as many as one may have"),
    ):
        within(lambda: llm.generate([[5], [6]], params, use_tqdm=False))
