"""Mamba and Falcon Mamba: selective scans alone, without attention and FFNs."""

import math

from headrace.executor.models.arch import ArchSpec, LayerSpec, NormSpec
from headrace.executor.models.blocks import NoFfn
from headrace.executor.models.blocks.selective import Selective
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import flag, integer, number
from headrace.executor.models.families._ssd import require_silu
from headrace.executor.models.families.mamba2 import DEFAULT_CONTEXT, NAMES

FALCON = "FalconMambaForCausalLM"


def rank_of(config: Config, key: str) -> int:
    """Inner size of the projection to time steps: "auto" is a sixteenth of the hidden size."""
    if config.get(key) in (None, "auto"):
        return math.ceil(integer(config, "hidden_size") / 16)
    return integer(config, key)


def build(config: Config) -> ArchSpec:
    require_silu(config, "hidden_act")
    hidden, eps = integer(config, "hidden_size"), number(config, "layer_norm_epsilon", 1e-5)
    expanded = int(number(config, "expand", 2) * hidden)
    inner = integer(config, "intermediate_size", expanded)  # which goes before: Falcon Mamba's expand is not its own
    is_falcon = config["architectures"][0] == FALCON
    mixer = Selective(
        channels=inner,
        state_size=integer(config, "state_size", 16),
        rank=rank_of(config, "time_step_rank"),
        conv_width=integer(config, "conv_kernel", 4),
        bias=flag(config, "use_bias", False),
        conv_bias=flag(config, "use_conv_bias", True),
        norms="plain" if is_falcon else "no",
        norm_eps=number(config, "mixer_rms_eps", 1e-6) if is_falcon else 1e-6,
    )
    return ArchSpec(
        architecture=config["architectures"][0],
        hidden_size=hidden,
        vocab_size=integer(config, "vocab_size"),
        max_positions=integer(config, "max_position_embeddings", DEFAULT_CONTEXT),
        layers=(LayerSpec(mixer, NoFfn()),) * integer(config, "num_hidden_layers"),
        norm=NormSpec("rms", eps),
        tied_head=flag(config, "tie_word_embeddings", True),
        fused=mixer.fused(),
        names=NAMES,
    )


FAMILY = Family(
    ("MambaForCausalLM", FALCON),
    build,
    ignored={
        "d_model": "hidden_size has it",
        "d_inner": "intermediate_size has it",
        "fused_add_norm": "how the original code runs",
        "pad_vocab_size_multiple": "vocab_size has the padded size",
        "rescale_prenorm_residual": "training alone",
        "residual_in_fp32": "precision of the original code",
        "rms_norm": "the norm is known by its weight",
        "ssm_cfg": "of the original code; the sizes have keys of their own",
        "time_step_floor": "training alone",
        "time_step_init_scheme": "training alone",
        "time_step_max": "training alone",
        "time_step_min": "training alone",
        "time_step_scale": "training alone",
        "use_associative_scan": "how transformers' code runs",
        "use_falcon_mambapy": "how transformers' code runs",
        "use_mambapy": "how transformers' code runs",
    },
)
