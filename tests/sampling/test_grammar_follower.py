"""The process that follows grammars for the engine: what it is killed by ends its own request, and changes no other."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tiny_models
from deadly_grammars import COMPUTING, DEADLY, DEADLY_TO_COMPILE, WAITING, deadly_helper
from patience import has_ended, wait_until
from test_grammar_backends import BACKENDS, VOCAB_SIZE, VOCABULARY, tokens_of
from test_hostile_forms import forked_by
from test_plain_forms import helpers_of
from test_structured_outputs import ENGINE, PERSON, ask, form
from thinned import every

from headrace import LLM
from headrace.core.options.structured_outputs import StructuredOutputs
from headrace.core.structured_output.backend import Matcher
from headrace.core.structured_output.backends import Backends
from headrace.core.structured_output.follower import FollowedMatcher, Follower
from headrace.core.structured_output.held_memory import HeldMemory
from headrace.core.structured_output.helper.trial import Trial
from headrace.core.structured_output.thinking import ThinkingMatcher
from headrace.ipc.failure import HeadraceError, InvalidRequestError
from headrace.ipc.messages import StructuredOutput, Thinking

(CRASHES,), (HANGS,), (CRASHES_LATER,) = tokens_of("X"), tokens_of("Y"), tokens_of("Z")
FORM = "[a-zA-Z]{3,40}"


@contextlib.contextmanager
def started() -> Iterator[Follower]:
    follower = Follower(VOCABULARY, "llguidance")
    follower.helper = deadly_helper(follower.helper, CRASHES, HANGS, CRASHES_LATER)
    follower.start()
    try:
        yield follower
    finally:
        follower.stop()


@pytest.fixture(scope="module")
def follower() -> Iterator[Follower]:
    with started() as follower:
        yield follower


@pytest.fixture
def own_follower() -> Iterator[Follower]:
    """For tests in which the process may end while it answers, which ends the helper too."""
    with started() as follower:
        yield follower


def matcher_of(follower: Follower, pattern: str, backend: str = "llguidance") -> FollowedMatcher:
    return follower.compile(backend, StructuredOutput(kind="regex", text=pattern), HeldMemory().hold(1))


def masks_of(follower: Follower, matchers: Sequence[FollowedMatcher], drafts: Sequence[int] = ()) -> np.ndarray:
    size = len(drafts) + 1
    masks = np.zeros((len(matchers) * size, -(-VOCAB_SIZE // 32)), np.int32)
    follower.begin([(each, nth * size, list(drafts)) for nth, each in enumerate(matchers)]).write(masks)
    return masks


def mask_here(pattern: str, backend: str, token_ids: Sequence[int]) -> np.ndarray:
    """The mask that the library makes in this process."""
    matcher = BACKENDS[backend].compile(StructuredOutput(kind="regex", text=pattern))
    for token_id in token_ids:
        assert matcher.accept(token_id)
    mask = np.zeros((1, -(-VOCAB_SIZE // 32)), np.int32)
    BACKENDS[backend].fill([(matcher, 0, [])], mask)
    return mask[0]


def following_process(follower: Follower) -> psutil.Process:
    """That of the last lane, which is the youngest: the others are not ended here."""
    follower.start()  # anew, where its end has been found out
    helper = psutil.Process(follower.helper.pid)

    def lanes() -> list[psutil.Process]:
        return [each for each in helper.children() if not has_ended(each)]

    # One that is killed while it finishes an answer takes the helper with it, which its next user finds out.
    wait_until(lambda: has_ended(helper) or len(lanes()) == 3, 30, "a process for each lane")
    return max(lanes() or [helper], key=lambda each: (each.create_time(), each.pid))


def advance(follower: Follower, passed: Sequence[tuple[FollowedMatcher, int]]) -> list[bool]:
    follower.advance([(matcher, [token_id]) for matcher, token_id in passed])
    return [matcher.accept(token_id) for matcher, token_id in passed]


ON_ITS_OWN = """
import sys
import numpy as np
from headrace.core.options.structured_outputs import StructuredOutputs
from headrace.core.structured_output.backend import Vocabulary
from headrace.core.structured_output.backends import Backends
from headrace.ipc.messages import StructuredOutput

