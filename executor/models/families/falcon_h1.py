"""Falcon-H1: attention and Mamba 2's mixer side by side in all layers, and multipliers of most projections."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.parallel import Parallel
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import (
    biases,
    dense,
    flag,
    head_dim_of,
    integer,
    llama_like,
    number,
    positive,
)
from headrace.executor.models.families._ssd import IGNORED, mamba, quotient
from headrace.executor.models.families.bamba import NAMES
from headrace.ipc.failure import ModelError

KINDS = ("weight", "bias")
MIXED = ("gate", "x", "b", "c", "steps")
"""Parts of the recurrent mixer's input projection, in the order of `ssm_multipliers`."""


def _multipliers(config: Config, key: str, count: int) -> list[float]:
    given = config.get(key)
    found = [1.0] * count if given is None else given
    if not isinstance(found, list) or len(found) != count or not all(isinstance(each, int | float) for each in found):
        raise ModelError(f"the config's {key} must be {count} numbers, got {given!r:.80}")
    return [float(each) for each in found]


def _scaled(config: Config) -> tuple[tuple[str, float], ...]:
    """What transformers multiplies the projections' inputs and results by, as factors of their weights and biases."""
    gate, down = _multipliers(config, "mlp_multipliers", 2)
    ssm_in, ssm_out = (positive(config, f"ssm_{name}_multiplier", 1.0) for name in ("in", "out"))
    attention_in, attention_out = (positive(config, f"attention_{name}_multiplier", 1.0) for name in ("in", "out"))
    factors = {  # of weights, of biases
        NAMES.gate: (gate, gate),
        NAMES.down: (down, down),
        "mamba.out_proj": (ssm_out, ssm_out),
        NAMES.output: (attention_out, attention_out),
        **dict.fromkeys((NAMES.query, NAMES.key, NAMES.value), (attention_in, 1.0)),
    }
    for name, factor in zip(MIXED, _multipliers(config, "ssm_multipliers", 5), strict=True):
        factors[f"mamba.in_{name}"] = (factor * ssm_in, factor)
    pairs = [(f"{name}.{kind}", each) for name, both in factors.items() for kind, each in zip(KINDS, both, strict=True)]
    return tuple((name, factor) for name, factor in pairs if factor != 1)


def build(config: Config) -> ArchSpec:
    head_dim, normed = head_dim_of(config), flag(config, "mamba_rms_norm", False)
    stored = config.get("mamba_d_ssm", 1024)
    hidden = integer(config, "hidden_size")
    inner = integer(config, "mamba_d_ssm", 1024)
    expand = number(config, "mamba_expand", 2) if stored is None else quotient(inner, hidden)
    recurrent = mamba(
        config | {"mamba_expand": expand}, output_bias=flag(config, "projectors_bias", False), normed=normed
    )
    gates_last = flag(config, "mamba_norm_before_gate", True)
    if normed and gates_last:
        raise NotNativeError("a norm before the gate (mamba_norm_before_gate) is not supported")
    spec = llama_like(
        config,
        attention={
            "scale": head_dim**-0.5 * positive(config, "key_multiplier", 1.0),
            **biases(config, "attention_bias", False),
        },
        ffn=dense(config, bias=flag(config, "mlp_bias", False)),
        default_context=8192,
        embedding_scale=positive(config, "embedding_multiplier", 1.0),
        scales_given=True,
        logit_scale=positive(config, "lm_head_multiplier", 1.0),
        names=NAMES,
        scaled=_scaled(config),
        fused=() if recurrent.problem() else recurrent.fused(),
    )
    if any(rope.kind == "longrope" for rope in spec.ropes):
        raise NotNativeError("longrope is not supported beside recurrent mixers")
    layers = []
    for layer in spec.layers:
        assert isinstance(layer.mixer, Attention)
        layers.append(replace(layer, mixer=Parallel(layer.mixer, recurrent)))
    return replace(spec, layers=tuple(layers), contains_factors=flag(config, "multipliers_in_weights", False))


FAMILY = Family(
    ("FalconH1ForCausalLM",),
    build,
    ignored={
        **IGNORED,
        "mamba_expand": "mamba_d_ssm has the size",
        "mamba_use_mlp": "all layers have FFNs",
        "mlp_expansion_factor": "intermediate_size has the size",
    },
)
