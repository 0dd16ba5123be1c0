"""The program that compiles and renders chat templates, in workers that the kernel limits and that can be killed.

A template is an untrusted program, from the model's author or from a request, and a single call in it can take hours or
fill the memory, as `'a'.center(10 ** 10)` does. jinja2's sandbox keeps it from Python's objects. Time and memory are
bounded here from outside, for everything that it may do, since nothing within the interpreter can interrupt what runs
in C. `template_renderer.py` is the other end.
"""

from __future__ import annotations

import functools
import json
import marshal
import resource
import signal
import time
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from headrace.frontend.text.template_messages import (
    MOST_BYTES,
    MOST_CHARACTERS,
    Output,
    Rendered,
    Rendering,
    TemplateMessage,
)
from headrace.ipc.process.helper import limit_memory, run_helper
from headrace.ipc.transport.channel import Channel

_LONGEST_PROBLEM = 2000
_KEPT_BYTES = 64 << 20
"""A worker that has used more than this is replaced, so that the memory returns to the system."""


class _Templates:
    """A worker's work."""

    def __init__(self, channel: Channel) -> None:
        self._environment = environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self._compile = functools.lru_cache(maxsize=64)(environment.from_string)
        environment.from_string("{{ messages[0].content | trim }}").render(messages=[{"content": ""}])  # warms it up
        self._most_bytes = 0

    def begin(self, lane: int, former: int) -> None:
        limit_memory(MOST_BYTES)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self._most_bytes = _peak_bytes() + _KEPT_BYTES

    def do(self, asked: Rendering) -> Rendered:
        signal.setitimer(signal.ITIMER_REAL, asked.longest_s)  # SIGALRM ends this process
        began_s = time.process_time()
        outputs: list[Output] = []
        num_bytes, invalid = 0, ""
        _allow(asked.most_s)
        try:
            template = self._compile(asked.template)
            for context in asked.contexts:
                if outputs:
                    _allow(asked.most_s)
                outputs.append(_output(template, context))
                num_bytes += len(outputs[-1].text)
                if outputs[-1].is_limit or num_bytes > MOST_CHARACTERS:
                    break
        except jinja2.TemplateSyntaxError as error:
            invalid = f"{error.message} (line {error.lineno})"
        except SyntaxError as error:  # in the Python code that jinja2 generates, when blocks are nested too deeply
            invalid = error.msg
        except (RecursionError, MemoryError):
            invalid = "it is nested too deeply, or too large"
        except Exception as error:
            invalid = f"{type(error).__name__}: {error}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return Rendered(tuple(outputs), _said(invalid), time.process_time() - began_s)

    def is_bloated(self) -> bool:
        return _peak_bytes() > self._most_bytes


def _output(template: jinja2.Template, context: bytes) -> Output:
    try:
        text = template.render(marshal.loads(context))  # as one mapping: a variable may have a parameter's name
        if len(text) > MOST_CHARACTERS:
            return Output(problem=f"the chat template printed more than {MOST_CHARACTERS} characters", is_limit=True)
        return Output(text.encode("utf-8", "surrogatepass"))
    except MemoryError:
        said = f"the chat template needs more than {MOST_BYTES >> 20} MiB for these messages, as much as it may take"
        return Output(problem=said, is_limit=True)
    except RecursionError:
        said = "messages, tools or other variables of the chat template, or its own calls, are nested too deeply"
        return Output(problem=said)
    except jinja2.TemplateError as error:
        return Output(problem=_said(f"the chat template refused these messages: {error}"))
    except Exception as error:
        said = f"the chat template could not render these messages: {type(error).__name__}: {error}"
        return Output(problem=_said(said))


def _allow(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends this process


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _said(problem: str) -> str:
    """The words of a template, which may be of any length and hold what is no text."""
    return problem[:_LONGEST_PROBLEM].encode("utf-8", "replace").decode()


# --- what templates find besides jinja2's own -------------------------------------------------------------------------


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter tojson. jinja2's own escapes HTML, which would spoil a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training. Renders its content alone."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> Any:
        """Reads the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


if __name__ == "__main__":
    run_helper(TemplateMessage, _Templates)
