"""Added tokens that are text (`special: false`), with which most families write calls and reasoning: a form that holds
their text takes the token itself, and the same text in letters."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from example_tools import FORCED
from fake_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer
from family_answers import WAYS, Way
from masks_of_grammars import allowed_after
from thinned import every
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from headrace.core.structured_output.backend import Backend, Vocabulary, make_backend
from headrace.frontend.text.formats.channels import ForcedChannelCalls, StrictChannelCalls
from headrace.frontend.text.formats.declaration import load_format
from headrace.frontend.text.formats.grammar import ForcedCalls, StrictCalls
from headrace.ipc.messages import StructuredOutput

NAMES = ("llguidance", "xgrammar")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
TWO: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "x", "days": 3}), ("now", {})]
MARKER = re.compile(r"</?[^<>\s=]+>|\[[A-Z_/]+\]")
WITHOUT_TOKEN = 3
"""Ids at the end of the vocabulary that have no token, as in most models."""


def tokenizer_with(texts: list[str], specials: tuple[str, ...] = ()) -> FastTokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.add_tokens([AddedToken(each, special=False) for each in texts if each not in specials])
    return tokenizer


def backend_of(name: str, tokenizer: FastTokenizer, end: str = "<|endoftext|>") -> Backend:
    size = max(tokenizer.get_vocab().values()) + 1 + WITHOUT_TOKEN
    return make_backend(name, Vocabulary(tokenizer.to_str().encode(), size, (tokenizer.token_to_id(end),)))


def in_letters(tokenizer: FastTokenizer, text: str) -> list[int]:
    """The text's tokens without added ones that are text."""
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [each for each in state["added_tokens"] if each["special"]]
    ids: list[int] = FastTokenizer.from_str(json.dumps(state)).encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", every(3, WAYS), ids=[f"{way.format}-{place}" for place, way in enumerate(WAYS)])
def test_calls_are_admitted_as_the_tokenizer_writes_their_markers_and_in_letters(way: Way, name: str):
    pytest.importorskip(name)
    declared = load_format(way.format)
    calls = TWO[:1] if declared.channels or way.format == "gigachat3" else TWO
    text, is_harmony = way.write(calls), declared.channels is not None
    specials = HARMONY if is_harmony else ()
    tokenizer = tokenizer_with(sorted(set(MARKER.findall(text))), specials)
    backend, ids = backend_of(name, tokenizer), {each: tokenizer.token_to_id(each) for each in specials}
    token_ids, letters = tokenizer.encode(text).ids, in_letters(tokenizer, text)
    if declared.channels is not None:
        grammars = [each(declared.channels, FORCED, ids).text() for each in (ForcedChannelCalls, StrictChannelCalls)]
    else:
        assert declared.calls is not None
        grammars = [each(declared.calls, FORCED, ids, several=True).text() for each in (ForcedCalls, StrictCalls)]
    for grammar in grammars:
        if name == "xgrammar" and " & " in grammar:
            continue  # it refuses this, and llguidance follows it
        start = backend.compile(StructuredOutput(kind="grammar", text=grammar))
        size = tokenizer.get_vocab_size() + WITHOUT_TOKEN
        allowed_after(start, token_ids, size)
        assert start.num_valid(letters) == len(letters)


FORMS = [
    ("regex", "<tool_call>[ab]{2}</tool_call>", "<tool_call>ab</tool_call>"),
    ("regex", r"(.|\n)*", "a <tool_call> b"),
    ("choice", json.dumps(["yes <think>", "<tool_call>no"]), "<tool_call>no"),
    ("json", json.dumps({"type": "array", "items": {"type": "string"}}), '["<think>"]'),
    ("json", json.dumps({"type": "array", "items": {"enum": ["<think>"]}}), '["<think>"]'),
    ("json", json.dumps({"type": "array", "items": {"type": "string", "pattern": "^<think>a"}}), '["<think>a"]'),
    ("grammar", 'start: "<tool_call>" /[0-9]+/ "</tool_call>"', "<tool_call>12</tool_call>"),
    ("grammar", 'root ::= "<tool_call>" [0-9]+ "</tool_call>"', "<tool_call>12</tool_call>"),
    (
        "structural_tag",
        json.dumps(
            {
                "structures": [{"begin": "<tool_call>", "schema": {"type": "integer"}, "end": "</tool_call>"}],
                "triggers": ["<tool_call>"],
            }
        ),
        "so: <tool_call>7</tool_call>",
    ),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("kind", "form", "text"), FORMS)
