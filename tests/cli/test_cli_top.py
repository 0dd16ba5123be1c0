"""`headrace top`: rates from two looks, engines that come and go, and a terminal left as it was."""

from __future__ import annotations

import asyncio
import itertools
import termios
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fake_core import FakeCore, ZmqCore, zmq_core
from http_server import address_of_engine, metric, serving
from patience import wait_until
from terminal import on_terminal
from test_cli_ps import stats_of

from headrace.frontend.cli.commands.top import HEADER, WatchedEngines, row
from headrace.frontend.cli.main import main
from headrace.frontend.client.engine_watch import EngineSnapshot, EngineWatch
from headrace.ipc.failure import EngineDeadError
from headrace.ipc.messages import EngineTimes


def test_rates_are_counter_differences_over_the_time_between() -> None:
    before = EngineSnapshot(
        address="a",
        at_s=10.0,
        stats=stats_of(
            num_prompt_tokens=100,
            num_generated_tokens=10,
            times=EngineTimes(num_first_tokens=5, first_token_s=9.0, num_later_tokens=7, later_token_s=1.0),
        ),
    )
    now = EngineSnapshot(
        address="a",
        at_s=12.0,
        stats=stats_of(
            num_prompt_tokens=300,
            num_cached_prompt_tokens=30,
            num_generated_tokens=60,
            num_finished=3,
            num_running=2,
            num_waiting=7,
            num_blocks=4,
            num_free_blocks=1,
            num_step_gaps=10,
            step_gap_s=0.002,
            times=EngineTimes(
                num_first_tokens=7, first_token_s=9.5, num_later_tokens=57, later_token_s=1.6, request_s=4.5
            ),
        ),
    )
    told = dict(zip(HEADER, row(now, before), strict=True))
    assert (told["IN tok/s"], told["OUT tok/s"], told["DONE/s"]) == ("100.0", "25.0", "1.5")
    assert told["GAP us"] == "200"
    assert (told["FIRST ms"], told["NEXT ms"], told["TOTAL s"]) == ("250", "12", "1.5")
    silent = dict(zip(HEADER, row(now, now), strict=True))
    assert (silent["FIRST ms"], silent["NEXT ms"], silent["TOTAL s"]) == ("-", "-", "-")
    assert (told["RUNNING"], told["WAITING"], told["KV"], told["HITS"]) == ("2", "7", "75%", "10%")
    first = dict(zip(HEADER, row(now, None), strict=True))
    assert (first["IN tok/s"], first["DONE/s"], first["NEXT ms"]) == ("-", "-", "-")


