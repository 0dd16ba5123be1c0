"""Folders as popular models are published: their configs, tokenizers' special tokens and module files with tiny random
weights, served without any option. What is wanted is what sentence-transformers' modules compute, by transformers."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import save_file
from test_embed import with_end
from thinned import every
from tiny_encoders import make_pair_tokenizer, save_encoder
from torch import Tensor, nn

from headrace import LLM, ModelError, PoolingParams

ENGINE: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 12, "use_tqdm_on_load": False}
TEXTS = ["The sky is blue.", "A", "word " * 40, "Il cielo e blu, e il mare anche!"]
BERT, ROBERTA = ("[CLS]", ("[SEP]",), "[SEP]"), ("<s>", ("</s>", "</s>"), "</s>")
FLAGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
WORDS = dict(zip(("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"), FLAGS, strict=True))
QUERY = {"query": "query: ", "document": ""}


NOTHING: Mapping[str, Any] = types.MappingProxyType({})


class Shape(NamedTuple):
    """One model's folder."""

    base: str
    """A name of tiny_encoders or of tiny_models."""
    pooling: str
    form: str = "flags"
    """How 1_Pooling/config.json says it: flags, few (only those before version 2.3), word (since 5.4)."""
    normalizes: bool = True
    dense: tuple[tuple[int, str, bool], ...] = ()
    """(values, activation, bias) of Dense modules."""
    layer_norm: bool = False
    tokens: tuple[str, tuple[str, ...], str] = BERT
    settings: Mapping[str, Any] = NOTHING
    general: Mapping[str, Any] | None = NOTHING
    """config_sentence_transformers.json; None: there is none."""
    settings_file: str = "sentence_bert_config.json"
    type_prefix: str = "sentence_transformers.models"
    transformer: str = ""
    """Where the model is, in the folder."""


