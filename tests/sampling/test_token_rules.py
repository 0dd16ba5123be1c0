"""logit_bias, allowed_token_ids and bad_words: what is refused, how words become tokens, and what models answer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import tiny_models
from fake_core import memory_core
from fake_tokenizers import bundle_of, byte_level_tokenizer, sentencepiece_tokenizer
from processor_time import least_processor_s, processor_s

from headrace import LLM, InvalidRequestError, SamplingParams
from headrace.executor.sampling.token_rules import rules_of
from headrace.frontend.http.apis.openai.parameters import sampling_params
from headrace.frontend.http.apis.openai.requests import ChatCompletionRequest, CompletionRequest
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.decoding.decoder import RequestDecoder
from headrace.frontend.http.server.errors import ApiError
from headrace.frontend.request.parameters.token_rules import MOST_BAD_CHARACTERS, MOST_BAD_WORDS, tokenize_bad_words
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.messages import AddRequest, Sampling

VOCAB_SIZE = 400

# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("logit_bias", {"5": 1.0}, "logit_bias has the key '5', which is no token id"),
        ("logit_bias", {-1: 1.0}, "logit_bias has the key -1, which is no token id"),
        ("logit_bias", {True: 1.0}, "logit_bias has the key True, which is no token id"),
        ("logit_bias", {5: "much"}, "logit_bias[5] = 'much': must be a finite number of at most 1000000, or -inf"),
        ("logit_bias", {5: math.nan}, "logit_bias[5] = nan: must be a finite number of at most 1000000, or -inf"),
        ("logit_bias", {5: math.inf}, "logit_bias[5] = inf: must be a finite number of at most 1000000, or -inf"),
        ("allowed_token_ids", [], "allowed_token_ids = []: allows no token at all; None allows every token"),
        ("allowed_token_ids", [3, 1.5], "allowed_token_ids contains 1.5, which is no token id"),
        ("bad_words", ["a", 5], "bad_words contains 5: it must contain only strings that are not empty"),
        ("bad_words", ["a", " "], "bad_words contains ' ': it must contain only strings that are not empty"),
        ("bad_words", ["a"] * (MOST_BAD_WORDS + 1), "at most 1024 words of 16384 characters together are taken"),
        ("bad_words", ["a" * 17_000], "bad_words has 1 words of 17000 characters"),
    ],
)
def test_what_cannot_be_is_refused_with_what_was_wrong(field: str, value: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert said in str(caught.value)


@pytest.mark.parametrize("num_words", [1, 64, MOST_BAD_WORDS])
def test_as_many_bad_words_as_may_be_cost_a_few_times_a_text_of_their_length(num_words: int) -> None:
    """In the event loop's thread, of whose processor seconds these are; the least of several, on a busy machine. A text
    of 16,384 characters takes some 10 ms, and a stall of 50 is too long."""
    tokenizer, length = Tokenizer(bundle_of(byte_level_tokenizer(VOCAB_SIZE))), MOST_BAD_CHARACTERS // num_words
    words = [f"{each}{'ab ' * length}"[: length - 1] + "x" for each in range(num_words)]
    SamplingParams(bad_words=words)
    text, tokenise = "".join(words), lambda: tokenize_bad_words(words, tokenizer, VOCAB_SIZE)
    assert len(tokenise()) >= num_words
    most_s = 10 * min(processor_s(lambda: tokenizer.encode(text)) for _ in range(3))
    assert least_processor_s(tokenise, most_s) < most_s


def test_tokens_that_the_model_does_not_have_are_refused_before_anything_is_sent() -> None:
    with memory_core() as core, LLM.attach(core.transport) as llm:
        most = llm.engine.vocab_size - 1
        for params in (SamplingParams(logit_bias={most + 1: 1}), SamplingParams(allowed_token_ids=[0, most + 1])):
            with pytest.raises(InvalidRequestError, match=f"contains {most + 1}: .* ids are 0 to {most}"):
                llm.generate([[5]], params, use_tqdm=False)
        assert not any(isinstance(each, AddRequest) for each in core.core.received)
        llm.generate([[5]], SamplingParams(logit_bias={most: 1}, bad_words=["dog"], max_tokens=1), use_tqdm=False)
        (sent,) = (each.task.sampling for each in core.core.received if isinstance(each, AddRequest))
        assert sent.logit_bias == {most: 1.0}
        assert len(sent.bad_words) == 2, "the word alone, and after a space"


def test_from_optional_takes_a_bias_as_openai_has_it() -> None:
    assert SamplingParams.from_optional(logit_bias={"5": 1e4, 6: -math.inf, "7": 0.5}).logit_bias == {
        5: 100.0,
        6: -100.0,
        7: 0.5,
    }
    assert SamplingParams.from_optional(logit_bias=None).logit_bias is None
    with pytest.raises(InvalidRequestError, match=r"keys that are no token ids: 'five'$"):
        SamplingParams.from_optional(logit_bias={"five": 1})


def test_numpys_ids_and_numbers_leave_as_pythons() -> None:
    params = SamplingParams(logit_bias={np.int64(5): np.float32(2)}, allowed_token_ids=[np.int32(7)])  # type: ignore
    wire = params.to_wire(5)
    assert msgspec.convert(msgspec.to_builtins(wire), Sampling) == wire
    assert (wire.logit_bias, wire.allowed_token_ids) == ({5: 2.0}, (7,))


# --- words to tokens --------------------------------------------------------------------------------------------


def runs_of(words: list[str], tokenizer: Any) -> list[list[int]]:
    return [list(run) for run in tokenize_bad_words(words, Tokenizer(bundle_of(tokenizer)), VOCAB_SIZE)]


def test_a_word_is_found_alone_and_after_a_space() -> None:
    tokenizer = byte_level_tokenizer()
    alone, spaced = tokenizer.encode("lazy").ids, tokenizer.encode(" lazy").ids
    assert (len(alone), len(spaced)) == (2, 1)
    assert runs_of(["lazy"], tokenizer) == runs_of([" lazy", "lazy"], tokenizer) == [alone, spaced]


def test_a_space_that_is_a_token_of_its_own_needs_no_second_run() -> None:
    tokenizer = byte_level_tokenizer()
    (alone,), spaced = tokenizer.encode("x").ids, tokenizer.encode(" x").ids
    assert (len(spaced), spaced[1]) == (2, alone)
    assert runs_of(["x"], tokenizer) == [[alone]]


def test_special_tokens_are_not_added_to_words() -> None:
    (the,) = runs_of(["fox"], sentencepiece_tokenizer())
    assert the == sentencepiece_tokenizer().encode("fox", add_special_tokens=False).ids


def test_words_whose_tokens_the_model_lacks_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the model's token ids are 0 to 9"):
        tokenize_bad_words(["lazy"], Tokenizer(bundle_of(byte_level_tokenizer())), 10)


def test_a_word_is_completed_by_its_last_token_after_all_the_others() -> None:
    rules = rules_of(Sampling(max_tokens=1, bad_words=((5,), (6, 7), (8, 6, 9), (6, 6, 6, 3))))
    assert rules is not None
    found = [rules.completing(np.array(output, np.int32)) for output in ([], [6], [8, 6], [6, 8], [6, 6], [1, 6, 6, 6])]
    assert found == [[], [7], [7, 9], [], [7], [7, 3]]
    assert rules.ids.tolist() == [5], "one token alone is never chosen, whatever comes before"


# --- the server's fields ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_fields_of_a_body_become_those_of_sampling_params(kind: Any) -> None:
    body = {"logit_bias": {"50256": -250, "7": 2.5}, "allowed_token_ids": [7, 8], "bad_words": ["a b"]}
    rest = {"prompt": "x"} if kind is CompletionRequest else {"messages": [{"role": "user", "content": "x"}]}
    with memory_core() as core, LLM.attach(core.transport) as llm:
        request = RequestDecoder(strict=True).decode(json.dumps(body | rest).encode(), kind)
        params = sampling_params(request, llm._client.welcome, ServeOptions())
    assert params.logit_bias == {50256: -100.0, 7: 2.5}
    assert params.allowed_token_ids == [7, 8]
    assert params.bad_words == ["a b"]


# --- what models answer -----------------------------------------------------------------------------------------

PROMPTS = ["The mill stands still.", "A", "water flows down the race and turns the wheel of the mill"]
ENGINE: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 96, "in_process": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.save("llama", tmp_path_factory.mktemp("rules") / "model", tokenizer=True))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, **ENGINE) as llm:
        yield llm


def answers(llm: LLM, prompts: list[str] = PROMPTS, **params: Any) -> list[Any]:
    given = SamplingParams(**{"max_tokens": 24, "temperature": 0, "ignore_eos": True, **params})
    return [output.outputs[0] for output in llm.generate(prompts, given, use_tqdm=False)]


def tokens(llm: LLM, **params: Any) -> list[int]:
    return [token for answer in answers(llm, **params) for token in answer.token_ids]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 5}])
def test_a_large_bias_forces_a_token_and_a_large_negative_one_bans_it(llm: LLM, sampling: dict[str, Any]) -> None:
    usual = tokens(llm, **sampling)
    often = max(set(usual), key=usual.count)
    assert set(tokens(llm, logit_bias={77: 100}, **sampling)) == {77}
    assert often not in tokens(llm, logit_bias={often: -100}, **sampling)
    assert often not in tokens(llm, logit_bias={often: -math.inf}, **sampling)
    assert tokens(llm, logit_bias={often: 0.0}, **sampling) == usual


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 3.0, "seed": 5, "top_k": 50}])
def test_only_allowed_tokens_are_chosen(llm: LLM, sampling: dict[str, Any]) -> None:
    allowed = [300, 17, 41, 5]
    found = set(tokens(llm, allowed_token_ids=allowed, **sampling))
    assert found <= set(allowed)
    assert len(found) > 1
    assert 41 not in tokens(llm, allowed_token_ids=allowed, logit_bias={41: -100}, **sampling)


def test_a_bias_does_not_bring_back_what_is_not_allowed_and_comes_before_penalties(llm: LLM) -> None:
    assert 77 not in tokens(llm, allowed_token_ids=[5, 6], logit_bias={77: 100})
    # Divided by 10, what the bias made 100 and more falls behind the likeliest token after its first choice.
    once = tokens(llm, logit_bias={77: 100, 78: 60}, repetition_penalty=10.0)
    assert 78 in once, "added after the penalty, 100 would win at every step"


def test_logprobs_are_of_what_the_model_said(llm: LLM) -> None:
    usual, forced = (answers(llm, max_tokens=1, logprobs=3, logit_bias=bias)[0] for bias in (None, {77: 100}))
    first, told = next(iter(usual.logprobs[0].items()))
    assert forced.logprobs[0][first].logprob == pytest.approx(told.logprob, abs=1e-5)
    assert forced.logprobs[0][77].logprob < told.logprob, "a raw log-probability knows of no bias"
    assert forced.logprobs[0][77].rank > 1


def words_of(texts: list[str]) -> list[str]:
    """Pieces of one, two and three characters out of the middle of what is answered."""
    return [text[at : at + length] for text in texts for at, length in ((4, 1), (9, 2), (15, 3))]


def check_absent(llm: LLM, outputs: list[Any], runs: tuple[tuple[int, ...], ...]) -> None:
    for output in outputs:
        found = list(output.token_ids)
        for run in runs:
            assert not any(found[at : at + len(run)] == list(run) for at in range(len(found)))


def test_bad_words_never_appear_also_where_requests_give_way(llm: LLM, folder: str) -> None:
    """They are what greedy decoding says without them; words of one token and of several."""
    tokenizer: Any = llm.get_tokenizer()
    prompts = [prompt + " and" * (index % 3) for index, prompt in enumerate(PROMPTS * 3)]
    usual = answers(llm, prompts)
    words = [word for word in words_of([output.text for output in usual]) if word.strip() and "\ufffd" not in word]
    runs = tokenize_bad_words(words, tokenizer, tiny_models.VOCAB_SIZE)
    lengths = {len(run) for run in runs}
    assert 1 in lengths
    assert max(lengths) >= 2
    assert any(
        run == tuple(output.token_ids[at : at + len(run)]) for run in runs for output in usual for at in range(24)
    )
    plain = answers(llm, prompts, bad_words=words)
    check_absent(llm, plain, runs)
    with LLM(folder, **{**ENGINE, "num_gpu_blocks_override": 26, "max_num_batched_tokens": 16}) as tight:
        assert [each.token_ids for each in answers(tight, prompts, bad_words=words)] == [e.token_ids for e in plain]
        assert tight.get_stats().num_preemptions > 0


def test_a_request_that_forbids_everything_fails_alone(llm: LLM) -> None:
    params = [
        SamplingParams(max_tokens=2, allowed_token_ids=[5, 6], logit_bias={5: -math.inf, 6: -math.inf}),
        SamplingParams(max_tokens=2),
    ]
    with pytest.raises(InvalidRequestError, match=r"^prompts\[0\]: the request .* leave no token to choose"):
        llm.generate(PROMPTS[:2], params, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"^prompts\[1\]: "):
        llm.generate(PROMPTS[:2], params[::-1], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"^the request cannot go on"):
        llm.generate(PROMPTS[0], params[0], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="leave no token to choose") as caught:
        list(llm.stream(PROMPTS[0], params[0]))
    assert ApiError.of(caught.value).body.type == "invalid_request_error"
    assert ApiError.of(caught.value).status == 400
    assert len(tokens(llm, max_tokens=1)) == 3, "the engine goes on"
