"""Files of tensorizer's: the same tokens as of the model's safetensors, and faults and settings told by name. What the
library does is tested where it is installed."""

from __future__ import annotations

import re
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from headrace import LLM, SamplingParams
from headrace.core.options.parsing import parse_options
from headrace.executor.checkpoints.checkpoint import Checkpoint, open_checkpoint
from headrace.executor.checkpoints.identity import weights_identity
from headrace.executor.checkpoints.load_formats import options_of_another
from headrace.executor.checkpoints.sources import tensorizer_file
from headrace.ipc.extras import how_to_install
from headrace.ipc.failure import ModelError, OptionError

HAS_LIBRARY = util.find_spec(tensorizer_file.LIBRARY) is not None
ENGINE: dict[str, Any] = {"in_process": True, "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 64}


def opened(folder: Path, **settings: Any) -> Checkpoint:
    options = parse_options(model=str(folder), load_format="tensorizer", model_loader_extra_config=settings)
    return open_checkpoint(options)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is checked before the library is asked."""
    monkeypatch.setattr(tensorizer_file, "LIBRARY", "msgspec")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def written(folder: Path) -> Path:
    """The folder with the library's file in it, too."""
    serializer = pytest.importorskip("tensorizer").TensorSerializer(str(folder / tensorizer_file.FILE))
    serializer.write_module(tiny_models.build("llama"))
    serializer.close()
    return folder


def test_without_the_library_the_line_that_installs_it_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorizer_file, "LIBRARY", "not_a_package")
    said = re.escape(
        f"load_format=tensorizer needs not_a_package, which is not installed: {how_to_install('tensorizer')}"
    )
    with pytest.raises(OptionError, match=said):
        opened(folder)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_reader": 2}, "unknown field `num_reader`; known: tensorizer_uri, tensorizer_dir, num_readers"),
        ({"num_readers": 0}, r"Expected `int` >= 1 - at `\$\.num_readers`"),
        ({"tensorizer_config": {"verify_hash": "yes"}}, r"Expected `bool`, got `str` - at `\$\.verify_hash`"),
        ({"tensorizer_dir": ""}, r"Expected `str` of length >= 1 - at `\$\.tensorizer_dir`"),
        ({"tensorizer_uri": "gs://a/b"}, "has gs://a/b: it must be a path, or a URI of http, https, s3, redis"),
        ({"tensorizer_config": "x"}, "tensorizer_config must be an object"),
        (
            {"s3_secret_access_key": "k"},
            "s3_secret_access_key is refused: .*use S3_SECRET_ACCESS_KEY",
        ),
        ({"vllm_tensorized": True}, "vllm_tensorized is refused: .*write the Hugging Face model"),
        ({"tensorizer_uri": "a", "tensorizer_dir": "b"}, "tensorizer_uri and tensorizer_dir: give one of them"),
    ],
)
def test_settings_that_are_not_understood_are_told_by_name(
    settings: dict[str, Any], sentence: str, folder: Path, installed: None
) -> None:
    with pytest.raises(OptionError, match=f"model_loader_extra_config.*{sentence}"):
        opened(folder, **settings)


def test_a_file_is_looked_for_where_the_settings_say(folder: Path, tmp_path: Path, installed: None) -> None:
    with pytest.raises(ModelError, match=r"there is no file .*llama/model\.tensors of tensorizer's"):
        opened(folder, vllm_tensorized=False)
    with pytest.raises(ModelError, match=r"there is no file /nowhere/model\.tensors of"):
        opened(folder, tensorizer_config={"tensorizer_dir": "/nowhere/"})
    (tmp_path / "a.tensors").write_bytes(b"a")
    (tmp_path / "b.tensors").write_bytes(b"b")
    here, there = (opened(folder, tensorizer_uri=str(tmp_path / f"{name}.tensors")) for name in "ab")
    assert here.weight_files == [tmp_path / "a.tensors"]
    away, further = (opened(folder, tensorizer_uri=f"s3://{name}/model.tensors") for name in "ab")
    assert away.weight_files == []
    identities = {weights_identity(each) for each in (here, there, away, further)}
    assert len(identities) == 4, "engines do not go on with each other's requests"


