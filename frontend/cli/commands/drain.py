"""Drain an engine of a running service: it takes no new requests, finishes those that it has, and ends.

    headrace ps
    headrace drain ipc:///run/user/1000/headrace/engine-4711-1f2e3d4c.sock

Requests that are not finished in time continue with the same tokens on other engines of the same model, if any exist.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "engine", metavar="ENGINE", help="Address of the engine, as `headrace ps` and `headrace top` show it"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="How long running requests may take to finish (default: 120)",
    )
    parser.add_argument(
        "--keys", metavar="FILE", help="Key file (`headrace keys FILE`) for tcp://; default: HEADRACE_KEYS"
    )
    parser.add_argument("--insecure", action="store_true", help="Use an engine of another host without keys")


def run(arguments: argparse.Namespace) -> int:
    from headrace.frontend.client.event_loop import run_async
    from headrace.ipc.failure import OptionError
    from headrace.ipc.transport.keys import use_keys

    if not 0 <= arguments.timeout <= 86400:
        raise OptionError(f"--timeout={arguments.timeout:g}: it must be 0 to 86400 seconds")
    use_keys(arguments.keys, arguments.insecure)
    return run_async(lambda: _drain(arguments.engine, arguments.timeout))


async def _drain(address: str, timeout_s: float) -> int:
    import asyncio

    from headrace.frontend.client.client import CONNECT_TIMEOUT_S, CoreClient
    from headrace.frontend.client.transport import ZmqTransport
    from headrace.ipc.control import DrainEngine
    from headrace.ipc.failure import HeadraceError

    grace_s = 30.0
    client = CoreClient(ZmqTransport(address))
    await client.start(CONNECT_TIMEOUT_S, with_tokenizer=False)
    try:
        await client.control(DrainEngine(deadline_s=timeout_s))
        print(f"the engine at {address} drains")
        try:
            async with asyncio.timeout(timeout_s + grace_s):
                await client.until_lost()
        except TimeoutError:
            raise HeadraceError(f"the engine at {address} has not left after {timeout_s + grace_s:g} s") from None
        print(f"the engine at {address} has left")
    finally:
        await client.close()
    return 0
