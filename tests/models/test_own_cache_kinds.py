"""A kind of cache groups that a separately installed package brings, with a family whose layers are of that kind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny_models
from engine_parts import SteppedCore
from installed_packages import install

from headrace.core.schedule.groups.contained import CacheKindError
from headrace.core.schedule.groups.full import FullBlocks
from headrace.core.schedule.groups.group import GroupBlocks, class_of
from headrace.ipc import plugins
from headrace.ipc.failure import OptionError
from headrace.ipc.messages import FinishReason

ENTRY_POINTS = """
[headrace.plugins]
chunked = chunked_family:CHUNKED
whole = chunked_family:WHOLE
unknown = chunked_family:UNKNOWN
[headrace.cache_kinds]
chunks = chunked_cache:Chunks
"""
FAMILY = '''
"""Every second layer attends within chunks of 32 tokens."""
from dataclasses import dataclass, replace
from typing import ClassVar

from headrace.executor.models.families import Family
from headrace.executor.models.families._config import llama_like
from headrace.executor.models.families.llama4 import LongAttention

CHUNK = 32


@dataclass(frozen=True)
class WithinChunks(LongAttention):
    cache_kind: ClassVar[str] = "chunks"

    def declare(self, spec):
        found = dict(super().declare(spec))
        return found | {"attend": replace(found["attend"], sliding_window=None)}


class Unheard(WithinChunks):
    cache_kind: ClassVar[str] = "crumbs"


def family(architecture, kind, window):
    def build(config):
        spec = llama_like(config)
        attention = spec.layers[0].mixer
        fields = {name: getattr(attention, name) for name in attention.__dataclass_fields__}
        local = kind(**fields | {"chunk_size": CHUNK, "sliding_window": window})
        return replace(spec, layers=tuple(
            replace(each, mixer=local) if index % 2 else each for index, each in enumerate(spec.layers)
        ))
    return Family((architecture,), build)


CHUNKED = family("ChunkedForCausalLM", WithinChunks, CHUNK)
WHOLE = family("WholeForCausalLM", LongAttention, None)
UNKNOWN = family("UnknownForCausalLM", Unheard, CHUNK)
'''
CACHE = '''
"""Blocks of the chunk that a row is in; those of earlier chunks are released."""
import numpy as np

from headrace.core.schedule.blocks import NULL_BLOCK
from headrace.core.schedule.groups.group import GroupBlocks


class Chunks(GroupBlocks):
    def __init__(self, pool, group, number, sizes, table):
        super().__init__(pool, group, number, sizes, table)
        self.first_held = np.zeros(sizes.num_rows, np.int32)
        self.in_chunk = group.window // sizes.block_size

    def enter(self, row, hit, found):
        first = self.first_held[row] = hit.num_blocks - len(found)
        self.table[row, :first] = NULL_BLOCK
        self.table[row, first : hit.num_blocks] = found

    def held(self, row, end):
        return self.table[row, self.first_held[row] : end].tolist()

    def give_back(self, rows, positions):
        for row, first in zip(rows.tolist(), (positions // self.group.window * self.in_chunk).tolist()):
            if first > self.first_held[row]:
                entries = self.table[row, self.first_held[row] : first]
                self.pool.release(entries.tolist())
                print("released", len(entries))
                entries[:] = NULL_BLOCK
                self.first_held[row] = first

    def clear(self):
        self.first_held[:] = 0

    def longest(self, hashes):
        for end in range(len(hashes), 0, -1):
            if all(self.named(each) for each in hashes[end // self.in_chunk * self.in_chunk : end]):
                return end
        return 0

    def needed(self, hashes):
        return [self.named(each) for each in hashes[len(hashes) // self.in_chunk * self.in_chunk :]]
'''
GENERATE = """
import json, logging, sys
from headrace import LLM, SamplingParams
with LLM(
    sys.argv[1], dtype="float32", skip_tokenizer_init=True, max_model_len=160, max_num_batched_tokens=24,
    max_num_seqs=3, in_process=True, block_size=16,
) as llm:
    params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    prompts = [list(range(5, 5 + count)) for count in (3, 40, 90)]
    first = llm.generate(prompts, params, use_tqdm=False)
    again = llm.generate([[*prompts[2], *first[2].outputs[0].token_ids]], params, use_tqdm=False)[0]
    tokens = [list(output.outputs[0].token_ids) for output in [*first, again]]
    print(json.dumps({"tokens": tokens, "cached": again.num_cached_tokens}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the package is installed into."""
    files = {"chunked_family.py": FAMILY, "chunked_cache.py": CACHE}
    return install(tmp_path_factory.mktemp("site"), "chunks-for-headrace", ENTRY_POINTS, files)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    config = transformers.LlamaConfig(**tiny_models.COMMON | {"num_hidden_layers": 4})
    folder = tmp_path_factory.mktemp("chunked")
    reference = transformers.LlamaForCausalLM(config).eval()
    tiny_models._randomise(reference, 0, 0.1)
    reference.save_pretrained(folder)
    return folder


def generate(folder: Path, architecture: str, installed: Path) -> subprocess.CompletedProcess[str]:
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-c", GENERATE, str(folder)]
    variables = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=variables, check=False)


@pytest.mark.system
def test_layers_of_an_installed_cache_kind_release_what_they_no_longer_read(model: Path, installed: Path) -> None:
    found = {}
    for architecture in ("WholeForCausalLM", "ChunkedForCausalLM"):
        done = generate(model, architecture, installed)
        assert done.returncode == 0, done.stderr
        *released, answer = done.stdout.splitlines()
        found[architecture] = json.loads(answer)
        assert bool(released) == (architecture == "ChunkedForCausalLM")
        assert set(released) <= {"released 2"}  # of 32 tokens
    whole, chunked = found.values()
    assert chunked["tokens"] == whole["tokens"]
    assert chunked["cached"] == whole["cached"] == 128  # of 140


def test_a_cache_kind_that_nothing_registers_is_named(model: Path, installed: Path) -> None:
    done = generate(model, "UnknownForCausalLM", installed)
    assert done.returncode
    assert "cache kind 'crumbs'" in done.stderr
    assert "chunks, full, sliding_window, state" in done.stderr


@pytest.mark.parametrize("name", ["full", "chunks"])
def test_a_cache_kind_under_a_name_that_is_taken_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = "headrace.core.schedule.groups.window"
    entries = f"[headrace.cache_kinds]\n{name} = {module}:WindowBlocks\n"
    install(tmp_path, "one", entries, {})
    if name == "chunks":
        install(tmp_path, "other", entries.replace("WindowBlocks", "GroupBlocks"), {})
    monkeypatch.syspath_prepend(str(tmp_path))
    words = {
        "full": f"the cache kind full, {module}:WindowBlocks, has the name of headrace.*; it must have one of its own",
        "chunks": "two packages have a cache kind chunks: ",
    }
    with pytest.raises(OptionError, match=words[name]):
        class_of(name)


class Careless(FullBlocks):
    """Full attention, with a hook that fails while there is an answer for it."""

    answers: ClassVar[dict[str, Any]] = {}
    find = GroupBlocks.find

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        if "__init__" in self.answers:
            raise KeyError("__init__")


def _hooked(name: str) -> Any:
    def hook(self: Careless, *given: Any) -> Any:
        if name not in self.answers:
            return getattr(FullBlocks, name)(self, *given)
        answer = self.answers[name]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return hook


for _name in ("num_missing", "longest", "needed", "enter", "held", "give_back"):
    setattr(Careless, _name, _hooked(_name))


class Constant(FullBlocks):
    grows = False


@pytest.fixture
def careless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The answers of an installed kind, which has none at first."""
    entries = f"[headrace.cache_kinds]\ncareless = {__name__}:Careless\nconstant = {__name__}:Constant\n"
    install(tmp_path, "careless", entries, {})
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins._installed_on.cache_clear()
    Careless.answers = {}
    yield Careless.answers
    monkeypatch.undo()
    plugins._installed_on.cache_clear()


def stepped(kind: str = "careless") -> SteppedCore:
    return SteppedCore(kinds=(kind,), async_scheduling=False)


def failed_in(hook: str) -> str:
    return f"the cache kind careless, {__name__}.Careless, failed in {hook}: "


@pytest.mark.parametrize(
    ("hook", "answer", "why"),
    [
        ("longest", SystemExit(3), "SystemExit(3)"),
        ("longest", 40, "it returned 40; expected: a number of the blocks that were given"),
        ("longest", None, "it returned None"),
        ("needed", [0], "it returned [0]; expected: a list of cached blocks"),
        ("needed", [10**6], "it returned [1000000]; expected: a list of cached blocks"),
        ("needed", [63], "it returned [63]; expected: a list of cached blocks"),
        ("needed", ZeroDivisionError(), "ZeroDivisionError()"),
        ("num_missing", -1, "it returned -1; expected: a number of blocks"),
        ("num_missing", KeyError("x"), "KeyError('x')"),
    ],
)
def test_a_kind_that_fails_when_a_request_is_looked_up_fails_that_request_alone(
    careless: dict[str, Any], hook: str, answer: Any, why: str
) -> None:
    core = stepped()
    client = core.open()
    client.add(0, [5, 6, 7, 8, 9], max_tokens=40, ignore_eos=True)
    for _ in range(3):
        core.loop.turn()
    careless[hook] = answer
    client.add(1, [5, 6, 7, 8, 9], max_tokens=3, ignore_eos=True)
    for _ in range(3):
        core.loop.turn()
    careless.clear()
    client.add(2, [5, 6, 7, 8, 9], max_tokens=3, ignore_eos=True)
    core.run_until_idle()
    ends = {end.slot: end for end in client.finishes()}
    assert [ends[slot].reason for slot in range(3)] == [FinishReason.LENGTH, FinishReason.FAILED, FinishReason.LENGTH]
    assert ends[1].failure is not None
    assert ends[1].failure.message.startswith(failed_in(hook))
    assert why in ends[1].failure.message


@pytest.mark.parametrize(
    ("hook", "answer"), [("enter", ZeroDivisionError()), ("held", None), ("give_back", SystemExit(3))]
)
def test_a_kind_that_fails_while_it_changes_what_rows_hold_is_named(
    careless: dict[str, Any], hook: str, answer: Any
) -> None:
    core = stepped()
    client = core.open()
    careless[hook] = answer
    client.add(0, [5, 6, 7, 8, 9], max_tokens=9, ignore_eos=True)
    with pytest.raises(CacheKindError, match=re.escape(failed_in(hook))):
        core.run_until_idle()


def test_a_kind_that_cannot_be_made_is_named(careless: dict[str, Any]) -> None:
    careless["__init__"] = True
    words = rf"the cache kind careless, {__name__}.Careless, cannot be made: KeyError\('__init__'\)"
    with pytest.raises(OptionError, match=words):
        stepped()


@pytest.mark.usefixtures("careless")
def test_a_kind_whose_tables_do_not_grow_is_refused() -> None:
    with pytest.raises(OptionError, match=f"the cache kind constant, {__name__}:Constant, has grows=False"):
        stepped("constant")
