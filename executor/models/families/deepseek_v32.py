"""DeepSeek V3.2 and GLM 5: DeepSeek V3's shape, with attention to the keys that an index chooses. In GLM 5 some layers
attend to what the layer before them chose."""

from dataclasses import replace
from typing import Any, Literal

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks.latent import LatentAttention
from headrace.executor.models.blocks.sparse_latent import SparseLatentAttention
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import corrected_routing, integer, number
from headrace.executor.models.families._latent import deepseek
from headrace.ipc.failure import ModelError

GLM = "GlmMoeDsaForCausalLM"
LETTERS = {"F": "full", "S": "shared"}


def build(config: Config) -> ArchSpec:
    is_glm = config["architectures"][0] == GLM
    defaults = {"first_k_dense_replace": 3, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
    if not is_glm:
        defaults |= {"n_group": 8, "topk_group": 4}
    config = {**defaults, "index_n_heads": 32 if is_glm else 64} | config
    spec = deepseek(config, corrected_routing(config), correction=True)
    kinds = from_the_first(indexer_types(config, spec.num_layers)) if is_glm else ["full"] * spec.num_layers
    rotation: Literal["halves", "pairs"] = "pairs" if is_glm else "halves"
    own: dict[str, Any] = {
        "num_chosen": integer(config, "index_topk", 2048),
        "index_heads": integer(config, "index_n_heads"),
        "index_dim": integer(config, "index_head_dim", 128),
    }
    layers = []
    for kind, layer in zip(kinds, spec.layers, strict=True):
        plain = layer.mixer
        assert isinstance(plain, LatentAttention)
        index = rotation if kind == "full" else "none"
        layers.append(replace(layer, mixer=SparseLatentAttention(**vars(plain), index=index, **own)))
    return replace(spec, layers=tuple(layers))


def indexer_types(config: Config, count: int) -> list[str]:
    """full for each layer that has an index, shared for those that use the choice of the last one before them. Raises
    ModelError."""
    given, pattern = config.get("indexer_types"), config.get("index_topk_pattern")
    step = max(1, int(number(config, "index_topk_freq", 1)))
    offset = integer(config, "index_skip_topk_offset", 2)
    if given is None and pattern is not None:
        given = [LETTERS.get(each, each) for each in pattern]
    if given is None:
        given = ["shared" if max(i - offset + 1, 0) % step else "full" for i in range(count)]
    if not isinstance(given, list) or len(given) < count or set(map(str, given[:count])) - {"full", "shared"}:
        raise ModelError(f"the config's indexer_types must list full or shared for each layer, got {given!r:.80}")
    return [str(each) for each in given[:count]]


def from_the_first(given: list[str]) -> list[str]:
    """The kinds, if the first layer has an index. Raises ModelError."""
    if given[0] != "full":
        raise ModelError("the config's indexer_types begin with shared; the first layer needs an index of its own")
    return given


FAMILY = Family(
    ("DeepseekV32ForCausalLM", GLM),
    build,
    ignored={"layer_types": "all layers attend by an index", "indexer_rope_interleave": "the architecture says it"},
    assumes={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid", "noaux_tc"), "mlp_bias": (False,)},
)
