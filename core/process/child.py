"""Starts, watches and stops child programs, and describes how they ended.

Children are programs, never forks of the user's interpreter, so scripts need no main guard, and stdin, a REPL and a
notebook work too. One thread per child starts it and watches it until it ends. The thread must live as long as the
child: PR_SET_PDEATHSIG fires when the *thread* that forked the child ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.options.model_path import check_path_exists
from headrace.core.options.values import plain_options
from headrace.core.process.child_output import ChildLog, LoadBar
from headrace.core.process.early import ENGINE, spawn, take_early
from headrace.core.process.installed import check_engine_is_installed
from headrace.ipc.codec import CodecError
from headrace.ipc.failure import EngineStartError, Failure, HeadraceError, ModelError, let_interrupts_pass
from headrace.ipc.messages import (
    SCHEMA_HASH,
    ChildFailed,
    ChildMessage,
    Message,
    Progress,
    Ready,
    Start,
    Stop,
    TokenizerInfo,
    TokenizerKnown,
    WeightsRead,
)
from headrace.ipc.process.proc import is_dying, oom_kill_count, status_of
from headrace.ipc.process.program import occupy_standard_descriptors
from headrace.ipc.process.runtime_directory import AddressError
from headrace.ipc.transport.channel import Channel, ChannelClosedError
from headrace.ipc.transport.sockets import new_ipc_address, remove_leftover, remove_leftovers_of
from headrace.ipc.wait import Deadline, WaitTimeoutError, open_pidfd

logger = logging.getLogger(__name__)
START_GRACE_S = 5.0
"""A parent waits for `startup_timeout` and this time: the engine may itself report which of its workers hangs."""
_READS_PATHS = ("auto", "uni", "mp")
"""Executors that read the model from this machine's files."""
STACKS_WITHIN_S = 2.0
"""How long a program that hangs may take to write its threads' stacks."""
_WHY_SIGBUS = (
    "that is the signal for a mapped file that has lost its end or cannot be read: a checkpoint that was written over "
    "while it was read, a disk that fails, or a full /dev/shm"
)
STOP_MESSAGE_S = 1.0
"""How long a child may take to read its Stop message."""
OnProgress = Callable[[Progress], None]
OnTokenizer = Callable[[TokenizerInfo], None]
"""Called with an engine's tokenizer, once it is known."""
OnExit = Callable[[Failure], None]


class ChildOptions(msgspec.Struct, frozen=True):
    """How a child is started and watched. The defaults are those of an engine core."""

    receives: Any = ChildMessage
    """The union of the messages that the child may send, which includes those of ChildMessage."""
    on_message: Callable[[Any], None] | None = None
    """Called on the watching thread with every message. `Child` itself handles only Progress, Ready and ChildFailed."""
    pass_fds: tuple[int, ...] = ()
    """File descriptors that the child inherits, under the same numbers."""
    process: str = ""
    """The process name in a Failure; empty for the child's name."""
    rank: int = 0
    startup_timeout_s: float | None = 3600.0
    """How long the child may take until it is ready; None: as long as it lives."""
    shows_loading: bool | None = False
    """Show a progress bar while the child reads weights. None: if stderr is a terminal."""
    bind: str | None = None
    """Where the child is to listen; empty for an address of its own choice, which it reports. Once it has ended, for
    any reason, the socket that a killed one leaves behind is removed. None: it does not listen."""


