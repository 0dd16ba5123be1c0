"""Which requests may move when engines are lost: how many at once, how often each, and which one is to blame for the
deaths.

A request that kills engines kills each at the same point of its output, so a request that generates tokens between two
deaths caused neither.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headrace.frontend.fleet.decisions import RoutedRequest
from headrace.ipc.failure import Failure

_BURST_S = 4.0
_LEAST_CAPACITY = 64
"""Minimum capacity, in requests, that is assumed for a fleet, so that a small one may migrate at this rate too."""
QUARANTINED = "Quarantined"
"""Type of the failure of a blamed request: it concerns this request only, and the engines continue."""


class MigrationAllowance:
    """Limits the rate of migrations, so that the loss of many engines does not flood the others: a bucket of tokens,
    full at first, that gains a share of the fleet's capacity per second, up to the gain of `_BURST_S`."""

    def __init__(self, per_capacity_s: float) -> None:
        self._per_capacity_s = per_capacity_s
        self._left: float | None = None  # None until the first call, when the capacity is known

    def refill(self, since_s: float, capacity: int) -> None:
        """since_s: seconds since the last refill. capacity: how many requests all engines can run at once."""
        per_s = self._per_capacity_s * max(_LEAST_CAPACITY, capacity)
        most = _BURST_S * per_s
        self._left = min(most, (most if self._left is None else self._left) + since_s * per_s)

    def take(self, capacity: int) -> bool:
        """Whether one more request may migrate now; if so, it is counted."""
        if self._left is None:
            self.refill(0.0, capacity)
        assert self._left is not None
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def crash_suspects(requests: Iterable[RoutedRequest]) -> list[RoutedRequest]:
    return [each for each in requests if each.is_suspect]


def crash_culprits(running: list[RoutedRequest]) -> set[RoutedRequest]:
    """The requests to blame when an engine died that ran these: the only one that two dead engines ran, or one that was
    then tried alone on a third. If several requests ran on both, each is tried alone before any is blamed."""
    suspects = crash_suspects(running)
    tried = {each for each in suspects if each.deaths_without_token > 2}
    return tried or set(suspects if len(suspects) == 1 else ())


def quarantined(request: RoutedRequest, failure: Failure) -> Failure:
    died = "two engines" if request.deaths_without_token == 2 else "two engines and then a third"
    return msgspec.structs.replace(
        failure,
        message=f"{died} died while running this request, and no other request can be the cause; it is not sent to "
        f"another engine: {failure.message}",
        type=QUARANTINED,
    )


def used_up(limit: int, failure: Failure) -> Failure:
    """The failure of a request that has used up the option max_migrations."""
    text = f"this request lost {limit + 1} engines without a token between (max_migrations is {limit})"
    if not limit:
        text = "this request ends with its engine (max_migrations is 0)"
    return msgspec.structs.replace(failure, message=f"{text}: {failure.message}")
