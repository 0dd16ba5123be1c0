"""HRM-Text: two stacks of layers with gated attention, which run in turn several times."""

from dataclasses import fields, replace

from headrace.executor.models.arch import ArchSpec, Fused, NormSpec, WeightNames
from headrace.executor.models.blocks.cycles import HIGH, LOW, CycledLayer, Cycles
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    biases,
    dense,
    flag,
    integer,
    llama_like,
    number,
    positive,
    rope,
)
from headrace.ipc.failure import ModelError

ATTENTION, FFN = "self_attn", "mlp"


def build(config: Config) -> ArchSpec:
    """Layers are the runs of layers, in order: of each high cycle, low_cycles runs of the low stack, then one of the
    high one."""
    if flag(config, "prefix_lm", True):
        raise ModelError(
            "the config's prefix_lm is true: the tokens of a prompt attend to those after them, which a model that "
            "generates cannot do here; with prefix_lm false (--hf-overrides '{\"prefix_lm\": false}') they attend to "
            "those before them alone, as in transformers without token_type_ids"
        )
    high_cycles, low_cycles = integer(config, "H_cycles", 2), integer(config, "L_cycles", 3)
    if not 1 <= high_cycles <= 64 or not 1 <= low_cycles <= 64:
        raise ModelError(
            f"the config's H_cycles and L_cycles are {high_cycles} and {low_cycles}; each must be from 1 to 64"
        )
    depth = _depth(config, high_cycles * (low_cycles + 1))
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    head_dim = integer(config, "head_dim", 128)
    eps = number(config, "rms_norm_eps", 1e-6)
    spec = llama_like(
        config | {"num_hidden_layers": depth, "num_key_value_heads": heads},
        positions=[Positions(rope(config, head_dim, 10000.0))] * depth,
        head_dim=head_dim,
        attention={"gated": True, **biases(config, "attention_bias", False)},
        ffn=dense(config, bias=flag(config, "mlp_bias", False)),
        norm=NormSpec("rms", eps, affine=False),
        final_norm=False,
        embedding_scale=_embedding_scale(config),
        scales_given=True,
        stream=Cycles(hidden, eps),
        names=_names(depth, low_cycles * depth),
        fused=_fused(heads * head_dim, integer(config, "intermediate_size")),
    )
    runs = ([LOW] * low_cycles + [HIGH]) * high_cycles
    beginnings = {LOW: 0, HIGH: low_cycles * depth}  # of the first run of each stack
    layers: list[CycledLayer] = []
    for row in runs:
        again = len(layers) != beginnings[row]
        for index, layer in enumerate(spec.layers):
            own = {each.name: getattr(layer, each.name) for each in fields(layer)}
            source = beginnings[row] + index if again else None
            place = CycledLayer(**own, row=row, begins=index == 0, ends=index == depth - 1)
            layers.append(replace(place, weights_of=source))
    return replace(spec, layers=tuple(layers))


def _depth(config: Config, runs: int) -> int:
    """Layers of a stack. Where the config has them under their own name, num_hidden_layers is the number of all runs of
    layers. Raises ModelError."""
    count = integer(config, "num_hidden_layers")
    depth = integer(config, "num_layers_per_stack", count)
    if depth < 1 or (config.stores("num_layers_per_stack") and count != depth * runs):
        raise ModelError(
            f"the config's num_layers_per_stack is {depth} and its num_hidden_layers {count}, which must be {runs} "
            "times as many, as its H_cycles and L_cycles say, and above 0"
        )
    return depth


def _embedding_scale(config: Config) -> float:
    if config.stores("embedding_scale"):
        return positive(config, "embedding_scale")
    return 1.0 / positive(config, "initializer_range", 0.02)


def _names(depth: int, first_high: int) -> WeightNames:
    """first_high: index of the first layer of the high stack."""
    high = tuple(
        (rf"^((?:model\.)?)H_module\.layers\.{index}\.", rf"\g<1>layers.{first_high + index}.")
        for index in range(depth)
    )
    return WeightNames(
        query_gate=f"{ATTENTION}.gate_proj",
        renamed=(
            *high,
            (r"^((?:model\.)?)L_module\.layers\.", r"\1layers."),
            (r"(layers\.\d+)\.attn\.", rf"\1.{ATTENTION}."),
        ),
    )


def _fused(queries: int, inner: int) -> tuple[Fused, ...]:
    """As the published model has its matrices."""
    parts = tuple((f"{ATTENTION}.{name}_proj", queries) for name in ("gate", "q", "k", "v"))
    return (
        Fused(f"{ATTENTION}.gqkv_proj", parts),
        Fused(f"{FFN}.gate_up_proj", ((f"{FFN}.gate_proj", inner), (f"{FFN}.up_proj", inner))),
    )


FAMILY = Family(
    ("HrmTextForCausalLM",),
    build,
    ignored={"L_bp_cycles": "training alone"},
)
