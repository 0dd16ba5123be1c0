"""A stream brings what the whole answer is, text, tokens and log-probabilities, wherever characters are cut."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_server import ask, joined, serving, stream
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from null_with_tokenizer import PARROT
from thinned import every

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Four bytes, a sequence of several joined characters, a letter with two marks, CJK, and right-to-left.
NGRAM = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 4}'
RICH = "a😀é世👩\u200d👧 u\u0308\u0323界ش.\n"


@pytest.fixture(scope="module")
def clients() -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Of an engine that answers with its prompt, several tokens a step as it guesses them, and of one that answers with
    any bytes: most are no UTF-8.

    The second one tells three tokens together.
    """
    with contextlib.ExitStack() as stack:
        parrot = stack.enter_context(serving("--distributed-executor-backend", PARROT, "--speculative-config", NGRAM))
        babbler = stack.enter_context(serving("--stream-interval", "3"))
        yield stack.enter_context(parrot.client()), stack.enter_context(babbler.client())


TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(RICH), min_size=1, max_size=20)


@pytest.mark.parametrize("num_examples", [15, pytest.param(60, marks=pytest.mark.system)])
def test_stream_and_whole_are_the_same(clients, num_examples):
    """With stop strings cut out of the output itself at every place."""

    @settings(max_examples=num_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        text=TEXT,
        is_parrot=st.booleans(),
        stops=st.integers(0, 3),
        logprobs=st.sampled_from([None, 0, 2]),
        data=st.data(),
    )
    def check(text, is_parrot, stops, logprobs, data):
        client = clients[0 if is_parrot else 1]
        body: dict[str, Any] = {
            "prompt": text,
            "max_tokens": 40,
            "seed": 1,
            "logprobs": logprobs,
            "return_token_ids": True,
        }
        free = ask(client, COMPLETIONS, **body)["choices"][0]["text"]
        if is_parrot:
            assert (text * 40).startswith(free.rstrip("\ufffd"))
        starts = data.draw(st.lists(st.integers(0, max(0, len(free) - 1)), min_size=stops, max_size=stops))
        cut = [free[start : start + data.draw(st.integers(1, 6))] for start in starts]
        body["stop"] = [stop for stop in cut if stop] or None
        body["include_stop_str_in_output"] = data.draw(st.booleans())
        whole = ask(client, COMPLETIONS, **body)
        events = stream(client, COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        choices = [event["choices"][0] for event in events[:-1]]
        (choice,) = whole["choices"]
        assert "".join(each["text"] for each in choices) == choice["text"]
        assert joined(each["token_ids"] for each in choices) == choice["token_ids"]
        assert choices[-1]["finish_reason"] == choice["finish_reason"]
        assert choices[-1]["stop_reason"] == choice["stop_reason"]
        assert events[-1]["usage"] | {"prompt_tokens_details": None} == whole["usage"] | {"prompt_tokens_details": None}
        if logprobs is not None:
            for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert joined(each["logprobs"][field] for each in choices) == choice["logprobs"][field]
        if body["stop"] and not body["include_stop_str_in_output"]:
            assert choice["finish_reason"] == "stop"
            assert not any(stop in choice["text"] for stop in body["stop"])

    check()


@pytest.mark.parametrize("num_examples", [8, pytest.param(30, marks=pytest.mark.system)])
def test_a_streamed_chat_is_the_whole_one(clients, num_examples):
    @settings(max_examples=num_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(text=TEXT, is_parrot=st.booleans(), top=st.sampled_from([None, 0, 2]), n=st.integers(1, 2))
    def check(text, is_parrot, top, n):
        client = clients[0 if is_parrot else 1]
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 30, "seed": 1, "n": n}
        body |= {"temperature": 1.0, "return_token_ids": True}
        if top is not None:
            body |= {"logprobs": True, "top_logprobs": top}
        whole = ask(client, CHAT, **body)
        choices = [event["choices"][0] for event in stream(client, CHAT, body)]
        for expected in whole["choices"]:
            mine = [choice for choice in choices if choice["index"] == expected["index"]]
            assert "".join(choice["delta"].get("content") or "" for choice in mine) == expected["message"]["content"]
            assert joined(choice.get("token_ids") or [] for choice in mine) == expected["token_ids"]
            assert mine[-1]["finish_reason"] == expected["finish_reason"]
            if top is not None:
                told = joined(choice["logprobs"]["content"] for choice in mine if choice["logprobs"])
                assert told == expected["logprobs"]["content"]

    check()


@pytest.mark.parametrize("length", every(2, [1, 2, 3, 4]))
def test_a_stop_string_is_found_wherever_tokens_split_it(clients, length):
    """Every piece of a text whose characters are up to four tokens each; the oracle is Python's `in`."""
    client = clients[0]
    count = ask(client, "/tokenize", prompt=RICH)["count"]
    assert count > len(RICH)
    body = {"prompt": RICH, "max_tokens": 3 * count}
    free = ask(client, COMPLETIONS, **body)["choices"][0]["text"]
    assert free == 3 * RICH
    for start in range(len(RICH)):
        stop = free[start : start + length]
        expected = free.partition(stop)[0]
        for kept in (False, True):
            asked = {**body, "stop": [stop], "include_stop_str_in_output": kept}
            events = stream(client, COMPLETIONS, asked)
            pieces = [event["choices"][0]["text"] for event in events]
            assert "".join(pieces) == expected + (stop if kept else "")
            assert events[-1]["choices"][0]["stop_reason"] == stop


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"stop": ["no such text"]}])
def test_a_stream_interval_makes_fewer_and_larger_events(clients, more):
    """The first token at once, then three together, the rest at the end; a client that is late gets larger ones."""
    body = {"prompt": [5, 6], "max_tokens": 20, "ignore_eos": True, "return_token_ids": True, **more}
    counts = [len(event["choices"][0]["token_ids"]) for event in stream(clients[1], COMPLETIONS, body)]
    assert sum(counts) == 20
    assert len(counts) <= 1 + 6 + 1
    assert all(count >= 3 for count in counts[1:-1])
