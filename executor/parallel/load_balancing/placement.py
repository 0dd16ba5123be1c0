"""Chooses the placement of a layer's experts from the tokens that each computes: pure functions, without torch.

The algorithm is that of DeepSeek's expert parallelism load balancer (DeepSeek-V3, section 3.4) for one group of ranks:
the experts with the largest load per copy get more copies, and the copies, largest load first, go to the rank with the
least load. Every rank has equally many, and no two of one expert.

A load is an expert's, in any unit; its copies share it evenly. A placement has, for each rank, the experts in its
places.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

Placement = Sequence[Sequence[int]]
LEAST_GAIN = 1 - 1e-9
"""A smaller relative gain may be a rounding error and is ignored."""


def rank_loads(placement: Placement, loads: Sequence[float]) -> list[float]:
    """The load of each rank."""
    copies = _copies(placement, len(loads))
    return [sum(loads[expert] / copies[expert] for expert in experts) for experts in placement]


def rebalanced(current: Placement, first: Placement, loads: Sequence[float]) -> Placement:
    """The placement with the smallest maximum load of a rank: the current one unless another is better, and never one
    that is worse than the first. Experts that stay on a rank keep their places."""
    best, least = current, max(rank_loads(current, loads))
    for candidate in (packed(loads, copies_of(loads, current), len(current)), first):
        if (most := max(rank_loads(candidate, loads))) < least * LEAST_GAIN:
            best, least = candidate, most
    return best if best is current else in_place(best, current)


def copies_of(loads: Sequence[float], current: Placement) -> list[int]:
    """The number of copies of each expert: as many in total as there are places, at most one on each rank."""
    num_places, num_ranks = sum(map(len, current)), len(current)
    copies = [1] * len(loads)
    heap = [(-load, 1, expert) for expert, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(num_places - len(loads)):
        while heap[0][1] == num_ranks:
            heapq.heappop(heap)
        _, count, expert = heap[0]
        copies[expert] = count + 1
        heapq.heapreplace(heap, (-loads[expert] / (count + 1), count + 1, expert))
    return copies


def packed(loads: Sequence[float], copies: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Distributes the copies over the ranks, equally many on each."""
    num_places = sum(copies) // num_ranks
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    order = sorted(range(len(loads)), key=lambda expert: (-loads[expert] / copies[expert], expert))
    for expert in itertools.chain.from_iterable([each] * copies[each] for each in order):
        share = loads[expert] / copies[expert]
        free = [rank for rank, experts in enumerate(ranks) if len(experts) < num_places]
        open_to = [rank for rank in free if expert not in ranks[rank]]
        if not open_to:
            open_to = [_make_room(ranks, totals, free[0], expert, loads, copies)]
        rank = min(open_to, key=lambda rank: (totals[rank], len(ranks[rank]), rank))
        ranks[rank].append(expert)
        totals[rank] += share
    return ranks


def _make_room(
    ranks: list[list[int]], totals: list[float], free: int, expert: int, loads: Sequence[float], copies: Sequence[int]
) -> int:
    """Makes room on a full rank, for when every rank with a free place has the expert already: the full rank gives one
    of its experts to rank `free`. Such an expert exists, as `free` has fewer experts, one of which is `expert`. Returns
    the full rank."""
    moves = (
        (max(totals[rank] - (own := loads[each] / copies[each]), totals[free] + own), rank, each)
        for rank, experts in enumerate(ranks)
        if expert not in experts
        for each in experts
        if each not in ranks[free]
    )
    _, rank, given = min(moves)
    share = loads[given] / copies[given]
    ranks[rank].remove(given)
    ranks[free].append(given)
    totals[rank] -= share
    totals[free] += share
    return rank


def in_place(wanted: Placement, current: Placement) -> list[list[int]]:
    """The same experts on each rank; those that a rank already has stay in their places."""
    placed = []
    for new, old in zip(wanted, current, strict=True):
        come = iter(sorted(set(new) - set(old)))
        kept = set(new) & set(old)
        placed.append([expert if expert in kept else next(come) for expert in old])
    return placed


def _copies(placement: Placement, num_experts: int) -> list[int]:
    copies = [0] * num_experts
    for experts in placement:
        for expert in experts:
            copies[expert] += 1
    return copies
