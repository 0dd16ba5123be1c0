"""AutoRound (Cheng et al. 2023), and INC, which is built on it. Its checkpoints have the layout of GPTQ or AWQ."""

from __future__ import annotations

import re
from typing import Any

from headrace.executor.checkpoints.quantisation import Config, Format, Stored, check_expression
from headrace.executor.checkpoints.quantisation.awq import Awq
from headrace.executor.checkpoints.quantisation.gptq import Gptq
from headrace.ipc.failure import ModelError

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
        differing = config.get("extra_config") or {}
        for name in filter(_is_pattern, differing):
            check_expression(name, name, "the AutoRound config's extra_config")
        dynamic = {
            name if _is_pattern(name) else re.escape(name) + "$": {
                key: value for key, value in own.items() if key in ("bits", "group_size")
            }
            for name, own in differing.items()
            if isinstance(own, dict) and own.get("bits", 16) < 16
        }
        version = "gptq_v2" if layout in WHOLE_ZEROS else "gptq"
        return Gptq.of({**config, "checkpoint_format": version, "dynamic": dynamic})


def _is_pattern(name: str) -> bool:
    return any(character in name for character in "*[(+$^")


FORMAT = AutoRound
