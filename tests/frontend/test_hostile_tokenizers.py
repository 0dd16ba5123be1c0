"""Tokenizers at which the `tokenizers` library panics, or works for ever: the request is refused, all else goes on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest
from fake_core import MemoryCore
from fake_tokenizers import bundle_of, byte_level_tokenizer
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from headrace import LLM, InvalidRequestError, QueueFullError, SamplingParams
from headrace.frontend.text import guarded_tokenizer
from headrace.frontend.text.guarded_tokenizer import GuardedTokenizer, TokenizingError, _may_hang
from headrace.frontend.text.template_renderer import without_blocking
from headrace.frontend.text.tokenizer import Tokenizer

pytest_plugins = "fake_llm"

PANICS = "a" * 40 + "b"
"""A text at which the expression below passes the library's limit of tries."""
SLOW = ("a" * 19 + "b") * 1000
"""One in whose each part it stays below the limit."""


def split_by(expression: str) -> Library:
    library = byte_level_tokenizer()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return library


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(bundle_of(split_by("(a+)+[cd]")))


@pytest.mark.parametrize(
    "work",
    [
        lambda tokenizer: tokenizer.encode(PANICS),
        lambda tokenizer: tokenizer.encode_batch(["a", PANICS]),
        lambda tokenizer: tokenizer.count_tokens(PANICS),
        lambda tokenizer: tokenizer(PANICS, truncation=True, max_length=9),
        lambda tokenizer: tokenizer.tokenize(PANICS),
        lambda tokenizer: tokenizer.apply_chat_template([{"role": "user", "content": PANICS}]),
    ],
)
def test_a_panic_is_a_refusal_that_names_the_prompt(tokenizer: Tokenizer, work: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"the prompt cannot be tokenised: .*retry-limit") as caught:
        work(tokenizer)
    assert caught.value.parameter == "prompt"
    assert tokenizer.decode(tokenizer.encode("aac, b a")) == "aac, b a"


def test_an_ordinary_error_of_the_library_is_a_refusal_too() -> None:
    library = Library(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    tokenizer = Tokenizer(bundle_of(library))
    with pytest.raises(InvalidRequestError, match=r"the prompt cannot be tokenised: .*UNK"):
        tokenizer.encode("b")


def test_a_panic_in_a_decoder_is_a_refusal() -> None:
    library = Library(models.WordLevel({PANICS: 0}, unk_token=PANICS))
    library.decoder = decoders.Replace(Regex("(a+)+$"), "x")
    tokenizer = Tokenizer(bundle_of(library))
    for work in (tokenizer.decode, tokenizer.decode_token, lambda token: tokenizer.batch_decode([[token]])):
        with pytest.raises(InvalidRequestError, match=r"the tokens cannot be made text: .*retry-limit"):
            work(0)


def test_every_call_of_llm_refuses_the_prompt_and_goes_on(core: MemoryCore, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM.attach(core.transport) as llm:
        hostile = Tokenizer(bundle_of(split_by("(a+)+[cd]")))
        monkeypatch.setattr(llm._client._some_client, "tokenizer", hostile)
        for ask in (llm.generate, llm.enqueue, lambda text: llm.chat([{"role": "user", "content": text}])):
            with pytest.raises(InvalidRequestError, match=r"the prompt cannot be tokenised"):
                ask(PANICS)
        with pytest.raises(InvalidRequestError, match=r"the request's text '.*' cannot be tokenised"):
            llm.generate("b", SamplingParams(bad_words=[PANICS]), use_tqdm=False)


def test_what_takes_for_ever_is_refused_and_new_work_while_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # the library works on the thread that calls it
    monkeypatch.setattr(guarded_tokenizer, "MOST_WORK_S", 0.2)
    tokenizer = Tokenizer(bundle_of(split_by("(a+)+[cd]")))
    go_on = threading.Event()
    guarded = tokenizer._tokenizer
    assert isinstance(guarded, GuardedTokenizer)
    with pytest.raises(TokenizingError, match=r"takes more than 0\.2 s of processor time"):
        tokenizer.encode(SLOW)
    try:

        def wait() -> None:
            with contextlib.suppress(QueueFullError):
                guarded._watched("x", lambda: go_on.wait(60))

        waiting = [threading.Thread(target=wait, daemon=True) for _ in range(guarded_tokenizer._MOST_HANGING)]
        for each in waiting:
            each.start()
        while guarded._hanging.acquire(blocking=False):
            guarded._hanging.release()
        with pytest.raises(QueueFullError, match="still works on other prompts"):
            tokenizer.encode("b")
    finally:
        go_on.set()
    for each in waiting:
        each.join()


def test_an_event_loop_goes_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # the library works on the thread that calls it
    monkeypatch.setattr(guarded_tokenizer, "MOST_WORK_S", 0.3)
    tokenizer = Tokenizer(bundle_of(split_by("(a+)+[cd]")))

    async def main() -> int:
        num_turns = 0
        task = asyncio.create_task(without_blocking(lambda: tokenizer.encode(SLOW)))
        while not task.done():
            await asyncio.sleep(0)
            num_turns += 1
        with pytest.raises(TokenizingError):
            await task
        return num_turns

    assert asyncio.run(main()) > 100


@pytest.mark.parametrize(
    ("expression", "may"),
    [
        ("(a+)+$", True),
        ("(?:a|a)*b", True),
        ("a*a*a*b", True),
        ("((a*)b?)*c", True),
        (r"(\(+)+", True),
        (r"\p{N}{1,3}", False),
        (r"[+*]+", False),
        (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", False),
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
            r"|\s+(?!\S)|\s+",
            False,
        ),
        (
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            False,
        ),
    ],
)
def test_usual_expressions_work_in_the_callers_thread(expression: str, may: bool) -> None:
    assert _may_hang(expression) == may
