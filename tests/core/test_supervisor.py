"""Children that die are replaced within their place's limits, and all that happens to them is an event."""

from __future__ import annotations

import time
from typing import Any

import pytest

from headrace.core.process.child import Child
from headrace.core.process.supervisor import (
    LONG_LIFE_S,
    ChildEnded,
    Place,
    Restarts,
    StartDue,
    Supervisor,
)
from headrace.ipc.failure import ModelError
from headrace.ipc.messages import SCHEMA_HASH, Start

DIES = ["-c", "import sys; sys.exit(3)"]
EVENT_S = 60.0


def launched(starts: list[Child]) -> Child:
    child = Child("doomed", DIES, Start(schema_hash=SCHEMA_HASH, options={}, bind=""))
    starts.append(child)
    return child


def next_event(supervisor: Supervisor, kind: type[Any]) -> Any:
    event = supervisor.events.get(timeout=EVENT_S)
    assert isinstance(event, kind), event
    return event


def test_a_child_that_dies_again_and_again_is_replaced_as_often_as_its_place_allows() -> None:
    supervisor, starts = Supervisor(), []  # type: ignore[var-annotated]
    place = Place("doomed", Restarts(most=2, first_pause_s=0.01), lambda: launched(starts))
    supervisor.start(place)
    for number in range(3):
        ended = next_event(supervisor, ChildEnded)
        assert (ended.place, ended.child) == (place, starts[number])
        assert "exit status 3" in ended.failure.message
        assert supervisor.replace(place) == (number < 2)
        if number < 2:
            assert next_event(supervisor, StartDue).child is starts[number]
            supervisor.start(place)
    assert len(starts) == 3
    assert supervisor.events.empty()


def test_a_child_that_has_served_for_long_is_replaced_as_if_it_were_the_first() -> None:
    supervisor, starts = Supervisor(), []  # type: ignore[var-annotated]
    place = Place("doomed", Restarts(most=1, first_pause_s=0.01), lambda: launched(starts))
    supervisor.start(place)
    for is_ready, comes_back in ((True, True), (True, True), (False, False)):
        next_event(supervisor, ChildEnded)
        place.is_ready = is_ready
        place.began_s = time.monotonic() - LONG_LIFE_S - 1
        assert supervisor.replace(place) == comes_back, (is_ready, comes_back)
        if comes_back:
            next_event(supervisor, StartDue)
            supervisor.start(place)


def test_pauses_double_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    class Timer:
        def __init__(self, pause_s: float, *_: Any) -> None:
            pauses.append(pause_s)

        def start(self) -> None: ...

    monkeypatch.setattr("headrace.core.process.supervisor.threading.Timer", Timer)
    supervisor = Supervisor()
    place = Place("doomed", Restarts(most=9, first_pause_s=0.5, longest_pause_s=3.0), lambda: launched([]))
    assert [supervisor.replace(place) for _ in range(10)] == [True] * 9 + [False]
    assert pauses == [0.5, 1.0, 2.0, *[3.0] * 6]


def test_a_child_that_cannot_be_started_has_ended_with_the_reason_and_its_name() -> None:
    def missing() -> Child:
        raise ModelError("the model's folder is away")

    supervisor = Supervisor()
    place = Place("engine-core", Restarts(most=1), missing)
    supervisor.start(place)
    ended = next_event(supervisor, ChildEnded)
    assert (ended.child, ended.failure.process, ended.failure.message) == (
        None,
        "engine-core",
        "the model's folder is away",
    )
