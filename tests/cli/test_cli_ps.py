"""`headrace ps`: engines that listen are listed with their figures, and nothing else is."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_core import Faults, zmq_core

import headrace
from headrace.core.engine.zmq_port import ZmqPort
from headrace.frontend.cli.main import main
from headrace.frontend.client import engine_watch
from headrace.frontend.client.engine_metrics import by_name, hit_rate, kv_use
from headrace.frontend.client.engine_watch import duration, short_name
from headrace.ipc.adapters import AdapterStats
from headrace.ipc.messages import BlockTimes, Counted, EngineStats
from headrace.ipc.transport.engine_records import OwnRecord
from headrace.ipc.transport.sockets import new_ipc_address, this_kernel


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    assert main(["ps", "--json"]) == 0
    rows: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return rows


def stats_of(**counts: Any) -> EngineStats:
    return EngineStats(
        **{**{each.name: each.type(0) for each in msgspec.structs.fields(EngineStats) if each.required}, **counts}
    )


def test_an_engine_is_listed_with_what_it_says_of_itself(
    runtime_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with zmq_core(pid=os.getpid(), model="org/name") as core:
        (row,) = listed(capsys)
        assert (row["address"], row["pid"], row["model"]) == (core.address, os.getpid(), "org/name")
        assert (row["dtype"], row["problem"]) == ("float32", None)
        assert isinstance(row["uptime_s"], float)
        stats = core.core._stats()
        figures = msgspec.structs.asdict(stats) | {"times": msgspec.structs.asdict(stats.times)}
        assert row["stats"] == json.loads(json.dumps(figures))
        assert main(["ps"]) == 0
        header, line = capsys.readouterr().out.splitlines()
        assert header.split()[:3] == ["PID", "MODEL", "DTYPE"]
        assert line.split()[:5] == [str(os.getpid()), "org/name", "float32", "0", "0"]
        assert line.endswith(core.address)


def test_what_an_engine_says_of_adapters_and_of_blocks_is_json_by_name() -> None:
    times = {each.name: Counted(counts=(1, 0), sum=0.5) for each in msgspec.structs.fields(BlockTimes)}
    stats = stats_of(adapters=AdapterStats(max_loras=2, running=("a",)), block_times=BlockTimes(**times))
    shown = json.loads(json.dumps(by_name(stats)))
    assert shown.keys() == {each.name for each in msgspec.structs.fields(EngineStats)}
    assert (shown["adapters"]["max_loras"], shown["adapters"]["running"]) == (2, ["a"])
    assert shown["block_times"]["lifetime"] == {"counts": [1, 0], "sum": 0.5}
    assert shown["times"]["num_first_tokens"] == 0


def test_records_of_engines_that_have_ended_are_not_listed_and_go_with_the_next_start(
    runtime_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # it does not listen, so it refuses
        OwnRecord(f"tcp://127.0.0.1:{bound.getsockname()[1]}", this_kernel())
        OwnRecord(f"ipc://{runtime_directory}/ended.sock", this_kernel())
        OwnRecord(f"ipc://{runtime_directory}/other-host.sock", "another kernel")
        (runtime_directory / "engine-1-00000000.json").write_text("{")
        assert listed(capsys) == []
        assert len(list(runtime_directory.iterdir())) == 4  # looking removes nothing
        new_ipc_address("engine")
        assert len(list(runtime_directory.iterdir())) == 2


def test_an_engine_is_listed_wherever_it_listens(
    runtime_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with zmq_core(model="here", address=f"ipc://{tmp_path}/e.sock"), zmq_core(address="tcp://127.0.0.1:*", model="tcp"):
        assert [row["model"] for row in listed(capsys)] == ["here", "tcp"]
    assert list(runtime_directory.iterdir()) == []


def test_an_engine_that_starts_is_listed_as_starting(
    runtime_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_watch.EngineWatch.look, "__defaults__", (0.2,))
    port = ZmqPort("")
    try:
        (row,) = listed(capsys)
        assert (row["pid"], row["problem"]) == (os.getpid(), "it is starting")
    finally:
        port.close()


def test_an_engine_whose_address_needs_keys_does_not_hide_the_others(
    runtime_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    OwnRecord("tcp://10.99.77.1:17501", this_kernel())
    with zmq_core(model="here"):
        refused, here = sorted(listed(capsys), key=lambda row: str(row["model"] or ""))
    assert (here["model"], here["problem"]) == ("here", None)
    assert refused["address"] == "tcp://10.99.77.1:17501"
    assert "need keys" in str(refused["problem"])


def test_an_engine_that_is_asked_for_and_gone_is_told_once(
    runtime_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ps", "--engine", f"ipc://{runtime_directory}/none.sock"]) == 1
    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 1, "the header"
    assert told.err.count("none.sock") == 1


def test_a_key_file_that_is_none_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["ps", "--keys", str(tmp_path / "none")]) == 1
    assert "cannot be read: no such file or directory" in capsys.readouterr().err


def test_an_engine_that_does_not_answer_is_listed_with_the_problem(
    runtime_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_watch.EngineWatch.look, "__defaults__", (0.2,))
    with zmq_core(faults=Faults(ignore_stats=True)), zmq_core(faults=Faults(schema_hash="another")):
        rows = listed(capsys)
        silent, foreign = sorted((str(row["problem"]) for row in rows), key=lambda text: "9.9.9" in text)
        assert "did not answer GetStats within 0.2 s" in silent
        assert (
            f"is headrace 9.9.9 with message schema another, and this client is headrace {headrace.__version__}"
            in foreign
        )
        assert [row["pid"] for row in rows if row["model"] is None] == [os.getpid()]  # by its record


def test_the_newest_engine_comes_last(runtime_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zmq_core(model="first"), zmq_core(model="second"):
        assert [row["model"] for row in listed(capsys)] == ["first", "second"]
        with zmq_core(model="third"):
            assert [row["model"] for row in listed(capsys)] == ["first", "second", "third"]


def test_figures_are_shares_of_what_there_is() -> None:
    assert kv_use(stats_of(num_blocks=100, num_free_blocks=75)) == 0.25
    assert kv_use(stats_of()) == 0.0
    assert hit_rate(stats_of(num_prompt_tokens=200, num_cached_prompt_tokens=50)) == 0.25
    assert hit_rate(stats_of()) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.9, "0s"), (59, "59s"), (61, "1m01s"), (3 * 3600 + 59, "3h00m"), (4 * 86400 + 3600, "4d01h")],
)
def test_durations_are_short(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_models_path_is_told_by_its_end() -> None:
    assert short_name("/data/models/a.gguf") == "a.gguf"
    assert short_name("org/name") == "org/name"
    assert short_name("x" * 50) == "..." + "x" * 37
