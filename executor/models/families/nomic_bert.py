"""Nomic BERT (Nussbaum et al. 2024): BERT with rotary positions, a gated FFN and no biases."""

from headrace.executor.models.arch import ArchSpec, Fused, WeightNames
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import activation, flag, head_dim_of, integer, number, one_of, rope
from headrace.executor.models.families._encoders import IGNORABLE, classifier, encoder, heads_of, pooler
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    prefixes=("nomic_bert.", "bert.", ""),
    embedding="embeddings.word_embeddings",
    token_types="embeddings.token_type_embeddings",
    embedding_norm="emb_ln",
    layers="encoder.layers",
    query="attn.query",
    key="attn.key",
    value="attn.value",
    output="attn.out_proj",
    attention_norm="norm1",
    gate="mlp.fc12",
    up="mlp.fc11",
    down="mlp.fc2",
    mlp_norm="norm2",
    ignorable=IGNORABLE,
)
OWN_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
    "rope_theta": "rotary_emb_base",
    "max_position_embeddings": "n_positions",
    "partial_rotary_factor": "rotary_emb_fraction",
}
GATES = {"swiglu": "silu", "geglu": "gelu", "glu": None}


def build(config: Config) -> ArchSpec:
    """Reads the fields of transformers' class and those of the original one, which has GPT-2's names."""
    config = config.renamed(**{common: own for common, own in OWN_NAMES.items() if config.get(common) is None})
    config.pass_over(*OWN_NAMES.values())  # transformers' class reads its own alone, and saves both
    gate = GATES.get(str(config.get("hidden_act")), config.get("hidden_act"))
    config = config | {"hidden_act": gate}
    _check(config)
    head_dim, hidden = head_dim_of(config), integer(config, "hidden_size")
    attention_bias = flag(config, "qkv_proj_bias", False)
    names = (NAMES.query, NAMES.key, NAMES.value)
    return encoder(
        config,
        names=NAMES,
        ffn=Dense(integer(config, "intermediate_size"), activation(config, "hidden_act", "silu")),
        rope=rope(config, head_dim, 1000.0),
        attention={"bias": attention_bias, "output_bias": attention_bias},
        default_positions=2048,
        default_types=2,
        fused=(Fused("attn.Wqkv", tuple((name, hidden) for name in names)),),
        classifier=classifier(config, pooler(config)),
    )


def _check(config: Config) -> None:
    for key in ("prenorm", "mlp_fc1_bias", "mlp_fc2_bias", "parallel_block", "rotary_emb_interleaved", "use_rms_norm"):
        if flag(config, key, False):
            raise ModelError(f"the config's {key} is true; this family computes without")
    if number(config, "rotary_emb_scale_base", 0.0):
        raise ModelError("the config's rotary_emb_scale_base asks for xPos, which is not computed")
    one_of(config, "position_embedding_type", "rope", "rotary", "absolute")


FAMILY = Family(
    heads_of("NomicBert"),
    build,
    ignored={
        "max_trained_positions": "of the dynamic scaling of longer contexts, which the folder does not ask for",
        "rotary_scaling_factor": "of the dynamic scaling of longer contexts",
        "dense_seq_output": "of masked language models",
        "pad_vocab_size_multiple": "sizes: the shapes of weights are checked",
        "fused_bias_fc": "a kernel of the original code",
        "fused_dropout_add_ln": "a kernel of the original code",
        "use_xentropy": "training alone",
        "last_layer_subset": "training alone",
        "causal": "the model attends to both sides",
        "mlp_checkpoint_lvl": "training alone",
        "sequence_parallel": "training alone",
        "type_vocab_size": "read",
    },
)