@pytest.mark.parametrize("tokenizer_of", ["byte_level", "sentencepiece"])
def test_forms_of_every_kind_take_the_token_and_its_letters(kind: Any, form: str, text: str, name: str, tokenizer_of):
    pytest.importorskip(name)
    texts = ["<tool_call>", "</tool_call>", "<think>"]
    tokenizer, end = tokenizer_with(texts), "<|endoftext|>"
    if tokenizer_of == "sentencepiece":
        tokenizer, end = sentencepiece_tokenizer(), "</s>"
        tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in texts])
    backend = backend_of(name, tokenizer, end)
    # xgrammar has no choice of white space within a tag.
    wanted = StructuredOutput(kind=kind, text=form, disable_any_whitespace=kind != "structural_tag")
    start, size = backend.compile(wanted), max(tokenizer.get_vocab().values()) + 1 + WITHOUT_TOKEN
    state = json.loads(tokenizer.to_str())
    pieces = re.split(f"({'|'.join(texts)})", text)
    plain = [tokenizer.token_to_id(each) if each in texts else None for each in pieces]
    token_ids = [
        token_id
        for piece, own in zip(pieces, plain, strict=True)
        for token_id in ([own] if own is not None else spelled(state, piece))
    ]
    allowed_after(start, token_ids, size)
    letters = spelled(state, text)
    assert start.num_valid(letters) == len(letters)


def spelled(state: dict[str, Any], text: str) -> list[int]:
    """The text's tokens without added ones, and without a space before it."""
    plain = {**state, "added_tokens": [each for each in state["added_tokens"] if each["special"]]}
    if plain["pre_tokenizer"]["type"] == "Metaspace":
        plain["pre_tokenizer"] = {**plain["pre_tokenizer"], "prepend_scheme": "never"}
    ids: list[int] = FastTokenizer.from_str(json.dumps(plain)).encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("name", NAMES)
def test_text_never_holds_a_special_token_or_an_end_that_is_not_marked_special(name: str):
    """llguidance only: xgrammar takes a special token for its letters."""
    pytest.importorskip(name)
    tokenizer = tokenizer_with(["<|end|>", "<think>"], ("<|role|>",))
    backend = backend_of(name, tokenizer, "<|end|>")
    start = backend.compile(StructuredOutput(kind="regex", text="x(.|\n)*y"))
    allowed = allowed_after(start, tokenizer.encode("x").ids, tokenizer.get_vocab_size() + WITHOUT_TOKEN)
    assert tokenizer.token_to_id("<think>") in allowed
    assert tokenizer.token_to_id("<|end|>") not in allowed
    if name == "llguidance":
        assert tokenizer.token_to_id("<|role|>") not in allowed


def test_letters_of_a_special_token_are_forced_as_letters():
    """The tokenizer would write the token, which is no text; forcing it would end the request."""
    tokenizer = tokenizer_with([], ("<|role|>",))
    start = backend_of("llguidance", tokenizer).compile(StructuredOutput(kind="regex", text=r"<\|role\|>[ab]+"))
    assert start.num_valid(start.forced_tokens()) == len(start.forced_tokens())
    allowed_after(start, in_letters(tokenizer_with([]), "<|role|>ab"), tokenizer.get_vocab_size() + WITHOUT_TOKEN)


def test_a_model_without_an_end_token_has_masks_of_its_own_size():
    tokenizer = tokenizer_with(["<think>"])
    vocabulary = Vocabulary(tokenizer.to_str().encode(), tokenizer.get_vocab_size(), ())
    start = make_backend("llguidance", vocabulary).compile(StructuredOutput(kind="regex", text="a<think>?"))
    assert allowed_after(start, tokenizer.encode("a").ids, vocabulary.vocab_size)
