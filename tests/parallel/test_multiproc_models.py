"""Two tensor-parallel engines of a real (tiny) model, side by side on one host."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models

from headrace import LLM, SamplingParams
from headrace.ipc.failure import EngineDeadError

PROMPTS = [{"prompt_token_ids": [5 + n, 6, 7, n]} for n in range(4)]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def start(folder: Path, **options: Any) -> LLM:
    return LLM(
        str(folder), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=64, max_num_seqs=8, **options
    )


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.system
def test_two_engines_do_not_collide_and_a_stopped_worker_of_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step each rank waits for the other: the one that only waits must not be blamed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tiny_models.save("llama", tmp_path)
    others = psutil.Process().children()  # such as what renders chat templates for all tests of this process
    with ExitStack() as stack:
        expected = tokens(stack.enter_context(start(tmp_path, in_process=True)))
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(start, tmp_path, tensor_parallel_size=2, step_timeout=1.0) for _ in range(2)]
            first, second = (stack.enter_context(each.result()) for each in both)
            assert [each.result() for each in [pool.submit(tokens, llm) for llm in (first, second)]] == [expected] * 2
        cores = [p for p in psutil.Process().children() if p not in others and len(p.children()) == 2]
        assert len(cores) == 2
        victim = max(cores[0].children(), key=lambda process: (process.create_time(), process.pid))
        victim.send_signal(signal.SIGSTOP)
        outcomes = []
        for llm in (first, second):
            try:
                outcomes.append(tokens(llm))
            except EngineDeadError as error:
                outcomes.append(error)
        (error,) = (outcome for outcome in outcomes if isinstance(outcome, EngineDeadError))
        assert expected in outcomes
        assert f"worker 1 (pid {victim.pid}) did not finish its part of a step within 1 s (step_timeout)" in str(error)
        assert "worker 1 is stopped by a signal or a debugger" in str(error)
