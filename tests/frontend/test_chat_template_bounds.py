"""What a chat template may build and compute: hostile ones are refused at once, and useful ones lose nothing."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import jinja2
import pytest

from headrace.frontend.text.chat_template import render_chat
from headrace.ipc.failure import InvalidRequestError

USER = {"role": "user", "content": "Say hello\n  and goodbye"}
_PROMPTLY_S = 5.0
"""Of processor time: far below the template's own limit, and far above what a refusal takes."""
_MOST_BYTES = 200 << 20
_NESTED = "{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"
_LONG_LIST = "(['a' * 1000000] * 100000)"


def _doubled(start: str, operator: str) -> str:
    return (
        f"{{% set ns = namespace(s={start}) %}}{{% for i in range(60) %}}"
        f"{{% set ns.s = ns.s {operator} ns.s %}}{{% endfor %}}"
    )


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 'a'|center(2000000000) }}", "center"),
        ("{{ 'a'|default('b')|center(width=2000000000) }}", "center"),
        ("{{ ['a']|map('center', 2000000000)|list }}", "center"),
        ("{% filter center(2000000000) %}x{% endfilter %}", "center"),
        ("{% autoescape true %}{{ 'a'|center(2000000000) }}{% endautoescape %}", "center"),
        ("{{ '%2000000000d'|format(1) }}", "format"),
        ("{{ '%.2000000000f'|format(1) }}", "format"),
        ("{{ '%2000000000d' % 1 }}", "%"),
        ("{{ '%*d' % (2000000000, 1) }}", "%"),
        ("{{ '%00000000000002000000000d' % 1 }}", "%"),
        ("{{ '%((a))2000000000d' % {'(a)': 1} }}", "%"),
        ("{{ ('%(a)s' * 2000) % {'a': 'x' * 1000000} }}", "%"),
        ("{{ 'a'.ljust(2000000000) }}", "ljust"),
        ("{{ ('a'|safe).rjust(2000000000) }}", "rjust"),
        ("{{ 'a'['center'](2000000000) }}", "center"),
        ("{{ ('a'|attr('zfill'))(2000000000) }}", "zfill"),
        ("{{ 'a\\t'.expandtabs(tabsize=2000000000) }}", "expandtabs"),
        ("{{ '{:>2000000000}'.format(1) }}", "format"),
        ("{{ ('{:>2000000000}'|safe).format(1) }}", "format"),
        ("{{ '{:>{}}'.format(1, 2000000000) }}", "format"),
        ("{{ '{a:.2000000000f}'.format_map({'a': 1.0}) }}", "format"),
        ("{{ ('{:>1000000}' * 1000).format(*range(1000)) }}", "format"),
        ("{{ ('a' * 100000).replace('a', 'b' * 20000) }}", "replace"),
        ("{{ ('a' * 100000)|replace('', 'b' * 20000) }}", "replace"),
        ("{{ ('a\\n' * 500000)|indent(100000) }}", "indent"),
        ("{{ ('x' * 1000000).join('a' * 1000000) }}", "join"),
        (f"{{{{ {_LONG_LIST}|join }}}}", "join"),
        (f"{{{{ ','.join({_LONG_LIST}) }}}}", "join"),
        (f"{{{{ {_LONG_LIST}|map('upper')|join }}}}", "join"),
        (f"{{{{ {_LONG_LIST}|map('upper')|list|length }}}}", "list"),
        (f"{{{{ {_LONG_LIST}|sort|length }}}}", "sort"),
        (f"{{{{ {_LONG_LIST}|unique|list|length }}}}", "unique"),
        (f"{{{{ {_LONG_LIST}|string }}}}", "string"),
        (f"{{{{ {_LONG_LIST} }}}}", "printing"),
        (f"{{{{ {_LONG_LIST}|tojson }}}}", "tojson"),
        ("{{ [1, [2]]|tojson(indent=2000000000) }}", "tojson"),
        ("{{ range(100000)|list|tojson(separators=('x' * 1000000, ':')) }}", "tojson"),
        ("{{ ('a' * 1000000 ~ 'a' * 1000000)|list|length }}", "list"),
        ("{{ [1]|batch(2000000000, 'x')|list|length }}", "batch"),
        ("{{ [1]|slice(slices=2000000000)|list|length }}", "slice"),
        ("{{ ([[1] * 1000000] * 1000000)|sum(start=[])|length }}", r"\+"),
        ("{{ 1|round(-1000000000) }}", "precision"),
        (_doubled("'ab'", "~"), "~"),
        (_doubled("'ab'", "+"), r"\+"),
        (_doubled("[1]", "+"), r"\+"),
        (_NESTED + "{{ ns.s }}", "items"),
        (_NESTED + "{{ '' ~ ns }}", "items"),
        (_NESTED + "{{ ns.s|tojson }}", "items"),
        (_NESTED + "{{ '{!r}'.format(ns.s) }}", "items"),
        (_NESTED + "{{ {'a': ns.s}.items() }}", "items"),
        ("{% for i in range(100000) %}{{ 'x' * 1000000 }}{% endfor %}", "the template"),
        ("{{ lipsum(300000000) }}", "cannot use lipsum"),
        ("{{ 'a b'|wordwrap(1) }}", "cannot use the filter wordwrap"),
        ("{{ 'a b'|urlize }}", "cannot use the filter urlize"),
        ("{{ {'a': 'b'}|xmlattr }}", "cannot use the filter xmlattr"),
        ("{{ messages|pprint }}", "cannot use the filter pprint"),
        ("{{ 'a'|striptags }}", "cannot use the filter striptags"),
        ("{{ 'a'.translate({97: 'b' * 1000000}) }}", "cannot use the method translate"),
        ("{{ 'a'.encode() }}", "cannot use the method encode"),
        ("{{ (1).to_bytes(2000000000, 'big') }}", "cannot use the method to_bytes"),
    ],
)
def test_a_template_that_would_fill_the_memory_is_refused_before_it_does(template: str, said: str) -> None:
    tracemalloc.start()
    try:
        began_s = time.thread_time()
        with pytest.raises(InvalidRequestError, match=said):
            render_chat(template, [USER])
        assert time.thread_time() - began_s < _PROMPTLY_S
        assert tracemalloc.get_traced_memory()[1] < _MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "template",
    [
        "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = ns.l + ['x' * 999999 ~ i] %}"
        "{% endfor %}",
        "{% set s = 'x' * 999999 %}{% set ns = namespace(l=[]) %}"
        "{% for i in range(99999) %}{% set ns.l = ns.l + [s[1:]] %}{% endfor %}",
        "{% set t %}{% for i in range(99999) %}{{ 'x' * 999999 ~ i }}{% endfor %}{% endset %}",
    ],
)
def test_what_a_template_keeps_is_bounded(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.frontend.text.template_sandbox.MOST_BYTES_BUILT", 1 << 26)
    with pytest.raises(InvalidRequestError, match="built more than 67108864 bytes"):
        render_chat(template, [USER])


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


def test_a_lack_of_memory_is_an_ordinary_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("headrace.frontend.text.template_sandbox.size_of_product", fail)
    with pytest.raises(InvalidRequestError, match="needs more memory"):
        render_chat("{{ 2 * 3 }}", [USER])


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
