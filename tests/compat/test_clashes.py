"""What testers of the first version met: names that clash, and refusals that blamed something else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import ask
from thinned import every

from headrace import LLM, EngineStartError
from headrace.exceptions import VLLMValidationError

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
USER = [{"role": "user", "content": "hi"}]
DATED = "{{ strftime_now('%Y') }}{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "name", every(2, ["strftime_now", "loop", "self", "dict", "raise_exception", "messages", "tools"])
)
def test_a_requests_variable_that_clashes_with_the_templates_wins_or_is_refused(
    client: httpx.Client, name: str
) -> None:
    for template in (None, DATED):
        body = {"messages": USER, "max_tokens": 1, "chat_template": template, "chat_template_kwargs": {name: "mine"}}
        answer = client.post(CHAT, json=body)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["param"].startswith(("messages", "chat_template_kwargs"))


def test_a_function_of_templates_can_be_shadowed_and_its_loss_is_a_refusal(client: httpx.Client, llm: LLM) -> None:
    def rendered(template: str) -> httpx.Response:
        kwargs = {"strftime_now": "now", "loop": "outer"}
        return client.post(TOKENIZE, json={"messages": USER, "chat_template": template, "chat_template_kwargs": kwargs})

    shadowed = rendered("{{ strftime_now }}{{ loop }}")
    assert llm.get_tokenizer().decode(shadowed.json()["tokens"]) == "nowouter"
    called = rendered(DATED)
    assert called.status_code == 400, called.text
    assert "'str' object is not callable" in called.json()["error"]["message"]


# LangChain's bind_tools sends both fields: the one that cannot be had is blamed
def test_a_choice_of_tools_that_cannot_be_had_is_named_before_what_goes_with_it(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    both: dict[str, Any] = {"messages": USER, "max_tokens": 2, "parallel_tool_calls": False}
    for tools, choice in (([], "required"), ([tool], {"type": "function", "function": {"name": "other"}})):
        refused = client.post(CHAT, json={**both, "tools": tools or None, "tool_choice": choice})
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "tool_choice"
    assert ask(client, CHAT, **both, tools=[tool], tool_choice="auto")["choices"]


def test_programs_tell_their_version() -> None:
    for program in ("headrace.core.process.daemon", "headrace"):
        done = subprocess.run([sys.executable, "-m", program, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout.split()[1][0].isdigit()


def test_a_tokenizer_that_is_not_there_is_blamed_and_not_the_model(folder: Path) -> None:
    with pytest.raises(EngineStartError, match=r"^tokenizer=/nonexistent: there is no") as told:
        LLM(str(folder), tokenizer="/nonexistent", dtype="float32")
    assert str(folder) not in str(told.value)


# vllm/exceptions.py: what handlers of vLLM's errors read
def test_errors_tell_the_parameter_and_its_value(llm: LLM) -> None:
    from headrace import SamplingParams

    with pytest.raises(VLLMValidationError) as told:
        SamplingParams(temperature=-1.0)
    assert (told.value.parameter, told.value.value) == ("temperature", -1.0)
    with pytest.raises(VLLMValidationError) as told:
        llm.generate("x", SamplingParams(allowed_token_ids=[10**7]))
    assert told.value.parameter == "allowed_token_ids"
    with pytest.raises(VLLMValidationError) as told:
        llm.generate({"prompt_token_ids": [10**7]})
    assert told.value.parameter == "prompt"
