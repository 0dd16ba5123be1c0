"""Starts, watches and stops child programs, and says in words how they ended.

Children are programs, never forks of the user's interpreter, so no main guard is needed and it works from stdin,
a REPL and a notebook. One thread per child starts it and watches it to its end. That thread is the child's
parent in the kernel's eyes: PR_SET_PDEATHSIG fires when the *thread* that forked ends, so it must live as long.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.options.values import plain_options
from headrace.core.process.child_output import ChildLog, LoadBar
from headrace.ipc.codec import CodecError
from headrace.ipc.failure import EngineStartError, Failure, HeadraceError
from headrace.ipc.messages import (
    SCHEMA_HASH,
    ChildFailed,
    ChildMessage,
    Message,
    Progress,
    Ready,
    Start,
    Stop,
)
from headrace.ipc.process.proc import oom_kill_count, status_of
from headrace.ipc.transport.channel import Channel, ChannelClosedError
from headrace.ipc.transport.sockets import new_ipc_address, sweep_sockets
from headrace.ipc.wait import Deadline, WaitTimeoutError, open_pidfd

logger = logging.getLogger(__name__)
START_GRACE_S = 5.0
"""By how much a parent's patience outlasts `startup_timeout`, as an engine may notice which of its workers hangs."""
STACKS_WITHIN_S = 2.0
"""How long a program that hangs may take to write where its threads are."""
STOP_MESSAGE_S = 1.0
"""How long a child may take to read what it is sent at its end."""
OnProgress = Callable[[Progress], None]
OnExit = Callable[[Failure], None]


class ChildOptions(msgspec.Struct, frozen=True):
    """How a child is started and watched. The defaults are those of an engine core."""

    receives: Any = ChildMessage
    """The union of what it may send; ChildMessage at least."""
    on_message: Callable[[Any], None] | None = None
    """Called from the watching thread with every message; one that is neither Progress, Ready nor ChildFailed is for
    nobody else."""
    pass_fds: tuple[int, ...] = ()
    """Descriptors that the child inherits, under the same numbers."""
    process: str = ""
    """What it is called in a Failure; its name, when empty."""
    rank: int = 0
    startup_timeout_s: float = 3600.0
    """How long it may take until it is ready."""
    shows_loading: bool | None = False
    """A bar while it reads weights; None is where stderr is a terminal."""
    at_end: Callable[[], object] | None = None
    """Called from the watching thread once it has ended, in whatever way."""


