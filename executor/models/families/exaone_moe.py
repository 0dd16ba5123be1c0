"""K-EXAONE: EXAONE 4's windows, with norms before the blocks, and DeepSeek V3's mixtures."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import corrected_routing, llama_like, mixture_after_dense
from headrace.executor.models.families.exaone4 import positions_of

NAMES = WeightNames(
    shared_expert="mlp.shared_experts",
    router_correction="mlp.e_score_correction_bias",
    ignorable=(*WeightNames.ignorable, r"^mtp\."),
)


def build(config: Config) -> ArchSpec:
    own = config.renamed(n_routed_experts="num_experts", n_shared_experts="num_shared_experts")
    config = {"routed_scaling_factor": 2.5, "n_shared_experts": 1} | own
    return llama_like(
        config,
        positions=positions_of(config),
        attention={"qk_norm": "head"},
        ffn=mixture_after_dense(config, corrected_routing(config), default_dense=1),
        names=NAMES,
    )


FAMILY = Family(
    ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
    build,
    ignored={"num_nextn_predict_layers": "drafts of its own, which are not read"},
    assumes={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
)
