"""A step feature of another package with its rank's side: its attachment changes logits, and a statistic comes back."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny_models
from rank_threads import RankThreads, pool_for_each_rank

from headrace import LLM, SamplingParams
from headrace.executor.step.handlers import installed_handlers
from headrace.ipc import plugins, step
from headrace.ipc.failure import EngineDeadError, OptionError, RequestFailedError
from headrace.ipc.step import AttachmentError

__all__ = ["pool_for_each_rank"]
THREADS = {"distributed_executor_backend": f"{RankThreads.__module__}:{RankThreads.__name__}"}
KINDS = """
import numpy as np

from headrace.ipc.step import Attachment, attachment


@attachment(most_bytes=lambda sizes: 16 * sizes.num_rows + 64)
class Penalties(Attachment, frozen=True):
    "A token that some rows avoid, and how much."

    rows: np.ndarray
    token_ids: np.ndarray
    penalties: np.ndarray
    raises: str = ""


@attachment(most_returned_bytes=lambda sizes: 8 * sizes.num_rows + 64)
class Penalised(Attachment, frozen=True):
    "How often each of the result's rows was penalised, and by which rank."

    counts: np.ndarray
    rank: int

    def select(self, kept):
        return Penalised(counts=self.counts[kept], rank=self.rank)
"""
FEATURE = """
import msgspec
import numpy as np
from lab.kinds import Penalised, Penalties

from headrace.core.schedule.features.feature import StepFeature


class Penalising(StepFeature):
    attaches = (Penalties,)
    seen = []  # of all engines of the process: (count of penalties, rank)

    def seal(self, plan):
        table = self.context.rows
        asked = {row: table.requests[row].sampling.extra_args or {} for row in plan.rows.tolist()}
        avoided = {row: each["avoid"] for row, each in asked.items() if "avoid" in each}
        raises = "".join(each.get("raises", "") for each in asked.values())
        if not avoided and not raises:
            return plan
        penalties = Penalties(
            rows=np.array([*avoided], np.int32),
            token_ids=np.array([token for token, _ in avoided.values()], np.int32),
            penalties=np.array([penalty for _, penalty in avoided.values()], np.float32),
            raises=raises,
        )
        return msgspec.structs.replace(plan, attachments=(*plan.attachments, penalties))

    def take(self, result):
        if (found := result.get(Penalised)) is not None:
            assert len(found.counts) == len(result.rows)
            self.seen.append((int(found.counts.sum()), found.rank))
"""
HANDLER = """
import numpy as np
from lab.kinds import Penalised, Penalties

from headrace.executor.step.handlers import Handler


class PenaliseTokens(Handler):
    kind = Penalties

    def begin(self, attached, plan):
        self.counts = np.zeros(len(self.parts.batch.num_tokens), np.int32)
        assert set(attached.rows) <= set(plan.rows)
        if attached.raises == "begin":
            raise ZeroDivisionError

    def change(self, attached, logits, rows, num_tokens):
        if attached.raises == "change":
            raise SystemExit(3)
        if attached.raises in ("nan", "inf"):
            logits[rows == attached.rows[0], 5:7] = float(attached.raises)
        if attached.raises == "shape":
            logits.resize_(1, 3)
        if attached.raises == "returned":
            return logits
        assert (num_tokens >= self.parts.batch.num_prompt_tokens[rows]).all()
        for row, token_id, penalty in zip(attached.rows, attached.token_ids, attached.penalties):
            logits[np.flatnonzero(rows == row), int(token_id)] -= float(penalty)
            self.counts[row] += (rows == row).sum()

    def end(self, attached, plan, result):
        if attached.raises == "end":
            raise KeyError("end")
        if attached.raises == "foreign":
            return 7
        if attached.raises == "list":
            return Penalised(counts=[1], rank=0)
        return Penalised(counts=self.counts[result.rows], rank=self.parts.place.rank)
