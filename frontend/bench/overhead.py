"""`headrace bench overhead`: the cost of everything except the model, measured with an engine that computes nothing.

Costs are processor time, which other programs on the machine disturb far less than wall-clock time; latencies are
wall-clock time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from headrace import __version__
from headrace.core.options.engine_options import Options
from headrace.core.options.parsing import struct_from_arguments
from headrace.frontend.bench.offline import finish
from headrace.frontend.bench.options import OverheadOptions, ResultOptions
from headrace.frontend.bench.results import record as records
from headrace.frontend.bench.results.metrics import columns, number, percentile
from headrace.frontend.bench.traffic.child_server import running
from headrace.frontend.bench.traffic.http_client import ExchangeError, Pool, Target
from headrace.frontend.bench.traffic.load import Load
from headrace.frontend.client.event_loop import run_async
from headrace.frontend.client.transport import ZmqTransport
from headrace.ipc.codec import Tensor
from headrace.ipc.failure import EngineDeadError, Failure, OptionError
from headrace.ipc.messages import (
    SCHEMA_HASH,
    AddRequest,
    CoreMessage,
    Generate,
    GetStats,
    Hello,
    Reply,
    Sampling,
    StepOutputs,
    Welcome,
)
from headrace.ipc.process.program import python_command
from headrace.ipc.transport.ring import RingLayout, RingReader, RingWriter, lay_out_ring
from headrace.ipc.wait import Deadline

NULL = "headrace.executor.testing.null:NullExecutor"
PROMPT_TOKENS = 16
ROUND_TRIPS = 500
RING_ROUND_TRIPS, RING_MESSAGE_BYTES = 2000, 256
HTTP_STREAMS, HTTP_TOKENS = 32, 200
STEP_TIMEOUT_S = 120.0
START_TIMEOUT_S = 60.0


def bench_overhead(arguments: argparse.Namespace) -> int:
    """Measures core, transports and HTTP server. Raises OptionError."""
    asked, result = struct_from_arguments(arguments, OverheadOptions), struct_from_arguments(arguments, ResultOptions)
    counts = _counts(asked)
    records.check_writable(result)
    record = records.new_record("overhead", result, records.given(asked), 0)
    core = {str(count): run_async(partial(core_step_cost, count, asked.num_steps)) for count in counts}
    socket_us = run_async(socket_round_trips)
    ring_us = ring_round_trips()
    http = run_async(partial(http_costs, asked.num_idle_streams))
    record["results"] = {
        "core_us_per_step": {name: cost["core_us"] for name, cost in core.items()},
        "core_busiest_thread_us_per_step": {name: cost["busiest_thread_us"] for name, cost in core.items()},
        "socket_round_trip_us": _middle(socket_us),
        "ring_round_trip_us": _middle(ring_us),
        **http,
    }
    record["samples"] = {"core": core, "socket_us": socket_us, "ring_us": ring_us}
    print(overhead_table(record["results"]))
    return finish(record, result)


def overhead_table(figures: dict[str, Any]) -> str:
    busiest = figures["core_busiest_thread_us_per_step"]
    rows = [
        [f"core, {name} running, us per step", number(cost), f"its busiest thread: {number(busiest[name])}"]
        for name, cost in figures["core_us_per_step"].items()
    ]
    for name, label in (("socket", "socket to the core and back, us"), ("ring", "ring to a worker and back, us")):
        trip = figures[f"{name}_round_trip_us"]
        rows.append([label, number(trip["p50"]), f"p99: {number(trip['p99'])}"])
    rows += [
        ["HTTP server, streamed token ids/s per core", number(figures["http_tokens_per_core_s"]), ""],
        ["HTTP server, memory per idle stream, KiB", number(figures["http_idle_stream_bytes"] / 1024), ""],
        ["core, memory per waiting request, KiB", number(figures["core_waiting_request_bytes"] / 1024), ""],
    ]
    return columns(rows)


async def core_step_cost(num_running: int, num_steps: int) -> dict[str, Any]:
    """Microseconds of the core's processor time per step: of all threads, and of the busiest thread.

    Measured from idle to idle, since a core may be far ahead of what its client has read. So the cost of admitting the
    requests is included.
    """
    options = Options(
        model="null",
        distributed_executor_backend=NULL,
        skip_tokenizer_init=True,
        max_num_seqs=max(num_running, 8),
        max_num_batched_tokens=max(8192, num_running * PROMPT_TOKENS),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    async with _Session(options) as session:
        sampling = Sampling(max_tokens=num_steps, ignore_eos=True)
        before = thread_times_s(session.pid)
        for slot in range(num_running):
            tokens = Tensor.of("int32", [5 + slot % 97] * PROMPT_TOKENS)
            session.send(
                AddRequest(slot=slot, request_id=str(slot), prompt_token_ids=tokens, task=Generate(sampling=sampling))
            )
        await session.until(lambda: session.num_finished >= num_running)
        after = thread_times_s(session.pid)
    steps = len(session.steps)
    spent_s = [after[thread] - before.get(thread, 0.0) for thread in after]
    return {"steps": steps, "core_us": 1e6 * sum(spent_s) / steps, "busiest_thread_us": 1e6 * max(spent_s) / steps}


async def socket_round_trips() -> list[float]:
    """Round trips of a control message to an idle core, in microseconds."""
    options = Options(model="null", distributed_executor_backend=NULL, skip_tokenizer_init=True, disable_log_stats=True)
    samples = []
    async with _Session(options) as session:
        for call in range(ROUND_TRIPS):
            began_s = time.perf_counter()
            session.send(GetStats(call=call))
            await session.until(lambda call=call: session.last_call == call)  # type: ignore[misc]
            samples.append(1e6 * (time.perf_counter() - began_s))
    return samples


def ring_round_trips() -> list[float]:
    """Round trips in microseconds: a message through a ring to another process, and its echo through a second ring."""
    layout = RingLayout.holding(RING_MESSAGE_BYTES, 8, 1)
    fds = [os.memfd_create("headrace-bench-ring") for _ in range(2)]
    for fd in fds:
        lay_out_ring(fd, layout)
    child = subprocess.Popen(
        python_command("-m", "headrace.frontend.bench.overhead", *map(str, fds), str(RING_ROUND_TRIPS)), pass_fds=fds
    )
    writer, reader = RingWriter(fds[0], layout), RingReader(fds[1], layout, 0)
    try:
        deadline, message, samples = Deadline(STEP_TIMEOUT_S), bytes(RING_MESSAGE_BYTES), []
        for _ in range(RING_ROUND_TRIPS):
            began_s = time.perf_counter()
            writer.put(message, deadline)
            reader.take(deadline)
            samples.append(1e6 * (time.perf_counter() - began_s))
        child.wait(START_TIMEOUT_S)
    finally:
        child.kill()
        child.wait()
        writer.close()
        reader.close()
        for fd in fds:
            os.close(fd)
    return samples[RING_ROUND_TRIPS // 10 :]  # the first round trip includes the child's start


async def http_costs(num_idle: int) -> dict[str, float]:
    """Tokens that the HTTP server streams per second of processor time, and the bytes that an idle stream takes in the
    server and in the core."""
    serve = python_command("-m", "headrace", "serve", "null", "--port", "0")
    null = ("--distributed-executor-backend", NULL, "--skip-tokenizer-init", "--disable-log-stats")
    with running([*serve, *null]) as server:
        pool, target = _pool_of(server.wait_line("ready: http", START_TIMEOUT_S))
        try:
            bodies = [_post(target, number, HTTP_TOKENS) for number in range(HTTP_STREAMS)]
            await Load(pool, bodies, due_s=None, max_concurrency=None, keep_text=False).run()
            before_s = sum(thread_times_s(server.process.pid).values())
            for _ in range(3):
                done = await Load(pool, bodies, due_s=None, max_concurrency=None, keep_text=False).run()
                server.check(any(outcome.cause for outcome in done.outcomes), "failed a request")
            spent_s = sum(thread_times_s(server.process.pid).values()) - before_s
        finally:
            await pool.close()
    # Steps of one second, one request at a time: the other requests wait, and their streams stay idle.
    slow = ("--max-num-seqs", "1", "--hf-overrides", '{"step_delay_s": 1.0}', "--shutdown-timeout", "0")
    with running([*serve, *null, *slow]) as server:
        pool, target = _pool_of(server.wait_line("ready: http", START_TIMEOUT_S))
        try:
            process = psutil.Process(server.process.pid)
            core = next(
                each for each in process.children() if "headrace.core.process.daemon" in " ".join(each.cmdline())
            )
            await _open_streams(pool, target, 20)
            before = process.memory_info().rss, core.memory_info().rss
            await _open_streams(pool, target, num_idle)
            after = process.memory_info().rss, core.memory_info().rss
        finally:
            await pool.close()
    return {
        "http_tokens_per_core_s": 3 * HTTP_STREAMS * HTTP_TOKENS / spent_s,
        "http_idle_stream_bytes": (after[0] - before[0]) / num_idle,
        "core_waiting_request_bytes": (after[1] - before[1]) / num_idle,
    }


def thread_times_s(pid: int) -> dict[str, float]:
    """Processor seconds of each thread of a process, with nanosecond resolution (schedstat)."""
    times = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        times[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return times


class _Session:
    """Starts an engine, and is a minimal client of it that counts steps and does not detokenise."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.steps: set[int] = set()
        self.num_finished, self.last_call, self.pid = 0, -1, 0
        self._is_welcome = False
        self._failure: Failure | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> _Session:
        from headrace.core.process.child import start_engine

        self._child = start_engine(self._options)
        ready = await asyncio.to_thread(self._child.wait_ready, START_TIMEOUT_S)
        self.pid = self._child.pid
        self._transport = ZmqTransport(ready.address)
        self._transport.open(self._on_message, self._on_closed)
        self.send = self._transport.send
        self.send(Hello(schema_hash=SCHEMA_HASH, version=__version__, pid=os.getpid()))
        await self.until(lambda: self._is_welcome)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._transport.close()
        await asyncio.to_thread(self._child.kill)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for the condition. Raises EngineDeadError if the core ends first, TimeoutError after STEP_TIMEOUT_S."""
        async with asyncio.timeout(STEP_TIMEOUT_S):
            while not condition():
                if self._failure is not None:
                    raise EngineDeadError.from_failure(self._failure)
                self._changed.clear()
                await self._changed.wait()

    def _on_message(self, message: CoreMessage) -> None:
        if isinstance(message, StepOutputs):
            self.steps.add(message.step)
            self.num_finished += len(message.finished)
        elif isinstance(message, Welcome):
            self._is_welcome = True
        elif isinstance(message, Reply):
            self.last_call = message.call
        self._changed.set()

    def _on_closed(self, failure: Failure) -> None:
        self._failure = failure
        self._changed.set()


def _pool_of(ready_line: str) -> tuple[Pool, Target]:
    url = next(word for word in ready_line.split() if word.startswith("http")).removesuffix("/v1")
    target = Target(url, {})
    return Pool(target, connect_timeout_s=30, stall_timeout_s=STEP_TIMEOUT_S, request_timeout_s=STEP_TIMEOUT_S), target


def _post(target: Target, number: int, max_tokens: int) -> bytes:
    body = b'{"model":"null","prompt":[%d,6,7],"max_tokens":%d,"ignore_eos":true,"stream":true}' % (
        5 + number,
        max_tokens,
    )
    return target.post("/v1/completions", body)


async def _open_streams(pool: Pool, target: Target, count: int) -> None:
    """Opens that many streams, waits until each response has begun, and leaves them open."""
    begun = [_Begun() for _ in range(count)]
    for index, reader in enumerate(begun):
        reader.task = asyncio.create_task(_hold(pool, _post(target, index % 1000, 1000), reader))
    async with asyncio.timeout(STEP_TIMEOUT_S):
        await asyncio.gather(*(reader.event.wait() for reader in begun))


async def _hold(pool: Pool, request: bytes, reader: _Begun) -> None:
    try:
        await pool.send(request, reader)
    except ExchangeError:
        reader.event.set()


class _Begun:
    """A Reader that reports the response's status line and ignores the body."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def on_status(self, status: int, headers: Any) -> None:
        self.event.set()

    def on_body(self, data: bytes, now_s: float) -> None:
        """Ignores the body."""


def _counts(asked: OverheadOptions) -> list[int]:
    try:
        counts = [int(text) for text in asked.running]
    except ValueError:
        counts = [0]
    if not all(1 <= count <= 4096 for count in counts):
        raise OptionError(f"--running {' '.join(asked.running)}: it must be whole numbers from 1 to 4096")
    return counts


def _middle(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {"p50": statistics.median(ordered), "p99": percentile(ordered, 99)}


def echo_ring(inward: int, outward: int, count: int) -> None:
    """The other side of `ring_round_trips`, which runs in a child process."""
    layout = RingLayout.holding(RING_MESSAGE_BYTES, 8, 1)
    reader, writer = RingReader(inward, layout, 0), RingWriter(outward, layout)
    deadline = Deadline(STEP_TIMEOUT_S)
    for _ in range(count):
        _, message = reader.take(deadline)
        writer.put(bytes(message), deadline)


if __name__ == "__main__":
    echo_ring(*map(int, sys.argv[1:]))
