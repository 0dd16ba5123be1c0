"""Texts without quotes in calls: each text within its schema's bounds can be written up to its first end marker, and no
other, with each grammar library."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from example_tools import weather
from fake_tokenizers import byte_level_tokenizer
from family_answers import WAYS, Way
from masks_of_grammars import allowed_after
from processor_time import least_processor_s
from thinned import every, pairs
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from headrace.core.structured_output import unquoted_texts
from headrace.core.structured_output.backend import Backend, Vocabulary, make_backend
from headrace.frontend.text.formats.declaration import load_format
from headrace.frontend.text.formats.grammar import ForcedCalls, StrictCalls
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import StructuredOutput

NAMES = ("llguidance", "xgrammar")
LETTERS = "a<>/\n"
FORMATS = ("glm45", "deepseek_v32", "minimax_m2", "qwen3_xml", "step3p5")
UNQUOTED = [way for way in WAYS if way.format in FORMATS]
BOUNDS: list[tuple[int, int | None]] = [(0, None), (0, 0), (0, 1), (0, 3), (1, None), (1, 3), (2, 2), (2, None), (3, 5)]
LONGER: list[tuple[int, int | None]] = [(0, 7), (1, 7), (2, 9), (4, 12), (0, 12)]
"""Of several chunks of CHUNK characters."""
CHUNK = 3


def backend_of(name: str, added: tuple[str, ...] = (), special: tuple[str, ...] = ()) -> tuple[Backend, FastTokenizer]:
    pytest.importorskip(name)
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(each, special=False) for each in added])
    size = max(tokenizer.get_vocab().values()) + 1
    end = tokenizer.token_to_id("<|endoftext|>")
    return make_backend(name, Vocabulary(tokenizer.to_str().encode(), size, (end,))), tokenizer


def declared(end: str, least: int, most: int | None, *, line_break: bool = False, **more: Any) -> str:
    text = {"end": end, "minLength": least, "line_break": line_break, **more}
    return f'start: text_1 "Z"\ntext_1: %text {json.dumps(text | ({} if most is None else {"maxLength": most}))}'


def compiled(backend: Backend, grammar: str) -> Any:
    return backend.compile(StructuredOutput(kind="grammar", text=grammar))


def fits(written: str, least: int, most: int | None, *, line_break: bool) -> bool:
    """Whether what is written before the end marker is a text within the bounds."""
    if line_break and written.endswith("\n"):
        written = written[:-1]
    elif line_break and least and len(written) == least:
        return False  # the shortest text is written with its line break
    return least <= len(written) and (most is None or len(written) <= most)


def texts(num: int) -> Iterator[str]:
    for length in range(num + 1):
        yield from map("".join, itertools.product(LETTERS, repeat=length))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("end", ["</>", "aa<"])
@pytest.mark.parametrize("line_break", [False, True])
@pytest.mark.parametrize(
    ("bounds", "chunk"), every(3, [*((each, 64) for each in BOUNDS), *((each, CHUNK) for each in LONGER)])
)
def test_every_text_within_bounds_is_admitted_up_to_its_first_end_and_no_other(
    name: str, end: str, line_break: bool, bounds: tuple[int, int | None], chunk: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(unquoted_texts, "CHUNK", chunk)
    backend, tokenizer = backend_of(name)
    grammar, (least, most) = declared(end, *bounds, line_break=line_break), bounds
    if name == "xgrammar" and least:
        with pytest.raises(InvalidRequestError, match="it does not follow minLength in a text without quotes"):
            compiled(backend, grammar)
        return
    start = compiled(backend, grammar)
    ids = {letter: tokenizer.encode(letter).ids for letter in f"{LETTERS}Z"}
    # Behind filling up to near the bounds, all short texts.
    filled = sorted({0, *(each for each in (least - 2, (most or 0) - 2, chunk - 1) if 0 < each <= (most or 0))})
    for before, short in itertools.product(("a" * each for each in filled), texts(3)):
        written = before + short
        at = (written + end).find(end)
        if at < len(written):  # the first end comes before, and nothing but Z may follow on it
            written = written[:at]
        answer = f"{written}{end}Z"
        matcher, taken = start.copy(), 0
        for letter in answer:
            if not all(map(matcher.accept, ids[letter])):
                break
            taken += 1
        is_admitted = taken == len(answer) and matcher.is_complete
        assert is_admitted == fits(written, least, most, line_break=line_break), answer


def of_way(way: Way, bounds: dict[str, Any]) -> list[str]:
    """The grammars of a call in the family's format with a text of the bounds."""
    calls = load_format(way.format).calls
    assert calls is not None
    tools = [weather(city={"type": "string", **bounds})]
    tools[0]["function"]["parameters"]["required"] = ["city"]
    return [each(calls, tools, {}, several=False).text() for each in (ForcedCalls, StrictCalls)]


def written(way: Way, city: str) -> str:
    return way.write([("get_weather", {"city": city})])


TEXTS = ("x", "é", "😀", "</", "\n", "a<b ")


