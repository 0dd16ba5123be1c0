"""Random hostile chat templates: no answer comes later than the limit, and no process takes more than its memory.

    python benchmarks/fuzz_templates.py [--minutes 10] [--seed 0] [--limit 1.0]

Templates are drawn from all that jinja2 offers: its filters, tests, globals and statements, the methods of the values
that templates have, nested values, long loops, large texts, deep recursion, deep nesting of the template itself, and
imports. Each is rendered as the server does it. Time is judged by the processor time of the program that renders and
its workers, since a busy machine takes the rest away. The exit status is 1 when a limit was passed, a rendering raised
anything but InvalidRequestError, or a plain template was not rendered afterwards.

It also tells what a usual conversation pays for the other process: medians of alternating renderings here and there.
"""

from __future__ import annotations

import argparse
import collections
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import psutil
from report import write_report

from headrace.frontend.text import template_renderer
from headrace.frontend.text.chat_template import _marshalled, render_chat
from headrace.frontend.text.template_messages import MOST_BYTES, Rendering
from headrace.frontend.text.template_process import _Templates
from headrace.frontend.text.template_renderer import TemplateLimitError, renderer
from headrace.ipc.failure import InvalidRequestError

RESULTS = Path(__file__).parent / "results" / "fuzz_templates.json"
USER = {"role": "user", "content": "Say hello\n  and goodbye"}
SLACK_S = 0.3
"""Of processor time: a timer of the system is checked at its ticks, and the next worker is forked."""
ENVIRONMENT = jinja2.Environment()
FILTERS = sorted(ENVIRONMENT.filters)
TESTS = sorted(name for name in ENVIRONMENT.tests if name.isalpha())
OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", ">", "<=", ">=", "in", "not in", "and", "or")
VALUES: tuple[Any, ...] = ("", [], {}, (), 0, 0.0, True, range(1), {}.items())
METHODS = sorted({name for value in VALUES for name in dir(value)})
SIZES = (0, 1, 2, 3, 7, 40, 99, 1000, 99999, 10**6, 10**8, 10**10, 2**31, 2**63, -1)
NESTED = (
    "{% set ns = namespace(a=[1], b=[1], c={'k': 1}, d={'k': 1}, t='ab', n=1) %}{% for i in range(NUM) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% set ns.c = {'k': ns.c, 'l': ns.c} %}"
    "{% set ns.d = {'k': ns.d, 'l': ns.d} %}{% endfor %}"
)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content | trim }}"
    "{% elif m.tool_calls %}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Writer:
    """Writes random templates."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def template(self) -> str:
        chance = self._chance
        if chance.random() < 0.05:
            return self._deep()
        start = NESTED.replace("NUM", str(chance.choice((2, 10, 25, 60, 900)))) if chance.random() < 0.5 else ""
        return start + "".join(self._statement(3) for _ in range(chance.randint(1, 4)))

    def _deep(self) -> str:
        """A template that is nested, or long, itself."""
        count = self._chance.choice((50, 500, 5000, 100_000))
        begin, middle, end = self._chance.choice(
            [("(", "1", ")"), ("[", "", "]"), ("{'a':", "1", "}"), ("not ", "1", ""), ("1 +", "1", ""), ("-", "1", "")]
        )
        if self._chance.random() < 0.5:
            return "{{ " + begin * count + middle + end * count + " }}"
        tag = self._chance.choice(
            ("if x", "for i in messages", "filter upper", "macro f()", "call f()", "autoescape 1")
        )
        return f"{{% {tag} %}}" * count + f"{{% end{tag.split()[0]} %}}" * count

    def _statement(self, depth: int) -> str:
        chance = self._chance
        inner = self._statement(depth - 1) if depth else "x"
        value = self._value(2)
        return chance.choice(
            [
                f"{{{{ {value} }}}}",
                f"{{{{ {value} }}}}",
                f"{{% set v = {value} %}}{{{{ v|length }}}}",
                f"{{% set ns2 = namespace(x={value}) %}}{{% for i in range({self._size()}) %}}"
                f"{{% set ns2.x = [ns2.x, {value}] %}}{{% endfor %}}",
                f"{{% for i in {value} %}}{inner}{{% endfor %}}",
                f"{{% for i in range({self._size()}) %}}{inner}{{% endfor %}}",
                f"{{% for i in {value} recursive %}}{{{{ loop([i, i]) }}}}{inner}{{% endfor %}}",
                f"{{% if {value} is {chance.choice(TESTS)}({value}) %}}{inner}{{% endif %}}",
                f"{{% if {value} is {chance.choice(TESTS)} %}}{inner}{{% endif %}}",
                f"{{% macro g(n) %}}{{% if n %}}{{{{ g(n - 1) }}}}{{{{ g(n - 1) }}}}{{% endif %}}{{% endmacro %}}"
                f"{{{{ g({self._size()}) }}}}",
                f"{{% set block %}}{inner * 3}{{% endset %}}{{{{ block }}}}",
                f"{{% filter {chance.choice(FILTERS)} %}}{inner}{{% endfilter %}}",
                f"{{% import {value} as other %}}",
                f"{{% include {value} %}}",
                f"{{% autoescape true %}}{inner}{{% endautoescape %}}",
                f"{{% generation %}}{inner}{{% endgeneration %}}",
            ]
        )

    def _value(self, depth: int) -> str:
        chance = self._chance
        if not depth or chance.random() < 0.2:
            return self._leaf()
        one, other = self._value(depth - 1), self._value(depth - 1)
        arguments = ", ".join(self._value(depth - 1) for _ in range(chance.randint(0, 3)))
        return chance.choice(
            [
                f"({one} {chance.choice(OPERATORS)} {other})",
                f"({one} {chance.choice(OPERATORS)} {other})",
                f"({one}|{chance.choice(FILTERS)}({arguments}))",
                f"({one}|{chance.choice(FILTERS)})",
                f"({one}|map('{chance.choice(FILTERS)}'{', ' + arguments if arguments else ''})|list)",
                f"({one}|select('{chance.choice(TESTS)}', {other})|list)",
                f"({one} is {chance.choice(TESTS)}({other}))",
                f"{one}.{chance.choice(METHODS)}({arguments})",
                f"{one}.{chance.choice(METHODS)}",
                f"{one}[{other}:{self._size()}]",
                f"[{one}, {other}]",
                f"({one}, {other})",
                f"{{'k': {one}, 'l': {other}}}",
                f"dict({arguments})",
                f"dict.fromkeys({one}, {other})",
                f"range({arguments})",
                f"lipsum({self._size()})",
                f"cycler({arguments}).next()",
                f"joiner({arguments})()",
                f"strftime_now({one})",
                f"({one} * {self._size()})",
                f"('%{self._size()}d' % {one})",
                f"'{{:>{self._size()}}}'.format({one})",
            ]
        )

    def _leaf(self) -> str:
        leaves = ("ns.a", "ns.b", "ns.c", "ns.d", "ns.t", "ns", "messages", "messages[0].content", "'a'", "'%s'", "1.5")
        more = ("none", "true", "x", "self", "loop", "range(99999)", "'x' * 999999", "[1]", "{'a': 1}", "namespace")
        return self._chance.choice([*leaves, *more, self._size(), self._size()])

    def _size(self) -> str:
        return str(self._chance.choice(SIZES))


def used_s() -> float:
    """Processor time of the program that renders and of its workers, those that have ended too."""
    if (pid := renderer().pid) is None:
        return 0.0
    process = psutil.Process(pid)
    seconds = sum(process.cpu_times()[:4])
    for worker in process.children():
        try:
            seconds += sum(worker.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return float(seconds)


def most_mapped_bytes(base_bytes: int) -> int:
    """How much more than the program itself the largest worker has ever had in memory."""
    found = [0]
    assert renderer().pid is not None
    for worker in psutil.Process(renderer().pid).children():
        try:
            lines = Path(f"/proc/{worker.pid}/status").read_text().splitlines()
        except OSError:
            continue
        found += [(int(line.split()[1]) << 10) - base_bytes for line in lines if line.startswith("VmPeak:")]
    return max(found)


def fuzz(minutes: float, seed: int, limit_s: float) -> dict[str, Any]:
    chance = random.Random(seed)
    writer = Writer(chance)
    template_renderer.MOST_COMPUTING_S = limit_s
    outcomes: collections.Counter[str] = collections.Counter()
    problems: list[str] = []
    longest_s, most_bytes = 0.0, 0
    render_chat("{{ messages[0].role }}", [USER])
    base_bytes = psutil.Process(renderer().pid).memory_info().vms
    end_s = time.monotonic() + 60 * minutes
    while time.monotonic() < end_s:
        template = writer.template()
        before_s = used_s()
        try:
            render_chat(template, [USER])
            outcome = "rendered"
        except TemplateLimitError as error:
            outcome = "limit: " + ("memory" if "MiB" in str(error) else "output" if "printed" in str(error) else "time")
        except InvalidRequestError as error:
            outcome = "invalid" if "not valid" in str(error) else "refused"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome = "wrong"
            problems.append(f"{type(error).__name__}: {error} from {template[:500]}")
        outcomes[outcome] += 1
        spent_s = used_s() - before_s
        longest_s, most_bytes = max(longest_s, spent_s), max(most_bytes, most_mapped_bytes(base_bytes))
        if spent_s > limit_s + SLACK_S:
            problems.append(f"{spent_s:.2f} s of processor time for {template[:500]}")
        if outcome.startswith("limit") and render_chat("{{ messages[0].role }}", [USER]) != "user":
            problems.append(f"a plain template is not rendered after {template[:500]}")
    if most_bytes > MOST_BYTES:
        problems.append(f"a worker mapped {most_bytes >> 20} MiB, and {MOST_BYTES >> 20} are allowed")
    return {
        "templates": sum(outcomes.values()),
        "outcomes": dict(sorted(outcomes.items())),
        "limit_s": limit_s,
        "longest_s": round(longest_s, 3),
        "limit_bytes": MOST_BYTES,
        "most_bytes": most_bytes,
        "problems": problems,
    }


def overhead(num_pairs: int = 2000) -> dict[str, float]:
    """Microseconds for a usual conversation, here and in the other process, in turn."""
    messages = [USER, {"role": "assistant", "content": "Hello and goodbye. " * 20}] * 4 + [USER]
    context = _marshalled({"messages": messages, "tools": None, "bos_token": "<s>", "add_generation_prompt": True})
    here = _Templates(None)  # type: ignore[arg-type]
    asked = Rendering(TEMPLATE, (context,), 5.0, 60.0)

    def seconds(work: Callable[[], object]) -> float:
        began_s = time.perf_counter()
        work()
        return time.perf_counter() - began_s

    pairs = [
        (seconds(lambda: here.do(asked)), seconds(lambda: renderer().outputs(TEMPLATE, context)))
        for _ in range(num_pairs)
    ]
    quartiles = statistics.quantiles([there_s - here_s for here_s, there_s in pairs], n=4)
    return {
        "here_us": round(1e6 * statistics.median(here_s for here_s, _ in pairs), 1),
        "there_us": round(1e6 * statistics.median(there_s for _, there_s in pairs), 1),
        "paid_us_quartiles": [round(1e6 * each, 1) for each in quartiles],  # type: ignore[dict-item]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1.0, help="of processor time for one template, in seconds")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    paid = overhead()
    print(f"a usual conversation: {paid}")
    found = fuzz(asked.minutes, asked.seed, asked.limit)
    print(found)
    write_report(
        asked.results, "fuzz_templates", {"minutes": asked.minutes, "overhead": paid, **found}, seed=asked.seed
    )
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
