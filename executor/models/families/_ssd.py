"""Reads the fields of Mamba 2's mixers for families in which attention or FFNs stand beside them."""

from __future__ import annotations

import math
from typing import Any

from headrace.executor.models.blocks.recurrent import Ssd
from headrace.executor.models.families import Config
from headrace.executor.models.families._config import activation, flag, integer, number
from headrace.ipc.failure import ModelError

RECURRENT = ("linear_attention", "mamba", "mamba2", "recurrent")
"""Names of recurrent layers in `layer_types`."""
ATTENTION = ("full_attention", "attention")
IGNORED = {
    "mamba_chunk_size": "how the original code divides the work",
    "mamba_ssm_cache_dtype": "the engine's option of this name says it",
    "use_mamba_kernels": "how the original code runs",
    "num_logits_to_keep": "what transformers' code returns",
    "z_loss_coefficient": "training alone",
}


def step_limits(config: Config) -> tuple[float, float]:
    given = config.get("time_step_limit")
    given = [0.0, math.inf] if given is None else given
    pair = [_limit(each) for each in given] if isinstance(given, list | tuple) else []
    if len(pair) != 2 or not pair[0] <= pair[1]:
        raise ModelError(f"the config's time_step_limit must be two numbers, the lower one first, got {given!r:.80}")
    return pair[0], pair[1]


def _limit(given: Any) -> float:
    """NaN for what is no number. transformers writes infinity as {"__float__": "Infinity"}."""
    if isinstance(given, dict) and given.get("__float__") in ("Infinity", "-Infinity"):
        return float(given["__float__"])
    return float(given) if isinstance(given, int | float) and not isinstance(given, bool) else math.nan


def require_silu(config: Config, key: str) -> None:
    if activation(config, key, "silu") != "silu":
        raise ModelError(f"the config's {key} is {config[key]!r:.80}; silu is supported")


def recurrent_layers(config: Config, key: str, count: int) -> list[bool]:
    """Whether each layer is recurrent, by the config's list of layer types. Raises ModelError."""
    given = config.get(key)
    kinds = ["linear_attention"] * count if given is None else given
    if not isinstance(kinds, list) or set(map(str, kinds)) - {*RECURRENT, *ATTENTION}:
        known = ", ".join((*RECURRENT, *ATTENTION))
        raise ModelError(f"the config's {key} must be a list of layer types ({known}), got {given!r:.200}")
    if len(kinds) < count:
        raise ModelError(f"the config has {count} layers but {len(kinds)} {key}")
    return [each in RECURRENT for each in kinds[:count]]


def quotient(inner: int, hidden: int) -> float:
    """The expansion of which int(expansion * hidden), as everyone computes it, is `inner`."""
    found = inner / max(1, hidden)
    return found if int(found * hidden) == inner else math.nextafter(found, math.inf)


FIELDS = ("mamba_", "time_step_")
"""How the fields that `mamba` reads begin."""


def mamba(config: Config, **fields: Any) -> Ssd:
    """Mamba 2's mixer as Bamba's config describes it. Raises ModelError."""
    require_silu(config, "hidden_act")
    hidden, heads = integer(config, "hidden_size"), integer(config, "mamba_n_heads", 128)
    inner = int(number(config, "mamba_expand", 2) * hidden)
    given = config.get("mamba_d_head")
    head_dim = inner // max(1, heads) if given in (None, "auto") else integer(config, "mamba_d_head")
    if heads * head_dim != inner:
        raise ModelError(
            f"the config's {heads} heads of {head_dim} are {heads * head_dim} values, and mamba_expand times "
            f"hidden_size is {inner}"
        )
    found: dict[str, Any] = {
        "heads": heads,
        "head_dim": head_dim,
        "state_size": integer(config, "mamba_d_state", 256),
        "groups": integer(config, "mamba_n_groups", 1),
        "conv_width": integer(config, "mamba_d_conv", 4),
        "norm_eps": number(config, "rms_norm_eps", 1e-5),
        "bias": flag(config, "mamba_proj_bias", False),
        "conv_bias": flag(config, "mamba_conv_bias", True),
        "step_limits": step_limits(config),
        "at": "mamba",
    }
    return Ssd(**(found | fields))
