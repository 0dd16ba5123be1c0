"""Architectures that others serve and that have no family, with what a family would need."""

from collections.abc import Mapping
from types import MappingProxyType

_REMOTE = "its code comes with its checkpoints, and nothing installed here can check a family against it"
_LACKING = {
    "AXK2ForCausalLM": "norms whose outputs are gated by two matrices of low rank",
    "BltForCausalLM": "patches of bytes, which a model of their entropy makes",
    "DiffLlamaForCausalLM": "differences of two attentions",
    "DogeForCausalLM": "masks that are computed of values",
    **dict.fromkeys(
        ("Inkling2ForCausalLM", "Inkling2ForConditionalGeneration"),
        "residuals that are attention to sums of earlier layers, and convolutions whose weights tokens compute",
    ),
    "JetMoeForCausalLM": "experts of queries and of attention's outputs",
    "RwkvForCausalLM": "RWKV 4's recurrence",
    "ZambaForCausalLM": "one layer of attention, of twice the hidden size, that several layers of Mamba share",
    "ZayaForCausalLM": "convolutions of queries and keys, experts that an FFN chooses, and scaled residuals",
    "xLSTMForCausalLM": "matrices as memories with exponential gates",
}
LACKING: Mapping[str, str] = MappingProxyType(_LACKING)
