"""Baichuan 1 and 2: Llama's shape with fused projections; the 13B has ALiBi, version 2 a head with normalised rows."""

from headrace.executor.models.arch import ArchSpec, Fused
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import Positions, alibi_slopes, integer, llama_like

ROTATED_HIDDEN = 4096
"""The hidden size of the 7B, which has rotary positions: nothing else in a config distinguishes it from the 13B."""
VERSION_2_VOCAB = 125_696


def build(config: Config) -> ArchSpec:
    num_heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    positions, alibi = None, tuple[float, ...]()
    if config["architectures"][0] == "BaichuanForCausalLM" and hidden != ROTATED_HIDDEN:
        positions, alibi = [Positions(None)] * integer(config, "num_hidden_layers"), alibi_slopes(num_heads)
    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return llama_like(
        config.renamed(max_position_embeddings="model_max_length"),
        positions=positions,
        attention={"num_kv_heads": num_heads, "alibi": alibi},
        default_context=4096,
        fused=(Fused("self_attn.W_pack", tuple((name, hidden) for name in projections)),),
        unit_head=integer(config, "vocab_size") == VERSION_2_VOCAB,
    )


FAMILY = Family(("BaiChuanForCausalLM", "BaichuanForCausalLM"), build)