SHAPES: dict[str, Shape] = {
    "all-MiniLM-L6-v2": Shape("bert", "mean", "few", settings={"max_seq_length": 24, "do_lower_case": False}),
    "all-mpnet-base-v2": Shape("mpnet", "mean", "few", tokens=ROBERTA, settings={"max_seq_length": 64}),
    "all-distilroberta-v1": Shape("roberta", "mean", "few", tokens=ROBERTA, settings={"max_seq_length": 128}),
    "paraphrase-MiniLM-L3-v2": Shape("bert", "mean", "few", False, settings={"max_seq_length": 32}),
    "paraphrase-multilingual-MiniLM-L12-v2": Shape("bert", "mean", "few", False, tokens=ROBERTA),
    "multi-qa-mpnet-base-dot-v1": Shape("mpnet", "cls", "few", False, tokens=ROBERTA),
    "multi-qa-MiniLM-L6-cos-v1": Shape("bert", "mean", "few"),
    "msmarco-distilbert-base-tas-b": Shape("distilbert", "cls", "few", False),
    "msmarco-bert-base-dot-v5": Shape("bert", "mean", "few", False, general={"similarity_fn_name": "dot"}),
    "distiluse-base-multilingual-cased-v2": Shape("distilbert", "mean", "few", False, ((40, "Tanh", True),)),
    "LaBSE": Shape("bert", "cls", "few", dense=((64, "Tanh", True),), settings={"max_seq_length": 256}),
    "bge-small-en-v1.5": Shape("bert", "cls", settings={"max_seq_length": 200, "do_lower_case": True}),
    "bge-base-zh-v1.5": Shape("bert", "cls", general=None),
    "e5-small-v2": Shape("bert", "mean"),
    "multilingual-e5-small": Shape("bert", "mean", tokens=ROBERTA),
    "multilingual-e5-large-instruct": Shape("xlm_roberta", "mean", tokens=ROBERTA),
    "gte-base": Shape("bert", "mean", general={}),
    "gte-multilingual-base": Shape("gte", "cls", tokens=ROBERTA),
    "nomic-embed-text-v1.5": Shape("nomic_bert", "mean", normalizes=False, general={"prompts": {}}),
    "modernbert-embed-base": Shape(
        "modernbert", "mean", general={"prompts": {"query": "search_query: ", "document": "search_document: "}}
    ),
    "gte-modernbert-base": Shape("modernbert", "cls", normalizes=False),
    "granite-embedding-125m-english": Shape("roberta", "cls", tokens=ROBERTA),
    "granite-embedding-english-r2": Shape("modernbert", "cls", "word"),
    "snowflake-arctic-embed-m": Shape("bert", "cls", general={"prompts": {"query": "Represent this: "}}),
    "snowflake-arctic-embed-l-v2.0": Shape("xlm_roberta", "cls", tokens=ROBERTA, general={"prompts": QUERY}),
    "mxbai-embed-large-v1": Shape("bert", "cls", normalizes=False, general={"prompts": {"query": "Represent: "}}),
    "embeddinggemma-300m": Shape(
        "gemma3", "mean", dense=((96, "Identity", False), (64, "Identity", False)), tokens=ROBERTA,
        general={"prompts": {"query": "task: search result | query: ", "document": "title: none | text: "},
                 "default_prompt_name": None, "similarity_fn_name": "cosine"},
    ),
    "sentence-t5-base": Shape("t5", "mean", "few", dense=((48, "Identity", False),), tokens=ROBERTA),
    "gtr-t5-base": Shape("t5_gated", "mean", "few", dense=((48, "Identity", False),), tokens=ROBERTA),
    "stsb-xlm-r-multilingual": Shape(
        "xlm_roberta", "mean", "few", False, tokens=ROBERTA, settings={"max_seq_length": 128},
        settings_file="sentence_xlm-roberta_config.json",
    ),
    "bert-base-nli-max-tokens": Shape("bert", "max", "few", False),
    "bert-base-nli-cls-token": Shape("bert", "cls", "few", False, general=None),
    "saved by 5.4, two layers": Shape(
        "bert", "mean", "word", dense=((32, "GELU", True), (24, "ReLU", False)), layer_norm=True,
        type_prefix="sentence_transformers.base.modules",
    ),
    "saved by 5.4, root of the length": Shape("distilbert", "mean_sqrt_len_tokens", "word", False),
    "layer norm": Shape("bert", "mean", layer_norm=True),
    "with a default prompt": Shape("bert", "mean", general={"prompts": QUERY, "default_prompt_name": "query"}),
    "Qwen3-Embedding-0.6B": Shape("qwen3", "lasttoken", general={"prompts": QUERY, "similarity_fn_name": "cosine"}),
    "gte-Qwen2-1.5B-instruct": Shape("qwen2", "lasttoken", settings={"max_seq_length": 100}),
    "e5-mistral-7b-instruct": Shape("mistral", "lasttoken", general={"prompts": {"sts_query": "Instruct: "}}),
    "SGPT (LlamaModel)": Shape("llama", "weightedmean", normalizes=False),
    "umt5 encoder": Shape("umt5", "mean", tokens=ROBERTA),
    "saved before 2.0": Shape(
        "distilbert", "mean", "few", False, settings={"max_seq_length": 24}, general=None, transformer="0_Transformer"
    ),
    "first token and mean": Shape("bert", "cls+mean", "few", False),
    "mean and largest, two layers": Shape(
        "roberta", "max+mean", tokens=ROBERTA, dense=((48, "Tanh", True), (24, "SiLU", False))
    ),
    "saved by 5.4, three side by side": Shape("mpnet", "mean+lasttoken+cls", "word", tokens=ROBERTA),
    "text2vec-base-chinese-paraphrase": Shape("ernie", "mean", "few", False, settings={"max_seq_length": 256}),
    "FRIDA": Shape("t5_gated", "cls", tokens=ROBERTA, general={"prompts": {"search_query": "search_query: "}}),
    "ms-marco-electra, embedded": Shape("electra", "mean", "few", False),
}  # fmt: skip


