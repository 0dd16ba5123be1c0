"""Files of strangers: whatever their headers say, and whatever lies where a file should, the answer is an error that
names it. No number of a file is believed before it is compared with the file's size."""

from __future__ import annotations

import io
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import http_server
import pytest
import tiny_gguf
import tiny_models
import torch
from gguf.constants import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints import identity
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.checkpoints.sources.gguf.file import GGUFFile
from headrace.executor.checkpoints.sources.gguf.header import GGUFHeader
from headrace.executor.checkpoints.sources.held_weights import TensorWeights
from headrace.executor.checkpoints.sources.torch_files import TorchWeights
from headrace.executor.models.config import Config
from headrace.executor.models.families import _config
from headrace.ipc.failure import HeadraceError, ModelError
from headrace.ipc.process.regular_files import NoFileError, read_file
from headrace.kernels.cpu.linear import linear
from headrace.kernels.cpu.runtime.pointers import pointer

HUGE = (0, 1, 2**31, 2**32 - 1, 2**33, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1)
FEW_OR_ALL = pytest.mark.parametrize("share", [16, pytest.param(1, marks=pytest.mark.system)])
"""One of so many of the random files: each is a model that is opened, in a process that has torch."""
TRIALS = str(Path(tiny_models.__file__).with_name("model_trials.py"))
Trial = tuple[str, dict[str, Any] | None]


@pytest.fixture(scope="module")
def ends_of() -> Iterator[Callable[[list[Trial]], list[str]]]:
    """How each model ended: see `model_trials`."""
    with subprocess.Popen(
        [sys.executable, TRIALS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def ends(trials: list[Trial]) -> list[str]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(trials) + "\n")
            process.stdin.flush()
            found: list[str] = json.loads(process.stdout.readline())
            return found

        yield ends


@pytest.fixture
def assert_refused(ends_of: Callable[[list[Trial]], list[str]]) -> Callable[..., None]:
    """Each is read, or refused by an error of ours: none raises another, takes more memory or time, or crashes."""

    def check(files: dict[str, Path], *, or_answered: bool = True) -> None:
        ends = ends_of([(str(path), None) for path in files.values()])
        allowed = ("refused: ", "answered") if or_answered else ("refused: ",)
        wrong = [f"{name}: {end}" for name, end in zip(files, ends, strict=True) if not end.startswith(allowed)]
        assert not wrong, "\n".join(wrong)

    return check


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("sound") / "model", tokenizer=True)


