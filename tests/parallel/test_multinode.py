"""An engine whose ranks live on two hosts: here two sets of processes on loopback, which share nothing but sockets."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import create_server
from typing import Any

import msgspec
import psutil
import pytest
import tiny_models
from multiproc_parts import HERE, bring_up, options
from patience import still_alive, wait_until, within
from plan_maker import PlanMaker
from source_tree import PYTHONPATH
from test_multiproc import adapter, tokens_of_one_process

from headrace import LLM, SamplingParams
from headrace.core.engine.engine import load_executor
from headrace.core.options.engine_options import Options
from headrace.executor.placement.cluster_proof import KEY_VARIABLE
from headrace.executor.placement.multinode import MultiNodeExecutor
from headrace.executor.placement.ray_cluster import RayExecutor
from headrace.ipc.control import DescribeEngine
from headrace.ipc.failure import EngineDeadError, EngineStartError, Failure, HeadraceError, OptionError

FAILS_WITHIN_S = 5.0


@pytest.fixture(autouse=True)
def workers_find_the_null_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", HERE)


def start_node(port: int, *flags: str, **environment: str) -> subprocess.Popen[str]:
    """`engine-core` as the second of two hosts."""
    command = [
        sys.executable,
        "-m",
        "headrace.core.process.daemon",
        "--nnodes=2",
        "--node-rank=1",
        f"--master-port={port}",
    ]
    return subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})


def null_flags(asked: Options) -> list[str]:
    turns = asked.max_parallel_loading_workers
    return [
        *([] if turns is None else [f"--max-parallel-loading-workers={turns}"]),
        "--model=null",
        "--skip-tokenizer-init",
        "--distributed-executor-backend=mp",
        f"--worker-cls={asked.worker_cls}",
        f"--tensor-parallel-size={asked.tensor_parallel_size}",
        f"--pipeline-parallel-size={asked.pipeline_parallel_size}",
        f"--step-timeout={asked.step_timeout}",
        f"--max-num-seqs={asked.max_num_seqs}",
        f"--node-join-timeout={asked.node_join_timeout}",
        f"--hf-overrides={json.dumps(asked.hf_overrides)}",
    ]


def on_two_nodes(asked: Options, **changes: Any) -> Options:
    values = {"nnodes": 2, "master_port": 0, "node_join_timeout": 30.0, **changes}
    return msgspec.structs.replace(asked, **values)


class Cluster:
    """A core's executor and the program of the other host, with ranks that compute nothing."""

    def __init__(self, asked: Options) -> None:
        self.options, self.failures, self.maker = asked, list[Failure](), PlanMaker(block_size=16)
        self.executor = MultiNodeExecutor(asked)
        self.executor.watch(self.failures.append)
        self.node = start_node(self.executor.address[1], *null_flags(asked))

    def step(self) -> list[int]:
        if not self.maker.tokens:
            self.maker.enter(0, [5, 6, 7])
        self.maker.compute(0)
        self.executor.submit(self.maker.plan())
        self.maker.tokens[0].append(0)
        return self.executor.collect().token_ids.tolist()

    def end_of_node(self) -> tuple[int, str]:
        _, log = self.node.communicate(timeout=within(FAILS_WITHIN_S))
        return self.node.returncode, log


@contextmanager
def cluster(asked: Options) -> Iterator[Cluster]:
    before = set(psutil.Process().children(recursive=True))
    running = Cluster(on_two_nodes(asked))
    try:
        yield running
    finally:
        running.executor.stop()
        if running.node.poll() is None:
            wait_until(lambda: running.node.poll() is not None, FAILS_WITHIN_S, "the end of the node")
        left = {child for child in psutil.Process().children(recursive=True) if child.is_running()} - before
        assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.system)])
