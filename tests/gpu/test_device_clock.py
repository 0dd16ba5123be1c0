"""When steps ran on a device, in the host's time: from the device's own clock, held to the host's."""

from __future__ import annotations

import time

import pytest

from headrace.executor.gpu.device_clock import MOST_LATE_S, DeviceClock


class At:
    """A mark that passed at some time of the device's own; a device too, that makes marks of now, which is 5 s."""

    def __init__(self, at_s: float = 5.0) -> None:
        self.at_s = at_s

    def mark(self) -> At:
        return self

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def seconds_since(self, earlier: At) -> float:
        return self.at_s - earlier.at_s


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The host's time, to be changed."""
    value = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: value[0])
    return value


def test_gaps_between_steps_are_the_devices_however_late_the_host_looks(now: list[float]) -> None:
    clock = DeviceClock(At())
    now[0] = 1000.0101
    assert clock.times(At(5.0), At(5.010), waited=True) == pytest.approx((1000.0, 1000.010))
    now[0] += 0.5
    began_s, ended_s = clock.times(At(5.0101), At(5.0201), waited=False)
    assert (began_s, ended_s) == pytest.approx((1000.0101, 1000.0201))
    now[0] = 1000.0302 + MOST_LATE_S / 2
    began_s, ended_s = clock.times(At(5.0202), At(5.0302), waited=True)
    assert (began_s, ended_s) == pytest.approx((1000.0202, 1000.0302)), "the host's way back is not the device's time"


def test_clocks_that_drift_are_brought_together_when_the_host_waits_and_no_step_ends_in_the_future(
    now: list[float],
) -> None:
    clock = DeviceClock(At())
    now[0] = 2000.0
    assert clock.times(At(1004.9), At(1004.96), waited=True)[1] == 2000.0, "50 ms behind after 1000 s"
    now[0] = 2000.01
    assert clock.times(At(1005.9), At(1006.0), waited=False) == pytest.approx((1999.91, 2000.01)), "a second ahead"
