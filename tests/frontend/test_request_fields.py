"""Fields of one request: its prompt's end, cached prefix, the pace and form of its answer, an end to circles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import tiny_models
from fake_core import memory_core

from headrace import LLM, InvalidRequestError, SamplingParams
from headrace.frontend.http.apis.openai.parameters import sampling_params
from headrace.frontend.http.apis.openai.requests import CompletionRequest
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.decoding.decoder import RequestDecoder
from headrace.frontend.request.outputs import FlatLogprobs
from headrace.frontend.request.parameters.repetition import RepetitionDetectionParams

PROMPT = list(range(5, 53))  # three blocks


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = str(tiny_models.save("llama", tmp_path_factory.mktemp("fields") / "model"))
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "block_size": 16, "skip_tokenizer_init": True}
    with LLM(folder, in_process=True, **options) as llm:
        yield llm


def answer(llm: LLM, prompt: list[int] = PROMPT, **fields: Any) -> Any:
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields})
    return llm.generate([prompt], params, use_tqdm=False)[0]


def test_a_truncated_prompt_is_its_end(llm: LLM) -> None:
    long = [60 + index % 50 for index in range(300)]
    found = answer(llm, long, truncate_prompt_tokens=20)
    assert found.prompt_token_ids == long[-20:]
    assert found.outputs[0].token_ids == answer(llm, long[-20:]).outputs[0].token_ids
    assert answer(llm, long, truncate_prompt_tokens=-1).prompt_token_ids == long[-124:], "max_tokens still fit"
    assert answer(llm, [5, 6], truncate_prompt_tokens=20).prompt_token_ids == [5, 6]
    for wrong in (0, -2):
        with pytest.raises(InvalidRequestError, match=r"SamplingParams\.truncate_prompt_tokens = "):
            SamplingParams(truncate_prompt_tokens=wrong)


def test_a_request_that_skips_the_prefix_cache_computes_its_whole_prompt_and_others_find_it(llm: LLM) -> None:
    prompt = [token + 100 for token in PROMPT]
    counts = [
        answer(llm, prompt, skip_reading_prefix_cache=skips).num_cached_tokens for skips in (True, None, True, False)
    ]
    assert counts == [0, 32, 0, 32]


def test_prompt_log_probabilities_from_a_token_on_leave_what_is_before_to_the_cache(llm: LLM) -> None:
    whole = answer(llm, prompt_logprobs=2)
    assert whole.num_cached_tokens == 0
    for start in (1, 20, 40, 47, 48, 1000):
        part = answer(llm, prompt_logprobs=2, prompt_logprob_start=start)
        first = min(start, len(PROMPT))
        assert part.prompt_logprobs[:first] == [None] * first
        assert [list(each) for each in part.prompt_logprobs[first:]] == [
            list(each) for each in whole.prompt_logprobs[first:]
        ]
        for found, expected in zip(part.prompt_logprobs[first:], whole.prompt_logprobs[first:], strict=True):
            for token, logprob in found.items():
                assert logprob.logprob == pytest.approx(expected[token].logprob, abs=1e-4)
        assert part.num_cached_tokens == min(2, max(0, start - 1) // 16) * 16
        assert part.outputs[0].token_ids == whole.outputs[0].token_ids
    with pytest.raises(InvalidRequestError, match="prompt_logprob_start = 3: needs prompt_logprobs"):
        SamplingParams(prompt_logprob_start=3)


def test_flat_log_probabilities_read_as_the_usual_ones(llm: LLM) -> None:
    usual, flat = (answer(llm, logprobs=3, prompt_logprobs=1, flat_logprobs=each) for each in (False, True))
    told, prompt = flat.outputs[0].logprobs, flat.prompt_logprobs
    assert isinstance(told, FlatLogprobs)
    assert isinstance(prompt, FlatLogprobs)
    assert list(told) == usual.outputs[0].logprobs
    assert usual.prompt_logprobs[0] is None
    assert list(prompt) == [{}, *usual.prompt_logprobs[1:]]
    joined = FlatLogprobs()
    joined.extend(told[:2])
    joined.extend(list(told)[2:])
    assert joined == told
    assert joined != told[:3]
    for change in (lambda: joined.insert(0, None), lambda: joined.__setitem__(0, None), joined.pop):
        with pytest.raises(TypeError, match="FlatLogprobs"):
            change()
    assert told[-1] == usual.outputs[0].logprobs[-1]
    assert list(told[1:3]) == usual.outputs[0].logprobs[1:3]
    assert told.token_ids == [token for position in usual.outputs[0].logprobs for token in position]
    assert told.end_indices[-1] == len(told.logprobs) == len(told.ranks) == len(told.decoded_tokens)
    with pytest.raises(IndexError):
        told[4]


def test_a_request_sets_the_pace_of_its_own_stream(llm: LLM) -> None:
    params = SamplingParams(max_tokens=13, temperature=0, ignore_eos=True, stream_interval=5)
    sizes = [len(output.outputs[0].token_ids) for output in llm.stream(PROMPT, params)]
    sums = list(itertools.accumulate(sizes))
    assert sums[-1] == 13
    assert set(sums) <= {1, 6, 11, 13}, "a slow reader gets more at once, never less"
    with pytest.raises(InvalidRequestError, match="stream_interval = 0: must be at least 1"):
        SamplingParams(stream_interval=0)


@pytest.mark.parametrize(
    ("tokens", "sizes", "count", "found"),
    [
        ([1, 2, 1, 2, 1, 2], (1, 2), 3, True),
        ([1, 2, 1, 2, 1, 2], (1, 2), 4, False),
        ([9, 1, 2, 1, 2, 1, 2], (2, 2), 3, True),
        ([1, 2, 1, 2, 1, 2, 9], (1, 3), 2, False),
        ([7, 7, 7], (2, 5), 2, False),
        ([7, 7, 7, 7], (2, 5), 2, True),
        ([4, 7, 7, 7], (1, 1), 3, True),
        ([1, 2, 3, 1, 9, 3], (3, 3), 2, False),
        ([1, 1], (1, 0), 2, False),
    ],
)
def test_a_repetition_is_equal_runs_at_the_end(
    tokens: list[int], sizes: tuple[int, int], count: int, found: bool
) -> None:
    params = RepetitionDetectionParams(min_pattern_size=sizes[0], max_pattern_size=sizes[1], min_count=count)
    assert params.found(tokens) is found


def test_an_output_that_repeats_itself_ends_with_that_reason(llm: LLM) -> None:
    forced = {"logit_bias": {77: 100.0}, "max_tokens": 50}
    stops = RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=2, min_count=3)
    output = answer(llm, repetition_detection=stops, **forced).outputs[0]
    assert (output.token_ids, output.finish_reason) == ([77] * 6, "repetition")
    assert output.stop_reason == "repetition_detected"
    assert len(answer(llm, repetition_detection=stops, min_tokens=9, **forced).outputs[0].token_ids) == 10
    assert answer(llm).outputs[0].finish_reason == "length", "the engine goes on"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size = -1: must be an integer of 0 to 1024"),
        ({"max_pattern_size": 3, "min_pattern_size": 4}, "min_pattern_size = 4: must be an integer of 0 to 3"),
        (
            {"max_pattern_size": 3, "min_count": 1},
            r"SamplingParams\.repetition_detection\.min_count = 1: must be",
        ),
        ({"max_pattern_size": "3"}, "max_pattern_size = '3': must be an integer of 0 to 1024"),
    ],
)
def test_a_repetition_that_cannot_be_is_refused_by_name(fields: dict[str, int], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        RepetitionDetectionParams(**fields)
    with pytest.raises(InvalidRequestError, match=said):
        SamplingParams(repetition_detection=fields)  # type: ignore[arg-type]


def test_a_repetition_may_be_a_dict() -> None:
    params = SamplingParams(repetition_detection={"max_pattern_size": 4})  # type: ignore[arg-type]
    assert params.repetition_detection == RepetitionDetectionParams(max_pattern_size=4)
    wrong = {"max_pattern_size": 4, "max_count": 2}
    with pytest.raises(InvalidRequestError, match=r"SamplingParams\.repetition_detection: .*max_count"):
        SamplingParams(repetition_detection=wrong)  # type: ignore[arg-type]


def test_bodies_have_the_same_fields() -> None:
    body = {
        "prompt": [5],
        **{"truncate_prompt_tokens": 7, "skip_reading_prefix_cache": True, "stream_interval": 3, "typical_p": 0.5},
        "repetition_detection": {"max_pattern_size": 4},
        **{"vllm_xargs": {"a": 1}, "dry_sequence_breakers": ["x"], "mirostat": 2},
    }
    request = RequestDecoder(strict=True).decode(msgspec.json.encode(body), CompletionRequest)
    with memory_core() as core, LLM.attach(core.transport) as llm:
        params = sampling_params(request, llm.engine, ServeOptions())
    assert (params.truncate_prompt_tokens, params.skip_reading_prefix_cache, params.stream_interval) == (7, True, 3)
    assert params.repetition_detection == RepetitionDetectionParams(max_pattern_size=4)
    assert (params.extra_args, params.dry_sequence_breakers, params.mirostat) == ({"a": 1}, ["x"], 2)
    assert params.typical_p == 0.5
