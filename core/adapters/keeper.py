"""The gatekeeper of adapters, which also carries out their commands. Used only by the loop's thread.

request --> all its adapters in memory? --> it holds their versions until it ends, and no gate is closed
              | no
              v
         gate "adapter" closes, the missing ones are loaded --> GateOpened: it holds them
                                                            \\-> GateFailed with the cause
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from headrace.core.adapters.loader import AdapterLoaded
from headrace.core.adapters.registry import Adapter, Registry, Version
from headrace.core.engine.gates import Gate, GateFailed, GateOpened
from headrace.core.options.adapters import AdapterLimits
from headrace.core.schedule.requests import Request, State
from headrace.ipc.adapters import (
    AdapterInfo,
    Adapters,
    AdapterStats,
    AdapterUse,
    KeyAdapter,
    RowAdapter,
    activation_start,
    most_of_request,
)
from headrace.ipc.control import AdapterCommand, ListAdapters, LoadAdapter, PinAdapter, ScaleAdapters, UnloadAdapter
from headrace.ipc.failure import Failure, InvalidRequestError, UnknownAdapterError
from headrace.ipc.messages import AddRequest
from headrace.ipc.wait import WaitTimeoutError

logger = logging.getLogger(__name__)
REASON = "adapter"


class Loader(Protocol):
    """The part of an AdapterLoader that the keeper uses."""

    def load(self, slot: int, path: str, *, is_3d: bool) -> None: ...
    def drop(self, slot: int) -> None: ...
    def stop(self) -> None: ...


class _Wait(NamedTuple):
    """A request or a command that waits until its adapters are in memory."""

    adapters: Sequence[Adapter]
    end: Callable[[Failure | None], None]
    """Called once: with None while all are in memory, or with the cause."""


class _Held(NamedTuple):
    """What a request holds."""

    names: tuple[str, ...]
    versions: tuple[Version, ...]
    identities: tuple[str, ...]
    """Of each of AddRequest.adapters; "" for those without effect."""


Answer = Callable[[AdapterInfo | Adapters | None, Failure | None], None]
"""Answers a command with its result or its failure."""


class AdapterKeeper:
    """A `Gatekeeper`. Requests and commands get their adapters in the order in which they came, as slots allow."""

    timeout_s = math.inf  # a load ends by itself (control_timeout), and waiting for a slot is waiting for capacity

    def __init__(
        self,
        limits: AdapterLimits,
        loader: Loader,
        report: Callable[[GateOpened | GateFailed], None],
        in_flight: Callable[[], tuple[int, int] | None],
        base_names: Sequence[str],
    ) -> None:
        """in_flight: the numbers of the first and the last step in flight; base_names: the names of the model."""
        self._limits, self._loader, self._report, self._in_flight = limits, loader, report, in_flight
        self._base_names = base_names
        self._registry = Registry(limits.slots)
        self._loading: dict[int, Adapter] = {}  # by slot
        self._dropped: list[Version] = []  # not registered any more, and without users: their slots get free
        self._retiring: Version | None = None
        """A version that takes no more users, since a wait finds no slot and all are in use."""
        self._waits: dict[object, _Wait] = {}  # by a request, or by an object of its own for a command
        self._new: dict[tuple[str, str], Adapter] = {}  # commands load these, and register them then
        self._held: dict[Request, _Held] = {}
        self._numbers = itertools.count(1)
        self._num_loads = self._num_failed_loads = self._num_evictions = 0
        self._load_s = 0.0
        self.is_due = False
        """Whether `go_on` may find something to do."""
        self.on_change: Callable[[Adapters], None] = lambda adapters: None
        """Called when adapters or what is known of them have changed, other than whether they are in memory."""

    def stop(self) -> None:
        """Begins no further loads."""
        self._loader.stop()

    # --- requests -----------------------------------------------------------------------------------------------

    def check(self, message: AddRequest) -> Failure | None:
        """Why a request can never have its adapters, or None."""
        uses = message.adapters
        for use in uses:
            if not use.path and self._registry.find(use.name) is None:
                return self._unknown(use.name)
        if len({self._registry.find(use.name, use.path) or (use.name, use.path) for use in uses}) != len(uses):
            return _refusal(f"an adapter is given twice among {', '.join(use.name for use in uses)}")
        return self._why_too_many([use.scale for use in uses], "are given")

    def _why_too_many(self, scales: Iterable[float], what: str) -> Failure | None:
        """Why no request can have adapters with all these scales, or None."""
        count, most = sum(scale != 0 for scale in scales), most_of_request(self._limits.max_loras)
        if count <= most:
            return None
        return _refusal(f"{count} adapters {what}, and this engine computes at most {most} of a request (max_loras)")

    def closed_gates(self, request: Request, message: AddRequest) -> Collection[Gate]:
        uses = [use for use in message.adapters if use.scale != 0]
        if not uses:
            return ()
        adapters = [self._of_use(use) for use in uses]
        gate = Gate(REASON, f"{', '.join(each.name for each in adapters)} ({next(self._numbers)})")

        def end(failure: Failure | None) -> None:
            failure = failure or self._hold(request, message, uses, adapters)
            self._report(GateOpened(gate) if failure is None else GateFailed(gate, failure))

        if all(self._is_usable(each) for each in adapters):
            failure = self._hold(request, message, uses, adapters)
            if failure is None:
                return ()
            self._report(GateFailed(gate, failure))
        else:
            self._wait(request, _Wait(adapters, end))
        return (gate,)

    def identities(self, request: Request) -> tuple[str, ...]:
        """`Admitted.adapters`"""
        held = self._held.get(request)
        return () if held is None else held.identities

    def leave(self, request: Request) -> None:
        """The request has ended, or no longer waits for a gate."""
        if self._waits.pop(request, None) is not None:
            self.is_due = True
        held = self._held.pop(request, None)
        if held is None:
            return
        in_flight = self._in_flight()
        for version in held.versions:
            version.num_users -= 1
            version.used_until_step = -1 if in_flight is None else in_flight[1]
            if not version.num_users:
                self.is_due = True
                self._drop_if_gone(version)

    def _of_use(self, use: AdapterUse) -> Adapter:
        """The adapter that a checked request means; registers one whose path is not known yet."""
        found = self._registry.find(use.name, use.path)
        if use.identity and (found is None or found.facts is None or found.facts.identity != use.identity):
            found = self._registry.of_identity(use.identity) or found
        if found is None:
            found = Adapter(use.name, use.path, is_3d=use.is_3d)
            self._registry.add(found)
        return found

    def _hold(
        self, request: Request, message: AddRequest, uses: Sequence[AdapterUse], adapters: Sequence[Adapter]
    ) -> Failure | None:
        """Gives the request the versions in memory. Returns why it cannot go on with them, or None."""
        versions, rows, keys = list[Version](), list[RowAdapter](), list[KeyAdapter]()
        for use, adapter in zip(uses, adapters, strict=True):
            version = adapter.version
            assert version is not None, "its adapters are in memory"
            if use.identity not in ("", version.facts.identity):
                return _failure(
                    f"the request began with adapter {use.name} of content {use.identity}, and {adapter.path} has "
                    f"content {version.facts.identity} here: it cannot go on with another adapter"
                )
            if version in versions:
                return _failure(f"adapter {use.name} is given twice, under two names")
            versions.append(version)
            start: int | None = 0
            if version.facts.invocation_tokens:
                prompt = request.token_ids[: request.num_prompt_tokens]
                start = activation_start(prompt, version.facts.invocation_tokens)
            if start is not None:
                rows.append(RowAdapter(slot=version.slot, scale=use.scale, from_position=start))
                keys.append(KeyAdapter(version.facts.identity, use.scale, start))
        # In one order, whatever the request's: the same sum has the same rounding, and the same name.
        in_order = sorted(range(len(keys)), key=keys.__getitem__)
        request.adapters = tuple(rows[each] for each in in_order)
        adapted = tuple(keys[each] for each in in_order)
        request.prefix_key = msgspec.structs.replace(request.prefix_key, adapters=adapted)
        for version in versions:
            version.num_users += 1
            self._registry.touch(version)
        of_use = {use: version.facts.identity for use, version in zip(uses, versions, strict=True)}
        identities = tuple(of_use.get(use, "") for use in message.adapters)
        self._held[request] = _Held(tuple(use.name for use in uses), tuple(versions), identities)
        return None

    # --- commands -----------------------------------------------------------------------------------------------

    def carry_out(self, command: AdapterCommand, answer: Answer) -> None:
        """Answers at once, or once the adapter is in memory."""
        match command:
            case ListAdapters():
                answer(self.adapters, None)
            case UnloadAdapter():
                self._unload(command.name, answer)
            case PinAdapter():
                adapter = self._registry.find(command.name)
                if adapter is None:
                    answer(None, self._unknown(command.name))
                else:
                    self._load(adapter, answer, pinned=True)
            case ScaleAdapters():
                self._scale(command, answer)
            case LoadAdapter():
                self._carry_out_load(command, answer)

    def _scale(self, command: ScaleAdapters, answer: Answer) -> None:
        unknown = next((name for name in command.scales if self._registry.find(name) is None), None)
        if unknown is not None:
            answer(None, self._unknown(unknown))
            return
        if (refusal := self._why_too_many(command.scales.values(), "would apply to every request")) is not None:
            answer(None, refusal)
            return
        for each in self._registry:
            each.default_scale = command.scales.get(each.name, 0.0)
        self._changed()
        answer(self.adapters, None)

    def _carry_out_load(self, command: LoadAdapter, answer: Answer) -> None:
        name, path = command.name, command.path
        if not name or not path:
            answer(None, _refusal("an adapter has a name and a path, and one of them is empty"))
            return
        if name in self._base_names:
            answer(None, _refusal(f"{name} is a name of the model itself: give the adapter another one"))
            return
        known = self._registry.find(name)
        if known is not None and known.path != path and not command.in_place:
            answer(
                None,
                _refusal(
                    f"adapter {name} is registered with the path {known.path}: unload it before, or load {path} in "
                    "its place (in_place)"
                ),
            )
            return
        adapter = None if command.in_place else known or self._new.get((name, path))
        if adapter is None:
            adapter = Adapter(name, path, is_3d=command.is_3d, base_model_name=command.base_model_name)
            adapter.default_scale = command.default_scale
            self._new[name, path] = adapter
        self._load(adapter, answer, pinned=command.pinned)

    def _load(self, adapter: Adapter, answer: Answer, *, pinned: bool) -> None:
        if pinned and not adapter.is_pinned and self._registry.num_pinned >= self._registry.num_slots - 1:
            answer(
                None,
                _refusal(
                    f"{self._registry.num_pinned} adapters are pinned, and one of the {self._registry.num_slots} in "
                    "memory (max_cpu_loras) must be free for others"
                ),
            )
            return

        def end(failure: Failure | None) -> None:
            if self._new.get((adapter.name, adapter.path)) is adapter:
                del self._new[adapter.name, adapter.path]
            if failure is not None:
                answer(None, failure)
                return
            if not adapter.is_registered:
                self._register(adapter)
            adapter.is_pinned |= pinned
            self._changed()
            answer(adapter.info, None)

        self._wait(object(), _Wait((adapter,), end))
        self.go_on()

    def _register(self, adapter: Adapter) -> None:
        """Registers an adapter in place of what has its name."""
        replaced = self._registry.find(adapter.name)
        if replaced is not None:
            adapter.is_pinned, adapter.default_scale = replaced.is_pinned, replaced.default_scale
        self._forget(adapter.name)
        self._registry.add(adapter)

    def _unload(self, name: str, answer: Answer) -> None:
        if self._registry.find(name) is None:
            answer(None, self._unknown(name))
            return
        self._forget(name)
        self._changed()
        answer(None, None)
        self.go_on()

    def _forget(self, name: str) -> None:
        for gone in self._registry.remove(name):
            gone.is_pinned = False
            if gone.version is not None:
                self._drop_if_gone(gone.version)

    # --- loads --------------------------------------------------------------------------------------------------

    def _wait(self, key: object, wait: _Wait) -> None:
        self._waits[key] = wait
        self.is_due = True

    def loaded(self, news: AdapterLoaded) -> None:
        """A load has ended."""
        adapter = self._loading.pop(news.slot)
        adapter.is_loading = False
        self._num_loads += 1
        self._load_s += news.seconds
        if news.facts is not None:
            was = adapter.facts
            version = self._registry.put(adapter, news.slot, news.facts)
            if was is not None and was.identity != news.facts.identity:
                logger.warning("the content of %s has changed since it was loaded", adapter)
            if adapter.is_registered and was != news.facts:
                self._changed()
            self.go_on()
            self._drop_if_gone(version)
        else:
            assert news.failure is not None, "it has facts or a failure"
            self._failed(adapter, news.slot, news.failure)
            self.go_on()

    def _failed(self, adapter: Adapter, slot: int, failure: Failure) -> None:
        self._num_failed_loads += 1
        logger.warning("%s could not be loaded: %s", adapter, failure.message)
        if failure.type == WaitTimeoutError.__name__:  # the load may yet end, and fill the slot
            self._registry.num_slots -= 1
        else:
            self._registry.give_back(slot)
        if adapter.is_registered and adapter.facts is None:  # by a request, and there was never such an adapter
            self._registry.remove(adapter.name, adapter.path)
        failure = msgspec.structs.replace(failure, message=f"{adapter} could not be loaded: {failure.message}")
        self._end([key for key, wait in self._waits.items() if adapter in wait.adapters], failure)

    def go_on(self) -> None:
        """Starts loads and ends waits, in their order, as far as slots allow. What is left to do after that waits for
        a step in flight."""
        self._go_through_waits()
        while self.is_due and self._in_flight() is None:
            self._go_through_waits()

    def _go_through_waits(self) -> None:
        self.is_due = False
        self._empty_dropped()
        if self._retiring is not None and self._retiring.adapter.version is not self._retiring:
            self._retiring = None  # it has left
        ready, hopeless, keep = list[object](), list[object](), set[Adapter]()
        finds_no_slot = False
        for key, wait in self._waits.items():
            if not finds_no_slot and self._retiring is not None and self._retiring.adapter in wait.adapters:
                self._retiring = None  # no wait before this one needs its slot
            keep.update(wait.adapters)
            if all(self._is_usable(each) for each in wait.adapters):
                ready.append(key)
            elif not self._has_room(wait):
                hopeless.append(key)
            elif not finds_no_slot:
                finds_no_slot = not self._load_missing(wait, keep)
        if not finds_no_slot:
            self._retiring = None
        # Commands hold nothing, and neither does what can never fit: what they waited for may make room.
        self.is_due |= bool((ready or hopeless) and finds_no_slot)
        self._end(ready, None)
        self._end(
            hopeless,
            _failure(
                f"the adapters of one request do not fit into memory: it holds {self._registry.num_slots} "
                f"(max_cpu_loras), of which {self._registry.num_pinned} are pinned"
            ),
        )

    def _end(self, keys: Iterable[object], failure: Failure | None) -> None:
        for key in keys:
            self._waits.pop(key).end(failure)

    def _has_room(self, wait: _Wait) -> bool:
        """Whether its adapters fit beside pinned ones."""
        others = sum(each.adapter.is_pinned and each.adapter not in wait.adapters for each in self._registry.versions)
        return len(set(wait.adapters)) + others <= self._registry.num_slots

    def _is_usable(self, adapter: Adapter) -> bool:
        return adapter.version is not None and adapter.version is not self._retiring

    def _load_missing(self, wait: _Wait, keep: set[Adapter]) -> bool:
        """Begins to load what is missing of a wait. False: there are not enough slots now."""
        for adapter in wait.adapters:
            if adapter.version is not None or adapter.is_loading:
                continue
            slot, evicted = self._registry.take_slot(keep, self._is_unused)
            if slot < 0:
                self._make_room(keep)
                return False
            self._num_evictions += evicted is not None
            if evicted is self._retiring:
                self._retiring = None
            adapter.is_loading = True
            self._loading[slot] = adapter
            self._loader.load(slot, adapter.path, is_3d=adapter.is_3d)
        return True

    def _make_room(self, keep: set[Adapter]) -> None:
        """No slot can be taken: one will be when a version's last user leaves, or a step in flight ends."""
        versions = [each for each in self._registry.versions if not each.adapter.is_pinned]
        if any(not each.num_users for each in versions if each.adapter not in keep):
            self.is_due = True
        elif self._retiring is None:
            in_use = [each for each in versions if each.adapter not in keep and each.num_users]
            self._retiring = min(in_use, key=lambda each: each.number, default=None)

    def _is_unused(self, version: Version) -> bool:
        """Whether no request holds it, and no step in flight computes a row of one that held it."""
        in_flight = self._in_flight()
        return not version.num_users and (in_flight is None or version.used_until_step < in_flight[0])

    def _drop_if_gone(self, version: Version) -> None:
        """Frees the slot of a version that no new request can get, and that none has."""
        adapter = version.adapter
        if adapter.is_registered or version.num_users or version in self._dropped:
            return
        if not any(adapter in wait.adapters for wait in self._waits.values()):
            self._dropped.append(version)
            self.is_due = True

    def _empty_dropped(self) -> None:
        dropped, self._dropped = self._dropped, []
        for version in dropped:
            if version.num_users or version.adapter.version is not version:
                continue  # it was found by its identity, or its slot was taken
            if self._is_unused(version):
                self._loader.drop(version.slot)
                self._registry.give_back(self._registry.remove_version(version))
            else:
                self._dropped.append(version)
                self.is_due = True

    # --- what is told of them -----------------------------------------------------------------------------------

    @property
    def adapters(self) -> Adapters:
        return Adapters(adapters=tuple(each.info for each in self._registry))

    def _changed(self) -> None:
        self.on_change(self.adapters)

    def stats(self) -> AdapterStats:
        running, waiting = set[str](), set[str]()
        for request, held in self._held.items():
            (running if request.state is State.RUNNING else waiting).update(held.names)
        for key, wait in self._waits.items():
            if isinstance(key, Request):
                waiting.update(each.name for each in wait.adapters)
        return AdapterStats(
            max_loras=self._limits.max_loras,
            running=tuple(sorted(running)),
            waiting=tuple(sorted(waiting - running)),
            num_registered=len(list(self._registry)),
            num_loaded=len(list(self._registry.versions)),
            num_loads=self._num_loads,
            num_failed_loads=self._num_failed_loads,
            load_s=self._load_s,
            num_evictions=self._num_evictions,
        )

    def _unknown(self, name: str) -> Failure:
        known = ", ".join(dict.fromkeys(each.name for each in itertools.islice(self._registry, 10)))
        return _refusal(f"there is no adapter {name}; known: {known or 'none'}", kind=UnknownAdapterError)


def _refusal(why: str, kind: type[InvalidRequestError] = InvalidRequestError) -> Failure:
    return Failure(message=why, type=kind.__name__, process="engine-core", pid=os.getpid(), phase="admission")


def _failure(why: str) -> Failure:
    return Failure(message=why, process="engine-core", pid=os.getpid(), phase=REASON)