def write_modules(folder: Path, shape: Shape, width: int) -> None:
    kinds = ["Transformer", "Pooling", *["Dense"] * len(shape.dense)]
    kinds += ["LayerNorm"] * shape.layer_norm + ["Normalize"] * shape.normalizes
    paths = [shape.transformer if kind == "Transformer" else f"{index}_{kind}" for index, kind in enumerate(kinds)]
    kinds_named = [f"{shape.type_prefix}.{kind}" for kind in kinds]
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": kind}
        for n, (path, kind) in enumerate(zip(paths, kinds_named, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    ways = shape.pooling.split("+")
    on = {WORDS[way] for way in ways}
    chosen = {f"pooling_mode_{flag}": flag in on for flag in FLAGS[: 4 if shape.form == "few" else 6]}
    said = {"pooling_mode": ways[0] if len(ways) == 1 else ways} if shape.form == "word" else chosen
    size = "embedding_dimension" if shape.form == "word" else "word_embedding_dimension"
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({size: width, **said, "include_prompt": True}))
    generator, width = torch.Generator().manual_seed(5), width * len(ways)
    for path, (values, activation, bias) in zip(paths[2:], shape.dense, strict=False):
        (folder / path).mkdir()
        where = "linear" if activation == "Identity" else "activation"
        named = f"torch.nn.modules.{where}.{activation}"
        config = {"in_features": width, "out_features": values, "bias": bias, "activation_function": named}
        (folder / path / "config.json").write_text(json.dumps(config))
        weights = {"linear.weight": 0.2 * torch.randn(values, width, generator=generator)}
        if bias:
            weights["linear.bias"] = torch.randn(values, generator=generator)
        if shape.form == "few":
            torch.save(weights, folder / path / "pytorch_model.bin")
        else:
            save_file(weights, folder / path / "model.safetensors")
        width = values
    if shape.layer_norm:
        path = paths[kinds.index("LayerNorm")]
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps({"dimension": width}))
        norm = {name: torch.randn(width, generator=generator) for name in ("norm.weight", "norm.bias")}
        save_file(norm, folder / path / "model.safetensors")
    if shape.settings:
        (folder / shape.transformer / shape.settings_file).write_text(json.dumps(dict(shape.settings)))
    if shape.general is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"__version__": {}, **shape.general}))


def save_shape(folder: Path, shape: Shape) -> Path:
    if shape.pooling in ("lasttoken", "weightedmean"):
        tiny_models.save(shape.base, folder, tokenizer=True)
        with_end(folder)
        config = json.loads((folder / "config.json").read_text())
        named = config["architectures"][0].replace("ForCausalLM", "Model")
        (folder / "config.json").write_text(json.dumps({**config, "architectures": [named]}))
        width = config["hidden_size"]
    else:
        save_encoder(shape.base, folder)
        make_pair_tokenizer(folder, *shape.tokens)
        config = json.loads((folder / "config.json").read_text())
        width = config.get("hidden_size") or config.get("dim") or config["d_model"]
    if shape.transformer:
        files = list(folder.iterdir())
        (folder / shape.transformer).mkdir()
        for file in files:
            file.rename(folder / shape.transformer / file.name)
    write_modules(folder, shape, width)
    return folder


