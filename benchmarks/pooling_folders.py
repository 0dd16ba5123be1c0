"""Folders of embedding models and rerankers at their true dimensions with random weights, and texts of known lengths.

Every word of a text is one token, so that all engines compute the same tokens whatever their tokenizers. Run by
`pooling_peers.py` and, in the peers' own environments, by `pooling_child.py`: it imports nothing of Headrace's.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

LENGTHS: dict[str, int | None] = {"16": 16, "128": 128, "512": 512, "mix": None}
"""By name, the tokens of a text with [CLS] and [SEP]; None: log-normal, the median 90, at most 512."""
_BERT = {"model_type": "bert", "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2}
_XLMR = {"model_type": "xlm-roberta", "vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1}
_SMALL = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "MiniLM-L6": ("BertModel", {**_BERT, **_SMALL, "num_hidden_layers": 6}),
    "bge-small": ("BertModel", {**_BERT, **_SMALL, "num_hidden_layers": 12}),
    "Qwen3-Embedding-0.6B": (
        "Qwen3Model",
        {
            "model_type": "qwen3", "vocab_size": 151669, "hidden_size": 1024, "num_hidden_layers": 28, "head_dim": 128,
            "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072,
            "max_position_embeddings": 32768, "tie_word_embeddings": True,
        },
    ),
    "XLM-R-base reranker": (
        "XLMRobertaForSequenceClassification",
        {
            **_XLMR, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": 12,
            "num_labels": 1, "pad_token_id": 1,
        },
    ),
}  # fmt: skip
WORDS = 20_000


def word(number: int) -> str:
    """Short, as vLLM refuses texts of more than six characters for each token that the model may read."""
    return f"w{number:x}"


def texts_of(kind: str, count: int, seed: int = 0) -> list[str]:
    generator, texts = random.Random(f"{kind} {seed}"), []
    for _ in range(count):
        tokens = LENGTHS[kind] or min(512, max(8, round(generator.lognormvariate(4.5, 0.8))))
        texts.append(" ".join(word(generator.randrange(WORDS)) for _ in range(tokens - 2)))
    return texts


def pairs_of(count: int = 100, tokens: int = 200) -> list[tuple[str, str]]:
    generator = random.Random(1)
    query, *documents = (
        " ".join(word(generator.randrange(WORDS)) for _ in range(words)) for words in [12] + [tokens] * count
    )
    return [(query, document) for document in documents]


def num_tokens(texts: list[str]) -> int:
    return sum(text.count(" ") + 3 for text in texts)


def make_folder(name: str, folder: Path) -> Path:
    """Writes weights, tokenizer and sentence-transformers' files, unless they are there."""
    if (folder / "config.json").exists():
        return folder
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    named, config = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    begin, end = ("<s>", "</s>") if named.startswith("XLM") else ("[CLS]", "[SEP]")
    vocab = {word: index for index, word in enumerate([begin, "<pad>", end, "<unknown>", *map(word, range(WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    is_xlm = named.startswith("XLM")
    joined = f"{end}:0 {end}:0 $B:0 {end}:0" if is_xlm else f"{end}:0 $B:1 {end}:1"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin}:0 $A:0 {end}:0", pair=f"{begin}:0 $A:0 {joined}", special_tokens=[(begin, 0), (end, 2)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token=begin, sep_token=end, pad_token="<pad>", unk_token="<unknown>",
        model_max_length=512,
    ).save_pretrained(folder)  # fmt: skip
    told = json.loads((folder / "tokenizer_config.json").read_text())
    told["tokenizer_class"] = "PreTrainedTokenizerFast"  # as transformers 4, infinity-emb's, calls it
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    torch.manual_seed(0)
    model = getattr(transformers, named)(transformers.AutoConfig.for_model(**config))
    model.to(torch.bfloat16).save_pretrained(folder)
    if named.endswith("Model"):
        kinds = ["Transformer", "Pooling", "Normalize"]
        paths = ["", "1_Pooling", "2_Normalize"]
        modules = [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for n, (kind, path) in enumerate(zip(kinds, paths, strict=True))
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        flags = {"pooling_mode_mean_tokens": named == "BertModel", "pooling_mode_lasttoken": named != "BertModel"}
        (folder / "1_Pooling").mkdir(exist_ok=True)
        pooling = {"word_embedding_dimension": config["hidden_size"], "pooling_mode_cls_token": False, **flags}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))
    return folder
