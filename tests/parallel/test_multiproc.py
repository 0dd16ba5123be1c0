"""The multiproc executor with ranks that compute nothing: what reaches them, what comes back, what they are given."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from multiproc_parts import HERE, Ranks, bring_up, leftovers, options, wait_until_nothing_is_left
from null_rank import NullRank
from patience import wait_until
from thinned import every

from headrace.core.engine.engine import load_executor
from headrace.core.options.engine_options import Options
from headrace.executor.placement.multiproc import MultiprocExecutor, check_equal
from headrace.ipc.control import DescribeEngine, PrepareWeights
from headrace.ipc.failure import EngineStartError, HeadraceError, ModelError, OptionError
from headrace.ipc.process.host import share
from headrace.ipc.step import StepPlan, StepResult


@pytest.fixture(autouse=True)
def workers_find_the_null_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", HERE)


def tokens_of_one_process(num_steps: int) -> list[list[int]]:
    ranks = Ranks(options(1))
    executor = NullRank(ranks.options)
    ranks.executor = executor  # type: ignore[assignment]
    bring_up(executor, ranks.options)
    return [ranks.step().token_ids.tolist() for _ in range(num_steps)]


@pytest.mark.parametrize(("tp_size", "pp_size"), every(3, [(2, 2), (2, 1), (1, 1)]))
def test_only_the_last_stages_first_rank_is_heard(tp_size: int, pp_size: int) -> None:
    with Ranks(options(tp_size, pp_size)) as ranks:
        ranks.bring_up()
        assert [ranks.step().token_ids.tolist() for _ in range(5)] == tokens_of_one_process(5)


def test_submit_waits_for_nobody_and_results_come_in_order() -> None:
    with Ranks(options()) as ranks:
        ranks.bring_up()
        in_flight = ranks.executor.max_steps_in_flight
        assert in_flight >= 2
        workers = [ranks.pid(rank) for rank in range(2)]
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        for _ in range(in_flight):
            ranks.submit()  # there is nobody who could answer
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        results = [ranks.executor.collect() for _ in range(in_flight)]
        assert [result.step for result in results] == list(range(in_flight))
        assert [result.token_ids.tolist() for result in results] == tokens_of_one_process(in_flight)


def test_what_does_not_fit_a_slot_reaches_every_rank_and_comes_back() -> None:
    """A prompt of 20,000 tokens down, and its log-probabilities over all of a vocabulary up."""
    with Ranks(options(check=True, vocab_size=5000)) as ranks:
        ranks.bring_up()
        ranks.maker.enter(0, list(range(5, 2000)) * 10, logprobs=-1)
        ranks.maker.compute(0, 2048)
        plan = ranks.maker.plan()
        assert len(ranks.executor._plans.encode(plan)) > ranks.executor._steps.layout.message_bytes  # type: ignore[union-attr]
        ranks.executor.submit(plan)
        assert len(ranks.executor.collect().rows) == 0
        while ranks.maker.computed[0] < len(ranks.maker.tokens[0]):
            ranks.maker.compute(0, min(2048, len(ranks.maker.tokens[0]) - ranks.maker.computed[0]))
            ranks.executor.submit(ranks.maker.plan())
            result = ranks.executor.collect()
        assert result.logprobs is not None
        assert result.logprobs.token_ids.shape == (1, 5001)
        assert len(ranks.executor._answers.encode(result)) > ranks.executor._results.layout.message_bytes  # type: ignore[union-attr]


def test_messages_survive_their_codec() -> None:
    with Ranks(options(1)) as ranks:
        executor = ranks.executor
        ranks.maker.enter(3, [5, 6, 7], logprobs=2, prompt_logprobs=1)
        ranks.maker.compute(3)
        plan = ranks.maker.plan()
        again = executor._plans.decode(executor._plans.encode(plan))
        null = NullRank(Options(hf_overrides={"check": True}))
        bring_up(null, Options())
        null.submit(again)
        result = null.collect()
        back = executor._answers.decode(executor._answers.encode(result))
        for kind, one, other in ((StepPlan, plan, again), (StepResult, result, back)):
            for name in kind.__struct_fields__:
                a, b = getattr(one, name), getattr(other, name)
                assert repr(a) == repr(b), name
                assert not isinstance(a, np.ndarray) or a.dtype == b.dtype


def test_commands_are_carried_out_by_each_rank_between_steps() -> None:
    with Ranks(options(2)) as ranks:
        ranks.bring_up()
        ranks.step()
        answers = ranks.executor.control(DescribeEngine())
        assert [answer.rank for answer in answers] == [0, 1]
        assert [answer.facts["pid"] for answer in answers] == [ranks.pid(0), ranks.pid(1)]
        assert not any(answer.facts["has_torch"] for answer in answers)  # which takes 200 MB and a second or two
        with pytest.raises(HeadraceError, match="rank 0 does not know PrepareWeights"):
            ranks.executor.control(PrepareWeights())
        assert ranks.step().step == 1


def test_a_command_is_carried_out_once_the_steps_of_each_rank_are_done() -> None:
    """The core has a step's result from rank 0. A rank that is not done yet would not, as others do, do idle work in
    which all take part (they would wait for it), or would replace weights that its step reads."""
    with Ranks(options(2, rank=1, how="late")) as ranks:
        ranks.bring_up()
        ranks.step()
        answers = ranks.executor.control(DescribeEngine())
        assert [answer.facts["steps_under_way"] for answer in answers] == [0, 0]
        assert ranks.step().step == 1


def adapter(folder: Path, content: str = "content") -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 4}')
    (folder / "adapter_model.safetensors").write_text(content)
    return str(folder)


def test_an_adapter_is_in_its_slot_on_every_rank_or_on_none(tmp_path: Path) -> None:
    with Ranks(options(2)) as ranks:
        executor = ranks.bring_up().executor

        def loaded() -> list[dict[str, str]]:
            return [answer.facts["adapters"] for answer in executor.control(DescribeEngine())]

        facts = executor.load_adapter(3, adapter(tmp_path / "a"))
        assert (facts.rank, facts.num_bytes) == (4, len("content"))
        assert loaded() == [{"3": facts.identity}] * 2
        missing = str(tmp_path / "missing")
        with pytest.raises(HeadraceError, match=missing):
            executor.load_adapter(1, missing)
        adapter(tmp_path / "b0", "of rank 0"), adapter(tmp_path / "b1", "of rank 1")
        with pytest.raises(ModelError, match=r"the ranks read different content, of the identities [0-9a-f]{64} and"):
            executor.load_adapter(1, str(tmp_path / "b"))
        for slot in (1, 3):
            executor.drop_adapter(slot)
        executor.load_adapter(0, str(tmp_path / "a"))  # comes after what was ordered before
        assert loaded() == [{"0": facts.identity}] * 2


def test_steps_and_commands_go_on_while_an_adapter_is_read_and_a_read_that_hangs_ends(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a")
    content = tmp_path / "a" / "adapter_model.safetensors"
    content.unlink()
    os.mkfifo(content)  # opening it waits until the other end is opened, too
    asked = msgspec.structs.replace(options(1), control_timeout=2.0)
    with Ranks(asked) as ranks, ThreadPoolExecutor(1) as pool:
        executor = ranks.bring_up().executor
        loading = pool.submit(executor.load_adapter, 0, path)
        before = tokens_of_one_process(3)
        assert [ranks.step().token_ids.tolist() for _ in range(3)] == before
        assert len(executor.control(DescribeEngine())) == 1
        with pytest.raises(HeadraceError) as caught:
            loading.result()
        assert caught.value.failure is not None
        assert caught.value.failure.type == "WaitTimeoutError"
        assert path in caught.value.failure.message
        assert executor.load_adapter(1, adapter(tmp_path / "b")).rank == 4


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ours = os.sched_getaffinity(0)
    with Ranks(options(2)) as ranks:
        ranks.bring_up()
        facts = [answer.facts for answer in ranks.executor.control(DescribeEngine())]
    assert set().union(*(fact["cpus"] for fact in facts)) == ours
    if len(ours) >= 2:
        assert not set(facts[0]["cpus"]) & set(facts[1]["cpus"])
    for fact in facts:
        assert 1 <= int(fact["omp_num_threads"]) <= len(fact["cpus"])
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with Ranks(options(1)) as ranks:
        ranks.bring_up()
        assert ranks.executor.control(DescribeEngine())[0].facts["omp_num_threads"] == "7"


@pytest.mark.parametrize(("num_cores", "num_workers"), [(8, 2), (7, 2), (2, 4), (1, 3), (96, 8)])
def test_shares_cover_all_cores_and_none_is_empty(num_cores: int, num_workers: int) -> None:
    shares = [share(num_cores, rank, num_workers) for rank in range(num_workers)]
    assert {core for part in shares for core in part} == set(range(num_cores))
    assert all(shares)
    if num_cores >= num_workers:
        assert sum(map(len, shares)) == num_cores


def test_idle_workers_use_no_processor_time() -> None:
    with Ranks(options(2)) as ranks:
        ranks.bring_up()
        ranks.step()
        processes = [psutil.Process(), *(psutil.Process(ranks.pid(rank)) for rank in range(2))]

        def used_s() -> float:
            return sum(sum(process.cpu_times()[:2]) for process in processes)

        def rests() -> bool:
            before_s = used_s()
            time.sleep(0.5)
            return used_s() - before_s <= 0.01  # one tick of the kernel's clock

        wait_until(rests, 30, "coming to rest")


@pytest.mark.system
def test_two_executors_started_at_the_same_moment_do_not_collide() -> None:
    before = leftovers()
    with Ranks(options(2), is_alone=False) as first, Ranks(options(2), is_alone=False) as second:
        threads = [threading.Thread(target=ranks.bring_up) for ranks in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for expected in tokens_of_one_process(4):
            for ranks in (first, second):
                assert ranks.step().token_ids.tolist() == expected
    wait_until_nothing_is_left(before)


@pytest.mark.system
def test_starting_and_stopping_again_and_again_leaves_nothing() -> None:
    before = leftovers()
    for how_far in ("start", "describe", "up", "step", "in flight"):
        with Ranks(options(2)) as ranks:
            if how_far == "describe":
                ranks.executor.describe(lambda phase: None)
            elif how_far != "start":
                ranks.bring_up()
            if how_far == "step":
                ranks.step()
            elif how_far == "in flight":
                ranks.submit()
    wait_until_nothing_is_left(before)


def test_lagging_workers_are_named_in_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.executor.placement.worker_group.SLOW_AFTER_S", 0.2)
    phases: list[str] = []
    done = threading.Event()

    def report(phase: str) -> None:
        phases.append(phase)
        if phase == "wait for worker 1 (load weights)":
            done.set()

    with Ranks(options(2, rank=1, phase="load", how="hang")) as ranks:
        failed: list[str] = []

        def start() -> None:
            try:
                ranks.bring_up(report)
            except EngineStartError as error:
                failed.append(str(error))

        thread = threading.Thread(target=start)
        thread.start()
        assert done.wait(60)
        os.kill(ranks.pid(1), 9)
        thread.join()
    assert "worker 1" in failed[0]
    assert phases[-1] == "wait for worker 1 (load weights)"
    assert "load weights" in phases[:-1]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, "makes 2 ranks, and .*=uni runs one"),
        ({"step_timeout": 5.0}, "step_timeout=5.0 cannot apply"),
        ({"worker_cls": "a:B"}, "worker_cls=a:B cannot apply"),
        ({"distributed_executor_backend": "ipi"}, "it must be uni, mp,.* or module:Class"),
    ],
)
def test_options_that_contradict_each_other_are_refused(asked: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        load_executor(Options(**asked))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("worker_cls", "words"),
    [
        (
            "no_such_module:Rank",
            "worker_cls=no_such_module:Rank cannot be loaded: ModuleNotFoundError: No module named",
        ),
        (
            "null_rank:NoSuchClass",
            "cannot be loaded: AttributeError: module 'null_rank' has no attribute 'NoSuchClass'",
        ),
        ("nonsense", "worker_cls is 'nonsense'; it must name a class, as module:Class"),
    ],
)
def test_a_worker_class_that_cannot_be_loaded_is_one_sentence(worker_cls: str, words: str) -> None:
    asked = Options(model="null", worker_cls=worker_cls, distributed_executor_backend="mp")
    with Ranks(asked) as ranks, pytest.raises(EngineStartError) as caught:
        ranks.bring_up()
    assert words in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_class_named_as_vllm_does_is_found() -> None:
    asked = Options(model="null", worker_cls="null_rank.NullRank", distributed_executor_backend="mp")
    with Ranks(asked) as ranks:
        assert ranks.executor.describe(lambda phase: None).architecture == "NullForCausalLM"


def test_workers_that_read_different_models_are_refused() -> None:
    with Ranks(options(2)) as ranks:
        found = ranks.executor.describe(lambda phase: None)
        with pytest.raises(ModelError, match="worker 0 read num_layers 1 from the model, and worker 1 read 2"):
            check_equal([found, type(found)(**{**_fields(found), "num_layers": 2})], "worker")


def _fields(struct: object) -> dict[str, object]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}  # type: ignore[attr-defined]


def test_auto_is_mp_for_more_than_one_rank() -> None:
    executor = load_executor(options(2).__class__(**{**_fields(options(2)), "distributed_executor_backend": "auto"}))  # type: ignore[arg-type]
    executor.stop()
    assert isinstance(executor, MultiprocExecutor)
