"""Nomic BERT (Nussbaum et al. 2024): BERT with rotary positions, a gated FFN and no biases; and its second version
(Nussbaum and Duderstadt 2025): biases, FFNs without a gate, in every other layer a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from headrace.executor.models.arch import ArchSpec, Fused, StackedExperts, WeightNames
from headrace.executor.models.blocks import Declared, Ffn, Held, Ops, Routing, Vector
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.blocks.experts import UNGATED, Experts
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    activation,
    flag,
    head_dim_of,
    integer,
    number,
    one_of,
    plain,
    rope,
)
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
PLAIN_NAMES = replace(NAMES, up="mlp.fc1", router="mlp.router.layer", experts="mlp.experts", expert_gate="up_proj")
"""Of models whose FFNs have no gate."""
EXPERTS = StackedExperts("mlp.experts.mlp.w1", "mlp.experts.mlp.w2", flat=True)
BIAS = "moe_bias"
"""The config's key of GGUF files, which have no bias of experts: the converter leaves it out."""
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


@dataclass(frozen=True)
class BiasedExperts(Experts):
    """Experts to whose weighted sum a bias is added once."""

    num_ranks: int = 1

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        return {**super().declare(spec), "bias": Vector(f"{spec.names.experts}.bias", spec.hidden_size)}

    def emit(self, ops: Ops, held: Held, x: Any) -> Sequence[Any]:
        (found,) = super().emit(ops, held, x)
        return [ops.call(lambda own, bias: own + (bias / self.num_ranks).to(own.dtype), found, held["bias"])]

    def for_ranks(self, tp_size: int, inner_block: int) -> Self:
        """The ranks' results are added, so each has a part of the bias."""
        return replace(super().for_ranks(tp_size, inner_block), num_ranks=tp_size)

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return "a bias is added to the sum of experts"


def build(config: Config) -> ArchSpec:
    """Reads the fields of transformers' class and those of the original one, which has GPT-2's names."""
    config = config.renamed(**{common: own for common, own in OWN_NAMES.items() if config.get(common) is None})
    config.pass_over(*OWN_NAMES.values())  # transformers' class reads its own alone, and saves both
    named = str(config.get("hidden_act"))
    config = config | {"hidden_act": GATES.get(named, config.get("hidden_act"))}
    _check(config)
    every = integer(config, "moe_every_n_layers", 0)
    is_gated = named in GATES or not (every or flag(config, "mlp_fc1_bias", False))
    head_dim, hidden = head_dim_of(config), integer(config, "hidden_size")
    attention_bias = flag(config, "qkv_proj_bias", False)
    names = (NAMES.query, NAMES.key, NAMES.value)
    spec = encoder(
        config,
        names=NAMES if is_gated else PLAIN_NAMES,
        ffn=_gated(config) if is_gated else _plain(config),
        rope=rope(config, head_dim, 1000.0),
        attention={"bias": attention_bias, "output_bias": attention_bias},
        default_positions=2048,
        default_types=2,
        fused=(Fused("attn.Wqkv", tuple((name, hidden) for name in names)),),
        classifier=classifier(config, pooler(config)),
        stacked=EXPERTS,
    )
    if not every:
        config.pass_over("num_experts", "moe_top_k", "moe_normalize_expert_weights")
        return spec
    experts = _mixture(config)
    layers = (replace(layer, ffn=experts) if index % every == 1 else layer for index, layer in enumerate(spec.layers))
    return replace(spec, layers=tuple(layers))


def _gated(config: Config) -> Dense:
    for key in ("mlp_fc1_bias", "mlp_fc2_bias"):
        if flag(config, key, False):
            raise ModelError(f"the config's {key} is true; FFNs with a gate are computed without")
    return Dense(integer(config, "intermediate_size"), activation(config, "hidden_act", "silu"))


def _plain(config: Config) -> Dense:
    found = plain(
        config,
        integer(config, "intermediate_size"),
        "hidden_act",
        "gelu",
        bias=flag(config, "mlp_fc1_bias", True),
    )
    return replace(found, down_bias=flag(config, "mlp_fc2_bias", True))


def _mixture(config: Config) -> Ffn:
    kind = activation(config, "hidden_act", "gelu")
    if kind not in UNGATED:
        raise ModelError(f"experts without a gate are computed with {' and '.join(UNGATED)}, not with {kind}")
    kind_of_experts = BiasedExperts if flag(config, BIAS, True) else Experts
    return kind_of_experts(
        integer(config, "num_experts"),
        Routing(
            integer(config, "moe_top_k", 1), "softmax", renormalise=flag(config, "moe_normalize_expert_weights", False)
        ),
        integer(config, "intermediate_size"),
        UNGATED[kind],
    )


def _check(config: Config) -> None:
    for key in ("prenorm", "parallel_block", "rotary_emb_interleaved", "use_rms_norm"):
        if flag(config, key, False):
            raise ModelError(f"the config's {key} is true; this family computes without")
    if number(config, "rotary_emb_scale_base", 0.0):
        raise ModelError("the config's rotary_emb_scale_base asks for xPos, which is not computed")
    one_of(config, "position_embedding_type", "rope", "rotary", "absolute")


FAMILY = Family(
    heads_of("NomicBert"),
    build,
    assumes={"num_shared_experts": (0,), "expert_choice_router": (False,), "ffn_div": (1,)},
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
        "moe_impl": "a kernel of the original code",
        "moe_resid_pdrop": "training alone",
        "router_aux_loss_coef": "training alone",
        "use_flash_attn": "a kernel of the original code",
        "parallel_block_tied_norm": "of parallel blocks",
        "add_pooling_layer": "what the folder's modules say",
    },
)
