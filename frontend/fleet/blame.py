"""Which request is blamed for the deaths of engines, and what it is told.

What kills an engine does so at one place, so a request that brings tokens between two deaths caused neither.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headrace.frontend.fleet.decisions import RoutedRequest
from headrace.ipc.failure import Failure

QUARANTINED = "Quarantined"
"""Type of the failure of a request that is blamed: it is that request's own, and the engines go on."""


def suspects_of(requests: Iterable[RoutedRequest]) -> list[RoutedRequest]:
    return [each for each in requests if each.is_suspect]


def guilty_of(on_board: list[RoutedRequest]) -> set[RoutedRequest]:
    """Of an engine that died: the one request that was on board of two, or the one that was tried alone after two. When
    several were on board of both, one of them may be the cause, and each is tried alone before any is blamed."""
    suspects = suspects_of(on_board)
    tried = {each for each in suspects if each.deaths_without_token > 2}
    return tried or set(suspects if len(suspects) == 1 else ())


def quarantined(request: RoutedRequest, failure: Failure) -> Failure:
    died = "two engines" if request.deaths_without_token == 2 else "two engines and then a third"
    return msgspec.structs.replace(
        failure,
        message=f"{died} died with this request on board, and no other request can be the cause; it is not sent to "
        f"another engine: {failure.message}",
        type=QUARANTINED,
    )


def used_up(limit: int, failure: Failure) -> Failure:
    """Of a request that has gone to another engine as often as the option max_migrations lets it."""
    text = f"this request lost {limit + 1} engines without a token between (max_migrations is {limit})"
    if not limit:
        text = "this request ends with its engine (max_migrations is 0)"
    return msgspec.structs.replace(failure, message=f"{text}: {failure.message}")
