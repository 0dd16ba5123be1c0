"""Keeps children running: engines, HTTP processes and coordinators, each in a place of a table.

All that happens to them is an event in one queue, which one thread reads:

    start --> ChildReady --> ChildEnded --replace--> a pause --> StartDue --start--> ...
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from headrace.core.process.child import Child
from headrace.ipc.failure import EngineStartError, Failure, HeadraceError
from headrace.ipc.messages import Ready

LONG_LIFE_S = 60.0
"""A child that dies after it has served this long is replaced as if it were the first."""


class Restarts(msgspec.Struct, frozen=True):
    """How often a child that dies is replaced: at most so many times in a row, after pauses that double."""

    most: int
    first_pause_s: float = 0.25
    longest_pause_s: float = 30.0


class Place:
    """A row of a table: its current child, which another replaces when it dies."""

    def __init__(self, name: str, restarts: Restarts, launch: Callable[[], Child], child: Child | None = None) -> None:
        """name: the process in a failure. launch: starts a child; may raise HeadraceError. child: the first one, if it
        has been started already."""
        self.name, self.restarts, self.launch, self.child = name, restarts, launch, child
        self.is_ready = False
        self.stopped_since_s: float | None = None
        """When it was first seen stopped by a signal."""
        self.num_replaced = 0
        """In a row, without a long life in between."""
        self.began_s = time.monotonic()

    @property
    def runs(self) -> bool:
        """It is ready and has not ended, also where the news of its end are still to come."""
        return self.is_ready and self.child is not None and self.child.runs

    @property
    def has_been_ready(self) -> bool:
        """Its child, or one before it, also where the news of that are still to come."""
        return self.num_replaced > 0 or (self.child is not None and self.child.was_ready)


class ChildReady(msgspec.Struct, frozen=True):
    place: Any  # a Place
    child: Child
    """Which of those that have this place one after another."""
    ready: Ready


class ChildEnded(msgspec.Struct, frozen=True):
    """It has ended without being asked to, or could not be started."""

    place: Any
    child: Child | None
    failure: Failure


class StartDue(msgspec.Struct, frozen=True):
    """The pause before the next start is over."""

    place: Any
    child: Child | None
    """The one that has ended."""


class Stopped(msgspec.Struct, frozen=True):
    """All children that were asked to stop have ended."""


class Supervisor:
    """`events` has what happens to the children, and what else its owner puts there."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def start(self, place: Place) -> None:
        """Starts a child. If that fails, ChildEnded follows, as it does for one that dies while it starts."""
        place.is_ready, place.stopped_since_s, place.began_s = False, None, time.monotonic()
        try:
            place.child = place.launch()
        except HeadraceError as error:  # a model's files may be back later
            self.events.put(ChildEnded(place, place.child, Failure.of(error, process=place.name, phase="start")))
        else:
            self.watch(place)

    def watch(self, place: Place, on_phase: Callable[[str], None] = lambda phase: None) -> None:
        """Puts ChildReady into the queue and, when the child ends or its start fails, ChildEnded."""
        child = place.child
        assert child is not None, "it has been started"

        def ended(failure: Failure) -> None:
            self.events.put(ChildEnded(place, child, failure))

        def watch() -> None:
            try:
                ready = child.wait_ready(on_progress=lambda progress: on_phase(progress.phase))
            except EngineStartError as error:
                ended(Failure.of(error, process=child.name, phase="start"))
            else:
                self.events.put(ChildReady(place, child, ready))
                child.on_exit(ended)

        threading.Thread(target=watch, name=f"start-{child.name}", daemon=True).start()

    def replace(self, place: Place) -> bool:
        """Whether a child that has ended will be replaced: at StartDue, after a pause that doubles each time."""
        if place.is_ready and time.monotonic() - place.began_s > LONG_LIFE_S:
            place.num_replaced = 0
        place.is_ready, place.stopped_since_s = False, None
        if place.num_replaced >= place.restarts.most:
            return False
        pause_s = min(place.restarts.first_pause_s * 2**place.num_replaced, place.restarts.longest_pause_s)
        place.num_replaced += 1
        timer = threading.Timer(pause_s, self.events.put, (StartDue(place, place.child),))
        timer.daemon = True
        timer.start()
        return True

    def drain(self, place: Place, deadline_s: float) -> None:
        """Lets the child finish its requests and end, within `deadline_s`; ChildEnded follows."""
        child = place.child
        assert child is not None, "it runs"

        def drain() -> None:
            child.stop(deadline_s)
            self.events.put(ChildEnded(place, child, Failure(message="it was drained", type="Drained")))

        threading.Thread(target=drain, name=f"drain-{child.name}", daemon=True).start()

    def ask_to_stop(self, children: Sequence[Child], deadline_s: float) -> None:
        """Stops them at the same time; Stopped follows once all have ended."""
        stops = stop_at_once(children, deadline_s)

        def report_end() -> None:
            for stop in stops:
                stop.join()
            self.events.put(Stopped())

        threading.Thread(target=report_end, daemon=True).start()


def stop_at_once(children: Iterable[Child], deadline_s: float) -> list[threading.Thread]:
    """Stops children at the same time, each in a thread that ends with it."""
    stops = [threading.Thread(target=child.stop, args=(deadline_s,), daemon=True) for child in children]
    for stop in stops:
        stop.start()
    return stops


def newly_stopped(places: Iterable[Place], most_s: float) -> Iterator[tuple[Place, Child]]:
    """The children that a signal or a debugger has stopped, each once; one that stays so for `most_s` is killed."""
    now_s = time.monotonic()
    for place in places:
        child = place.child
        if child is None or not child.alive or not child.is_stopped:
            place.stopped_since_s = None
        elif place.stopped_since_s is None:
            place.stopped_since_s = now_s
            yield place, child
        elif now_s - place.stopped_since_s > most_s:
            os.kill(child.pid, signal.SIGKILL)  # ChildEnded follows
