"""Decides which request to blame for the deaths of engines, and words its failure.

A request that kills engines kills each at the same point of its output, so a request that generates tokens between two
deaths caused neither.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headrace.frontend.fleet.decisions import RoutedRequest
from headrace.ipc.failure import Failure

QUARANTINED = "Quarantined"
"""Type of the failure of a blamed request: it concerns this request only, and the engines continue."""


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
