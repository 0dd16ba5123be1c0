"""GPT-Neo: layer norms, learned positions, scores without a scale, every other layer with a sliding window."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family, gpt2
from headrace.executor.models.families._config import Positions, integer, layer_norm, llama_like, plain
from headrace.ipc.failure import ModelError

NAMES = replace(
    gpt2.NAMES,
    query="attn.attention.q_proj",
    key="attn.attention.k_proj",
    value="attn.attention.v_proj",
    output="attn.attention.out_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    ignorable=(r"\.attn\.attention\.(bias|masked_bias)$",),
)


def build(config: Config) -> ArchSpec:
    config = config.renamed(num_attention_heads="num_heads", num_hidden_layers="num_layers")
    hidden, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    window = integer(config, "window_size", 256)
    return llama_like(
        config,
        positions=[Positions(None, window if kind == "local" else None) for kind in _kinds(config)],
        attention={"num_kv_heads": num_heads, "scale": 1.0, "output_bias": True},
        ffn=plain(config, integer(config, "intermediate_size", 4 * hidden), "activation_function", "gelu_new"),
        tied_head=True,
        norm=layer_norm(config, "layer_norm_epsilon"),
        learned_position_offset=0,
        names=NAMES,
    )


def _kinds(config: Config) -> list[str]:
    """global or local for each layer: `attention_types`, a list of [kinds, how many times], which transformers writes
    out as `attention_layers` besides."""
    count = integer(config, "num_hidden_layers")
    types = config.get("attention_types")
    types = [[["global", "local"], 12]] if types is None else types
    found: list[str] = []
    for each in types if isinstance(types, list) else [types]:
        if not (isinstance(each, list) and len(each) == 2 and isinstance(each[0], list) and type(each[1]) is int):
            raise ModelError(f"the config's attention_types must be a list of [kinds, number], got {types!r:.80}")
        found += each[0] * min(each[1], count)
    if len(found) != count or not all(each in ("global", "local") for each in found):
        raise ModelError(f"the config's attention_types must have global or local for each of {count} layers")
    if (written := config.get("attention_layers")) not in (None, found):
        raise ModelError(f"the config's attention_layers are {written!r:.80}, and its attention_types say otherwise")
    return found


FAMILY = Family(("GPTNeoForCausalLM",), build, token_classifier="classifier")
