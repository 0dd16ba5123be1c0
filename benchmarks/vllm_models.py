"""Tiny models in the place of those that vLLM's pooling tests name, for `benchmarks/vllm_cases.py`.

Each has the architecture, files and width of the published one, two layers and random weights. Their tokenizers know
the texts that the tests give with their token ids.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

_LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 6}
_XLMR_WORDS = {
    581: "▁The", 2965: "▁best", 13580: "▁thing", 1672: "▁about", 81: "▁v", 23708: "LL", 594: "M", 83: "▁is",
    450: "▁that", 442: "▁it", 8060: "▁support", 7: "s", 5941: "▁many", 12921: "▁different", 115774: "▁models",
    3293: "▁This", 12996: "▁product", 509: "▁was", 40881: "▁excellent", 136: "▁and", 204839: "▁exceed", 297: "ed",
    759: "▁my", 202702: "▁expectations",
}  # fmt: skip
"""Of the tokenizer of XLM-RoBERTa: what the tests name."""


def _xlmr_tokenizer(folder: Path, limit: int, demo: Path) -> int:
    """A Unigram tokenizer with the words of the demo model's, as many tokens as XLM-RoBERTa's, and some of its ids."""
    letters = [chr(each) for each in range(33, 127)] + list("éèüöñ")
    vocabulary = json.loads((demo / "tokenizer.json").read_text())["model"]["vocab"]
    words = [word.replace("Ġ", "▁") for word in vocabulary]
    letters += [word for word in words if word.removeprefix("▁").isalpha()]
    known = {0: "<s>", 1: "<pad>", 2: "</s>", 3: "<unk>", **_XLMR_WORDS}
    given = iter(dict.fromkeys([*letters, *("▁" + each for each in letters), "▁"]))
    size = 250_002
    taken = set(known.values())
    pieces = []
    for index in range(size):
        piece = known.get(index)
        if piece is None and index > 200:
            piece = next((each for each in given if each not in taken), None)
        known_piece = piece or f"<extra_{index}>"
        taken.add(known_piece)
        pieces.append((known_piece, -1.0 if index in _XLMR_WORDS else -10.0))
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", cls_token="<s>", eos_token="</s>", sep_token="</s>",
        pad_token="<pad>", unk_token="<unk>", model_max_length=limit,
    ).save_pretrained(folder)  # fmt: skip
    return size


def _bert_tokenizer(folder: Path, limit: int) -> int:
    letters = [chr(each) for each in range(33, 127)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *letters, *("##" + each for each in letters)]
    words += [f"[unused{index}]" for index in range(2000)]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )  # fmt: skip
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]",
        mask_token="[MASK]", model_max_length=limit,
    ).save_pretrained(folder)  # fmt: skip
    return len(words)


def _save(model: Any, folder: Path) -> None:
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=random)
            is_norm = weight.dim() == 1 and bool((weight == 1).all())
            weight.copy_(1 + 0.1 * noise if is_norm else 0.05 * noise)
    model.save_pretrained(folder)


def _sentence_folder(folder: Path, pooling: str, width: int, limit: int, normalizes: bool) -> None:
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] * normalizes)]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens", "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": width, **modes}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": limit, "do_lower_case": False}))


def e5_small(folder: Path, demo: Path) -> None:
    size = _xlmr_tokenizer(folder, 512, demo)
    config = transformers.BertConfig(
        vocab_size=size, hidden_size=384, intermediate_size=512, max_position_embeddings=512, pad_token_id=1, **_LAYERS
    )
    _save(transformers.BertModel(config).bfloat16(), folder)
    _sentence_folder(folder, "mean_tokens", 384, 512, True)


def _bert(
    width: int, pooling: str, normalizes: bool = True, limit: int = 512, **more: Any
) -> Callable[[Path, Path], None]:
    def make(folder: Path, _: Path) -> None:
        size = _bert_tokenizer(folder, limit)
        config = transformers.BertConfig(
            vocab_size=size, hidden_size=width, intermediate_size=512, max_position_embeddings=512, **_LAYERS, **more
        )
        _save(transformers.BertModel(config), folder)
        _sentence_folder(folder, pooling, width, limit, normalizes)

    return make


def bge_m3(folder: Path, demo: Path) -> None:
    size = _xlmr_tokenizer(folder, 8192, demo)
    config = transformers.XLMRobertaConfig(
        vocab_size=size,
        hidden_size=96,
        intermediate_size=128,
        max_position_embeddings=8194,
        type_vocab_size=1,
        **_LAYERS,
    )
    _save(transformers.XLMRobertaModel(config), folder)
    _sentence_folder(folder, "cls_token", 96, 8192, True)
    random = torch.Generator().manual_seed(1)
    for name, rows in (("colbert_linear", 96), ("sparse_linear", 1)):
        weights = {"weight": torch.randn(rows, 96, generator=random) / 10, "bias": torch.zeros(rows)}
        torch.save(weights, folder / f"{name}.pt")


def xlmr_reranker(folder: Path, demo: Path) -> None:
    size = _xlmr_tokenizer(folder, 512, demo)
    config = transformers.XLMRobertaConfig(
        vocab_size=size, hidden_size=48, intermediate_size=64, max_position_embeddings=514, type_vocab_size=1,
        num_labels=1, **_LAYERS,
    )  # fmt: skip
    _save(transformers.XLMRobertaForSequenceClassification(config), folder)


def _bert_reranker(folder: Path, _: Path) -> None:
    size = _bert_tokenizer(folder, 512)
    config = transformers.BertConfig(
        vocab_size=size, hidden_size=48, intermediate_size=64, max_position_embeddings=512, num_labels=1, **_LAYERS
    )
    _save(transformers.BertForSequenceClassification(config), folder)
    written = json.loads((folder / "config.json").read_text())
    written["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"}
    (folder / "config.json").write_text(json.dumps(written))


def colbert(folder: Path, _: Path) -> None:
    size = _bert_tokenizer(folder, 512)
    config = transformers.BertConfig(
        vocab_size=size, hidden_size=384, intermediate_size=512, max_position_embeddings=512, **_LAYERS
    )
    _save(transformers.BertModel(config), folder)
    weights = load_file(folder / "model.safetensors")
    weights = {f"bert.{name}": value for name, value in weights.items()}
    weights["linear.weight"] = torch.randn(96, 384, generator=torch.Generator().manual_seed(2)) / 20
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    (folder / "config.json").write_text(json.dumps(written))


def _with_tokenizer_of(demo: Path, folder: Path) -> None:
    for file in demo.iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "special")):
            shutil.copy(file, folder / file.name)


def _decoder(kind: str, end: str, **config: Any) -> Callable[[Path, Path], None]:
    def make(folder: Path, demo: Path) -> None:
        _with_tokenizer_of(demo, folder)
        own = json.loads((demo / "config.json").read_text())
        made = getattr(transformers, f"{kind}Config")(
            **{
                "vocab_size": own["vocab_size"], "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32768,
                "pad_token_id": own.get("pad_token_id") or 2, "bos_token_id": 1, "eos_token_id": 2, **config,
            }
        )  # fmt: skip
        _save(getattr(transformers, f"{kind}{end}")(made), folder)

    return make


def internlm2_reward(folder: Path, demo: Path) -> None:
    _with_tokenizer_of(demo, folder)
    own = json.loads((demo / "config.json").read_text())
    hidden, heads, kv_heads, inner, layers, head = 96, 4, 2, 128, 2, 24
    random = torch.Generator().manual_seed(3)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) / 10

    weights = {
        "model.tok_embeddings.weight": matrix(own["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        weights |= {
            at + "attention.wqkv.weight": matrix((heads + 2 * kv_heads) * head, hidden),
            at + "attention.wo.weight": matrix(hidden, heads * head),
            at + "feed_forward.w1.weight": matrix(inner, hidden), at + "feed_forward.w3.weight": matrix(inner, hidden),
            at + "feed_forward.w2.weight": matrix(hidden, inner),
            at + "attention_norm.weight": torch.ones(hidden), at + "ffn_norm.weight": torch.ones(hidden),
        }  # fmt: skip
    weights["v_head.weight"] = matrix(1, hidden)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["InternLM2ForRewardModel"], "model_type": "internlm2", "vocab_size": own["vocab_size"],
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        "rope_theta": 1000000, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "bias": False,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "reward_token_id": 92527,
        "auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config",
                     "AutoModel": "modeling_internlm2.InternLM2ForRewardModel"},
    }))  # fmt: skip


def _of_encoder(kind: str, end: str, **config: Any) -> Callable[[Path, Path], None]:
    """A small encoder of a class of transformers, with the tokenizer of XLM-RoBERTa or of BERT."""

    def make(folder: Path, demo: Path) -> None:
        roberta = "Roberta" in kind
        size = _xlmr_tokenizer(folder, 512, demo) if roberta else _bert_tokenizer(folder, 512)
        named = {"pad_token_id": 1} if roberta else {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3}
        if kind == "ModernBert":
            named |= {"bos_token_id": 2, "eos_token_id": 3}
        made = getattr(transformers, f"{kind}Config")(
            vocab_size=size, hidden_size=48, intermediate_size=64, max_position_embeddings=514, **_LAYERS,
            **{**named, **config},
        )  # fmt: skip
        _save(getattr(transformers, f"{kind}{end}")(made), folder)
        if end == "Model":
            _sentence_folder(folder, "mean_tokens", 48, 128, False)

    return make


MAKERS: dict[str, Callable[[Path, Path], None]] = {
    "intfloat/multilingual-e5-small": e5_small,
    "intfloat/e5-small": _bert(384, "mean_tokens"),
    "sentence-transformers/all-MiniLM-L12-v2": _bert(384, "mean_tokens", limit=128),
    "sentence-transformers/all-MiniLM-L6-v2": _bert(384, "mean_tokens", limit=256),
    "Snowflake/snowflake-arctic-embed-m-v1.5": _bert(768, "cls_token"),
    "BAAI/bge-base-en-v1.5": _bert(768, "cls_token"),
    "BAAI/bge-m3": bge_m3,
    "BAAI/bge-reranker-base": xlmr_reranker,
    "BAAI/bge-reranker-v2-m3": xlmr_reranker,
    "cross-encoder/ms-marco-MiniLM-L-6-v2": _bert_reranker,
    "cross-encoder/ms-marco-TinyBERT-L-2-v2": _bert_reranker,
    "sentence-transformers/stsb-roberta-base-v2": _of_encoder("Roberta", "Model", type_vocab_size=1),
    "boltuix/NeuroBERT-NER": _of_encoder("Bert", "ForTokenClassification", num_labels=5),
    "disham993/electrical-ner-ModernBERT-base": _of_encoder("ModernBert", "ForTokenClassification", num_labels=5),
    "Davlan/xlm-roberta-base-ner-hrl": _of_encoder("XLMRoberta", "ForTokenClassification", num_labels=5),
    "papluca/xlm-roberta-base-language-detection": _of_encoder("XLMRoberta", "ForSequenceClassification", num_labels=4),
    "Rami/multi-label-class-classification-on-github-issues": _of_encoder(
        "Bert", "ForSequenceClassification", num_labels=6, problem_type="multi_label_classification"
    ),
    "nie3e/sentiment-polish-gpt2-small": _decoder("GPT2", "ForSequenceClassification", num_labels=3),
    "answerdotai/answerai-colbert-small-v1": colbert,
    "jason9693/Qwen2.5-1.5B-apeach": _decoder("Qwen2", "ForSequenceClassification", num_labels=2),
    "internlm/internlm2-1_8b-reward": internlm2_reward,
    "Qwen/Qwen3-Embedding-0.6B": _decoder("Qwen3", "ForCausalLM", tie_word_embeddings=True, head_dim=24),
    "Qwen/Qwen3-Reranker-0.6B": _decoder("Qwen3", "ForCausalLM", tie_word_embeddings=True, head_dim=24),
    "Qwen/Qwen3-0.6B": _decoder("Qwen3", "ForCausalLM", tie_word_embeddings=True, head_dim=24),
    "tomaarsen/Qwen3-Reranker-0.6B-seq-cls": _decoder("Qwen3", "ForSequenceClassification", num_labels=1, head_dim=24),
}
