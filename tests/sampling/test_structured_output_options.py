"""How forms are followed, by the engine's options and by the request's own; and every way to ask for one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models
from patience import wait_until
from test_structured_outputs import ENGINE, ask, form

from headrace import LLM, AsyncLLM, GuidedDecodingParams, InvalidRequestError, SamplingParams
from headrace.core.structured_output.backend import Matcher
from headrace.core.structured_output.backends import Backends
from headrace.ipc.messages import StructuredOutput

THREE = {"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 3}
OPEN = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
ADDRESS = {"type": "string", "format": "ipv4"}
"""A form that llguidance follows and xgrammar does not."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.save("llama", tmp_path_factory.mktemp("model"), tokenizer=True))


def num_helpers() -> int:
    """Programs of this process's engines that read grammars."""
    children = psutil.Process().children()
    return sum(
        "headrace.core.structured_output.helper.process" in each.cmdline() for each in children if each.is_running()
    )


def test_a_backend_that_is_named_is_made_ready_before_a_request_needs_it(folder: str) -> None:
    with LLM(model=folder, in_process=True, **ENGINE) as lazy:
        lazy.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)
        assert num_helpers() == 0
    config = {"backend": "auto"}
    with LLM(model=folder, in_process=True, structured_outputs_config=config, **ENGINE) as llm:
        wait_until(lambda: num_helpers() == 1, 30, "the start of the program that reads grammars")
        assert ask(llm, form(max_tokens=4, regex="a|b"))[0] in ("a", "b")
        assert num_helpers() == 1
    assert num_helpers() == 0


def several(**of: Any) -> SamplingParams:
    params = form(max_tokens=280, **of)
    params.n = 8
    return params


def test_fields_of_the_engines_config_hold_for_every_request(folder: str) -> None:
    with LLM(model=folder, in_process=True, **ENGINE) as free:
        assert set(ask(free, several(json=THREE))) != {"[1,1,1]"}, "JSON has spaces where nothing forbids them"
    config = {"disable_any_whitespace": True, "disable_additional_properties": True}
    with LLM(model=folder, in_process=True, structured_outputs_config=config, **ENGINE) as strict:
        assert set(ask(strict, several(json=THREE))) == {"[1,1,1]"}
        assert set(ask(strict, several(json=OPEN))) == {'{"a":1}'}


def test_outlines_writes_at_most_a_space_between_the_parts_of_json(folder: str) -> None:
    def has_lines(answers: list[str]) -> bool:
        return any(set(each) & set("\n\t\r") or "  " in each for each in answers)

    with LLM(model=folder, in_process=True, **ENGINE) as llm:
        assert has_lines(ask(llm, several(json=THREE))), "any white space where nothing forbids it"
        assert not has_lines(found := ask(llm, several(json=THREE, backend="outlines")))
        assert len(set(found)) > 1, "a space is allowed"
        tag = {"format": {"type": "json_schema", "json_schema": THREE}}
        assert not has_lines(ask(llm, several(structural_tag=tag, backend="outlines")))
        assert set(ask(llm, several(json=THREE, backend="outlines", whitespace_pattern=""))) == {"[1,1,1]"}
        found = ask(llm, several(json=THREE, backend="outlines", whitespace_pattern="\n\n"))
        assert {each.replace("\n\n", "") for each in found} == {"[1,1,1]"}
        assert has_lines(found)
    with LLM(model=folder, in_process=True, structured_outputs_config={"backend": "outlines"}, **ENGINE) as llm:
        assert not has_lines(ask(llm, several(json=THREE)))
        assert has_lines(ask(llm, several(json=THREE, backend="guidance")))


@pytest.mark.parametrize(
    "options",
    [
        {"structured_outputs_config": {"backend": "xgrammar", "disable_fallback": True}},
        {"structured_outputs_config": {"backend": "xgrammar:no-fallback"}},
        {"guided_decoding_backend": "xgrammar:no-fallback"},
        {"guided_decoding_backend": "xgrammar", "guided_decoding_disable_fallback": True},
    ],
    ids=str,
)
def test_a_library_without_another_to_fall_back_on(folder: str, options: dict[str, Any]) -> None:
    with LLM(model=folder, in_process=True, **options, **ENGINE) as llm:
        with pytest.raises(InvalidRequestError, match="does not follow format"):
            ask(llm, form(json=ADDRESS))
        assert ask(llm, form(choice=["still here"])) == ["still here"]
        # The request's own library, which the engine has none of.
        assert IPv4Address(json.loads(ask(llm, form(json=ADDRESS, backend="llguidance"))[0]))


def test_a_request_chooses_its_library(folder: str) -> None:
    with LLM(model=folder, in_process=True, **ENGINE) as llm:
        with pytest.raises(InvalidRequestError, match="does not follow format"):
            ask(llm, form(json=ADDRESS, backend="xgrammar:no-fallback"))
        for backend in ("xgrammar", "auto", "guidance", None):
            assert IPv4Address(json.loads(ask(llm, form(json=ADDRESS, backend=backend))[0]))
        params = GuidedDecodingParams(choice=["left"], backend="xgrammar:no-fallback,disable-any-whitespace")
        assert ask(llm, SamplingParams(guided_decoding=params)) == ["left"]
    wrong: list[tuple[Any, str]] = [
        ("mine", "backend is 'mine'; allowed: auto"),
        (5, "backend is int, and must be one of"),
    ]
    for value, said in wrong:
        with pytest.raises(InvalidRequestError, match=said):
            form(json=ADDRESS, backend=value)


def test_a_form_is_compiled_once_for_all_that_ask_for_it(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_form = list[str](), Backends.compile

    def counted(self: Backends, wanted: StructuredOutput, **more: Any) -> Matcher:
        compiled.append(wanted.text)
        return compile_form(self, wanted, **more)

    monkeypatch.setattr(Backends, "compile", counted)
    with LLM(model=folder, in_process=True, **ENGINE) as llm:
        for pattern in ("[ab]c", "[ab]d", "[ab]c"):
            answers = ask(llm, [form(regex=pattern, seed=seed) for seed in range(3)])
            assert {each[1] for each in answers} == {pattern[-1]}
    assert compiled == ["[ab]c", "[ab]d"]


def test_asyncllm_streams_an_answer_of_the_form(folder: str) -> None:
    async def run() -> str:
        async with AsyncLLM(model=folder, **ENGINE) as llm:
            text = ""
            async for output in llm.generate("the water", form(json=THREE, disable_any_whitespace=True), "one"):
                assert output.outputs[0].text.startswith(text), "each output has what the ones before had"
                text = output.outputs[0].text
            return text

    assert asyncio.run(run()) == "[1,1,1]"


@pytest.mark.system
def test_a_batch_file_asks_for_forms(folder: str, tmp_path: Path) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "three", "schema": THREE, "strict": True}}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "the water", "response_format": schema}),
        ("/v1/completions", {"prompt": "the water", "guided_choice": ["[1,1,1]"]}),
        ("/v1/completions", {"prompt": "the water", "structured_outputs": {"regex": r"\[(1,){2}1\]"}}),
    ]
    lines = [
        {"custom_id": str(nth), "method": "POST", "url": url, "body": {"model": "m", "max_tokens": 200, **body}}
        for nth, (url, body) in enumerate(asked)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--served-model-name", "m"]
    command = [sys.executable, "-m", "headrace", "run-batch", *files, "--model", folder, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    results = [json.loads(each) for each in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [json.loads(each["response"]["body"]["choices"][0]["text"]) for each in results] == [[1, 1, 1]] * 3
