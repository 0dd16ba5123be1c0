"""Structured outputs, from the caller to the sampled token: answers have the form that was asked for, and what cannot
be asked for ends with the reason and harms nobody."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import lark
import pytest
import tiny_models
from schema_checks import validate
from thinned import every

from headrace import (
    LLM,
    GuidedDecodingParams,
    InvalidRequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from headrace.executor.cpu.runner import ModelRunner

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 8,
    "max_model_len": 320,
    "num_gpu_blocks_override": 200,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "lost"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def form(temperature: float = 1.0, max_tokens: int = 200, seed: int | None = 7, **of: Any) -> SamplingParams:
    params = StructuredOutputsParams(**of)
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, structured_outputs=params)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.save("llama", tmp_path_factory.mktemp("model"), tokenizer=True))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(model=folder, in_process=True, **ENGINE) as llm:
        ask(llm, form(regex="ready"))  # starts what tries grammars, which ends with the engine
        yield llm


def texts(outputs: list[RequestOutput]) -> list[str]:
    assert all(each.finish_reason == "stop" for output in outputs for each in output.outputs)
    return [each.text for output in outputs for each in output.outputs]


def ask(llm: LLM, params: SamplingParams | list[SamplingParams], prompt: str = "the water") -> list[str]:
    prompts = [prompt] * (len(params) if isinstance(params, list) else 1)
    return texts(llm.generate(prompts, params, use_tqdm=False))


def test_answers_of_one_batch_have_the_form_that_each_asked_for(llm: LLM) -> None:
    asked = [
        form(json=PERSON, disable_any_whitespace=True),
        form(json=json.dumps(PERSON), disable_any_whitespace=True, temperature=0),
        form(regex="[a-c]{3}(xy)?"),
        form(choice=["yes", "no", "é世"]),
        form(grammar='start: "a" start | "b"'),
        form(grammar='root ::= "x" [0-9]{2}'),
    ]
    first, second, expression, choice, lark, gbnf = ask(llm, asked)
    for answer in (first, second):
        validate(json.loads(answer), PERSON)
        assert not re.search(r"\s", re.sub(r'"[^"]*"', "", answer)), "there is no space between the parts"
    assert re.fullmatch("[a-c]{3}(xy)?", expression)
    assert choice in ("yes", "no", "é世")
    assert re.fullmatch("a*b", lark)
    assert re.fullmatch("x[0-9]{2}", gbnf)


def test_a_neighbour_without_a_form_answers_as_if_it_were_alone(llm: LLM) -> None:
    free = SamplingParams(temperature=1, max_tokens=24, seed=3, ignore_eos=True)
    (alone,) = llm.generate(["the mill"], free, use_tqdm=False)
    _, beside = llm.generate(["the water", "the mill"], [form(regex="[0-9]{20}"), free], use_tqdm=False)
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_cut_answer_is_the_beginning_of_a_whole_one(llm: LLM) -> None:
    whole = ask(llm, form(json=PERSON, disable_any_whitespace=True))[0]
    (cut,) = llm.generate(["the water"], form(json=PERSON, disable_any_whitespace=True, max_tokens=9), use_tqdm=False)
    assert cut.outputs[0].finish_reason == "length"
    assert cut.outputs[0].text
    assert whole.startswith(cut.outputs[0].text)


def test_several_outputs_each_follow_the_form(llm: LLM) -> None:
    params = form(regex="[a-z]{4}[0-9]{4}")
    params.n = 4
    answers = ask(llm, params)
    assert len(set(answers)) == 4
    assert all(re.fullmatch("[a-z]{4}[0-9]{4}", each) for each in answers)


def test_the_end_of_the_form_ends_the_answer_whatever_eos_and_min_tokens_say(llm: LLM) -> None:
    params = form(choice=["yes"])
    params.ignore_eos, params.min_tokens = True, 50
    (output,) = llm.generate(["the water"], params, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("yes", "stop")
    assert tiny_models.EOS not in output.outputs[0].token_ids


def test_the_text_of_an_end_token_is_no_part_of_a_form(llm: LLM) -> None:
    """A form that may go on ends with that token, which skip_special_tokens=False would show."""
    params = [form(regex="[a-z]{0,30}", seed=seed) for seed in range(6)]
    for each in params:
        each.ignore_eos, each.skip_special_tokens, each.logit_bias = True, False, {tiny_models.EOS: 6.0}
    outputs = llm.generate(["the water"] * len(params), params, use_tqdm=False)
    assert any(tiny_models.EOS in output.outputs[0].token_ids for output in outputs)
    for text, output in zip(texts(outputs), outputs, strict=True):
        assert re.fullmatch("[a-z]{0,30}", text), text
        assert output.outputs[0].finish_reason == "stop"


def test_an_answer_that_may_go_on_ends_with_an_end_of_sequence_token(llm: LLM) -> None:
    params = form(regex="a+")
    params.logit_bias = {tiny_models.EOS: 100.0}
    (output,) = llm.generate(["the water"], params, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a", "stop")


def test_a_seeded_answer_is_the_same_after_a_preemption(llm: LLM, folder: str) -> None:
    params = [form(json=PERSON, seed=seed) for seed in range(6)]
    expected = ask(llm, params)
    small = {**ENGINE, "num_gpu_blocks_override": 42, "max_num_batched_tokens": 24}
    with LLM(model=folder, in_process=True, **small) as tight:
        assert ask(tight, params) == expected
        assert tight.get_stats().num_preemptions > 0


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
ENGINES: dict[str, dict[str, Any]] = {
    "speculation": {"speculative_config": NGRAM},
    "async scheduling": {"async_scheduling": True},
    "one at a time, and so without forced tokens as drafts": {"max_num_seqs": 1},
    "short steps, prompts in pieces": {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
}
PARALLEL = {"tensor": {"tensor_parallel_size": 2}, "pipeline": {"pipeline_parallel_size": 2}}


def asked_of_many() -> tuple[list[str], list[SamplingParams]]:
    """Prompts and wishes of one batch, some without a form."""
    wished = [form(json=PERSON, disable_any_whitespace=True, seed=seed, temperature=seed % 2) for seed in range(4)]
    wished += [form(regex="(ab|cd){4,9}", seed=5), form(json={"type": "array", "items": {"const": "again"}}, seed=6)]
    wished += [SamplingParams(temperature=1, seed=9, max_tokens=30), SamplingParams(temperature=0, max_tokens=30)]
    return [f"{'the mill and the water ' * (index % 3)}{index}" for index in range(len(wished))], wished


@pytest.mark.parametrize("name", every(2, ENGINES))
@pytest.mark.usefixtures("drafts_at_any_cost")
def test_answers_are_the_same_however_steps_are_made(llm: LLM, folder: str, name: str) -> None:
    prompts, wished = asked_of_many()
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, wished, use_tqdm=False)]
    with LLM(model=folder, in_process=True, **{**ENGINE, **ENGINES[name]}) as other:
        outputs = other.generate(prompts, wished, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        if name == "speculation":
            assert other.get_stats().num_accepted_tokens > 0


@pytest.mark.parametrize("rows", [2, 8])
def test_a_batch_that_only_decodes_repeats_its_step_with_new_masks(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """With 2 rows there is room for what grammars force, with 8 there is none."""
    repeated, repeat = list[int](), ModelRunner._repeat
    monkeypatch.setattr(ModelRunner, "_repeat", lambda *of: repeated.append(of[1].step) or repeat(*of))  # type: ignore[func-returns-value]
    wished = [form(regex="[a-z]{30}(, then the end of it)?", seed=seed) for seed in range(rows)]
    together = ask(llm, wished)
    assert all(re.fullmatch("[a-z]{30}(, then the end of it)?", each) for each in together)
    assert len(repeated) >= 8
    monkeypatch.undo()
    assert [ask(llm, each)[0] for each in wished] == together


@pytest.mark.system
@pytest.mark.parametrize("name", PARALLEL)
def test_ranks_that_share_a_model_give_answers_of_the_form(folder: str, name: str) -> None:
    prompts, wished = asked_of_many()
    with LLM(model=folder, **{**ENGINE, **PARALLEL[name]}) as llm:
        outputs = llm.generate(prompts, wished, use_tqdm=False)
    for output in outputs[:4]:
        validate(json.loads(output.outputs[0].text), PERSON)
    assert re.fullmatch("(ab|cd){4,9}", outputs[4].outputs[0].text)


def test_what_a_form_forces_takes_fewer_steps_than_tokens(llm: LLM) -> None:
    before = llm.get_stats().steps
    known = "the water carries the mill, and the mill carries the water"
    (output,) = llm.generate(["the water"], form(choice=[known], temperature=0), use_tqdm=False)
    assert output.outputs[0].text == known
    assert llm.get_stats().steps - before < 0.5 * len(output.outputs[0].token_ids)


def test_the_retired_names_ask_for_the_same(llm: LLM) -> None:
    assert ask(llm, SamplingParams(guided_decoding=GuidedDecodingParams(choice=["left"]))) == ["left"]
    assert ask(llm, SamplingParams(structured_outputs={"choice": ["right"]})) == ["right"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ({}, "needs exactly one of json, regex"),
        ({"regex": "a", "choice": ["a"]}, "given are regex, choice"),
        ({"json": "{"}, "structured_outputs.json is not valid JSON"),
        ({"json": 5}, "structured_outputs.json is int, and must be a schema"),
        ({"json": {"a": {1, 2}}}, "structured_outputs.json is not valid JSON"),
        ({"json": "[" * 90_000}, "structured_outputs.json"),
        ({"choice": []}, "structured_outputs.choice must be a list of texts"),
        ({"choice": ["a", 5]}, "structured_outputs.choice must be a list of texts"),
        ({"regex": ""}, "structured_outputs.regex must be a text that is not empty"),
        ({"regex": "a" * (1 << 21)}, "structured_outputs.regex must have at most 1048576 characters"),
        (
            {"regex": "a", "disable_fallback": 1},
            "structured_outputs.disable_fallback is int, and must be True or False",
        ),
    ],
)
def test_what_the_frontend_can_see_is_refused_by_name(of: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(said)):
        StructuredOutputsParams(**of)


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ({"json": {"properties": {"a": {"items": {"type": "foo"}}}}}, "at /properties/a/items: Invalid type: foo"),
        (
            {"json": {"type": "array", "uniqueItems": True}},
            "uniqueItems is not followed: it is followed for",
        ),
        ({"json": {"$ref": "#/$defs/none"}}, "Pointer '/$defs/none' does not exist"),
        ({"json": {"enum": []}}, "Unsatisfiable schema"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "(?= at 0: lookaheads are not followed"),
        ({"grammar": "start: nothing"}, 'unknown name: "nothing"'),
        ({"grammar": "root ::= nothing"}, "nothing"),
        ({"structural_tag": {"structures": []}}, "structural tag"),
    ],
)
def test_what_the_engine_cannot_follow_ends_with_the_librarys_reason(llm: LLM, of: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(said)):
        llm.generate(["the water"], form(**of), use_tqdm=False)
    assert ask(llm, form(choice=["still here"])) == ["still here"]


CHAIN = {f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(3000)}
BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "a chain of references": ({"json": {"$ref": "#/$defs/d0", "$defs": {**CHAIN, "d3000": True}}}, "too long a chain"),
    "a remainder": ({"json": {"type": "integer", "multipleOf": 999_983}}, "takes more than 1 s"),
    "a repeated repetition": ({"regex": "((a{1000}){1000}){1000}"}, "structured_outputs"),
    "a huge enum": ({"json": {"enum": [f"{n} {n * 7919}" for n in range(45_000)]}}, "structured_outputs"),
    "a large schema": (
        {"json": {"properties": {f"p{n}": {"title": "x" * 90} for n in range(12_000)}}},
        "at most 1048576",
    ),
}


@pytest.mark.system
def test_compile_bombs_end_within_their_limits_and_disturb_no_other_stream(folder: str) -> None:
    free = SamplingParams(temperature=1, max_tokens=200, seed=3, ignore_eos=True)
    with LLM(model=folder, **ENGINE) as llm:
        (alone,) = llm.generate(["the mill"], free, use_tqdm=False)
        for name, (of, said) in BOMBS.items():
            began_s = time.monotonic()
            with pytest.raises(InvalidRequestError, match=said):
                llm.generate(["the water"], form(**of), use_tqdm=False)
            assert time.monotonic() - began_s < 30, name
            (after,) = llm.generate(["the mill"], free, use_tqdm=False)
            assert after.outputs[0].token_ids == alone.outputs[0].token_ids, name
        assert ask(llm, form(choice=["still here"])) == ["still here"]


NAMES = ("id", "name", "kind of it", "größe", "a/b", "x")
BOUNDED: list[Any] = [
    {"type": "string", "minLength": 1, "maxLength": 8},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
    {"type": "string", "format": "date"},
    {"type": "integer", "minimum": -40, "maximum": 1000},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "boolean"},
    {"type": ["null", "integer"], "minimum": 0, "maximum": 9},
    {"enum": ["red", 7, None, True, {"deep": [1]}]},
    {"const": "same"},
]


WITHOUT_FORMATS = [each for each in BOUNDED if "format" not in each]
"""What xgrammar follows of them."""


def random_schema(numbers: random.Random, depth: int = 0, *, bounded: list[Any] = BOUNDED) -> dict[str, Any]:
    """Whose answers end of themselves."""
    kind = numbers.choice(("leaf", "object", "array", "any", "tuple")) if depth < 3 else "leaf"
    if kind == "leaf":
        return dict(numbers.choice(bounded))
    parts = [random_schema(numbers, depth + 1, bounded=bounded) for _ in range(numbers.randint(1, 3))]
    if kind == "any":
        return {"anyOf": parts}
    if kind == "array":
        return {"type": "array", "items": parts[0], "minItems": numbers.randint(0, 2), "maxItems": 3}
    if kind == "tuple":
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    properties = dict(zip(numbers.sample(NAMES, len(parts)), parts, strict=True))
    required = [name for name in properties if numbers.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def answers_to_random_schemas(llm: LLM, num_schemas: int, num_answers: int, bounded: list[Any] = BOUNDED) -> int:
    """How many answers were whole; all of those are valid, and the others are beginnings."""
    numbers, num_whole = random.Random(16), 0
    for first in range(0, num_schemas, 8):
        schemas = [random_schema(numbers, bounded=bounded) for _ in range(min(8, num_schemas - first))]
        wished = [
            form(json=schema, seed=seed, disable_any_whitespace=bool(seed % 2), max_tokens=280)
            for schema in schemas
            for seed in range(num_answers)
        ]
        outputs = llm.generate(["the water"] * len(wished), wished, use_tqdm=False)
        for index, output in enumerate(outputs):
            if output.outputs[0].finish_reason == "stop":
                num_whole += 1
                checker = jsonschema.Draft202012Validator(schemas[index // num_answers])
                checker.validate(json.loads(output.outputs[0].text))
    return num_whole


def test_answers_to_random_schemas_are_valid(llm: LLM) -> None:
    assert answers_to_random_schemas(llm, 16, 2) > 24


@pytest.mark.system
def test_two_thousand_answers_to_random_schemas_are_valid(llm: LLM) -> None:
    assert answers_to_random_schemas(llm, 250, 8) > 1600


@pytest.mark.parametrize(
    "pattern", ["[a-z]{3,5}@[a-z]+[.](com|org)", r"\\d{4}-\\d{2}", "(no|yes){2}!?", "é[世界]{1,3}"]
)
def test_an_answer_matches_its_whole_expression(llm: LLM, pattern: str) -> None:
    params = form(regex=pattern)
    params.n, params.logit_bias = 4, {tiny_models.EOS: 3.0}
    for answer in ask(llm, params):
        assert re.fullmatch(pattern, answer)


def test_an_answer_is_a_sentence_of_its_lark_grammar(llm: LLM) -> None:
    rules = 'start: sum\nsum: term (("+" | "-") term)*\nterm: NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,3}/\n'
    params = form(grammar=rules, max_tokens=80)
    params.n, params.logit_bias = 4, {tiny_models.EOS: 4.0}
    (output,) = llm.generate(["the water"], params, use_tqdm=False)
    whole = [each.text for each in output.outputs if each.finish_reason == "stop"]
    assert whole
    for text in whole:
        lark.Lark(rules).parse(text)


def test_a_grammar_that_crashes_its_compiler_ends_alone(folder: str) -> None:
    with LLM(model=folder, in_process=True, **ENGINE) as llm:
        of, said = BOMBS["a chain of references"]
        for _ in range(2):  # the second time the reason is known
            with pytest.raises(InvalidRequestError, match=said):
                llm.generate(["the water"], form(**of), use_tqdm=False)
        assert ask(llm, form(choice=["still here"])) == ["still here"]


def test_an_engine_without_a_tokenizer_says_what_is_missing(folder: str) -> None:
    with LLM(model=folder, in_process=True, skip_tokenizer_init=True, **ENGINE) as llm:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]), detokenize=False)
        with pytest.raises(InvalidRequestError, match="needs the model's tokenizer"):
            llm.generate([[5, 6]], params, use_tqdm=False)
