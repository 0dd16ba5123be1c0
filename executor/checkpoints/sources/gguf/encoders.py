"""GGUF architectures that attend to both sides, and how the vectors of a file's tokens are pooled.

llama.cpp's converter writes `pooling_type` of what sentence-transformers' files say, and a classifier's matrices as
`cls` and `cls.output`. It leaves out RoBERTa's positions before the first one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.executor.checkpoints.sentence_folder import SentenceFolder
from headrace.executor.checkpoints.sources.gguf.architecture import Fields, GGUFArchitecture
from headrace.executor.checkpoints.sources.gguf.header import GGUFHeader, StringArray
from headrace.executor.models.families.nomic_bert import BIAS
from headrace.ipc.failure import ModelError

POOLINGS = {0: "ALL", 1: "MEAN", 2: "CLS", 3: "LAST"}
"""By values of `pooling_type`."""
RANKING = 4
"""The value of a classifier of pairs of texts."""
CLASSES = "cls.output.weight"
YES_NO = ["yes", "no"]
"""Labels of a decoder's two rows of `cls.output`: a score is the first one's logit less that of the second."""
YES_NO_SCORE = "is_original_qwen3_reranker"
"""The config's key, which is vLLM's, of rerankers that are asked as Qwen3's are."""


def pooling_of(header: GGUFHeader) -> SentenceFolder | None:
    """What the file says of its vectors; None: nothing, or that it has a classifier. Raises ModelError."""
    key = f"{header.metadata.get('general.architecture')}.pooling_type"
    kind = header.metadata.get(key)
    if kind is None or (kind == RANKING and CLASSES in header.tensors):
        return None
    if kind not in POOLINGS:
        known = ", ".join(f"{number} ({name})" for number, name in POOLINGS.items())
        what = f"{kind}, and {CLASSES} is missing" if kind == RANKING else f"{kind!r:.80}"
        raise ModelError(f"{header.path}: the metadata key {key} is {what}; {known} are computed without a classifier")
    return SentenceFolder(
        tokens=POOLINGS[kind],
        normalizes=True,
        width=None,
        max_tokens=None,
        lower_case=False,
        layers=(),
        prompts={},
        default_prompt=None,
        similarity="cosine",
    )


def classifier_fields(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a file with a classifier: the architecture that has it, and its labels."""
    if not fields.holds(CLASSES):
        if fields.holds("cls.weight"):
            raise ModelError(
                f"{fields.header.path} has a classifier (cls.weight) without the pooler before it, which llama.cpp's "
                "converter leaves out; use the safetensors folder"
            )
        return {}
    (architecture,), rows, labels = config["architectures"], num_rows(fields, CLASSES), labels_of(fields.header)
    stem = next(architecture.removesuffix(end) for end in ("ForCausalLM", "Model", "") if architecture.endswith(end))
    found: dict[str, Any] = {"architectures": [f"{stem}ForSequenceClassification"], "num_labels": rows}
    if is_yes_no(fields.header):
        return found | {"num_labels": 1, YES_NO_SCORE: True}
    return found | ({"id2label": dict(enumerate(labels))} if len(labels) == rows else {})


def is_yes_no(header: GGUFHeader) -> bool:
    return labels_of(header) == YES_NO and header.tensors[CLASSES].shape[0] == len(YES_NO)


def labels_of(header: GGUFHeader) -> list[str]:
    found = header.metadata.get(f"{header.metadata.get('general.architecture')}.classifier.output_labels")
    return list(found) if isinstance(found, StringArray) else []


def num_rows(fields: Fields, tensor: str) -> int:
    """Of a matrix; one of a single row is stored as a vector."""
    shape = fields.header.tensors[tensor].shape
    return int(shape[0]) if len(shape) > 1 else 1


def _bert(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    fields.expect("attention.causal", False)
    types = num_rows(fields, "token_types.weight") if fields.holds("token_types.weight") else 0
    return {"hidden_act": "gelu", "type_vocab_size": types, "rope_theta": None}


def _nomic(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    own = {"hidden_act": "silu", "qkv_proj_bias": fields.holds("blk.0.attn_qkv.bias")}
    return _bert(fields, config) | own | {"rope_theta": config["rope_theta"]}


def _nomic_experts(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    others = ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "moe_k")
    return _nomic(fields, config) | {
        **dict.fromkeys((*others, "moe_intermediate_size"), None),  # under its own names alone
        "hidden_act": "gelu",
        "mlp_fc1_bias": fields.holds("blk.0.ffn_up.bias"),
        "mlp_fc2_bias": fields.holds("blk.0.ffn_down.bias"),
        "moe_every_n_layers": fields.integer("moe_every_n_layers"),
        "moe_top_k": fields.integer("expert_used_count"),
        BIAS: False,
    }


def _jina(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    fields.expect("attention.max_alibi_bias", 8.0)
    return _bert(fields, config) | {"feed_forward_type": "geglu", "position_embedding_type": "alibi"}


_HEADS = MappingProxyType({"cls": "pooler.dense", "cls.output": "classifier"})
"""BERT's names of a classifier's two matrices; RoBERTa has others for the same."""
ENCODERS: Mapping[str, GGUFArchitecture] = MappingProxyType(
    {
        "bert": GGUFArchitecture("BertModel", "bert", extra=_bert, heads=_HEADS, layer_norms=True),
        "jina-bert-v2": GGUFArchitecture("JinaBertModel", "jina_bert", extra=_jina, heads=_HEADS, layer_norms=True),
        "nomic-bert": GGUFArchitecture("NomicBertModel", "nomic_bert", extra=_nomic, heads=_HEADS, layer_norms=True),
        "nomic-bert-moe": GGUFArchitecture(
            "NomicBertModel",
            "nomic_bert",
            is_mixture=True,
            extra=_nomic_experts,
            always_renormalises=False,
            layer_norms=True,
        ),
    }
)
