"""A folder of `pooling_folders.py` as a GGUF file for llama-cpp-python, by the package gguf in its environment."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np

TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}


def gguf_of_bert(folder: Path, dtype: str) -> Path:
    """Matrices have the type, all else is float32."""
    file = folder / f"model-{dtype}.gguf"
    if file.exists():
        return file
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(file, "bert")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    _add_tokenizer(writer, folder, config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, layers)
    for name, values in _tensors(folder / "model.safetensors"):
        if "pooler" in name or "position_ids" in name:
            continue
        is_matrix = values.ndim == 2 and "embeddings" not in name
        kind = TYPES[dtype] if is_matrix else gguf.GGMLQuantizationType.F32
        named = names.get_name(name.removeprefix("bert."), try_suffixes=(".weight", ".bias"))
        assert named is not None, f"GGUF files of BERT have no {name}"
        writer.add_tensor(named, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> None:
    """The words of the vocabulary begin with the mark of a word's first piece, as llama.cpp's WordPiece looks for."""
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = {number: word for word, number in vocab.items()}
    tokens, kinds = list[str](), list[int]()
    for number in range(vocab_size):
        word = words.get(number, f"[unused{number}]")
        is_control = word.startswith(("[", "<"))
        tokens.append(word if is_control else f"\u2581{word}")
        kinds.append(int(gguf.TokenType.CONTROL if is_control else gguf.TokenType.NORMAL))
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_type_count(2)
    keys = gguf.Keys.Tokenizer
    for key, number in ((keys.BOS_ID, 0), (keys.PAD_ID, 1), (keys.SEP_ID, 2), (keys.EOS_ID, 2)):
        writer.add_uint32(key, number)
    writer.add_uint32(keys.UNK_ID, 3)


def _tensors(file: Path) -> list[tuple[str, np.ndarray]]:
    """In float32; the file's are bfloat16."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, found = json.loads(content[8 : 8 + size]), []
    for name, each in header.items():
        if name == "__metadata__":
            continue
        begin, end = each["data_offsets"]
        bits = np.frombuffer(content[8 + size + begin : 8 + size + end], np.uint16).astype(np.uint32) << 16
        found.append((name, bits.view(np.float32).reshape(each["shape"])))
    return found
