"""Long lists of numbers in bodies are decoded in slices, to what they would be in one piece."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from headrace.frontend.http.server.decoding import large_lists
from headrace.frontend.http.server.decoding.large_lists import decode_json


@pytest.fixture(autouse=True)
def _short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_lists, "SLICE_BYTES", 24)


@pytest.mark.parametrize(
    "value",
    [
        list(range(1000)),
        [list(range(100)), [], [5], list(range(-7, 90))],
        [1, 2, list(range(100)), 3, [4]],
        [[]] * 100,
        [1.5, -2e30, 7] * 50,
        ["text, [with, commas, 1]", {"a": [1, 2]}] * 50,
        [[[1, 2], [3]], [[4]]] * 50,
        {"a": list(range(100))},
        "x" * 1000,
        [],
        [[]],
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n\t ", " : ")])
def test_a_value_is_what_it_is_in_one_piece(value: Any, separators: tuple[str, str]) -> None:
    body = json.dumps({"before": 1, "prompt": value, "after": None}, separators=separators).encode()
    assert decode_json(body) == json.loads(body)
    inside = json.dumps(value, separators=separators).encode()
    assert decode_json(inside) == value


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_list_gives_the_error_of_its_one_piece(seed: int) -> None:
    numbers = random.Random(seed)
    for _ in range(50):
        lists = [[numbers.randrange(300) for _ in range(numbers.randrange(6))] for _ in range(20)]
        body = bytearray(json.dumps({"prompt": lists}).encode())
        for _ in range(numbers.randint(1, 3)):
            at = numbers.randrange(len(body))
            body[at : at + numbers.randrange(2)] = numbers.choice((b",", b"[", b"]", b"-", b"0", b".", b" ", b"e"))
        assert _outcome(decode_json, bytes(body)) == _outcome(msgspec.json.decode, bytes(body))


def _outcome(decode: Callable[[bytes], Any], body: bytes) -> Any:
    try:
        return decode(body)
    except msgspec.DecodeError as error:
        return str(error)


def test_no_call_decodes_more_than_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one call decodes, nobody else can interrupt."""
    monkeypatch.setattr(large_lists, "SLICE_BYTES", 4096)
    longest = []
    closed = large_lists._closed

    def watched(part: bytes, **more: bool) -> Any:
        longest.append(len(part))
        return closed(part, **more)

    monkeypatch.setattr(large_lists, "_closed", watched)
    for value in ([70_000] * 20_000, [[70_000] * 20_000], [[5] * 400] * 50, [7] * 20_000 + [[8]]):
        longest.clear()
        assert decode_json(json.dumps({"prompt": value}).encode()) == {"prompt": value}
        assert len(longest) > 10
        assert max(longest) < 5000
