"""The control channel: the commands that a running engine accepts besides requests. One message type per command.

    client --- Control(call, command) ---> core's loop --- control(command) ---> executor --- its workers
    client <-- Reply(call, result) ------- core's loop <-- WorkerAnswer of each rank --------/

The loop carries out one command after another, between steps and with no step in flight, so a command never takes
effect in the middle of a request's step. Only commands of adapters are carried out beside steps. In-process and
multi-process engines use the same messages. Clients cannot call Headrace's own methods by name: they can send the
commands below, and call a worker extension (`CallExtension`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from headrace.ipc.adapters import AdapterInfo, AdapterName, Adapters, UseScale
from headrace.ipc.ranges import Range


class Command(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Base of all commands."""


class PauseGeneration(Command, frozen=True):
    """Computes no steps until ResumeGeneration. Requests that arrive in the meantime wait.

    The reply is empty. It is sent once no request is running (`abort`, `wait`) or all requests have halted (`keep`).
    """

    mode: Literal["abort", "wait", "keep"] = "abort"
    """What happens to the current requests. abort: they end with the finish reason abort. wait: they are finished
    before the pause. keep: they stay as they are and continue after the pause."""
    clear_cache: bool = True
    """Drop the cached blocks; with `keep`, requests then recompute their own when they continue."""


class ResumeGeneration(Command, frozen=True):
    """Ends a pause; does nothing without one. The reply is empty."""


class DrainEngine(Command, frozen=True):
    """The engine accepts no new requests, and exits once the running ones have finished or `deadline_s` has passed;
    frontends continue the unfinished ones on other engines. The reply is empty and is sent when draining begins."""

    deadline_s: Annotated[float, Range(0.0, 86400.0)] = 120.0


class ReloadWeights(Command, frozen=True):
    """Loads the weights again, from a checkpoint with the same config. The reply is empty.

    Running requests continue with the new weights and recompute their keys and values; the prefix cache is cleared.
    If it fails, the old weights stay in use.
    """

    path: str = ""
    """A folder or file, as the option `model` takes it; empty for the engine's own model."""
    part: Literal["", "prepare", "use", "forget"] = ""
    """Of several engines all or none change: `prepare` loads the weights beside those in use, `use` has them take their
    place, and `forget` drops them, in an engine that could not load them too. Empty: all of it at once."""


class Sleep(Command, frozen=True):
    """Pauses as PauseGeneration does, then frees the device's memory until WakeUp. The reply is empty.

    The KV cache is dropped, and the weights leave the device: level 1 keeps them in the host's memory, level 2 drops
    them, so that waking up reads the model's checkpoint again. On a CPU level 1 drops only the cache.
    """

    level: Literal[1, 2] = 1
    mode: Literal["abort", "wait", "keep"] = "abort"
    """As in PauseGeneration. Requests that are kept recompute their keys and values after WakeUp."""

    @property
    def clear_cache(self) -> bool:
        return True


class WakeUp(Command, frozen=True):
    """Allocates the memory again, and ends the pause of Sleep once everything is awake. The reply is empty."""

    tags: tuple[Literal["weights", "kv_cache"], ...] = ()
    """What to wake up, for example only the weights while they are being replaced; empty for everything."""


ASLEEP = frozenset(("weights", "kv_cache"))
"""The parts that Sleep puts to sleep, as tags of WakeUp."""


class StartProfile(Command, frozen=True):
    """Records the activity of the core and its workers until StopProfile. The reply is empty."""

    prefix: str = ""
    """Prefix of the files' names: letters, digits, - and _."""


class StopProfile(Command, frozen=True):
    """Writes the recorded profile into the engine's profile folder. The reply is ProfileFiles."""


class DescribeEngine(Command, frozen=True):
    """The reply is an EngineReport."""


class CallExtension(Command, frozen=True):
    """Calls the worker extension (option worker_extension_cls). The reply is ExtensionAnswers."""

    payload: dict[str, Any]
    method: str = ""
    """The method to call, with the payload's `args` and `kwargs`; the answer holds the returned value as `result`.
    Empty: call `handle`, which takes a payload and returns one."""


class ResetMMCache(Command, frozen=True):
    """Clears the caches of processed images and audio, and of encoder outputs. The reply is empty.

    No model of this version takes multimodal inputs, so there is nothing to clear.
    """


