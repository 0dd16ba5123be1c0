"""Counts the tokens that each expert computes, and moves experts between a stage's ranks accordingly.

    every step                 rows that each of this rank's experts computed, into a window of steps
    every step_interval steps  loads of all experts (summed over the ranks) > a placement for each layer > experts move

Every rank does this after the same steps with the same loads, and so computes the same placements. Nothing reads the
weights between two steps: the packed bytes of an expert overwrite those of the expert that it replaces.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.core.options.eplb import Eplb
from headrace.executor.parallel.load_balancing.placement import Placement, rank_loads, rebalanced
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.ipc.messages import ExpertBalance
from headrace.kernels.expert_places import ExpertPlaces
from headrace.kernels.reference.moe import MovableDeltas, MovableExperts

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class BalancedExperts:
    """A layer's experts on this rank."""

    experts: MovableExperts
    places: ExpertPlaces
    loads: Tensor
    """[num_own] int64: the rows that each expert place has computed since loading."""
    placement: Placement
    """For each rank the experts in its places."""
    deltas: MovableDeltas | None = None
    """None if no adapters change them."""

    @property
    def num_experts(self) -> int:
        return len(self.places.replicas)

    @property
    def own(self) -> Sequence[int]:
        return self.placement[self.places.rank]


class ExpertBalancer:
    """One rank's balancer, for its stage's layers with experts, at least one. Used from the thread that runs steps."""

    def __init__(self, layers: Sequence[BalancedExperts], eplb: Eplb, place: RankCoordinates) -> None:
        self._layers, self._eplb, self._place = tuple(layers), eplb, place
        self._first = [layer.placement for layer in layers]
        self._counts = [layer.loads.numpy() for layer in layers]
        self._starts = np.cumsum([0, *(len(each) for each in self._counts[:-1])])  # each layer's first place in `_seen`
        self._seen = np.concatenate(self._counts)
        self._window: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=eplb.window_size)
        """For each step: the experts in this rank's places, numbered through the layers, and the rows of each."""
        self._ids = self._expert_ids()
        self._num_steps = self._num_rearrangements = 0
        self._rearrangement_s = 0.0
        interval = eplb.step_interval
        self._steps_left = max(1, interval // 4)
        self._can_move: list[bool] | None = None

    def after_step(self) -> ExpertBalance | None:
        """Must be called after each step that computed something, on every rank of the stage. Returns the measured
        balance in steps that log or rearrange."""
        counts = np.concatenate(self._counts)
        step, self._seen = (counts - self._seen).astype(np.int32), counts
        self._window.append((self._ids, step))
        self._num_steps += 1
        self._steps_left -= 1
        logs = self._eplb.log_balancedness and self._num_steps % self._eplb.log_balancedness_interval == 0
        if self._steps_left and not logs:
            return None
        # A step's program uses the same memory as these collectives, with turns of its own. So neither may begin before
        # every rank has read what the other left there.
        self._place.link.barrier()
        balance = self._log(self._of_ranks(step)) if logs else None
        if not self._steps_left:
            self._steps_left = self._eplb.step_interval
            balance = self._rearrange()
        self._place.link.barrier()
        return balance

    def _of_ranks(self, rows: np.ndarray) -> np.ndarray:
        """rows [number of own places] -> [num_ranks, num_layers]: the rows that each rank computed."""
        own = torch.from_numpy(np.add.reduceat(rows, self._starts).astype(np.float32))[None]
        return self._place.all_gather(own).reshape(-1, len(self._layers)).numpy()

    def _log(self, of_ranks: np.ndarray) -> ExpertBalance | None:
        balance = self._measured(of_ranks)
        if balance is not None and self._place.tp_rank == 0:
            logger.info(
                "EPLB step %d: avg_tokens=%.2f, max_tokens=%d, balancedness=%.4f; of the layers at least %.4f",
                self._num_steps,
                of_ranks.mean(0).sum(),
                of_ranks.max(0).sum(),
                of_ranks.mean(0).sum() / of_ranks.max(0).sum(),
                balance.min,
            )
        return balance

    def _measured(self, of_ranks: np.ndarray) -> ExpertBalance | None:
        """None if no rank has computed anything."""
        balancedness = _balancedness(of_ranks)
        if not len(balancedness):
            return None
        return ExpertBalance(
            min=float(balancedness.min()),
            p50=float(np.median(balancedness)),
            p90=float(np.percentile(balancedness, 10)),
            avg=float(balancedness.mean()),
            rearrangements=self._num_rearrangements,
            rearrangement_s=self._rearrangement_s,
        )

    def _rearrange(self) -> ExpertBalance | None:
        began_s, num_steps = time.monotonic(), len(self._window)
        of_ranks = self._of_ranks(np.sum([rows for _, rows in self._window], axis=0))
        loads = self._loads()
        self._window.clear()
        if self._can_move is None:
            self._can_move = self._find_movable()
        expected, num_moved, num_bytes = [], 0, 0
        for layer, first, own_loads, can_move in zip(self._layers, self._first, loads, self._can_move, strict=True):
            wanted = rebalanced(layer.placement, first, own_loads) if can_move else layer.placement
            expected.append(rank_loads(wanted, own_loads))
            if wanted is not layer.placement:
                pairs = zip(itertools.chain(*wanted), itertools.chain(*layer.placement), strict=True)
                num_moved += sum(new != old for new, old in pairs)
                num_bytes += self._move(layer, wanted)
        if num_moved:
            self._ids = self._expert_ids()
            self._num_rearrangements += 1
            self._rearrangement_s = time.monotonic() - began_s
        before, after = _balancedness(of_ranks), _balancedness(np.array(expected).T)
        if self._place.tp_rank == 0 and len(before):
            logger.info(
                "experts placed by the load of %d steps: %d of them moved (%.1f MiB sent in %.3f s); balancedness was "
                "%.4f (of the layers at least %.4f), and would have been %.4f (%.4f)",
                *(num_steps, num_moved, num_bytes / (1 << 20), time.monotonic() - began_s),
                *(before.mean(), before.min(), after.mean(), after.min()),
            )
        return self._measured(of_ranks)

    def _loads(self) -> list[list[float]]:
        """For each layer, each expert's rows within the window, summed over all ranks; the same on each rank."""
        sizes = [layer.num_experts for layer in self._layers]
        total = np.zeros(sum(sizes), np.float32)
        for ids, rows in self._window:
            np.add.at(total, ids, rows)
        summed = self._place.all_reduce(torch.from_numpy(total)[None])[0]
        return [each.tolist() for each in summed.split(sizes)]

    def _expert_ids(self) -> np.ndarray:
        firsts = np.cumsum([0, *(layer.num_experts for layer in self._layers)])
        return np.concatenate(
            [np.asarray(layer.own) + first for layer, first in zip(self._layers, firsts[:-1], strict=True)]
        )

    def _find_movable(self) -> list[bool]:
        """For each layer whether all ranks keep its experts in one form; experts that are kept as stored may differ."""
        found = []
        for number, layer in enumerate(self._layers):
            layout = torch.tensor(layer.experts.layout)[None]
            size = torch.tensor([[layout.numel()]])
            same = len(self._place.all_gather(size).unique()) == 1
            if same:
                layouts = self._place.all_gather(layout).reshape(-1, layout.numel())
                same = bool((layouts == layouts[0]).all())
            if not same and self._place.tp_rank == 0:
                logger.warning(
                    "EPLB does not move the experts of mixture %d of this stage: ranks store them in different forms",
                    number,
                )
            found.append(same)
        return found

    def _move(self, layer: BalancedExperts, wanted: Placement) -> int:
        """Moves a layer's experts to the wanted placement and returns the bytes that ranks sent. Needs memory for as
        many of a rank's experts as change."""
        rank, old = layer.places.rank, layer.placement
        needed = [(place, expert) for place, expert in enumerate(wanted[rank]) if expert != old[rank][place]]
        received: dict[int, Tensor] = {}
        num_sent = 0
        for senders in rounds(old, wanted):
            place_sent = senders[rank]
            sent = _bytes_of(layer.experts, 0 if place_sent is None else place_sent)
            parts = self._place.all_gather(sent[None]).reshape(-1, len(sent))
            coming = {old[sender][place]: sender for sender, place in enumerate(senders) if place is not None}
            for place, expert in needed:
                if expert in coming:
                    received[place] = parts[coming[expert]].clone()
            num_sent += len(coming) * len(sent)
        for place, data in received.items():
            _write(layer.experts, place, data)
        layer.placement = [list(each) for each in wanted]
        layer.places.write(layer.placement)
        if layer.deltas is not None:
            layer.deltas.move(layer.own)
        return num_sent


def costs(layers: Sequence[BalancedExperts], num_redundant: int) -> str:
    """The memory cost of redundant experts, in a sentence for the log."""
    ranks = len(layers[0].placement)
    copies = sum(sum(map(_size, layer.experts.memory(0))) for layer in layers) * num_redundant
    return (
        f"experts are balanced among {ranks} ranks; {num_redundant} copies in each of {len(layers)} layers take "
        f"{copies / (1 << 20):.1f} MiB in all, {copies / ranks / (1 << 20):.1f} MiB of each rank"
    )


def _size(part: Tensor) -> int:
    return part.nbytes


def rounds(old: Placement, wanted: Placement) -> list[list[int | None]]:
    """The transfers that give each rank its missing experts: in each round every rank sends all others one of its
    experts, given by its place, or nothing (None). Each expert that any rank lacks is sent once."""
    lacking = sorted({expert for new, had in zip(wanted, old, strict=True) for expert in set(new) - set(had)})
    queues: list[list[int]] = [[] for _ in old]
    for expert in lacking:
        holders = [rank for rank, experts in enumerate(old) if expert in experts]
        sender = min(holders, key=lambda rank: (len(queues[rank]), rank))
        queues[sender].append(list(old[sender]).index(expert))
    return [
        [queue[number] if number < len(queue) else None for queue in queues] for number in range(max(map(len, queues)))
    ]


def _bytes_of(experts: MovableExperts, place: int) -> Tensor:
    """[bytes of one expert] uint8"""
    return torch.cat([_flat(part) for part in experts.memory(place)])


def _write(experts: MovableExperts, place: int, data: Tensor) -> None:
    first = 0
    for part in map(_flat, experts.memory(place)):
        part.copy_(data[first : first + len(part)])
        first += len(part)


def _flat(part: Tensor) -> Tensor:
    return part.view(-1).view(torch.uint8)


def _balancedness(of_ranks: np.ndarray) -> np.ndarray:
    """of_ranks [num_ranks, num_layers] -> for each layer that computed anything, the ranks' mean load divided by their
    maximum: 1 is perfect balance."""
    most = of_ranks.max(0)
    return of_ranks.mean(0)[most > 0] / most[most > 0]
