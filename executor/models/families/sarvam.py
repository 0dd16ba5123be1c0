"""Sarvam's larger model: DeepSeek V3's shape, under names of Ling's for the sizes of its mixtures."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import corrected_routing, mixture_after_dense
from headrace.executor.models.families._latent import latent_like
from headrace.executor.models.families.bailing_moe import ASSUMES, IGNORED, shared_inner

DEFAULTS = {"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}


def build(config: Config) -> ArchSpec:
    config = DEFAULTS | config.renamed(n_routed_experts="num_experts", n_shared_experts="num_shared_experts")
    shared = shared_inner(config, config["architectures"][0])
    return latent_like(config, mixture_after_dense(config, corrected_routing(config), shared_inner=shared))


FAMILY = Family(
    ("SarvamMLAForCausalLM",),
    build,
    ignored={
        **IGNORED,
        "head_dim": "of the cache of other programs; qk_nope_head_dim, qk_rope_head_dim and v_head_dim say the sizes",
        "q_head_dim": "qk_nope_head_dim and qk_rope_head_dim say it",
    },
    assumes=ASSUMES,
)
