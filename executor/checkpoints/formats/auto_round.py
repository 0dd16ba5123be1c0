"""AutoRound (Cheng et al. 2023), and INC, which is built on it. Its checkpoints have the layout of GPTQ or AWQ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.executor.checkpoints.expressions import check_expression
from headrace.executor.checkpoints.formats import Config, Format, Stored, number
from headrace.executor.checkpoints.formats._keys import ANY, BY_TENSORS, COMMON, OF_TOOLS, READ, Keys, RefusedKey, keys
from headrace.executor.checkpoints.formats.awq import Awq
from headrace.executor.checkpoints.formats.gptq import Gptq
from headrace.ipc.failure import ModelError

SPECIAL = "*+?^$()[]{}|\\"
"""Characters that a regular expression has and a module's name has not."""
IN_FLOATS = 16
"""Bits from which on a module's weights are floats."""
WHOLE_ZEROS = ("auto_round", "auto_round:gptqmodel")
"""Layouts that store the zero point itself; GPTQ's other layouts store the zero point minus 1."""


class AutoRound(Format):
    """Never instantiated: `of` returns a `Gptq` or `Awq`."""

    names = ("auto-round", "auto_round", "inc", "intel/auto-round")
    stored = (
        Stored(
            "2 to 8 bits (2 and 3 kept in 4, 5 to 7 in 8), symmetric or not, in the layouts of GPTQ and AWQ and its "
            "own, with `extra_config`",
            ("int4", "int8"),
            ("test_autoround_stores_in_the_layouts_of_gptq_and_awq_and_its_own",),
        ),
    )
    keys: ClassVar[Keys] = {
        **COMMON,
        **OF_TOOLS,
        **keys(READ, "bits", "group_size", "sym", "packing_format", "data_type"),
        **keys(
            RefusedKey("scales that are quantised themselves are not supported"), *("super_bits", "super_group_size")
        ),
        "extra_config": {ANY: {**OF_TOOLS, **keys(READ, "bits", "group_size", "sym"), "data_type": BY_TENSORS}},
    }
    made_by = "auto-round 0.16 for 2 to 5 bits (benchmarks/quantised_tools.py), a writer in tests"

    @classmethod
    def of(cls, config: Config) -> Any:
        layout = str(config.get("packing_format", "auto_round:auto_gptq"))
        kind = str(config.get("data_type", "int"))
        if kind != "int" or not any(name in layout for name in ("gptq", "awq", "auto_round")) or "fp" in layout:
            raise ModelError(
                f"AutoRound's layout {layout} of {kind} is not supported; those of GPTQ and AWQ are, of int"
            )
        if "awq" in layout:
            return Awq.of({**config, "zero_point": True, "version": "gemm"})
        version = "gptq_v2" if layout in WHOLE_ZEROS else "gptq"
        dynamic = _dynamic(config.get("extra_config") or {})
        return Gptq.of({**config, "checkpoint_format": version, "format": None, "dynamic": dynamic})


def _dynamic(differing: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """AutoRound's `extra_config` as GPTQModel's `dynamic`. It has what differs for modules, by their names, of which
    the last parts suffice, and by expressions that may match in the middle; names take precedence."""
    exact, by_pattern = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    for name, own in differing.items():
        if _is_pattern(name):
            check_expression(name, name, "the AutoRound config's extra_config")
        if not isinstance(own, Mapping) or number(own, ("bits",), "AutoRound", 0) >= IN_FLOATS:
            continue
        given = {key: own[key] for key in ("bits", "group_size", "sym") if own.get(key) is not None}
        if _is_pattern(name):
            by_pattern[f".*?(?:{name})"] = given
        else:
            exact[rf"(?:.*\.)?{re.escape(name)}$"] = given
    return exact | by_pattern


def _is_pattern(name: str) -> bool:
    return any(character in name for character in SPECIAL)


FORMAT = AutoRound
