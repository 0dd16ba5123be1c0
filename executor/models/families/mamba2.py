"""Mamba 2: recurrent layers alone, without attention and FFNs."""

from headrace.executor.models.arch import ArchSpec, LayerSpec, NormSpec, WeightNames
from headrace.executor.models.blocks import NoFfn
from headrace.executor.models.blocks.recurrent import Ssd
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import flag, integer, number
from headrace.executor.models.families._ssd import require_silu, step_limits
from headrace.ipc.failure import ModelError

DEFAULT_CONTEXT = 1 << 20
"""Its state has a fixed size, so nothing but the training limits the length; llama.cpp has the same number."""
NAMES = WeightNames(
    prefixes=("backbone.", "model.backbone."),
    lm_heads=("lm_head", "model.lm_head"),
    embedding="embeddings",
    final_norm="norm_f",
    attention_norm="norm",
)
"""Mamba's, too."""


def build(config: Config) -> ArchSpec:
    hidden, heads, head_dim = integer(config, "hidden_size"), integer(config, "num_heads"), integer(config, "head_dim")
    inner = int(number(config, "expand", 2) * hidden)
    if integer(config, "intermediate_size", inner) != inner or heads * head_dim != inner:
        raise ModelError(
            f"the config's {heads} heads of {head_dim} are {heads * head_dim} values, and expand times hidden_size "
            f"(intermediate_size) is {inner}"
        )
    require_silu(config, "hidden_act")
    eps = number(config, "layer_norm_epsilon", 1e-5)
    mixer = Ssd(
        heads=heads,
        head_dim=head_dim,
        state_size=integer(config, "state_size", 128),
        groups=integer(config, "n_groups", 8),
        conv_width=integer(config, "conv_kernel", 4),
        norm_eps=eps,
        bias=flag(config, "use_bias", False),
        conv_bias=flag(config, "use_conv_bias", True),
        step_limits=step_limits(config),
    )
    return ArchSpec(
        architecture=config["architectures"][0],
        hidden_size=hidden,
        vocab_size=integer(config, "vocab_size"),
        max_positions=integer(config, "max_position_embeddings", DEFAULT_CONTEXT),
        layers=(LayerSpec(mixer, NoFfn()),) * integer(config, "num_hidden_layers"),
        norm=NormSpec("rms", eps),
        tied_head=flag(config, "tie_word_embeddings", False),
        fused=mixer.fused() if not mixer.problem() else (),
        names=NAMES,
    )


FAMILY = Family(
    ("Mamba2ForCausalLM",),
    build,
    ignored={
        "chunk_size": "how the original code divides the work",
        "norm_before_gate": "transformers ignores it too: the gate comes first",
        "rescale_prenorm_residual": "training alone",
        "residual_in_fp32": "precision of the original code",
        "time_step_floor": "training alone",
        "time_step_init_scheme": "training alone",
        "time_step_max": "training alone",
        "time_step_min": "training alone",
        "time_step_rank": "of Mamba 1",
        "time_step_scale": "training alone",
        "rms_norm": "the norm is known by its weight",
    },
)
