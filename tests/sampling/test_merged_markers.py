"""Markers of reasoning that are no tokens of their own, which the tokenizer merges with what stands beside them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models
from fake_tokenizers import bundle_of, sentencepiece_tokenizer
from test_thinking import ENGINE, FORM, ask, form
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from headrace import LLM, SamplingParams, StructuredOutputsParams
from headrace.core.structured_output.backend import Vocabulary, make_backend
from headrace.core.structured_output.thinking import ThinkingMatcher
from headrace.frontend.request.parameters.thinking import thinking_of
from headrace.frontend.request.prompts import Prompt
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.messages import StructuredOutput, Thinking

BEGIN, END = "<think>", "</think>"


def merging_tokenizer() -> FastTokenizer:
    """Its tokens hold beginnings and ends of the markers together with text and lines."""
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([">\n", ">\n\n", "k>The", "k>The", "so.</", "so.</", "<thi", ">\n"] * 20, trainer)
    return tokenizer


TOKENIZER = merging_tokenizer()
OURS = Tokenizer(bundle_of(TOKENIZER))
SIZE = TOKENIZER.get_vocab_size()
BACKEND = make_backend("llguidance", Vocabulary(TOKENIZER.to_str().encode(), SIZE, (0,)))


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text).ids
    return ids


def matcher_of(budget: int | None = None, *, is_open: bool = True, with_form: bool = True) -> ThinkingMatcher:
    near = OURS.tokens_near(END) | OURS.tokens_near(BEGIN)
    thinking = Thinking(
        end=tuple(ids_of(END)), begin=tuple(ids_of(BEGIN)), is_open=is_open, budget=budget,
        begin_text=BEGIN.encode(), end_text=END.encode(), near=tuple(near), near_texts=tuple(near.values()),
    )  # fmt: skip
    compiled = BACKEND.compile(StructuredOutput(kind="regex", text="[0-9]{3}")) if with_form else None
    return ThinkingMatcher(thinking, compiled)


def mask_of(matcher: ThinkingMatcher) -> set[int]:
    mask = np.zeros((1, -(-SIZE // 32)), np.int32)
    matcher.fill_own(0, [], mask)
    rest: Any = matcher.rest(0, [])
    if rest is not None:
        BACKEND.fill([rest], mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:SIZE]).tolist())


def test_the_tokenizer_merges_the_marker_with_its_neighbours():
    assert ids_of(f"so.{END}\n") != [*ids_of("so."), *ids_of(END), *ids_of("\n")]


@pytest.mark.parametrize("space", ["", "\n", "\n\n"])
def test_the_form_begins_behind_a_marker_that_is_merged_with_what_stands_beside_it(space: str):
    matcher = matcher_of()
    for token_id in ids_of(f"hm so.{END}{space}"):
        assert token_id in mask_of(matcher)
        assert matcher.accept(token_id)
    digits = {TOKENIZER.token_to_id(str(digit)) for digit in range(10)}
    assert mask_of(matcher) == digits
    assert all(matcher.accept(token_id) for token_id in ids_of("123"))
    assert matcher.is_complete


def test_a_token_with_the_end_of_the_marker_and_the_beginning_of_the_answer_is_not_allowed_before_a_form():
    tokens = ids_of(f"so.{END}The")
    merged = next(each for each in tokens if TOKENIZER.decode([each]).endswith(">The"))
    for with_form in (True, False):
        matcher = matcher_of(with_form=with_form)
        for token_id in tokens[: tokens.index(merged)]:
            assert matcher.accept(token_id)
        assert (merged in mask_of(matcher)) == (not with_form)
        assert matcher.num_valid([merged]) == (not with_form)
        assert TOKENIZER.token_to_id("k") in mask_of(matcher)
        assert matcher.accept(merged) == (not with_form)


def test_every_reasoning_of_an_answer_without_a_form_has_the_whole_budget():
    matcher, end = matcher_of(budget=3, is_open=True, with_form=False), ids_of(END)
    for text in ("", "The answer.", "a < b", f" {BEGIN[:-1]}"):
        if text:
            begin = [*ids_of(text), *ids_of(BEGIN)]
            assert all(matcher.accept(each) for each in begin)
        thought = [ids_of(each)[0] for each in "abc"]
        assert matcher.num_valid([*thought, end[0], thought[0]]) == len(thought) + 1
        for token_id in thought:
            assert not matcher.forced_tokens()
            assert matcher.accept(token_id)
        assert matcher.forced_tokens() == end
        assert mask_of(matcher) == {end[0]}
        for token_id in end:
            assert matcher.accept(token_id)
        assert len(mask_of(matcher)) == SIZE
        assert not matcher.forced_tokens()
    assert all(matcher.accept(each) for each in ids_of(f"the tag {BEGIN[:-1]} >{END} and so on {END}"))
    assert not matcher.forced_tokens()


def test_a_budget_counts_from_a_beginning_that_is_merged_with_its_neighbour():
    matcher, said = matcher_of(budget=3, is_open=False, with_form=False), ids_of(f"hm{BEGIN}\n\n")
    assert not matcher.forced_tokens()
    for token_id in [*said, *ids_of("abc")]:
        assert matcher.accept(token_id)
    assert matcher.forced_tokens() == ids_of(END)


def test_reasoning_that_has_ended_is_not_ended_again_by_its_budget():
    matcher = matcher_of(budget=40, with_form=False)
    for token_id in ids_of(f"so.{END}\n" + "x" * 100):
        assert matcher.accept(token_id)
        assert not matcher.forced_tokens()


def test_every_token_that_may_write_a_part_of_a_marker_is_found():
    for tokenizer in (TOKENIZER, sentencepiece_tokenizer()):
        ours = Tokenizer(bundle_of(tokenizer, eos_token="</s>"))
        for marker in (END, "the fox: é"):
            near, data = ours.tokens_near(marker), marker.encode()
            for token_id in range(tokenizer.get_vocab_size()):
                token = ours.token_bytes(token_id)
                ends = any(token.endswith(data[:count]) for count in range(1, len(data)))
                begins = any(token.startswith(data[at:]) for at in range(len(data)))
                if token and (ends or begins or data in token or token in data):
                    assert near[token_id].strip() == token.strip()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tiny_models.save("llama", tmp_path_factory.mktemp("model"), tokenizer=True)
    path = tmp_path_factory.mktemp("format") / "words.yaml"
    path.write_text("reasoning: {begin: the mi, end: the wat}\n")
    with LLM(model=str(folder), structured_outputs_config={"reasoning_parser": str(path)}, **ENGINE) as llm:
        ask(llm, "the water", form(regex="ready"))  # starts what tries grammars, which ends with the engine
        yield llm


def test_a_prompt_that_opens_reasoning_in_merged_tokens_is_seen(llm: LLM):
    prompt, tokenizer = "so the mill", llm.get_tokenizer()
    marker = tokenizer.encode("the mi", add_special_tokens=False)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert not any(ids[at : at + len(marker)] == marker for at in range(len(ids)))
    text, token_ids = ask(llm, prompt, form(4, regex=FORM))
    end = tokenizer.encode("the wat", add_special_tokens=False)
    assert token_ids[4 : 4 + len(end)] == end
    assert re.fullmatch(FORM, text.partition("the wat")[2])
    assert re.fullmatch(FORM, ask(llm, "so the mill and the water", form(4, regex=FORM))[0])


ADDED = merging_tokenizer()
ADDED.add_tokens([BEGIN, END])
OF_ONE_TOKEN = Tokenizer(bundle_of(ADDED))
WELCOME: Any = SimpleNamespace(
    grammars_hold_in_reasoning=False, reasoning_parser="qwen3", reasoning_begin="", reasoning_end=""
)


def thinking_in(prompt: str, budget: int = 3, *, with_form: bool = False) -> Thinking | None:
    form = StructuredOutputsParams(regex="a") if with_form else None
    params = SamplingParams(thinking_token_budget=budget, structured_outputs=form)
    ids = OF_ONE_TOKEN.encode(prompt, add_special_tokens=False)
    of_text, of_tokens = (
        thinking_of(params, each, OF_ONE_TOKEN, WELCOME)
        for each in (Prompt(text=prompt, token_ids=ids), Prompt(token_ids=ids))
    )
    assert of_text == of_tokens
    return of_text


def test_a_marker_of_one_token_is_found_where_the_model_writes_it_in_several():
    assert OF_ONE_TOKEN.encode(END, add_special_tokens=False) == [ADDED.token_to_id(END)]
    for ids in (ids_of(f"a{END}"), [TOKENIZER.token_to_id(each) for each in f"a{END}"]):
        thinking = thinking_in(f"hm{BEGIN}", budget=40)
        assert thinking is not None
        compiled = BACKEND.compile(StructuredOutput(kind="regex", text="[0-9]{3}"))
        matcher = ThinkingMatcher(thinking, compiled)
        for token_id in ids:
            assert matcher.present_form is None
            assert matcher.accept(token_id)
        assert matcher.present_form is compiled
    thinking = thinking_in("hm", budget=2)
    assert thinking is not None
    matcher = ThinkingMatcher(thinking, None)
    for each in [*f"so{BEGIN}", "a", "b"]:
        assert not matcher.forced_tokens()
        assert matcher.accept(TOKENIZER.token_to_id(each))
    assert matcher.forced_tokens() == [ADDED.token_to_id(END)]


def test_reasoning_of_an_earlier_turn_is_not_that_of_the_answer():
    for over in (f"{BEGIN}so{END}", f"{BEGIN}so{END}\n\n"):
        assert thinking_in(over, with_form=True) is None
        again = thinking_in(over)
        assert again is not None, "the answer may reason again"
        assert not again.is_open
    before = thinking_in(f"{BEGIN}so{END} it is\nuser: why?\n")
    assert before is not None
    assert not before.is_open
    inside = thinking_in(f"{BEGIN}so{END} it is\nuser: why?\n{BEGIN}")
    assert inside is not None
    assert inside.is_open
