"""Folders, files and names that a model may be given as: what is read of them, and what a wrong one is told."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny_models
import torch
from safetensors.torch import save_file
from tiny_gguf import save_gguf
from torch import Tensor

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import Checkpoint, open_checkpoint
from headrace.executor.checkpoints.sources.dummy_weights import DummyWeights
from headrace.executor.checkpoints.tokenizers.tokenizer import end_of_tokenizer, load_bundle
from headrace.executor.checkpoints.weights import WeightSource
from headrace.ipc.failure import ModelError, OptionError


def open_folder(folder: Path, **options: Any) -> Checkpoint:
    return open_checkpoint(Options(model=str(folder), **options))


def stored_state(model: Any) -> dict[str, Tensor]:
    """What save_pretrained writes: without the second of tied weights."""
    state: dict[str, Tensor] = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def assert_holds(weights: WeightSource, state: dict[str, Tensor]) -> None:
    assert weights.names() == state.keys()
    for name, expected in state.items():
        assert weights.shape(name) == tuple(expected.shape)
        assert torch.equal(weights.get(name), expected)
        assert torch.equal(weights.get(name, rows=slice(1, 3)), expected[1:3])
        if expected.ndim == 2:
            assert torch.equal(weights.get(name, columns=slice(2, 7)), expected[:, 2:7])
            assert torch.equal(weights.get(name, slice(1, 3), slice(2, 7)), expected[1:3, 2:7])


def in_two(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    names = sorted(state)
    half = len(names) // 2
    return {n: state[n] for n in names[:half]}, {n: state[n] for n in names[half:]}


def write_index(folder: Path, name: str, parts: dict[str, dict[str, Tensor]]) -> None:
    weight_map = {weight: file for file, part in parts.items() for weight in part}
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def as_safetensors(folder: Path, state: dict[str, Tensor]) -> None:
    save_file(state, folder / "model.safetensors")


def as_sharded_safetensors(folder: Path, state: dict[str, Tensor]) -> None:
    parts = {f"model-0000{i}-of-00002.safetensors": part for i, part in enumerate(in_two(state), 1)}
    for file, part in parts.items():
        save_file(part, folder / file)
    write_index(folder, "model.safetensors.index.json", parts)
    save_file(state, folder / "consolidated.safetensors")  # the same once more, which nobody asked for


def as_unindexed_safetensors(folder: Path, state: dict[str, Tensor]) -> None:
    for i, part in enumerate(in_two(state)):
        save_file(part, folder / f"part{i}.safetensors")


def as_torch(folder: Path, state: dict[str, Tensor]) -> None:
    torch.save(state, folder / "pytorch_model.bin")
    torch.save({"lr": torch.ones(3)}, folder / "training_args.bin")


def as_sharded_torch(folder: Path, state: dict[str, Tensor]) -> None:
    parts = {f"pytorch_model-0000{i}-of-00002.bin": part for i, part in enumerate(in_two(state), 1)}
    for file, part in parts.items():
        torch.save(part, folder / file)
    write_index(folder, "pytorch_model.bin.index.json", parts)


def as_legacy_torch(folder: Path, state: dict[str, Tensor]) -> None:
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    ("write", "form"),
    [
        (as_safetensors, "safetensors"),
        (as_sharded_safetensors, "safetensors"),
        (as_unindexed_safetensors, "safetensors"),
        (as_torch, "pt"),
        (as_sharded_torch, "pt"),
        (as_legacy_torch, "pt"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_form_of_a_folder_gives_the_weights_and_their_parts(
    write: Callable[[Path, dict[str, Tensor]], None], form: str, tmp_path: Path
) -> None:
    model = tiny_models.build("llama_gqa_tied")
    model.config.save_pretrained(tmp_path)
    state = stored_state(model)
    write(tmp_path, state)
    for load_format in ("auto", form):
        checkpoint = open_folder(tmp_path, load_format=load_format)
        assert checkpoint.format == form
        assert_holds(checkpoint.weights(), state)
    assert checkpoint.config["num_hidden_layers"] == 3
    assert checkpoint.eos_token_ids == (1,)


def test_only_the_part_asked_for_is_read() -> None:
    with pytest.raises(ValueError, match="is not a part of 4"):
        DummyWeights({"w": (4, 4)}).get("w", rows=slice(2, 6))


def test_the_dtype_is_the_configs_or_else_the_weights_own(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4, 4, dtype=torch.bfloat16), "n": torch.zeros(2)}, tmp_path / "model.safetensors")
    for config, expected in (
        ({}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"text_config": {"dtype": "float16"}}, "float16"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "float16"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}, "dtype": "bfloat16"}, "bfloat16"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert open_folder(tmp_path).dtype_name == expected


class Bomb:
    """Pickles as a call that leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.trace),))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_that_wants_to_run_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for write in (
        lambda file, value: torch.save(value, file),
        lambda file, value: file.write_bytes(pickle.dumps(value, protocol=2)),
    ):
        write(tmp_path / "pytorch_model.bin", {"w": torch.ones(2), "x": Bomb(tmp_path / "trace")})
        with pytest.raises(ModelError, match=r"pytorch_model\.bin wants to run Python code .*; use a safetensors"):
            open_folder(tmp_path).weights()
    assert not (tmp_path / "trace").exists()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def make_foreign(file: Path) -> None:
    file.write_bytes(b"<html>404</html>" * 20)


