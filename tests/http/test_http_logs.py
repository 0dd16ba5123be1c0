"""What a server logs for operators: its engines' cache and load, requests, at the level that was asked for."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from http_server import ask, engine_of, serving

from headrace.frontend.client.stats_log import StatsLog
from headrace.frontend.http.options import ServeOptions, check_serve_options, with_environment
from headrace.frontend.http.process.launch import ready_text, say_ready
from headrace.frontend.http.process.server import listen
from headrace.ipc.failure import OptionError
from headrace.ipc.messages import EngineStats
from headrace.ipc.process.log import set_up_logging

COUNTERS = (
    "num_running",
    "num_waiting",
    "num_clients",
    "num_blocks",
    "num_free_blocks",
    "num_cached_blocks",
    "steps",
    "num_finished",
    "num_preemptions",
    "num_prompt_tokens",
    "num_cached_prompt_tokens",
    "num_generated_tokens",
)


TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"


def stats(**values: int) -> EngineStats:
    return EngineStats(**{**dict.fromkeys(COUNTERS, 0), "num_blocks": 100, "num_free_blocks": 100, **values})


def test_a_line_has_the_rates_since_the_line_before() -> None:
    log = StatsLog(2)
    log.line(stats(steps=1, num_prompt_tokens=100, num_generated_tokens=50), 10.0)
    busy = stats(
        steps=9,
        num_prompt_tokens=140,
        num_cached_prompt_tokens=35,
        num_generated_tokens=75,
        num_running=3,
        num_waiting=1,
        num_free_blocks=60,
    )
    assert log.line(busy, 20.0) == (
        "Engine 002: Avg prompt throughput: 4.0 tokens/s, Avg generation throughput: 2.5 tokens/s, Running: 3 reqs, "
        "Waiting: 1 reqs, KV cache usage: 40.0%, Prefix cache hit rate: 25.0%"
    )
    assert not log.is_idle
    log.line(stats(steps=9), 30.0)
    assert not log.is_idle  # the first line of a rest shows that the rates are 0 now
    log.line(stats(steps=9), 40.0)
    assert log.is_idle
    assert "prompt throughput: 0.0" in log.line(stats(steps=2, num_prompt_tokens=7), 50.0)  # of another engine


def test_the_server_tells_cache_load_and_requests() -> None:
    with serving("--log-stats-interval", "0.2", "--enable-log-requests", "--log-level", "debug") as server:
        server.wait_log(r"Engine 000: KV cache size: [\d,]+ tokens, Maximum concurrency for [\d,]+ tokens per request")
        with server.client() as client:
            ask(client, "/v1/completions", prompt="hi", max_tokens=20)
        server.wait_log(r"Avg generation throughput: [1-9][\d.]* tokens/s, Running: \d+ reqs, Waiting: 0 reqs")
        server.wait_log(r"POST /v1/completions: done in")
        assert re.search(rf"DEBUG {TIME} server: ", server.log)
        assert "to read; from this machine alone, unless --host 0.0.0.0" in server.log


def test_every_line_has_one_form_with_the_date_also_of_a_death_and_a_return() -> None:
    with serving("--enable-log-requests", "--restart-engine", "2", "--log-stats-interval", "0.2") as server:
        engine_of(server).kill()
        server.wait_log("the engine has ended: (.|\n)*starting the engine again(.|\n)*is connected again")
        with server.client() as client:
            client.get("/health")
            client.get("/metrics")
            client.get("/v1/models")
            ask(client, "/v1/completions", prompt=[5, 6, 7], max_tokens=4, ignore_eos=True, request_id="named")
        server.wait_log("POST /v1/completions: done in")
    lines = [line for line in server.log.splitlines() if not line.startswith("    ")]
    assert len(lines) > 10
    assert [line for line in lines if not re.match(rf"(INFO|WARNING|ERROR) {TIME} [\w -]+: ", line)] == []
    assert re.search(rf"ERROR {TIME} server: the engine has ended: ", server.log)
    assert "GET /health" not in server.log
    assert "GET /metrics" not in server.log
    assert "GET /v1/models: done" in server.log
    line = re.search(r"POST /v1/completions: done in [\d.]+ s, (.*)", server.log)
    assert line is not None
    told = dict(each.split("=") for each in line[1].split())
    assert told.pop("client").startswith("127.0.0.1:")
    assert told == {"id": "named", "model": "null", "prompt_tokens": "3", "output_tokens": "4"}


def test_the_log_is_json_on_request() -> None:
    with serving("--enable-log-requests", "--log-format", "json", "--log-level", "debug") as server:
        with server.client() as client:
            client.get("/health")
            ask(client, "/v1/responses", input="hi", max_output_tokens=4, ignore_eos=True)
        server.wait_log("POST /v1/responses: done in")
        server.signal()
        assert server.wait_exit() == 0
    records = [json.loads(line) for line in server.log.splitlines()]
    assert all(each.keys() >= {"time", "level", "process", "message"} for each in records)
    assert {each["process"] for each in records} >= {"server", "engine-core"}
    (asked,) = [each for each in records if each.get("path") == "/v1/responses"]
    assert (asked["method"], asked["status"], asked["model"], asked["output_tokens"]) == ("POST", 200, "null", 4)
    assert asked["duration_s"] > 0
    assert asked["level"] == "info"
    assert [each["level"] for each in records if each.get("path") == "/health"] == ["debug"]


def test_host_and_levels_come_from_the_environment_unless_options_say_else() -> None:
    given = {"HEADRACE_HOST": "127.0.0.2", "HEADRACE_LOG_LEVEL": "DEBUG", "HEADRACE_LOG_STATS_INTERVAL": "3"}
    options = with_environment(ServeOptions(port=0), given)
    assert (options.host, options.log_level, options.log_stats_interval) == ("127.0.0.2", "debug", 3.0)
    with listen(options) as sock:
        assert sock.getsockname()[0] == "127.0.0.2"
    assert with_environment(ServeOptions(host="127.0.0.3"), given).host == "127.0.0.3"
    with pytest.raises(OptionError, match="HEADRACE_LOG_STATS_INTERVAL=often"):
        with_environment(ServeOptions(), {"HEADRACE_LOG_STATS_INTERVAL": "often"})
    with listen(ServeOptions(port=0)) as sock:
        assert (sock.family, sock.getsockname()[0]) == (socket.AF_INET, "127.0.0.1")


def test_the_start_up_line_says_that_nobody_else_is_heard_where_that_is_so() -> None:
    hint = "; from this machine alone, unless --host 0.0.0.0 opens it to others"
    for options in (ServeOptions(), ServeOptions(host="127.0.0.1")):
        assert ready_text("http://127.0.0.1:8000", options) == (
            "ready: http://127.0.0.1:8000/v1 for clients, http://127.0.0.1:8000 in a browser, "
            f"http://127.0.0.1:8000/docs to read{hint}"
        )
    for options in (ServeOptions(host="0.0.0.0"), ServeOptions(uds="http.sock")):
        assert ready_text("http://127.0.0.1:8000", options).endswith("/docs to read")


@pytest.mark.parametrize("is_found", [True, False])
def test_the_page_is_shown_once_the_server_is_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_found: bool
) -> None:
    shown: list[str] = []
    ended: list[str] = []

    def open_page(url: str) -> bool:
        shown.append(url)
        return is_found

    monkeypatch.setattr("webbrowser.open", open_page)
    phases = SimpleNamespace(finish=ended.append)
    for options in (ServeOptions(), ServeOptions(open=True)):
        say_ready(phases, "http://127.0.0.1:8000", options)  # type: ignore[arg-type]
        for thread in [each for each in threading.enumerate() if each.name == "browser"]:
            thread.join()
    assert shown == ["http://127.0.0.1:8000"]
    assert len(ended) == 2
    assert ("open http://127.0.0.1:8000 in one" in caplog.text) is not is_found
    for without in ({"ui": False}, {"uds": "http.sock"}):
        with pytest.raises(OptionError, match="open shows the page"):
            check_serve_options(ServeOptions(open=True, **without))


def test_a_level_that_is_none_is_told_and_the_default_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "chatty")
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    records: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("headrace.ipc.process.log"), "warning", lambda text, *args: records.append(text % args)
    )
    root.handlers[:] = []
    try:
        set_up_logging("test", "WARNING")
        assert root.level == logging.WARNING
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert records == ["HEADRACE_LOG_LEVEL=CHATTY is unknown; allowed: debug, info, warning, error, critical"]


def test_a_file_configures_the_log_in_the_place_of_the_options(tmp_path: Path) -> None:
    of_log = "headrace.ipc.process.log"
    config = {
        "formatters": {
            "lines": {"()": f"{of_log}.TextFormatter", "process": "mine"},
            "objects": {"()": f"{of_log}.JsonFormatter", "process": "mine"},
        },
        "handlers": {
            "shown": {"class": "logging.StreamHandler", "formatter": "lines", "stream": "ext://sys.stderr"},
            "kept": {"class": "logging.FileHandler", "formatter": "objects", "filename": str(tmp_path / "log")},
        },
        "root": {"level": "INFO", "handlers": ["shown", "kept"]},
    }
    file = tmp_path / "log.json"
    file.write_text(json.dumps(config))
    with serving("--log-config-file", str(file)) as server:
        assert " mine: ready: " in server.log
    told = [json.loads(line)["message"] for line in (tmp_path / "log").read_text().splitlines()]
    assert any(message.startswith("ready: ") for message in told)


@pytest.mark.parametrize("content", ["{", "[]", '{"root": {"handlers": ["none"]}}', '{"version": 7}', None])
def test_a_log_configuration_that_cannot_be_used_is_told(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "log.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("HEADRACE_LOG_CONFIG", str(file))
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        with pytest.raises(OptionError, match=r"log_config_file=.*dictConfig takes it"):
            set_up_logging("test", "INFO")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
