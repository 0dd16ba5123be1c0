"""The control channel: what a running engine can be told and asked besides requests. One message type per command.

    client --- Control(call, command) ---> core's loop --- control(command) ---> executor --- its workers
    client <-- Reply(call, result) ------- core's loop <-- WorkerAnswer of each rank --------/

The loop carries commands out one after another, between steps, with none in flight; a request is never half-way
through one. The same in one process and across several, as it is the same messages. No method of
ours is called by name: a client can ask for what stands here, and for what a worker extension has (`CallExtension`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from headrace.ipc.ranges import Range


class Command(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Base of all commands."""


class PauseGeneration(Command, frozen=True):
    """No step is computed from now on, until ResumeGeneration. Requests may come meanwhile, and wait.

    Answered, with nothing, once no request is running (`abort`, `wait`) or all stand still (`keep`).
    """

    mode: Literal["abort", "wait", "keep"] = "abort"
    """What happens to the requests that are here: they end with finish reason abort; they are finished first; they
    are kept as they are and go on after the pause."""
    clear_cache: bool = True
    """Forget cached blocks; with `keep`, requests then compute theirs again when they go on."""


class ResumeGeneration(Command, frozen=True):
    """Ends a pause; answered with nothing. Without a pause it changes nothing."""


class DrainEngine(Command, frozen=True):
    """The engine takes no new requests and ends once those that run have finished, or after `deadline_s`: frontends go
    on elsewhere with what is left. Answered, with nothing, when it has begun."""

    deadline_s: Annotated[float, Range(0.0, 86400.0)] = 120.0


class ReloadWeights(Command, frozen=True):
    """Reads the weights again, of a checkpoint with the same config. Answered with nothing.

    Requests that run go on with the new weights, and compute their keys and values again; the prefix cache is
    forgotten. When it fails the old weights stay.
    """

    path: str = ""
    """A folder or file as the option `model` takes it; empty for the model's own."""


class Sleep(Command, frozen=True):
    """Pauses as PauseGeneration does, then gives the device's memory back until WakeUp. Answered with nothing.

    The cache is dropped, and the weights besides: level 1 keeps them in the host's memory, level 2 nowhere, so that
    waking up reads the model's checkpoint again. On a CPU level 1 drops the cache alone.
    """

    level: Literal[1, 2] = 1
    mode: Literal["abort", "wait", "keep"] = "abort"
    """As of PauseGeneration. Requests that are kept compute theirs again after waking up."""

    @property
    def clear_cache(self) -> bool:
        return True


class WakeUp(Command, frozen=True):
    """Takes memory again, and ends the pause of Sleep once all is awake. Answered with nothing."""

    tags: tuple[Literal["weights", "kv_cache"], ...] = ()
    """What is to be awake, such as the weights alone while they are changed; empty for everything."""


ASLEEP = frozenset(("weights", "kv_cache"))
"""What Sleep puts to sleep: the tags of WakeUp."""


class StartProfile(Command, frozen=True):
    """Records what the core and its workers do, until StopProfile. Answered with nothing."""

    prefix: str = ""
    """What the files' names begin with: letters, digits, - and _."""


class StopProfile(Command, frozen=True):
    """Writes what was recorded into the engine's profile folder. Answered with ProfileFiles."""


class DescribeEngine(Command, frozen=True):
    """Answered with an EngineReport."""


class CallExtension(Command, frozen=True):
    """For the worker extension (option worker_extension_cls). Answered with ExtensionAnswers."""

    payload: dict[str, Any]
    method: str = ""
    """A method of its class, called with the payload's `args` and `kwargs`, whose answer's `result` is what it gives;
    empty for `handle`, which takes and gives a payload."""


class ResetMMCache(Command, frozen=True):
    """Forgets processed images and sounds, and what encoders made of them. Answered with nothing.

    No model of this version takes any, so there is nothing to forget.
    """


ForWorkersToo = Sleep | WakeUp | StartProfile | StopProfile | DescribeEngine | CallExtension
Commands = PauseGeneration | ResumeGeneration | DrainEngine | ReloadWeights | ResetMMCache | ForWorkersToo


class PrepareWeights(Command, frozen=True):
    """The first half of ReloadWeights: every worker reads the new weights beside those that serve."""

    path: str = ""


class UseWeights(Command, frozen=True):
    """The second: what was prepared takes the old weights' place, or is dropped as some worker could not."""

    prepared: bool


class CheckSampling(Command, frozen=True):
    """Before a request is taken: whether the logits processors, whose classes workers alone load, work with these
    parameters. Of engines that have such as look (`ModelDescription.checks_sampling`)."""

    sampling: msgspec.Raw
    """A `messages.Sampling` in msgpack; that module imports this one."""


class DoIdleWork(Command, frozen=True):
    """A piece of work that no request waits for, on every worker alike, as they may need each other for it."""


WorkerCommand = PrepareWeights | UseWeights | ForWorkersToo | CheckSampling | DoIdleWork
"""What an executor passes on to each of its workers."""


class WorkerAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What one worker says to a WorkerCommand that went well."""

    rank: int = 0
    files: tuple[str, ...] = ()
    """That it wrote, for StopProfile."""
    facts: dict[str, Any] = {}
    """About itself, for DescribeEngine: pid, device, threads, bytes of weights and cache, and what else it knows."""
    payload: dict[str, Any] = {}
    """Of its extension, for CallExtension."""
    did_something: bool = False
    """For DoIdleWork: there may be more."""
    refusal: str = ""
    """For CheckSampling: why not."""
    weights: str = ""
    """For UseWeights and WakeUp: which it computes with from now on, as in ModelDescription.weights."""


class ProfileFiles(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    paths: tuple[str, ...]
    """On the engine's host. JSON of the trace-event format, for ui.perfetto.dev or chrome://tracing."""


class ExtensionAnswers(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    payloads: tuple[dict[str, Any], ...]
    """One of each worker, by rank."""


class EngineReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """What was asked, decided and found, as plain data."""

    options: dict[str, Any]
    """Those that differ from their defaults."""
    decisions: tuple[tuple[str, str, str], ...]
    """Name, value and reason of everything that was decided."""
    facts: dict[str, Any]
    """Found at run time: number of blocks, fitted length, memory; what the cache holds (tokens, longest requests)."""
    workers: tuple[dict[str, Any], ...]
    """By rank; see WorkerAnswer.facts."""


ControlResult = ProfileFiles | ExtensionAnswers | EngineReport
