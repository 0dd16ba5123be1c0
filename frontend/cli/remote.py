"""A client of a running server for `chat` and `complete`: the part of `LLM` that they use, over HTTP.

The server renders and tokenises prompts (POST /tokenize), so no model files are needed here. vLLM's servers work too.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.parse
from collections.abc import Generator, Sequence
from typing import Any

import msgspec

from headrace.core.options.option import secret_bytes, secret_text
from headrace.frontend.cli.conversation import SETTABLE
from headrace.frontend.request.parameters.sampling_params import SamplingParams
from headrace.ipc.failure import EngineDeadError, HeadraceError, InvalidRequestError, OptionError
from headrace.ipc.struct_types import threadsafe

TIMEOUT_S = 600.0
"""Longest silence of a server; Headrace's sends comments while there is no output."""


class Piece(msgspec.Struct):
    text: str
    finish_reason: str | None


class PieceOutput(msgspec.Struct):
    """The part of a RequestOutput (DELTA) that the commands use."""

    outputs: list[Piece]


class ModelInfo(msgspec.Struct):
    """An entry of GET /v1/models."""

    id: str
    max_model_len: int
    default_sampling_params: dict[str, Any] = {}

    @property
    def model(self) -> str:
        return self.id


class RemoteStream:
    """A streamed answer. Leaving its `with` block closes the connection, which aborts the request."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection, self._response = connection, response

    def __enter__(self) -> RemoteStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def __iter__(self) -> Generator[PieceOutput, None, None]:
        try:
            for line in self._response:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = msgspec.json.decode(line[len(b"data: ") :])
                if "error" in event:
                    raise _error_of(event, 500)
                for choice in event["choices"]:
                    yield PieceOutput([Piece(choice["text"], choice["finish_reason"])])
        except (OSError, http.client.HTTPException) as error:
            raise EngineDeadError(f"the connection to the server was lost: {error}") from None
        finally:
            self._connection.close()


class RemoteLLM:
    """The first model of a server."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raises OptionError for an invalid URL, and HeadraceError if no server answers there or it refuses the key."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OptionError(f"--url={url}: it must look like http://127.0.0.1:8000")
        self._parts, self._root = parts, parts.path.rstrip("/").removesuffix("/v1")
        key = secret_text(api_key or os.environ.get("HEADRACE_API_KEY") or "")
        self._headers: dict[str, str | bytes] = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = b"Bearer " + secret_bytes(key)
        models = self._ask("GET", "/v1/models")["data"]
        try:
            self.engine = msgspec.convert(models[0], threadsafe(ModelInfo))
        except (IndexError, msgspec.ValidationError) as error:
            raise HeadraceError(f"the server at {url} does not say which model it serves: {error}") from None

    def __enter__(self) -> RemoteLLM:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing: no connection stays open between requests."""

    def get_tokenizer(self) -> RemoteLLM:
        return self

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.engine.default_sampling_params)

    def get_chat_template(self, chat_template: str | None, tools: Any) -> None:
        """Does nothing: the server has the template, or refuses the first message."""

    def apply_chat_template(self, conversation: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> list[int]:
        """The conversation's token ids, rendered by the server. Raises HeadraceError with the server's reason."""
        body = {"messages": conversation, "add_generation_prompt": add_generation_prompt}
        return list(self._ask("POST", "/tokenize", body)["tokens"])

    def stream(self, prompt: str | dict[str, Any], params: SamplingParams) -> RemoteStream:
        """Streams the completion of one prompt. Raises HeadraceError with the server's reason to refuse it."""
        token_ids = (
            self._ask("POST", "/tokenize", {"prompt": prompt})["tokens"]
            if isinstance(prompt, str)
            else prompt["prompt_token_ids"]
        )
        if not token_ids:
            raise InvalidRequestError("the prompt is empty; at least one token is needed")
        neutral, told = SamplingParams(), self.engine.default_sampling_params
        body = {name: getattr(params, name) for name in SETTABLE}
        # The server applies its own defaults to fields that are not sent. Fields whose default it reports are always
        # sent, so that a user can set them back to neutral; others only if they differ from neutral.
        body = {name: value for name, value in body.items() if name in told or value != getattr(neutral, name)}
        body |= {"prompt": token_ids, "stream": True, "model": self.engine.id}
        body["max_tokens"] = params.max_tokens or max(1, self.engine.max_model_len - len(token_ids))
        return RemoteStream(*self._request("POST", "/v1/completions", body))

    def post(self, path: str, body: Any) -> Any:
        """Sends a JSON body, and returns the answer's. Raises HeadraceError with the server's reason to refuse it."""
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        connection, response = self._request(method, path, body)
        try:
            return msgspec.json.decode(response.read())
        except msgspec.DecodeError:
            raise HeadraceError(
                f"{self._where}{path} answers what is no JSON: is it a server of OpenAI's API?"
            ) from None
        finally:
            connection.close()

    @property
    def _where(self) -> str:
        return f"{self._parts.scheme}://{self._parts.netloc}{self._root}"

    def _request(
        self, method: str, path: str, body: Any = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=TIMEOUT_S)
        try:
            connection.request(
                method, self._root + path, None if body is None else json.dumps(body).encode(), self._headers
            )
            response = connection.getresponse()
            if response.status != 200:
                raise _error_of(_json_of(response.read()), response.status)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise EngineDeadError(f"no server answers at {self._where}: {error}") from None
        except BaseException:
            connection.close()
            raise
        return connection, response


def _json_of(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return {}


def _error_of(answer: Any, status: int) -> HeadraceError:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return HeadraceError(str(message or f"the server answers with status {status}"))