class Child:
    """One child program from start to end. Thread-safe."""

    def __init__(
        self, name: str, arguments: Sequence[str], start: Message, options: ChildOptions | None = None
    ) -> None:
        """Starts `python arguments...` with the channel's descriptor as its last argument, unless it was started early,
        and sends `start`."""
        self.name = name
        self.options = options or ChildOptions()
        self.ready: Ready | None = None
        self.failure: Failure | None = None
        self.pid = 0
        self.status: int | None = None
        """The exit status once it has ended; the negated number of a signal that killed it."""
        self.log = ChildLog()
        self._bar = LoadBar(self.options.shows_loading)  # for the watching thread
        self._phase = "start"
        self._stopping = self._signalled = False
        """_stopping: the child was asked to stop. _signalled: this object has sent it SIGKILL."""
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        self._exited = False
        self.keys: Path | None = None
        """Keys for the engine's address. None: those of HEADRACE_KEYS, which the child inherits."""
        self.weights_path = start.weights_path if isinstance(start, Start) else ""
        """Where an engine's weights come from, if not from its own model: an engine that replaces it needs them too."""
        self._news: list[Progress | TokenizerKnown] = []
        self._on_exit: list[OnExit] = []
        occupy_standard_descriptors()
        begin: Callable[[], subprocess.Popen[bytes]]
        if (early := take_early(arguments)) is not None:
            self._channel, begin = Channel(early.ours, self.options.receives), early.begun
        else:
            self._channel, theirs = Channel.pair(self.options.receives)
            begin = partial(spawn, arguments, theirs, self.options.pass_fds)
        self._oom_kills = oom_kill_count()
        self._spawn_error: OSError | None = None
        self._is_given_up = False
        """The start took too long, so the child is killed as soon as it exists."""
        self._thread = threading.Thread(target=self._run, args=(begin,), name=f"watch-{name}", daemon=True)
        self._thread.start()
        deadline = Deadline(self.options.startup_timeout_s)
        with self._changed:
            self._changed.wait_for(lambda: self.pid or self._spawn_error, deadline.remaining_s)
            self._is_given_up = not self.pid
        if self._spawn_error is not None:
            raise EngineStartError(f"{name} could not be started: {self._spawn_error}")
        if self._is_given_up:
            raise EngineStartError(f"{name} could not be started: {deadline.fail(f'executing {sys.executable}')}")
        try:
            self._channel.send(start, deadline)
        except ChannelClosedError:
            pass  # the watching thread reports a child that has already died
        except WaitTimeoutError as error:
            self.kill()
            raise EngineStartError(failure=self._failed("did not read what it is to start with", "Timeout")) from error

    def wait_ready(
        self,
        timeout_s: float | None = None,
        on_progress: OnProgress | None = None,
        on_tokenizer: OnTokenizer | None = None,
    ) -> Ready:
        """Waits for the child's Ready. Raises EngineStartError with the cause if it fails, ends, or is not ready in
        time; then it is killed.

        timeout_s: by default startup_timeout_s of its options and START_GRACE_S.
        """
        allowed_s = self.options.startup_timeout_s
        what = f"{allowed_s:g} s (startup_timeout)" if timeout_s is None and allowed_s else f"{timeout_s or 0:g} s"
        with_grace_s = None if allowed_s is None else allowed_s + START_GRACE_S
        deadline = Deadline(with_grace_s if timeout_s is None else timeout_s)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.ready or self.failure or self._news, deadline.remaining_s)
                news, self._news = self._news, []
                ready, failure = self.ready, self.failure
            for each in news:
                if isinstance(each, Progress) and on_progress is not None:
                    on_progress(each)
                elif isinstance(each, TokenizerKnown) and on_tokenizer is not None:
                    on_tokenizer(each.info)
            if failure:
                raise EngineStartError.from_failure(failure)
            if ready:
                return ready
            if deadline.passed:
                ask_for_stacks([self])
                hint = f"{self.name} is stopped by a signal or a debugger" if self.is_stopped else ""
                self.kill()
                raise EngineStartError(failure=self._failed(f"was not ready within {what}", "Timeout", hint))

    def send(self, message: Message, deadline: Deadline | None = None) -> None:
        """Sends the child a message. Raises ChannelClosedError if it is gone, WaitTimeoutError if it does not read the
        message in time."""
        self._channel.send(message, deadline)

    def on_exit(self, callback: OnExit) -> None:
        """Registers a callback for an unexpected end of the child. It is called once: on the watching thread, or at
        once if the child has already ended."""
        with self._changed:
            if not self._exited:
                self._on_exit.append(callback)
                return
            failure = self.failure
        if failure and self._is_unexpected:
            callback(failure)

    @property
    def alive(self) -> bool:
        return not self._exited

    @property
    def was_ready(self) -> bool:
        """It has sent its Ready, also where the watching thread has not come to that yet."""
        self._take_messages()
        return self.ready is not None

    @property
    def phase(self) -> str:
        """The phase that the child reported last."""
        return self._phase

    @property
    def log_tail(self) -> tuple[str, ...]:
        return self.log.tail

    @property
    def runs(self) -> bool:
        """The process is not about to end, as the system says now: `alive` holds until its end has been handled."""
        return self.alive and not is_dying(self.pid)

    @property
    def is_stopped(self) -> bool:
        """The process is stopped by a signal or a debugger."""
        status = status_of(self.pid)
        return status is not None and status.state in "Tt"

    def ask_to_stop(self, deadline_s: float) -> None:
        """Asks the child to finish its requests within `deadline_s` and exit. Does not wait for the exit."""
        self._stopping = True
        with contextlib.suppress(ChannelClosedError, WaitTimeoutError):  # the child is ending, or hangs
            self._channel.send(Stop(deadline_s=deadline_s), Deadline(STOP_MESSAGE_S))

    def stop(self, deadline_s: float = 5.0) -> None:
        """Asks the child to finish its requests within `deadline_s` and exit; kills it if it is alive 2 s later."""
        self.ask_to_stop(deadline_s)
        if not self._wait_exited(deadline_s + 2.0):
            self.kill()

    def kill(self) -> None:
        self._stopping = self._signalled = True
        self._signal(signal.SIGKILL)
        self._wait_exited(5.0)

    def left(self) -> None:
        """Nothing to do: a child that has ended as it was asked to leaves nothing."""

    def make_way(self) -> None:
        """Ends the child so that another can replace it. Same as `kill`: the replacement needs nothing of this one."""
        self.kill()

    @property
    def _is_unexpected(self) -> bool:
        """The end was unexpected: the child was not asked to stop, or another process killed it first."""
        return not self._stopping or (self.status is not None and self.status < 0 and not self._signalled)

    def _wait_exited(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._exited, timeout_s)

    def _signal(self, number: signal.Signals) -> None:
        """Sends a signal to the child's whole process group, which includes its own children."""
        with self._changed:
            if not self._exited and self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, number)

    def _run(self, begin: Callable[[], subprocess.Popen[bytes]]) -> None:
        try:
            process = begin()
        except OSError as error:
            with self._changed:
                self._spawn_error = error
                self._changed.notify_all()
            return
        with self._changed:
            self.pid = process.pid
            self._changed.notify_all()
            if self._is_given_up:
                self._stopping = self._signalled = True
                process.kill()
        pidfd = open_pidfd(process.pid)
        try:
            self._watch(process, pidfd)
        finally:
            os.close(pidfd)
        self._finish(process)

    def _watch(self, process: subprocess.Popen[bytes], pidfd: int) -> None:
        """Relays log lines and takes messages until the process has ended."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(pidfd, selectors.EVENT_READ)
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(self._channel, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if process.stdout.fileno() in ready and not self._relay(process.stdout.fileno()):
                    selector.unregister(process.stdout)
                if self._channel.fileno() in ready and not self._take_messages():
                    selector.unregister(self._channel)
                if pidfd in ready:
                    break
            # The last lines may explain why it ended. A grandchild may hold the pipe open, so do not block.
            os.set_blocking(process.stdout.fileno(), False)
            with contextlib.suppress(BlockingIOError):
                while self._relay(process.stdout.fileno()):
                    pass
            if self._channel.fileno() in selector.get_map():
                self._take_messages()

    def _relay(self, fd: int) -> bool:
        data = os.read(fd, 65536)
        self.log.take(data)
        return bool(data)

    def _take_messages(self) -> bool:
        """Takes those that are here. False: no more will come."""
        with self._reading:
            while True:
                try:
                    message: Message = self._channel.receive(Deadline(0.0))
                except WaitTimeoutError:
                    return True  # the rest is still to come, and the log and the process need attention
                except (ChannelClosedError, CodecError):
                    return False
                self._take(message)

    def _take(self, message: Message) -> None:
        with self._changed:
            if isinstance(message, Progress) and message.total_bytes:
                self._bar.read(message.read_bytes, message.total_bytes)
            elif isinstance(message, Progress):
                self._bar.close(is_done=True)
                self._phase = message.phase
                self._news.append(message)
            elif isinstance(message, TokenizerKnown):
                self._news.append(message)
            elif isinstance(message, Ready):
                self._phase = "serve"
                self.ready = message
            elif isinstance(message, WeightsRead):
                self.weights_path = message.path
            elif isinstance(message, ChildFailed):
                self.failure = message.failure
            self._changed.notify_all()
        if self.options.on_message is not None:
            try:
                self.options.on_message(message)
            except BaseException as error:  # without this thread nobody would learn of the child's end
                let_interrupts_pass(error)
                logger.exception("a message of %s could not be handled", self.name)

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._channel.close()
        self._bar.close(is_done=False)
        if self.options.bind is not None:
            bound = self.ready.address if self.ready else self.options.bind
            try:
                remove_leftover(bound) if bound else remove_leftovers_of(self.pid)
            except AddressError:
                pass  # there is no folder for sockets, so nothing is in it
            except (HeadraceError, OSError) as error:  # the end must still be reported to all that wait for it
                logger.warning("after the end of %s: %s", self.name, error)
        with self._changed:
            self._exited = True
            self.status = status
            if self.failure is None:
                self.failure = self._describe_end(status)
            failure, callbacks = self.failure, self._on_exit
            self._changed.notify_all()
        if self._is_unexpected:
            for callback in callbacks:
                callback(failure)

    def _describe_end(self, status: int) -> Failure:
        if status < 0:
            kind = signal.Signals(-status).name
            how = f"was killed by signal {-status} ({kind})"
            if -status == signal.SIGKILL and oom_kill_count() > self._oom_kills:
                how += "; the kernel reports that it ran out of memory"
            if -status == signal.SIGBUS:
                how += f"; {_WHY_SIGBUS}"
        else:
            kind = f"exit status {status}"
            how = f"ended with {kind}" + ("" if status else " without being asked to")
        return self._failed(how, kind)

    def _failed(self, how: str, kind: str, hint: str = "") -> Failure:
        return Failure(
            message=f"{self.name} (pid {self.pid}) {how}",
            type=kind,
            process=self.options.process or self.name,
            rank=self.options.rank,
            pid=self.pid,
            phase=self._phase,
            log_tail=self.log_tail,
            hint=hint,
        )


def ask_for_stacks(children: Sequence[Child]) -> None:
    """Makes children that seem to hang write their threads' stacks to their logs (SIGUSR1).

    Returns once they have done so, or after STACKS_WITHIN_S. Skips a child that has reported no phase yet, since
    without a handler the signal would kill it, and a stopped one.
    """
    deadline = Deadline(STACKS_WITHIN_S)
    asked = [child for child in children if child.alive and child.phase != "start" and not child.is_stopped]
    before = {child: child.log.num_stacks for child in asked}
    for child in before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGUSR1)
    for child, num_stacks in before.items():
        child.log.wait(num_stacks, deadline)


def start_engine(options: Options, address: str = "", weights_path: str = "") -> Child:
    """Starts an engine-core as a child, which ends when this process does. `wait_ready` returns its address.

    weights_path: where other engines of this model have had their weights read again, if they have.

    Raises EngineStartError where only the client is installed, and for a model's path where there is nothing.
    """
    check_engine_is_installed()
    if options.distributed_executor_backend in _READS_PATHS:
        try:
            check_path_exists(options.model or "")
        except ModelError as error:
            raise EngineStartError.from_failure(Failure.of(error, process="engine-core", phase="start")) from None
    start = Start(schema_hash=SCHEMA_HASH, options=plain_options(options), bind=address, weights_path=weights_path)
    child = ChildOptions(
        startup_timeout_s=options.startup_timeout, shows_loading=options.use_tqdm_on_load, bind=address
    )
    return Child("engine-core", ENGINE, start, child)


def start_coordinator(address: str = "") -> Child:
    """Starts a coordinator as a child, which ends when this process does. `wait_ready` returns its address.

    After its end another can be started at the same address: the address contains this process's id, which marks the
    socket as in use.
    """
    address = address or new_ipc_address("coordinator")
    start = Start(schema_hash=SCHEMA_HASH, options={}, bind=address)
    child = ChildOptions(bind=address)
    return Child("coordinator", ["-m", "headrace.core.coordinator.program"], start, child)
