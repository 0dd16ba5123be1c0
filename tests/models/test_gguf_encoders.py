"""Models that pool from GGUF files, as llama.cpp's converter writes them, beside the folders that these come from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import tiny_models
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_embed import as_sentence_folder, assert_close, vectors
from test_encoders import prompts_of
from tiny_encoders import JINA_BERT, VOCAB_SIZE, save_encoder
from tiny_gguf import convert, finish

from headrace import LLM, ModelError
from headrace.executor.checkpoints.sources.gguf.header import GGUFHeader
from headrace.executor.checkpoints.sources.gguf.tokenizer import gguf_bundle

ENGINE: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 12, "use_tqdm_on_load": False}
BY_IDS: dict[str, Any] = {**ENGINE, "skip_tokenizer_init": True}
CONTROL, NORMAL = 3, 1
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz.,!?-'"
TEXTS = ["The sky is blue.", "A", "don't - stop!", "word " * 30, "Caf\u00e9 \u5929\u7a7a [MASK] end", "unheard-of"]


def write(folder: Path, path: Path, arch: str, pooling: str | None, tokenizer: Mapping[str, Any] | None = None) -> Path:
    """What the converter makes of an encoder's folder: RoBERTa's positions begin at 0, the pooler is left out."""
    config, state = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    writer, offset = gguf.GGUFWriter(path, arch), config["pad_token_id"] + 1 if "oberta" in config["model_type"] else 0
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"] - offset)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config.get("layer_norm_eps", 1e-12))
    writer.add_causal_attention(False)
    if arch == "nomic-bert":
        writer.add_rope_freq_base((config.get("rope_parameters") or {}).get("rope_theta", 1000.0))
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType[pooling])
    for key, value in (tokenizer or {}).items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32 if isinstance(value, int) else
         writer.add_string if isinstance(value, str) else writer.add_array)(key, value)  # fmt: skip
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for name, tensor in state.items():
        stem, suffix = name.removeprefix("bert.").removeprefix("roberta.").rsplit(".", 1)
        own = names.get_name(stem)
        if own is None or stem.startswith(("pooler", "lm_head", "cls")):
            continue
        values = tensor[offset:] if stem.endswith("position_embeddings") else tensor
        writer.add_tensor(f"{own}.{suffix}", (values.squeeze() if values.ndim > 1 else values).float().numpy())
    return finish(writer, path)


@pytest.mark.parametrize(
    ("name", "arch", "pooling"),
    [
        ("bert", "bert", "MEAN"),
        ("bert", "bert", "CLS"),
        ("roberta", "bert", "MEAN"),
        ("xlm_roberta", "bert", "LAST"),
        ("nomic_bert", "nomic-bert", "MEAN"),
    ],
)
def test_vectors_of_a_file_are_those_of_its_folder(tmp_path: Path, name: str, arch: str, pooling: str) -> None:
    folder = save_encoder(name, tmp_path / "model")
    as_sentence_folder(folder, {"word_embedding_dimension": 64, "pooling_mode": WORDS_OF[pooling]})
    file, prompts = write(folder, tmp_path / "model.gguf", arch, pooling), prompts_of((1, 17, 64, 130))
    found = []
    for model in (folder, file):
        with LLM(str(model), in_process=True, **BY_IDS) as llm:
            assert llm.supported_tasks == ("embed", "token_embed")
            found.append(vectors(llm, prompts))
    assert torch.equal(*found)


WORDS_OF = {"MEAN": "mean", "CLS": "cls", "LAST": "lasttoken"}


def test_jina_bert(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    generator, hidden, inner = torch.Generator().manual_seed(0), 48, 80
    linear = {"attention.self.query": (hidden, hidden), "attention.self.key": (hidden, hidden),
              "attention.self.value": (hidden, hidden), "attention.output.dense": (hidden, hidden),
              "mlp.wo": (hidden, inner)}  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (VOCAB_SIZE, hidden),
              "embeddings.token_type_embeddings.weight": (2, hidden)}  # fmt: skip
    norms = ["embeddings.LayerNorm"]
    for at in (f"encoder.layer.{index}." for index in range(2)):
        shapes |= {f"{at}{stem}.weight": shape for stem, shape in linear.items()}
        shapes |= {f"{at}{stem}.bias": shape[:1] for stem, shape in linear.items()}
        shapes[f"{at}mlp.gated_layers.weight"] = (2 * inner, hidden)
        norms += [f"{at}attention.output.LayerNorm", f"{at}mlp.layernorm"]
    shapes |= {f"{name}.{kind}": (hidden,) for name in norms for kind in ("weight", "bias")}
    save_file(
        {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(JINA_BERT))
    as_sentence_folder(folder, {"word_embedding_dimension": hidden, "pooling_mode": "mean"})
    file, prompts = write_jina(folder, tmp_path / "model.gguf"), prompts_of((1, 17, 130))
    found = []
    for model in (folder, file):
        with LLM(str(model), in_process=True, **BY_IDS) as llm:
            found.append(vectors(llm, prompts))
    assert torch.equal(*found)


def write_jina(folder: Path, path: Path) -> Path:
    config = json.loads((folder / "config.json").read_text()) | {"pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    return write(folder, path, "jina-bert-v2", "MEAN")


@pytest.mark.parametrize("name", ["xlm_roberta", "roberta"])
def test_scores_of_a_file_are_those_of_its_folder(tmp_path: Path, name: str) -> None:
    folder = save_encoder(name, tmp_path / "model", "ForSequenceClassification", num_labels=1)
    file, prompts = write(folder, tmp_path / "model.gguf", "bert", "RANK"), prompts_of((2, 17, 130))
    found = []
    for model in (folder, file):
        with LLM(str(model), in_process=True, **BY_IDS) as llm:
            assert llm.supported_tasks == ("classify",)
            found.append([output.outputs.probs for output in llm.classify(prompts, use_tqdm=False)])
    assert found[0] == found[1]


def test_a_classifier_without_its_first_layer_is_named(tmp_path: Path) -> None:
    """The converter leaves out BERT's pooler, which is a part of its classifier."""
    folder = save_encoder("bert", tmp_path / "model", "ForSequenceClassification", num_labels=1)
    file = write(folder, tmp_path / "model.gguf", "bert", "RANK")
    tensors = gguf.GGUFReader(file).tensors
    assert "cls.output.weight" not in {each.name for each in tensors}, "as the table has it: cls"
    with pytest.raises(ModelError, match="without the pooler before it"):
        LLM(str(file), in_process=True, **BY_IDS)


