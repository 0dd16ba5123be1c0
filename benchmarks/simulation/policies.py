"""Other routing policies, to compare the router with. Each sees only the requests of its own frontend.

They replace the choice of an engine alone; the router still migrates requests whose engine is lost.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

from headrace.frontend.fleet.decisions import NoEngineError, RoutedRequest, RouterOptions
from headrace.frontend.fleet.members import Member
from headrace.frontend.fleet.router import Router
from headrace.ipc.prefix_names import CHUNK_TOKENS, prefix_names


class _Rule(Router):
    """A policy that chooses among usable engines. It assumes that all are alike and serve one model."""

    def _choose(self, request: RoutedRequest, now_s: float, *, is_new: bool = False) -> tuple[Member, str]:
        usable = [each for each in self.members.values() if each.is_usable(now_s)]
        if not usable:
            raise NoEngineError("no engine takes requests now")
        return self._pick(request, usable), "load"

    def _pick(self, request: RoutedRequest, usable: list[Member]) -> Member:
        raise NotImplementedError


class RoundRobin(_Rule):
    def __init__(self, options: RouterOptions, chance: random.Random) -> None:
        super().__init__(options, chance)
        self._turns = itertools.count(chance.randrange(1 << 16))

    def _pick(self, request: RoutedRequest, usable: list[Member]) -> Member:
        return usable[next(self._turns) % len(usable)]


class LeastRequests(_Rule):
    def _pick(self, request: RoutedRequest, usable: list[Member]) -> Member:
        least = min(each.num_outputs for each in usable)
        return self._chance.choice([each for each in usable if each.num_outputs == least])


class CacheAware(_Rule):
    """The policy cache_aware of SGLang's router: while loads are unequal, chooses the engine with the fewest requests;
    otherwise the one whose tree of earlier prompts matches the longest prefix, if that is a share of the prompt above
    CACHE_THRESHOLD; otherwise the one with the smallest tree."""

    CACHE_THRESHOLD = 0.3
    BALANCE_ABS_THRESHOLD = 64
    BALANCE_REL_THRESHOLD = 1.5

    def __init__(self, options: RouterOptions, chance: random.Random) -> None:
        super().__init__(options, chance)
        self._sent: dict[int, int] = {}  # by prefix, a bit mask of the engines that it was sent to
        self._tree_sizes: dict[Member, int] = {}

    def _pick(self, request: RoutedRequest, usable: list[Member]) -> Member:
        keys = prefix_names(request.tokens, request.prefix_key, CHUNK_TOKENS)
        loads = [each.num_outputs for each in usable]
        most, least = max(loads), min(loads)
        if most - least > self.BALANCE_ABS_THRESHOLD and most > self.BALANCE_REL_THRESHOLD * least:
            target = usable[loads.index(least)]
        else:
            target = self._best_match(request, usable, keys)
        for key in keys:
            if not self._sent.get(key, 0) & target.bit:
                self._sent[key] = self._sent.get(key, 0) | target.bit
                self._tree_sizes[target] = self._tree_sizes.get(target, 0) + 1
        return target

    def _best_match(self, request: RoutedRequest, usable: list[Member], keys: list[int]) -> Member:
        holders, length = sum(each.bit for each in usable), 0
        for key in keys:
            longer = holders & self._sent.get(key, 0)
            if not longer:
                break
            holders, length = longer, length + 1
        if length * CHUNK_TOKENS > self.CACHE_THRESHOLD * request.num_prompt_tokens:
            return next(each for each in usable if each.bit & holders)
        return min(usable, key=lambda each: self._tree_sizes.get(each, 0))


POLICIES: dict[str, Callable[[RouterOptions, random.Random], Router]] = {
    "headrace": Router,
    "round robin": RoundRobin,
    "least requests": LeastRequests,
    "cache-aware": CacheAware,
}