@pytest.fixture
def copies(model: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Makes a folder with links to the model's files but one, of which it returns the path."""

    def without(name: str) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for file in model.iterdir():
            if file.name != name:
                (folder / file.name).symlink_to(file)
        return folder / name

    return without


def changed(data: bytes, limit: int, chance: random.Random) -> bytes:
    """The data with some bytes of the first `limit` replaced: by a number that is huge or odd, or at random, or cut."""
    new = bytearray(data)
    for _ in range(chance.choice((1, 1, 2))):
        at, kind = chance.randrange(limit - 8), chance.random()
        if kind < 0.7:
            new[at : at + 8] = struct.pack("<Q", chance.choice(HUGE))
        elif kind < 0.85:
            new[at] = chance.randrange(256)
        else:
            del new[at : at + chance.choice((1, 8, 100))]
    return bytes(new)


@FEW_OR_ALL
def test_gguf_headers(tmp_path: Path, share: int, assert_refused: Callable[..., None]) -> None:
    chance = random.Random(1)
    sound = tiny_gguf.save_gguf(tiny_models.build("llama"), tmp_path / "sound.gguf")
    header = GGUFHeader(sound)
    data, files = sound.read_bytes(), {}
    spots = [8, 16]
    for key, (start, end) in header._spans.items():  # its key's length, its type, its value or array's length, its end
        spots += [start, start + 8 + len(key), start + 12 + len(key), start + 16 + len(key), end - 8]
    tensors = max(end for _, end in header._spans.values())
    spots += range(tensors, header._position - 8, 4)
    for number, spot in enumerate(chance.sample(spots, 60 // share)):
        value = chance.choice(HUGE)
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(data[:spot] + struct.pack("<Q", value) + data[spot + 8 :])
        files[f"{value:#x} at {spot}"] = path
    for number in range(40 // share):
        path = tmp_path / f"changed-{number}.gguf"
        path.write_bytes(changed(data, header._position, chance))
        files[path.name] = path
    assert_refused(files)


@pytest.mark.parametrize("field", ["length of a string", "number of strings", "number of numbers"])
def test_a_gguf_array_beyond_the_end_of_the_file(tmp_path: Path, field: str) -> None:
    array = struct.pack("<IQ", 4 if "numbers" in field else 8, 2 if "length" in field else 2**64 - 1)
    key = struct.pack("<Q", 3) + b"key" + struct.pack("<I", 9) + array + struct.pack("<Q", 2**64 - 1)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + bytes(64))
    with pytest.raises(ModelError, match="is truncated or damaged: its header goes on beyond the end of the file"):
        GGUFHeader(path)


@pytest.mark.parametrize("count", [2**33, 2**40, 70000, 3])
@pytest.mark.parametrize("in_name", [2, 99999])
def test_a_split_ggufs_count_is_that_of_its_name(tmp_path: Path, count: int, in_name: int) -> None:
    path = tmp_path / f"model-00001-of-{in_name:05}.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint64("split.count", count)
    writer.add_tensor("token_embd.weight", torch.zeros(4, 32).numpy(), raw_dtype=Kind.F32)
    tiny_gguf.finish(writer, path)
    with pytest.raises(ModelError, match=rf"is one of {in_name} files by its name, and of {count} by its split.count$"):
        GGUFFile(path)
    path.rename(path.with_name("model.gguf"))
    with pytest.raises(ModelError, match=rf"is part of a model split into {count} files"):
        GGUFFile(path.with_name("model.gguf"))


def test_many_missing_files_of_a_split_gguf_are_not_all_named(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-99999.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint64("split.count", 99999)
    writer.add_tensor("token_embd.weight", torch.zeros(4, 32).numpy(), raw_dtype=Kind.F32)
    tiny_gguf.finish(writer, path)
    with pytest.raises(ModelError, match=r"model-00006-of-99999\.gguf and 99993 more should lie beside it"):
        GGUFFile(path)


@FEW_OR_ALL
def test_safetensors_headers(
    copies: Callable[[str], Path], model: Path, share: int, assert_refused: Callable[..., None]
) -> None:
    chance, files = random.Random(2), {}
    (weights,) = model.glob("*.safetensors")
    data = weights.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    stored = json.loads(data[8 : 8 + length])
    names = [name for name in stored if name != "__metadata__"]
    for number in range(40 // share):
        path = copies(weights.name)
        if number % 2:
            path.write_bytes(changed(data, 8 + length, chance))
        else:
            new = json.loads(json.dumps(stored))
            field = new[chance.choice(names)][chance.choice(("shape", "data_offsets"))]
            field[chance.randrange(len(field))] = chance.choice((*HUGE, -1, 1.5, "x", None, [], True))
            text = json.dumps(new).encode()
            path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
        files[f"{number}"] = path.parent
    assert_refused(files)


@FEW_OR_ALL
def test_files_of_torch(
    copies: Callable[[str], Path], model: Path, share: int, assert_refused: Callable[..., None]
) -> None:
    chance, files = random.Random(3), {}
    (weights,) = model.glob("*.safetensors")
    state = load_file(weights)
    for is_zip in (True, False):
        written = io.BytesIO()
        torch.save(state, written, _use_new_zipfile_serialization=is_zip)
        for number in range(30 // share):
            path = copies(weights.name).with_name("pytorch_model.bin")
            path.write_bytes(with_changed_pickle(written.getvalue(), is_zip, chance))
            files[f"{is_zip} {number}"] = path.parent
    assert_refused(files)


def with_changed_pickle(data: bytes, is_zip: bool, chance: random.Random) -> bytes:
    if not is_zip:
        return changed(data, min(len(data), 6000), chance)
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            part = old.read(name)
            new.writestr(name, changed(part, len(part), chance) if name.endswith("data.pkl") else part)
    return made.getvalue()


def test_an_archive_that_grows_when_it_is_read(
    copies: Callable[[str], Path], ends_of: Callable[[list[Trial]], list[str]]
) -> None:
    path = copies("model.safetensors").with_name("pytorch_model.bin")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("archive/data.pkl", "w", force_zip64=True) as part:
            for _ in range(64):
                part.write(bytes(1 << 20))
        archive.writestr("archive/version", "3")
    assert path.stat().st_size < 1 << 18
    (end,) = ends_of([(str(path.parent), None)])
    assert end.startswith("refused: ")
    assert "its part 'archive/data.pkl' is compressed" in end


def test_a_torch_file_says_no_more_than_it_stores(tmp_path: Path) -> None:
    odd: dict[str, tuple[dict[Any, Tensor], str]] = {
        "repeats.bin": ({"w": torch.ones(1).expand(1 << 30, 1 << 9)}, "repeats the 4 bytes that are stored"),
        "overlaps.bin": ({"w": torch.ones(9).as_strided((8, 8), (0, 1))}, "repeats the 36 bytes that are stored"),
        "number.bin": ({5: torch.ones(1)}, "a tensor under the name 5, and a text is expected"),
        "half.bin": ({"\ud800": torch.ones(1)}, "and a text is expected"),
    }
    for name, (tensors, reason) in odd.items():
        torch.save(tensors, tmp_path / name)
        with pytest.raises(ModelError, match=f"{name}.*{reason}"):
            TorchWeights([tmp_path / name])
    transposed = torch.arange(6.0).view(2, 3).T
    torch.save({"w": transposed, "tied": transposed}, tmp_path / "sound.bin")
    assert torch.equal(TorchWeights([tmp_path / "sound.bin"]).get("w"), transposed)


INDEXES = [
    '{"weight_map": {"a": "../model.safetensors"}}', '{"weight_map": {"a": "/dev/zero"}}', '{"weight_map": {"a": "."}}',
    '{"weight_map": {"a": ""}}', '{"weight_map": {"a": "\\u0000"}}', '{"weight_map": {"a": "\\ud800"}}',
    '{"weight_map": {"a": "' + "x" * 5000 + '"}}', '{"weight_map": {"a": 5}}', '{"weight_map": []}', "[]", "[" * 100000,
]  # fmt: skip


def test_indexes_and_configs(copies: Callable[[str], Path], assert_refused: Callable[..., None]) -> None:
    files = {}
    for text in INDEXES:
        path = copies("model.safetensors.index.json")
        path.write_text(text)
        files[f"index {text[:40]}"] = path.parent
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        for text in ('{"a":' * 100000, "1" * 5000, '{"vocab_size":' + "9" * 5000 + "}", "nul\0"):
            path = copies(name)
            path.write_text(text)
            files[f"{name} {text[:20]}"] = path.parent
    assert_refused(files, or_answered=False)


NUMBERS = ("NaN", "Infinity", "-Infinity", "1e300", "1e-300", "-1", "0", "true", '"x"', str(2**40), str(2**70), "[1]")
SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "rms_norm_eps", "rope_theta", "max_position_embeddings"),
)
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "mscale": 1.0, "attention_factor": 1.0}


def test_numbers_of_a_config(
    copies: Callable[[str], Path], model: Path, ends_of: Callable[[list[Trial]], list[str]]
) -> None:
    """Some of each, as all together take minutes."""
    stored, chance = json.loads((model / "config.json").read_text()), random.Random(4)
    trials: dict[str, Trial] = {}
    for name in (*SIZES, *(f"yarn {key}" for key in YARN if key != "rope_type")):
        for number in chance.sample(NUMBERS, 1):
            key = name.removeprefix("yarn ")
            parameters = {"rope_theta": 10000.0, "original_max_position_embeddings": 32, **YARN, key: "@"}
            new = stored | ({"rope_parameters": parameters} if key != name else {name: "@"})
            path = copies("config.json")
            path.write_text(json.dumps(new).replace('"@"', number))
            trials[f"{name} {number}"] = (str(path.parent), {})
    ends = ends_of(list(trials.values()))
    allowed = ("refused: ", "answered")
    assert not [f"{name}: {end}" for name, end in zip(trials, ends, strict=True) if not end.startswith(allowed)]


EMBEDDING = "model.embed_tokens.weight"


def odd_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors that no kernel takes, by what is said of them."""
    return {
        "is on the device meta": torch.empty(tensor.shape, device="meta"),
        "layout torch.sparse_coo": tensor.to_sparse(),
        "layout torch.sparse_csr": tensor.to_sparse_csr(),
        "is of type torch.qint8": torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
        "is of type torch.complex64": tensor.to(torch.complex64),
    }


@pytest.fixture(scope="module")
def serving(model: Path) -> Iterator[LLM]:
    with LLM(str(model), dtype="float32", max_model_len=32, in_process=True, skip_tokenizer_init=True) as llm:
        yield llm


def damaged_weights(folder: Path, weights: Path) -> dict[str, Callable[[], object]]:
    """What puts damaged weights into the folder, by what is said of them."""
    state, stored = load_file(weights), weights.read_bytes()
    length = int.from_bytes(stored[:8], "little")
    header = json.loads(stored[8 : 8 + length])
    header[EMBEDDING]["data_offsets"] = [0, 1 << 62]
    beyond, bins = json.dumps(header).encode(), folder / "pytorch_model.bin"
    new = folder / weights.name

    def pickled() -> None:
        class Calls:
            def __reduce__(self) -> Any:
                return os.mkdir, (str(folder / "was-run"),)

        torch.save(state | {EMBEDDING: Calls()}, bins)

    return {
        **{
            reason: lambda tensor=tensor: torch.save(state | {EMBEDDING: tensor}, bins)  # type: ignore[misc]
            for reason, tensor in odd_tensors(state[EMBEDDING]).items()
        },
        "is not a whole safetensors file": lambda: new.write_bytes(stored[: len(stored) // 2]),
        "is not a whole safetensors file: .*offset": lambda: new.write_bytes(
            len(beyond).to_bytes(8, "little") + beyond + stored[8 + length :]
        ),
        "no regular file|pipe|is no file": lambda: os.mkfifo(new),
        "cannot be read|mkdir|Unsupported": pickled,
    }


def test_weights_that_are_read_again_are_held_to_the_same_rules(
    serving: LLM, copies: Callable[[str], Path], model: Path, tmp_path: Path
) -> None:
    (weights,) = model.glob("*.safetensors")
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    (before,) = serving.generate([[5, 6, 7]], params, use_tqdm=False)
    for reason in damaged_weights(tmp_path, weights):
        folder = copies(weights.name).parent
        damaged_weights(folder, weights)[reason]()
        with pytest.raises(HeadraceError, match=reason):
            serving.reload_weights(str(folder))
        assert not (folder / "was-run").exists()
        (after,) = serving.generate([[5, 6, 7]], params, use_tqdm=False)
        assert after.outputs[0].token_ids == before.outputs[0].token_ids


@pytest.mark.system
def test_damaged_weights_that_are_read_again_over_http_leave_every_engine_its_own(
    copies: Callable[[str], Path], model: Path, tmp_path: Path
) -> None:
    (weights,) = model.glob("*.safetensors")
    arguments = (str(model), "-dp", "2", "--server-dev-mode", "--dtype", "float32", "--max-model-len", "32")
    asked = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with http_server.serving(*arguments, "--skip-tokenizer-init", attached=True) as server, server.client() as client:

        def answers() -> list[str]:
            of_rank = [client.post("/v1/completions", json={**asked, "data_parallel_rank": n}) for n in range(2)]
            return [each.json()["choices"][0]["token_ids"] for each in of_rank]

        asked["return_token_ids"] = True
        before = answers()
        for reason in damaged_weights(tmp_path, weights):
            folder = copies(weights.name).parent
            damaged_weights(folder, weights)[reason]()
            refused = client.post("/reload_weights", params={"weights_path": str(folder)}, timeout=120)
            assert refused.status_code == 400, refused.text
            assert re.search(reason, refused.json()["error"]["message"])
            assert not (folder / "was-run").exists()
            assert answers() == before
        assert client.post("/reload_weights", timeout=120).status_code == 200
        assert answers() == before
        assert "Traceback" not in server.log


def test_weights_that_are_not_dense_numbers_in_memory(
    copies: Callable[[str], Path], model: Path, ends_of: Callable[[list[Trial]], list[str]]
) -> None:
    (weights,) = model.glob("*.safetensors")
    state = load_file(weights)
    name = EMBEDDING
    odd = odd_tensors(state[name])
    trials: list[Trial] = []
    for tensor in odd.values():
        path = copies(weights.name).with_name("pytorch_model.bin")
        torch.save(state | {name: tensor}, path)
        trials.append((str(path.parent), {}))
    for reason, end in zip(odd, ends_of(trials), strict=True):
        assert end.startswith("refused: "), end
        assert f"the weight {name} " in end
        assert reason in end


def test_a_tensor_without_its_numbers_is_taken_by_no_kernel() -> None:
    freed = torch.ones(4, 32)
    freed.untyped_storage().resize_(0)
    for tensor in (torch.empty(4, 32, device="meta"), freed):
        with pytest.raises(ValueError, match=r"the CPU kernels take dense tensors in the CPU's memory"):
            pointer(tensor)
        with pytest.raises(ValueError, match=r"the CPU kernels take dense tensors"):
            linear.pack(tensor)
    with pytest.raises(ModelError, match="the weight w has lost its numbers"):
        TensorWeights({"w": freed})
    negative = torch.complex(torch.zeros(2), torch.ones(2)).conj().imag
    assert negative.is_neg()
    assert TensorWeights({"w": negative}).get("w").tolist() == [-1, -1]
    assert not TensorWeights({"w": negative}).get("w").is_neg()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


THINGS: dict[str, Callable[[Path], None]] = {
    "a named pipe": pipe,
    "a socket": bound_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
}


def test_what_is_no_file_is_not_waited_for(
    copies: Callable[[str], Path], ends_of: Callable[[list[Trial]], list[str]]
) -> None:
    made = []
    for name in ("model.safetensors", "pytorch_model.bin", "model.gguf", "config.json"):
        for what, make in THINGS.items():
            path = copies("model.safetensors" if name == "pytorch_model.bin" else name).with_name(name)
            make(path)
            made.append((what, path))
    ends = ends_of([(str(path if path.suffix == ".gguf" else path.parent), None) for _, path in made])
    for (what, path), end in zip(made, ends, strict=True):
        assert end.startswith("refused: "), end
        assert str(path) in end
        if path.suffix != ".gguf":
            assert f"is {what}, and a file is expected" in end


def test_files_of_options_are_files_or_the_shells_own_pipes(tmp_path: Path) -> None:
    for index, make in enumerate(THINGS.values()):
        make(tmp_path / str(index))
        with pytest.raises(NoFileError, match="and a file is expected"):
            read_file(tmp_path / str(index))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "link")
    reader, writer = os.pipe()
    os.write(writer, b"of a command")
    os.close(writer)
    assert read_file(f"/dev/fd/{reader}") == b"of a command"
    os.close(reader)


def test_the_identity_of_weights_waits_for_no_pipe(tmp_path: Path) -> None:
    """It is the first that reads the files, before any tensor."""
    for index, (what, make) in enumerate(THINGS.items()):
        make(tmp_path / str(index))
        with pytest.raises(ModelError, match=f"{tmp_path / str(index)} is {what}, and a file is expected"):
            list(identity._pages([tmp_path / str(index)]))


OPTIONAL = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("quantize_config.json", "quant_config.json", "hf_quant_config.json", "chat_template.jinja"),
    *("chat_template.json", "processor_config.json", "additional_chat_templates/other.jinja"),
)


def test_an_optional_file_that_is_no_file_is_named(
    copies: Callable[[str], Path], ends_of: Callable[[list[Trial]], list[str]]
) -> None:
    made: list[tuple[str, Path]] = []
    for name in OPTIONAL:
        for what, make in THINGS.items() if name == "tokenizer_config.json" else [("a named pipe", pipe)]:
            path = copies(name)
            path.parent.mkdir(exist_ok=True)
            make(path)
            made.append((what, path))
    made.append(("No such file", copies("tokenizer_config.json")))
    made[-1][1].symlink_to("nowhere")
    ends = ends_of([(str(path.parent if path.parent.name.isdigit() else path.parent.parent), None) for _, path in made])
    for (what, path), end in zip(made, ends, strict=True):
        assert end.startswith("refused: "), (path.name, end)
        assert path.name in end
        assert what in end


def test_a_generation_config_that_is_no_file_is_warned_of(
    copies: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    for what, make in THINGS.items():
        path = copies("generation_config.json")
        make(path)
        caplog.clear()
        assert open_checkpoint(Options(model=str(path.parent))).generation_config == {}
        assert f"{path} is {what}, and a file is expected; the model is served without its defaults" in caplog.text
        with pytest.raises(ModelError, match=f"is {what}, and a file is expected"):
            open_checkpoint(Options(model=str(path.parent), generation_config=str(path.parent)))


@pytest.mark.parametrize("given", [1e-300, -1e-300, 1e300])
def test_a_number_that_is_none_in_float32_is_refused(given: float) -> None:
    """Its square, by which a norm's eps is divided, would be 0."""
    assert _config.number(Config({"residual_multiplier": 1e-30}), "residual_multiplier") == 1e-30
    with pytest.raises(ModelError, match=r"the config's residual_multiplier is .* can be computed with"):
        _config.number(Config({"residual_multiplier": given}), "residual_multiplier")
