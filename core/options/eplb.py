"""vLLM's eplb_config (the expert parallelism load balancer): the supported fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from headrace.ipc.failure import OptionError

if TYPE_CHECKING:
    from headrace.core.options.engine_options import Options

BETWEEN_STEPS = "experts move between two steps, never beside them; leave it out or set false"
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_async": ((False,), BETWEEN_STEPS),
    "policy": (("default",), "there is one policy, default"),
    "communicator": ((), "experts move by the collectives that the ranks have anyway; leave it out"),
}
"""vLLM's fields with only one or no choice here: the values that pass, and why others are refused."""


class Eplb(msgspec.Struct, frozen=True, kw_only=True):
    """How experts are balanced; see executor/parallel/load_balancing. The defaults are vLLM's."""

    window_size: int = 1000
    """A placement is computed from the loads of at most so many last steps."""
    step_interval: int = 3000
    """Steps from one rearrangement to the next. The first comes after a quarter of them."""
    num_redundant_experts: int = 0
    """Number of additional copies of experts in each layer, on all ranks together."""
    log_balancedness: bool = False
    log_balancedness_interval: int = 1
    """Steps from one log line to the next."""


def eplb_of(options: Options) -> Eplb | None:
    """Reads `enable_eplb` and `eplb_config`. None if experts are not balanced. Raises OptionError, naming the field."""
    given = {name: value for name, value in options.eplb_config.items() if value is not None}
    if not options.enable_eplb:
        if given:
            raise OptionError(f"eplb_config has {', '.join(sorted(given))}, which needs enable_eplb")
        return None
    if not options.enable_expert_parallel:
        raise OptionError("enable_eplb moves whole experts between ranks: it needs enable_expert_parallel")
    if options.shares_experts:
        raise OptionError(
            "enable_eplb balances the experts of one engine's ranks, and with data_parallel_size engines share theirs: "
            "leave enable_eplb out, or use tensor_parallel_size alone"
        )
    if options.expert_placement_strategy != "linear":
        raise OptionError(
            f"expert_placement_strategy={options.expert_placement_strategy} beside enable_eplb, which places experts "
            "by their load: leave one of them out"
        )
    for name, (passing, why) in FIXED.items():
        if name in given and (value := given.pop(name)) not in passing:
            raise OptionError(f"eplb_config has {name}={value!r}: {why}")
    if unknown := sorted(set(given) - set(Eplb.__struct_fields__)):
        known = ", ".join((*Eplb.__struct_fields__, *FIXED))
        raise OptionError(f"eplb_config: unknown keys {', '.join(unknown)}; known: {known}")
    values: dict[str, Any] = {name: _value(name, value) for name, value in given.items()}
    return Eplb(**values)


def _value(name: str, value: Any) -> int | bool:
    if name == "log_balancedness":
        if isinstance(value, bool):
            return value
        raise OptionError(f"eplb_config has {name}={value!r}; it must be true or false")
    least = 0 if name == "num_redundant_experts" else 1
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"eplb_config has {name}={value!r}; it must be a whole number, at least {least}")
    return value
