"""The ways to read safetensors files: equal weights each time, and what is read from the disk when."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from test_checkpoint import (
    as_safetensors,
    as_sharded_safetensors,
    as_unindexed_safetensors,
    assert_holds,
    open_folder,
    stored_state,
)
from thinned import every
from tiny_gguf import save_gguf
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.checkpoints.sources.safetensors_weights import (
    BLOCK_BYTES,
    SafetensorsWeights,
    Strategy,
    open_files,
    prefetch,
)
from headrace.executor.checkpoints.sources.sharded_state import ShardedWeights, save
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.ipc.failure import ModelError, OptionError

STRATEGIES: tuple[Strategy, ...] = ("lazy", "eager", "prefetch")
TENSOR_BYTES = 16 << 20
"""Each of the large file's two."""


class Read:
    """What this process has read since."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> dict[str, int]:
        lines = Path("/proc/self/io").read_text().splitlines()
        return {name: int(count) for name, count in (line.split(": ") for line in lines)}

    @property
    def size(self) -> int:
        """Bytes that read calls returned."""
        return self._now()["rchar"] - self._before["rchar"]

    @property
    def from_disk(self) -> int:
        """Bytes that came from a disk, those that the system read ahead with them included."""
        return self._now()["read_bytes"] - self._before["read_bytes"]


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file whose pages are not in memory."""
    file = tmp_path / "model.safetensors"
    save_file({name: torch.arange(TENSOR_BYTES // 8) for name in "ab"}, file)
    return forget(file)


def forget(file: Path) -> Path:
    """Gives the file's pages back to the system, which needs a file system on a disk."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    assert num_resident(file) == 0, f"pages of {file} stay in memory: is this a file system in memory?"
    return file


def num_resident(file: Path) -> int:
    """Pages of the file that are in the page cache."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        failed = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(len(mapped)), pages)
        del first
        assert failed == 0
        return sum(page & 1 for page in pages)


def threads_called(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("write", [as_safetensors, as_sharded_safetensors, as_unindexed_safetensors])
def test_each_way_gives_equal_weights_and_parts(
    write: Callable[[Path, dict[str, Tensor]], None], strategy: Strategy, tmp_path: Path
) -> None:
    model = tiny_models.build("llama_gqa_tied")
    model.config.save_pretrained(tmp_path)
    state = stored_state(model)
    write(tmp_path, state)
    assert_holds(open_folder(tmp_path, safetensors_load_strategy=strategy).weights(), state)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_way_gives_a_ranks_part_of_a_sharded_state(strategy: Strategy, tmp_path: Path) -> None:
    model = tiny_models.save("llama", tmp_path / "model")
    asked = Options(model=str(model), tensor_parallel_size=2)
    save(asked, tmp_path / "sharded")
    place, num_layers = RankCoordinates.of_options(1, asked), tiny_models.build("llama").config.num_hidden_layers
    weights = ShardedWeights(tmp_path / "sharded", place, num_layers, strategy)
    whole = open_checkpoint(asked).weights()
    rows = place.share(weights.shape("model.layers.0.mlp.up_proj.weight")[0], "an MLP's inner size")
    for name, part in (("model.layers.0.mlp.up_proj.weight", rows), ("model.norm.weight", None)):
        assert torch.equal(weights.get(name, rows=part), whole.get(name, rows=part))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tensors_may_begin_at_any_byte_and_have_any_shape(strategy: Strategy, tmp_path: Path) -> None:
    held = {
        "scalar": torch.tensor(7, dtype=torch.int8),
        "odd": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "cube": torch.arange(24.0).view(2, 3, 4),
        "empty": torch.zeros(0, 4),
    }
    header, data = {}, b""
    for name, tensor in held.items():
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        kind = {"int8": "I8", "bfloat16": "BF16", "float32": "F32"}[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    encoded = json.dumps(header).encode()
    encoded += b" " * (len(encoded) % 2 == 0)  # so that the tensors begin at an odd byte
    (tmp_path / "odd.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    weights = SafetensorsWeights([tmp_path / "odd.safetensors"], None, strategy)
    for name, tensor in held.items():
        assert torch.equal(weights.get(name), tensor), name
    assert torch.equal(weights.get("cube", slice(1, 2), slice(1, 3)), held["cube"][1:2, :, 1:3])
    assert torch.equal(weights.get("odd", slice(1, 2)), held["odd"][1:2])


def test_eager_reads_the_whole_file_once_and_lazy_reads_none_of_it(large: Path) -> None:
    lazy = SafetensorsWeights([large])
    lazy.get("a", rows=slice(0, 1))  # finds the file in this process's table of mappings, which is a read of its own
    read = Read()
    lazy.get("a", rows=slice(0, 16))
    assert read.size < 64 << 10
    assert num_resident(large) * mmap.PAGESIZE <= TENSOR_BYTES, "what nobody asked for was not read"
    eager = SafetensorsWeights([large], None, "eager")
    part = eager.get("a", rows=slice(0, 16))
    assert large.stat().st_size <= read.size < large.stat().st_size + (64 << 10)
    eager.get("b")
    assert read.size < large.stat().st_size + (64 << 10), "once"
    assert part.untyped_storage().nbytes() == 16 * 8, "a part does not keep the file in memory"


def test_eager_keeps_two_files_at_most(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for number, path in enumerate(paths):
        save_file({f"w{number}": torch.full((4,), number)}, path)
    files = list(open_files(paths, "eager"))
    for number in (0, 1, 2, 0):
        assert files[number].get(f"w{number}").tolist() == [number] * 4
    (buffers,) = {file._buffers for file in files}  # type: ignore[attr-defined]
    assert list(buffers._read) == [paths[2], paths[0]]


def test_prefetch_brings_the_pages_while_nobody_asks_for_a_tensor(large: Path) -> None:
    read = Read()
    weights = SafetensorsWeights([large], None, "prefetch")
    for thread in threads_called("prefetch"):
        thread.join(60)
    # Whether the pages are there still is for the system to say, which takes them back where memory is short.
    assert read.from_disk >= large.stat().st_size
    assert weights.names() == {"a", "b"}


def test_what_is_left_of_a_block_is_read_though_some_of_its_pages_are_in_memory(large: Path) -> None:
    with large.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # so that a page comes alone
        for end in range(BLOCK_BYTES, large.stat().st_size, BLOCK_BYTES):
            os.pread(file.fileno(), 1, end - 1)
            os.pread(file.fileno(), 1, end - BLOCK_BYTES)
    present = num_resident(large)
    assert present < 100
    read, owner = Read(), RankCoordinates()
    prefetch(owner, [large], 0, 1).join(60)
    assert read.from_disk >= large.stat().st_size - present * mmap.PAGESIZE


def test_a_rank_passes_over_what_another_has_read_ahead(large: Path) -> None:
    read, owner = Read(), RankCoordinates()
    prefetch(owner, [large], 0, 2).join(60)
    assert read.from_disk >= large.stat().st_size
    read = Read()
    prefetch(owner, [large], 1, 2).join(60)
    assert read.size < 64 << 10


def test_reading_ahead_ends_with_the_weights_it_is_for(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "headrace.executor.checkpoints.sources.safetensors_weights.BLOCK_BYTES", 1
    )  # it would take for ever
    weights = SafetensorsWeights([large], None, "prefetch")
    (thread,) = threads_called("prefetch")
    assert thread.is_alive()
    del weights
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("strategy", ["eager", "prefetch"])
def test_a_truncated_file_is_named_however_it_is_read(strategy: Strategy, large: Path) -> None:
    os.truncate(large, 1 << 20)
    with pytest.raises(ModelError, match=r"model\.safetensors .* is not a whole safetensors file"):
        SafetensorsWeights([large], None, strategy)


def test_a_strategy_for_other_files_than_safetensors_is_refused(tmp_path: Path) -> None:
    file = save_gguf(tiny_models.build("llama"), tmp_path / "model.gguf")
    with pytest.raises(OptionError, match=r"=eager does not apply to .*model\.gguf, whose weights are gguf"):
        open_folder(file, safetensors_load_strategy="eager")
    model = tiny_models.save("llama", tmp_path / "folder")
    with pytest.raises(OptionError, match="whose weights are dummy"):
        open_folder(model, safetensors_load_strategy="prefetch", load_format="dummy")


@pytest.mark.system
def test_an_engine_process_makes_random_weights(tmp_path: Path) -> None:
    folder = tiny_models.save("llama_biases", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    small: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 4}
    with LLM(str(folder), load_format="dummy", **small) as llm:
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        assert len(llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)[0].outputs[0].token_ids) == 4


@pytest.mark.parametrize("backend", ["uni", "gpu_parts:GpuOnCpuExecutor"])
@pytest.mark.parametrize(
    "name", every(3, ["model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight", "model.norm.weight"])
)
def test_weights_that_are_stored_as_whole_numbers_are_refused_with_their_name(
    backend: str, name: str, tmp_path: Path
) -> None:
    folder = tiny_models.save("llama", tmp_path / "model")
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights[name] = weights[name].bfloat16().view(torch.int16)  # as a header that is damaged in two letters has it
    save_file(weights, file)
    with pytest.raises(ModelError, match=f"the weight {name} is stored as int16; a type of floats is expected"):
        LLM(
            str(folder), in_process=True, device="cpu", skip_tokenizer_init=True, dtype="float32", max_model_len=64,
            distributed_executor_backend=backend,
        )  # fmt: skip
