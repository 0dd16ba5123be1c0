"""Solar Pro: Llama's shape, made deeper of a trained model's layers, with residuals that skip some of them."""

from collections.abc import Container
from dataclasses import fields, replace

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks.skips import SkippingLayer, Skips
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    biases,
    dense,
    flag,
    head_dim_of,
    integer,
    llama_like,
    optional_integer,
    positive,
    rope,
)
from headrace.ipc.failure import ModelError

LAYERS = {
    "bskcn_1": [12, 20, 32, 44],
    "bskcn_2": [20, 32],
    "bskcn_3": [16, 24, 36, 48],
    "bskcn_4": [28, 40],
}
"""Before which layers the stream is kept, as the first and as the second one, and the first and the second one are
mixed in, by default."""
SHARES = [0.9, 0.8]
"""Of a kept stream in training and in inference, by default."""


def build(config: Config) -> ArchSpec:
    num_layers, head_dim = integer(config, "num_hidden_layers"), head_dim_of(config)
    window = optional_integer(config, "sliding_window")
    spec = llama_like(
        config,
        positions=[Positions(rope(config, head_dim, 10000.0), window)] * num_layers,
        head_dim=head_dim,
        attention=biases(config, "attention_bias", False),
        ffn=dense(config, bias=flag(config, "mlp_bias", False)),
        logit_scale=positive(config, "logit_scale", 1.0),
    )
    first, second, take_first, take_second = (_layers(config, key, num_layers) for key in LAYERS)
    for kept, taken, keys in ((first, take_first, "13"), (second, take_second, "24")):
        if taken and min(taken) < min(kept, default=num_layers):
            raise ModelError(
                f"the config's bskcn_{keys[1]} has layer {min(taken)}, which needs an equal or smaller one in its "
                f"bskcn_{keys[0]}: what is mixed in there must have been kept"
            )
    layers = []
    for index, layer in enumerate(spec.layers):
        own = {each.name: getattr(layer, each.name) for each in fields(layer)}
        layers.append(SkippingLayer(**own, keeps=_in(index, first, second), takes=_in(index, take_first, take_second)))
    return replace(spec, layers=tuple(layers), stream=Skips(spec.hidden_size, 2, _share(config)))


def _layers(config: Config, key: str, num_layers: int) -> set[int]:
    """Those that the model has, of the layers that the config lists. Raises ModelError."""
    found = LAYERS[key] if config.get(key) is None else config[key]
    if not isinstance(found, list) or not all(type(each) is int and each >= 0 for each in found):
        raise ModelError(f"the config's {key} must be a list of layers, counted from 0, got {found!r:.80}")
    return {each for each in found if each < num_layers}


def _share(config: Config) -> float:
    """Of a kept stream in inference: the second of the config's two. Raises ModelError."""
    found = SHARES if config.get("bskcn_tv") is None else config["bskcn_tv"]
    numbers = isinstance(found, list) and all(type(each) in (int, float) and 0 <= each <= 1 for each in found)
    if not numbers or len(found) != len(SHARES):
        raise ModelError(
            "the config's bskcn_tv must be two numbers from 0 to 1, the shares of a kept stream in training and in "
            f"inference, got {found!r:.80}"
        )
    return float(found[1])


def _in(layer: int, *lists: Container[int]) -> tuple[int, ...]:
    """The indices of the lists that have the layer."""
    return tuple(index for index, each in enumerate(lists) if layer in each)


FAMILY = Family(("SolarForCausalLM",), build)
