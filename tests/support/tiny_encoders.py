"""Tiny random encoders, made and saved by transformers, and heads of classifiers on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 320
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 258,
    "pad_token_id": 1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_T5 = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "d_ff": 96,
    "d_kv": 16,
    "num_layers": 3,
    "num_heads": 4,
    "n_positions": 256,
    "dropout_rate": 0.0,
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"type_vocab_size": 2, "pad_token_id": 0}),
    "roberta": ("Roberta", {"type_vocab_size": 1}),
    "electra": ("Electra", {"type_vocab_size": 2, "pad_token_id": 0, "embedding_size": 64}),
    "ernie": ("Ernie", {"type_vocab_size": 4, "pad_token_id": 0, "use_task_id": True, "task_type_vocab_size": 3}),
    "xlm_roberta": ("XLMRoberta", {"type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "distilbert": (
        "DistilBert",
        {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4, "dropout": 0.0, "attention_dropout": 0.0},
    ),
    "mpnet": ("MPNet", {"relative_attention_num_buckets": 32}),
    "modernbert": (
        "ModernBert",
        {"local_attention": 32, "norm_eps": 1e-5, "eos_token_id": 2, "bos_token_id": 0, "cls_token_id": 0,
         "sep_token_id": 2},
    ),
    "nomic_bert": ("NomicBert", {"type_vocab_size": 2, "pad_token_id": 0}),
    "gte": ("Gte", {"type_vocab_size": 1}),
    "gemma3": (
        "Gemma3Text",
        {"use_bidirectional_attention": True, "head_dim": 16, "sliding_window": 32, "num_key_value_heads": 1,
         "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "pad_token_id": 2},
    ),
    "jina_v3": ("JinaEmbeddingsV3", {"type_vocab_size": 1}),
    "eurobert": (
        "EuroBert",
        {"num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 0, "eos_token_id": 2, "mask_token_id": 3},
    ),
    "t5": ("T5Encoder", {**_T5, "feed_forward_proj": "relu"}),
    "t5_gated": ("T5Encoder", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "umt5": ("UMT5Encoder", {**_T5, "feed_forward_proj": "gated-gelu"}),
}  # fmt: skip
"""From a name to the beginning of transformers' class names and the config besides COMMON."""


JINA_BERT: dict[str, Any] = {
    "architectures": ["JinaBertForMaskedLM"], "model_type": "bert", "position_embedding_type": "alibi",
    "feed_forward_type": "geglu", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 80, "max_position_embeddings": 256, "vocab_size": VOCAB_SIZE, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "emb_pooler": "mean", "hidden_act": "gelu",
}  # fmt: skip
"""Its code is not in transformers."""


def config_of(name: str, **config: Any) -> Any:
    stem, own = ENCODERS[name]
    kind = getattr(transformers, f"{stem.removesuffix('Encoder')}Config")
    common = {} if "t5" in name else COMMON
    return kind(**{**common, **own, **config})


def encoder_config(name: str) -> dict[str, Any]:
    """The config.json of the model without a head."""
    found: dict[str, Any] = config_of(name).to_dict()
    return found | {"architectures": [f"{ENCODERS[name][0]}Model"]}


def save_encoder(name: str, folder: Path, end: str = "Model", seed: int = 0, **config: Any) -> Path:
    """Writes the checkpoint of transformers' class that ends so into `folder`, and returns it."""
    stem, _ = ENCODERS[name]
    model = getattr(transformers, f"{stem}{end}")(config_of(name, **config)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and bool((parameter == 1).all())
            parameter.copy_(1 + 0.2 * noise if is_norm else 0.2 * noise)
    model.save_pretrained(folder)
    return folder


def make_pair_tokenizer(
    folder: Path, begin: str, between: tuple[str, ...], end: str, words: tuple[str, ...] = ()
) -> Any:
    """Writes a tokenizer of single letters (and `words`) that joins pairs with special tokens: `begin` A `between` B
    `end`; with one token between them, as BERT's does, B and its end have token type 1. Returns transformers' own."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?<>:|_\"'/"
    special = [begin, "<pad>", end, "<unk>"]
    vocab = {
        token: index for index, token in enumerate([*special, *words, *letters, *(f"##{each}" for each in letters)])
    }
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>", max_input_chars_per_word=1000))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    second = 1 if len(between) == 1 else 0
    joined = " ".join([f"{begin}:0", "$A:0", *(f"{each}:0" for each in between), f"$B:{second}", f"{end}:{second}"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin}:0 $A:0 {end}:0",
        pair=joined,
        special_tokens=[(each, vocab[each]) for each in dict.fromkeys((begin, *between, end))],
    )
    names = ["input_ids", *(["token_type_ids"] if second else []), "attention_mask"]
    made = transformers.PreTrainedTokenizerFast(
        model_input_names=names,
        tokenizer_object=tokenizer, cls_token=begin, sep_token=end, pad_token="<pad>", unk_token="<unk>",
        additional_special_tokens=[word for word in words if word.startswith("<|")],
    )  # fmt: skip
    made.save_pretrained(folder)
    return made
