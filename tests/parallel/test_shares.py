"""Parallel sizes that a model cannot have are refused before any worker starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models
from gguf.constants import GGMLQuantizationType as Kind
from tiny_gguf import save_gguf

from headrace.core.engine.engine import load_executor
from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import config_at_hand
from headrace.ipc.failure import ModelError, OptionError

TOO_MANY = "4 attention heads cannot be divided among 5 ranks: each needs at least one"


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    model = tiny_models.build("llama")
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


@pytest.fixture
def folder(tmp_path: Path, config: dict[str, Any]) -> Path:
    """A model whose weights nobody can have looked at."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "kind", "message"),
    [
        ({"tensor_parallel_size": 5}, ModelError, TOO_MANY),
        ({"tensor_parallel_size": 5, "distributed_executor_backend": "ray"}, ModelError, TOO_MANY),
        ({"tensor_parallel_size": 6, "nnodes": 2}, ModelError, TOO_MANY.replace("5", "6")),
        ({"tensor_parallel_size": 5, "distributed_executor_backend": "external_launcher"}, ModelError, TOO_MANY),
        ({"pipeline_parallel_size": 3}, OptionError, "3 pipeline stages cannot share a model of 2 layers"),
        (
            {"pipeline_parallel_size": 2, "pipeline_layer_partition": (1, 3)},
            OptionError,
            "pipeline_layer_partition 1,3 gives out 4 layers; the model has 2, and every stage needs at least one",
        ),
        (
            {"tensor_parallel_size": 4, "hf_overrides": {"vocab_size": 9}},
            ModelError,
            "a vocabulary of 9 cannot be divided among 4 tensor-parallel ranks",
        ),
    ],
)
def test_what_the_ranks_cannot_share_is_refused_before_they_start(
    folder: Path, asked: dict[str, Any], kind: type[Exception], message: str
) -> None:
    before = psutil.Process().children()  # another module's server may run
    with pytest.raises(kind, match=message):
        load_executor(Options(model=str(folder), **asked))
    assert psutil.Process().children() == before


def test_a_gguf_files_head_tells_it_too(tmp_path: Path) -> None:
    path = save_gguf(tiny_models.build("llama"), tmp_path / "model.gguf", Kind.F32)
    for model in (path, tmp_path):  # the file, or the folder that holds it alone
        with pytest.raises(ModelError, match=TOO_MANY):
            load_executor(Options(model=str(model), tensor_parallel_size=5))


def test_a_model_of_the_hub_that_is_here_is_looked_at_and_no_other(tmp_path: Path, config: dict[str, Any]) -> None:
    repository = tmp_path / "models--some--model"
    for file, text in (("refs/main", "c0ffee"), ("snapshots/c0ffee/config.json", json.dumps(config))):
        (repository / file).parent.mkdir(parents=True)
        (repository / file).write_text(text)
    here = Options(model="some/model", download_dir=str(tmp_path), tensor_parallel_size=5)
    with pytest.raises(ModelError, match=TOO_MANY):
        load_executor(here)
    for elsewhere in ("some/other", "some/model:Q4_0", "/no/such/folder", "no such name"):
        assert config_at_hand(Options(model=elsewhere, download_dir=str(tmp_path))) is None


def test_the_core_needs_no_torch_for_it(folder: Path) -> None:
    script = (
        "import sys; from headrace.core.options.engine_options import Options; "
        "from headrace.executor.parallel.divisibility import check_world; "
        "check_world(Options(model=sys.argv[1], tensor_parallel_size=4)); "
        "sys.exit(', '.join(sys.modules.keys() & {'torch', 'transformers'}) or 0)"
    )
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True)