class SeenByClients:
    """Means of the server's histograms, over the requests since the last call."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._before: dict[str, tuple[float, float]] = {}

    def mean_s(self, name: str) -> float:
        now = tuple(metric(self._client, f"headrace:{name}_seconds_{part}") for part in ("sum", "count"))
        before = self._before.get(name, (0.0, 0.0))
        self._before[name] = now[0], now[1]
        return (now[0] - before[0]) / (now[1] - before[1])


def test_latencies_are_those_that_clients_see() -> None:
    """The engine's means beside the server's histograms, over requests that begin and end at different times.

    The engine does not see how long a request or a token waits for a busy machine outside of it, so a round agrees
    where nothing has waited.
    """
    asked = {"prompt": [5, 6], "ignore_eos": True}
    with serving(null_model={"step_delay_s": 0.01}) as server, ThreadPoolExecutor(4) as pool, server.client() as client:

        async def look_around() -> tuple[EngineSnapshot, EngineSnapshot]:
            watch = EngineWatch(address_of_engine(server))
            before = await watch.look()
            bodies = [{**asked, "max_tokens": 10 + 10 * index} for index in range(4)]
            waiting = [pool.submit(client.post, "/v1/completions", json=body) for body in bodies]
            assert all([(await asyncio.wrap_future(each)).status_code == 200 for each in waiting])
            after = await watch.look()
            watch.close()
            return before, after

        seen, rounds = SeenByClients(client), itertools.count(1)

        def agree() -> bool:
            before, after = asyncio.run(look_around())
            told = dict(zip(HEADER, row(after, before), strict=True))
            num_tokens = next(rounds) * (100 - 4)
            assert metric(client, "headrace:inter_token_latency_seconds_count") == num_tokens
            assert after.stats is not None
            assert after.stats.times.num_later_tokens == num_tokens
            first_s, total_s = seen.mean_s("time_to_first_token"), seen.mean_s("e2e_request_latency")
            # A core takes requests up between steps: what they waited for the end of one it does not see.
            assert 0.01 <= float(told["FIRST ms"]) / 1e3 <= first_s + 0.001
            assert 0.25 <= float(told["TOTAL s"]) <= total_s + 0.02
            token_s = pytest.approx(seen.mean_s("inter_token_latency"), rel=0.1, abs=0.002)
            return float(told["NEXT ms"]) / 1e3 == token_s and float(told["TOTAL s"]) >= 0.9 * total_s - 0.02

        wait_until(agree, 60, "a round in which engine and clients measure the same")


def test_engines_come_and_go(runtime_directory: Path) -> None:
    async def watch() -> None:
        watches = WatchedEngines(None)
        try:
            assert await watches.rows() == []
            with zmq_core(model="one") as one, zmq_core(model="two") as two:
                assert {each[1] for each in await watches.rows()} == {"one", "two"}
                (first, second) = await watches.rows()
                assert first[5] == second[5] == "0.0"  # now there is a look before
                two.stop()
                assert [each[-1] for each in await watches.rows()] == [one.address]
            assert await watches.rows() == []
        finally:
            watches.close()

    asyncio.run(watch())


def test_an_engine_asked_for_by_address_stays_in_the_table(runtime_directory: Path) -> None:
    async def watch() -> None:
        with zmq_core(model="one") as core:
            watches = WatchedEngines([core.address, core.address])
            (alive,) = await watches.rows()
            assert alive[1:3] == ("one", "0")
            core.stop()
            (dead,) = await watches.rows()
            assert "gone" in dead[-1] or "no engine-core listens" in dead[-1]
            again = ZmqCore(FakeCore(model="two"), core.address)
            (other,) = await watches.rows()
            again.stop()
            assert other[1:3] == ("two", "0")
            watches.close()

    asyncio.run(watch())


def test_once_prints_one_table_without_escapes(
    runtime_directory: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with zmq_core(model="one") as core:
        assert main(["top", "--once", "--interval", "0.1", "--engine", core.address]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.startswith("PID")
    assert "\x1b" not in header + line
    assert line.split()[1:8] == ["one", "0", "0", "0%", "0.0", "0.0", "0.0"]
    assert main(["top", "--once", "--interval", "0.1"]) == 0
    assert "no engine is running" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["top", "--once"], ["ps"]])
def test_an_address_without_an_engine_is_an_error_that_says_what_would_be_right(
    runtime_directory: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    nobody = f"ipc://{runtime_directory}/nobody.sock"
    with zmq_core(model="one") as core:
        for addresses in ([nobody], [core.address, nobody]):
            named = [word for address in addresses for word in ("--engine", address)]
            assert main([*command, *named]) == 1
            said = capsys.readouterr().err
            assert said.startswith(f"headrace: no engine-core listens at {nobody}\n")
            assert "`headrace ps` lists those that run" in said
    for wrong, said in (("nonsense", "'nonsense' is no address: use ipc:///"), ("http://a:1", "but a server's URL")):
        assert main([*command, "--engine", wrong]) == 1
        assert said in capsys.readouterr().err


def test_an_engine_that_dies_while_top_looks_is_an_error(
    runtime_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with zmq_core(model="one") as core:

        async def look_twice() -> None:
            watches = WatchedEngines([core.address])
            await watches.rows()
            watches.check()
            core.stop()
            await watches.rows()
            try:
                with pytest.raises(EngineDeadError, match=r"the connection was lost|no engine-core listens"):
                    watches.check()
            finally:
                watches.close()

        asyncio.run(look_twice())


def test_a_wrong_interval_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--interval", "0"]) == 2
    assert "--interval=0: it must be 0.1 to 3600 seconds" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_q_or_ctrl_c_ends_it_and_gives_the_terminal_back(runtime_directory: Path, key: str) -> None:
    with zmq_core(model="one"), on_terminal("top") as terminal:
        terminal.wait_for("one")
        terminal.keys(key)
        terminal.wait_for("\x1b[?1049l")
        assert terminal.ends() == 0, terminal.shown
        assert "\x1b[?1049h" in terminal.shown
        assert "Traceback" not in terminal.shown
        assert termios.tcgetattr(terminal.theirs) == terminal.settings