@pytest.mark.parametrize(
    ("bounds", "name"),
    pairs(({"minLength": 3, "maxLength": 10_000}, {"maxLength": 9}, {"minLength": 2}, {"maxLength": 2000}), NAMES),
    ids=lambda each: "-".join(map(str, each.values())) if isinstance(each, dict) else each,
)
@pytest.mark.parametrize("way", every(2, UNQUOTED), ids=[f"{way.format}-{nth}" for nth, way in enumerate(UNQUOTED)])
def test_a_calls_text_may_have_thousands_of_characters(way: Way, bounds: dict[str, Any], name: str):
    """By tokens of several characters too; with each mask, which the lexer's limits apply to."""
    backend, tokenizer = backend_of(name, ("</parameter>", "</arg_value>"))
    for nth, grammar in enumerate(of_way(way, bounds)[: 2 if bounds == {"maxLength": 9} else 1]):
        if name == "xgrammar" and (nth or bounds != {"maxLength": 9}):
            with pytest.raises(InvalidRequestError, match=r"does not follow|not supported|lazy"):
                compiled(backend, grammar)
            continue
        start, least, most = compiled(backend, grammar), bounds.get("minLength", 0), bounds.get("maxLength", 6000)
        for text in TEXTS if most < 2000 else ("a<b ",):
            longest = (text * most)[:most]
            allowed_after(start, tokenizer.encode(written(way, longest)).ids, tokenizer.get_vocab_size())
            for wrong in ([longest + "x"] if "maxLength" in bounds else []) + ([text[:1]] if least else []):
                ids = tokenizer.encode(written(way, wrong)).ids
                assert start.num_valid(ids) < len(ids)


@pytest.mark.parametrize("most", every(3, [10_000, 2000, 100_000]))
def test_long_texts_are_compiled_in_a_fraction_of_a_second(most: int):
    backend, tokenizer = backend_of("llguidance")
    form = declared("</a_parameter_with_a_long_name>", 3, most)
    start = compiled(backend, form)
    assert least_processor_s(lambda: compiled(backend, form), 1) < 1
    ids = tokenizer.encode("x" * most + "</a_parameter_with_a_long_name>Z").ids
    allowed_after(start, ids, tokenizer.get_vocab_size())


@pytest.mark.parametrize(
    ("name", "bounds", "said"),
    [
        ("llguidance", (0, 10**9), "maxLength of 1000000000, at most 100000; leave"),
        ("llguidance", (50_000, None), "minLength of 50000 up to '</a>'; of such texts minLength may be 800"),
        ("llguidance", (2000, 3000), "2000 and a maxLength of 3000 up to '</a>'; .* minLength may be 1125"),
        ("llguidance", (3, 2), "no text has a minLength of 3 and a maxLength of 2"),
        ("xgrammar", (0, 129), "it does not follow a maxLength of 129 in a text without quotes; at most 128"),
    ],
)
def test_bounds_that_cannot_be_applied_are_refused_by_their_keyword(name: str, bounds: Any, said: str):
    with pytest.raises(InvalidRequestError, match=said):
        compiled(backend_of(name)[0], declared("</a>", *bounds))


@pytest.mark.parametrize(("least", "most"), [(0, 2), (1, 2), (2, None), (3, 300), (0, 10_000), (65, 128)])
def test_a_text_before_a_special_token_is_counted_too(least: int, most: int | None):
    backend, tokenizer = backend_of("llguidance", special=("<|mark|>",))
    mark = tokenizer.token_to_id("<|mark|>")
    start = compiled(backend, declared("", least, most).replace('"Z"', f"<[{mark}]>"))
    for length in {0, 1, 2, least - 1, least, 63, 64, 65, 127, 128, 129, most or 0, (most or 0) + 1} - {-1}:
        matcher = start.copy()
        taken = all(map(matcher.accept, tokenizer.encode("é" * length).ids)) and matcher.accept(mark)
        assert taken == (least <= length and (most is None or length <= most)), length


@pytest.mark.parametrize("least", [0, 3])
@pytest.mark.parametrize("text", ["x", "x<", "x<é", "<é😀"])
def test_a_long_text_is_accepted_again_without_its_masks(least: int, text: str):
    """As after a preemption; the lexer derives all states within one step then."""
    backend, tokenizer = backend_of("llguidance")
    ids = tokenizer.encode((text * 10_000)[:10_000] + "</parameter>Z").ids
    matcher = compiled(backend, declared("</parameter>", least, 10_000))
    assert all(map(matcher.accept, ids))
    assert matcher.is_complete


def test_a_count_beside_a_counted_pattern_is_refused_by_the_keywords():
    """Of hostnames, as one of Firecrawl's tools has it."""
    host = r"(([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z]{2,})"
    with pytest.raises(InvalidRequestError, match="leave out maxLength, minLength or pattern"):
        compiled(backend_of("llguidance")[0], declared("</parameter>", 0, 2048, pattern=host))


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("said", ['{"unknown": 1}', '{"maxLength": "1"}', "{]}"])
def test_a_clients_own_declaration_that_is_malformed_is_refused(name: str, said: str):
    with pytest.raises(InvalidRequestError, match="%text of text"):
        compiled(backend_of(name)[0], f'start: text "Z"\ntext: %text {said}')
