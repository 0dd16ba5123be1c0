"""Orders about adapters, carried out beside steps in the processes that have the ranks or drive them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from headrace.executor.rank import ModelHost
from headrace.ipc.adapters import AdapterFacts
from headrace.ipc.failure import Failure, HeadraceError, ModelError, let_interrupts_pass
from headrace.ipc.wait import BoundedCalls

if TYPE_CHECKING:  # a rank in the core's own process needs no messages
    from headrace.executor.placement.worker_messages import FillSlot, SlotFilled


def carry_out(
    host: ModelHost, order: FillSlot, answer: Callable[[SlotFilled], None], who: str, timeout_s: float = math.inf
) -> None:
    """Answers a load with its facts or its failure."""
    from headrace.executor.placement.worker_messages import SlotFilled

    if not order.path:
        host.drop_adapter(order.slot)
        return
    try:
        filled = SlotFilled(facts=load_in_time(host, order.slot, order.path, is_3d=order.is_3d, timeout_s=timeout_s))
    except BaseException as error:
        let_interrupts_pass(error)
        filled = SlotFilled(facts=None, failure=Failure.of(error, process=who, phase="adapter"))
    answer(filled)


def load_in_time(host: ModelHost, slot: int, path: str, *, is_3d: bool, timeout_s: float) -> AdapterFacts:
    """Raises WaitTimeoutError for a load that hangs, as on a dead network mount: the slot cannot be used any more then,
    since the load may yet end."""
    if timeout_s == math.inf:
        return host.load_adapter(slot, path, is_3d=is_3d)
    calls = BoundedCalls(timeout_s)  # of its own, since a call that hangs blocks further ones
    return calls.run(f"loading the adapter {path}", lambda: host.load_adapter(slot, path, is_3d=is_3d))


def agreed(answers: Sequence[SlotFilled]) -> AdapterFacts:
    """The facts of an adapter that several processes have loaded. Raises the first failure, and ModelError if they read
    different content."""
    for each in answers:
        if each.failure is not None:
            raise HeadraceError(failure=each.failure)
    found = [each.facts for each in answers if each.facts is not None]
    identities = sorted({facts.identity for facts in found})
    if len(identities) > 1:
        raise ModelError(f"the ranks read different content, of the identities {' and '.join(identities)}")
    return msgspec.structs.replace(found[0], num_bytes=max(facts.num_bytes for facts in found))
