"""What sentence-transformers' files beside a model say is checked before it is used: each odd value gets an error that
names the file or the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.executor.checkpoints.sentence_folder import sentence_folder
from headrace.executor.pooling.head import Head
from headrace.ipc.failure import ModelError

KINDS = {
    "pooled": ("Transformer", "Pooling", "Dense"),
    "splade": ("MLMTransformer", "SpladePooling"),
    "tokens": ("Transformer", "Dense"),
}
POOLING = {"word_embedding_dimension": 8, "pooling_mode": "mean"}
DENSE = {"in_features": 8, "out_features": 4, "activation_function": "torch.nn.modules.linear.Identity"}
GENERAL = "config_sentence_transformers.json"


def write(folder: Path, kind: str, changed: dict[str, dict[str, Any]]) -> Path:
    kinds = KINDS[kind]
    modules = [
        {"type": f"sentence_transformers.models.{each}", "path": f"{n}" if n else ""} for n, each in enumerate(kinds)
    ]
    files: dict[str, Any] = {"sentence_bert_config.json": {}, GENERAL: {}, "config.json": {"hidden_size": 8}}
    files |= {f"{n}/config.json": POOLING if "Pooling" in each else DENSE for n, each in enumerate(kinds) if n}
    (folder / "modules.json").write_text(json.dumps(modules))
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps({**content, **changed.get(name, {})}))
    return folder


CASES: dict[str, tuple[str, dict[str, dict[str, Any]], str]] = {
    "a width of text": ("pooled", {"1/config.json": {"word_embedding_dimension": "8"}}, "word_embedding_dimension '8'"),
    "a length of text": ("pooled", {"sentence_bert_config.json": {"max_seq_length": "512"}}, "max_seq_length '512'"),
    "a length below one": ("splade", {"sentence_bert_config.json": {"max_seq_length": -1}}, "max_seq_length -1"),
    "a length beyond all": ("pooled", {"sentence_bert_config.json": {"max_seq_length": 1 << 70}}, "max_seq_length 118"),
    "a list as a similarity": ("pooled", {GENERAL: {"similarity_fn_name": ["dot"]}}, "similarity_fn_name ['dot']"),
    "a list as a default": ("pooled", {GENERAL: {"default_prompt_name": ["query"]}}, "default_prompt_name ['query']"),
    "an object as an activation": ("splade", {"1/config.json": {"activation_function": {}}}, "activation_function {}"),
    "a list as a strategy": ("splade", {"1/config.json": {"pooling_strategy": []}}, "pooling_strategy []"),
    "a number of words": ("tokens", {GENERAL: {"skiplist_words": 5}}, "skiplist_words 5"),
    "a query without end": ("tokens", {GENERAL: {"query_length": 1 << 40}}, "query_length 1099511627776"),
    "a layer without end": (
        "pooled",
        {"2/config.json": {"out_features": 1 << 40}},
        "says no in_features or out_features",
    ),
    "a text as a flag": (
        "pooled",
        {"1/config.json": {"pooling_mode": None, "pooling_mode_cls_token": "false"}},
        "'false'",
    ),
    "a text as a residual": ("pooled", {"2/config.json": {"use_residual": "false"}}, "use_residual 'false'"),
    "a text as a bias": ("pooled", {"2/config.json": {"bias": "false"}}, "bias 'false'"),
    "a text as a case": ("pooled", {"sentence_bert_config.json": {"do_lower_case": "no"}}, "do_lower_case 'no'"),
    "a text as a prompt's place": ("pooled", {"1/config.json": {"include_prompt": "no"}}, "include_prompt 'no'"),
    "a layer of true": ("pooled", {"2/config.json": {"in_features": True}}, "says no in_features or out_features"),
}


@pytest.mark.parametrize("case", CASES)
def test_an_odd_value_is_named(case: str, tmp_path: Path) -> None:
    kind, changed, message = CASES[case]
    with pytest.raises(ModelError) as refusal:
        sentence_folder(write(tmp_path, kind, changed))
    assert message in str(refusal.value)
    assert str(tmp_path) in str(refusal.value) or tmp_path.name in str(refusal.value)


@pytest.mark.parametrize("name", ["sentence_bert_config.json", GENERAL])
@pytest.mark.parametrize("text", ["[]", "null"])
def test_what_is_no_object_is_named(name: str, text: str, tmp_path: Path) -> None:
    (write(tmp_path, "pooled", {}) / name).write_text(text)
    with pytest.raises(ModelError, match=f"{name} holds a .*; a JSON object is expected"):
        sentence_folder(tmp_path)


@pytest.mark.parametrize("text", ["null", "[]", "{}", "[1]"])
def test_what_lists_no_modules_is_named(text: str, tmp_path: Path) -> None:
    (write(tmp_path, "pooled", {}) / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"modules\.json is no list of modules"):
        sentence_folder(tmp_path)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_folder", "names .*no_such_folder as the folder of its Transformer; it is not there"),
        (None, "gives Transformer the path None; a text is expected"),
        (["0"], "a text is expected"),
    ],
)
def test_a_transformer_that_is_not_there_is_not_taken_for_another(path: object, said: str, tmp_path: Path) -> None:
    file = write(tmp_path, "pooled", {}) / "modules.json"
    modules = json.loads(file.read_text())
    modules[0]["path"] = path
    file.write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=said):
        sentence_folder(tmp_path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"linear.bias": torch.zeros(4)}, "2 holds weights that its layer has no place for: linear.bias"),
        ({"residual.weight": torch.zeros(4, 8)}, "2 holds weights that its layer has no place for: residual.weight"),
        ({"linear.weight": torch.ones(4, 8, dtype=torch.int8)}, "the weight linear.weight is stored as int8"),
    ],
)
def test_a_layers_weights_are_those_that_its_config_says(
    changed: dict[str, torch.Tensor], said: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, "pooled", {"2/config.json": {"bias": False}})
    save_file({"linear.weight": torch.zeros(4, 8)} | changed, folder / "2/model.safetensors")
    found = sentence_folder(folder)
    assert found is not None
    with pytest.raises(ModelError, match=said):
        Head(found.layers, None)


@pytest.mark.parametrize("kind", KINDS)
def test_sound_files_are_taken(kind: str, tmp_path: Path) -> None:
    assert sentence_folder(write(tmp_path, kind, {})) is not None


@pytest.mark.parametrize("name", ["modules.json", "1/config.json", GENERAL])
def test_a_file_that_nests_without_end_is_named(name: str, tmp_path: Path) -> None:
    (write(tmp_path, "pooled", {}) / name).write_text("[" * 100_000)
    with pytest.raises(ModelError, match=f"{name} cannot be read"):
        sentence_folder(tmp_path)
