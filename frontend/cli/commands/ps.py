"""List this user's running engines, with their load.

Finds all engines that this user has started on this host, wherever they listen.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.frontend.client.engine_watch import EngineSnapshot

HEADER = ("PID", "MODEL", "DTYPE", "RUNNING", "WAITING", "KV", "UPTIME", "ADDRESS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        action="append",
        metavar="ADDRESS",
        help="List the engine-core at this address instead, and fail if there is none; repeatable",
    )
    parser.add_argument(
        "--keys", metavar="FILE", help="Key file (`headrace keys FILE`) for tcp://; default: HEADRACE_KEYS"
    )
    parser.add_argument("--json", action="store_true", help="Print a JSON list instead of a table")


def run(arguments: argparse.Namespace) -> int:
    from headrace.frontend.client.engine_watch import check_seen, engine_addresses, look_at, table
    from headrace.frontend.client.event_loop import run_async
    from headrace.ipc.transport.keys import use_keys

    use_keys(arguments.keys, insecure=False)
    asked: list[str] = arguments.engine or []
    snapshots = run_async(lambda: look_at(asked or engine_addresses(), are_listed=not asked))
    if arguments.json:
        import json

        print(json.dumps([as_json(snapshot) for snapshot in snapshots], indent=2))
    else:
        # The error tells the cause of an engine that was asked for and did not answer.
        print(*table(HEADER, [_row(each) for each in snapshots if each.stats or not asked]), sep="\n")
    if asked:
        check_seen(snapshots)
    return 0


def as_json(snapshot: EngineSnapshot) -> dict[str, Any]:
    """A snapshot for `--json`. Names and units are those of EngineStats; None means unknown."""
    from headrace.frontend.client.engine_metrics import by_name, hit_rate, kv_use

    welcome, stats = snapshot.welcome, snapshot.stats
    return {
        "address": snapshot.address,
        "pid": snapshot.pid,
        "model": None if welcome is None else welcome.model,
        "served_model_names": None if welcome is None else list(welcome.served_model_names),
        "dtype": None if welcome is None else welcome.dtype,
        "version": None if welcome is None else welcome.version,
        "model_version": None if welcome is None else welcome.model_version or None,
        "max_model_len": None if welcome is None else welcome.max_model_len,
        "uptime_s": None if snapshot.uptime_s is None else round(snapshot.uptime_s, 1),
        "kv_use": None if stats is None else round(kv_use(stats), 4),
        "cache_hit_rate": None if stats is None else hit_rate(stats),
        "stats": None if stats is None else by_name(stats),
        "problem": snapshot.problem or None,
    }


def _row(snapshot: EngineSnapshot) -> tuple[str, ...]:
    from headrace.frontend.client.engine_metrics import kv_use
    from headrace.frontend.client.engine_watch import duration, short_name

    welcome, stats = snapshot.welcome, snapshot.stats
    return (
        "-" if snapshot.pid is None else str(snapshot.pid),
        "-" if welcome is None else short_name(welcome.model),
        "-" if welcome is None else welcome.dtype,
        "-" if stats is None else str(stats.num_running),
        "-" if stats is None else str(stats.num_waiting),
        "-" if stats is None else f"{kv_use(stats):.0%}",
        duration(snapshot.uptime_s),
        snapshot.address + (f"  ({snapshot.problem})" if snapshot.problem else ""),
    )
