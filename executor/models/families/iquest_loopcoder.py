"""IQuest-Coder-Loop: Llama's layers, which run several times. Further runs attend to the near tokens, and to what the
first run kept of all."""

from __future__ import annotations

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, LayerSpec, WeightNames
from headrace.executor.models.blocks import NoFfn
from headrace.executor.models.blocks.attention import as_kind
from headrace.executor.models.blocks.looped_attention import LoopedAttention, Run
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import integer, llama_like
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    query_gate="self_attn.gate_projection",
    renamed=((r"^((?:model\.)?)gate_projections\.(\d+)\.", r"\1layers.\2.self_attn.gate_projection."),),
)
MOST_RUNS = 64


def build(config: Config) -> ArchSpec:
    runs, window = integer(config, "loop_num", 2), integer(config, "loop_window_size", 64)
    if not 1 <= runs <= MOST_RUNS:
        raise ModelError(f"the config's loop_num is {runs}; it must be from 1 to {MOST_RUNS}")
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    head_dim = hidden // max(heads, 1)
    if integer(config, "head_dim", head_dim) != head_dim:
        raise ModelError(
            f"the config's head_dim is {config['head_dim']}, and {heads} heads of {hidden} have {head_dim}"
        )
    spec = llama_like(config, head_dim=head_dim, names=NAMES)

    def mixer(layer: LayerSpec, run: Run) -> LoopedAttention:
        whole = as_kind(LoopedAttention, layer.mixer, run=run, loop_window=window)
        return replace(whole, sliding_window=window) if run == "near" else whole

    layers = [replace(layer, mixer=mixer(layer, "first")) for layer in spec.layers]
    for _ in range(runs - 1):
        for index, layer in enumerate(spec.layers):
            layers.append(LayerSpec(mixer(layer, "near"), NoFfn(), weights_of=index))
            far = mixer(layer, "far")
            layers.append(LayerSpec(far, layer.ffn, cache_of=index, mixer_norm=False, weights_of=index))
    return replace(spec, layers=tuple(layers))


FAMILY = Family(
    ("IQuestLoopCoderForCausalLM",),
    build,
    assumes={"attention_bias": (False,), "mlp_bias": (False,)},
)
