"""Reasoning before an answer: forms that begin after it, and budgets that end it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models

from headrace import LLM, InvalidRequestError, SamplingParams, StructuredOutputsParams
from headrace.ipc.failure import OptionError

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 8,
    "max_model_len": 256,
    "num_gpu_blocks_override": 200,
    "in_process": True,
}
BAD = InvalidRequestError
FORM = "[0-9]{4}, and the end"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.save("llama", tmp_path_factory.mktemp("model"), tokenizer=True))


@pytest.fixture(scope="module")
def reasoning(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Markers of several tokens each."""
    path = tmp_path_factory.mktemp("format") / "letters.yaml"
    path.write_text("reasoning: {begin: <th>, end: </th>}\n")
    return str(path)


@pytest.fixture(scope="module")
def llm(folder: str, reasoning: str) -> Iterator[LLM]:
    with LLM(model=folder, structured_outputs_config={"reasoning_parser": reasoning}, **ENGINE) as llm:
        ask(llm, "the water", form(regex="ready"))  # starts what tries grammars, which ends with the engine
        yield llm


def form(budget: int | None = None, seed: int = 1, **of: Any) -> SamplingParams:
    wanted = StructuredOutputsParams(**of) if of else None
    return SamplingParams(
        max_tokens=60, seed=seed, structured_outputs=wanted, thinking_token_budget=budget, ignore_eos=True
    )


def ask(llm: LLM, prompt: str, params: SamplingParams) -> tuple[str, list[int]]:
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output.outputs[0].text, list(output.outputs[0].token_ids)


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_budget_ends_open_reasoning_and_the_form_begins_there(llm: LLM, budget: int) -> None:
    text, token_ids = ask(llm, "the water<th>", form(budget, regex=FORM))
    thought, _, answer = text.partition("</th>")
    assert re.fullmatch(FORM, answer), text
    tokenizer = llm.get_tokenizer()
    end = tokenizer.encode("</th>", add_special_tokens=False)
    assert len(end) > 1
    assert token_ids[budget : budget + len(end)] == end
    assert thought or not budget


def test_reasoning_that_the_answer_opens_itself_comes_before_the_form(llm: LLM) -> None:
    first = llm.get_tokenizer().encode("<th>", add_special_tokens=False)[0]
    params = form(3, regex=FORM)
    params.logit_bias = {first: 200.0}
    text, _ = ask(llm, "the water", params)
    assert re.fullmatch(f"(?s)<th>.*</th>{FORM}", text)


def test_an_answer_without_reasoning_has_the_form_from_its_first_token_on(llm: LLM) -> None:
    first = llm.get_tokenizer().encode("<th>", add_special_tokens=False)[0]
    params = form(3, regex=FORM)
    params.logit_bias = {first: -100.0}
    for prompt in ("the water", "the water<th>done</th>"):
        assert re.fullmatch(FORM, ask(llm, prompt, params)[0])


def test_a_budget_alone_leaves_the_rest_of_the_answer_as_it_is(llm: LLM) -> None:
    text, token_ids = ask(llm, "the water<th>", form(5))
    assert text.count("</th>") == 1
    assert len(token_ids) == 60
    assert ask(llm, "the water</th>", form(5)) == ask(llm, "the water</th>", form())


def test_a_budget_holds_for_each_reasoning_of_an_answer(folder: str) -> None:
    own = {"reasoning_start_str": "q", "reasoning_end_str": "zz"}
    with LLM(model=folder, reasoning_config=own, **ENGINE) as llm:
        letters = llm.get_tokenizer().encode("qzh", add_special_tokens=False)
        assert len(letters) == 3
        params = form(3)
        params.allowed_token_ids, params.temperature = letters, 5.0
        for prompt in ("the water q", "the water", "the water q so zz"):
            for params.seed in range(3):
                text, token_ids = ask(llm, prompt, params)
                assert len(text) == len(token_ids)
                reasonings = re.findall("q(.*?)(?:zz|z?$)", "q" + text if prompt.endswith("q") else text)
                assert len(reasonings) > 2
                assert all(len(each) <= 3 for each in reasonings), text


def test_the_form_begins_with_the_first_token_behind_the_end_marker(llm: LLM) -> None:
    """White space there too is what the form says, as in vLLM."""
    (line,) = llm.get_tokenizer().encode("\n", add_special_tokens=False)[-1:]
    params = form(2, regex=FORM)
    params.logit_bias = {line: 50.0}
    assert re.fullmatch(f"(?s).*</th>{FORM}", ask(llm, "the water<th>", params)[0])


