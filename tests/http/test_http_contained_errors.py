"""An error of the server's own, at the end of a request, ends that HTTP request: its client does not wait for ever."""

from __future__ import annotations

import pytest
from server_here import serving_here

from headrace.frontend.client.request_metrics import RequestMeter
from headrace.frontend.http.server.decoding.decoder import RequestDecoder
from headrace.frontend.http.server.generation import PreparedRequest


def fail(*arguments: object) -> None:
    raise ZeroDivisionError("in the server")


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_request_that_cannot_be_counted_is_answered(
    streams: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving_here() as server, server.client() as client:
        body = {"model": "null", "prompt": [5, 6], "max_tokens": 4, "stream": streams}
        monkeypatch.setattr(RequestMeter, "on_done", fail)
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert answer.text.count('"finish_reason":"length"') == 1
        assert "ZeroDivisionError: in the server" in caplog.text


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_an_error_at_a_requests_end_ends_the_http_request(streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_here(null_model={"fail_token_id": 13}) as server, server.client() as client:
        body = {"model": "null", "prompt": [5, 13], "max_tokens": 4, "stream": streams}
        with monkeypatch.context() as patched:
            patched.setattr(PreparedRequest, "_named", fail)
            answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 500 or (streams and answer.status_code == 200)
        assert "ZeroDivisionError: in the server" in answer.text
        good = {**body, "prompt": [5, 6], "stream": False}
        assert client.post("/v1/completions", json=good).status_code == 200


class PanicException(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize("error", [PanicException("at line 1"), SystemExit(3)], ids=["a panic", "an exit"])
def test_what_is_no_exception_ends_its_request_alone(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **others: object) -> None:
        raise error

    with serving_here() as server, server.client() as client:
        body = {"model": "null", "prompt": [5, 6], "max_tokens": 4}
        with monkeypatch.context() as patched:
            patched.setattr(RequestDecoder, "decode", fail)
            answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 500
        assert type(error).__name__ in answer.json()["error"]["message"]
        assert client.post("/v1/completions", json=body).status_code == 200
