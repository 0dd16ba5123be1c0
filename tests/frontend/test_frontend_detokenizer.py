"""Text from tokens, piece by piece: the same text however it is cut, no half characters, no stop strings."""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest
import tokenizers
from fake_tokenizers import bundle_of, byte_level_tokenizer, sentencepiece_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from headrace.frontend.text.detokenizer import REPLACEMENT, StopChecker
from headrace.frontend.text.tokenizer import Tokenizer

TEXT = st.text(
    st.one_of(st.sampled_from("the quick fox é世😀\u0301 \n▁"), st.characters(exclude_categories=["Cs"])), max_size=40
)
KINDS = st.sampled_from(["byte_level", "sentencepiece"])


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "byte_level":
        return Tokenizer(bundle_of(byte_level_tokenizer()))
    return Tokenizer(bundle_of(sentencepiece_tokenizer(), bos_token="<s>", eos_token="</s>"))


def cut(draw_cuts: list[int], items: list[int]) -> list[list[int]]:
    """The items in consecutive pieces, some of them empty."""
    bounds = sorted(min(each, len(items)) for each in draw_cuts)
    return [items[start:end] for start, end in pairwise([0, *bounds, len(items)])]


def stream(tokenizer: Tokenizer, pieces: list[list[int]], *, skip: bool, prompt: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip, prompt_token_ids=prompt)
    return [*(detokenizer.extend(piece) for piece in pieces), detokenizer.finish()]


CUTS = st.lists(st.integers(0, 60), max_size=60)


@given(kind=KINDS, text=TEXT, cuts=CUTS)
def test_pieces_of_a_text_join_to_it_and_never_show_half_a_character(kind: str, text: str, cuts: list[int]) -> None:
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, cut(cuts, token_ids), skip=True, prompt=[])
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(kind=KINDS, prompt=TEXT.filter(bool), text=TEXT, cuts=CUTS)
def test_an_output_reads_on_from_its_prompt(kind: str, prompt: str, text: str, cuts: list[int]) -> None:
    tokenizer = tokenizer_of(kind)
    prompt_ids = tokenizer.encode(prompt)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(prompt_ids + token_ids, skip_special_tokens=True)
    pieces = stream(tokenizer, cut(cuts, token_ids), skip=True, prompt=prompt_ids)
    assert tokenizer.decode(prompt_ids, skip_special_tokens=True) + "".join(pieces) == whole


@given(token_ids=st.lists(st.integers(0, 450), max_size=40), cuts=CUTS, skip=st.booleans())
def test_byte_level_pieces_equal_decode_for_any_tokens_at_all(
    token_ids: list[int], cuts: list[int], skip: bool
) -> None:
    tokenizer = tokenizer_of("byte_level")
    pieces = stream(tokenizer, cut(cuts, token_ids), skip=skip, prompt=[])
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@given(token_ids=st.lists(st.integers(0, 310), max_size=60), cuts=CUTS, skip=st.booleans())
def test_sentencepiece_text_does_not_depend_on_how_the_tokens_come(
    token_ids: list[int], cuts: list[int], skip: bool
) -> None:
    tokenizer = tokenizer_of("sentencepiece")
    one_by_one = stream(tokenizer, [[each] for each in token_ids], skip=skip, prompt=[])
    assert "".join(stream(tokenizer, cut(cuts, token_ids), skip=skip, prompt=[])) == "".join(one_by_one)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_character_is_held_back_until_its_last_byte(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer.encode("a🦀", add_special_tokens=False)
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.extend([token_id]) for token_id in token_ids]
    assert len(pieces) > 2, "the crab must be several tokens for this to mean anything"
    assert [piece for piece in pieces if piece] == ["a", "🦀"]
    assert pieces[-1] == "🦀"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_an_unfinished_character_is_replaced_at_the_end_only(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer.encode("a🦀", add_special_tokens=False)[:-1]
    pieces = stream(tokenizer, [[token_id] for token_id in token_ids], skip=True, prompt=[])
    assert "".join(pieces[:-1]) == "a"
    assert set(pieces[-1]) == {REPLACEMENT}
    assert "".join(pieces) == tokenizer.decode(token_ids)


@pytest.mark.parametrize(("kind", "special"), [("byte_level", "<|im_end|>"), ("sentencepiece", "</s>")])
def test_special_tokens_are_shown_or_skipped(kind: str, special: str) -> None:
    tokenizer = tokenizer_of(kind)
    token_ids = [*tokenizer.encode("fox", add_special_tokens=False), tokenizer.convert_tokens_to_ids(special)]
    pieces = [[each] for each in token_ids if each is not None]
    assert "".join(stream(tokenizer, pieces, skip=True, prompt=[])) == "fox"
    assert "".join(stream(tokenizer, pieces, skip=False, prompt=[])) == "fox" + special


def test_a_long_run_of_bytes_that_are_no_text_is_given_in_the_end_and_costs_little() -> None:
    tokenizer = tokenizer_of("sentencepiece")
    broken = tokenizer.convert_tokens_to_ids("<0xFF>")
    assert broken is not None
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.extend([broken]) for _ in range(100)]
    assert any(pieces), "text was held back without end"
    assert "".join([*pieces, detokenizer.finish()]) == REPLACEMENT * 100