def test_reasoning_has_the_form_too_where_the_engine_says_so(folder: str, reasoning: str) -> None:
    config = {"reasoning_parser": reasoning, "enable_in_reasoning": True}
    with LLM(model=folder, structured_outputs_config=config, **ENGINE) as llm:
        assert re.fullmatch(FORM, ask(llm, "the water<th>", form(regex=FORM))[0])
        with pytest.raises(BAD, match="thinking_token_budget = 3: needs a form that begins after"):
            ask(llm, "the water<th>", form(3, regex=FORM))


def test_drafts_are_held_to_the_same(llm: LLM, folder: str, reasoning: str) -> None:
    prompts = ["the water<th> and the water and", "the mill the mill", "the water<th>"]
    wished = [form(budget, seed, regex=FORM) for seed, budget in enumerate((9, 4, 2))]
    expected = [ask(llm, prompt, params) for prompt, params in zip(prompts, wished, strict=True)]
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    config = {"reasoning_parser": reasoning}
    with LLM(model=folder, structured_outputs_config=config, speculative_config=drafts, **ENGINE) as other:
        outputs = other.generate(prompts, wished, use_tqdm=False)
    assert [(output.outputs[0].text, list(output.outputs[0].token_ids)) for output in outputs] == expected


def test_words_lead_to_the_end_where_the_budget_is_spent(folder: str, reasoning: str) -> None:
    words = ". Time is up.</th>"
    with LLM(
        model=folder, reasoning_config={"reasoning_parser": reasoning, "reasoning_end_str": words}, **ENGINE
    ) as llm:
        text, token_ids = ask(llm, "the water<th>", form(4, regex=FORM))
        assert re.fullmatch(f"(?s).*{re.escape(words)}{FORM}", text)
        forced = llm.get_tokenizer().encode(words, add_special_tokens=False)
        assert token_ids[4 : 4 + len(forced)] == forced
        assert ask(llm, "the water</th>", form(4)) == ask(llm, "the water</th>", form())
    own = {"reasoning_start_str": "<a>", "reasoning_end_str": "</a>"}
    with LLM(model=folder, reasoning_config=own, **ENGINE) as llm:
        assert re.fullmatch(f"(?s).*</a>{FORM}", ask(llm, "the water<a>", form(4, regex=FORM))[0])
    wrong = {"reasoning_parser": reasoning, "reasoning_end_str": "enough"}
    with LLM(model=folder, reasoning_config=wrong, **ENGINE) as llm, pytest.raises(BAD, match=r"own end, '</th>', is"):
        ask(llm, "the water<th>", form(4))
    for config, said in (
        ({"end": "x"}, "reasoning_config has no 'end'; it has reasoning_parser, reasoning_start_str"),
        ({"reasoning_end_str": 5}, "reasoning_end_str=5; it must be text"),
    ):
        with pytest.raises(OptionError, match=said):
            LLM(model=folder, reasoning_config=config, **ENGINE)
    with pytest.raises(OptionError, match="give one of them"):
        LLM(model=folder, reasoning_config=wrong, structured_outputs_config={"reasoning_parser": "qwen3"}, **ENGINE)


def test_what_is_not_known_is_named(folder: str) -> None:
    config = {"reasoning_parser": "nobodys"}
    said = "reasoning_parser='nobodys': no output format"
    with LLM(model=folder, structured_outputs_config=config, **ENGINE) as llm, pytest.raises(BAD, match=said):
        ask(llm, "the water", form(3))
    said = "thinking_token_budget = 3: needs the model's format of reasoning"
    with LLM(model=folder, **ENGINE) as llm, pytest.raises(BAD, match=said):
        ask(llm, "the water", form(3))
    with pytest.raises(BAD, match="thinking_token_budget"):
        SamplingParams(thinking_token_budget=-2)
    with pytest.raises(OptionError, match="structured_outputs_config has reasoning_parser=5"):
        LLM(model=folder, structured_outputs_config={"reasoning_parser": 5}, **ENGINE)


def test_a_form_holds_for_a_whole_answer_where_no_format_is_known(folder: str) -> None:
    with LLM(model=folder, **ENGINE) as llm:
        assert json.loads(ask(llm, "the water<th>", form(json={"enum": [[1], [2]]}))[0]) in ([1], [2])
