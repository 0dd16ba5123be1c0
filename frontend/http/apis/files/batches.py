"""Runs stored batches alongside the server's requests, with the code of `headrace run-batch`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time

import msgspec

from headrace.frontend.batch_file.file import BatchResult, Results, read_lines, why_none
from headrace.frontend.batch_file.lines import LineAnswers, Slots
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.files.store import (
    FIRST_RUN,
    RESULTS,
    BatchObject,
    ExpiresAfter,
    FileObject,
    FileStore,
    FullError,
    TakenError,
    error_name,
    fail,
    fail_by,
    output_name,
)
from headrace.frontend.http.apis.files.turns import Turns
from headrace.frontend.http.apis.responses.routes import ResponsesState
from headrace.frontend.http.server.api import ApiState
from headrace.frontend.http.server.engines import engine_for
from headrace.frontend.http.server.errors import ApiError
from headrace.frontend.http.server.shared_database import StoreError
from headrace.frontend.http.server.state import ServerState
from headrace.ipc.failure import EngineDeadError, HeadraceError, let_interrupts_pass

logger = logging.getLogger(__name__)
WINDOW_S = 24 * 3600.0
_LOOK_S = 1.0
"""How often results and counts are stored, and a cancellation of the batch is looked for."""


_TAKE_OVER_S = 5.0
"""How often to look for batches whose process has ended."""


class ResultFile:
    """A result file of a batch, with its answers or its errors. It is created with its first line."""

    def __init__(self, store: FileStore, tenant: str, name: str, expires_after: ExpiresAfter | None) -> None:
        self._store, self._tenant, self._name, self._expires_after = store, tenant, name, expires_after
        self.file: FileObject | None = None

    def reopen(self) -> Results | None:
        """An earlier run's results, if any. Runs in the store's thread. Raises HeadraceError for an invalid file."""
        file = self._store.results(self._tenant, self._name)
        if file is None or not self._store.path(file.id).exists():
            return None
        results = Results(self._store.path(file.id), resume=True)
        results.close()
        file.bytes = self._store.path(file.id).stat().st_size
        self._store.keep(self._tenant, file)
        self.file = file
        return results

    def append(self, lines: list[bytes]) -> None:
        """Writes lines to the file: all or, if it raises, none. Runs in the store's thread. Raises FullError if the
        store is full."""
        data = b"".join(lines)
        if not data:
            return
        if self.file is None:
            id = self._store.new_id()
            made = int(time.time())
            expires_at = None if self._expires_after is None else made + self._expires_after.seconds
            self.file = FileObject(
                id=id, bytes=0, created_at=made, filename=self._name, purpose=RESULTS, expires_at=expires_at
            )
        self._store.grow(self._tenant, self.file.id, len(data))
        path, size = self._store.path(self.file.id), self.file.bytes
        try:
            self._store.append(self.file.id, data)
            self.file.bytes = size + len(data)
            self._store.keep(self._tenant, self.file)
        except BaseException:
            self.file.bytes = size
            self._store.release(self.file.id)
            with contextlib.suppress(OSError):
                os.truncate(path, size)
            raise


class Batch:
    """A batch that runs in this process."""

    def __init__(self, state: ServerState, tenant: str, batch: BatchObject, run: int = FIRST_RUN) -> None:
        """run: the number of this run of the batch, from 1."""
        self._state, self._tenant, self.batch, self._run_number = state, tenant, batch, run
        store = state.of(FilesState).store
        self._store = store
        self._answers = ResultFile(store, tenant, output_name(batch.id), batch.output_expires_after)
        self._errors = ResultFile(store, tenant, error_name(batch.id), batch.output_expires_after)
        self._new: list[BatchResult] = []
        self._new_lines: tuple[list[bytes], list[bytes]] = ([], [])
        """Of the answers and of the errors, until they are written."""
        self._work: asyncio.Task[None] | None = None
        self.is_cancelled = False
        self._is_left = False
        """The batch is given up incomplete: another process may continue it, or this one when its engine is back."""

    def cancel(self) -> None:
        """Cancels the batch, at a client's request."""
        self.is_cancelled = True
        if self._work is not None:
            self._work.cancel()

    async def run(self) -> None:
        """Runs the batch until it has ended in any way, and stores the outcome."""
        batch = self.batch
        saving = asyncio.create_task(self._save_again_and_again())
        try:
            async with asyncio.timeout(max(0.0, batch.expires_at - time.time())):
                path = self._store.path(batch.input_file_id)
                if errors := await self._store.run(lambda: why_none(path, batch.endpoint)):
                    fail_by(batch, errors)
                    return
                await self._run()
            self._end("completed")
        except TimeoutError:
            self._end("expired")
        except asyncio.CancelledError:
            if self.is_cancelled:
                self._end("cancelled")
            else:
                self._is_left = True
        except (EngineDeadError, StoreError):
            self._is_left = True
        except (FullError, OSError) as error:
            self._failure = error
        except BaseException as error:
            let_interrupts_pass(error)
            if not isinstance(error, ApiError | HeadraceError):
                logger.exception("a batch could not be finished")
            answer = ApiError.of(error).body
            fail(batch, answer.code or "server_error", answer.message)
        finally:
            saving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await saving
            with contextlib.suppress(StoreError):  # a process takes the batch over when it is silent
                await self._finish()

    async def _run(self) -> None:
        state, batch = self._state, self.batch
        lines = await self._store.run(lambda: sum(1 for _ in read_lines(self._store.path(batch.input_file_id))))
        batch.request_counts.total = lines
        answered, errors = await self._store.run(lambda: (self._answers.reopen(), self._errors.reopen()))
        if answered is not None:
            batch.request_counts.completed = len(answered.done_ids)
        if errors is not None:
            batch.request_counts.failed = errors.num_errors
        batch.status, batch.in_progress_at = "in_progress", batch.in_progress_at or int(time.time())
        answers = LineAnswers(
            state.of(ResponsesState).parts,
            state.decoder,
            self._engine_for,
            tenant=self._tenant,
            url=batch.endpoint,
            done=[each for each in (answered, errors) if each is not None],
            decode=state.bodies.run,
            prepare=lambda body, make: state.finder.twice(lambda: state.bodies.run(body, make)),
        )
        path = self._store.path(batch.input_file_id)
        self._work = asyncio.create_task(
            answers.run(read_lines(path), state.of(FilesState).slots(self._tenant), self._record)
        )
        try:
            await self._work
        except* (ApiError, HeadraceError, OSError) as group:
            raise _first(group) from None
        finally:
            self._work.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._work
        batch.status, batch.finalizing_at = "finalizing", int(time.time())
        await self._write()

    def _engine_for(self, model: str | None) -> Engine:
        if self._state.draining:
            raise EngineDeadError("the server shuts down")
        return engine_for(self._state.pool, model)

    def _record(self, place: int, result: BatchResult | None) -> None:
        if result is None:
            return
        counts = self.batch.request_counts
        counts.completed += result.error is None
        counts.failed += result.error is not None
        self._new.append(result)

    async def _save_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._write()
                if not await self._store.put_batch(self._tenant, self.batch):
                    self.cancel()
            except StoreError:
                continue
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # what is not written would be lost, so the batch ends
                let_interrupts_pass(error)
                if self._work is not None:
                    self._failure = error
                    self._work.cancel()
                return

    _failure: BaseException | None = None
    """Why results could not be written."""

    async def _write(self) -> None:
        """Writes the results that have not been written. Raises FullError, TakenError, StoreError and OSError."""
        new, self._new = self._new, []
        for each in new:
            self._new_lines[each.error is not None].append(msgspec.json.encode(each) + b"\n")

        def write() -> None:
            self._store.check_run(self._tenant, self.batch.id, self._run_number)
            for results, lines in zip((self._answers, self._errors), self._new_lines, strict=True):
                count = len(lines)  # more may come meanwhile
                results.append(lines[:count])
                del lines[:count]

        await self._store.run(write)

    def _end(self, status: str) -> None:
        self.batch.status = status  # type: ignore[assignment]
        setattr(self.batch, f"{status}_at", int(time.time()))

    async def _finish(self) -> None:
        batch = self.batch
        try:
            await self._write()
        except StoreError:
            self._is_left = True
        except (HeadraceError, OSError) as error:
            self._failure = error
        if isinstance(self._failure, TakenError):
            return
        if self._is_left and self._failure is None:
            await self._store.leave_batch(self._tenant, batch)
            return
        if self._failure is not None:
            why = "file_store_full" if isinstance(self._failure, FullError) else "server_error"
            said = str(self._failure) if isinstance(self._failure, HeadraceError) else _why(self._failure)
            fail(batch, why, f"results could not be written: {said}")
        for results, name in ((self._answers, "output_file_id"), (self._errors, "error_file_id")):
            if results.file is not None and results.file.bytes:
                setattr(batch, name, results.file.id)
        await self._store.put_batch(self._tenant, batch)


