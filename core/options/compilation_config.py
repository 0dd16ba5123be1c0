"""vLLM's compilation_config and optimization_level: which of their parts are options here.

There is no compiler to configure. What sets CUDA graphs is passed on to the options that do; the other keys have no
effect, which a note says; unknown ones are refused.
"""

from __future__ import annotations

import enum
import json
import types
from collections.abc import Mapping
from typing import Any

import msgspec

DEFAULTS: Mapping[str, Any] = types.MappingProxyType({"compilation_config": {}, "optimization_level": 2})
"""vLLM's options that are read here, and their defaults."""
SHORT: Mapping[str, str] = types.MappingProxyType({"compilation_config": "-cc", "optimization_level": "-O"})
NO_COMPILER = "there is no compiler to configure; cudagraph_capture_sizes and enforce_eager set graphs"
_SAME = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
"""Keys that are options of the same name."""
_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
_NO_GRAPHS = (("cudagraph_mode", "NONE"), ("cudagraph_mode", "0"), ("use_cudagraph", "FALSE"))
_WITHOUT_EFFECT = (
    *("level", "mode", "debug_dump_path", "cache_dir", "local_cache_dir", "compile_cache_save_format", "backend"),
    *("custom_ops", "splitting_ops", "compile_mm_encoder", "compile_sizes", "compile_ranges_split_points"),
    *("compile_ranges_endpoints", "use_inductor", "inductor_compile_config", "inductor_passes", "pass_config"),
    *("use_inductor_graph_partition", "dynamic_shapes_config", "cudagraph_num_of_warmups", "cudagraph_copy_inputs"),
    *("cudagraph_specialize_lora", "cudagraph_mm_encoder", "full_cuda_graph", "fast_moe_cold_start"),
    *("encoder_cudagraph_max_images_per_batch", "encoder_cudagraph_token_budgets", "static_all_moe_layers"),
)
_KNOWN = (*_SAME, "cudagraph_mode", "use_cudagraph", *_WITHOUT_EFFECT)


class ReadConfig(msgspec.Struct):
    options: dict[str, Any] = {}
    """Options of Headrace's, by name."""
    problem: str = ""
    note: str = ""


def parts_of(name: str, value: Any, spelled: str) -> ReadConfig:
    """What an option of DEFAULTS asks for. spelled: the option as the user writes it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            if value.lower() != "none":
                return ReadConfig(problem=f"{spelled}={value}: it must be a JSON object, or a number of 0 to 3")
            value = None
    if value is None or value == DEFAULTS[name]:
        return ReadConfig()
    if isinstance(value, int) and not isinstance(value, bool):
        if value not in range(4):
            return ReadConfig(problem=f"{spelled}={value}: it must be 0 to 3")
        return ReadConfig({"enforce_eager": True}) if value == 0 else ReadConfig(note=_no_effect(f"{spelled}={value}"))
    if not isinstance(value, Mapping) or name != "compilation_config":
        return ReadConfig(
            problem=f"{spelled}={value}: it must be {'a JSON object, or ' if value else ''}a number of 0 to 3"
        )
    return _of_keys(value, spelled)


def _of_keys(given: Mapping[str, Any], spelled: str) -> ReadConfig:
    found, without_effect = ReadConfig(options={}), []
    for key, value in given.items():
        if isinstance(value, enum.Enum):
            value = value.name
        if key not in _KNOWN:
            return ReadConfig(problem=f"{spelled}: unknown key {key}; known: {', '.join(_KNOWN)}")
        if value is None:
            continue
        if key in _SAME:
            found.options[key] = value
        elif key == "cudagraph_mode" and str(value).upper() not in (*_MODES, "0", "1", "2"):
            return ReadConfig(problem=f"{spelled}: cudagraph_mode={value}; it must be one of {', '.join(_MODES)}")
        elif (key, str(value).upper()) in _NO_GRAPHS:
            found.options["enforce_eager"] = True
        elif key not in ("cudagraph_mode", "use_cudagraph") or str(value).upper() in ("FULL", "PIECEWISE", "1", "2"):
            without_effect.append(key)
    if without_effect:
        found.note = _no_effect(f"{spelled}: {', '.join(without_effect)}", len(without_effect))
    return found


def _no_effect(what: str, count: int = 1) -> str:
    return f"{what} {'has' if count == 1 else 'have'} no effect: {NO_COMPILER}"
