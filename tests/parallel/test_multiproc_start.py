"""How workers start: in turns where that was asked for, within a time, and with an account of where it went."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_server import serving
from multiproc_parts import HERE, Ranks, bring_up, options
from patience import wait_until
from test_multinode import cluster
from thinned import every

from headrace import LLM
from headrace.core.engine.engine import EngineThread
from headrace.core.options.engine_options import Options
from headrace.core.process.child import start_engine
from headrace.core.process.child_output import REST, startup_table
from headrace.executor.placement.load_turn import turn_to_load
from headrace.executor.placement.worker_messages import WAIT_FOR_TURN
from headrace.ipc.failure import EngineStartError, OptionError

PATIENCE_S = (2.0, 6.0, 20.0, 60.0)
"""Limits of starts that hang, in turn: on a busy machine one may not have come to where it hangs within the first."""


@pytest.fixture(autouse=True)
def workers_find_the_null_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", HERE)


def in_turns(most: int | None, log: Path, tp_size: int = 3, together: int = 0) -> Options:
    asked = options(tp_size, load_delay_s=0.25, load_log=str(log), load_together=together)
    return msgspec.structs.replace(asked, max_parallel_loading_workers=most)


def most_at_once(log: Path, num_ranks: int) -> int:
    signs = log.read_text()
    assert signs.count("+") == signs.count("-") == num_ranks
    return max(signs[:end].count("+") - signs[:end].count("-") for end in range(len(signs) + 1))


@pytest.mark.parametrize(("most", "expected"), every(3, [(2, 2), (1, 1), (None, 3)]))
def test_no_more_workers_than_asked_for_load_at_once(most: int | None, expected: int, tmp_path: Path) -> None:
    asked, others_wait = in_turns(most, tmp_path / "log", together=expected), tmp_path / "others wait"
    asked = msgspec.structs.replace(asked, hf_overrides={**asked.hf_overrides, "load_until": str(others_wait)})

    def let_them_load() -> None:
        children = ranks.executor._group.children
        wait_until(lambda: sum(child.phase == WAIT_FOR_TURN for child in children) == 3 - expected, 30, "all others")
        others_wait.touch()

    with Ranks(asked) as ranks, ThreadPoolExecutor(1) as pool:
        watching = pool.submit(let_them_load)
        ranks.bring_up()
        watching.result()
        waited = [WAIT_FOR_TURN in rank for rank in ranks.executor.ranks_startup_s]
    assert most_at_once(tmp_path / "log", 3) == expected
    assert sum(waited) == 3 - expected


@pytest.mark.system
def test_agents_of_one_host_share_its_turns(tmp_path: Path) -> None:
    with cluster(in_turns(1, tmp_path / "log", tp_size=2)) as running:
        bring_up(running.executor, running.options)
        assert len(running.executor.ranks_startup_s) == 2
    assert most_at_once(tmp_path / "log", 2) == 1


def test_a_turn_ends_with_the_process_that_has_it() -> None:
    code = (
        "import sys, time\nfrom headrace.executor.placement.load_turn import turn_to_load\n"
        "with turn_to_load(sys.argv[1], 1, print):\n    print('loads', flush=True)\n    time.sleep(60)\n"
    )
    name = f"test-{os.getpid()}"
    other = subprocess.Popen([sys.executable, "-c", code, name], stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"loads\n"
    waits = threading.Thread(target=other.kill)
    with turn_to_load(name, 1, waits.start):
        assert waits.ident is not None, "it had to wait"
    waits.join()
    other.wait()
    other.stdout.close()


@pytest.mark.system
def test_who_waits_for_a_turn_is_not_blamed_for_a_start_that_takes_too_long(tmp_path: Path) -> None:
    asked = in_turns(1, tmp_path / "log", tp_size=2)
    misled = {**asked.hf_overrides, "load_delay_s": 100.0}
    for limit_s in PATIENCE_S:
        hanging_rank = msgspec.structs.replace(asked, hf_overrides=misled, startup_timeout=limit_s)
        with Ranks(hanging_rank) as ranks, pytest.raises(EngineStartError) as caught:
            ranks.bring_up()
        failure = caught.value.failure
        assert failure is not None
        if failure.phase == "load weights":
            break
    assert failure.message.count("worker") == 1
    assert failure.message.endswith(f"did not become ready within {limit_s:g} s (startup_timeout)")
    assert (failure.type, failure.phase) == ("Timeout", "load weights")
    assert "in load" in "\n".join(failure.log_tail)
    assert ranks.failures == [failure]


# --- where the time went --------------------------------------------------------------------------------------------


def columns_of(table: str) -> dict[str, list[str]]:
    head, *rows = table.splitlines()
    assert head.split()[0] == "seconds"
    return {row[:24].rstrip(): [row[at : at + 9].strip() for at in range(24, len(head), 9)] for row in rows}


def test_each_column_of_the_table_sums_to_the_whole_start() -> None:
    core = {"import": 0.5, "load weights": 2.0, "tokenizer": 0.25}
    ranks = [{"start": 0.25, "load weights": 1.5}, {"start": 0.5, "wait": 0.25, "load weights": 1.0}]
    assert columns_of(startup_table(core, ranks)) == {
        "start": ["", "0.25", "0.50"],
        "import": ["0.50", "", ""],
        "wait": ["", "", "0.25"],
        "load weights": ["2.00", "1.50", "1.00"],
        "tokenizer": ["0.25", "", ""],
        REST: ["", "1.00", "1.00"],
        "sum": ["2.75", "2.75", "2.75"],
    }


def test_of_many_ranks_the_table_has_the_least_and_the_most() -> None:
    table = columns_of(startup_table({"load weights": 9.0}, [{"load weights": float(n)} for n in range(1, 10)]))
    assert table == {"load weights": ["9.00", "1.00", "9.00"]}


@pytest.mark.system
def test_workers_account_for_their_whole_start() -> None:
    with Ranks(options(load_delay_s=0.2)) as ranks:
        ranks.bring_up()
        for rank in ranks.executor.ranks_startup_s:
            assert list(rank) == ["start", "import", "read config", "wait for the core", *list(rank)[4:]]
            assert rank["load weights"] >= 0.2
            assert rank["start"] > 0.0


@pytest.mark.parametrize("processes", [pytest.param("1", marks=pytest.mark.system), "2"])
def test_a_server_shows_the_table_of_its_engines_start(processes: str) -> None:
    flags = ["--model=null", "--worker-cls=null_rank:NullRank", "--tensor-parallel-size=2", "--skip-tokenizer-init"]
    with serving(*flags, "--api-server-count", processes, attached=True) as server:
        lines = [line.removeprefix("    ") for line in server.log.splitlines()]  # the further lines of a log entry
        at = next(number for number, line in enumerate(lines) if line.startswith("seconds"))
        assert lines[at].split() == ["seconds", "core", "rank", "0", "rank", "1"]
        end = next(number for number in range(at, len(lines)) if lines[number].startswith("sum"))
        table = columns_of("\n".join(lines[at : end + 1]))
        assert table["sum"][0] == table["sum"][1] == table["sum"][2]
        assert all(table["load weights"])


def test_a_running_engine_tells_how_its_start_went() -> None:
    asked = {"tensor_parallel_size": 2, "worker_cls": "null_rank:NullRank", "skip_tokenizer_init": True}
    with LLM("null", **asked) as llm:
        facts = llm.describe_engine().facts
    assert "load weights" in facts["startup_s"]
    assert [next(iter(rank)) for rank in facts["ranks_startup_s"]] == ["start", "start"]


# --- a core that hangs itself ---------------------------------------------------------------------------------------


def hanging(**changes: Any) -> Options:
    """An engine of one process, whose model takes longer than it may."""
    backend = "headrace.executor.testing.null:NullExecutor"
    asked = {"load_delay_s": 100.0}
    return Options(model="null", distributed_executor_backend=backend, hf_overrides=asked, **changes)


def test_a_core_that_hangs_while_it_starts_is_ended_and_its_stacks_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.core.process.child.START_GRACE_S", 0.5)
    for limit_s in PATIENCE_S:
        child = start_engine(hanging(startup_timeout=limit_s))
        with pytest.raises(
            EngineStartError, match=rf"engine-core \(pid \d+\) was not ready within {limit_s:g} s"
        ) as caught:
            child.wait_ready()
        failure = caught.value.failure
        assert failure is not None
        if failure.phase == "load weights":
            break
    assert (failure.type, failure.phase) == ("Timeout", "load weights")
    assert "null.py" in "\n".join(failure.log_tail)
    assert not child.alive


def test_a_start_on_the_callers_own_thread_has_no_deadline() -> None:
    with pytest.raises(OptionError, match="startup_timeout=5 cannot apply: the model is loaded on the caller's own"):
        EngineThread(Options(startup_timeout=5.0))


@pytest.mark.system
def test_a_daemon_that_hangs_while_it_starts_says_where_and_ends(runtime_directory: Path) -> None:
    asked = hanging()
    command = [sys.executable, "-m", "headrace.core.process.daemon", "--model=null"]
    command += [f"--distributed-executor-backend={asked.distributed_executor_backend}"]
    command += [f"--hf-overrides={json.dumps(asked.hf_overrides)}"]
    for limit_s in PATIENCE_S:
        done = subprocess.run(
            [*command, f"--startup-timeout={limit_s:g}"], capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 1
        said = f"engine-core: not ready within {limit_s:g} s (startup_timeout), during load weights; its threads:"
        if said in done.stderr:
            break
    assert said in done.stderr
    assert "null.py" in done.stderr
    assert not list(runtime_directory.iterdir())
