"""Safetensors files read by libraries: the tensors are those of the files; a library that is not there is named."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import util
from pathlib import Path

import pytest
import tiny_models
import torch

from headrace.core.options.parsing import parse_options
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.checkpoints.load_formats import BY_LIBRARY
from headrace.executor.checkpoints.sources.library_readers import LIBRARIES
from headrace.ipc.extras import how_to_install
from headrace.ipc.failure import ModelError, OptionError


def test_the_load_formats_are_those_of_the_libraries() -> None:
    assert tuple(LIBRARIES) == BY_LIBRARY


@pytest.mark.parametrize("load_format", LIBRARIES)
def test_a_library_that_is_not_installed_is_named_with_the_line_that_installs_it(
    load_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = {load_format: replace(LIBRARIES[load_format], package="not_a_package")}
    monkeypatch.setattr("headrace.executor.checkpoints.sources.library_readers.LIBRARIES", absent)
    expected = re.escape(f"needs not_a_package, which is not installed: {how_to_install(load_format)}")
    with pytest.raises(OptionError, match=expected):
        open_checkpoint(parse_options(model=str(tmp_path), load_format=load_format))


@pytest.mark.parametrize("load_format", LIBRARIES)
def test_a_library_reads_the_tensors_of_the_files(load_format: str, tmp_path: Path) -> None:
    if util.find_spec(LIBRARIES[load_format].package) is None:
        pytest.skip(f"{LIBRARIES[load_format].package} is not installed")
    folder = tiny_models.save("llama", tmp_path / "llama")
    ours = open_checkpoint(parse_options(model=str(folder))).weights()
    theirs = open_checkpoint(parse_options(model=str(folder), load_format=load_format)).weights()
    assert theirs.names() == ours.names()
    for name in ours.names():
        assert torch.equal(theirs.get(name), ours.get(name)), name
        assert torch.equal(theirs.get(name, rows=slice(1, 3)), ours.get(name, rows=slice(1, 3)))
    with pytest.raises(OptionError, match=f"safetensors_load_strategy=eager: {load_format} reads its own way"):
        open_checkpoint(parse_options(model=str(folder), load_format=load_format, safetensors_load_strategy="eager"))
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        open_checkpoint(parse_options(model=str(folder), load_format=load_format)).weights()
