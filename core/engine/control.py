"""Carries out control commands (ipc/control.py) in the core, on the loop's thread and with no step in flight."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.core.engine.timeline import Timeline
from headrace.core.options.engine_options import Options
from headrace.core.options.memory import cache_size
from headrace.core.options.plan import Facts, Plan
from headrace.core.options.values import shown_options
from headrace.core.schedule.scheduler import Scheduler
from headrace.ipc.control import (
    ASLEEP,
    CallExtension,
    Commands,
    ControlResult,
    DescribeEngine,
    EngineReport,
    ExtensionAnswers,
    PauseGeneration,
    PrepareWeights,
    ProfileFiles,
    ReloadWeights,
    ResetMMCache,
    ResumeGeneration,
    Sleep,
    StartProfile,
    StopProfile,
    UseWeights,
    WakeUp,
    WorkerAnswer,
    WorkerCommand,
)
from headrace.ipc.failure import EngineDeadError, Failure, HeadraceError, OptionError
from headrace.ipc.messages import Reply
from headrace.ipc.wait import BoundedCalls, WaitTimeoutError

logger = logging.getLogger(__name__)

_PREFIX = re.compile(r"[A-Za-z0-9_-]{0,64}")
_PROFILER_KEYS = ("profiler", "torch_profiler_dir")


class Controlled(Protocol):
    """The part of an Executor that carries out commands."""

    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]: ...


class Pause:
    """State of a pause: running, finishing present requests before a pause (mode `wait`), or paused.

    A pause continues even if the client that asked for it leaves.
    """

    def __init__(self, scheduler: Scheduler, reached: Callable[[int, int, PauseGeneration | Sleep], None]) -> None:
        """reached: called with client, call and command of each caller when the pause is reached or cancelled."""
        self._scheduler, self._reached = scheduler, reached
        self._asked: PauseGeneration | Sleep | None = None
        self._callers: list[tuple[int, int, PauseGeneration | Sleep]] = []  # client, call, command; not answered yet
        self.is_reached = False
        """No step is planned, even if requests wait."""

    @property
    def is_asked(self) -> bool:
        return self._asked is not None

    @property
    def is_for_sleep(self) -> bool:
        """Only Sleep has asked for the pause, not PauseGeneration."""
        return isinstance(self._asked, Sleep)

    @property
    def is_awaited(self) -> bool:
        """A caller waits for the pause to be reached."""
        return bool(self._callers)

    def ask(self, client: int, call: int, command: PauseGeneration | Sleep) -> None:
        """Begins a pause. With mode `wait`, present requests are still planned; with other modes no step may be in
        flight."""
        if not (self.is_asked and isinstance(command, Sleep)):
            self._asked = command
        self._callers.append((client, call, command))
        if command.mode == "wait":
            self._scheduler.waiting.hold()
        else:
            self.is_reached = True

    def reach(self) -> None:
        """The pause is reached, or was cancelled: answers the callers."""
        if self._asked is not None:
            self.is_reached = True
            if self._asked.clear_cache:
                forget_computed(self._scheduler)
        callers, self._callers = self._callers, []
        for client, call, command in callers:
            self._reached(client, call, command)

    def resume(self) -> None:
        """Ends the pause, or cancels it if it is not reached yet."""
        self._asked, self.is_reached = None, False
        self._scheduler.waiting.release()
        self.reach()


class Controller:
    """Carries out control commands and answers them. Used only by the loop's thread."""

    def __init__(
        self, plan: Plan, facts: Facts, executor: Controlled, scheduler: Scheduler, reply: Callable[[int, Reply], None]
    ) -> None:
        """reply: sends a Reply to a client."""
        self._plan, self._facts, self._executor = plan, facts, executor
        self._scheduler, self._reply = scheduler, reply
        self.pause = Pause(scheduler, self._pause_reached)
        self.asleep: frozenset[str] = frozenset()
        """The parts (tags of WakeUp) that are asleep now."""
        self._level = 0
        """The level of the last Sleep."""
        self._bounded = BoundedCalls(plan.options.control_timeout)
        self._folder = profile_folder(plan.options)
        self._prefix = ""
        self.timeline: Timeline | None = None
        """The profile being recorded, or None."""
        self.on_weights: Callable[[str], None] = lambda weights: None
        """Called when the executor's weights have changed, with the new WorkerAnswer.weights."""
        self.on_weights_path: Callable[[str], None] = lambda path: None
        """Called with the path of each ReloadWeights that was carried out."""
        self._weights = plan.model.weights
        self._prepared: tuple[int, str] | None = None
        """The ranks have weights beside those in use: the client that had them read, and their path."""
        self.can_compute = True
        """Not while new weights have the memory of those in use."""

    def carry_out(self, client: int, call: int, command: Commands) -> None:
        """Carries out and answers a command; no step may be in flight. One that fails changes nothing and is answered
        with the reason.

        Raises EngineDeadError, after the answer, if the executor is found dead.
        """
        result, failure, death = None, None, None
        try:
            result = self._result_of(client, command)
        except HeadraceError as error:
            failure = Failure.of(error, process="engine-core", phase="control")
            death = error if isinstance(error, EngineDeadError) else None
        if failure is None and (_changes_weights(command) or isinstance(command, Sleep)):
            forget_computed(self._scheduler)
        # A sleep that failed ends its pause too.
        slept = isinstance(command, Sleep | WakeUp) and self.pause.is_for_sleep and not self.asleep
        if slept or (failure is None and isinstance(command, ResumeGeneration)):
            self.pause.resume()
        self._reply(client, Reply(call=call, result=result, failure=failure))
        if death is not None:  # the client has its answer before the engine ends
            raise death

    @property
    def stands_still(self) -> bool:
        """No step may be planned, even if requests wait."""
        return self.pause.is_reached or not self.can_compute

    @property
    def sleep_level(self) -> int:
        """The level of the present sleep; 0 if nothing is asleep."""
        return self._level if self.asleep else 0

    def _pause_reached(self, client: int, call: int, command: PauseGeneration | Sleep) -> None:
        if isinstance(command, PauseGeneration):
            self._reply(client, Reply(call=call))
        elif self.pause.is_reached:
            self.carry_out(client, call, command)
        else:
            failure = Failure(message="generation was resumed before the engine could sleep", phase="control")
            self._reply(client, Reply(call=call, failure=failure))

    # --- each command -------------------------------------------------------------------------------------------

    def _result_of(self, client: int, command: Commands) -> ControlResult | None:
        """Carries out a command. Raises HeadraceError, with the state unchanged, if it cannot be done."""
        match command:
            case StartProfile():
                self._start_profile(command)
            case StopProfile():
                return self._stop_profile(command)
            case DescribeEngine():
                return self._describe(command)
            case CallExtension():
                return ExtensionAnswers(payloads=tuple(a.payload for a in self._executor.control(command)))
            case ReloadWeights(part="prepare"):
                self._prepare_weights(client, command.path)
            case ReloadWeights(part="forget"):
                self.forget_weights_of(client)
            case ReloadWeights():
                if not command.part:
                    self._prepare_weights(client, command.path)
                elif self._prepared is None:
                    raise HeadraceError("no weights are prepared here: the engine has slept or was started since")
                elif self._prepared != (client, command.path):
                    raise HeadraceError("other weights are prepared here: another reload_weights is under way")
                self._use_weights(prepared=True)
                self.on_weights_path(command.path)
            case Sleep():
                self._sleep(command)
            case WakeUp():
                self._note_weights(self._executor.control(command))
                self.asleep -= set(command.tags) or ASLEEP
            case ResetMMCache():
                pass  # no model of this version has such a cache
            case ResumeGeneration() if self.asleep:
                raise HeadraceError("the engine is sleeping and cannot compute; wake_up resumes it")
        return None

    def _sleep(self, command: Sleep) -> None:
        if not self._plan.options.enable_sleep_mode:
            raise HeadraceError("this engine was started without enable_sleep_mode, so it cannot be put to sleep")
        if self.asleep:
            logger.warning("sleep has no effect: the engine is asleep already (%s)", ", ".join(sorted(self.asleep)))
            return
        if self._prepared is not None:
            self._use_weights(prepared=False)
        try:
            self._executor.control(command)
        except EngineDeadError:
            raise
        except HeadraceError:
            self._executor.control(WakeUp())  # wakes the ranks that are already asleep
            raise
        self.asleep, self._level = ASLEEP, command.level

    def reload_weights(self, path: str) -> None:
        """Of no client. Raises HeadraceError; the old weights stay in use then."""
        self._prepare_weights(0, path)
        self._use_weights(prepared=True)

    def has_prepared_for(self, client: int) -> bool:
        """The ranks have weights beside those in use, which this client had them read."""
        return self._prepared is not None and self._prepared[0] == client

    def forget_weights_of(self, client: int) -> None:
        """Drops the weights that this client had read, if it still waits with their use. No step may be in flight."""
        if self.has_prepared_for(client):
            self._use_weights(prepared=False)

    def _prepare_weights(self, client: int, path: str) -> None:
        """Raises HeadraceError; no rank has them then."""
        if "weights" in self.asleep:
            raise HeadraceError("the weights sleep, and cannot be changed; wake them with wake_up(tags=['weights'])")
        if self._prepared is not None and self._prepared[0] != client:
            raise HeadraceError("another client's reload_weights is under way: call it again once that has ended")
        if self._prepared is not None:
            self._use_weights(prepared=False)
        try:
            answers = self._executor.control(PrepareWeights(path=path))
        except EngineDeadError:
            raise
        except HeadraceError:  # some ranks may have read them
            self._use_weights(prepared=False)
            raise
        self._prepared, self.can_compute = (client, path), all(each.can_compute for each in answers)

    def _use_weights(self, *, prepared: bool) -> None:
        self._prepared = None
        self._note_weights(self._executor.control(UseWeights(prepared=prepared)))
        self.can_compute = True

    def _note_weights(self, answers: Sequence[WorkerAnswer]) -> None:
        weights = answers[0].weights if answers else ""
        if weights and weights != self._weights:
            self._weights = weights
            self.on_weights(weights)

    def _start_profile(self, command: StartProfile) -> None:
        if self._folder is None:
            raise HeadraceError(
                "this engine has no folder for profiles: start it with "
                "--profiler-config.torch_profiler_dir FOLDER (a client may not name one)"
            )
        if self.timeline is not None:
            raise HeadraceError("a profile is being recorded already; stop it first")
        if not _PREFIX.fullmatch(command.prefix):
            raise HeadraceError(
                f"the prefix {command.prefix!r:.100} begins file names: use up to 64 letters, digits, - and _"
            )
        try:
            self._bounded.run(
                "making the profile folder",
                functools.partial(self._folder.mkdir, mode=0o700, parents=True, exist_ok=True),
            )
        except WaitTimeoutError:
            raise
        except OSError as error:
            raise HeadraceError(f"the profile folder {self._folder} cannot be made: {error.strerror}") from error
        self._executor.control(command)
        self._prefix = f"{command.prefix}-" if command.prefix else ""
        self.timeline = Timeline()

    def _stop_profile(self, command: StopProfile) -> ProfileFiles:
        if self.timeline is None or self._folder is None:
            raise HeadraceError("no profile is being recorded; start one first")
        timeline, self.timeline = self.timeline, None
        answers = self._executor.control(command)  # stops the workers' recording even if the core's file fails
        path = self._folder / f"{self._prefix}core-{os.getpid()}.json"
        try:
            self._bounded.run("writing the profile", timeline.write, path)
        except WaitTimeoutError:
            raise
        except OSError as error:
            raise HeadraceError(f"the profile {path} cannot be written: {error.strerror}") from error
        return ProfileFiles(paths=(str(path), *(file for answer in answers for file in answer.files)))

    def _describe(self, command: DescribeEngine) -> EngineReport:
        facts: dict[str, Any] = msgspec.to_builtins(self._facts)
        facts["kv_cache_tokens"], facts["kv_cache_requests"] = cache_size(self._facts, self._plan)
        return EngineReport(
            options=shown_options(self._plan.options),
            decisions=tuple((d.name, d.value, d.reason) for d in self._plan.decisions),
            facts=facts,
            workers=tuple({"rank": answer.rank, **answer.facts} for answer in self._executor.control(command)),
        )


def forget_computed(scheduler: Scheduler) -> None:
    """Drops all keys and values; running requests are preempted and recompute theirs. No step may be in flight."""
    for row in scheduler.rows.active.nonzero()[0].tolist():
        scheduler.preempt(row)
    scheduler.pool.reset_cache()


def profile_folder(options: Options) -> Path | None:
    """The folder for profiles, or None if the options name none. Raises OptionError for invalid settings."""
    settings = options.profiler_config
    unknown = [key for key in settings if key not in _PROFILER_KEYS]
    if unknown:
        raise OptionError(f"profiler_config has no {', '.join(unknown)}; it has {' and '.join(_PROFILER_KEYS)}")
    if settings.get("profiler", "torch") != "torch":
        raise OptionError(f"profiler_config.profiler is {settings['profiler']!r}; it must be torch")
    folder = settings.get("torch_profiler_dir")
    if folder is None:
        return None
    if not isinstance(folder, str) or not folder:
        raise OptionError(f"profiler_config.torch_profiler_dir is {folder!r}; it must be a folder's path")
    return Path(folder).absolute()


def _changes_weights(command: Commands) -> bool:
    return isinstance(command, ReloadWeights) and command.part in ("", "use")