"""
NAMES = ("lab", "lab.kinds", "lab.feature", "lab.rank")
BOTH = """[headrace.step_features]
penalties = lab.feature:Penalising
[headrace.step_handlers]
penalties = lab.rank:PenaliseTokens
"""
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8 + nth]} for nth in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.save("llama", tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package beside Headrace, which has installed nothing yet."""
    (tmp_path / "lab").mkdir()
    for name, text in {"__init__": "", "kinds": KINDS, "feature": FEATURE, "rank": HANDLER}.items():
        (tmp_path / "lab" / f"{name}.py").write_text(text)
    package = tmp_path / "lab-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    yield tmp_path
    for name in ("Penalties", "Penalised"):
        step.KINDS.pop(name, None)
        step._MOST_BYTES.pop(name, None)
    for name in NAMES:
        sys.modules.pop(name, None)
    plugins._installed_on.cache_clear()


def install(lab: Path, entry_points: str) -> None:
    (lab / "lab-1.0.dist-info" / "entry_points.txt").write_text(entry_points)
    plugins._installed_on.cache_clear()


def engine(folder: str, **options: Any) -> LLM:
    usual: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 40}
    return LLM(folder, in_process=True, skip_tokenizer_init=True, **(usual | options))


def params(extra_args: dict[str, Any] | None = None, **fields: Any) -> SamplingParams:
    usual: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    return SamplingParams(extra_args=extra_args, **(usual | fields))


def tokens(llm: LLM, asked: list[SamplingParams]) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, asked, use_tqdm=False)]


def check_penalties(llm: LLM, feature: ModuleType, **fields: Any) -> None:
    """A request that avoids a token gets none of it, those beside it have what they would have, and each of its steps
    is counted once, by the rank that replies."""
    plain = [params(**fields) for _ in PROMPTS]
    before = tokens(llm, plain)
    feature.Penalising.seen.clear()
    at = next(nth for nth, token in enumerate(before[1]) if nth and token not in before[1][:nth])
    avoided = before[1][at]
    found = tokens(llm, [plain[0], params({"avoid": [avoided, 1e6]}, **fields), plain[2]])
    assert (found[0], found[2]) == (before[0], before[2])
    assert found[1][:at] == before[1][:at]
    assert avoided not in found[1]
    assert len(feature.Penalising.seen) == 8
    assert len({*feature.Penalising.seen}) == 1, "one of the row's penalties in each step, of one rank"
    assert tokens(llm, plain) == before
    assert len(feature.Penalising.seen) == 8, "steps without the attachment bring nothing back"


@pytest.mark.parametrize(
    "options",
    [{}, {"async_scheduling": True}, {"tensor_parallel_size": 2} | THREADS, {"pipeline_parallel_size": 2} | THREADS],
    ids=["one rank", "ahead", "two ranks", "two stages"],
)
def test_a_feature_of_a_package_changes_logits_on_the_ranks_and_gets_a_statistic_back(
    lab: Path, folder: str, options: dict[str, Any]
) -> None:
    install(lab, BOTH)
    with engine(folder, **options) as llm:
        feature = importlib.import_module("lab.feature")
        check_penalties(llm, feature)
        if not options:
            check_penalties(llm, feature, temperature=0.8, seed=3)
            check_penalties(llm, feature, repetition_penalty=1.3)


@pytest.mark.system
def test_it_does_so_in_worker_processes(lab: Path, folder: str) -> None:
    install(lab, BOTH)
    with engine(folder, tensor_parallel_size=2) as llm:
        check_penalties(llm, importlib.import_module("lab.feature"))


def test_a_penalty_holds_at_every_position_of_a_step_with_drafts(lab: Path, folder: str) -> None:
    install(lab, BOTH)
    drafting = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    prompt = {"prompt_token_ids": [5, 6, 7] * 5}
    with engine(folder) as llm, engine(folder, speculative_config=drafting) as other:
        (plain,) = llm.generate([prompt], params(max_tokens=24), use_tqdm=False)
        asked = params({"avoid": [plain.outputs[0].token_ids[5], 1e6]}, max_tokens=24)
        (expected,), (found,) = (each.generate([prompt], asked, use_tqdm=False) for each in (llm, other))
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.outputs[0].token_ids != plain.outputs[0].token_ids