class LoadAdapter(Command, frozen=True):
    """Registers an adapter under a name, and loads it. Running requests' steps go on meanwhile. The reply, an
    AdapterInfo, comes once it is loaded; if that fails, nothing has changed.

    Refused without `in_place` if the name is registered with another path, or is the model's own. With the same path it
    is loaded if it is not in memory, and that is all.
    """

    name: AdapterName
    path: AdapterName
    """A folder as peft writes it, a GGUF file, or a repository's name on the hub."""
    in_place: bool = False
    """Read the path again, whatever is registered under the name: a new version for the requests that come from now on.
    Those that the engine has keep theirs."""
    pinned: bool = False
    """It stays in memory, as by PinAdapter."""
    is_3d: bool = False
    """Factors of experts are stored as one tensor of all experts where the files do not show it."""
    base_model_name: AdapterName = ""
    """The model that it was trained for, for lists of models."""
    default_scale: UseScale = 0.0
    """Of an adapter that is new: see ScaleAdapters."""


class UnloadAdapter(Command, frozen=True):
    """Forgets a name: new requests for it are refused at once, and those that the engine has finish with their version,
    whose memory is freed then. The reply is empty, and does not wait for them."""

    name: AdapterName


class PinAdapter(Command, frozen=True):
    """Keeps an adapter in memory from now on, loading it first if it is not there. The reply is an AdapterInfo."""

    name: AdapterName


class ScaleAdapters(Command, frozen=True):
    """Says with which scales adapters apply to requests whose clients name none: those that are not given do not apply.
    The engine only keeps this for all its clients, who give each request its adapters. The reply is Adapters."""

    scales: dict[AdapterName, UseScale]


class ListAdapters(Command, frozen=True):
    """The reply is Adapters."""


AdapterCommand = LoadAdapter | UnloadAdapter | PinAdapter | ScaleAdapters | ListAdapters
"""Carried out beside running steps (core/adapters/)."""


ForWorkersToo = Sleep | WakeUp | StartProfile | StopProfile | DescribeEngine | CallExtension
Commands = (
    PauseGeneration | ResumeGeneration | DrainEngine | ReloadWeights | ResetMMCache | AdapterCommand | ForWorkersToo
)


class PrepareWeights(Command, frozen=True):
    """The first half of ReloadWeights: every worker loads the new weights beside those in use."""

    path: str = ""


class UseWeights(Command, frozen=True):
    """The second half: the prepared weights replace the old ones, or are dropped because some worker failed."""

    prepared: bool


class CheckSampling(Command, frozen=True):
    """Asks, before requests are admitted, whether the logits processors accept these sampling parameters. Only workers
    load the processors' classes. Sent if some class checks parameters (`ModelDescription.checks_sampling`)."""

    sampling: tuple[msgspec.Raw, ...]
    """Each a `messages.Sampling` in msgpack: that module imports this one, so the type cannot be named here."""


class DoIdleWork(Command, frozen=True):
    """Does one piece of work that no request waits for, on every worker, as the workers may need each other for it."""


WorkerCommand = PrepareWeights | UseWeights | ForWorkersToo | CheckSampling | DoIdleWork
"""The commands that an executor passes on to each of its workers."""


class WorkerAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The answer of one worker to a WorkerCommand that succeeded."""

    rank: int = 0
    files: tuple[str, ...] = ()
    """For StopProfile: the files that the worker wrote."""
    facts: dict[str, Any] = {}
    """For DescribeEngine: facts about the worker, such as pid, device, threads, and bytes of weights and cache."""
    payload: dict[str, Any] = {}
    """For CallExtension: the extension's answer."""
    did_something: bool = False
    """For DoIdleWork: some work was done, and there may be more."""
    refusals: tuple[str, ...] = ()
    """For CheckSampling: why each of the parameters is refused; "" for those that are accepted."""
    can_compute: bool = True
    """For PrepareWeights: steps can be computed until UseWeights. Not where the weights in use left the device's memory
    to the new ones."""
    weights: str = ""
    """For UseWeights and WakeUp: the identity of the weights in use from now on, as in ModelDescription.weights."""


class ProfileFiles(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    paths: tuple[str, ...]
    """On the engine's host. JSON of the trace-event format, for ui.perfetto.dev or chrome://tracing."""


class ExtensionAnswers(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    payloads: tuple[dict[str, Any], ...]
    """One per worker, by rank."""


class EngineReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """The engine's options, decisions and run-time facts as plain data."""

    options: dict[str, Any]
    """The options that differ from their defaults."""
    decisions: tuple[tuple[str, str, str], ...]
    """Name, value and reason of each decision."""
    facts: dict[str, Any]
    """Determined at run time: blocks, fitted length, memory, cache capacity (in tokens and full-length requests)."""
    workers: tuple[dict[str, Any], ...]
    """By rank; see WorkerAnswer.facts."""


ControlResult = ProfileFiles | ExtensionAnswers | EngineReport | AdapterInfo | Adapters
