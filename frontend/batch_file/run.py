"""Runs a batch file on an engine, within a bound on how many requests are in flight.

A request is read, planned and answered by the server's own code, so a batch gives what the server would have given.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.core.options.engine_options import Options
from headrace.core.options.parsing import flag, options_from_arguments
from headrace.core.options.values import option_specs
from headrace.core.process.supervisor import start_engine
from headrace.frontend.batch_file.file import BatchResult, Results, read_lines
from headrace.frontend.batch_file.lines import LineAnswers
from headrace.frontend.client.client import CoreClient
from headrace.frontend.client.own_engine import STOP_DEADLINE_S
from headrace.frontend.fleet.pool import Engine, EnginePool
from headrace.frontend.fleet.sources import Attached, Owned, Source
from headrace.frontend.http.exchange import LargeBodies
from headrace.frontend.http.metrics import Pages
from headrace.frontend.http.openai.chat import ChatParts
from headrace.frontend.http.openai.event_stream import KeepAlive
from headrace.frontend.http.openai.generation import Generator
from headrace.frontend.http.openai.prompts import ChatPrompts
from headrace.frontend.http.openai.requests import RequestDecoder
from headrace.frontend.http.process.engines import engine_for
from headrace.frontend.http.process.options import ServeOptions
from headrace.frontend.http.responses_api.create import ResponseParts
from headrace.frontend.http.responses_api.handlers import ResponsesState
from headrace.ipc.failure import EngineDeadError, Failure, HeadraceError, OptionError


def engine_source(arguments: argparse.Namespace) -> Source:
    """The engine that the arguments name. Raises OptionError for options that contradict each other."""
    options = options_from_arguments(arguments)
    if arguments.engine is None:
        child = start_engine(options)
        return Owned(lambda: start_engine(options), child, restarts=0)
    given = [flag(name) for name in option_specs(Options) if name in vars(arguments)]
    if given or getattr(arguments, "config", None):
        raise OptionError(
            f"--engine attaches to an engine that has its options; leave out {', '.join(given or ['--config'])}"
        )
    return Attached(arguments.engine, comes_back=False)  # its death ends the run


class BatchRun:
    """One run over an input file."""

    def __init__(
        self, path: Path, results: Results, max_concurrency: int | None, *, as_completed: bool = False
    ) -> None:
        """Results are written in the input's order, or `as_completed`."""
        self._path, self._results, self._max_concurrency = path, results, max_concurrency
        self._as_completed = as_completed
        self._waiting: dict[int, BatchResult | None] = {}  # for those of earlier requests, by place
        self._num_written = 0
        self._options = ServeOptions()
        self._num_answered = self._num_failed = self._num_skipped = 0
        self._pages = Pages()
        self._on_result: Callable[[], None] = _nothing

    async def run(self, source: Source) -> int:
        """The exit status. Raises HeadraceError when the engine does not start, or dies: what has a result then
        keeps it, and the rest can be resumed."""
        pool = EnginePool([source])
        pool.start()
        client: CoreClient | None = None
        try:
            await _first_of(pool.started, pool.dead)
            client = pool.engines[0].client
            if client is None:
                raise HeadraceError.from_failure(pool.failure or Failure(message="the engine did not start"))
            with self._progress():
                await self._run_lines(pool, self._max_concurrency or 2 * client.welcome.max_num_seqs)
        finally:
            if client is not None:
                await client.close()  # the pool forgets one whose engine has died
            await pool.close(STOP_DEADLINE_S)
        self._say_summary()
        return 1 if self._num_failed or self._results.num_errors else 0

    async def _run_lines(self, pool: EnginePool, bound: int) -> None:
        # Templates run in a sandbox, and whoever runs a batch has chosen its lines.
        options, bodies = self._options, LargeBodies(self._options.max_body_bytes)
        chat = ChatParts.of(options, ChatPrompts(None, trusts_requests=True))
        generator = Generator(
            KeepAlive(options.sse_keep_alive), options.request_timeout, self._pages, pool, bodies.threads
        )
        responses = ResponsesState(None, 0, ())
        answers = LineAnswers(
            ResponseParts(responses.store, responses.tool_servers, responses.left_out, chat, generator, bodies),
            RequestDecoder(strict=False),
            lambda model: self._engine_for(pool, model),
            done=[self._results],
        )
        try:
            await answers.run(read_lines(self._path), asyncio.Semaphore(bound), self._record)
        except* (HeadraceError, OSError) as group:
            raise _first_error(group) from None
        finally:
            for place in sorted(self._waiting):  # of a run that is cut short: they need not be run again
                self._write(self._waiting.pop(place))
            await responses.close()
            bodies.close()

    def _engine_for(self, pool: EnginePool, model: str | None) -> Engine:
        self._check_alive(pool)
        return engine_for(pool, model)

    def _check_alive(self, pool: EnginePool) -> None:
        """Its death ends the run, where a server would answer 503."""
        (only,) = pool.engines
        if only.client is None:
            raise EngineDeadError.from_failure(only.failure or Failure(message="the engine is gone"))
        only.client.check_alive()

    def _record(self, place: int, result: BatchResult | None) -> None:
        """`place` is the line's among those of the input."""
        if result is None:
            self._num_skipped += 1
        else:
            self._num_answered += result.error is None
            self._num_failed += result.error is not None
        self._on_result()
        if self._as_completed:
            self._write(result)
            return
        self._waiting[place] = result
        while self._num_written in self._waiting:
            self._write(self._waiting.pop(self._num_written))
            self._num_written += 1

    def _write(self, result: BatchResult | None) -> None:
        if result is not None:
            self._results.append(result)

    @contextlib.contextmanager
    def _progress(self) -> Iterator[None]:
        """A bar on stderr, where that is a terminal."""
        from tqdm import tqdm

        total = sum(1 for _ in read_lines(self._path))
        with tqdm(total=total, desc="Requests", unit="req", dynamic_ncols=True, disable=None, file=sys.stderr) as bar:

            def advance() -> None:
                elapsed_s = bar.format_dict["elapsed"] or 1e-9
                bar.set_postfix_str(f"{self._pages.num_generated(0) / elapsed_s:.1f} output tok/s", refresh=False)
                bar.update()

            self._on_result = advance
            yield

    def _say_summary(self) -> None:
        skipped = f", {self._num_skipped} had a result already" if self._num_skipped else ""
        if self._num_skipped and self._results.num_errors:
            skipped += f" ({self._results.num_errors} of them an error; without its line in the output one runs again)"
        print(
            f"run-batch: {self._num_answered} answered, {self._num_failed} failed{skipped}; "
            f"{self._pages.num_generated(0)} output tokens",
            file=sys.stderr,
        )


def _nothing() -> None:
    """Before the progress bar is there."""


async def _first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of several requests that one death ended, one says it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return HeadraceError(f"the run cannot go on: {error}") if isinstance(error, OSError) else error
