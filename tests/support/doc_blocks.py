"""The code blocks of the README and of docs/, and how they are tried: all against one running server.

A block that cannot run has a comment before it: `<!-- not run: why -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from source_tree import ROOT

PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
URL, ADDRESS, MODEL = "http://127.0.0.1:8000", "ipc:///...", "MODEL"
"""What pages write for a server, an engine and a model."""
_FENCE = re.compile(r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```", re.M | re.S)
_INDENTED = re.compile(r"(?:^    .*\n)+", re.M)
_PROGRAMS = ("headrace", "engine-core", "curl", "make")
RUN = '''
import ast, asyncio, inspect, sys
import headrace
from headrace.core.options.parsing import parse_options

page, address, url = sys.argv[1:]

def shared(kind):
    """The class, whose objects attach to the engine that the tests share. The options that a page gives are checked."""
    class Shared(kind):
        def __new__(cls, model=None, **options):
            parse_options(**options)
            return self if not inspect.isawaitable(self := kind.connect(address)) else Later(self)
        def __init__(self, *_, **__):
            pass
        connect = staticmethod(kind.connect)
    return Shared

class Later:
    """An AsyncLLM that is attached when it is entered."""
    def __init__(self, waits):
        self.waits = waits
    async def __aenter__(self):
        self.llm = await self.waits
        return self.llm
    async def __aexit__(self, *_):
        await self.llm.close()

headrace.LLM, headrace.AsyncLLM = shared(headrace.LLM), shared(headrace.AsyncLLM)
code = compile(sys.stdin.read(), page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
names = {"__name__": "__main__"}
if code.co_flags & inspect.CO_COROUTINE:
    asyncio.run(eval(code, names))
else:
    exec(code, names)
'''
"""A program that runs a page's Python blocks from stdin."""


class Block(NamedTuple):
    page: str
    kind: str
    """python, sh and so on; empty if it does not say."""
    text: str
    why_not: str
    """Why it is not run; empty if it is."""


def blocks(page: str) -> Iterator[Block]:
    """The fenced and the indented ones, in order of kinds."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        yield Block(page, found["kind"], found["text"], found["why"] or "")
    for indented in _INDENTED.finditer(_FENCE.sub("", text)):
        yield Block(page, "", re.sub(r"^    ", "", indented.group(), flags=re.M), "")


def commands() -> list[tuple[str, str]]:
    """(page, command line) of each command of _PROGRAMS, without prompts and comments; continued lines are joined."""
    return list(dict.fromkeys(_written()))


def repeated(start: str) -> list[str]:
    """Every command that begins so, as often as it is written."""
    return [command for _, command in _written() if command.startswith(start)]


def _written() -> list[tuple[str, str]]:
    found = []
    for page in (each for each in PAGES if not each.startswith("docs/reference/")):
        for block in blocks(page):
            if block.why_not or block.kind not in ("", "sh", "bash", "console"):
                continue
            for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
                command = line.removeprefix("$ ").partition(" #")[0].strip()
                if command.split(" ")[0] in _PROGRAMS and " -- " not in command:
                    found.append((page, command))
    return found


def scripts() -> list[tuple[str, str]]:
    """(page, its Python blocks as one program) of each page that has some to run."""
    found = []
    for page in PAGES:
        parts = [block.text for block in blocks(page) if block.kind == "python" and not block.why_not]
        if parts:
            found.append((page, "\n".join(parts)))
    return found
