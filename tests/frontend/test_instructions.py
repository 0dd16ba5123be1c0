"""Instructions reach the model wherever they stand in a conversation, whatever its chat template demands."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from headrace.frontend.text.chat_template import render_chat
from headrace.frontend.text.instructions import place_instructions
from headrace.ipc.failure import InvalidRequestError

ANYWHERE = (  # Qwen 2.5 and 3: roles that it does not know are left out
    "{% if messages[0].role == 'system' %}<s>{{ messages[0].content }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) or m.role in ['assistant', 'tool'] %}"
    "<{{ m.role[0] }}>{{ m.content }}{% endif %}{% endfor %}"
)
BEGINNING = (  # Mistral: a system message at the beginning, then turns that alternate
    "{% set ns = namespace(at=0) %}{% if messages[0].role == 'system' %}<s>{{ messages[0].content }}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if m.role not in ['user', 'assistant', 'tool'] %}{{ raise_exception('only user, assistant and tool') }}"
    "{% endif %}{% if m.role != 'tool' %}{% if (m.role == 'user') != (ns.at % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.at = ns.at + 1 %}{% endif %}"
    "<{{ m.role[0] }}>{{ m.content | trim }}{% endfor %}"
)
NOWHERE = (  # Gemma
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role[0] }}>{{ m.content | trim }}{% endfor %}"
)
LEFT_OUT = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<{{ m.role[0] }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
)
DEVELOPER = (  # gpt-oss: the first message, as system or developer; later ones are left out
    "{% if messages[0].role in ['system', 'developer'] %}<d>{{ messages[0].content }}{% endif %}" + LEFT_OUT
)
TOLD_ROLES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"  # Llama 3
PARTS = (  # texts are parts
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "<{{ m.role[0] }}>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}|"
    "{% endfor %}{% endif %}{% endfor %}"
)


def conversation(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def prompt(template: str, *turns: tuple[str, Any]) -> str:
    render = functools.partial(render_chat, template)
    return render(place_instructions(template, conversation(*turns), render))


FIRST = (("system", "S"), ("user", "a"))
LATER = (*FIRST, ("assistant", "b"), ("system", "T"), ("user", "c"))
LAST = (*FIRST, ("assistant", "b"), ("user", "c"), ("developer", "T"))
BETWEEN_USERS = (("user", "a"), ("developer", "T"), ("user", "c"))


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (ANYWHERE, FIRST, "<s>S<u>a"),
        (ANYWHERE, LATER, "<s>S<u>a<a>b<s>T<u>c"),
        (ANYWHERE, LAST, "<s>S<u>a<a>b<u>c<s>T"),
        (ANYWHERE, (("developer", "D"), ("user", "a")), "<s>D<u>a"),
        (BEGINNING, LATER, "<s>S\n\nT<u>a<a>b<u>c"),
        (BEGINNING, LAST, "<s>S\n\nT<u>a<a>b<u>c"),
        (BEGINNING, BETWEEN_USERS, "<s>T<u>a\n\nc"),
        (BEGINNING, (("developer", "D"), ("system", "S"), ("user", "a")), "<s>D\n\nS<u>a"),
        (NOWHERE, FIRST, "<u>S\n\na"),
        (NOWHERE, LATER, "<u>S\n\nT\n\na<a>b<u>c"),
        (NOWHERE, BETWEEN_USERS, "<u>a<s>T<u>c"),
        (LEFT_OUT, FIRST, "<u>S\n\na"),
        (LEFT_OUT, LAST, "<u>S\n\nT\n\na<a>b<u>c"),
        (DEVELOPER, (("developer", "D"), ("user", "a")), "<d>D<u>a"),
        (DEVELOPER, LATER, "<d>S\n\nT<u>a<a>b<u>c"),
        (DEVELOPER, (("user", "a"), ("developer", "D")), "<d>D<u>a"),
        (TOLD_ROLES, BETWEEN_USERS, "<user>a<system>T<user>c"),
        (TOLD_ROLES, (("system", "S"),), "<system>S"),
        (LEFT_OUT, (("system", "S"),), "<u>S"),
        (PARTS, LATER, "<s>S\n\nT<u>a<a>b<u>c"),
        (
            LEFT_OUT,
            (("system", ["S", {"type": "text", "text": "T"}]), ("user", [{"type": "text", "text": "a"}])),
            "<u>S\nT\na",
        ),
        (ANYWHERE, (("user", "a"), ("system", ""), ("user", "c")), "<u>a<s><u>c"),
    ],
)
def test_every_instruction_is_in_the_prompt(template: str, turns: Any, expected: str) -> None:
    assert prompt(template, *turns) == expected


CALLED = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]})
RESULT, REMINDER = {"role": "tool", "content": "r"}, {"role": "user", "content": "do not forget"}
ALTERNATING = BEGINNING.replace("{% if m.role != 'tool' %}", "{% if m.role != 'tool' and not m.tool_calls %}")


@pytest.mark.parametrize(
    ("template", "more", "expected"),
    [
        (ALTERNATING, [], "<u>a<a><t>r\n\ndo not forget"),
        (ALTERNATING, [{"role": "system", "content": "T"}], "<s>T<u>a<a><t>r\n\ndo not forget"),
        (ANYWHERE, [], "<u>a<a><t>r<u>do not forget"),
        (ANYWHERE, [{"role": "system", "content": "T"}], "<u>a<a><t>r<u>do not forget<s>T"),
    ],
)
def test_a_users_text_behind_a_tools_result_is_no_obstacle(template: str, more: Any, expected: str) -> None:
    """As Claude Code sends its reminders."""
    render = functools.partial(render_chat, template)
    assert render(place_instructions(template, [*CALLED, RESULT, REMINDER, *more], render)) == expected


def test_several_user_messages_are_one_for_a_template_that_refuses_them_where_an_agent_instructs() -> None:
    """As codex sends its surroundings and the task."""
    assert prompt(BEGINNING, ("system", "S"), ("user", "a"), ("user", "b")) == "<s>S<u>a\n\nb"
    assert prompt(NOWHERE, ("system", "S"), ("user", "a"), ("user", "b")) == "<u>S\n\na\n\nb"
    assert prompt(ANYWHERE, ("system", "S"), ("user", "a"), ("user", "b")) == "<s>S<u>a<u>b"
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        prompt(BEGINNING, ("user", "a"), ("user", "b"))


def test_a_text_that_stands_elsewhere_too_is_no_proof_that_the_instruction_is_shown() -> None:
    assert prompt(LEFT_OUT, ("system", "yes"), ("user", "say yes")) == "<u>yes\n\nsay yes"


def test_what_a_template_refuses_for_another_reason_is_refused_in_its_own_words() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        prompt(BEGINNING, ("system", "S"), ("assistant", "a"), ("developer", "T"), ("assistant", "b"))


def test_a_template_that_shows_no_message_at_all_gets_the_conversation_as_it_is() -> None:
    assert prompt("{{ messages | length }}", *LATER) == "5"


def test_nothing_moves_that_the_template_shows_where_it_stands() -> None:
    turns = conversation(*LATER)
    assert place_instructions(TOLD_ROLES, turns, functools.partial(render_chat, TOLD_ROLES)) == turns


BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cch=fa690;"


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"{BILLING}\nBe brief.", "<system>Be brief.<user>a"),
        (f"{BILLING}\nx-anthropic-more: 1\nBe brief.", "<system>Be brief.<user>a"),
        (BILLING, "<user>a"),
        ([BILLING, "Be brief."], "<system>Be brief.<user>a"),
        ([{"type": "text", "text": BILLING}, {"type": "text", "text": "Be brief."}], "<system>Be brief.<user>a"),
        ([{"type": "text", "text": f"{BILLING}\nBe"}, {"type": "text", "text": "brief."}], "<system>Be\nbrief.<user>a"),
        ([{"type": "text", "text": BILLING}], "<user>a"),
        (f"Send {BILLING}", f"<system>Send {BILLING}<user>a"),
    ],
)
def test_lines_for_anthropics_service_are_no_instructions(role: str, content: Any, expected: str) -> None:
    assert prompt(TOLD_ROLES, (role, content), ("user", "a")) == expected


def test_a_users_text_keeps_such_a_line() -> None:
    assert prompt(TOLD_ROLES, ("user", BILLING)) == f"<user>{BILLING}"
