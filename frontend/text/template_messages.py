"""Messages between a process that renders chat templates and its helper program (`template_process.py`)."""

from __future__ import annotations

import msgspec

from headrace.ipc.process.helper import WorkerEnded, WorkerReady

MOST_BYTES = 512 << 20
"""Limit of memory in addition to what the process uses without a template."""
MOST_CHARACTERS = 1 << 24
"""Limit of what a template prints."""


class Rendering(msgspec.Struct, frozen=True, tag=True):
    """Asks for a template's output in each of several contexts."""

    template: str
    contexts: tuple[bytes, ...]
    """By `marshal`, which has all of Python's plain types. Empty: the template is compiled alone."""
    most_s: float
    """Limit of processor time for each context, the first one's with the compilation."""
    longest_s: float
    """Limit of time by the clock, for all."""


class Output(msgspec.Struct, frozen=True, array_like=True):
    text: bytes = b""
    """As UTF-8, in which lone surrogates pass."""
    problem: str = ""
    """What is wrong if there is no text; begins with "the chat template"."""
    is_limit: bool = False
    """Whether the problem is a limit that was reached."""


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Rendering`: outputs in order, up to the first that reached a limit, or that made many bytes."""

    outputs: tuple[Output, ...]
    invalid: str = ""
    """Why the template cannot be compiled."""
    used_s: float = 0.0
    """Processor time for all."""


TemplateMessage = Rendering | Rendered | WorkerReady | WorkerEnded
