"""Scripts in the style of vLLM's basic examples, written from its documented API: only the import differs.

Each runs as a program of its own with an engine of its own: in every run of the tests with one that computes nothing,
and as a system test with a model. test_habits.py has the calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from http_server import HERE
from null_with_tokenizer import BACKEND, VOCAB_SIZE
from thinned import every

SMALL = {"max_model_len": 256, "num_gpu_blocks_override": 64}
TINY: dict[str, Any] = {"dtype": "float32", **SMALL}
NULL: dict[str, Any] = {"distributed_executor_backend": BACKEND, "hf_overrides": {"vocab_size": VOCAB_SIZE}, **SMALL}
NEED_A_MODEL = ("profiling", "a logits processor of its own")
SCRIPTS = {
    "generate and reset": """
from vllm import LLM, EngineArgs, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
prompts = ["Hello, my name is", "The capital of France is"]
llm = LLM(model=MODEL, **SETTINGS)
outputs = llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8))
for output in outputs:
    print(f"{output.prompt!r}: {output.outputs[0].text!r}")
assert [output.prompt for output in outputs] == prompts
llm.reset_prefix_cache()
del llm
cleanup_dist_env_and_memory()
llm = LLM.from_engine_args(EngineArgs(model=MODEL, **SETTINGS))
assert len(llm.generate(prompts, SamplingParams(max_tokens=2))) == 2
""",
    "engine arguments from a command line": """
from vllm import LLM, EngineArgs
from vllm.utils import FlexibleArgumentParser
parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
parser.set_defaults(model=MODEL)
args = vars(parser.parse_args(ARGUMENTS))
llm = LLM(**args)
params = llm.get_default_sampling_params()
params.max_tokens = 4
assert llm.llm_engine.model_config.max_model_len == SETTINGS["max_model_len"]
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
    "conversations": """
from vllm import LLM, SamplingParams
llm = LLM(model=MODEL, **SETTINGS)
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens, sampling_params.temperature, sampling_params.top_p = 4, 0.5, 0.9
conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write an essay about water."},
]
(output,) = llm.chat(conversation, sampling_params, use_tqdm=False)
assert output.prompt and output.outputs[0].token_ids
outputs = llm.chat([conversation] * 3, sampling_params, use_tqdm=True)
assert [each.prompt for each in outputs] == [output.prompt] * 3
plain = "{% for message in messages %}{{ message.content }};{% endfor %}"
(other,) = llm.chat(conversation[:1], sampling_params, use_tqdm=False, chat_template=plain)
assert other.prompt == "You are a helpful assistant;"
""",
    "profiling": """
import glob, tempfile
from vllm import LLM, SamplingParams
folder = tempfile.mkdtemp()
llm = LLM(model=MODEL, profiler_config={"profiler": "torch", "torch_profiler_dir": folder}, **SETTINGS)
llm.start_profile()
llm.generate("The future of AI is", SamplingParams(max_tokens=4))
llm.stop_profile()
assert glob.glob(folder + "/*")
""",
    "what a model does not do is told by name": """
from vllm import LLM
llm = LLM(model=MODEL, runner="generate", **SETTINGS)
for name, given in (("classify", ["Hello"]), ("reward", ["Hello"]), ("score", ["Hello"])):
    try:
        getattr(llm, name)(given, *([given] if name == "score" else []))
    except ValueError as error:
        assert "only supported for pooling models" in str(error), error
    else:
        raise AssertionError(name)
try:
    LLM(model=MODEL, runner="pooling", convert="classify", **SETTINGS)
except ValueError as error:
    assert "convert=classify" in str(error) and "has none" in str(error), error
""",
    "a logits processor of its own": """
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
class OnlyToken(LogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, device, is_pin_memory: bool):
        self.wanted: dict[int, int] = {}
    def is_argmax_invariant(self) -> bool:
        return False
    def update_state(self, batch_update: BatchUpdate | None):
        process_dict_updates(self.wanted, batch_update, lambda params, _, __: (params.extra_args or {}).get("only"))
    def apply(self, logits):
        for row, token in self.wanted.items():
            kept = logits[row, token].clone()
            logits[row] = float("-inf")
            logits[row, token] = kept
        return logits
if __name__ == "__main__":
    llm = LLM(model=MODEL, logits_processors=[OnlyToken], **SETTINGS)
    plain = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    only = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, extra_args={"only": 9})
    told = [list(each.outputs[0].token_ids) for each in llm.generate(["a", "a", "a"], [only, plain, only])]
    assert told[0] == told[2] == [9, 9, 9] != told[1], told
""",
    "a batch file": """
import json, subprocess, sys, tempfile
folder = tempfile.mkdtemp()
bodies = [("a", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]})]
bodies += [("b", "/v1/completions", {"prompt": "The capital"})]
with open(folder + "/input.jsonl", "w") as file:
    for custom_id, url, body in bodies:
        line = {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": MODEL, "max_tokens": 4, **body}}
        print(json.dumps(line), file=file)
options = ["-i", folder + "/input.jsonl", "-o", folder + "/output.jsonl", "--model", MODEL, *ARGUMENTS]
subprocess.run([sys.executable, "-m", "headrace.entrypoints.openai.run_batch", *options], check=True)
lines = [json.loads(line) for line in open(folder + "/output.jsonl")]
assert [line["custom_id"] for line in lines] == ["a", "b"]
assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in lines)
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


@pytest.mark.parametrize("name", every(3, [name for name in SCRIPTS if name not in NEED_A_MODEL]))
def test_a_script_runs_unchanged(name: str, tmp_path: Path) -> None:
    done = run(SCRIPTS[name], "null", NULL, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.system
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_unchanged_with_a_model(name: str, folder: Path, tmp_path: Path) -> None:
    done = run(SCRIPTS[name], str(folder), TINY, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.system
def test_a_script_whose_classes_an_engine_loads_starts_no_engine_there(folder: Path, tmp_path: Path) -> None:
    script = SCRIPTS["a logits processor of its own"].replace('if __name__ == "__main__":', "if True:")
    done = run(script, str(folder), TINY, tmp_path)
    assert done.returncode != 0
    assert 'put its calls under if __name__ == "__main__"' in done.stderr


def run(script: str, model: str, settings: dict[str, Any], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    arguments = []
    for name, value in settings.items():
        arguments += [f"--{name.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)]
    file = tmp_path / "script.py"
    file.write_text(f"MODEL, SETTINGS, ARGUMENTS = {model!r}, {settings!r}, {arguments!r}\n{script}")
    command = [sys.executable, "-m", "headrace.as_vllm", str(file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
