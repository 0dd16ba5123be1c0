"""Errors are data: a `Failure` crosses every process boundary and is the text of the exception a user sees."""

from __future__ import annotations

import os
import re
import traceback as traceback_module
from typing import Any

import msgspec


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, where and during what. Fields that do not apply stay at their defaults."""

    message: str
    """One or two sentences: what was wrong, with the values, and what would be accepted."""
    type: str = "Error"
    """The exception's class name, or a signal or exit status for a process that ended."""
    process: str = ""
    """Which program failed: engine-core, worker, client."""
    rank: int = 0
    pid: int = 0
    phase: str = ""
    """What the process was doing: start, load, step, drain, ..."""
    traceback: str = ""
    log_tail: tuple[str, ...] = ()
    """The process's last log lines, oldest first."""
    hint: str = ""
    retry_after_s: float = 0.0
    """Set if the same request may succeed after this time, for example when the queue was full."""

    @classmethod
    def of(cls, error: BaseException, *, process: str, phase: str, rank: int = 0, hint: str = "") -> Failure:
        """The failure of this process, from an exception. A Failure received from another process is kept unchanged."""
        if isinstance(error, HeadraceError) and error.failure is not None:
            return error.failure
        return cls(
            message=_sendable(str(error)) or type(error).__name__,
            type=type(error).__name__,
            process=process,
            rank=rank,
            pid=os.getpid(),
            phase=phase,
            # The message of a HeadraceError is written for the user; a traceback would only bury it.
            traceback=""
            if isinstance(error, HeadraceError)
            else _sendable("".join(traceback_module.format_exception(error)).rstrip()),
            hint=hint or getattr(error, "hint", ""),
        )

    def describe(self) -> str:
        """The whole record as text: the message, then where it happened, then traceback and log lines."""
        where = f"{self.process}{f' rank {self.rank}' if self.rank else ''}{f' (pid {self.pid})' if self.pid else ''}"
        lines = [self.message]
        if self.hint:
            lines.append(self.hint)
        if self.process:
            lines.append(f"  in {where}" + (f", during {self.phase}" if self.phase else "") + f": {self.type}")
        if self.traceback:
            lines += ["  its traceback:", *("    " + line for line in self.traceback.splitlines())]
        if self.log_tail:
            lines += ["  its last log lines:", *("    " + line for line in self.log_tail)]
        return "\n".join(lines)


class HeadraceError(Exception):
    """The base of every error that Headrace raises on purpose."""

    def __init__(self, message: str = "", *, failure: Failure | None = None, hint: str = "") -> None:
        super().__init__(message or (failure.describe() if failure else ""))
        self.failure = failure
        self.hint: str = hint or (failure.hint if failure else "")

    @classmethod
    def from_failure(cls, failure: Failure) -> HeadraceError:
        return cls(failure=failure)


class InvalidRequestError(HeadraceError, ValueError):
    """A request that can never succeed as it is: the message names the field and what would be accepted."""

    value: Any = None
    """The rejected value, if it was checked in this process; an error from the engine has it only in its text."""

    @property
    def parameter(self) -> str | None:
        """The wrong field, as the message names it; None if the message names none."""
        text = self.failure.message if self.failure is not None else str(self)
        text = text[:_LONGEST_BEGINNING]
        if (named := _PARAMS_NAME.search(text)) is not None:
            return named.group(1)
        if _PROMPT_EMBEDS.match(text):
            return "prompt_embeds"
        if _PROMPT_FIELDS.match(text):
            return "prompt"
        if text.startswith(("messages", "the chat template", "continue_final_message")):
            return "messages"
        if text.startswith("a request with the id"):
            return "request_id"
        return text.partition(" ")[0] if text.startswith(("priority", "data_parallel_rank", "request_id")) else None


class UnknownAdapterError(InvalidRequestError):
    """No adapter is registered under the name that the request gives."""


class Interrupt(SystemExit, KeyboardInterrupt):
    """What a signal's handler raises to end the process: no exit that code of others asked for."""


def let_interrupts_pass(error: BaseException) -> None:
    """For `except BaseException`, around what others wrote: a library's panic, an exit and a cancellation are no
    Exceptions, and faults of that work nevertheless. Raises the error if a user or a signal interrupts."""
    if isinstance(error, KeyboardInterrupt):
        raise error


def _sendable(text: str) -> str:
    """Escapes lone surrogates, which file names may contain and UTF-8 messages cannot."""
    return text.encode("utf-8", "backslashreplace").decode()


_PARAMS_NAME = re.compile(r"SamplingParams\.(\w+(?:\.\w+)*)")
_PROMPT_FIELDS = re.compile(r"^([Tt]he (?:decoder )?prompt|prompt_token_ids|'prompt|prompts?\b)")
_PROMPT_EMBEDS = re.compile(r"^(`?prompt_embeds\b|inputs\[\d+\], prompt_embeds:)")
_LONGEST_BEGINNING = 1000
"""How many characters of a message are searched: later text may quote a request."""


class InconsistentError(HeadraceError):
    """What the engine keeps contradicts itself, or a plan contradicts those before it: a fault of Headrace or of an
    extension. Unlike an assertion it is checked under `python -O` too."""


class OptionError(HeadraceError, ValueError):
    """An unknown option, a value out of range, or an option that cannot apply here."""


class ModelError(HeadraceError):
    """The model cannot be found, read or served: a missing, foreign or truncated file, or an unsupported kind."""


class MissingAdapterError(ModelError):
    """There is no adapter at the path, as the hosts of the engines see it."""


PEER_LOST = "PeerError"
"""A Failure's type: the process was waiting for another one, whose own failure is the cause."""
SHUT_DOWN = "ShutDown"
"""A Failure's type: the engine is shutting down, and does not finish or accept the request."""


class QueueFullError(HeadraceError):
    """The engine's queue is full; `failure.retry_after_s` says when to try again."""


class EngineStartError(HeadraceError):
    """The engine did not start; the text states the cause."""

    @classmethod
    def from_failure(cls, failure: Failure) -> EngineStartError:
        """An OptionError or ModelError also becomes a subclass of that class, so that callers can catch it as one."""
        kinds: dict[str, type[EngineStartError]] = {"OptionError": OptionStartError, "ModelError": ModelStartError}
        return kinds.get(failure.type, cls)(failure=failure)


class OptionStartError(EngineStartError, OptionError):
    """An option was refused at the engine's start, by a check that needs the model or the machine."""


class ModelStartError(EngineStartError, ModelError):
    """The engine did not start because of its model."""


class EngineDeadError(HeadraceError):
    """The engine ended or cannot be reached; requests in flight are lost with it."""


class EngineAsleepError(HeadraceError):
    """The engine sleeps, and accepts no requests until wake_up."""


class RequestFailedError(HeadraceError):
    """The engine failed this one request while it was running."""
