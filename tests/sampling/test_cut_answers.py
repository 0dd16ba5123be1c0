"""An answer that `max_tokens` cuts is the beginning of something that has the form, wherever the cut falls.

What judges is not the library that made the answer: jsonschema, lark's parser, partial matches of `regex`, and the
whole answer of the same seed, of which each cut one has to be the beginning.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import lark
import pytest
import regex
import tiny_models
from test_structured_outputs import BOUNDED, ENGINE, WITHOUT_FORMATS, form, random_schema

from headrace import LLM

EXPRESSIONS = ("[a-z]{3,9}@[a-z]{2,30}[.](com|org)", r"(\d{2}-){4,12}end", "(no|yés){6,20}!?", "é[世界]{1,30}")
CHOICES = ["the water carries the mill", "the water carries nothing", "thé 世界 of the mill", "no"]
SUM = 'start: term (("+" | "-") term)*\nterm: DIGIT+ | "(" start ")"\nDIGIT: /[0-9]/\n'
"""Its terminals have one character each, so that no cut falls within one."""
PARSER = lark.Lark(SUM, parser="lalr")
MOST_TOKENS = 280


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tiny_models.save("llama", tmp_path_factory.mktemp("model"), tokenizer=True)
    config = {"backend": f"{backend}:no-fallback"}
    with LLM(model=str(folder), in_process=True, structured_outputs_config=config, **ENGINE) as llm:
        llm.generate(["the water"], form(regex="ready"), use_tqdm=False)  # starts what tries grammars
        yield llm


def check_json(schema: dict[str, Any], text: str, is_whole: bool) -> None:
    if is_whole:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    else:
        assert text.lstrip()[:1] in ("", *'{["-0123456789tfn'), "JSON does not begin so"


def check_expression(pattern: str, text: str, is_whole: bool) -> None:
    assert regex.fullmatch(pattern, text, partial=not is_whole), text
    assert not is_whole or re.fullmatch(pattern, text)


def check_choice(choices: list[str], text: str, is_whole: bool) -> None:
    assert text in choices if is_whole else any(each.startswith(text) for each in choices)


def check_sentence(_: str, text: str, is_whole: bool) -> None:
    if is_whole:
        PARSER.parse(text)
    else:
        PARSER.parse_interactive(text).exhaust_lexer()  # raises at the first terminal that nothing can complete


Asked = list[tuple[dict[str, Any], Any, Callable[[Any, str, bool], None]]]


def forms(numbers: random.Random, bounded: list[Any]) -> Asked:
    """What is asked for, what it has to be, and who judges that."""
    schemas = [random_schema(numbers, bounded=bounded) for _ in range(12)]
    asked: Asked = []
    asked += [
        ({"json": schema, "disable_any_whitespace": nth % 2 == 0}, schema, check_json)
        for nth, schema in enumerate(schemas)
    ]
    asked += [({"regex": each}, each, check_expression) for each in EXPRESSIONS]
    asked += [({"choice": CHOICES}, CHOICES, check_choice)] * 2
    asked += [({"grammar": SUM}, SUM, check_sentence)] * 3
    return asked


def test_what_max_tokens_cuts_is_the_beginning_of_something_of_the_form(llm: LLM, backend: str) -> None:
    numbers = random.Random(5)
    asked = forms(numbers, WITHOUT_FORMATS if backend == "xgrammar" else BOUNDED)
    whole = [form(**of, seed=seed, max_tokens=MOST_TOKENS) for seed, (of, _, _) in enumerate(asked)]
    cuts, cut = list[int](), []
    wholes = llm.generate(["the water"] * len(whole), whole, use_tqdm=False)
    for seed, ((of, _, _), output) in enumerate(zip(asked, wholes, strict=True)):
        lengths = range(1, len(output.outputs[0].token_ids))
        for length in sorted(numbers.sample(lengths, min(6, len(lengths)))):
            cuts.append(seed)
            cut.append(form(**of, seed=seed, max_tokens=length))
    num_cut = num_whole = 0
    for seed, output in enumerate(wholes):
        _, right, check = asked[seed]
        num_whole += (is_whole := output.outputs[0].finish_reason == "stop")
        check(right, output.outputs[0].text, is_whole)
    for seed, output in zip(cuts, llm.generate(["the water"] * len(cut), cut, use_tqdm=False), strict=True):
        _, right, check = asked[seed]
        answer = output.outputs[0]
        num_cut += (is_cut := answer.finish_reason == "length")
        check(right, answer.text, not is_cut)
        assert wholes[seed].outputs[0].text.startswith(answer.text)
    assert num_whole > 0.7 * len(asked), "the beginnings are of answers that are valid as a whole"
    assert num_cut > 2 * len(asked)
