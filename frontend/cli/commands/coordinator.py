"""Run a coordinator, which tells frontends on any host which engines exist.

    headrace coordinator --address tcp://10.0.0.1:5560 --keys deployment.keys
    engine-core MODEL --address 'tcp://0.0.0.0:*' --coordinator tcp://10.0.0.1:5560 --keys deployment.keys
    headrace serve --coordinator tcp://10.0.0.1:5560 --keys deployment.keys

It has no persistent state: if it dies, frontends go on with the engines that they know, and a new coordinator at the
same address learns of all engines within seconds. Two may run at two addresses; give both to engines and frontends.
"""

from __future__ import annotations

import argparse
from types import FrameType


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--address",
        default="",
        help="Where to listen: tcp://HOST:PORT (PORT may be *) or ipc:///path/to/socket; default: a new ipc:// address",
    )
    parser.add_argument(
        "--keys", metavar="FILE", help="Key file (`headrace keys FILE`) for tcp://; default: HEADRACE_KEYS"
    )
    parser.add_argument(
        "--insecure", action="store_true", help="Let everybody who reaches a tcp:// address use it, unencrypted"
    )


def run(arguments: argparse.Namespace) -> int:
    import signal

    from headrace.core.coordinator.program import Coordinator
    from headrace.ipc.process.child import heeded_signals
    from headrace.ipc.process.log import set_up_logging
    from headrace.ipc.transport.keys import use_keys

    set_up_logging("coordinator", "INFO")
    use_keys(arguments.keys, arguments.insecure)
    coordinator = Coordinator(arguments.address)

    def stop(number: int, frame: FrameType | None) -> None:
        coordinator.stop()

    for number in heeded_signals():
        signal.signal(number, stop)
    print(f"coordinator: ready at {coordinator.address}", flush=True)
    try:
        coordinator.run()
    finally:
        coordinator.close()
    return 0