backends = Backends(StructuredOutputs(), Vocabulary(sys.stdin.buffer.read(), {size}, (0,)))
for name in ("llguidance", "xgrammar"):
    matcher = backends.compile(StructuredOutput(kind="regex", text="[ab]+c", backend=name))
    masks = np.zeros((1, -(-{size} // 32)), np.int32)
    backends.begin([(matcher, 0, [])])(masks)
    assert masks.any() and not (masks == -1).all()
backends.stop()
modules = [each for each in sys.modules if each.partition(".")[0] in ("llguidance", "xgrammar", "tvm_ffi")]
with open("/proc/self/maps") as file:
    print(modules, [line for line in file if "llguidance" in line or "xgrammar" in line])
"""


def test_no_library_that_reads_grammars_is_in_the_engine() -> None:
    """A grammar that such a library dies of ends no engine."""
    command = [sys.executable, "-c", ON_ITS_OWN.format(size=VOCAB_SIZE)]
    done = subprocess.run(command, input=VOCABULARY.tokenizer_json, capture_output=True, timeout=120, check=False)
    assert done.stdout.decode().split() == ["[]", "[]"], done.stderr.decode()


@pytest.mark.parametrize("backend", every(2, BACKENDS))
@pytest.mark.parametrize("end", ["kill", "crash"])
def test_matchers_go_on_after_the_process_ended(follower: Follower, backend: str, end: str) -> None:
    matchers = [matcher_of(follower, FORM, backend) for _ in range(3)]
    deadly = matcher_of(follower, DEADLY + FORM, backend)
    said: list[list[int]] = [tokens_of(text) for text in ("ab", "cd", "ef")]
    for nth in range(2):
        assert all(advance(follower, [(each, ids[nth]) for each, ids in zip(matchers, said, strict=True)]))
    assert advance(follower, [(deadly, tokens_of("z")[0])]) == [True]
    if end == "kill":
        following_process(follower).kill()
        taken = advance(follower, [(each, tokens_of("q")[0]) for each in (*matchers, deadly)])
        assert taken == [True] * 4
    else:
        (q,) = tokens_of("q")
        taken = advance(follower, [(matchers[0], q), (deadly, CRASHES), (matchers[1], q)])
        assert taken == [True, False, True]
        assert "ended with status -11" in deadly.problem
        assert advance(follower, [(matchers[2], tokens_of("q")[0])]) == [True]
    for mask, ids in zip(masks_of(follower, matchers), said, strict=True):
        assert np.array_equal(mask, mask_here(FORM, backend, [*ids, *tokens_of("q")]))
    assert not any(each.problem for each in matchers)


@pytest.mark.parametrize("num_others", [0, 3, 12])
def test_a_mask_that_ends_the_process_ends_its_own_request(follower: Follower, num_others: int) -> None:
    """Many masks are made at once, so it has to be found out whose it was."""
    others = [matcher_of(follower, FORM) for _ in range(num_others)]
    deadly = matcher_of(follower, DEADLY + FORM)
    for token_id in (tokens_of("z")[0], CRASHES_LATER):
        assert advance(follower, [(deadly, token_id)]) == [True]
    masks = masks_of(follower, [*others, deadly])
    assert "ended with status -11" in deadly.problem
    assert (masks[-1] == -1).all(), "its next token ends the request, whichever it is"
    for mask in masks[:-1]:
        assert np.array_equal(mask, mask_here(FORM, "llguidance", []))
    assert not any(each.problem for each in others)
    assert not deadly.accept(tokens_of("a")[0])


def test_a_token_that_hangs_ends_its_own_request(follower: Follower) -> None:
    other, deadly = matcher_of(follower, FORM), matcher_of(follower, DEADLY + FORM)
    assert advance(follower, [(deadly, tokens_of("z")[0])]) == [True]
    assert advance(follower, [(other, tokens_of("a")[0]), (deadly, HANGS)]) == [True, False]
    assert "and has no end" in deadly.problem
    assert not other.problem


def test_tokens_are_passed_on_ahead_and_a_matcher_may_go_another_way(follower: Follower) -> None:
    matcher, (a, b, c) = matcher_of(follower, "a(b|c)+"), (tokens_of(each)[0] for each in "abc")
    follower.advance([(matcher, [a, b, b])])
    assert matcher.accept(a)
    assert matcher.accept(c), "another one came"
    assert np.array_equal(masks_of(follower, [matcher])[0], mask_here("a(b|c)+", "llguidance", [a, c]))
    twin = matcher.copy()
    assert not twin.accept(a)
    assert matcher.accept(b)
    assert matcher.num_valid([b, c, a, b]) == 2


def test_the_drafts_of_all_rows_are_asked_about_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = Backends(StructuredOutputs(), VOCABULARY)
    try:
        start = backends.compile(StructuredOutput(kind="regex", text="(ab)*c"))
        thinking = ThinkingMatcher(Thinking(end=tuple(tokens_of("X")), is_open=True, budget=2), start.copy())
        tried: list[tuple[Matcher, str, int]] = [
            *((start.copy(), text, num) for text, num in (("abab", 4), ("abb", 2), ("c", 1), ("b", 0), ("abc", 3))),
            (thinking, "zXabx", 4),
            (thinking, "zz", 2),
            (thinking, "zzz", 2),
        ]
        sent, send = list[object](), backends._follower.helper.send

        def counted(lane: int, message: object, *more: Any) -> Any:
            sent.append(message)
            return send(lane, message, *more)

        monkeypatch.setattr(backends._follower.helper, "send", counted)
        asked = [(matcher, tokens_of(text)) for matcher, text, _ in tried]
        assert backends.num_valid(asked) == [num for *_, num in tried]
        assert len(sent) == 1
        assert [matcher.num_valid(token_ids) for matcher, token_ids in asked] == [num for *_, num in tried]
    finally:
        backends.stop()


def test_speculation_beside_forms_asks_once_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_models.save("llama", tmp_path / "model", tokenizer=True)
    of_step, num_valid = list[int](), Follower.num_valid

    def counted(follower: Follower, tried: Sequence[Any]) -> list[int]:
        of_step.append(len(tried))
        return num_valid(follower, tried)

    monkeypatch.setattr(Follower, "num_valid", counted)
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    asked = [form(regex="[ab]{60}", seed=n, max_tokens=100) for n in range(6)]
    with LLM(model=str(folder), in_process=True, **ENGINE) as llm:
        expected = ask(llm, asked)
    with LLM(model=str(folder), in_process=True, speculative_config=drafts, **ENGINE) as llm:
        assert ask(llm, asked) == expected
        assert llm.get_stats().steps >= len(of_step) > 0
    assert max(of_step) > 1


def test_masks_that_were_begun_are_kept_while_other_messages_pass(follower: Follower) -> None:
    matcher, other = matcher_of(follower, FORM), matcher_of(follower, "[0-9]+")
    begun = follower.begin([(matcher, 0, [])])
    assert other.accept(tokens_of("7")[0])
    later = follower.begin([(other, 0, [])])
    masks = np.zeros((1, -(-VOCAB_SIZE // 32)), np.int32)
    begun.write(masks)
    assert np.array_equal(masks[0], mask_here(FORM, "llguidance", []))
    later.write(masks)
    assert np.array_equal(masks[0], mask_here("[0-9]+", "llguidance", tokens_of("7")))


def test_a_form_that_cannot_be_compiled_is_refused_with_its_reason(follower: Follower) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        matcher_of(follower, "a(")


def test_what_is_not_used_any_more_is_forgotten(follower: Follower) -> None:
    matcher = matcher_of(follower, FORM)
    assert matcher.accept(tokens_of("a")[0])
    del matcher
    assert (len(follower.closed), len(follower.forgotten)) == (1, 1)
    assert matcher_of(follower, FORM).accept(tokens_of("a")[0])
    assert (len(follower.closed), len(follower.forgotten)) <= (1, 1)


def slow_form(nth: int, num_words: int) -> str:
    words = "|".join(f"w{n}x{7 * n}" for n in range(num_words))
    return f"a{nth}?({words})+"


def test_forms_that_are_not_used_any_more_are_forgotten_without_a_step(follower: Follower) -> None:
    """Requests may be aborted while their forms are compiled, again and again."""
    matcher_of(follower, slow_form(0, 5000))
    process = following_process(follower)
    before = process.memory_info().rss
    for nth in range(1, 9):
        matcher_of(follower, slow_form(nth, 5000))
    assert process.memory_info().rss < before + (8 << 20), "together they take 13 MiB"


@pytest.mark.system
def test_forms_that_take_long_are_compiled_again_after_the_process_was_killed(own_follower: Follower) -> None:
    """Together they take longer than one message may."""
    matchers = [matcher_of(own_follower, slow_form(nth, 12500)) for nth in range(12)]
    following_process(own_follower).kill()
    (a,) = tokens_of("a")
    taken = advance(own_follower, [(each, a) for each in matchers])
    assert {each.problem for each in matchers} == {""}
    assert taken == [True] * len(matchers)


def test_a_process_that_is_killed_from_outside_refuses_no_form(own_follower: Follower) -> None:
    ended = threading.Event()

    def kill() -> None:
        try:
            for _ in range(3):
                time.sleep(0.15)
                following_process(own_follower).kill()
        finally:
            ended.set()

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill)
        while not ended.is_set():
            assert matcher_of(own_follower, slow_form(0, 10000)).accept(tokens_of("a")[0])
        killing.result()


def test_what_ends_its_compiler_is_refused_and_what_is_compiled_beside_it_is_not(
    own_follower: Follower,
) -> None:
    with ThreadPoolExecutor(2) as pool:
        deadly = pool.submit(matcher_of, own_follower, DEADLY_TO_COMPILE)
        while not deadly.done():  # those that begin later, and end later
            assert matcher_of(own_follower, slow_form(0, 10000)).accept(tokens_of("a")[0])
        with pytest.raises(InvalidRequestError, match="its compiler ended twice"):
            deadly.result()


def test_a_compilation_without_an_end_is_given_up_and_disturbs_no_other(own_follower: Follower) -> None:
    other = matcher_of(own_follower, FORM)
    with pytest.raises(InvalidRequestError, match="has no end"):
        matcher_of(own_follower, COMPUTING + FORM)
    assert advance(own_follower, [(other, tokens_of("a")[0])]) == [True]


def choices(*texts: str) -> StructuredOutput:
    """A plain form, as `DEADLY` and its like are in a text here."""
    return StructuredOutput(kind="choice", text=json.dumps(texts))


def untried(follower: Follower, wanted: StructuredOutput) -> FollowedMatcher | None:
    return follower.compile_untried("llguidance", wanted, HeldMemory().hold(1))


def test_a_plain_form_is_followed_without_a_trial(own_follower: Follower) -> None:
    matcher = untried(own_follower, choices("ab", "cd"))
    assert matcher is not None
    (a, b, c) = (tokens_of(each)[0] for each in "abc")
    following_process(own_follower).kill()
    assert advance(own_follower, [(matcher, a)]) == [True]
    assert np.array_equal(masks_of(own_follower, [matcher])[0], mask_here("ab|cd", "llguidance", [a]))
    assert not matcher.copy().accept(c)
    assert matcher.accept(b)


def test_a_plain_form_that_no_answer_can_have_is_refused_without_a_trial(own_follower: Follower) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "enum": ["b"]}}, "required": ["a"]}
    wanted = StructuredOutput(kind="json", text=json.dumps(schema))
    with pytest.raises(InvalidRequestError) as refused:
        untried(own_follower, wanted)
    with pytest.raises(InvalidRequestError) as refused_by_trial:
        Trial(own_follower.helper).check("llguidance", wanted)
    assert str(refused.value) == str(refused_by_trial.value)


@pytest.mark.parametrize("text", [DEADLY_TO_COMPILE, pytest.param(COMPUTING, marks=pytest.mark.system)])
def test_a_plain_form_that_ends_its_process_is_tried_and_so_are_all_for_a_while(
    own_follower: Follower, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, backends = matcher_of(own_follower, FORM), Backends(StructuredOutputs(), VOCABULARY)
    backends._follower, backends._trial = own_follower, Trial(own_follower.helper)
    # The processor time of what has no end, which a busy machine gives late.
    monkeypatch.setattr("headrace.core.structured_output.helper.trial.MOST_WAIT_S", 600.0)
    monkeypatch.setattr("headrace.core.structured_output.follower._DOUBT_S", 3600.0)
    life = own_follower.life
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=r"cannot be compiled|takes more than 1 s"):
            backends.compile(choices(text))
        assert own_follower.life == life + 1, "once, then trials told"
    assert untried(own_follower, choices("ab")) is None
    assert backends.compile(choices("ab")).accept(tokens_of("a")[0])
    assert advance(own_follower, [(other, tokens_of("a")[0])]) == [True]
    monkeypatch.setattr(own_follower, "_trusts_at_s", time.monotonic())
    assert untried(own_follower, choices("ab")) is not None


def test_a_form_that_takes_long_is_tried_though_it_seems_plain(own_follower: Follower) -> None:
    """Its trial measures the memory that it takes."""
    num_words = 1000
    while untried(own_follower, StructuredOutput(kind="regex", text=slow_form(0, num_words))) is not None:
        num_words *= 2  # to what takes longer than it may, on whatever machine, but not ten times as long
    assert num_words > 1000
    assert time.monotonic() > own_follower._trusts_at_s, "it did no harm"


def test_a_trial_that_takes_too_long_by_the_clock_ends_no_other_process(
    own_follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.core.structured_output.helper.trial.MOST_WAIT_S", 1.0)
    before, following = matcher_of(own_follower, FORM), following_process(own_follower)
    with pytest.raises(InvalidRequestError, match="not compiled within 1 s"):
        Trial(own_follower.helper).check("llguidance", StructuredOutput(kind="regex", text=WAITING + FORM))
    assert advance(own_follower, [(before, tokens_of("a")[0])]) == [True]
    assert following.is_running()
    assert following.ppid() == own_follower.helper.pid


def test_a_process_that_is_killed_again_and_again_ends_the_requests(own_follower: Follower, monkeypatch: Any) -> None:
    def killed(*message: Any) -> Any:
        process = following_process(own_follower)
        process.kill()
        wait_until(lambda: has_ended(process), 30, "its end before a message comes")
        return send(*message)

    matcher, send = matcher_of(own_follower, FORM), own_follower.helper.send
    with monkeypatch.context() as patched:
        patched.setattr(own_follower.helper, "send", killed)
        assert not matcher.accept(tokens_of("a")[0])
    assert "killed again and again" in matcher.problem
    assert matcher_of(own_follower, FORM).accept(tokens_of("a")[0])


@pytest.mark.system
def test_answers_are_the_same_whenever_the_process_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_answers, note = itertools.count(), Follower._note
    answered = next(num_answers)

    def noted(*of: Any) -> None:
        nonlocal answered
        answered = next(num_answers)
        note(*of)

    monkeypatch.setattr(Follower, "_note", noted)
    folder = tiny_models.save("llama", tmp_path / "model", tokenizer=True)
    asked = [form(json=PERSON, seed=n) for n in range(4)]
    asked += [form(regex="([a-z]{2,5} ){20}", seed=n) for n in range(4)]
    ended = threading.Event()
    with LLM(model=str(folder), in_process=True, **ENGINE) as llm:
        expected = ask(llm, asked)
        killed = list[int]()

        def kill() -> None:
            before = 0
            while not ended.wait(0.05):
                if answered == before:
                    continue  # one that answers nothing on a busy machine must not be the eighth in turn
                before = answered
                with contextlib.suppress(psutil.NoSuchProcess, ValueError):  # its successor is not there yet
                    (helper,) = helpers_of(psutil.Process())
                    _, _, following = forked_by(helper)
                    if following.pid not in killed:
                        killed.append(following.pid)
                        following.kill()

        with ThreadPoolExecutor(1) as pool:
            killing = pool.submit(kill)
            try:
                for _ in range(5):
                    assert ask(llm, asked) == expected
            finally:
                ended.set()
            killing.result()
        assert len(killed) > 1


MANY_MASKS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_STACK, (1 << 30, resource.getrlimit(resource.RLIMIT_STACK)[1]))
import numpy as np
from headrace.core.structured_output.backend import Vocabulary
from headrace.core.structured_output.follower import Follower
from headrace.core.structured_output.held_memory import HeldMemory
from headrace.core.structured_output.helper.trial import Trial
from headrace.ipc.messages import StructuredOutput

follower = Follower(Vocabulary(sys.stdin.buffer.read(), {size}, (0,)), {backend!r})
start = follower.compile({backend!r}, StructuredOutput(kind="regex", text="[ab]+c"), HeldMemory().hold(1))
matchers = [start.copy() for _ in range(12)]
masks = np.zeros((12, -(-{size} // 32)), np.int32)
follower.begin([(each, nth, []) for nth, each in enumerate(matchers)]).write(masks)
life = follower.life
follower.stop()
print({{each.problem for each in matchers}}, life)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_stacks_of_a_librarys_threads_take_nothing_from_the_forms(backend: str) -> None:
    """A machine of many cores has a thread for each; here two have large stacks."""
    command = [sys.executable, "-c", MANY_MASKS.format(size=VOCAB_SIZE, backend=backend)]
    done = subprocess.run(command, input=VOCABULARY.tokenizer_json, capture_output=True, timeout=120, check=False)
    assert done.stdout.decode().strip() == "{''} 1", done.stderr.decode()


def test_a_form_is_tried_again_after_its_processes_were_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*of: Any) -> Any:
        raise HeadraceError("the process that tries grammars was killed twice")

    folder = tiny_models.save("llama", tmp_path / "model", tokenizer=True)
    with LLM(model=str(folder), in_process=True, **ENGINE) as llm:
        with monkeypatch.context() as patched:
            patched.setattr("headrace.core.structured_output.helper.trial.Trial.check", killed)
            with pytest.raises(HeadraceError, match="killed twice"):
                ask(llm, form(regex="[ab]{3}"))
        assert len(ask(llm, form(regex="[ab]{3}"))[0]) == 3
