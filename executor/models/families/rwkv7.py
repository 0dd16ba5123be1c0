"""RWKV-7, in the layout of flash-linear-attention's checkpoints: recurrent layers alone."""

from headrace.executor.models.arch import ArchSpec, LayerSpec, NormSpec, WeightNames
from headrace.executor.models.blocks import NoFfn
from headrace.executor.models.blocks.rwkv import ChannelMix, Ranks, TimeMix
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import flag, integer, number, one_of
from headrace.ipc.failure import ModelError

DEFAULT_CONTEXT = 1 << 20
"""Its state has a fixed size, so nothing but the training limits the length."""
STEP = 32
"""Sizes that a config leaves out are multiples of it."""


def build(config: Config) -> ArchSpec:
    hidden, count = integer(config, "hidden_size"), integer(config, "num_hidden_layers")
    one_of(config, "hidden_act", "sqrelu", "relu2")
    if config.get("attn") is not None:
        raise NotNativeError("the config's attn has layers of attention, which are not supported in RWKV-7")
    head_dim = integer(config, "head_dim", 64)
    heads = integer(config, "num_heads", hidden // max(1, head_dim))
    if heads * head_dim != hidden:
        raise ModelError(f"the config's {heads} heads of {head_dim} are not its hidden_size of {hidden}")
    widths = config.get("value_dim")
    if any(width != hidden for width in (widths if isinstance(widths, list) else [widths] if widths else [])):
        raise NotNativeError(f"the config's value_dim differs from its hidden_size of {hidden}, which is not supported")
    ranks = Ranks(
        decays=integer(config, "decay_low_rank_dim", _low(2.5, hidden, head_dim)),
        values=integer(config, "v_low_rank_dim", _low(1.7, hidden, head_dim)),
        rates=integer(config, "a_low_rank_dim", _low(2.5, hidden, head_dim)),
        gate=integer(config, "gate_low_rank_dim", _low(5.0, hidden, STEP * 2)),
    )
    eps = number(config, "norm_eps", 1e-5)
    wide = int(hidden * number(config, "hidden_ratio", 4.0))
    inner = integer(config, "intermediate_size", -(-wide // STEP) * STEP)
    channels = LayerSpec(ChannelMix(inner=inner, hidden=hidden), NoFfn(), mixer_norm=False)
    layers: list[LayerSpec] = []
    for index in range(count):
        mixer = TimeMix(heads=heads, head_dim=head_dim, hidden=hidden, ranks=ranks, norm_eps=eps, is_first=index == 0)
        layers += [LayerSpec(mixer, NoFfn(), mixer_norm=False), channels]
    return ArchSpec(
        architecture=config["architectures"][0],
        hidden_size=hidden,
        vocab_size=integer(config, "vocab_size"),
        max_positions=integer(config, "max_position_embeddings", DEFAULT_CONTEXT),
        layers=tuple(layers),
        norm=NormSpec("layer", eps, bias=flag(config, "norm_bias", True)),
        embedding_norm=flag(config, "norm_first", True),
        tied_head=flag(config, "tie_word_embeddings", False),
        names=WeightNames(
            sublayers=2,
            embedding="embeddings",
            embedding_norm="layers.0.pre_norm",
            # The first layer reads no other's values. Some checkpoints, and all GGUF files, have such weights of it.
            ignorable=(*WeightNames.ignorable, r"^(model\.)?layers\.0\.attn\.v_lora\."),
        ),
    )


def _low(factor: float, hidden: int, head_dim: int) -> int:
    """The rank where the config leaves it out."""
    return max(STEP, round(factor * hidden**0.5 * (head_dim / 64) / STEP) * STEP)


FAMILY = Family(
    ("RWKV7ForCausalLM",),
    build,
    ignored={
        "attn_mode": "how the original code divides the work",
        "fuse_norm": "kernels of the original code",
        "fuse_cross_entropy": "training alone",
        "fuse_linear_cross_entropy": "training alone",
        "use_l2warp": "training alone",
    },
)
