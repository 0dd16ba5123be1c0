"""Scripts in the style of vLLM's basic examples, written from its documented API: only the import differs.

Each runs as a program of its own with an engine of its own, so they are system tests; test_habits.py has the calls.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system
SETTINGS = "dtype='float32', max_model_len=128, num_gpu_blocks_override=64"
SCRIPTS = {
    "generate and reset": """
from vllm import LLM, SamplingParams
prompts = ["Hello, my name is", "The capital of France is"]
llm = LLM(model=MODEL, **SETTINGS)
outputs = llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8))
for output in outputs:
    print(f"{output.prompt!r}: {output.outputs[0].text!r}")
assert [output.prompt for output in outputs] == prompts
llm.reset_prefix_cache()
""",
    "engine arguments from a command line": """
from vllm import LLM, EngineArgs
from vllm.utils import FlexibleArgumentParser
parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
parser.set_defaults(model=MODEL)
args = vars(parser.parse_args(["--dtype", "float32", "--max-model-len", "128", "--num-gpu-blocks-override", "64"]))
llm = LLM(**args)
params = llm.get_default_sampling_params()
params.max_tokens = 4
assert llm.llm_engine.model_config.max_model_len == 128
assert len(llm.generate(["a", "b"], params)) == 2
""",
    "several turns of a conversation, and metrics": """
from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram
llm = LLM(model=MODEL, disable_log_stats=False, **SETTINGS)
conversation = [{"role": "user", "content": "Hi"}]
for turn in range(2):
    answer = llm.chat(conversation, SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].text
    conversation += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And?"}]
kinds = {type(metric) for metric in llm.get_metrics()}
assert {Counter, Gauge, Histogram} <= kinds
""",
    "streaming": """
import asyncio
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=MODEL, **SETTINGS))
    params = SamplingParams(max_tokens=8, output_kind=RequestOutputKind.DELTA, ignore_eos=True)
    num_tokens = 0
    async for output in engine.generate(request_id="1", prompt="The future is", sampling_params=params):
        num_tokens += len(output.outputs[0].token_ids)
    assert num_tokens == 8
    engine.shutdown()
asyncio.run(main())
""",
    "step by step": """
from vllm import EngineArgs, LLMEngine, SamplingParams
engine = LLMEngine.from_engine_args(EngineArgs(model=MODEL, **SETTINGS))
for index, prompt in enumerate(["A robot may not", "To be or not"]):
    engine.add_request(str(index), prompt, SamplingParams(temperature=0, max_tokens=4))
finished = []
while engine.has_unfinished_requests():
    finished += [output.request_id for output in engine.step() if output.finished]
assert sorted(finished) == ["0", "1"]
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_unchanged(name: str, folder: Path) -> None:
    head = f"import headrace.as_vllm\nMODEL, SETTINGS = {str(folder)!r}, dict({SETTINGS})\n"
    command = [sys.executable, "-c", head + SCRIPTS[name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
