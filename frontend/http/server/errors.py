"""Errors of requests, as an HTTP status and JSON in OpenAI's format."""

from __future__ import annotations

import logging
import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import msgspec

from headrace.frontend.http.server.shared_database import StoreError
from headrace.ipc.failure import (
    EngineAsleepError,
    EngineDeadError,
    HeadraceError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    UnknownAdapterError,
)

logger = logging.getLogger(__name__)
LONGEST_MESSAGE = 800
"""Most characters of an error message, since text that it quotes from a request may have any length."""
LONGEST_PARAM = 200
RETRY_AFTER_S = 5.0
"""Retry-After of a server whose engine is down: about the time that a restart takes."""


class ErrorBody(msgspec.Struct, kw_only=True):
    message: str
    """What was wrong, and what is accepted instead."""
    type: str
    param: str | None = None
    """The field with the error."""
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    error: ErrorBody


class ApiError(Exception):
    """An error response; raising it ends the request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = 0.0,
        allow: Sequence[str] = (),
    ) -> None:
        """allow: with 405, the methods that the route takes."""
        message = shortened(message, LONGEST_MESSAGE)
        super().__init__(message)
        self.status, self.retry_after_s, self.allow = status, retry_after_s, allow
        param = None if param is None else shortened(param, LONGEST_PARAM)
        self.body = ErrorBody(message=message, type=type, param=param, code=code)

    def json(self) -> bytes:
        return msgspec.json.encode(ErrorResponse(self.body))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers besides the content type: WWW-Authenticate, Allow or Retry-After."""
        if self.allow:
            return [(b"allow", ", ".join(self.allow).encode())]
        if self.status == HTTPStatus.UNAUTHORIZED:
            return [(b"www-authenticate", b"Bearer")]
        if self.retry_after_s > 0:
            return [(b"retry-after", b"%d" % math.ceil(self.retry_after_s))]
        return []

    @classmethod
    def of(cls, error: BaseException) -> ApiError:
        """The response for any exception. Of one that is not Headrace's own, only the type is revealed."""
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
        if isinstance(error, HeadraceError):
            return _failed(error)
        if isinstance(error, MemoryError):
            return unavailable("this server has no memory for the request just now", code="out_of_memory")
        return cls(500, f"the server failed: {type(error).__name__}", type="server_error", code="internal_error")


class UnknownModelError(ApiError):
    """The model is not served; it may be an adapter that is found (frontend/http/server/adapters.py)."""

    def __init__(self, model: str, message: str) -> None:
        super().__init__(404, message, param="model", code="model_not_found")
        self.model = model


class ContextLengthError(ApiError):
    """A prompt that does not fit the model's context, by itself or with the tokens to generate.

    The message is in OpenAI's wording, which clients look for; other APIs have their own, made of the numbers."""

    def __init__(
        self, what: str, *, param: str, num_prompt: int, limit: int, num_new: int = 0, remedy: str = ""
    ) -> None:
        """what: is too long. num_prompt: at least so many tokens. num_new: as requested; 0 if the prompt alone is too
        long. remedy: besides a shorter prompt."""
        message = (
            f"This model's maximum context length is {limit} tokens. However, {what}. Please reduce the length of the "
            f"{param}{' or completion' if num_new else ''}{remedy}."
        )
        super().__init__(HTTPStatus.BAD_REQUEST, message, param=param, code="context_length_exceeded")
        self.num_prompt, self.limit, self.num_new = num_prompt, limit, num_new


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """For an API served by another API's code: renames the fields in errors that are raised inside. `names` maps that
    API's field names to those of the request body."""
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


SPELLINGS: Mapping[str, str] = types.MappingProxyType({"extra_args": "vllm_xargs"})
"""Fields of SamplingParams that have another name in all bodies."""


