"""What goes wrong with a request, as a status and as JSON in OpenAI's shape."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import msgspec

from headrace.ipc.failure import (
    EngineAsleepError,
    EngineDeadError,
    HeadraceError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
)

LONGEST_MESSAGE = 800
"""Characters of an error's message; what it quotes of a request may be of any length."""
LONGEST_PARAM = 200
RETRY_AFTER_S = 5.0
"""When to come back to a server whose engine is not there: about what a restart takes."""


class ErrorBody(msgspec.Struct, kw_only=True):
    message: str
    """What was wrong, and what would be right."""
    type: str
    param: str | None = None
    """The field that was wrong."""
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    error: ErrorBody


class ApiError(Exception):
    """Ends a request with this answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        message = shortened(message, LONGEST_MESSAGE)
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s
        param = None if param is None else shortened(param, LONGEST_PARAM)
        self.body = ErrorBody(message=message, type=type, param=param, code=code)

    def json(self) -> bytes:
        return msgspec.json.encode(ErrorResponse(self.body))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the answer carries besides its content type."""
        if self.status == HTTPStatus.UNAUTHORIZED:
            return [(b"www-authenticate", b"Bearer")]
        if self.retry_after_s > 0:
            return [(b"retry-after", b"%d" % math.ceil(self.retry_after_s))]
        return []

    @classmethod
    def of(cls, error: BaseException) -> ApiError:
        """Any exception as an answer. What is not ours gives nothing away but its type."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, QueueFullError):
            retry_after_s = error.failure.retry_after_s if error.failure is not None else RETRY_AFTER_S
            return cls(
                HTTPStatus.TOO_MANY_REQUESTS,
                _first_line(error),
                type="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after_s=retry_after_s,
            )
        if isinstance(error, InvalidRequestError):
            return _bad_request(error)
        if isinstance(error, EngineDeadError):
            return unavailable(_first_line(error), code="engine_dead")
        if isinstance(error, EngineAsleepError):
            return unavailable(_first_line(error), code="asleep")
        if isinstance(error, RequestFailedError):
            return cls(500, _first_line(error), type="server_error", code="request_failed")
        if isinstance(error, HeadraceError):
            return cls(500, _first_line(error), type="server_error")
        if isinstance(error, MemoryError):
            return unavailable("this server has no memory for the request just now", code="out_of_memory")
        return cls(500, f"the server failed: {type(error).__name__}", type="server_error", code="internal_error")


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """For an API that another's code answers: what is wrong with a field is said under the name that the body has for
    it."""
    try:
        yield
    except (ApiError, InvalidRequestError) as error:
        answer = ApiError.of(error)
        said = answer.body
        name = re.split(r"[.\[]", said.param or "", maxsplit=1)[0]
        own_name = names.get(name, name)
        if own_name == name and _with_own_names(said.message, names) == said.message:
            raise
        answer.body = msgspec.structs.replace(
            said,
            param=own_name + (said.param or "").removeprefix(name),
            message=re.sub(rf"^{name}\b", own_name, _with_own_names(said.message, names)),
        )
        raise answer from error


def _with_own_names(message: str, names: Mapping[str, str]) -> str:
    """What has an underscore is a field's name wherever it stands; another may be a word."""
    for name, own_name in names.items():
        if "_" in name:
            message = re.sub(rf"\b{name}\b", own_name, message)
    return message


def shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def bad_field(param: str, message: str, code: str | None = "invalid_value") -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def unavailable(message: str, *, code: str, retry_after_s: float = RETRY_AFTER_S) -> ApiError:
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE, message, type="server_error", code=code, retry_after_s=retry_after_s
    )


def _bad_request(error: InvalidRequestError) -> ApiError:
    text = shortened(_first_line(error), LONGEST_MESSAGE)
    param = error.parameter
    if param is not None:
        text = text.replace("SamplingParams.", "")
    if error.passed_bound is not None:
        text += f" ({error.passed_bound})"  # what clients of vLLM's look for
    return ApiError(HTTPStatus.BAD_REQUEST, text, param=param, code="invalid_value")


def _first_line(error: HeadraceError) -> str:
    """The sentence for the user. Tracebacks and log lines are for the server's log."""
    if error.failure is not None:
        return error.failure.message
    return str(error).split("\n", 1)[0] or type(error).__name__


def error_event(error: BaseException) -> dict[str, Any]:
    """The same as the content of an event, for a stream that has begun."""
    answer = ApiError.of(error)
    return {"error": msgspec.to_builtins(answer.body)}
