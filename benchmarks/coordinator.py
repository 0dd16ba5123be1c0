"""The share of a core that a coordinator uses for many engines and for many frontends that follow it.

    python benchmarks/coordinator.py [--engines 1000] [--frontends 100] [--seconds 20] [--keys] [--out FILE]

The coordinator is the real program. Engines and frontends are the product's classes without their work
(`Announcements`, `Directory`), each with its own connection; every engine's load changes each second, and each second
one of them is replaced by a new one. Measures processor time of the coordinator's process only, including ZeroMQ's
thread. Target: 10% of a core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from headrace.core.coordinator.announcer import AnnouncedState, Announcements
from headrace.frontend.bench.results.record import surroundings
from headrace.frontend.fleet.directory import Directory
from headrace.ipc.codec import Codec
from headrace.ipc.coordination import ANNOUNCE_EVERY_S, EngineEntry, FromCoordinator, Members
from headrace.ipc.messages import Load
from headrace.ipc.process.resources import raise_file_limit
from headrace.ipc.transport.keys import use_keys
from headrace.ipc.transport.sockets import new_dealer

SETTLE_S = 4.0
FOLLOWED_EVERY_S = 0.25


class Engine:
    def __init__(self, number: int, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.number, self.socket = number, new_dealer(context, address)
        self.socket.connect(address)
        self.begin(0)

    def begin(self, life: int) -> None:
        entry = EngineEntry(
            address=f"tcp://10.0.{self.number // 250}.{self.number % 250}:5570",
            life=f"{self.number}-{life}",
            model="organisation/a-model-of-usual-length",
            served_model_names=("organisation/a-model-of-usual-length",),
            rank=self.number,
            host=f"host-{self.number}",
            pid=4711,
            max_num_seqs=256,
            max_waiting_requests=1024,
            block_size=16,
        )
        self.announcements = Announcements(entry)

    def announce(self, codec: Codec[Any], chance: random.Random) -> None:
        load = Load(num_running=chance.randrange(256), num_waiting=chance.randrange(8))
        self.socket.send_multipart(codec.encode(self.announcements.next(AnnouncedState(load=load))))


class Frontend:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.address, self.socket = address, new_dealer(context, address)
        self.socket.connect(address)
        self.directory = Directory([address])
        self.num_loads = 0

    def turn(self, codec: Codec[FromCoordinator]) -> None:
        now_s = time.monotonic()
        with contextlib.suppress(zmq.Again):
            while True:
                message = codec.decode(self.socket.recv_multipart(zmq.NOBLOCK))
                assert isinstance(message, Members), message
                self.num_loads += sum(1 for _ in self.directory.take(self.address, message, now_s))
        for _, follow in self.directory.follow(now_s):
            self.socket.send_multipart(codec.encode(follow))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.keys:
            keys = f"{folder}/keys"
            subprocess.run([sys.executable, "-m", "headrace", "keys", keys], check=True, stdout=subprocess.DEVNULL)
            environment["HEADRACE_KEYS"] = keys
            use_keys(keys, False)
        command = [sys.executable, "-m", "headrace", "coordinator", "--address", "tcp://127.0.0.1:*"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        ) as process:
            try:
                assert process.stdout is not None
                return _measure(arguments, psutil.Process(process.pid), process.stdout.readline().split()[-1])
            finally:
                process.terminate()


def _measure(arguments: argparse.Namespace, process: psutil.Process, address: str) -> dict[str, Any]:
    raise_file_limit()
    chance, context = random.Random(1), zmq.Context[zmq.Socket[bytes]]()
    codec: Codec[FromCoordinator] = Codec(FromCoordinator)
    context.set(zmq.MAX_SOCKETS, 2 * (arguments.engines + arguments.frontends))
    engines = [Engine(number, context, address) for number in range(arguments.engines)]
    frontends = [Frontend(context, address) for _ in range(arguments.frontends)]
    began_s = time.monotonic()
    cpu_before_s, measured_from_s, sent, next_follow_s, lives = 0.0, 0.0, 0, 0.0, 0
    while (now_s := time.monotonic()) < began_s + SETTLE_S + arguments.seconds:
        if not measured_from_s and now_s > began_s + SETTLE_S:
            measured_from_s, cpu_before_s = now_s, sum(process.cpu_times()[:2])
            for frontend in frontends:
                frontend.num_loads = 0
        due = int((now_s - began_s) / ANNOUNCE_EVERY_S * len(engines))
        while sent < due:
            engine = engines[sent % len(engines)]
            if sent % len(engines) == 0:  # it has ended, and a new engine replaces it
                lives += 1
                engine.begin(lives)
            engine.announce(codec, chance)
            sent += 1
        if now_s >= next_follow_s:
            next_follow_s = now_s + FOLLOWED_EVERY_S
            for frontend in frontends:
                frontend.turn(codec)
        time.sleep(0.002)
    seconds, cpu_s = time.monotonic() - measured_from_s, sum(process.cpu_times()[:2]) - cpu_before_s
    known = [len(frontend.directory.entries) for frontend in frontends]
    result = {
        "engines": len(engines),
        "frontends": len(frontends),
        "keys": arguments.keys,
        "seconds": seconds,
        "announcements_per_s": sent / (time.monotonic() - began_s),
        "share_of_a_core": cpu_s / seconds,
        "engines_known_least": min(known),
        "loads_told_per_s_of_each": min(each.num_loads for each in frontends) / seconds,
        "resident_mib": process.memory_info().rss / 2**20,
    }
    for socket in [*(each.socket for each in engines), *(each.socket for each in frontends)]:
        socket.close(0)
    context.term()
    return msgspec.to_builtins(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--frontends", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--keys", action="store_true", help="Encrypted and authenticated, as across hosts")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments)
    print(json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps({**surroundings(probe=False), "results": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