def test_a_prompt_of_byte_tokens_does_not_spoil_the_output() -> None:
    tokenizer = tokenizer_of("sentencepiece")
    prompt = tokenizer.encode("x" + "😀" * 5)
    token_ids = tokenizer.encode("🦀", add_special_tokens=False)[-4:]
    assert "".join(stream(tokenizer, [token_ids], skip=True, prompt=prompt)) == "🦀"


STOPS = st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=3)


def first_stop(text: str, stops: list[str]) -> str | None:
    """What should be found, by trying each length of text."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return max(complete, key=len)
    return None


@given(text=st.text("ab.", max_size=20), stops=STOPS, cuts=CUTS, include=st.booleans())
def test_stop_strings_never_leak_wherever_the_text_is_split(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    checker = StopChecker(stops, include_in_output=include)
    given_text = ""
    for piece in cut(cuts, list(text)):  # type: ignore[arg-type]
        given_text += checker.add("".join(piece))  # type: ignore[arg-type]
        if checker.matched is not None:
            break
        assert first_stop(given_text, stops) is None
    if checker.matched is None:
        given_text += checker.finish()
    expected = first_stop(text, stops)
    assert checker.matched == expected
    if expected is None:
        assert given_text == text
    else:
        end = next(end for end in range(len(text) + 1) if first_stop(text[:end], stops))
        assert given_text == text[: end if include else end - len(expected)]


@pytest.mark.parametrize("stops", [["b", "ab", "xb"], ["ab", "b"]])
def test_of_two_stop_strings_that_end_together_the_longer_counts(stops: list[str]) -> None:
    for pieces in (["ab"], ["a", "b"]):
        checker = StopChecker(stops)
        assert "".join(checker.add(piece) for piece in pieces) == ""
        assert checker.matched == "ab"


def test_text_that_cannot_become_a_stop_string_is_not_held_back() -> None:
    checker = StopChecker(["STOP"])
    assert checker.add("hello") == "hello"
    assert checker.add(" ST") == " "
    assert checker.add("AY") == "STAY"
    assert checker.matched is None


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_tokens_bytes_are_its_part_of_the_text_also_inside_a_character(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer.encode("🦀", add_special_tokens=False)
    parts = [tokenizer.token_bytes(each) for each in token_ids]
    assert b"".join(parts).strip().decode() == "🦀"
    assert any(REPLACEMENT in part.decode(errors="replace") for part in parts), "each token is a whole character"


@pytest.mark.parametrize(("spaces", "expected"), [(True, "a <x> <y> b"), (False, "a <x><y> b")])
def test_spaces_between_special_tokens_are_left_out_where_asked(spaces: bool, expected: str) -> None:
    """As transformers' slow tokenizers do it. A tokenizer of whole words decodes with a space between any two."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.add_special_tokens(["<x>", "<y>"])
    detokenizer = Tokenizer(bundle_of(words)).detokenizer(
        skip_special_tokens=False, spaces_between_special_tokens=spaces
    )
    assert "".join([detokenizer.extend([0, 2]), detokenizer.extend([3]), detokenizer.extend([1])]) == expected
