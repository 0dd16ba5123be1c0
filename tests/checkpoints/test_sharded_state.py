"""A sharded state: what each rank reads, in a file of its own, gives the answers of the checkpoint it was made of."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from gguf.constants import GGMLQuantizationType as Kind
from rank_threads import pool_for_each_rank
from safetensors.torch import load_file
from tiny_gguf import save_gguf

from headrace import LLM, SamplingParams
from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.checkpoints.sources.sharded_state import save
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.frontend.cli.main import main
from headrace.ipc.failure import ModelError, OptionError

__all__ = ["pool_for_each_rank"]  # a fixture for all of these tests

SMALL: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama_biases", tmp_path_factory.mktemp("models") / "model")


def sharded(model: Path, folder: Path, **options: Any) -> Path:
    save(Options(model=str(model), **options), folder)
    return folder


def generate(model: Path, **options: Any) -> list[int]:
    with LLM(str(model), in_process=True, **(SMALL | options)) as llm:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        return list(llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.mark.parametrize("load_format", ["sharded_state", "auto"])
def test_ranks_answer_from_their_files_as_from_the_checkpoint(model: Path, tmp_path: Path, load_format: str) -> None:
    world = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    folder = sharded(model, tmp_path / "sharded", **world)
    threads = {"distributed_executor_backend": "rank_threads:RankThreads"}
    assert generate(folder, load_format=load_format, **world, **threads) == generate(model)


def test_ranks_that_share_unevenly_have_their_files_too(tmp_path: Path) -> None:
    changes = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 90}
    model = tiny_models.save("llama_gqa_tied", tmp_path / "model", vocab_size=323, **changes)
    world = {"tensor_parallel_size": 4}
    folder = sharded(model, tmp_path / "sharded", **world)
    held = "".join(load_file(folder / "model-rank-3-part-0.safetensors"))
    assert "v_proj" not in held, "the last rank's heads are padding"
    threads = {"distributed_executor_backend": "rank_threads:RankThreads"}
    assert generate(folder, load_format="sharded_state", **world, **threads) == generate(model)


@pytest.mark.parametrize("name", ["llama_gqa_tied", "opt_projected_post_norm"])
def test_one_rank_may_have_all(tmp_path: Path, name: str) -> None:
    model = tiny_models.save(name, tmp_path / "model")
    assert generate(sharded(model, tmp_path / "sharded"), load_format="sharded_state") == generate(model)


def test_a_file_holds_its_ranks_part_and_no_more(model: Path, tmp_path: Path) -> None:
    folder = sharded(model, tmp_path / "sharded", tensor_parallel_size=2)
    whole = load_file(model / "model.safetensors")
    part = load_file(folder / "model-rank-1-part-0.safetensors")
    rows = whole["model.layers.0.mlp.up_proj.weight"][48:]
    assert torch.equal(part["model.layers.0.mlp.up_proj.weight|48:96|0:64"], rows)
    columns = whole["model.layers.1.mlp.down_proj.weight"][:, 48:]
    assert torch.equal(part["model.layers.1.mlp.down_proj.weight|0:64|48:96"], columns)
    assert "model.layers.0.mlp.down_proj.bias" not in "".join(part)  # rank 0 adds it
    sizes = [sum(t.numel() for t in load_file(f).values()) for f in sorted(folder.glob("*.safetensors"))]
    assert max(sizes) < 0.6 * sum(tensor.numel() for tensor in whole.values())
    assert (folder / "config.json").read_text() == (model / "config.json").read_text()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            RankCoordinates(),
            "saved for tensor_parallel_size=2 and pipeline_parallel_size=1 .* not for tensor_parallel_",
        ),
        (RankCoordinates.of(2, 4, 1), "rank-2-part-0.safetensors is not what rank 2 of a sharded state should be"),
    ],
)
def test_another_world_is_refused_with_both_sizes(
    model: Path, tmp_path: Path, place: RankCoordinates, message: str
) -> None:
    folder = sharded(model, tmp_path / "sharded", tensor_parallel_size=2)
    checkpoint = open_checkpoint(Options(model=str(folder), load_format="sharded_state"))
    with pytest.raises(ModelError, match=message):
        checkpoint.weights(place=place)


def test_a_truncated_file_is_named(model: Path, tmp_path: Path) -> None:
    folder = sharded(model, tmp_path / "sharded")
    file = folder / "model-rank-0-part-0.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    checkpoint = open_checkpoint(Options(model=str(folder)))
    with pytest.raises(ModelError, match=r"model-rank-0-part-0\.safetensors is not what rank 0 .* should be"):
        checkpoint.weights()


def test_what_is_no_sharded_state_is_said(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no sharded state, whose files are named model-rank-"):
        open_checkpoint(Options(model=str(model), load_format="sharded_state"))
    with pytest.raises(OptionError, match="is the model's own folder; name another"):
        sharded(model, model)
    file = save_gguf(tiny_models.build("llama"), tmp_path / "model.gguf", Kind.Q8_0)
    with pytest.raises(
        OptionError, match=r"made of a folder of safetensors or PyTorch files, .*gguf is gguf, of which each"
    ):
        sharded(file, tmp_path / "sharded")
    with pytest.raises(ModelError, match="4 attention heads cannot be divided among 5 ranks"):
        sharded(model, tmp_path / "sharded", tensor_parallel_size=5)


@pytest.mark.system
def test_the_command_writes_and_complains(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "sharded"
    assert main(["save-sharded-state", str(model), "-tp", "2", "-o", str(output)]) == 0
    assert capfd.readouterr().out.count("model-rank-") == 2
    assert generate(
        output, tensor_parallel_size=2, distributed_executor_backend="rank_threads:RankThreads"
    ) == generate(model)
    shutil.rmtree(output)
    assert main(["save-sharded-state", str(tmp_path / "nowhere"), "-o", str(output)]) != 0
    assert "nowhere" in capfd.readouterr().err
    (tmp_path / "file").write_bytes(b"")
    assert main(["save-sharded-state", str(model), "-o", str(tmp_path / "file")]) == 1
    said = capfd.readouterr().err
    assert f"the sharded state cannot be written to {tmp_path}/file: File exists" in said
    assert "Traceback" not in said