class Reference:
    """sentence-transformers' modules, on the folder's transformers model."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.shape, inner = shape, folder / shape.transformer
        self.tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(inner)
        (named,) = json.loads((inner / "config.json").read_text())["architectures"]
        kind = getattr(transformers, named)
        self.model = kind.from_pretrained(inner, dtype=torch.float32, attn_implementation="eager").eval()
        modules = json.loads((folder / "modules.json").read_text())[2:]
        self.layers = [self._module(folder / each["path"], each["type"].rpartition(".")[2]) for each in modules]

    @staticmethod
    def _module(folder: Path, kind: str) -> nn.Module:
        if kind == "Normalize":
            return nn.Identity()
        config = json.loads((folder / "config.json").read_text())
        safe = folder / "model.safetensors"
        weights = transformers.modeling_utils.load_state_dict(safe if safe.exists() else folder / "pytorch_model.bin")
        if kind == "LayerNorm":
            norm = nn.LayerNorm(config["dimension"])
            norm.load_state_dict({name.removeprefix("norm."): value for name, value in weights.items()})
            return norm
        linear = nn.Linear(config["in_features"], config["out_features"], config["bias"])
        linear.load_state_dict({name.removeprefix("linear."): value for name, value in weights.items()})
        return nn.Sequential(linear, getattr(nn, config["activation_function"].rpartition(".")[2])())

    @torch.inference_mode()
    def vector(self, text: str, prompt: str | None = None) -> Tensor:
        settings, general = self.shape.settings, self.shape.general or {}
        name = prompt or general.get("default_prompt_name")
        text = (general["prompts"][name] if name else "") + text
        text = text.lower() if settings.get("do_lower_case") else text
        how = {"truncation": True, "max_length": settings["max_seq_length"]} if "max_seq_length" in settings else {}
        ids = torch.tensor([self.tokenizer(text, **how)["input_ids"]])
        states = self.model(input_ids=ids).last_hidden_state[0]
        count = torch.arange(1, len(states) + 1)[:, None].float()
        ways = {
            "cls": lambda: states[0],
            "lasttoken": lambda: states[-1],
            "mean": lambda: states.mean(0),
            "max": lambda: states.amax(0),
            "mean_sqrt_len_tokens": lambda: states.sum(0) / len(states) ** 0.5,
            "weightedmean": lambda: (states * count).sum(0) / count.sum(),
        }
        pooled = torch.cat([ways[way]() for way in self.shape.pooling.split("+")])
        for layer in self.layers:
            pooled = layer(pooled)
        return nn.functional.normalize(pooled, dim=0) if self.shape.normalizes else pooled


@pytest.mark.parametrize("name", every(3, SHAPES))
def test_a_folder_is_embedded_as_its_files_say_without_options(tmp_path: Path, name: str) -> None:
    shape = SHAPES[name]
    folder = save_shape(tmp_path, shape)
    reference = Reference(folder, shape)
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        outputs = llm.embed(TEXTS, truncate_prompt_tokens=-1, use_tqdm=False)
        found = torch.tensor([output.outputs.embedding for output in outputs])
        wanted = torch.stack([reference.vector(text) for text in TEXTS])
        scale = wanted.norm(dim=1, keepdim=True)
        assert ((found - wanted) / scale).abs().max() < 1e-5
        for prompt in (shape.general or {}).get("prompts", {}):
            params = PoolingParams(prompt_name=prompt)
            (output,) = llm.embed(TEXTS[0], pooling_params=params, use_tqdm=False)
            wanted_one = reference.vector(TEXTS[0], prompt)
            assert (torch.tensor(output.outputs.embedding) - wanted_one).norm() < 1e-5 * wanted_one.norm() * 10


def test_a_layer_takes_what_comes_in(tmp_path: Path) -> None:
    """Its own weights have the sizes that its config says; the model's vectors have others."""
    save_shape(tmp_path, SHAPES["LaBSE"])
    wide = {"in_features": 4096, "out_features": 8, "bias": False}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(wide))
    save_file({"linear.weight": torch.ones(8, 4096)}, tmp_path / "2_Dense" / "model.safetensors")
    comes = json.loads((tmp_path / "config.json").read_text())["hidden_size"]
    with pytest.raises(ModelError, match=f"the layer in {tmp_path}/2_Dense takes 4096 values, and {comes} come in"):
        LLM(str(tmp_path), in_process=True, **ENGINE)


@pytest.mark.parametrize("sizes", ["abc", 5, [8, "16"], [0], [True]])
def test_sizes_that_are_none_are_named(tmp_path: Path, sizes: object) -> None:
    save_shape(tmp_path, SHAPES["e5-small-v2"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": sizes}))
    with pytest.raises(ModelError, match="the config's matryoshka_dimensions are"):
        LLM(str(tmp_path), in_process=True, **ENGINE)


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (["sentence_transformers.models.WordEmbeddings", "sentence_transformers.models.Pooling"], "WordEmbeddings"),
        (["sentence_transformers.models.StaticEmbedding"], "StaticEmbedding"),
        (["custom_st.Transformer", "sentence_transformers.models.Pooling"], "custom_st.Transformer"),
        (["sentence_transformers.models.Router"], "Router"),
    ],
)
def test_a_module_of_another_class_is_refused_by_name(tmp_path: Path, kinds: list[str], said: str) -> None:
    save_shape(tmp_path, SHAPES["e5-small-v2"])
    modules = [{"idx": n, "name": str(n), "path": "", "type": kind} for n, kind in enumerate(kinds)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=said):
        LLM(str(tmp_path), in_process=True, **ENGINE)
