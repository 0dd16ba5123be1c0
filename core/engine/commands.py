"""Commands of the control channel that concern more than the loop. They come between steps, with none in flight."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.core.engine.timeline import Timeline
from headrace.core.options.engine_options import Options
from headrace.core.options.plan import Facts, Plan
from headrace.ipc.control import (
    ASLEEP,
    CallExtension,
    ControlResult,
    DescribeEngine,
    EngineReport,
    ExtensionAnswers,
    PrepareWeights,
    ProfileFiles,
    ReloadWeights,
    ResumeGeneration,
    Sleep,
    StartProfile,
    StopProfile,
    UseWeights,
    WakeUp,
    WorkerAnswer,
    WorkerCommand,
)
from headrace.ipc.control import (
    Commands as Command,
)
from headrace.ipc.failure import HeadraceError, OptionError

logger = logging.getLogger(__name__)

_NO_SPAN = contextlib.nullcontext()
_PREFIX = re.compile(r"[A-Za-z0-9_-]{0,64}")
_PROFILER_KEYS = ("profiler", "torch_profiler_dir")


class Controlled(Protocol):
    """The part of an Executor that carries out commands."""

    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]: ...


class Commands:
    """For the loop's thread."""

    def __init__(self, plan: Plan, facts: Facts, executor: Controlled) -> None:
        self._plan, self._facts, self._executor = plan, facts, executor
        self._folder = profile_folder(plan.options)
        self.timeline: Timeline | None = None
        """Being recorded; None without a profile under way."""
        self.asleep: frozenset[str] = frozenset()
        """What sleeps: weights, kv_cache."""
        self._prefix = ""

    def span(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Around what the loop does, for the profile if there is one."""
        return _NO_SPAN if self.timeline is None else self.timeline.span(name)

    def carry_out(self, command: Command) -> ControlResult | None:
        """The Reply's result. Raises HeadraceError, with everything as it was before, when it cannot be done."""
        match command:
            case StartProfile():
                self._start_profile(command)
            case StopProfile():
                return self._stop_profile(command)
            case DescribeEngine():
                return self._report(command)
            case CallExtension():
                return ExtensionAnswers(payloads=tuple(a.payload for a in self._executor.control(command)))
            case ReloadWeights():
                self._reload_weights(command)
            case Sleep():
                self._sleep(command)
            case WakeUp():
                self._executor.control(command)
                self.asleep -= set(command.tags) or ASLEEP
            case ResumeGeneration() if self.asleep:
                raise HeadraceError("the engine sleeps, and cannot compute; wake_up takes its memory again and resumes")
        return None

    def _sleep(self, command: Sleep) -> None:
        if not self._plan.options.enable_sleep_mode:
            raise HeadraceError("this engine was started without enable_sleep_mode, so it cannot be put to sleep")
        if self.asleep:
            logger.warning("asked to sleep, and does already (%s)", ", ".join(sorted(self.asleep)))
            return
        try:
            self._executor.control(command)
        except HeadraceError:
            self._executor.control(WakeUp())  # the ranks that had fallen asleep
            raise
        self.asleep = ASLEEP

    def _reload_weights(self, command: ReloadWeights) -> None:
        if "weights" in self.asleep:
            raise HeadraceError("the weights sleep, and cannot be changed; wake them with wake_up(tags=['weights'])")
        try:
            self._executor.control(PrepareWeights(path=command.path))
        except HeadraceError:
            self._executor.control(UseWeights(prepared=False))
            raise
        self._executor.control(UseWeights(prepared=True))

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
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HeadraceError(f"the profile folder {self._folder} cannot be made: {error.strerror}") from error
        self._executor.control(command)
        self._prefix = f"{command.prefix}-" if command.prefix else ""
        self.timeline = Timeline()

    def _stop_profile(self, command: StopProfile) -> ProfileFiles:
        if self.timeline is None or self._folder is None:
            raise HeadraceError("no profile is being recorded; start one first")
        timeline, self.timeline = self.timeline, None
        path = self._folder / f"{self._prefix}core-{os.getpid()}.json"
        try:
            timeline.write(path)
        except OSError as error:
            raise HeadraceError(f"the profile {path} cannot be written: {error.strerror}") from error
        answers = self._executor.control(command)
        return ProfileFiles(paths=(str(path), *(file for answer in answers for file in answer.files)))

    def _report(self, command: DescribeEngine) -> EngineReport:
        default, asked = Options(), self._plan.options
        changed = {n: getattr(asked, n) for n in Options.__struct_fields__ if getattr(asked, n) != getattr(default, n)}
        facts: dict[str, Any] = msgspec.to_builtins(self._facts)
        return EngineReport(
            options=msgspec.to_builtins(changed),
            decisions=tuple((d.name, d.value, d.reason) for d in self._plan.decisions),
            facts=facts,
            workers=tuple({"rank": answer.rank, **answer.facts} for answer in self._executor.control(command)),
        )


def profile_folder(options: Options) -> Path | None:
    """Where profiles go. Raises OptionError for settings that are not understood."""
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
