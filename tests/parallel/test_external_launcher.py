"""`distributed_executor_backend="external_launcher"`: every rank that torchrun starts runs the same script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from multiproc_parts import HERE

from headrace import LLM, OptionError, SamplingParams
from headrace.core.engine.engine import load_executor
from headrace.core.options.engine_options import Options

SCRIPT = """
import json, os, sys, time
from headrace import LLM, SamplingParams
model, out, tp_size, pp_size, worker_cls = sys.argv[1:]
rank = int(os.environ["RANK"])
prompts = json.loads(open(out + ".prompts").read())
with LLM(model, tensor_parallel_size=int(tp_size), pipeline_parallel_size=int(pp_size), dtype="float32",
         distributed_executor_backend="external_launcher", skip_tokenizer_init=True, max_model_len=128,
         max_num_seqs=3, seed=7, worker_cls=worker_cls, num_gpu_blocks_override=100) as llm:
    answers = []
    for temperature in (0.0, 1.0):
        time.sleep(0.3 * rank)  # ranks need not call at the same moment
        params = SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True, detokenize=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers += [list(output.outputs[0].token_ids) for output in outputs]
open(f"{out}.{rank}", "w").write(json.dumps(answers))
"""


@pytest.mark.system
@pytest.mark.parametrize(
    ("tp_size", "pp_size"),
    [(1, 2), pytest.param(2, 1, marks=pytest.mark.system), pytest.param(2, 2, marks=pytest.mark.system)],
)
@pytest.mark.parametrize("worker_cls", ["auto", pytest.param("gpu_parts:GpuOnCpu", marks=pytest.mark.system)])
def test_every_rank_gets_the_tokens_of_a_single_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker_cls: str, tp_size: int, pp_size: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", HERE)
    model, out, script = tmp_path / "model", tmp_path / "out", tmp_path / "script.py"
    tiny_models.save("qwen3", model)
    script.write_text(SCRIPT)
    prompts = [[5 + index, 6, 7, 8] * (1 + 3 * index) for index in range(6)]
    Path(f"{out}.prompts").write_text(json.dumps(prompts))
    num_ranks = tp_size * pp_size
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += [f"--log-dir={tmp_path}/logs", str(script), str(model), str(out), str(tp_size), str(pp_size), worker_cls]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    by_rank = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(num_ranks)]
    expected = []
    common: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 3}
    with LLM(str(model), in_process=True, **common, seed=7) as llm:
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True, detokenize=False)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            expected += [list(output.outputs[0].token_ids) for output in outputs]
    assert by_rank == [expected] * num_ranks


@pytest.mark.parametrize(
    ("environment", "changes", "said"),
    [
        ({}, {}, "needs RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment"),
        ({"WORLD_SIZE": "4"}, {"tensor_parallel_size": 2}, "tensor_parallel_size=2, and the launcher started 4 ranks"),
        (
            {"WORLD_SIZE": "2"},
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "tensor_parallel_size=2 times pipeline_parallel_size=2 is 4, and the launcher started 2 ranks",
        ),
    ],
)
def test_a_launch_that_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], changes: dict[str, int], said: str
) -> None:
    if environment:
        environment = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **environment}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=said):
        load_executor(Options(distributed_executor_backend="external_launcher", **changes))  # type: ignore[arg-type]
