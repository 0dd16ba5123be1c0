"""The bar while weights are read: what it counts, where it is shown, and that log lines stand beside it."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
from tiny_gguf import save_gguf

from headrace.core.options.engine_options import Options
from headrace.core.process.child_output import ChildLog, LoadBar
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.checkpoints.progress import watched
from headrace.executor.checkpoints.sources.dummy_weights import DummyWeights
from headrace.executor.parallel.rank_place import RankCoordinates

SHAPES = {"embed.weight": (8, 4), "layers.0.up.weight": (4, 4), "layers.1.up.weight": (4, 4), "scale": ()}


class Terminal(io.StringIO):
    """What a terminal would show: a carriage return goes back to the line's beginning."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        shown = []
        for line in self.getvalue().split("\n"):
            cells: list[str] = []
            for part in line.split("\r"):
                cells[: len(part)] = part
            shown.append("".join(cells).rstrip())
        return shown


@pytest.mark.parametrize(("layers", "total"), [(range(2), 65 * 2), (range(1, 2), 49 * 2)])
def test_each_weight_counts_once_and_other_stages_layers_do_not(layers: range, total: int) -> None:
    heard: list[tuple[int, int]] = []
    weights = watched(DummyWeights(SHAPES), lambda done, of: heard.append((done, of)), layers)
    for name, shape in SHAPES.items():
        if "layers" not in name or int(name.split(".")[1]) in layers:
            weights.get(name, rows=slice(0, 2) if shape else None)
            weights.get(name)
    assert heard[-1] == (total, total)
    assert heard == sorted(heard)


def test_packed_weights_count_as_they_are_stored(tmp_path: Path) -> None:
    file = save_gguf(tiny_models.build("llama"), tmp_path / "model.gguf")
    heard: list[tuple[int, int]] = []
    source = open_checkpoint(Options(model=str(file))).weights(place=RankCoordinates())
    weights = watched(source, lambda done, of: heard.append((done, of)), range(9), 10_000)
    for name in weights.names():
        if weights.packed(name) is None:
            weights.get(name)
    assert heard[-1][0] == heard[-1][1]
    assert 9_900 <= heard[-1][1] <= 10_000


def test_a_bar_is_shown_where_it_is_wanted_and_on_terminals_alone_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.core.process.child_output.DELAY_S", 0.0)
    for wanted, stream, shows in (
        (None, io.StringIO(), False),
        (None, Terminal(), True),
        (False, Terminal(), False),
        (True, io.StringIO(), True),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        bar = LoadBar(wanted)
        bar.read(10, 100)
        bar.close(is_done=True)
        assert ("Loading weights" in stream.getvalue()) == shows, (wanted, stream)


def test_log_lines_of_a_child_stand_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.core.process.child_output.DELAY_S", 0.0)
    terminal, log = Terminal(), ChildLog()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = LoadBar(None)
    for done in range(0, 100, 10):
        bar.read(done, 100)
        log.take(f"worker 1: line {done}\n".encode())
    assert "Loading weights:" in terminal.lines()[-1], "the bar stands below all lines"
    bar.close(is_done=True)
    assert terminal.lines() == [*(f"worker 1: line {done}" for done in range(0, 100, 10)), ""], "and is gone at the end"
    assert log.tail[-1] == "worker 1: line 90"


@pytest.mark.system
def test_one_rank_shows_what_it_reads_and_the_bar_ends_full(tmp_path: Path) -> None:
    model = tiny_models.save("llama_biases", tmp_path / "model")
    options = {"model": str(model), "tensor_parallel_size": 2, "use_tqdm_on_load": True, "skip_tokenizer_init": True}
    code = "import json, sys\nfrom headrace import LLM\nLLM(**json.loads(sys.argv[1])).close()\n"
    command = [sys.executable, "-c", code, json.dumps({**options, "max_model_len": 64, "max_num_seqs": 2})]
    done = subprocess.run(command, capture_output=True, timeout=90, check=True)
    shown = done.stderr.decode()
    assert shown.count("\n") == 1, shown
    assert re.match(r"Loading weights: 100%\|.*\| [\d.]+kB?/[\d.]+kB? \[", shown.rpartition("\r")[2]), shown
