"""OPT: layer norms, learned positions, biases everywhere; the 350m has norms after blocks and a narrow embedding."""

from headrace.executor.models.arch import ArchSpec, LayerSpec, NormSpec, WeightNames
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import activation, flag, integer
from headrace.ipc.failure import ModelError

POSITION_OFFSET = 2  # rows 0 and 1 of the position table are for padding
NAMES = WeightNames(
    prefixes=("model.decoder.", "decoder."),
    final_norm="final_layer_norm",
    output="self_attn.out_proj",
    up="fc1",
    down="fc2",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    ignorable=(r"^(model\.)?decoder\.version$",),
)


def build(config: Config) -> ArchSpec:
    hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    if num_heads < 1 or hidden_size % num_heads:
        raise ModelError(f"the config's hidden_size {hidden_size} is not a multiple of its {num_heads} heads")
    head_dim = hidden_size // num_heads
    if (width := integer(config, "word_embed_proj_dim", hidden_size)) < 1:
        raise ModelError(f"the config's word_embed_proj_dim must be at least 1, got {width}")
    bias = flag(config, "enable_bias", True)
    before = flag(config, "do_layer_norm_before", True)
    mixer = Attention(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=None,
        bias=bias,
        output_bias=bias,
    )
    ffn = Dense(
        integer(config, "ffn_dim", 3072), activation(config, "activation_function", "relu"), gated=False, bias=bias
    )
    return ArchSpec(
        architecture=config["architectures"][0],
        hidden_size=hidden_size,
        vocab_size=integer(config, "vocab_size"),
        max_positions=integer(config, "max_position_embeddings", 2048),
        layers=(LayerSpec(mixer, ffn),) * integer(config, "num_hidden_layers"),
        norm=NormSpec("layer", 1e-5, affine=flag(config, "layer_norm_elementwise_affine", True)),
        norm_placement="pre" if before else "post",
        tied_head=flag(config, "tie_word_embeddings", True),
        embedding_size=width,
        learned_position_offset=POSITION_OFFSET,
        final_norm=before and not flag(config, "_remove_final_layer_norm", False),
        names=NAMES,
    )


FAMILY = Family(("OPTForCausalLM",), build)
