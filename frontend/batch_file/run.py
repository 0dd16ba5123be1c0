"""Runs a batch file on an engine, with a limit on requests in flight.

Requests are decoded, checked and answered by the server's own code, so a batch gives the same answers as the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from headrace.core.options.parsing import given_options, options_from_arguments
from headrace.frontend.batch_file.file import BatchResult, Results, read_lines
from headrace.frontend.batch_file.lines import LineAnswers
from headrace.frontend.client.client import CONNECT_TIMEOUT_S
from headrace.frontend.client.own_engine import STOP_DEADLINE_S
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.fleet.requests import HELD_S
from headrace.frontend.fleet.sources import Attached
from headrace.frontend.fleet.start import pool_of
from headrace.frontend.http.apis import known_fields
from headrace.frontend.http.apis.openai.chat import ChatParts
from headrace.frontend.http.apis.responses.client_tools import LeftOut
from headrace.frontend.http.apis.responses.create import ResponseParts
from headrace.frontend.http.apis.responses.store import ResponseStore
from headrace.frontend.http.apis.responses.tool_servers import ToolServers
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.adapters import AdapterFinder
from headrace.frontend.http.server.decoding.decoder import RequestDecoder
from headrace.frontend.http.server.engines import engine_for
from headrace.frontend.http.server.event_stream import KeepAlive
from headrace.frontend.http.server.exchange import LargeBodies
from headrace.frontend.http.server.generation import Generator
from headrace.frontend.http.server.metrics import Pages
from headrace.frontend.text.chat_template import load_template
from headrace.frontend.text.template_renderer import without_blocking
from headrace.ipc.failure import EngineDeadError, Failure, HeadraceError, OptionError

DEFAULTS = ServeOptions()
_LOOK_S = 0.1
T = TypeVar("T")


def engines_of(arguments: argparse.Namespace) -> EnginePool:
    """The engines that the arguments describe. Raises OptionError for options that contradict each other."""
    options = options_from_arguments(arguments)
    given = given_options(arguments)
    if arguments.engine is not None:
        if given:
            raise OptionError(
                f"--engine attaches to an engine that has its options; leave out {', '.join(given.values())}"
            )
        return EnginePool([Attached(arguments.engine, comes_back=False)])  # its death ends the run
    if options.coordinator:
        needless = [written for name, written in given.items() if name not in ("coordinator", "peer_timeout")]
        if needless:
            raise OptionError(f"--coordinator finds engines, which have their options; leave out {', '.join(needless)}")
    return pool_of(options)


class BatchRun:
    """One run of an input file."""

    def __init__(
        self,
        path: Path,
        results: Results,
        max_concurrency: int | None,
        *,
        as_completed: bool = False,
        fails_on_error: bool = False,
        options: ServeOptions = DEFAULTS,
    ) -> None:
        """Results are written in the order of the input, or, with `as_completed`, when they are ready. options: those
        of a server's groups CHAT and ADAPTERS apply. Raises OptionError for a template or a format that is none."""
        self._path, self._results, self._max_concurrency = path, results, max_concurrency
        self._as_completed = as_completed
        self._waiting: dict[int, BatchResult | None] = {}  # results, by position, that wait for earlier ones
        self._num_written = 0
        self._fails_on_error, self._options = fails_on_error, options
        self._template = load_template(options.chat_template)
        self._num_answered = self._num_failed = self._num_skipped = 0
        self._pages = Pages()
        self._on_result: Callable[[], None] = _nothing

    async def run(self, pool: EnginePool) -> int:
        """Returns the exit status. Raises HeadraceError if the engines do not start, or the last one dies: the results
        so far are kept, and the rest can be resumed."""
        try:
            pool.meters = self._pages
            await pool.open(CONNECT_TIMEOUT_S)
            finder = AdapterFinder(pool, self._options)
            await finder.load_modules()
            capacity = sum(each.client.welcome.max_num_seqs for each in pool.engines if each.client is not None)
            with self._progress():
                await self._run_lines(pool, finder, self._max_concurrency or 2 * capacity)
        finally:
            await pool.close(STOP_DEADLINE_S)
        self._say_summary()
        return 1 if self._fails_on_error and (self._num_failed or self._results.num_errors) else 0

    async def _run_lines(self, pool: EnginePool, finder: AdapterFinder, bound: int) -> None:
        # The user who runs a batch has chosen its lines, so templates in them are trusted; they run in another process.
        options, bodies = self._options, LargeBodies(self._options.max_body_bytes)
        chat = ChatParts(options, self._template, trusts_requests=True)
        generator = Generator(
            KeepAlive(options.sse_keep_alive), options.request_timeout, self._pages, pool, bodies.threads
        )
        store = ResponseStore(None, 0)
        answers = LineAnswers(
            ResponseParts(store, ToolServers(()), LeftOut(strict=False), chat, generator, bodies),
            RequestDecoder(strict=False, others=known_fields()),
            lambda model: self._engine_for(pool, model),
            done=[self._results],
            prepare=lambda body, make: finder.twice(lambda: self._prepare(pool, body, make)),
        )
        try:
            await answers.run(read_lines(self._path), asyncio.Semaphore(bound), self._record)
        except* (HeadraceError, OSError) as group:
            raise _first_error(group) from None
        finally:
            for place in sorted(self._waiting):  # after an interruption, so that they need not be run again
                self._write(self._waiting.pop(place))
            store.close()
            bodies.close()

    def _engine_for(self, pool: EnginePool, model: str | None) -> Engine:
        self._check_alive(pool)
        return engine_for(pool, model)

    async def _prepare(self, pool: EnginePool, body: bytes, make: Callable[[bytes], T]) -> T:
        """Prepares a line once an engine is there: while the last one restarts, new lines wait as running ones do."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HELD_S):
                while not any(each.usable for each in pool.engines) and self._may_return(pool):
                    await asyncio.sleep(_LOOK_S)
        return await without_blocking(lambda: make(body))

    @staticmethod
    def _may_return(pool: EnginePool) -> bool:
        return not pool.dead.is_set() and any(each.source.comes_back for each in pool.engines)

    @staticmethod
    def _check_alive(pool: EnginePool) -> None:
        """Ends the run when the last engine has died, where a server would respond with 503."""
        if any(each.usable for each in pool.engines):
            return
        for each in pool.engines:
            if each.client is not None:
                each.client.check_alive()
        failures = (each.failure for each in pool.engines)
        raise EngineDeadError.from_failure(next(filter(None, failures), Failure(message="no engine is there")))

    def _record(self, place: int, result: BatchResult | None) -> None:
        """place: the line's position in the input."""
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
        """Shows a progress bar on stderr, if that is a terminal."""
        from tqdm import tqdm

        total = sum(1 for _ in read_lines(self._path))
        with tqdm(total=total, desc="Requests", unit="req", dynamic_ncols=True, disable=None, file=sys.stderr) as bar:

            def advance() -> None:
                elapsed_s = bar.format_dict["elapsed"] or 1e-9
                bar.set_postfix_str(f"{self._pages.num_generated() / elapsed_s:.1f} output tok/s", refresh=False)
                bar.update()

            self._on_result = advance
            yield

    def _say_summary(self) -> None:
        skipped = f", {self._num_skipped} had a result already" if self._num_skipped else ""
        if self._num_skipped and self._results.num_errors:
            skipped += f" ({self._results.num_errors} of them an error; without its line in the output one runs again)"
        print(
            f"run-batch: {self._num_answered} answered, {self._num_failed} failed{skipped}; "
            f"{self._pages.num_generated()} output tokens",
            file=sys.stderr,
        )


def _nothing() -> None:
    """Used before the progress bar exists."""


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """One of the errors: several requests may have failed because of the same death."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return HeadraceError(f"the run cannot go on: {error}") if isinstance(error, OSError) else error
