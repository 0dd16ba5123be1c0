"""Which sampling defaults an engine may be given, and what they may be: found wrong before anything is started."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from typing import Any

from headrace.ipc.failure import OptionError

# field -> (lowest, highest, whether the lowest itself is excluded)
RANGES: Mapping[str, tuple[float, float, bool]] = types.MappingProxyType(
    {
        "temperature": (0, math.inf, False),
        "top_p": (0, 1, True),
        "top_k": (-1, 2**31 - 1, False),
        "min_p": (0, 1, False),
        "repetition_penalty": (0, math.inf, True),
        "presence_penalty": (-2, 2, False),
        "frequency_penalty": (-2, 2, False),
        "max_tokens": (1, 2**31 - 1, False),
        "min_tokens": (0, 2**31 - 1, False),
    }
)
_WHOLE = ("top_k", "max_tokens", "min_tokens")


def check_sampling_defaults(override: Mapping[str, Any]) -> None:
    """Raises OptionError for what `override_generation_config` cannot set, or not to that."""
    unknown = [name for name in override if name not in RANGES]
    if unknown:
        raise OptionError(f"override_generation_config cannot set {', '.join(unknown)}; it can set {', '.join(RANGES)}")
    for name, value in override.items():
        low, high, open_low = RANGES[name]
        kind = int if name in _WHOLE else (int, float)
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        # Written so that NaN fails.
        if not is_number or not (low < value if open_low else low <= value) or not value <= high or value == math.inf:
            allowed = f"a {'whole ' if name in _WHOLE else ''}number, {'over' if open_low else 'at least'} {low:g}"
            allowed += f" and at most {high:g}" if high in (1, 2) else ""
            raise OptionError(f"override_generation_config sets {name}={value!r:.100}: it must be {allowed}")
