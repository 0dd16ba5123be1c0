"""EXAONE 4: norms after attention and FFN and of each head's query and key; a hybrid's full layers have no rotation."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    head_dim_of,
    integer,
    layer_types,
    llama_like,
    optional_integer,
    rope,
)
from headrace.ipc.failure import ModelError


def positions_of(config: Config) -> list[Positions]:
    """Of each layer: windows where `layer_types` or the pattern says, and rotation there alone if any has one."""
    num_layers, head_dim = integer(config, "num_hidden_layers"), head_dim_of(config)
    window = optional_integer(config, "sliding_window")
    pattern = config.get("sliding_window_pattern") or 4
    if isinstance(pattern, int):
        pattern = "L" * (pattern - 1) + "G"  # local and global layers
    if not isinstance(pattern, str) or not set(pattern) <= {"L", "G"}:
        raise ModelError(
            f"the config's sliding_window_pattern must be a number, or L and G for layers, got {pattern!r}"
        )
    slides = [window is not None and pattern[index % len(pattern)] == "L" for index in range(num_layers)]
    default = ["sliding_attention" if each else "full_attention" for each in slides]
    rotary = rope(config, head_dim, 1e6)
    positions = {
        "sliding_attention": Positions(rotary, window),
        "full_attention": Positions(rotary if window is None else None),
    }
    return [positions[kind] for kind in layer_types(config, num_layers, default)]


def build(config: Config) -> ArchSpec:
    return llama_like(
        config,
        positions=positions_of(config),
        attention={"qk_norm": "head"},
        norm_placement="output",
    )


FAMILY = Family(("Exaone4ForCausalLM",), build)
