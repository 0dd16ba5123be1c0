"""Sampling parameters: vLLM's defaults, and one sentence that names the field, the value and what would be right."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
from thinned import every

from headrace import InvalidRequestError, PoolingParams, RequestOutputKind, SamplingParams
from headrace.frontend.request.parameters.sampling_params import FIELDS
from headrace.ipc.messages import Pool, Pooling


def test_the_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert params.skip_special_tokens
    assert params.output_kind is RequestOutputKind.CUMULATIVE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 1.5),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", 10**400),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 0.5),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("ignore_eos", 1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 7),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 5),
        ("logit_bias", [5]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", 5),
        ("bad_words", "word"),
        ("output_kind", "delta"),
    ],
)
def test_a_bad_value_is_refused_by_name_and_value(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert f"SamplingParams.{field} = {value!r}: " in str(caught.value)


@pytest.mark.parametrize("field", every(2, [each for each in SamplingParams.__struct_fields__ if each[0] != "_"]))
def test_no_field_takes_an_object_of_another_kind(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"SamplingParams.{field}\b"):
        SamplingParams(**{field: object()})


def test_the_range_is_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"top_p = 1.5: must be over 0 and at most 1$"):
        SamplingParams(top_p=1.5)
    with pytest.raises(InvalidRequestError, match=r"temperature = nan: must be at least 0, and finite$"):
        SamplingParams(temperature=math.nan)


def test_a_value_set_later_is_checked_before_it_is_used() -> None:
    params = SamplingParams()
    params.temperature = math.nan
    with pytest.raises(InvalidRequestError, match="temperature"):
        params.verify()


def test_an_unknown_field_fails_with_the_nearest_name() -> None:
    with pytest.raises(InvalidRequestError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequestError, match="'mirostat_mode'; did you mean 'mirostat'"):
        SamplingParams(mirostat_mode=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("field", ["logits_processors", "best_of"])
def test_a_field_of_vllm_that_is_not_supported_is_refused_unless_it_asks_for_nothing(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"SamplingParams.{field} is not supported"):
        SamplingParams(**{field: {1: 2}})
    instead = {
        "best_of": "ask for n outputs with logprobs=0",
        "logits_processors": "name a class when the engine",
    }
    with pytest.raises(InvalidRequestError, match=f"by this version; {instead[field]}"):
        SamplingParams(**{field: {1: 2}})
    with pytest.raises(InvalidRequestError, match=r"use_beam_search is not .*; LLM\.beam_search takes"):
        SamplingParams(**{"use_beam_search": True})
    assert SamplingParams(**{field: None}) == SamplingParams()
    assert SamplingParams(**{"best_of": 1, "use_beam_search": False}) == SamplingParams()


def test_several_greedy_outputs_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="n = 2"):
        SamplingParams(n=2, temperature=0)


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequestError, match="needs detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


def test_the_wire_form_is_resolved() -> None:
    params = SamplingParams(max_tokens=None, temperature=1e-7, top_k=-1, stop_token_ids=[5], seed=2**63 - 1)
    wire = params.to_wire(max_tokens=90)
    assert (wire.max_tokens, wire.temperature, wire.top_k, wire.stop_token_ids) == (90, 0.0, 0, (5,))
    assert SamplingParams(max_tokens=100).to_wire(max_tokens=90).max_tokens == 90
    assert SamplingParams(max_tokens=10).to_wire(max_tokens=90).max_tokens == 10


def test_numbers_beyond_what_an_engine_computes_with_are_its_largest() -> None:
    wire = SamplingParams(temperature=1e300, repetition_penalty=1e300).to_wire(max_tokens=5)
    assert (wire.temperature, wire.repetition_penalty) == (3.4e38, 3.4e38)


def test_children_have_consecutive_seeds_that_stay_in_64_bits() -> None:
    params = SamplingParams(n=3, seed=2**63 - 2)
    assert [params.to_wire(8, child).seed for child in range(3)] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert SamplingParams(n=2).to_wire(8, 1).seed is None


def test_copies_are_equal_and_independent() -> None:
    params = SamplingParams(stop=["a"], temperature=0.3)
    for twin in (params.clone(), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert twin == params
        assert isinstance(twin.stop, list)
        twin.stop.append("b")
        assert params.stop == ["a"]


def test_from_optional_takes_none_for_the_default() -> None:
    params = SamplingParams.from_optional(temperature=None, top_p=0.5, max_tokens=None)
    assert (params.temperature, params.top_p, params.max_tokens) == (1.0, 0.5, None)


def test_the_repr_shows_every_field() -> None:
    assert repr(SamplingParams(temperature=0.25)).startswith("SamplingParams(n=1, presence_penalty=0.0,")
    assert "temperature=0.25" in repr(SamplingParams(temperature=0.25))


@pytest.mark.parametrize(
    "name", [name for name, field in FIELDS.items() if field.kind in (int, float, bool)] + ["truncation_side"]
)
def test_an_array_in_the_place_of_one_value_is_refused_by_the_fields_name(name: str) -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(InvalidRequestError, match=name):
        SamplingParams(**{name: numpy.array([1, 2])})


def test_numpys_numbers_are_numbers_and_leave_as_pythons() -> None:
    numpy = pytest.importorskip("numpy")
    params = SamplingParams(temperature=numpy.float32(0.5), top_k=numpy.int64(5), max_tokens=numpy.int32(7), seed=1)
    wire = params.to_wire(max_tokens=90)
    assert (wire.temperature, wire.top_k, wire.max_tokens) == (0.5, 5, 7)
    assert (type(wire.temperature), type(wire.top_k), type(wire.max_tokens)) == (float, int, int)


@pytest.mark.parametrize("value", [-(2**63) - 1, 2**64])
def test_extra_args_name_the_integers_that_cannot_be_sent(value: int) -> None:
    with pytest.raises(InvalidRequestError, match="extra_args integers must be at least"):
        SamplingParams(extra_args={"a": {"nested": [{"x": value}]}})
    for fits in (-(2**63), 2**64 - 1):
        assert SamplingParams(extra_args={"a": [fits]}).extra_args == {"a": [fits]}


def test_a_requests_parameters_are_frozen_and_the_callers_are_its_own() -> None:
    params = SamplingParams(max_tokens=3, stop_token_ids=[5])
    params.temperature = 0.5
    frozen = params.frozen(RequestOutputKind.DELTA)
    params.max_tokens, params.n = 9, 0
    assert params.stop_token_ids is not None
    params.stop_token_ids.append(6)
    assert (frozen.max_tokens, frozen.temperature, frozen.stop_token_ids) == (3, 0.5, [5])
    assert (frozen.output_kind, params.output_kind) == (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE)
    with pytest.raises(AttributeError, match=r"SamplingParams\.max_tokens: .* was submitted"):
        frozen.max_tokens = 4
    assert frozen.frozen() is frozen
    copied = frozen.clone()
    copied.max_tokens = 4
    with pytest.raises(InvalidRequestError, match=r"SamplingParams\.n = 0"):
        params.frozen()


def test_pooling_parameters_that_were_checked_keep_their_task_and_a_clone_is_free() -> None:
    pooling = Pooling(kinds=("embed",), tokens="LAST", width=8, dimensions=())
    checked = PoolingParams(dimensions=4).freeze(pooling, "m")
    assert checked.checked_task == Pool(kinds=("embed",), dimensions=4)
    with pytest.raises(AttributeError, match=r"PoolingParams\.dimensions: .* was checked"):
        checked.dimensions = 2
    free = checked.clone()
    free.dimensions = 2
    assert (free.checked_task, checked.dimensions) == (None, 4)
    with pytest.raises(InvalidRequestError, match="range"):
        PoolingParams(dimensions=9).freeze(pooling, "m")


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "bad_words", "allowed_token_ids"])
@pytest.mark.parametrize("value", [(), [], 0, "", {}])
def test_what_is_empty_and_no_list_is_refused_as_what_is_not_empty(name: str, value: Any) -> None:
    if isinstance(value, list | tuple) and name != "allowed_token_ids":
        assert not getattr(SamplingParams(**{name: value}), name)
        return
    with pytest.raises(InvalidRequestError, match=rf"SamplingParams\.{name}"):
        SamplingParams(**{name: value})