def word_piece(folder: Path, *, cased: bool) -> dict[str, Any]:
    """Writes a BERT tokenizer into the folder; returns what the converter writes of it."""
    tokens = [*WORDS, "the", "sky", "##ky", "##op", "##\u00e9", "\u5929", *LETTERS, *(f"##{each}" for each in LETTERS)]
    if cased:
        tokens += ["The", "A", "C"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]")
    )
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=not cased)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, mask_token="[MASK]", **named).save_pretrained(folder)
    spelt = [token if token in WORDS else token[2:] if token.startswith("##") else f"\u2581{token}" for token in tokens]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "jina-v2-en",
        "tokenizer.ggml.tokens": spelt,
        "tokenizer.ggml.token_type": [CONTROL if token in WORDS else NORMAL for token in tokens],
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.mask_token_id": 4,
    }


@pytest.mark.parametrize("cased", [False, True])
def test_texts_and_pairs_become_the_tokens_of_the_published_tokenizer(tmp_path: Path, cased: bool) -> None:
    folder = save_encoder("bert", tmp_path / "model")
    as_sentence_folder(folder, {"word_embedding_dimension": 64, "pooling_mode": "mean"})
    file = write(folder, tmp_path / "model.gguf", "bert", "MEAN", word_piece(folder, cased=cased))
    found = []
    for model in (folder, file):
        with LLM(str(model), in_process=True, **ENGINE) as llm:
            outputs = llm.embed(TEXTS, use_tqdm=False)
            pairs = llm.get_tokenizer().encode_pairs([(TEXTS[0], TEXTS[2])])
            found.append(([each.prompt_token_ids for each in outputs], pairs, vectors(llm, TEXTS).tolist()))
    assert found[0] == found[1]


