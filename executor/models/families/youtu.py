"""Youtu-LLM: DeepSeek V3's latent attention, with a dense FFN in every layer."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import dense
from headrace.executor.models.families._latent import latent_like

DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "tie_word_embeddings": True,
}


def build(config: Config) -> ArchSpec:
    config = DEFAULTS | config
    ffn = dense(config)
    return latent_like(config, lambda _: ffn)


FAMILY = Family(("YoutuForCausalLM",), build, ignored={"embedding_initializer_range": "of the weights before training"})