def test_steps_and_adapters_reach_both_nodes(tp_size: int, pp_size: int, tmp_path: Path) -> None:
    with cluster(options(tp_size, pp_size)) as running:
        bring_up(running.executor, running.options)
        assert [running.step() for _ in range(5)] == tokens_of_one_process(5)
        pids = [answer.facts["pid"] for answer in running.executor.control(DescribeEngine())]
        assert len(set(pids)) == 2
        assert psutil.Process(pids[1]).parent().pid == running.node.pid, "the second rank is the other node's"
        facts = running.executor.load_adapter(5, adapter(tmp_path / "a"))
        loaded = [answer.facts["adapters"] for answer in running.executor.control(DescribeEngine())]
        assert loaded == [{"5": facts.identity}] * 2
        with pytest.raises(HeadraceError, match="missing"):
            running.executor.load_adapter(0, str(tmp_path / "missing"))
        running.step()
    assert running.end_of_node()[0] == 0
    assert running.failures == []


@pytest.mark.parametrize("where", [pytest.param("rank", marks=pytest.mark.system), "node"])
def test_a_kill_on_the_other_node_is_told_to_both_at_once(where: str) -> None:
    with cluster(options()) as running:
        bring_up(running.executor, running.options)
        running.step()
        pid = running.executor.control(DescribeEngine())[1].facts["pid"] if where == "rank" else running.node.pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: bool(running.failures), FAILS_WITHIN_S, "hearing of it")
        with pytest.raises(
            EngineDeadError, match="worker 1 .*killed by signal 9" if where == "rank" else "node 1 at .* is gone"
        ):
            running.step()
        if where == "rank":
            status, log = running.end_of_node()
            assert status == 70
            assert "killed by signal 9" in log


def test_a_rank_that_cannot_load_is_the_cause_on_both_nodes() -> None:
    with cluster(options(rank=1, phase="load", how="exception")) as running:
        with pytest.raises(EngineStartError, match="rank 1 was told to fail in load"):
            bring_up(running.executor, running.options)
        status, log = running.end_of_node()
        assert status == 70
        assert "rank 1 was told to fail in load" in log


@pytest.mark.system
def test_a_node_ends_with_a_core_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, test_multinode as t\n"
        "running = t.Cluster(t.on_two_nodes(t.options()))\n"
        "t.bring_up(running.executor, running.options)\n"
        "print(running.node.pid, flush=True)\n"
        "sys.stdin.read()"
    )
    core = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )
    assert core.stdout is not None
    node = psutil.Process(int(core.stdout.readline()))
    of_both = [*psutil.Process(core.pid).children(recursive=True)]
    assert len(of_both) >= 3, "two ranks and a node"
    core.kill()
    core.wait()
    assert not still_alive([node, *of_both], FAILS_WITHIN_S)


def test_a_node_that_never_comes_is_named() -> None:
    executor = MultiNodeExecutor(on_two_nodes(options(), node_join_timeout=0.3))
    try:
        with pytest.raises(EngineStartError, match=r"1 of 2 nodes are here after 0.3 s .* node_rank 1 is missing"):
            executor.describe(lambda phase: None)
    finally:
        executor.stop()


@pytest.mark.parametrize(
    ("flags", "environment", "said"),
    [
        (["--max-num-seqs=9"], {}, "max_num_seqs is 8 at the engine core and 9 at the node"),
        pytest.param(["--node-rank=2"], {}, "node_rank 2 is not one of 1 to 1", marks=pytest.mark.system),
        pytest.param(
            [],
            {KEY_VARIABLE: "another"},
            f"the node's {KEY_VARIABLE} is not the engine core's",
            marks=pytest.mark.system,  # tests/parallel/test_node_join.py has the other keys
        ),
    ],
)
def test_a_node_that_does_not_fit_is_refused_and_the_core_waits_on(
    flags: list[str], environment: dict[str, str], said: str
) -> None:
    asked = on_two_nodes(options())
    executor = MultiNodeExecutor(asked)
    describing = threading.Thread(target=lambda: _ignore(EngineStartError, lambda: executor.describe(lambda p: None)))
    describing.start()
    try:
        node = start_node(executor.address[1], *null_flags(asked), *flags, **environment)
        _, log = node.communicate(timeout=within(20))
        assert node.returncode == 1
        assert said in log
        assert describing.is_alive()
        right = start_node(executor.address[1], *null_flags(asked))
        wait_until(lambda: not describing.is_alive(), 20, "the description, now that the right node is here")
    finally:
        executor.stop()
    assert right.wait(FAILS_WITHIN_S) == 0


