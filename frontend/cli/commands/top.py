"""Watch running engines: load, KV cache, tokens per second, latencies.

Shows the engines that `headrace ps` lists, those at --engine or those of --coordinator, and refreshes every --interval
seconds. q or Ctrl-C ends it.

FIRST is the time from a request's arrival to its first token, NEXT from one token to the next, TOTAL from arrival to
end: means over the last interval. GAP is the mean idle time of the model between two steps, HITS the share of prompt
tokens that came from the prefix cache since the start.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.frontend.client.engine_watch import EngineSnapshot, EngineWatch
    from headrace.frontend.fleet.directory import Loads
    from headrace.frontend.fleet.discovery import Discovery
    from headrace.frontend.fleet.sources import Source

HEADER = (
    "PID",
    "MODEL",
    "RUNNING",
    "WAITING",
    "KV",
    "IN tok/s",
    "OUT tok/s",
    "DONE/s",
    "FIRST ms",
    "NEXT ms",
    "TOTAL s",
    "GAP us",
    "HITS",
    "UPTIME",
    "ADDRESS",
)
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Switches to the terminal's alternate screen and hides the cursor; leaving it restores the previous content."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine", action="append", metavar="ADDRESS", help="Watch the engine-core at this address; repeatable"
    )
    parser.add_argument(
        "--coordinator",
        action="append",
        metavar="ADDRESS",
        help="Watch the engines that the coordinator at this address tells of; repeatable",
    )
    parser.add_argument(
        "--keys", metavar="FILE", help="Key file (`headrace keys FILE`) for tcp://; default: HEADRACE_KEYS"
    )
    parser.add_argument("--insecure", action="store_true", help="Watch engines of other hosts without keys")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="Time between two updates (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="Print one table, with the rates of one interval, and exit")


def run(arguments: argparse.Namespace) -> int:
    from headrace.frontend.client.event_loop import run_async
    from headrace.ipc.failure import OptionError
    from headrace.ipc.transport.keys import use_keys

    use_keys(arguments.keys, arguments.insecure)
    if arguments.engine and arguments.coordinator:
        raise OptionError("--engine names engines, and --coordinator finds them: give one of the two")
    if not 0.1 <= arguments.interval <= 3600:
        raise OptionError(f"--interval={arguments.interval:g}: it must be 0.1 to 3600 seconds")
    try:
        return run_async(lambda: _watch(arguments, once=arguments.once))
    except KeyboardInterrupt:
        return 0  # Ctrl-C is a regular way to end it


class FoundEngines:
    """The addresses of engines that coordinators report; `Discovery` calls these methods as engines come and go."""

    def __init__(self) -> None:
        self.addresses: dict[str, None] = {}

    def add(self, source: Source, rank: int | None = None) -> None:
        self.addresses[source.address] = None

    def let_go(self, address: str, *, may_return: bool = False) -> None:
        self.addresses.pop(address, None)

    def note_loads(self, loads: Loads) -> None:
        """Does nothing: the engines are asked directly, and report more."""


class WatchedEngines:
    """The engines that are polled, with their previous snapshots."""

    def __init__(self, addresses: Sequence[str] | None, found: FoundEngines | None = None) -> None:
        """addresses: engines that stay in the table even when they end. found: engines from coordinators, used instead.
        With neither, each poll looks for the engines in the runtime directory."""
        self._fixed, self._found = addresses, found
        self._watches: dict[str, EngineWatch] = {}
        self._before: dict[str, EngineSnapshot] = {}

    def check(self) -> None:
        """Raises EngineDeadError if an engine of `addresses` did not answer the last poll."""
        from headrace.frontend.client.engine_watch import check_seen

        check_seen([self._before[address] for address in self._fixed or ()])

    async def rows(self) -> list[tuple[str, ...]]:
        """Polls each engine once, and returns the table's rows. Raises AddressError."""
        import asyncio

        from headrace.frontend.client.engine_watch import EngineWatch, engine_addresses

        if self._found is not None:
            addresses = list(self._found.addresses)
        else:
            addresses = list(dict.fromkeys(engine_addresses() if self._fixed is None else self._fixed))
        for address in [*self._watches]:
            if address not in addresses or self._watches[address].gone:
                self._forget(address)
        for address in addresses:
            if address not in self._watches:
                self._watches[address] = EngineWatch(address, is_listed=self._fixed is None)
        snapshots = await asyncio.gather(*(self._watches[address].look() for address in addresses))
        rows = []
        for snapshot in snapshots:
            if self._fixed is not None or not self._watches[snapshot.address].gone:
                rows.append(row(snapshot, self._before.get(snapshot.address)))
            self._before[snapshot.address] = snapshot
        return rows

    def close(self) -> None:
        for address in [*self._watches]:
            self._forget(address)

    def _forget(self, address: str) -> None:
        self._watches.pop(address).close()
        self._before.pop(address, None)


