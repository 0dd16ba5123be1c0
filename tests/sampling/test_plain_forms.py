"""Forms known to be cheap: they keep the limits of a trial, and no other form delays them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import wait_until
from processor_time import least_processor_s
from test_grammar_backends import BACKENDS, VOCAB_SIZE
from test_hostile_forms import forked_by
from test_structured_outputs import ENGINE, ask, form

from headrace import LLM, InvalidRequestError
from headrace.core.structured_output.helper.trial import MOST_COMPUTING_S, _walk
from headrace.core.structured_output.plain import is_plain
from headrace.ipc.messages import StructuredOutput
from headrace.ipc.process.background import NICENESS

PLAIN = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}, "required": ["a"]}


def wanted(schema: Any, **more: Any) -> StructuredOutput:
    return StructuredOutput(kind="json", text=json.dumps(schema), **more)


def nested(inner: Any, depth: int, around: Callable[[Any], Any]) -> Any:
    for _ in range(depth):
        inner = around(inner)
    return inner


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def integers(nth: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": -123_456_789 + 7_919 * nth, "maximum": 987_654_321 - 104_729 * nth}


LARGEST: dict[str, Any] = {
    "many optional properties": closed({f"p{n}": {"type": "string"} for n in range(199)}),
    "names that begin alike": closed({"a" * n: {} for n in range(1, 170)}),
    "a long text": {"type": "string", "maxLength": 2000},
    "a text of one length": {"type": "string", "minLength": 1000, "maxLength": 1000},
    "texts of many lengths": {"anyOf": [{"type": "string", "maxLength": 110 + n} for n in range(16)]},
    "a long array": {"type": "array", "minItems": 1000, "maxItems": 1000, "items": closed({"a": {"type": "number"}})},
    "arrays in arrays": nested({}, 15, lambda inner: {"type": "array", "items": inner, "minItems": 60, "maxItems": 66}),
    "alternatives in alternatives": nested(
        {"type": "string"}, 7, lambda inner: {"anyOf": [closed({"a": inner}), closed({"a": {}, "b": {}})]}
    ),
    "a large enum": {"enum": [f"value {n}" for n in range(1100)]},
    "long values that begin alike": {"enum": ["a" * 8000, "a" * 7999 + "b"]},
    "bounded integers": closed({f"p{n}": integers(n) for n in range(150)}),
    "bounded numbers": closed(
        {f"p{n}": {"minimum": n - 999_999_999, "maximum": 999_999_998.123456} for n in range(120)}
    ),
    "objects of everything": nested({}, 7, lambda inner: {"items": inner, "properties": {"a": {"items": True}}}),
}

COUNTS = st.integers(0, 300)
BOUNDS = st.integers(-(10**9), 10**9) | st.floats(-(10.0**9), 10.0**9).map(lambda number: round(number, 4))
LEAVES = st.one_of(
    st.fixed_dictionaries({"type": st.just("string")}, optional={"minLength": COUNTS, "maxLength": COUNTS}),
    st.fixed_dictionaries({"type": st.just("integer")}, optional={"minimum": BOUNDS, "maximum": BOUNDS}),
    st.fixed_dictionaries({}, optional={"exclusiveMinimum": BOUNDS, "maxLength": COUNTS, "title": st.text()}),
    st.fixed_dictionaries({"enum": st.lists(st.text() | st.integers() | st.none(), min_size=1, max_size=20)}),
    st.booleans(),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        st.fixed_dictionaries(
            {"properties": st.dictionaries(st.text(max_size=9), inner, max_size=9)},
            optional={"additionalProperties": st.booleans(), "required": st.lists(st.text(max_size=2), max_size=2)},
        )
        | st.fixed_dictionaries({"type": st.just("array"), "items": inner}, optional={"minItems": COUNTS})
        | st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=5)})
    ),
    max_leaves=40,
)


def computing_s(schema: Any) -> float:
    """Of what a trial does with it; refused schemas too have cost that."""

    def tried() -> None:
        try:
            matcher = BACKENDS["llguidance"].compile(wanted(schema))
        except InvalidRequestError:
            pass
        else:
            assert not _walk(BACKENDS["llguidance"], matcher, VOCAB_SIZE)

    return least_processor_s(tried, MOST_COMPUTING_S)


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_plain_schemas_keep_the_limits_of_a_trial(name: str) -> None:
    assert is_plain(wanted(LARGEST[name]))
    assert computing_s(LARGEST[name]) < MOST_COMPUTING_S


@pytest.mark.system
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS)
def test_random_plain_schemas_keep_the_limits_of_a_trial(schema: Any) -> None:
    if is_plain(wanted(schema)):
        assert computing_s(schema) < MOST_COMPUTING_S


NOT_PLAIN: dict[str, Any] = {
    "an expression": {"pattern": "^(a|b)*c"},
    "a format": {"format": "date-time"},
    "a reference": {"$ref": "#/$defs/a", "$defs": {"a": {}}},
    "a remainder": {"type": "integer", "multipleOf": 7},
    "one of several": {"oneOf": [{}, {}]},
    "properties by expression": {"patternProperties": {"^a": {}}},
    "other properties of a form": {"additionalProperties": {"type": "integer"}},
    "too many schemas": {"properties": {f"p{n}": {} for n in range(200)}},
    "too deep": nested({}, 17, lambda inner: {"items": inner}),
    "too many alternatives": {"anyOf": [{}] * 17},
    "too many types": {"anyOf": [{"type": ["string", "null"]}] * 9},
    "too long": {"maxLength": 2001},
    "too long together": {"anyOf": [{"maxLength": 1001}] * 2},
    "a negative length": {"maxLength": -1},
    "a large number": {"maximum": 10**10},
    "a small number": {"maximum": 1e-7},
    "too much text": {"enum": ["x" * (1 << 14)]},
    "a list": {"items": [{}]},
    "no schema": 3,
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_may_multiply_is_not_plain(name: str) -> None:
    assert not is_plain(wanted(NOT_PLAIN[name]))


def test_only_schemas_and_choices_are_plain() -> None:
    assert is_plain(wanted(PLAIN))
    assert is_plain(StructuredOutput(kind="json_object", text=""))
    assert is_plain(StructuredOutput(kind="choice", text='["a"]'))
    assert not is_plain(wanted(PLAIN, whitespace_pattern="(a|b)*"))
    assert not is_plain(StructuredOutput(kind="json", text="{"))
    assert not is_plain(StructuredOutput(kind="json", text='{"items":' * 1800))
    for kind in ("regex", "grammar", "structural_tag"):
        assert not is_plain(StructuredOutput(kind=kind, text="a"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("model"), tokenizer=True)


def helpers_of(engine: psutil.Process) -> list[psutil.Process]:
    return [each for each in engine.children() if "headrace.core.structured_output.helper.process" in each.cmdline()]


def test_a_plain_form_does_not_wait_for_another_that_takes_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "headrace.core.structured_output.helper.trial.MOST_WAIT_S", 600.0
    )  # then another library is tried
    with LLM(model=str(folder), in_process=True, **ENGINE) as llm:
        ask(llm, form(regex="ready"))
        (helper,) = helpers_of(psutil.Process())
        (_, other, _) = forked_by(helper)
        other.suspend()  # as one that computes for long
        try:
            with ThreadPoolExecutor() as pool:
                waiting = pool.submit(ask, llm, form(regex="late"))
                assert ask(llm, form(choice=["at once"])) == ["at once"]
                assert not waiting.done()
                other.resume()
                assert waiting.result() == ["late"]
        finally:
            other.resume()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have no niceness of their own here")
def test_compiling_gives_way_to_steps_and_making_masks_does_not(folder: Path) -> None:
    others, own = set(helpers_of(psutil.Process())), os.getpriority(os.PRIO_PROCESS, 0)
    with LLM(model=str(folder), in_process=True, **(ENGINE | {"max_num_seqs": 16})) as llm:
        params = [form(json={**PLAIN, "title": str(n)}, max_tokens=8) for n in range(12)]
        llm.generate(["the water"] * len(params), params, use_tqdm=False)  # masks on several threads
        ask(llm, form(regex="[a-c]{3}"))
        (helper,) = set(helpers_of(psutil.Process())) - others
        plain, other, following = forked_by(helper)
        for trying in (plain, other):
            assert max(niceness_of_threads(trying.pid).values()) == min(own + NICENESS, 19)
        wait_until(lambda: set(niceness_of_threads(following.pid).values()) == {own}, 30, "the compiling threads' end")
        helper.kill()
        helper.wait()
        ask(llm, form(regex="[a-c]{4}"))  # what starts the next one is the thread that asks for a trial
        (helper,) = set(helpers_of(psutil.Process())) - others
        *_, following = forked_by(helper)
        wait_until(lambda: set(niceness_of_threads(following.pid).values()) == {own}, 30, "the compiling thread's end")


def niceness_of_threads(pid: int) -> dict[int, int]:
    """Of a process's threads, by their ids."""
    niceness = {}
    for task in map(int, os.listdir(f"/proc/{pid}/task")):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            niceness[task] = os.getpriority(os.PRIO_PROCESS, task)
    return niceness
