"""Checks which engines the frontends know, in a simulation with coordinators.

- Every frontend must know an engine that has been healthy, and connected to a running coordinator, for KNOWN_WITHIN_S.
- No frontend may know an engine that has been down, while a coordinator ran, for FORGOTTEN_WITHIN_S.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.frontend.fleet.directory import FORGET_AFTER_S
from headrace.frontend.fleet.pool import EnginePool
from headrace.ipc.coordination import LEASE_S
from simulation.coordinators import Announcing, SimulatedCoordinator

KNOWN_WITHIN_S = 20.0
"""Allows for several lost announcements and Members messages in a row, and a frontend's request for all members."""
FORGOTTEN_WITHIN_S = 2 * LEASE_S + FORGET_AFTER_S + 20.0


class Membership:
    """Checks membership; `look` is called about once per virtual second."""

    def __init__(
        self,
        announcing: Mapping[str, Announcing],
        coordinators: Sequence[SimulatedCoordinator],
        pools: Sequence[EnginePool],
    ) -> None:
        self._announcing, self._coordinators, self._pools = announcing, coordinators, pools
        self._heard_since_s: dict[str, float] = {}
        self._gone_since_s: dict[str, float] = {}
        self._told: set[tuple[int, str]] = set()

    def look(self, now_s: float) -> list[str]:
        """New violations, in words; each is reported once."""
        if not self._coordinators:
            return []
        found: list[str] = []
        steady_s = now_s - min(each.up_since_s for each in self._coordinators)
        expected, gone = dict[str, float](), dict[str, float]()  # seconds in that state, by the engine's name
        for name, announcing in self._announcing.items():
            self._note(name, announcing, now_s)
            heard_s = now_s - self._heard_since_s.get(name, now_s)
            gone_s = now_s - self._gone_since_s.get(name, now_s)
            if heard_s > KNOWN_WITHIN_S:
                expected[name] = heard_s
            if min(gone_s, steady_s) > FORGOTTEN_WITHIN_S:
                gone[name] = gone_s
        for index, pool in enumerate(self._pools):
            for name in sorted(expected.keys() - pool.addresses):
                found += self._once(index, name, f"has not been found for {expected[name]:.0f} s")
            for name in sorted(gone.keys() & pool.addresses):
                found += self._once(index, name, f"is known {gone[name]:.0f} s after its end")
        return found

    def _note(self, name: str, announcing: Announcing, now_s: float) -> None:
        engine = announcing.engine
        is_heard = any(
            coordinator.registry is not None and not way.is_cut
            for coordinator, way in zip(self._coordinators, announcing.ways, strict=True)
        )
        if engine.is_healthy and is_heard:
            self._heard_since_s.setdefault(name, now_s)
        else:
            self._heard_since_s.pop(name, None)
        if engine.listens:
            self._gone_since_s.pop(name, None)
        else:
            self._gone_since_s.setdefault(name, now_s)

    def _once(self, index: int, name: str, what: str) -> list[str]:
        if (index, name) in self._told:
            return []
        self._told.add((index, name))
        return [f"frontend {index}: {name} {what}"]