def row(snapshot: EngineSnapshot, before: EngineSnapshot | None) -> tuple[str, ...]:
    """An engine's row. Rates cover the time since the snapshot `before`; without one they are `-`."""
    from headrace.frontend.client.engine_metrics import hit_rate, kv_use
    from headrace.frontend.client.engine_watch import duration, short_name

    stats, welcome = snapshot.stats, snapshot.welcome
    rates = _rates(snapshot, before)
    hits = None if stats is None else hit_rate(stats)
    return (
        "-" if snapshot.pid is None else str(snapshot.pid),
        "-" if welcome is None else short_name(welcome.model, 30),
        "-" if stats is None else str(stats.num_running),
        "-" if stats is None else str(stats.num_waiting),
        "-" if stats is None else f"{kv_use(stats):.0%}",
        *("-" if rate is None else f"{rate:.1f}" for rate in rates),
        *_latencies(snapshot, before),
        _gap(snapshot, before),
        "-" if hits is None else f"{hits:.0%}",
        duration(snapshot.uptime_s),
        snapshot.address + (f"  ({snapshot.problem})" if snapshot.problem else ""),
    )


def _rates(snapshot: EngineSnapshot, before: EngineSnapshot | None) -> tuple[float | None, ...]:
    """Prompt tokens, generated tokens and finished requests, each per second."""
    new, old = snapshot.stats, None if before is None else before.stats
    if before is None or new is None or old is None or snapshot.at_s <= before.at_s:
        return (None, None, None)
    names = ("num_prompt_tokens", "num_generated_tokens", "num_finished")
    return tuple((getattr(new, name) - getattr(old, name)) / (snapshot.at_s - before.at_s) for name in names)


def _latencies(snapshot: EngineSnapshot, before: EngineSnapshot | None) -> tuple[str, str, str]:
    """Mean time to first token and between tokens in ms, and request time in s, since the snapshot `before`; `-` for a
    mean over nothing."""
    if snapshot.stats is None or before is None or before.stats is None:
        return ("-", "-", "-")
    new, old = snapshot.stats.times, before.stats.times
    return (
        _mean(1e3 * (new.first_token_s - old.first_token_s), new.num_first_tokens - old.num_first_tokens),
        _mean(1e3 * (new.later_token_s - old.later_token_s), new.num_later_tokens - old.num_later_tokens),
        _mean(new.request_s - old.request_s, snapshot.stats.num_finished - before.stats.num_finished),
    )


def _mean(total: float, count: int) -> str:
    return f"{total / count:.3g}" if count > 0 else "-"


def _gap(snapshot: EngineSnapshot, before: EngineSnapshot | None) -> str:
    """Mean idle time between two consecutive forward passes, in microseconds."""
    new, old = snapshot.stats, None if before is None else before.stats
    if new is None or old is None or new.num_step_gaps <= old.num_step_gaps:
        return "-"
    return f"{1e6 * (new.step_gap_s - old.step_gap_s) / (new.num_step_gaps - old.num_step_gaps):.0f}"


async def _discover(coordinators: Sequence[str], found: FoundEngines) -> Discovery:
    """A started Discovery to which a coordinator has reported its engines. Raises HeadraceError if none answers in
    time."""
    import asyncio

    from headrace.frontend.client.client import CONNECT_TIMEOUT_S
    from headrace.frontend.fleet.discovery import Discovery
    from headrace.ipc.failure import HeadraceError

    discovery = Discovery(coordinators)
    discovery.start(found)
    end_s = time.monotonic() + CONNECT_TIMEOUT_S
    while not discovery.directory.heard_all(time.monotonic()):
        if time.monotonic() > end_s:
            await discovery.close()
            raise HeadraceError(f"no coordinator answers at {', '.join(coordinators)}")
        await asyncio.sleep(0.05)
    return discovery


async def _watch(arguments: argparse.Namespace, *, once: bool) -> int:
    import asyncio

    interval_s: float = arguments.interval
    found = FoundEngines() if arguments.coordinator else None
    discovery = await _discover(arguments.coordinator, found) if found is not None else None
    watches = WatchedEngines(arguments.engine, found)
    on_screen = sys.stdout.isatty() and not once
    try:
        with _screen() if on_screen else contextlib.nullcontext(), _keys() as key_pressed:
            rows = await watches.rows()
            while True:
                if once:
                    watches.check()
                else:
                    _show(rows, on_screen=on_screen)
                end_s = time.monotonic() + interval_s
                while (left_s := end_s - time.monotonic()) > 0:
                    await asyncio.sleep(min(left_s, 0.1))
                    if key_pressed() == "q":
                        return 0
                rows = await watches.rows()
                if once:
                    _show(rows, on_screen=False)
                    watches.check()
                    return 0
    finally:
        watches.close()
        if discovery is not None:
            await discovery.close()


def _show(rows: Sequence[Sequence[str]], *, on_screen: bool) -> None:
    import shutil

    from headrace.frontend.client.engine_watch import table

    lines = table(HEADER, rows)
    if not rows:
        lines.append("no engine is running")
    if not on_screen:
        print(*lines, sep="\n", flush=True)
        return
    width, height = shutil.get_terminal_size()
    lines = [f"headrace top   {time.strftime('%H:%M:%S')}   q ends", "", *lines][:height]
    text = "\r\n".join(line[: width - 1] + _CLEAR_LINE for line in lines)
    print(_HOME + text + _CLEAR_BELOW, end="", flush=True)


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    print(_ENTER, end="", flush=True)
    try:
        yield
    finally:
        print(_LEAVE, end="", flush=True)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """Yields a function that returns a key pressed since its last call, or "". Always "" if stdin is no terminal."""
    if not sys.stdin.isatty():
        yield lambda: ""
        return
    import os
    import select
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    saved = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def pressed() -> str:
        return os.read(descriptor, 1).decode("ascii", "replace") if select.select([descriptor], [], [], 0)[0] else ""

    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)