def _ignore(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return


def test_a_node_without_a_core_gives_up_with_a_sentence() -> None:
    node = start_node(1, *null_flags(options()), "--node-join-timeout=0.5")
    _, log = node.communicate(timeout=within(20))
    assert node.returncode == 1
    assert "node 1 cannot reach the engine core at 127.0.0.1:1 after 0.5 s" in log


def test_a_node_of_no_cluster_is_told_so_at_once() -> None:
    node = start_node(1, *null_flags(options()), "--nnodes=1", "--node-rank=5")
    _, log = node.communicate(timeout=within(20))
    assert node.returncode == 1
    assert "node_rank=5 needs nnodes above 1: set nnodes" in log


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensor_parallel_size": 3, "nnodes": 2}, "makes 3 ranks, which 2 nodes"),
        ({"nnodes": 2, "node_rank": 1}, "start it with engine-core"),
        ({"node_rank": 5}, "node_rank=5 needs nnodes above 1: set nnodes"),
        (
            {"nnodes": 2, "distributed_executor_backend": "uni", "tensor_parallel_size": 1, "worker_cls": "auto"},
            "needs distributed_executor",
        ),
        ({"nnodes": 2, "master_addr": "10.1.2.3"}, f"set {KEY_VARIABLE} to the same secret"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        load_executor(msgspec.structs.replace(options(), **changes))


@pytest.mark.system
def test_ranks_that_ray_places_answer_as_one_process_does(tmp_path: Path) -> None:
    tiny_models.save("llama3", tmp_path)
    common: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    prompt = [5, 6, 7, 8, 9] * 6
    with LLM(str(tmp_path), **common) as llm:
        expected = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    placed = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", "max_parallel_loading_workers": 1}
    with LLM(str(tmp_path), **common, **placed) as llm:
        assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == expected
        workers = [process for process in psutil.Process().children(recursive=True) if _is_worker(process)]
        assert len(workers) == 2
        workers[1].kill()
        with pytest.raises(EngineDeadError, match=r"worker . .*killed by signal 9"):
            llm.generate(prompt, params, use_tqdm=False)
    assert not still_alive(workers, FAILS_WITHIN_S)


def _is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "headrace.executor.placement.worker" in process.cmdline()
    return False


@pytest.mark.system
def test_ray_without_room_says_how_much_there_is() -> None:
    asked = msgspec.structs.replace(options(64), distributed_executor_backend="ray", node_join_timeout=1.0)
    executor = RayExecutor(asked)
    try:
        with pytest.raises(
            EngineStartError, match=r"did not place 64 ranks of one CPU each within 1 s .* has [0-9]+ in all"
        ):
            executor.describe(lambda phase: None)
    finally:
        executor.stop()


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"tensor_parallel_size": 2}, id="tp", marks=pytest.mark.system),
        pytest.param({"pipeline_parallel_size": 2}, id="pp"),
    ],
)
def test_two_nodes_answer_as_one_process_does(sizes: dict[str, int], tmp_path: Path) -> None:
    tiny_models.save("qwen3", tmp_path)
    common: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128}
    prompts = [[5, 6, 7, 8, 9] * 6, [11, 12]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)

    def tokens(llm: LLM) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    with LLM(str(tmp_path), **common) as llm:
        expected = tokens(llm)
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    flags += [f"--model={tmp_path}", "--dtype=float32", "--skip-tokenizer-init", "--max-model-len=128"]
    node = start_node(port, *flags)
    with LLM(str(tmp_path), **common, **sizes, nnodes=2, master_port=port) as llm:
        assert tokens(llm) == expected
    assert node.wait(within(10)) == 0
