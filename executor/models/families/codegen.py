"""CodeGen: GPT-J with queries, values and keys in one matrix, laid out for four devices."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, Fused
from headrace.executor.models.families import Config, Family, gptj
from headrace.executor.models.families._config import integer
from headrace.ipc.failure import ModelError

DEVICES = 4
"""That the authors trained on: each has the queries, then the values, then the keys of a quarter of the heads."""


def build(config: Config) -> ArchSpec:
    spec = gptj.build(config)
    heads = integer(config, "n_head")
    if heads % DEVICES:
        raise ModelError(f"the config's n_head is {heads}; a multiple of {DEVICES} can be read")
    names = spec.names
    rows = spec.hidden_size // DEVICES
    parts = tuple((name, rows) for name in (names.query, names.value, names.key))
    return replace(spec, fused=(Fused("attn.qkv_proj", parts, DEVICES),))


FAMILY = Family(("CodeGenForCausalLM",), build)