def respelt(error: InvalidRequestError, spellings: Mapping[str, str]) -> InvalidRequestError:
    """The same error, with fields under the names that the body has for them."""
    said = str(error) if error.failure is None else error.failure.message
    for name, written in spellings.items():
        end = r"(?![.\w])" if "." in written else r"\b"
        said = re.sub(rf"\bSamplingParams\.{name}{end}", f"SamplingParams.{written}", said)
    if error.failure is not None:
        return InvalidRequestError(failure=msgspec.structs.replace(error.failure, message=said))
    found = InvalidRequestError(said)
    found.value = error.value
    return found


def as_api_error(error: InvalidRequestError, index: int, count: int) -> ApiError:
    """The error as an ApiError, with the prompt's index if there are several."""
    answer = ApiError.of(error)
    if count > 1 and answer.body.param == "prompt":
        answer.body.message = f"prompt[{index}]: {answer.body.message}"
    return answer


def _with_own_names(message: str, names: Mapping[str, str]) -> str:
    """Renames fields in a message, but only names with an underscore: others may be ordinary words."""
    for name, own_name in names.items():
        if "_" in name:
            message = re.sub(rf"\b{name}\b", own_name, message)
    return message


def shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def bad_field(param: str, message: str, code: str | None = "invalid_value") -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def text_in(item: Mapping[str, Any], name: str, where: str) -> str:
    """A text that an object of the request, which stands at `where`, must have. Raises ApiError."""
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_field(f"{where}.{name}", f"{where}.{name} must be a text")
    return value


def unavailable(message: str, *, code: str) -> ApiError:
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE, message, type="server_error", code=code, retry_after_s=RETRY_AFTER_S
    )


def _bad_request(error: InvalidRequestError) -> ApiError:
    text = shortened(_first_line(error), LONGEST_MESSAGE)
    if error.failure is not None and error.failure.type == UnknownAdapterError.__name__:
        return ApiError(HTTPStatus.NOT_FOUND, text, param="model", code="model_not_found")
    param = error.parameter
    if param is not None:
        text = text.replace("SamplingParams.", "")
    return ApiError(HTTPStatus.BAD_REQUEST, text, param=param, code="invalid_value")


def _failed(error: HeadraceError) -> ApiError:
    """Of a server's failure, whose cause may name what is the server's own."""
    cause = _first_line(error)
    message = without_own_names(cause)
    if message != cause:
        logger.info("answered with %r: %s", message, cause)
    if isinstance(error, EngineDeadError):
        return unavailable(message, code="engine_dead")
    if isinstance(error, EngineAsleepError):
        return unavailable(message, code="asleep")
    if isinstance(error, StoreError):
        return unavailable(message, code="store_unavailable")
    code = "request_failed" if isinstance(error, RequestFailedError) else None
    return ApiError(500, message, type="server_error", code=code)


_OWN_NAMES = re.compile(
    r"""
    \b[a-z][a-z0-9+.-]*://[^\s,;'"()]*[^\s,;:.'"()]             # ipc:///run/user/0/x.sock, tcp://gpu-7:5400
    | (?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?(?![\w.]*\w)   # 10.0.0.7:5400
    | \[[0-9a-f]*:[0-9a-f:.%]+\](?::\d+)?                      # [fe80::1]:5400
    | \b(?:localhost|[a-z0-9-]+(?:\.[a-z0-9-]+)+):\d{1,5}\b     # gpu-7.lan:5400
    | (?<![\w./~-])~?(?:/[\w.@+=,-]*[\w@+=-]){2,}/?                   # /models/x/model.safetensors
    """,
    re.IGNORECASE | re.VERBOSE,
)


def without_own_names(message: str) -> str:
    """A failure's cause without addresses and paths of the server, which are nobody's business but its operator's."""
    return _OWN_NAMES.sub("[...]", message)


def _first_line(error: HeadraceError) -> str:
    """The error's sentence for the user; tracebacks and log lines belong in the server's log."""
    if error.failure is not None:
        return error.failure.message
    return str(error).split("\n", 1)[0] or type(error).__name__


def error_event(error: BaseException) -> dict[str, Any]:
    """The content of an error event, for a stream that has begun."""
    answer = ApiError.of(error)
    return {"error": msgspec.to_builtins(answer.body)}
