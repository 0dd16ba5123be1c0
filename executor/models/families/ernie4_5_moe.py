"""ERNIE 4.5 with experts, chosen by corrected scores, and shared experts."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.blocks import Routing
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.families import Config, Family, ernie4_5
from headrace.executor.models.families._config import activation, biases, dense, flag, integer, llama_like
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    shared_expert="mlp.shared_experts",
    router_correction="mlp.moe_statics.e_score_correction_bias",
    # Layers beyond the last are for multi-token prediction.
    ignorable=(*WeightNames.ignorable, r"^model\.mtp_"),
)


def build(config: Config) -> ArchSpec:
    num_layers, inner = integer(config, "num_hidden_layers"), integer(config, "moe_intermediate_size")
    first, last = integer(config, "moe_layer_start_index", 1), integer(config, "moe_layer_end_index", -1)
    interval, last = integer(config, "moe_layer_interval", 1), last if last >= 0 else num_layers - 1
    if interval < 1:
        raise ModelError(f"the config's moe_layer_interval must be at least 1, got {interval}")
    mixture = Experts(
        integer(config, "moe_num_experts"),
        Routing(integer(config, "moe_k"), "softmax", renormalise=True),
        inner,
        activation(config, "hidden_act", "silu"),
        shared_inner=inner * integer(config, "moe_num_shared_experts", 0),
        shared_gate=False,
        correction="row",
    )
    plain = dense(config, bias=flag(config, "use_bias", False))
    return llama_like(
        config,
        attention=biases(config, "use_bias", False),
        ffn=lambda index: mixture if (index + 1) % interval == 0 and first <= index <= last else plain,
        default_context=131072,
        tied_head=True,
        interleaved=True,
        names=NAMES,
    )


FAMILY = Family(
    ("Ernie4_5_MoeForCausalLM",),
    build,
    ignored={
        "moe_norm_min": "the weights of the best of a softmax are never so small",
        "moe_gate": "the original code's name of its routing",
    },
    assumes={**ernie4_5.ASSUMES, "norm_topk_prob": (True,)},
)
