"""Workers whose GPU is the CPU: they answer like one process, capture while idle, and fail with the cause."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from socket import create_server
from typing import Any

import pytest
import tiny_models
from multiproc_parts import HERE
from test_multinode import start_node

from headrace import LLM, SamplingParams
from headrace.core.options.engine_options import Options
from headrace.executor.parallel.rank_place import PeerError
from headrace.executor.placement.base import Executor
from headrace.executor.placement.worker import Worker
from headrace.executor.placement.worker_messages import STEP, SharedMemory, StartWorker
from headrace.ipc.failure import EngineDeadError
from headrace.ipc.transport.ring import RingLayout, RingReader, RingWriter, lay_out_ring
from headrace.ipc.wait import Deadline

PROMPTS = [{"prompt_token_ids": [5 + n, 6, 7, n]} for n in range(4)]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 4,
    "max_model_len": 64,
    "in_process": True,
}


def start(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **(OPTIONS | options))


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.system
def test_workers_of_two_hosts_answer_like_one_process_and_name_the_one_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", HERE)
    tiny_models.save("llama", tmp_path)
    ranks: dict[str, Any] = {"worker_cls": "gpu_parts:GpuOnCpu", "pipeline_parallel_size": 2}
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    asked = {
        name: value for name, value in (OPTIONS | ranks).items() if name not in ("in_process", "skip_tokenizer_init")
    }
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items()]
    node = start_node(port, f"--model={tmp_path}", "--skip-tokenizer-init", *flags)
    with start(tmp_path, **ranks, nnodes=2, master_port=port) as llm:
        found = [tokens(llm) for _ in range(2)]
        workers = llm.describe_engine().workers
        assert [facts["sums"] for facts in workers] == ["process group"] * 2
        assert workers[0]["graphs"] == workers[1]["graphs"] >= 3, "captured while nothing ran"
        os.kill(workers[1]["pid"], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"worker 1 \(pid {workers[1]['pid']}\) was killed by signal 9"):
            tokens(llm)
    assert node.wait(60) == 70, "it ends with the engine"
    with start(tmp_path, device="cpu") as llm:
        assert found == [tokens(llm)] * 2


class SlowDevice:
    """An executor as far as a worker looks at it, whose device does not come to an end."""

    max_steps_in_flight = 2

    def has_result(self) -> bool:
        return False


@pytest.fixture
def ring() -> Iterator[tuple[RingWriter, RingReader]]:
    fd, layout = os.memfd_create("test"), RingLayout.holding(64, 4, 1)
    lay_out_ring(fd, layout)
    ends = RingWriter(fd, layout), RingReader(fd, layout, 0)
    yield ends
    for end in ends:
        end.close()
    os.close(fd)


def worker(**options: Any) -> Worker:
    start = StartWorker(
        schema_hash="", options=Options(**options), rank=0, memory=SharedMemory(0, 0, 0), first_rank=0, num_ranks=1,
        began_s=0.0,
    )  # fmt: skip
    return Worker(None, start)


def test_a_device_that_computes_is_given_the_next_step_and_no_third(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
    device: Executor = SlowDevice()  # type: ignore[assignment]
    for data in (b"second", b"third"):
        writer.put(data, Deadline(1.0), STEP)
    assert worker()._next(device, reader, 1) == (STEP, b"second")
    reader.finished(2)
    assert writer.behind(writer.last - 1) == [0], "taken, and still under way"
    with pytest.raises(PeerError, match=r"its device did not finish a step within 0\.3 s"):
        worker(step_timeout=0.1)._next(device, reader, 2)
    assert reader.take(Deadline(0)) == (STEP, b"third")


def test_a_step_that_waits_for_another_rank_for_too_long_says_so(ring: tuple[RingWriter, RingReader]) -> None:
    with pytest.raises(PeerError, match=r"rank 0 cannot go on: its device did not finish a step within 0\.3 s"):
        worker(step_timeout=0.1)._next(SlowDevice(), ring[1], 1)