def make_pointer(file: Path) -> None:
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 12\n")


@pytest.mark.parametrize(("write", "name"), [(as_safetensors, "model.safetensors"), (as_torch, "pytorch_model.bin")])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r" \(\d+ bytes\) is not a whole"),
        (make_foreign, r" \(320 bytes\) is not a whole"),
        (make_pointer, "is a Git LFS pointer"),
    ],
)
def test_a_truncated_or_foreign_weight_file_is_named(
    write: Callable[[Path, dict[str, Tensor]], None],
    name: str,
    damage: Callable[[Path], None],
    message: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    write(tmp_path, {"w": torch.ones(64, 64)})
    damage(tmp_path / name)
    with pytest.raises(ModelError, match=name + ".*" + message):
        open_folder(tmp_path).weights()


@pytest.mark.parametrize("kind", ["safetensors", "torch", "gguf"])
def test_a_file_that_is_written_over_while_it_is_read_is_named(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond its new end, reading would end the process (SIGBUS)."""
    model = tiny_models.build("llama")
    if kind == "gguf":
        file = path = save_gguf(model, tmp_path / "model.gguf")
    else:
        path = tiny_models.save("llama", tmp_path / "model")
        (file,) = path.glob("*.safetensors")
        if kind == "torch":
            torch.save(model.state_dict(), path / "pytorch_model.bin")
            file.unlink()
            file = path / "pytorch_model.bin"
    weights = open_folder(path).weights()
    name, *_, last = sorted(weights.names())
    kept = weights.get(name).clone()
    os.rename(file, tmp_path / "former")
    file.write_bytes(b"new")
    assert torch.equal(weights.get(name), kept), "another file in its place does no harm"
    os.replace(tmp_path / "former", file)
    assert not caplog.messages
    os.utime(file, ns=(0, 0))
    assert torch.equal(weights.get(name), kept)
    weights.get(last)
    assert caplog.messages == [f"{file} was changed while it was read: its weights may be of two checkpoints"]
    size = file.stat().st_size
    os.truncate(file, 1 << 16)
    for each in (name, last):
        with pytest.raises(ModelError, match=rf"{file.name} was written over .*: {size} bytes became 65536"):
            weights.get(each)


def test_shards_that_do_not_match_their_index_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    as_sharded_safetensors(tmp_path, {name: torch.ones(4, 4) for name in "abcd"})
    second = tmp_path / "model-00002-of-00002.safetensors"
    save_file({"c": torch.ones(4, 4)}, second)
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors holds the weight d, but it does not"):
        open_folder(tmp_path).weights()
    second.unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002\.safetensors, which .*index\.json lists"):
        open_folder(tmp_path).weights()


def test_two_files_with_the_same_weight_and_no_index_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    for name in "xy":
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match=r"both x\.safetensors and y\.safetensors .* hold the weight w"):
        open_folder(tmp_path).weights()


def test_a_folder_that_is_no_model_is_told_what_is_missing(tmp_path: Path) -> None:
    for load_format in ("auto", "pt"):
        with pytest.raises(ModelError, match=r"is not a model: it has no config\.json and no \.gguf file: it is empty"):
            open_folder(tmp_path, load_format=load_format)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"no config\.json and no \.gguf file, only notes\.txt"):
        open_folder(tmp_path)
    (tmp_path / "config.json").symlink_to("../blobs/config")  # as in a cache whose other part was not copied
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"/config\.json cannot be read as JSON: .*No such file"):
        open_folder(tmp_path)
    for each in ("config.json", "model.safetensors"):
        (tmp_path / each).unlink()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds no weights"):
        open_folder(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"config\.json holds a list; a JSON object is expected"):
        open_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read as JSON"):
        open_folder(tmp_path)


def test_a_mistyped_path_is_answered_with_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    with pytest.raises(ModelError, match=r"no model at .*my-modle \(did you mean .*my-model\?\)"):
        open_folder(tmp_path / "my-modle")
    with pytest.raises(ModelError, match=r"no model at .*nowhere/at/all .*nor is there a folder"):
        open_folder(tmp_path / "nowhere" / "at" / "all")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"is a file but not a \.gguf one; give the folder"):
        open_folder(tmp_path / "weights.bin")


def test_another_folders_config_may_take_the_place_of_the_models_own(tmp_path: Path) -> None:
    model, beside = tmp_path / "model", tmp_path / "beside"
    tiny_models.save("llama", model)
    beside.mkdir()
    config = json.loads((model / "config.json").read_text())
    (beside / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    (model / "config.json").unlink()
    checkpoint = open_folder(model, hf_config_path=str(beside))
    assert checkpoint.config["rms_norm_eps"] == 0.25
    assert checkpoint.path == model
    with pytest.raises(ModelError, match=r"hf_config_path=.*beside has no params\.json"):
        open_folder(model, hf_config_path=str(beside), config_format="mistral", load_format="dummy")
    with pytest.raises(OptionError, match="hf_config_path is empty"):
        open_folder(model, hf_config_path=" ")
    (beside / "config.json").unlink()
    with pytest.raises(ModelError, match=r"hf_config_path=.*beside has no config\.json"):
        open_folder(model, hf_config_path=str(beside))
    with pytest.raises(ModelError, match=r"model has no params\.json, which config_format=mistral reads"):
        open_folder(model, config_format="mistral", load_format="dummy")
    file = save_gguf(tiny_models.build("llama"), tmp_path / "model.gguf")
    with pytest.raises(OptionError, match=r"hf_config_path does not apply to .* a GGUF file has its config in itself"):
        open_folder(file, hf_config_path=str(beside))


def test_a_load_format_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    model.config.save_pretrained(tmp_path)
    as_safetensors(tmp_path, stored_state(model))
    with pytest.raises(OptionError, match=r"load_format pt does not fit .* weights are safetensors; use auto or"):
        open_folder(tmp_path, load_format="pt")
    with pytest.raises(OptionError, match=r"load_format=bitsandbytes is of weights .*quantised, .* are float32; "):
        open_folder(tmp_path, load_format="bitsandbytes")
    assert open_folder(tmp_path, load_format="bitsandbytes", quantization="bitsandbytes").as_loaded is not None
    with pytest.raises(OptionError, match="load_format=bitsandbytes and quantization=int8 exclude each other"):
        open_folder(tmp_path, load_format="bitsandbytes", quantization="int8")
    with pytest.raises(ModelError, match="holds no GGUF file"):
        open_folder(tmp_path, load_format="gguf")
    file = save_gguf(model, tmp_path / "model.gguf")
    with pytest.raises(
        OptionError, match=r"load_format safetensors does not fit .*model\.gguf, whose weights are gguf"
    ):
        open_folder(file, load_format="safetensors")
    for config_format in ("hf", "mistral"):
        with pytest.raises(OptionError, match=f"config_format={config_format} does not apply to .*in itself; leave it"):
            open_folder(file, config_format=config_format)
    assert open_folder(tmp_path, load_format="gguf").path == file
    assert open_folder(tmp_path).format == "safetensors"
    (tmp_path / "model.safetensors").unlink()
    assert open_folder(tmp_path).path == file
    save_gguf(model, tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"several GGUF files; give the path of one, of model\.gguf, other\.gguf"):
        open_folder(tmp_path)


def test_sampling_defaults_are_the_fields_that_the_file_sets_under_our_names(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    model.config.save_pretrained(tmp_path)
    generation: dict[str, Any] = {
        "do_sample": False, "temperature": 0.6, "top_k": 20, "max_new_tokens": 99, "repetition_penalty": None,
        "eos_token_id": [5, 7], "transformers_version": "5.0",
    }  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_p": 0.5}')

    def defaults(**options: Any) -> dict[str, Any]:
        return open_folder(tmp_path, load_format="dummy", **options).generation_config

    assert defaults() == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    assert defaults(generation_config="vllm") == {}
    assert defaults(generation_config=str(other)) == {"top_p": 0.5}
    with pytest.raises(ModelError, match=r"there is no generation_config\.json; auto is"):
        defaults(generation_config=str(tmp_path / "nowhere"))
    assert open_folder(tmp_path, load_format="dummy").eos_token_ids == (5, 7)
    assert open_folder(tmp_path, load_format="dummy", generation_config="vllm").eos_token_ids == (5, 7)
    for value, shown in (("</s>", "'</s>'"), (-5, "-5"), ([3, 10**20], r"\[3, 10{20}\]")):
        generation["eos_token_id"] = value
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        with pytest.raises(ModelError, match=f"eos_token_id is {shown}; a token id or a list"):
            defaults()
    (tmp_path / "generation_config.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read as JSON: maximum recursion"):
        defaults(generation_config=str(tmp_path))
    assert defaults() == {}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temperature", "hot", "temperature is 'hot'; a number is expected"),
        ("temperature", -3, "temperature is -3; it must be at least 0"),
        ("top_p", [0.5], r"top_p is \[0\.5\]; a number is expected"),
        ("top_k", 2.5, r"top_k is 2\.5; a whole number is expected"),
        ("repetition_penalty", float("nan"), "repetition_penalty is nan; it must be over 0"),
        ("max_new_tokens", True, "max_new_tokens is True; a whole number is expected"),
    ],
)
def test_a_sampling_default_that_cannot_be_used_is_refused_with_file_field_and_value(
    tmp_path: Path, name: str, value: Any, said: str
) -> None:
    tiny_models.build("llama").config.save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({name: value}))
    with pytest.raises(ModelError, match=f"{file}: {said}"):
        open_folder(tmp_path, load_format="dummy")
    assert open_folder(tmp_path, load_format="dummy", generation_config="vllm").generation_config == {}
    file.write_text(json.dumps({"top_k": -1}))
    assert open_folder(tmp_path, load_format="dummy").generation_config == {"top_k": -1}


def test_files_as_editors_of_windows_save_them_say_what_they_said(tmp_path: Path) -> None:
    path = tiny_models.save("llama", tmp_path, tokenizer=True)
    (path / "generation_config.json").write_text('{\n"eos_token_id": [5, 7],\n"top_k": 3\n}\n')

    def read() -> tuple[Any, ...]:
        checkpoint = open_folder(path)
        bundle = load_bundle(checkpoint, Options(model=str(path)))
        assert bundle is not None
        end = end_of_tokenizer(checkpoint, Options(model=str(path)))
        tokenizer, others = json.loads(bundle.tokenizer_json), msgspec.structs.replace(bundle, tokenizer_json=b"")
        return checkpoint.config, checkpoint.eos_token_ids, checkpoint.generation_config, tokenizer, others, end

    plain = read()
    assert plain[1:3] == ((5, 7), {"top_k": 3})
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "tokenizer.json",
        "chat_template.jinja",
    ):
        text = (path / name).read_text(encoding="utf-8")
        (path / name).write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    assert read() == plain


def test_hidden_files_are_no_weights(tmp_path: Path) -> None:
    path = tiny_models.save("llama", tmp_path / "model")
    (path / "._model.safetensors").write_bytes(b"\0\5\x16\7")
    (path / "._model.gguf").write_bytes(b"\0\5\x16\7")
    assert open_folder(path).weights().names()
    torch.save(tiny_models.state_of(tiny_models.build("llama")), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    (path / "._other.bin").write_bytes(b"\0\5\x16\7")
    assert open_folder(path).weights().names()


def test_overrides_replace_fields_and_reach_into_nested_configs(tmp_path: Path) -> None:
    config = {"a": 1, "rope_scaling": {"factor": 2, "rope_type": "linear"}, "text_config": {"x": 1, "y": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    overrides = {"a": 3, "rope_scaling": {"rope_type": "default"}, "text_config": {"y": 5}, "eos_token_id": 9}
    checkpoint = open_folder(tmp_path, load_format="dummy", hf_overrides=overrides)
    assert checkpoint.config == {
        "a": 3, "rope_scaling": {"rope_type": "default"}, "text_config": {"x": 1, "y": 5}, "eos_token_id": 9,
    }  # fmt: skip
    assert checkpoint.eos_token_ids == (9,)


@pytest.mark.parametrize(
    "name",
    ["llama", "llama_biases", "qwen2", "qwen3", "gemma3", "smollm3", "opt", "opt_projected_post_norm", "opt_plain"],
)
def test_dummy_weights_have_the_names_and_shapes_of_real_ones(name: str, tmp_path: Path) -> None:
    model = tiny_models.build(name)
    (tmp_path / "config.json").write_text(
        json.dumps(model.config.to_dict() | {"architectures": [type(model).__name__]})
    )
    weights = open_folder(tmp_path, load_format="dummy").weights()
    state = stored_state(model)
    assert {n: weights.shape(n) for n in weights.names()} == {n: tuple(tensor.shape) for n, tensor in state.items()}


def test_dummy_weights_are_small_random_and_the_same_each_time() -> None:
    shapes = {"a": (64, 64), "b": (64, 64)}
    first, second = DummyWeights(shapes), DummyWeights(shapes)
    assert torch.equal(first.get("a"), second.get("a"))
    assert torch.equal(first.get("a", rows=slice(3, 9)), second.get("a")[3:9])
    assert not torch.equal(first.get("a"), first.get("b"))
    assert 0.015 < first.get("a").float().std() < 0.025


def test_opening_a_folder_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    program = (
        "import sys; from headrace.core.options.engine_options import Options; "
        "from headrace.executor.checkpoints.checkpoint import open_checkpoint; "
        "import headrace.executor.checkpoints.tokenizers.tokenizer; "
        "open_checkpoint(Options(model=sys.argv[1])); assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