class Child:
    """One child program from start to end. Thread-safe."""

    def __init__(self, name: str, arguments: list[str], start: Message, options: ChildOptions | None = None) -> None:
        """Starts `python arguments...` with the channel's descriptor as its last argument, and sends `start`."""
        self.name = name
        self.options = options or ChildOptions()
        self.ready: Ready | None = None
        self.failure: Failure | None = None
        self.pid = 0
        self.status: int | None = None
        """Its exit status once it has ended; a signal's number, negative, if that ended it."""
        self.log = ChildLog()
        self._bar = LoadBar(self.options.shows_loading)  # for the watching thread
        self._arguments = arguments
        self._phase = "start"
        self._stopping = self._signalled = False
        """It was asked to stop; it was sent a signal that ends it."""
        self._changed = threading.Condition()
        self._exited = False
        self.keys: Path | None = None
        """An engine's address needs no other keys than HEADRACE_KEYS names: it inherits that."""
        self._progress: list[Progress] = []
        self._on_exit: list[OnExit] = []
        self._channel, theirs = Channel.pair(self.options.receives)
        self._oom_kills = oom_kill_count()
        self._spawn_error: OSError | None = None
        self._is_given_up = False
        """Nobody waits any more for it to be there."""
        self._thread = threading.Thread(target=self._run, args=(theirs,), name=f"watch-{name}", daemon=True)
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
            pass  # a child that died already is reported by the watcher
        except WaitTimeoutError as error:
            self.kill()
            raise EngineStartError(failure=self._failed("did not read what it is to start with", "Timeout")) from error

    def wait_ready(self, timeout_s: float | None = None, on_progress: OnProgress | None = None) -> Ready:
        """The child's Ready. Raises EngineStartError with its cause when it fails, ends, or is not ready in time.

        `timeout_s` is by default what its options allow it; a child that is not ready then is ended.
        """
        allowed_s = self.options.startup_timeout_s
        what = f"{allowed_s:g} s (startup_timeout)" if timeout_s is None else f"{timeout_s:g} s"
        deadline = Deadline(allowed_s + START_GRACE_S if timeout_s is None else timeout_s)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.ready or self.failure or self._progress, deadline.remaining_s)
                news, self._progress = self._progress, []
                ready, failure = self.ready, self.failure
            for progress in news if on_progress else ():
                on_progress(progress)  # type: ignore[misc]
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
        """Raises ChannelClosedError when it is gone, WaitTimeoutError when it does not take it in time."""
        self._channel.send(message, deadline)

    def on_exit(self, callback: OnExit) -> None:
        """Calls back once, from another thread, when the child ends without having been asked to."""
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
    def phase(self) -> str:
        """What it was doing when it last said so."""
        return self._phase

    @property
    def log_tail(self) -> tuple[str, ...]:
        return self.log.tail

    @property
    def is_stopped(self) -> bool:
        """By a signal or a debugger, so that it does nothing."""
        status = status_of(self.pid)
        return status is not None and status.state in "Tt"

    def ask_to_stop(self, deadline_s: float) -> None:
        """Tells it to finish what runs within `deadline_s` and exit, and does not wait for that."""
        self._stopping = True
        with contextlib.suppress(ChannelClosedError, WaitTimeoutError):  # then it is ending, or hangs
            self._channel.send(Stop(deadline_s=deadline_s), Deadline(STOP_MESSAGE_S))

    def stop(self, deadline_s: float = 5.0) -> None:
        """Asks the child to finish what runs within `deadline_s` and exit; kills it a little after that."""
        self.ask_to_stop(deadline_s)
        if not self._wait_exited(deadline_s + 2.0):
            self.kill()

    def kill(self) -> None:
        self._stopping = self._signalled = True
        self._signal(signal.SIGKILL)
        self._wait_exited(5.0)

    def make_way(self) -> None:
        """As `kill`: this child has nothing that another in its place would need."""
        self.kill()

    @property
    def _is_unexpected(self) -> bool:
        """Its end: it was not asked for, or another's signal came before it."""
        return not self._stopping or (self.status is not None and self.status < 0 and not self._signalled)

    def _wait_exited(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._exited, timeout_s)

    def _signal(self, number: signal.Signals) -> None:
        """To the child's whole process group, so that its own children go too."""
        with self._changed:
            if not self._exited and self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, number)

    def _run(self, theirs: socket.socket) -> None:
        try:
            process = subprocess.Popen(
                [sys.executable, *self._arguments, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno(), *self.options.pass_fds],
                start_new_session=True,  # the terminal's Ctrl-C is for the parent, which stops the child in order
            )
        except OSError as error:
            with self._changed:
                self._spawn_error = error
                self._changed.notify_all()
            return
        finally:
            theirs.close()
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
                if self._channel.fileno() in ready and not self._take_message():
                    selector.unregister(self._channel)
                if pidfd in ready:
                    break
            # What it wrote last explains why it ended; a grandchild may hold the pipe open, so never block.
            os.set_blocking(process.stdout.fileno(), False)
            with contextlib.suppress(BlockingIOError):
                while self._relay(process.stdout.fileno()):
                    pass
            while selector.get_map().get(self._channel.fileno()) and _readable(self._channel.fileno()):
                if not self._take_message():
                    break

    def _relay(self, fd: int) -> bool:
        data = os.read(fd, 65536)
        self.log.take(data)
        return bool(data)

    def _take_message(self) -> bool:
        try:
            message: Message = self._channel.receive(Deadline(0.0))
        except WaitTimeoutError:
            return True  # a part of one; the rest is still to come, and its log and its end are watched meanwhile
        except (ChannelClosedError, CodecError):
            return False
        with self._changed:
            if isinstance(message, Progress) and message.total_bytes:
                self._bar.read(message.read_bytes, message.total_bytes)
            elif isinstance(message, Progress):
                self._bar.close(is_done=True)
                self._phase = message.phase
                self._progress.append(message)
            elif isinstance(message, Ready):
                self._phase = "serve"
                self.ready = message
            elif isinstance(message, ChildFailed):
                self.failure = message.failure
            self._changed.notify_all()
        if self.options.on_message is not None:
            self.options.on_message(message)
        return True

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._channel.close()
        self._bar.close(is_done=False)
        if self.options.at_end is not None:
            try:
                self.options.at_end()
            except (HeadraceError, OSError) as error:  # whoever waits for the end must hear of it all the same
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
    """Has programs that seem to hang write to their logs where their threads are.

    Returns once they have, or have not within STACKS_WITHIN_S. One that has said nothing yet is not asked, as the
    signal might be its end, nor is one that is stopped.
    """
    deadline = Deadline(STACKS_WITHIN_S)
    asked = [child for child in children if child.alive and child.phase != "start" and not child.is_stopped]
    before = {child: child.log.num_stacks for child in asked}
    for child in before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGUSR1)
    for child, num_stacks in before.items():
        child.log.wait(num_stacks, deadline)


def start_engine(options: Options, address: str = "") -> Child:
    """Starts an engine-core of one's own: it ends when this process does. `wait_ready` gives its address."""
    start = Start(schema_hash=SCHEMA_HASH, options=plain_options(options), bind=address)
    # One that is killed leaves its socket.
    child = ChildOptions(
        startup_timeout_s=options.startup_timeout, shows_loading=options.use_tqdm_on_load, at_end=sweep_sockets
    )
    return Child("engine-core", ["-m", "headrace.core.process.daemon", "--parent-fd"], start, child)


def start_coordinator(address: str = "") -> Child:
    """A coordinator of one's own: it ends when this process does. `wait_ready` gives its address.

    Another may be started there: the address has this process's number, by which a socket is known to be in use.
    """
    address = address or new_ipc_address("coordinator")
    start = Start(schema_hash=SCHEMA_HASH, options={}, bind=address)
    return Child("coordinator", ["-m", "headrace.core.coordinator.program"], start, ChildOptions(at_end=sweep_sockets))


def _readable(fd: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(0))
