"""What a chat template may compute and build: hostile ones end with a refusal, useful ones lose nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jinja2
import psutil
import pytest
from patience import still_alive
from processor_time import processor_s
from thinned import every

from headrace.frontend.text import chat_template, template_renderer
from headrace.frontend.text.chat_template import check_template, render_chat, render_chats
from headrace.frontend.text.template_messages import MOST_BYTES, MOST_CHARACTERS
from headrace.frontend.text.template_renderer import TemplateLimitError, one_limit, renderer, without_blocking
from headrace.ipc.failure import InvalidRequestError

USER = {"role": "user", "content": "Say hello\n  and goodbye"}
_BUSY_S = 30.0
"""Longest wait for what takes no time on an idle machine."""
_NESTED = "{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"
_NESTED_TWICE = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
_NESTED_DICTS = (
    "{% set ns = namespace(a={'k': 1}, b={'k': 1}) %}{% for i in range(60) %}"
    "{% set ns.a = {'k': ns.a, 'l': ns.a} %}{% set ns.b = {'k': ns.b, 'l': ns.b} %}{% endfor %}"
)
_LONG_LIST = "(['a' * 1000000] * 100000)"
_ENDLESS = _NESTED_TWICE + "{{ ns.a == ns.b }}"


def _doubled(start: str, operator: str) -> str:
    return (
        f"{{% set ns = namespace(s={start}) %}}{{% for i in range(60) %}}"
        f"{{% set ns.s = ns.s {operator} ns.s %}}{{% endfor %}}"
    )


def _workers() -> list[psutil.Process]:
    pid = renderer().pid
    assert pid is not None
    return psutil.Process(pid).children()


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_renderer, "MOST_COMPUTING_S", 0.1)


@pytest.fixture
def own_helper() -> Iterator[None]:
    """A helper program that no other test has used."""
    renderer().end()
    yield
    renderer().end()


@pytest.mark.usefixtures("short_limit")
@pytest.mark.parametrize(
    "template",
    every(
        4,
        [
            "{{ 'a'|center(2000000000) }}",
            "{{ 'a'|default('b')|center(width=2000000000) }}",
            "{{ ['a']|map('center', 2000000000)|list }}",
            "{% filter center(2000000000) %}x{% endfilter %}",
            "{% autoescape true %}{{ 'a'|center(2000000000) }}{% endautoescape %}",
            "{{ '%2000000000d'|format(1) }}",
            "{{ '%.2000000000f'|format(1) }}",
            "{{ '%2000000000d' % 1 }}",
            "{{ '%*d' % (2000000000, 1) }}",
            "{{ '%00000000000002000000000d' % 1 }}",
            "{{ '%((a))2000000000d' % {'(a)': 1} }}",
            "{{ ('%(a)s' * 2000) % {'a': 'x' * 1000000} }}",
            "{{ 'a'.ljust(2000000000) }}",
            "{{ ('a'|safe).rjust(2000000000) }}",
            "{{ 'a'['center'](2000000000) }}",
            "{{ ('a'|attr('zfill'))(2000000000) }}",
            "{{ 'a\\t'.expandtabs(tabsize=2000000000) }}",
            "{{ '{:>2000000000}'.format(1) }}",
            "{{ ('{:>2000000000}'|safe).format(1) }}",
            "{{ '{:>{}}'.format(1, 2000000000) }}",
            "{{ '{a:.2000000000f}'.format_map({'a': 1.0}) }}",
            "{{ ('{:>1000000}' * 1000).format(*range(1000)) }}",
            "{{ ('a' * 100000).replace('a', 'b' * 20000) }}",
            "{{ ('a' * 100000)|replace('', 'b' * 20000) }}",
            "{{ ('a\\n' * 500000)|indent(100000) }}",
            "{{ ('x' * 1000000).join('a' * 1000000) }}",
            f"{{{{ {_LONG_LIST}|join }}}}",
            f"{{{{ ','.join({_LONG_LIST}) }}}}",
            f"{{{{ {_LONG_LIST}|map('upper')|join }}}}",
            f"{{{{ {_LONG_LIST}|map('upper')|list|length }}}}",
            f"{{{{ {_LONG_LIST}|sort|length }}}}",
            f"{{{{ {_LONG_LIST}|unique|list|length }}}}",
            f"{{{{ {_LONG_LIST}|string }}}}",
            f"{{{{ {_LONG_LIST} }}}}",
            f"{{{{ {_LONG_LIST}|tojson }}}}",
            "{{ [1, [2]]|tojson(indent=2000000000) }}",
            "{{ range(100000)|list|tojson(separators=('x' * 1000000, ':')) }}",
            "{{ [1]|batch(2000000000, 'x')|list|length }}",
            "{{ [1]|slice(slices=2000000000)|list|length }}",
            "{{ ([[1] * 1000000] * 1000000)|sum(start=[])|length }}",
            "{{ 1|round(-1000000000) }}",
            _doubled("'ab'", "~"),
            _doubled("'ab'", "+"),
            _doubled("[1]", "+"),
            _NESTED + "{{ ns.s }}",
            _NESTED + "{{ ns.s|tojson }}",
            _NESTED + "{{ '{!r}'.format(ns.s) }}",
            _NESTED + "{{ {'a': ns.s}.items() }}",
            "{{ lipsum(300000000) }}",
            *(_NESTED_TWICE + f"{{{{ ns.a {operator} ns.b }}}}" for operator in ("==", "!=", "<", ">=")),
            *(_NESTED_TWICE + f"{{{{ ns.a {operator} [ns.b] }}}}" for operator in ("in", "not in")),
            *(_NESTED_TWICE + f"{{{{ ns.a is {test} ns.b }}}}" for test in ("eq", "ne", "lt", "ge")),
            _NESTED_TWICE + "{{ ns.a is in [ns.b] }}",
            _NESTED_TWICE + "{{ [ns.a, ns.b]|max }}",
            _NESTED_TWICE + "{{ [ns.a, ns.b]|sort }}",
            _NESTED_TWICE + "{{ [ns.a, ns.b]|unique|list }}",
            _NESTED_TWICE + "{{ [{'k': ns.a}, {'k': ns.b}]|groupby('k')|list }}",
            _NESTED_TWICE + "{{ [{'k': ns.a}]|selectattr('k', 'equalto', ns.b)|list }}",
            _NESTED_TWICE + "{{ [ns.a].index(ns.b) }}",
            _NESTED_TWICE + "{{ [ns.a].count(ns.b) }}",
            _NESTED_DICTS + "{{ ns.a == ns.b }}",
            _NESTED_DICTS + "{{ ns.a.items()|list == ns.b.items()|list }}",
            _NESTED_DICTS + "{{ ns.a|tojson }}",
            _NESTED + "{{ ns.s|pprint }}",
            "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}"
            "{% set ns.l = ns.l + [dict.fromkeys(range(99999))] %}{% endfor %}",
            "{% set ns = namespace(l=[]) %}{% set d = dict.fromkeys(range(99999)) %}{% for i in range(9999) %}"
            "{% set ns.l = ns.l + [dict(d)] %}{% endfor %}",
            "{{ 9 ** (9 ** 9) }}",
            "{% if messages == 0 %}{{ 9 ** (9 ** 8) }}{% endif %}",
            "{{ ('a' * 99999999)|wordwrap(1) }}",
            "{{ 'a'.translate({97: 'b' * 999999999}) ~ 'a'.translate({97: 'b' * 999999999}) }}",
            "{{ (1).to_bytes(2000000000, 'big') }}",
            "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = ns.l + ['x' * 999999 ~ i] %}"
            "{% endfor %}",
            "{% set t %}{% for i in range(99999) %}{{ 'x' * 999999 ~ i }}{% endfor %}{% endset %}",
            "{% for i in range(99999) %}{% for i in range(99999) %}{% for i in range(99999) %}"
            "{% endfor %}{% endfor %}{% endfor %}",
            "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{{ " + "(" * 100000 + "1" + ")" * 100000 + " }}",
            "{{ 1" + " + 1" * 100000 + " }}",
            "{% if x %}" * 5000 + "{% endif %}" * 5000,
            "{{ x.y }}" * 300000,
            "{{ [" + "'" + "a" * 1000000 + "'," * 1 + "] * 10 ** 10 }}",
        ],
    ),
)
def test_a_hostile_template_ends_with_a_refusal_and_harms_no_other(template: str) -> None:

    def refused() -> None:
        with pytest.raises(InvalidRequestError, match="chat template"):
            render_chat(template, [USER])

    assert processor_s(refused) < 1.0, "it is not this process that works"
    assert render_chat("{{ messages[0].role }}", [USER]) == "user"


def test_the_system_limits_a_workers_memory() -> None:
    render_chat("{{ messages[0].role }}", [USER])
    for worker in _workers():
        limit, _ = worker.rlimit(psutil.RLIMIT_AS)
        assert 0 < limit <= worker.memory_info().vms + MOST_BYTES, "below 0 is none"


def test_the_limits_are_told() -> None:
    with pytest.raises(TemplateLimitError, match=f"the chat template needs more than {MOST_BYTES >> 20} MiB"):
        render_chat("{{ 'a'|center(20000000000) }}", [USER])
    with pytest.raises(TemplateLimitError, match=f"printed more than {MOST_CHARACTERS} characters"):
        render_chat(f"{{{{ 'a' * {MOST_CHARACTERS + 1} }}}}", [USER])
    with one_limit():
        template_renderer._here.left_s = 0.05
        with pytest.raises(TemplateLimitError, match="takes more than 5 s of processor time"):
            render_chat(_ENDLESS, [USER])


def test_the_renderings_for_one_conversation_share_a_limit() -> None:
    """Else a slow template would take it for each of the places where instructions may stand."""
    slow = "{% for i in range(200) %}{{ range(9999)|sum }}{% endfor %}"
    with one_limit():
        render_chat(slow, [USER])
        left_s = template_renderer._here.left_s
        render_chat(slow, [USER])
        assert left_s is not None
        assert template_renderer._here.left_s is not None
        assert template_renderer._here.left_s < left_s < template_renderer.MOST_COMPUTING_S
    assert template_renderer._here.left_s is None


@pytest.mark.usefixtures("short_limit", "own_helper")
@pytest.mark.parametrize("role", ["system", "user"])
def test_a_limit_is_not_taken_for_an_answer_about_the_template(role: str) -> None:
    """What a template shows is tried once and remembered, so a trial that was cut off must not count."""
    parts = "{% for m in messages %}{% for p in m.content %}{{ p.text if ns.a == ns.b }}{% endfor %}{% endfor %}"
    chat_template._roles_with_parts.cache_clear()
    with pytest.raises(TemplateLimitError):
        render_chat(_NESTED_TWICE + parts, [{"role": role, "content": "x"}])
    found = chat_template._roles_with_parts.cache_info()
    assert (found.misses, found.currsize) == (1, 0)


# --- many at a time ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_limit")
def test_a_slow_template_holds_back_no_other() -> None:
    asked = threading.Event()

    def render_slowly() -> None:
        asked.set()
        with pytest.raises(TemplateLimitError):
            render_chat(_ENDLESS, [USER])

    thread = threading.Thread(target=render_slowly)
    thread.start()
    asked.wait()
    num_rendered = 0
    while thread.is_alive():
        assert render_chat("{{ messages[0].role }}", [USER]) == "user"
        num_rendered += 1
    thread.join()
    assert num_rendered > 10


@pytest.mark.usefixtures("short_limit")
def test_an_event_loop_goes_on_while_templates_are_rendered() -> None:
    async def main() -> tuple[int, int]:
        num_turns = num_rendered = 0

        async def turn() -> None:
            nonlocal num_turns, num_rendered
            while True:
                await asyncio.sleep(0)
                num_turns += 1
                if num_turns % 100 == 0:
                    text = await without_blocking(lambda: render_chat("{{ messages[0].role }}", [USER]))
                    num_rendered += text == "user"

        turning = asyncio.create_task(turn())
        slow = [without_blocking(lambda: render_chat(_ENDLESS, [USER])) for _ in range(6)]
        results = await asyncio.gather(*slow, return_exceptions=True)
        turning.cancel()
        assert all(isinstance(each, TemplateLimitError) for each in results), results
        return num_turns, num_rendered

    num_turns, num_rendered = asyncio.run(main())
    assert num_turns > 100
    assert num_rendered > 0
    while len(renderer()._free) < template_renderer._LANES:  # a thread goes on with what the cancelled task began
        time.sleep(0.01)
    assert sorted(renderer()._free) == list(range(template_renderer._LANES))


@pytest.mark.usefixtures("short_limit")
def test_a_rendering_whose_caller_has_left_gives_its_lane_back() -> None:
    async def main() -> None:
        for _ in range(6):
            task = asyncio.create_task(without_blocking(lambda: render_chat(_ENDLESS, [USER])))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert render_chat("{{ messages[0].role }}", [USER]) == "user"
    with renderer()._has_free:
        assert renderer()._has_free.wait_for(lambda: len(renderer()._free) == template_renderer._LANES, _BUSY_S)


def test_work_that_goes_on_in_a_thread_renders_nothing_twice(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_renderer, "INLINE_S", 0.0)
    asked: list[Any] = []
    send = renderer()._helper.send

    def noting(lane: int, *rest: Any) -> Any:
        asked.append(rest[0])
        return send(lane, *rest)

    monkeypatch.setattr(renderer()._helper, "send", noting)
    template = "{% for i in range(99) %}{{ range(9999)|sum }}{% endfor %}"
    text = asyncio.run(without_blocking(lambda: render_chat(template, [USER])))
    assert len(text) == 99 * len(str(sum(range(9999))))
    assert len(asked) == 1


def test_many_conversations_are_rendered_in_order_whatever_one_of_them_does() -> None:
    conversations = [[{"role": "user", "content": f"{n}" * 100}] for n in range(300)]
    assert list(render_chats("{{ messages[0].content }}", conversations)) == [f"{n}" * 100 for n in range(300)]
    refused = "{{ raise_exception('seven') if messages[0].content[:1] == '7' else messages[0].content }}"
    found = render_chats(refused, conversations)
    assert [next(found) for _ in range(7)] == [f"{n}" * 100 for n in range(7)]
    with pytest.raises(InvalidRequestError, match="seven"):
        next(found)
    assert list(render_chats("x", [])) == []
    assert sorted(renderer()._free) == list(range(template_renderer._LANES))


@pytest.mark.usefixtures("short_limit")
def test_one_of_many_conversations_that_reaches_a_limit_is_refused_and_those_before_it_are_rendered() -> None:
    slow = "{% if messages[0].content == '70' and ns.a == ns.b %}{% endif %}"
    template = _NESTED_TWICE + slow + "{{ messages[0].content }}"
    found = render_chats(template, [[{"role": "user", "content": f"{n}"}] for n in range(200)])
    assert [next(found) for _ in range(70)] == [f"{n}" for n in range(70)]
    with pytest.raises(TemplateLimitError, match="processor time"):
        next(found)


def test_many_large_conversations_are_rendered_though_together_they_pass_the_limits() -> None:
    content = "x" * (2 << 20)
    conversations = [[{"role": "user", "content": content}] for _ in range(12)]
    num_characters = [len(text) for text in render_chats("{{ messages[0].content * 4 }}", conversations)]
    assert num_characters == [4 * len(content)] * 12


# --- the helper program -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_helper")
def test_a_helper_that_was_killed_is_started_again() -> None:
    template = "{{ messages[0].role }}"
    assert render_chat(template, [USER]) == "user"
    first = renderer().pid
    assert first is not None
    workers = _workers()
    os.kill(first, signal.SIGKILL)
    assert not still_alive(workers, _BUSY_S)
    assert render_chat(template, [USER]) == "user"
    assert renderer().pid != first
    for worker in _workers():
        worker.kill()
    assert render_chat(template, [USER]) == "user"


@pytest.mark.usefixtures("own_helper")
def test_a_worker_that_has_used_much_memory_is_replaced() -> None:
    template = "{{ messages[0].role }}"
    assert render_chat(template, [USER]) == "user"
    before = set(_workers())
    render_chat(f"{{{{ ('a' * {MOST_BYTES // 4})|length }}}}", [USER])
    assert render_chat(template, [USER]) == "user"
    assert len(before - set(_workers())) == 1


@pytest.mark.usefixtures("own_helper")
def test_signals_to_all_processes_do_not_end_the_helper() -> None:
    assert render_chat("{{ messages[0].role }}", [USER]) == "user"
    while len(_workers()) < template_renderer._LANES:  # the first one answers while others are forked
        time.sleep(0.01)
    pid, workers = renderer().pid, _workers()
    assert pid is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for each in (pid, *(worker.pid for worker in workers)):
            os.kill(each, number)
    assert render_chat("{{ messages[0].role }}", [USER]) == "user"
    assert (renderer().pid, _workers()) == (pid, workers)


@pytest.mark.usefixtures("own_helper")
def test_the_helper_inherits_nothing_and_has_one_thread() -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    try:
        render_chat("{{ messages[0].role }}", [USER])
        assert renderer().pid is not None
        for each in (psutil.Process(renderer().pid), *_workers()):
            held = {os.readlink(f"/proc/{each.pid}/fd/{number}") for number in os.listdir(f"/proc/{each.pid}/fd")}
            assert os.readlink(f"/proc/self/fd/{writing}") not in held
            assert {name.partition(":")[0] for name in held} <= {"/dev/null", "socket", "anon_inode"}
            assert each.num_threads() == 1
            mapped = {mapped.path for mapped in each.memory_maps()}
            assert not [path for path in mapped if "torch" in path or "numpy" in path]
    finally:
        os.close(reading)
        os.close(writing)


_PROGRAM = """
import os, signal, sys, threading
from headrace.frontend.text.chat_template import render_chat
from headrace.frontend.text.template_renderer import renderer
print(render_chat("{{ messages[0].role }}", [{"role": "user", "content": "x"}]), renderer().pid, flush=True)
"""


@pytest.mark.parametrize("how", ["end", "kill", "kill at work"])
def test_the_helper_ends_with_its_parent(how: str) -> None:
    busy = f"threading.Thread(target=render_chat, args=({_ENDLESS!r}, [{USER!r}]), daemon=True).start()\n"
    more = {"end": "", "kill": "signal.pause()", "kill at work": busy + "signal.pause()"}[how]
    with subprocess.Popen([sys.executable, "-c", _PROGRAM + more], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        role, pid = process.stdout.readline().split()
        assert role == "user"
        helper: list[psutil.Process] = []
        try:
            helper = [psutil.Process(int(pid))]
            helper += helper[0].children()
        except psutil.NoSuchProcess:
            assert how == "end"
        if how != "end":
            process.kill()
        process.wait(_BUSY_S)
        assert not still_alive(helper, _BUSY_S)


def test_a_forked_copy_of_a_process_has_a_helper_of_its_own() -> None:
    fork = (
        "if (pid := os.fork()) == 0:\n"
        "    print(render_chat('{{ 1 + 1 }}', [{'role': 'user', 'content': 'x'}]), renderer().pid, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(render_chat('{{ 2 + 2 }}', [{'role': 'user', 'content': 'x'}]), renderer().pid, flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM + fork], capture_output=True, text=True, timeout=_BUSY_S, check=True
    )
    (_, first), (two, of_fork), (four, again) = (line.split() for line in done.stdout.splitlines())
    assert (two, four, again) == ("2", "4", first), done.stderr
    assert of_fork != first
    assert not done.stderr


# --- what useful templates do -----------------------------------------------------------------------------------------


def test_a_template_may_build_a_gigabyte_in_turn() -> None:
    template = "{% set ns = namespace(n=0) %}{% for i in range(1000) %}{% set s = 'x' * 2 ** 20 %}{% endfor %}done"
    assert render_chat(template, [USER]) == "done"


def test_a_prompt_of_megabytes_is_rendered() -> None:
    content = "Is it so? Yes.\n" * 300_000
    template = (
        "{% for m in messages %}{{ '<' + m.role + '>' ~ m.content|trim|replace('?', '!')|indent(2) }}{% endfor %}"
    )
    expected = f"<user>{content.strip().replace('?', '!')}".replace("\n", "\n  ")
    assert render_chat(template, [{"role": "user", "content": content}]) == expected


def test_plain_values_of_all_kinds_reach_a_template() -> None:
    values = {"i": 2**80, "f": 1e300, "t": (1, "a"), "n": None, "b": True, "k": {1: "one", None: 0}, "s": "\ud83d"}
    template = "{{ i }}|{{ f }}|{{ t }}|{{ n }}|{{ b }}|{{ k }}|{{ s }}"
    expected = "|".join(map(str, values.values()))
    assert render_chat(template, [USER], variables=values) == expected


def test_what_is_no_template_is_refused_where_it_is_given() -> None:
    check_template("{{ messages }}")
    with pytest.raises(InvalidRequestError, match=r"is not valid: .*line 1"):
        check_template("{% for %}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a'|center(9) }}|{{ 'a'.ljust(3, '.') }}|{{ 'a'.rjust(3) }}|{{ '7'.zfill(3) }}|{{ 'a\\tb'.expandtabs(4) }}",
        "{{ '%s-%5d-%.2f%%'|format('a', 7, 1.5) }}|{{ '%(a)s' % {'a': 1} }}|{{ '%s' % [1, 'x'] }}|{{ 7 % 4 }}|"
        "{{ 7 // 2 }}",
        "{{ '{} {:>5} {a[k]!r}'.format(1, 2, a={'k': 'v'}) }}|{{ '{x}'.format_map({'x': 1}) }}|{{ '{}'.format([1]) }}",
        "{{ m.content.replace('o', '00') }}|{{ m.content|replace('o', '0', 1) }}|{{ 12|replace('1', 'x') }}",
        "{{ m.content|indent(2, true) }}|{{ m.content|indent(width='> ') }}|"
        "{{ m.content|title|upper|lower|capitalize }}",
        "{{ [1, 'a', none]|join(', ') }}|{{ d|items|map('first')|join(d='-') }}|{{ ','.join(['a', 'b']) }}",
        "{{ ','.join(d|map('upper')) }}|{{ [m, m]|join('+', attribute='role') }}|{{ 'abc'|join('.') }}",
        "{{ [3, 1, 2]|sort|list }}{{ ['b', 'A', 'a']|unique|list }}{{ [1, 2, 3]|sum }}{{ [[1], [2]]|sum(start=[]) }}",
        "{{ [m]|sum(attribute='content', start='') if false }}{{ [1, 2]|max }}{{ 'b a'|min }}{{ d|dictsort }}",
        "{% for k, l in [m, m]|groupby('role') %}{{ k }}{{ l|length }}{% endfor %}{{ [1, 2, 3]|batch(2, 0)|list }}",
        "{{ [1, 2, 3]|slice(2, 'x')|list }}{{ 'abc'|reverse }}{{ [1, 2]|reverse|list }}{{ 'ab'|list }}"
        "{{ 'abc'[::-1] }}",
        "{{ 1.256|round(2) }}{{ 5|round(-1) }}{{ '12'|int + 1 }}{{ 'z'|int(7) }}{{ '1.5'|float }}{{ -3|abs }}",
        "{{ ' a '|trim }}{{ 'xax'|trim('x') }}{{ 'a b c'|truncate(3, true, '') }}{{ 'a b'|wordcount }}"
        "{{ 'a b'|urlencode }}",
        "{{ '<' | e }}{{ '<'|safe }}{{ ('<'|e) ~ '<' }}{{ ('<'|e) + '<' }}{{ d.missing|default('-') }}{{ x }}",
        "{% autoescape true %}{{ '<' ~ 'a' }}{{ '<b>' }}{{ '<'|safe }}{{ '<' + m.role }}{{ 3 }}{% endautoescape %}",
        "{{ 1 + 2 + 3 }}{{ 'a' + 'b' + m.role }}{{ [1] + [2] + [m.role] }}{{ 1.5 + 2 }}{{ (1, 2) + (3,) }}"
        "{{ 1 ~ none ~ d }}",
        "{{ m.content.split() }}{{ 'a,b,c'.split(',', 1) }}{{ 'a,b,c'.rsplit(sep=',', maxsplit=1) }}"
        "{{ 'a\\nb'.splitlines(true) }}",
        "{{ [m, m]|selectattr('role', 'equalto', 'user')|list|length }}{{ [1, 2]|select('odd')|list }}"
        "{{ [m]|map(attribute='role')|first }}",
        "{% set ns = namespace(a=[], s='') %}{% for c in 'xyz' %}{% set ns.a = ns.a + [c] %}{% set ns.s = ns.s ~ c %}"
        "{{ c.upper() }}{{ loop.index + 1 }}{% endfor %}{{ ns.a }}{{ ns.s }}{{ ns }}",
        "{% macro f(a, b='-') %}[{{ a }}{{ b }}{{ caller() if caller }}]{% endmacro %}{{ f(1) + f(2, b=3) }}"
        "{% call f('x') %}in{% endcall %}{% set t %}{{ 1 }}-{{ m.role }}{% endset %}{{ t }}{{ d.items()|list }}"
        "{{ d.get('k') }}",
        "{% filter upper %}a{{ m.role }}{% endfilter %}{{ none }}{{ true }}{{ 1.0 }}{{ d }}{{ d.keys() }}"
        "{{ range(3) }}",
        "{% for n in [[1, [2]], 3] recursive %}{{ loop(n) if n is iterable else n }}"
        ",{% endfor %}{{ cycler('a', 'b').next() }}",
    ],
)
def test_bounded_operations_give_what_plain_jinja2_gives(template: str) -> None:
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    variables = {"d": {"k": "v", "l": 2}, "m": USER}
    assert render_chat(template, [USER], variables=variables) == plain.render(messages=[USER], **variables)
