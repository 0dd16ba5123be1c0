"""DeciLM and Nemotron's models of neural architecture search: Llama's blocks, of other sizes in each layer, some of
which have no attention or no FFN."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.executor.models.arch import ArchSpec, LayerSpec
from headrace.executor.models.blocks import Ffn, Mixer, NoFfn, NoMixer, rounded_up
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import activation, biases, flag, integer, llama_like, number
from headrace.ipc.failure import ModelError

INNER_MULTIPLE = 256
"""To a multiple of which an FFN's inner size is rounded up where it is given as a factor of the hidden size."""
Layer = tuple[int, int]
"""The key/value heads and the inner size; 0 where the layer has no attention or no FFN."""


def build(config: Config) -> ArchSpec:
    layers = _blocks(config) if config.get("block_configs") is not None else _deci(config)
    heads, inner = max(heads for heads, _ in layers), max(inner for _, inner in layers)
    bias = flag(config, "mlp_bias", False)
    if not heads or not inner:
        raise ModelError("the config has attention in no layer, or an FFN in none")
    spec = llama_like(
        config | {"num_key_value_heads": heads, "intermediate_size": inner},
        attention=biases(config, "attention_bias", False),
    )
    whole = spec.layers[0].mixer
    assert isinstance(whole, Attention)
    mixers: dict[int, Mixer] = {0: NoMixer()}
    ffns: dict[int, Ffn] = {0: NoFfn()}
    for heads, inner in layers:
        mixers.setdefault(heads, replace(whole, num_kv_heads=heads))
        ffns.setdefault(inner, Dense(inner, activation(config, "hidden_act", "silu"), bias=bias))
    return replace(spec, layers=tuple(LayerSpec(mixers[heads], ffns[inner]) for heads, inner in layers))


def _deci(config: Config) -> list[Layer]:
    """DeciLM's layers differ in their key/value heads."""
    count, given = integer(config, "num_hidden_layers"), config.get("num_key_value_heads_per_layer")
    if not isinstance(given, list) or len(given) != count or not all(type(each) is int and each > 0 for each in given):
        raise ModelError(f"the config has neither block_configs nor {count} num_key_value_heads_per_layer above 0")
    return [(each, integer(config, "intermediate_size")) for each in given]


def _blocks(config: Config) -> list[Layer]:
    """Nemotron's layers are listed. Raises ModelError for fields that are not known."""
    count, given = integer(config, "num_hidden_layers"), config["block_configs"]
    if not isinstance(given, list) or len(given) != count:
        raise ModelError(f"the config's block_configs must be a list of {count} layers")
    return [(_key_heads(config, each, index), _inner(config, each, index)) for index, each in enumerate(given)]


def _key_heads(config: Config, block: Any, index: int) -> int:
    own = _part(block, index, "attention")
    if flag(own, "no_op", False):
        return 0
    _refuse_others(own, index, "attention", "no_op", "n_heads_in_group")
    heads, group = integer(config, "num_attention_heads"), integer(own, "n_heads_in_group")
    if group < 1 or heads % group:
        raise ModelError(f"the config's block_configs[{index}] has groups of {group} of {heads} attention heads")
    return heads // group


def _inner(config: Config, block: Any, index: int) -> int:
    own = _part(block, index, "ffn")
    if flag(own, "no_op", False):
        return 0
    assumed = {"gated": (None, True), "hidden_act": (None, config.get("hidden_act"))}
    _refuse_others(own, index, "ffn", "no_op", "ffn_mult", "intermediate_size", **assumed)
    if (inner := integer(own, "intermediate_size", 0)) > 0:
        return inner
    return rounded_up(int(2 * number(own, "ffn_mult") * integer(config, "hidden_size") / 3), INNER_MULTIPLE)


def _part(block: Any, index: int, name: str) -> Config:
    if not isinstance(block, Mapping) or set(block) - {"attention", "ffn", "parallel_blocks"}:
        raise ModelError(f"the config's block_configs[{index}] must have attention and ffn, got {block!r:.80}")
    if block.get("parallel_blocks"):
        raise NotNativeError(f"the config's block_configs[{index}] has parallel_blocks, which are not supported")
    return Config(block).section(name)


def _refuse_others(own: Config, index: int, name: str, *read: str, **assumed: tuple[Any, ...]) -> None:
    """Raises NotNativeError for fields that neither are read nor say that something is off."""
    for key, value in own.items():
        if key not in read and value not in assumed.get(key, (None, False)):
            raise NotNativeError(f"the config's block_configs[{index}].{name}.{key} is {value!r:.80}; not supported")


FAMILY = Family(("DeciLMForCausalLM",), build, ignored={"num_key_value_heads": "listed for each layer"})
