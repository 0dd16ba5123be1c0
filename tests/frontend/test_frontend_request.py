"""Outputs made from steps: however they are read and however the tokens come, it is the same answer."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
from fake_core import FakeCore
from fake_tokenizers import bundle_of, byte_level_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace import RequestOutput, RequestOutputKind, SamplingParams
from headrace.frontend.client.request_stream import RequestListener, RequestStream
from headrace.frontend.client.request_table import RequestTable
from headrace.frontend.request.checks import CheckedRequest
from headrace.frontend.request.prompts import Prompt
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.messages import Abort, ClientMessage, StepOutputs

DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
EOS = 2


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(bundle_of(byte_level_tokenizer()))


def drive(
    params: SamplingParams, scripts: list[list[int]], *, tokens_per_step: int = 1, read_every: int = 1
) -> tuple[list[RequestOutput], list[ClientMessage]]:
    """All outputs of a request whose output i consists of scripts[i], and what was sent to the core."""
    return asyncio.run(_drive(params, scripts, tokens_per_step, read_every))


async def _drive(
    params: SamplingParams, scripts: list[list[int]], tokens_per_step: int, read_every: int
) -> tuple[list[RequestOutput], list[ClientMessage]]:
    core = FakeCore(
        bundle_of(byte_level_tokenizer()),
        lambda prompt, seed, position: scripts[seed % len(scripts)][position],
        tokens_per_step=tokens_per_step,
        eos_token_id=EOS,
    )
    sent: list[ClientMessage] = []
    replies: list[Any] = []

    def send(message: ClientMessage) -> None:
        sent.append(message)
        replies.extend(core.take("client", message))

    table = RequestTable(send)
    stream = RequestStream(CheckedRequest("r", Prompt(token_ids=[7]), params, max_tokens=200), tokenizer())
    table.add(stream)
    outputs: list[RequestOutput] = []
    steps = 0
    while not stream.done:
        for _, message in core.step():
            assert isinstance(message, StepOutputs)
            table.on_step(message)
        steps += 1
        if steps % read_every == 0 or stream.done:
            await read_what_is_there(stream, outputs)
    for _, late in replies:  # the core's answers to our aborts
        table.on_step(late)
    assert len(table) == 0
    assert not core.running
    return outputs, sent


async def read_what_is_there(stream: RequestStream, outputs: list[RequestOutput]) -> None:
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    if reading.done():
        outputs.append(reading.result())
    else:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def merged(outputs: list[RequestOutput], params: SamplingParams) -> list[tuple[Any, ...]]:
    """The final answer, from the outputs of any kind."""
    assert outputs[-1].finished
    assert not any(output.finished for output in outputs[:-1])
    answers = []
    for index in range(params.n):
        parts = [each for output in outputs for each in output.outputs if each.index == index]
        if params.output_kind is not DELTA:
            parts = parts[-1:]
        last = parts[-1]
        logprobs = None if last.logprobs is None else [row for part in parts for row in part.logprobs or []]
        token_ids = [token_id for part in parts for token_id in part.token_ids]
        text = "".join(part.text for part in parts)
        answers.append((text, token_ids, logprobs, last.cumulative_logprob, last.finish_reason, last.stop_reason))
    return answers


def test_a_listener_that_fails_loses_nothing_of_the_other_requests(caplog: pytest.LogCaptureFixture) -> None:
    core = FakeCore(bundle_of(byte_level_tokenizer()), lambda prompt, seed, position: 77, eos_token_id=EOS)
    table = RequestTable(lambda message: core.take("client", message))
    streams = [
        RequestStream(CheckedRequest(name, Prompt(token_ids=[7]), SamplingParams(), max_tokens=5), tokenizer())
        for name in ("first", "second")
    ]
    for stream in streams:
        table.add(stream)

    class Failing(RequestListener):
        def on_done(self, stream: RequestStream) -> None:
            raise KeyError("nobody counts this")

    streams[0].listener = Failing()
    while core.running:
        for _, message in core.step():
            table.on_step(message)
    assert [stream.done for stream in streams] == [True, True]
    assert [each.token_ids for stream in streams for each in stream.sequences] == [[77] * 5] * 2
    assert "request first: its end could not be told to a listener" in caplog.text
    assert "nobody counts this" in caplog.text


def test_where_a_listener_hears_of_each_step_the_reader_is_given_the_last_output_alone() -> None:
    core = FakeCore(bundle_of(byte_level_tokenizer()), lambda prompt, seed, position: 77, eos_token_id=EOS)
    table = RequestTable(lambda message: core.take("client", message))
    heard: list[int] = []

    class Counting(RequestListener):
        def on_step(self, stream: RequestStream, now_s: float) -> None:
            heard.append(stream.num_tokens)

    stream = RequestStream(CheckedRequest("r", Prompt(token_ids=[7]), SamplingParams(), max_tokens=5), tokenizer())
    stream.listener = Counting()
    table.add(stream)

    async def read() -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        while not stream.done:
            for _, message in core.step():
                table.on_step(message)
            await read_what_is_there(stream, outputs)
        return outputs

    (last,) = asyncio.run(read())
    assert last.finished
    assert last.outputs[0].token_ids == [77] * 5
    assert heard == [1, 2, 3, 4, 5]


SCRIPT = st.one_of(
    st.text("stop STOP.😀é\u0301世", max_size=12).map(lambda text: tokenizer().encode(text)),
    st.lists(st.integers(0, 399), max_size=20),
).map(lambda ids: [*ids, EOS])


@st.composite
def scripts_and_stops(draw: st.DrawFn) -> tuple[list[list[int]], list[str], list[int]]:
    """What to generate, and stop strings and tokens that often occur in it."""
    scripts = draw(st.lists(SCRIPT, min_size=1, max_size=3))
    texts = [tokenizer().decode(script) for script in scripts]
    stops = []
    for text in draw(st.lists(st.sampled_from(texts), max_size=2)):
        start = draw(st.integers(0, max(0, len(text) - 1)))
        stops.append(text[start : start + draw(st.integers(1, 5))] or "stop")
    tokens = st.sampled_from([token_id for script in scripts for token_id in script])
    return scripts, stops, draw(st.lists(tokens, max_size=1))


@example(  # half a character, held until the end, where it becomes a stop string
    what=([[129, EOS]], ["\N{REPLACEMENT CHARACTER}"], []),
    include=False,
    skip=True,
    min_tokens=4,
    max_tokens=4,
    logprobs=None,
    tokens_per_step=1,
    read_every=1,
)
@settings(max_examples=200, deadline=None)
@given(
    what=scripts_and_stops(),
    include=st.booleans(),
    skip=st.booleans(),
    min_tokens=st.integers(0, 4),
    max_tokens=st.integers(4, 12),
    logprobs=st.sampled_from([None, 0, 2]),
    tokens_per_step=st.integers(1, 4),
    read_every=st.integers(1, 5),
)
def test_every_way_of_reading_gives_the_same_answer(
    what: tuple[list[list[int]], list[str], list[int]],
    include: bool,
    skip: bool,
    tokens_per_step: int,
    read_every: int,
    **fields: Any,
) -> None:
    min_tokens = fields["min_tokens"]
    scripts, stop, stop_token_ids = what
    scripts = [[*([each for each in script if each != EOS]), *[EOS] * 20] for script in scripts]
    params = SamplingParams(
        n=len(scripts),
        seed=0,
        stop=stop,
        stop_token_ids=stop_token_ids,
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
        **fields,
    )
    params.output_kind = CUMULATIVE
    reference = merged(drive(params, scripts)[0], params)
    for kind in RequestOutputKind:
        params.output_kind = kind
        outputs, _ = drive(params, scripts, tokens_per_step=tokens_per_step, read_every=read_every)
        assert merged(outputs, params) == reference
    for text, token_ids, rows, _, reason, stop_reason in reference:
        assert rows is None or [next(iter(row)) for row in rows] == token_ids
        assert params.max_tokens is not None
        assert len(token_ids) <= params.max_tokens
        assert reason == "stop" or len(token_ids) == params.max_tokens
        if isinstance(stop_reason, str):
            assert text.endswith(stop_reason) == include or not include
            assert len(token_ids) > min_tokens


def script_of(text: str) -> list[int]:
    return [*tokenizer().encode(text), EOS]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abST")])
def test_a_stop_string_ends_the_output_and_the_core_is_told(kind: RequestOutputKind, include: bool, text: str) -> None:
    params = SamplingParams(max_tokens=50, stop="ST", include_stop_str_in_output=include, output_kind=kind)
    outputs, sent = drive(params, [script_of("abSTOP and more")])
    ((found, token_ids, _, _, reason, stop_reason),) = merged(outputs, params)
    assert (found, reason, stop_reason) == (text, "stop", "ST")
    assert tokenizer().decode(token_ids) == "abST"
    assert [message for message in sent if isinstance(message, Abort)] == [Abort(slots=(0,))]


def test_min_tokens_lets_a_stop_string_pass() -> None:
    params = SamplingParams(max_tokens=50, stop="a", min_tokens=3)
    ((text, *_),) = merged(drive(params, [script_of("a a a a b a")])[0], params)
    assert text == "a a "  # tokens: a, _a, _a; the text of the third does not count, that of the fourth does


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize(
    ("stop", "min_tokens", "text"),
    [
        ("bcd", 2, "a"),  # began before and is complete after
        ("bcd", 3, "a"),
        ("bcd", 4, "abcdef"),  # complete before
        (["bcd", "cde"], 4, "ab"),
        (["bc", "abcd"], 3, ""),  # within the beginning of one that counts, another is complete too early
        (["bc", "e"], 3, "abcd"),
        ("z", 3, "abcdef"),
    ],
)
def test_a_stop_string_that_begins_before_min_tokens_and_is_complete_after_it_counts(
    kind: RequestOutputKind, stop: Any, min_tokens: int, text: str
) -> None:
    params = SamplingParams(max_tokens=6, stop=stop, min_tokens=min_tokens, output_kind=kind)
    ids = [token for letter in "abcdef" for token in tokenizer().encode(letter)]
    assert len(ids) == 6
    ((found, *_),) = merged(drive(params, [ids])[0], params)
    assert found == text


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_a_stop_token_stays_in_the_ids_and_out_of_the_text(include: bool, text: str) -> None:
    (stop_token,) = tokenizer().encode("c")
    params = SamplingParams(max_tokens=50, stop_token_ids=[stop_token], include_stop_str_in_output=include)
    for kind in RequestOutputKind:
        params.output_kind = kind
        outputs, _ = drive(params, [script_of("abcd")])
        ((found, token_ids, _, _, reason, stop_reason),) = merged(outputs, params)
        assert (found, reason, stop_reason) == (text, "stop", stop_token)
        assert token_ids[-1] == stop_token


def test_a_stop_token_whose_text_is_a_stop_string_counts_as_a_token() -> None:
    (stop_token,) = tokenizer().encode("c")
    params = SamplingParams(max_tokens=50, stop_token_ids=[stop_token], stop=["c", "zz"])
    ((text, _, _, _, reason, stop_reason),) = merged(drive(params, [script_of("abcd")])[0], params)
    assert (text, reason, stop_reason) == ("ab", "stop", stop_token)


def test_what_comes_after_a_stop_string_in_the_same_step_is_dropped() -> None:
    params = SamplingParams(max_tokens=50, stop="b", logprobs=0)
    ((_, token_ids, rows, total, *_),) = merged(drive(params, [script_of("abcdef")], tokens_per_step=5)[0], params)
    assert tokenizer().decode(token_ids) == "ab"
    assert (len(rows), total) == (2, pytest.approx(-1.0))


def test_the_end_of_sequence_token_is_no_stop_reason() -> None:
    params = SamplingParams(max_tokens=50, skip_special_tokens=False)
    outputs, _ = drive(params, [script_of("ab")])
    ((text, token_ids, _, _, reason, stop_reason),) = merged(outputs, params)
    assert (text, token_ids[-1], reason, stop_reason) == ("ab", EOS, "stop", None)


def test_deltas_hold_only_what_is_new_and_only_outputs_with_news() -> None:
    params = SamplingParams(n=2, seed=0, max_tokens=50, output_kind=DELTA)
    outputs, _ = drive(params, [script_of("a"), script_of("abcdef")])
    assert [each.index for each in outputs[0].outputs] == [0, 1]
    assert [each.index for each in outputs[-1].outputs] == [1]
    assert all(len(each.token_ids) <= 1 for output in outputs for each in output.outputs)


def test_without_detokenizing_there_is_no_text() -> None:
    params = SamplingParams(max_tokens=50, detokenize=False, logprobs=1)
    ((text, token_ids, rows, *_),) = merged(drive(params, [script_of("abc")])[0], params)
    assert text == ""
    assert len(token_ids) == 4
    assert all(each.decoded_token is None for row in rows for each in row.values())


def test_times_tokens_and_cached_tokens_are_reported() -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=5, output_kind=FINAL_ONLY)
    (output,), _ = drive(params, [[5] * 9, [6] * 9])
    assert output.metrics is not None
    assert output.metrics.num_generation_tokens == 10
    assert (output.metrics.queued_s, output.metrics.prefill_s, output.metrics.decode_s) == (0.25, 0.5, 1.0)
    assert output.metrics.first_token_latency is not None
    assert output.metrics.total_s is not None
    assert 0 <= output.metrics.first_token_latency <= output.metrics.total_s
    assert output.num_cached_tokens == 0