def _why(error: BaseException) -> str:
    """Without the path, which is the server's own."""
    logger.warning("results of a batch could not be written: %s", error)
    return str(getattr(error, "strerror", None) or type(error).__name__)


def _first(group: BaseExceptionGroup[BaseException]) -> Exception:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = next((each for each in error.exceptions if isinstance(each, EngineDeadError)), error.exceptions[0])
    assert isinstance(error, Exception)
    return error


class FilesState(ApiState):
    """The state of files and batches in one HTTP process."""

    def __init__(self, state: ServerState) -> None:
        """Raises OptionError."""
        self._state = state
        self.store = FileStore(state.options.file_store, state.options.file_store_bytes, len(state.keys.tenants))
        state.of(ResponsesState)  # lines may create responses, so its store is closed after this one
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._batches: dict[str, Batch] = {}
        self._slots: Turns | None = None
        self._taking_over: asyncio.Task[None] | None = None

    def start(self, batch: Batch, most_in_flight: int) -> None:
        """most_in_flight: limit of all batches' running requests together, which leaves room for other requests."""
        if self._slots is None:
            self._slots = Turns(max(1, most_in_flight))
        id = batch.batch.id
        self._batches[id] = batch
        task = self._tasks[id] = asyncio.create_task(batch.run())
        task.add_done_callback(lambda task: self._ended(id, task))

    @classmethod
    def create(cls, state: ServerState) -> FilesState:
        return cls(state)

    def begin(self) -> None:
        """Begins to take over batches whose process or engine has ended, until `close`."""
        self._taking_over = asyncio.create_task(self._take_over_again_and_again())

    async def _take_over_again_and_again(self) -> None:
        pool = self._state.pool
        await pool.started.wait()
        while True:
            try:
                client = engine_for(pool, None).client
                if client is not None and not self._state.draining:
                    await self._take_over(client.welcome.max_num_seqs // 2)
            except asyncio.CancelledError:
                raise
            except ApiError:  # no engine is up
                pass
            except BaseException as error:  # the next look may find what this one could not
                let_interrupts_pass(error)
                logger.exception("no batch could be taken over")
            await asyncio.sleep(_TAKE_OVER_S)

    async def _take_over(self, most_in_flight: int) -> None:
        try:
            found = await self.store.take_over()
        except StoreError:  # which may work again later
            return
        for tenant, batch, run in found:
            logger.info("going on with %s, whose process or engine has ended", batch.id)
            self.start(Batch(self._state, tenant, batch, run), most_in_flight)

    def slots(self, tenant: str) -> Slots:
        assert self._slots is not None, "a batch runs, so one has begun"
        return self._slots.of(tenant)

    def cancel(self, id: str) -> None:
        if (batch := self._batches.get(id)) is not None:
            batch.cancel()

    async def close(self) -> None:
        """Gives up running batches; a process that opens the same store later continues them."""
        if self._taking_over is not None:
            self._taking_over.cancel()
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self.store.close()

    def _ended(self, id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(id) is task:  # this process may have taken it over again already
            del self._tasks[id], self._batches[id]