def test_pairs_of_roberta_have_two_separators(tmp_path: Path) -> None:
    folder = save_encoder("xlm_roberta", tmp_path / "model")
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "\u2581", *LETTERS]
    tokenizer = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * 4 + [-1.0 - index for index in range(len(pieces) - 4)],
        "tokenizer.ggml.token_type": [3, 3, 3, 2, *[1] * (len(pieces) - 4)],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.add_space_prefix": True,
    }
    file = write(folder, tmp_path / "model.gguf", "bert", "CLS", tokenizer)
    made = tokenizers.Tokenizer.from_buffer(gguf_bundle(GGUFHeader(file)).tokenizer_json)
    assert made.encode("a", "b").tokens == ["<s>", "\u2581", "a", "</s>", "</s>", "\u2581", "b", "</s>"]
    assert made.encode("a").tokens == ["<s>", "\u2581", "a", "</s>"]


def qwen3(tmp_path: Path, **more: Any) -> tuple[Path, Any, dict[str, torch.Tensor]]:
    folder = tiny_models.save("qwen3", tmp_path / "model", tie_word_embeddings=True)
    config, state = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    return folder, config | more, state


def test_a_decoder_pools_as_its_file_says(tmp_path: Path) -> None:
    folder, config, state = qwen3(tmp_path)
    pooling = {"qwen3.pooling_type": int(gguf.PoolingType.LAST)}
    file = convert("Qwen3ForCausalLM", config, state, tmp_path / "model.gguf", tokenizer=pooling)
    as_sentence_folder(folder)
    prompts = prompts_of((1, 17, 64))
    found = []
    for model in (folder, file):
        with LLM(str(model), in_process=True, **BY_IDS) as llm:
            assert llm.supported_tasks == ("embed", "token_embed")
            found.append(vectors(llm, prompts))
    assert_close(*found)
    with LLM(str(file), in_process=True, runner="generate", **BY_IDS) as llm:
        assert llm.supported_tasks == ("generate",)
    plain = convert("Qwen3ForCausalLM", config, state, tmp_path / "plain.gguf")
    with LLM(str(plain), in_process=True, **BY_IDS) as llm:
        assert llm.supported_tasks == ("generate",)


def test_a_reranker_that_says_yes_or_no_is_known_by_its_file(tmp_path: Path) -> None:
    _, config, state = qwen3(tmp_path)
    rows = torch.randn(2, config["hidden_size"], generator=torch.Generator().manual_seed(1))
    said = {
        "qwen3.pooling_type": int(gguf.PoolingType.RANK),
        "qwen3.classifier.output_labels": ["yes", "no"],
    }
    names = {**state, "cls.output.weight": rows}
    file = convert("Qwen3ForCausalLM", config, names, tmp_path / "model.gguf", tokenizer=said)
    alone = convert("Qwen3ForCausalLM", config, state, tmp_path / "alone.gguf")
    prompts = prompts_of((1, 17, 64))
    with LLM(str(file), in_process=True, **BY_IDS) as llm:
        assert llm.supported_tasks == ("classify",)
        assert llm.engine.pooling is not None
        assert llm.engine.pooling.pair_format is not None, "texts are written as the reranker's prompts"
        scores = torch.tensor([output.outputs.probs for output in llm.classify(prompts, use_tqdm=False)])
    with LLM(str(alone), in_process=True, runner="pooling", **BY_IDS) as llm:
        states = vectors_of(llm, prompts)
    wanted = (states @ (rows[0] - rows[1])).sigmoid()
    assert (scores[:, 0] - wanted).abs().max() < 1e-5


def vectors_of(llm: LLM, prompts: list[list[int]]) -> torch.Tensor:
    from headrace import PoolingParams

    params = PoolingParams(use_activation=False)
    return torch.tensor([o.outputs.embedding for o in llm.embed(prompts, pooling_params=params, use_tqdm=False)])


def test_a_way_of_pooling_that_is_not_known_is_refused(tmp_path: Path) -> None:
    _, config, state = qwen3(tmp_path)
    file = convert("Qwen3ForCausalLM", config, state, tmp_path / "m.gguf", tokenizer={"qwen3.pooling_type": 9})
    with pytest.raises(ModelError, match=r"qwen3\.pooling_type is 9; 0 \(ALL\)"):
        LLM(str(file), in_process=True, **BY_IDS)