@pytest.mark.parametrize("hook", ["begin", "change", "returned", "end", "foreign", "list"])
def test_a_handler_that_raises_fails_the_requests_of_the_step_and_no_other(lab: Path, folder: str, hook: str) -> None:
    install(lab, BOTH)
    with engine(folder) as llm:
        before = tokens(llm, [params() for _ in PROMPTS])
        asked = params({"avoid": [3, 1.0], "raises": hook})
        where = {"foreign": "end", "list": "end", "returned": "change"}.get(hook, hook)
        with pytest.raises(RequestFailedError, match=f"the step handler penalties failed in {where}"):
            llm.generate(PROMPTS[:1], asked, use_tqdm=False)
        assert tokens(llm, [params() for _ in PROMPTS]) == before


def test_a_handler_that_raises_in_an_early_stage_ends_the_engine_by_name(lab: Path, folder: str) -> None:
    install(lab, BOTH)
    words = "the step handler penalties failed in begin, in a stage of the pipeline that has no result"
    llm = engine(folder, pipeline_parallel_size=2, **THREADS)
    with pytest.raises(EngineDeadError, match=words):
        llm.generate(PROMPTS[:1], params({"avoid": [3, 1.0], "raises": "begin"}), use_tqdm=False)


@pytest.mark.parametrize(("wrote", "what"), [("nan", "NaN"), ("inf", "infinities")])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logits_that_a_handler_spoils_fail_their_row_alone(
    lab: Path, folder: str, wrote: str, what: str, temperature: float
) -> None:
    install(lab, BOTH)
    with engine(folder) as llm:
        plain = [params(temperature=temperature, seed=nth) for nth in range(3)]
        before = tokens(llm, plain)
        bad = params({"avoid": [3, 1.0], "raises": wrote}, temperature=temperature, seed=1)
        found = []
        with pytest.raises(RequestFailedError, match=f"the step handler penalties wrote {what} in change"):
            found = tokens(llm, [plain[0], bad, plain[2]])
        assert not found
        assert tokens(llm, plain) == before


def test_a_handler_that_changes_its_tensors_shape_changes_no_logits(lab: Path, folder: str) -> None:
    install(lab, BOTH)
    with engine(folder) as llm:
        before = tokens(llm, [params() for _ in PROMPTS])
        bad = params({"avoid": [3, 0.0], "raises": "shape"})
        with pytest.raises(RequestFailedError, match="the step handler penalties failed in change: IndexError"):
            tokens(llm, [params(), bad, params()])
        assert tokens(llm, [params() for _ in PROMPTS]) == before


def test_a_rank_without_the_handler_refuses_in_words(lab: Path, folder: str) -> None:
    install(lab, BOTH.partition("[headrace.step_handlers]")[0])
    words = r"carry Penalties, which .* does not read.*Install a handler .*step_handlers"
    with pytest.raises(AttachmentError, match=words):
        engine(folder)
    install(lab, BOTH)
    with pytest.raises(AttachmentError, match="carry Penalties, which this executor does not read"):
        LLM("null", in_process=True, distributed_executor_backend="headrace.executor.testing.null:NullExecutor")


def test_a_handler_that_is_none_or_is_one_too_many_is_named(lab: Path) -> None:
    install(lab, "[headrace.step_handlers]\nfirst = lab.rank:Penalised\n")
    with pytest.raises(OptionError, match=r"the step handler first, lab.rank:Penalised, is .* derived from .*Handler"):
        installed_handlers()
    install(lab, "[headrace.step_handlers]\nfirst = lab.rank:PenaliseTokens\nsecond = lab.rank:PenaliseTokens\n")
    with pytest.raises(OptionError, match="the step handler second is for Penalties, which first handles already"):
        installed_handlers()
    (lab / "lab" / "late.py").write_text("from lab.rank import *\nclass Late(Handler):\n    kind = 7\n")
    install(lab, "[headrace.step_handlers]\nlate = lab.late:Late\n")
    with pytest.raises(
        OptionError, match=r"the step handler late, lab.late:Late, has kind=7; it must be a registered kind"
    ):
        installed_handlers()