def test_other_weights_are_looked_for_in_their_own_folder() -> None:
    given = {"tensorizer_config": {"tensorizer_uri": "s3://a/b", "num_readers": 2}}
    options = parse_options(load_format="tensorizer", model_loader_extra_config=given)
    other = options_of_another(options, "/elsewhere")
    assert (other.model, other.load_format) == ("/elsewhere", "tensorizer")
    assert other.model_loader_extra_config == {"num_readers": 2}


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "dummy", "runai_streamer"])
def test_settings_of_other_readers_are_refused(load_format: str, folder: Path) -> None:
    options = parse_options(
        model=str(folder), load_format=load_format, model_loader_extra_config={"num_threads": 8, "concurrency": 2}
    )
    said = f"model_loader_extra_config has concurrency, num_threads: load_format={load_format} takes no settings"
    with pytest.raises(OptionError, match=said):
        open_checkpoint(options)


def test_a_file_gives_the_tokens_of_the_safetensors(written: Path) -> None:
    params, prompt = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), [5, 6, 7, 8]
    with LLM(str(written), **ENGINE) as llm:
        expected = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    settings = {"tensorizer_config": {"num_readers": 2, "verify_hash": True}}
    with LLM(str(written), load_format="tensorizer", model_loader_extra_config=settings, **ENGINE) as llm:
        answer = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    assert answer == expected
    assert len(set(expected)) > 3


def test_files_that_are_damaged_foreign_or_of_vllms_modules_are_refused(written: Path, tmp_path: Path) -> None:
    import torch
    from tensorizer import TensorSerializer

    whole, file = (written / tensorizer_file.FILE).read_bytes(), tmp_path / "it.tensors"
    at = len(whole) - 1000
    faults = {
        whole[:at]: "",
        whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :]: "HashMismatchError",
        b"not one of them" * 1000: "",
        b"": "",
    }
    for content, said in faults.items():
        file.write_bytes(content)
        with pytest.raises(ModelError, match=rf"tensorizer cannot read .*it\.tensors: {said}"):
            opened(written, tensorizer_uri=str(file), verify_hash=True).weights()
    serializer = TensorSerializer(str(file))
    serializer.write_state_dict({"vllm_tensorized_marker": torch.zeros(1), "model.qkv_proj.weight": torch.zeros(2, 2)})
    serializer.close()
    with pytest.raises(ModelError, match=r"it\.tensors was written of vLLM's own modules"):
        opened(written, tensorizer_uri=str(file)).weights()


def test_an_encrypted_file_is_read_with_its_key_alone(written: Path, tmp_path: Path) -> None:
    from tensorizer import EncryptionParams, TensorSerializer

    file, key = tmp_path / "secret.tensors", tmp_path / "key"
    try:
        params = EncryptionParams.random()
    except Exception as error:  # the library's own, where libsodium is missing
        pytest.skip(f"tensorizer encrypts nothing here: {error}")
    serializer = TensorSerializer(str(file), encryption=params)
    serializer.write_module(tiny_models.build("llama"))
    serializer.close()
    key.write_bytes(params.key)
    name = "model.embed_tokens.weight"
    found = opened(written, tensorizer_uri=str(file), encryption_keyfile=str(key)).weights().get(name)
    assert found.equal(open_checkpoint(parse_options(model=str(written))).weights().get(name))
    for settings in ({}, {"encryption_keyfile": str(tmp_path / "none")}):
        with pytest.raises(ModelError, match=r"tensorizer cannot read .*secret\.tensors: "):
            opened(written, tensorizer_uri=str(file), **settings).weights()
