"""vLLM's module names: each row of the table imports, gives the same classes, and explains what is not there."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import random
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import numpy as np
import pytest
import torch
from thinned import pairs

import headrace
from headrace.core.options.document import KEYWORDS_FILE, keywords_module
from headrace.core.options.parsing import parse_options
from headrace.core.options.values import option_specs
from headrace.core.options.vllm_options import taken_options
from headrace.frontend.vllm import engine_keywords
from headrace.frontend.vllm.modules import MODULES

IMPORTS = Path(__file__).with_name("imports_of_vllm.txt")
"""`module name`, below `vllm`: all that the examples and documents of 0.33 import from it."""


@pytest.mark.parametrize("row", sorted(MODULES))
def test_a_row_imports_and_each_name_is_there_or_explained(row: str) -> None:
    module = importlib.import_module(f"headrace.{row}")
    for name in MODULES[row]:
        if name in module.__all__:
            assert getattr(module, name) is not None
        elif name[0].isupper():
            with pytest.raises(headrace.InvalidRequestError, match=f"^{name} is refused: .{{10,}}"):
                getattr(module, name)("some", argument=1)
            assert not isinstance(module, getattr(module, name))
        else:
            with pytest.raises(ImportError, match=f"has no {name!r}: .{{10,}}"):
                getattr(module, name)
    with pytest.raises(AttributeError, match=rf"headrace\.{row} has no 'NoSuchName': .{{10,}}"):
        _ = module.NoSuchName
    with pytest.raises(ImportError, match=rf"^Headrace has no 'headrace\.{row}\.NoSuchName': .{{10,}}"):
        exec(f"from headrace.{row} import NoSuchName")


def test_names_are_the_same_objects_everywhere() -> None:
    from headrace.engine.arg_utils import EngineArgs
    from headrace.entrypoints.llm import LLM
    from headrace.inputs import TokensPrompt
    from headrace.utils import FlexibleArgumentParser
    from headrace.v1.engine.async_llm import AsyncLLM

    assert (LLM, AsyncLLM, EngineArgs) == (headrace.LLM, headrace.AsyncLLM, headrace.EngineArgs)
    assert TokensPrompt is headrace.TokensPrompt
    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--max_model_len", "64"])
    assert EngineArgs.from_cli_args(parsed).max_model_len == 64


# tests/v1/sample/test_logprobs.py, tests/test_logprobs.py and others import these where vLLM defines them.
def test_config_and_type_names_are_where_vllm_defines_them() -> None:
    from headrace import config, logprobs
    from headrace.config.cache import CacheConfig
    from headrace.config.model import LogprobsMode, ModelConfig
    from headrace.config.scheduler import SchedulerConfig
    from headrace.config.vllm import VllmConfig
    from headrace.tokenizers.registry import cached_tokenizer_from_config

    assert (config.CacheConfig, config.ModelConfig) == (CacheConfig, ModelConfig)
    assert (config.SchedulerConfig, config.VllmConfig) == (SchedulerConfig, VllmConfig)
    assert config.LogprobsMode is LogprobsMode
    assert headrace.tokenizers.cached_tokenizer_from_config is cached_tokenizer_from_config
    for mode in get_args(LogprobsMode):
        assert parse_options(logprobs_mode=mode).logprobs_mode == mode
    one = {3: headrace.Logprob(-0.5, 1, "a")}
    assert isinstance(one, get_origin(logprobs.LogprobsOnePosition))
    assert isinstance([one], get_origin(get_args(logprobs.SampleLogprobs)[0]))
    assert logprobs.FlatLogprobs in get_args(logprobs.PromptLogprobs)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("platforms.cuda", "describe_engine"),
        ("multimodal.utils", "text alone"),
        ("distributed.kv_transfer.kv_connector.v1", "keeps its cache to itself"),
        ("distributed.device_communicators", "tensor_parallel_size"),
        ("config.speech_to_text", "text alone"),
        ("config.nobody_knows", "describe_engine"),
        ("lora.peft_helper", "an adapter is a LoRARequest"),
        ("ir", "a program of its own"),
        ("transformers_utils.config", "get_tokenizer"),
        ("entrypoints.pooling", "LLM.embed, classify"),
        ("entrypoints.cli.serve", "a program of its own"),
        ("v1.core.sched.output", "a program of its own"),
        ("utils.nobody_knows", "headrace.utils"),
    ],
)
def test_a_module_that_is_not_there_is_told_with_the_reason(name: str, said: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"^Headrace has no 'headrace\..*{said}"):
        importlib.import_module(f"headrace.{name}")
    parent, _, last = f"headrace.{name}".rpartition(".")
    with pytest.raises(ModuleNotFoundError, match=rf"^Headrace has no 'headrace\..*{said}"):
        exec(f"from {parent} import {last}")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'headrace\.nonsense'"):
        importlib.import_module("headrace.nonsense")


def test_a_misspelt_name_is_told_the_nearest() -> None:
    with pytest.raises(ImportError, match=r"'headrace\.engine\.arg_utils\.EngineArg': .*Did you mean EngineArgs\?$"):
        exec("from headrace.engine.arg_utils import EngineArg")
    assert not hasattr(headrace.config, "WatchdogConfig"), "a script may ask"


# tests/samplers/test_beam_search.py, tests/v1/engine/test_output_processor.py
def test_prompts_and_reasons_as_vllms_engines_have_them() -> None:
    from headrace.frontend.request.prompts import parse_prompts
    from headrace.inputs import tokens_input
    from headrace.usage.usage_lib import is_usage_stats_enabled
    from headrace.v1.engine import FinishReason

    (prompt,) = parse_prompts([tokens_input([5, 6], prompt="ab", cache_salt="s")])
    assert (prompt.token_ids, prompt.text, prompt.cache_salt) == ([5, 6], "ab", "s")
    with pytest.raises(headrace.InvalidRequestError, match="'type'"):
        parse_prompts({"type": "embeds", "prompt_token_ids": [5]})
    assert (str(FinishReason.STOP), FinishReason("length")) == ("stop", FinishReason.LENGTH)
    assert not is_usage_stats_enabled()


class ToldWhyNot(Exception):
    pass


@contextlib.contextmanager
def told_why_not() -> Iterator[None]:
    """Raises ToldWhyNot for an ImportError that names what is not there, with the reason."""
    try:
        yield
    except ImportError as error:
        if re.search(r"^(Headrace|headrace[\w.]*) has no '.*': .{10,}", str(error)):
            raise ToldWhyNot from error
        raise


@pytest.mark.parametrize("line", IMPORTS.read_text().splitlines())
def test_a_name_that_vllms_examples_and_documents_import_is_there_or_told(line: str) -> None:
    module, _, name = line.partition(" ")
    with contextlib.suppress(ToldWhyNot), told_why_not():
        exec(f"from headrace{'.' if module else ''}{module} import {name}")


def test_config_objects_are_the_dicts_that_options_take() -> None:
    from headrace.config import CompilationConfig, CompilationMode, ReasoningConfig

    reasoning = ReasoningConfig(reasoning_start_str="<a>", reasoning_end_str="</a>")
    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE)
    options = parse_options(reasoning_config=reasoning, compilation_config=compilation)
    assert options.reasoning_config == {"reasoning_start_str": "<a>", "reasoning_end_str": "</a>"}
    assert (compilation.mode, repr(reasoning)[:16]) == (3, "ReasoningConfig(")
    with pytest.raises(AttributeError, match="was made without 'level'"):
        _ = compilation.level


def test_small_helpers_do_what_they_say(folder: Path) -> None:
    from headrace.config import ModelConfig
    from headrace.tokenizers import cached_tokenizer_from_config
    from headrace.transformers_utils.repo_utils import hf_api
    from headrace.utils.system_utils import set_ulimit

    assert hf_api().library_name == "headrace"
    fields = {"max_model_len": 8, "dtype": "float32", "max_logprobs": 1, "vocab_size": 8, "generation_defaults": {}}
    config = ModelConfig(model=str(folder), served_model_name="m", skip_tokenizer_init=False, **fields)
    assert cached_tokenizer_from_config(config).eos_token_id is not None
    without = ModelConfig(model=str(folder), served_model_name="m", skip_tokenizer_init=True, **fields)
    assert cached_tokenizer_from_config(without) is None
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
        set_ulimit(before[0])
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
        set_ulimit(8)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == before, "it lowers nothing"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_port_and_address_of_helpers_can_be_listened_at() -> None:
    from headrace.utils.network_utils import get_ip, get_open_port

    with socket.socket() as listening:
        listening.bind((get_ip(), get_open_port()))


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=300, check=False)


def test_a_clone_that_is_not_installed_names_what_it_lacks() -> None:
    clone = Path(__file__).parents[2]
    done = run("-S", "-c", f"import sys; sys.path.insert(0, {str(clone)!r}); import headrace.frontend.api.llm")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ModuleNotFoundError: No module named 'headrace.frontend'")


def test_a_script_may_ask_again_for_the_replacement_that_it_runs_under(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import headrace.as_vllm, vllm\nprint(vllm.LLM.__module__)\n")
    done = run("-m", "headrace.as_vllm", str(tmp_path / "script.py"))
    assert done.stdout == "headrace.frontend.api.llm\n", done.stderr


def test_a_script_that_imports_vllm_runs_on_headrace() -> None:
    script = """
import headrace.as_vllm
import vllm, vllm.sampling_params
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
import headrace
assert LLM is headrace.LLM and vllm.SamplingParams is headrace.SamplingParams
assert vllm.sampling_params.SamplingParams is SamplingParams
assert vllm.engine.arg_utils.AsyncEngineArgs is AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry
from vllm.plugins.lora_resolvers.filesystem_resolver import FilesystemResolver
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
assert LoRARequest is headrace.LoRARequest and LoRARequest("sql", 1, "folder").adapter_id == 1
LoRAResolverRegistry.register_resolver("folder", FilesystemResolver("folder"))
assert isinstance(LoRAResolverRegistry.get_resolver("folder"), LoRAResolver)
try:
    from vllm.platforms.cuda import CudaPlatform
except ModuleNotFoundError as error:
    print(error)
import importlib.metadata, importlib.util, headrace.as_vllm
# as lm-eval asks before it uses vLLM
version = importlib.metadata.version("vllm")
assert tuple(map(int, version.split("."))) >= (0, 8, 3) and version == headrace.as_vllm.VLLM_VERSION
assert importlib.metadata.distribution("vllm").metadata["Name"] == "vllm"
assert importlib.metadata.version("msgspec")
assert vllm.__version__ == version and vllm.version.__version__ == version and vllm.__version_tuple__ >= (0, 8, 3)
assert importlib.metadata.packages_distributions()["vllm"] == ["vllm"]
assert importlib.util.find_spec("vllm").name == "vllm" and importlib.util.find_spec("vllm.lora.request")
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, BatchUpdate
assert AdapterLogitsProcessor.__module__.startswith("headrace")
"""
    done = run("-c", script)
    assert done.returncode == 0, done.stderr
    assert "Headrace has no 'vllm.platforms.cuda': a script holds no device" in done.stdout


def test_a_script_is_run_with_its_arguments_and_folder(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = __name__")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside, vllm\nif __name__ == '__main__':\n    print(sys.argv, beside.NAME, vllm.LLM.__module__)"
    )
    done = run("-m", "headrace.as_vllm", str(script), "--flag")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[{str(script)!r}, '--flag'] beside headrace.frontend.api.llm\n"
    assert run("-m", "headrace.as_vllm").stderr.startswith("usage: python -m headrace.as_vllm SCRIPT [ARGUMENTS]")


def test_a_module_is_run_with_its_arguments(tmp_path: Path) -> None:
    package = tmp_path / "tool"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys, vllm; print(sys.argv[1:], __package__, vllm.LLM.__module__)")
    done = run("-m", "headrace.as_vllm", "-m", "tool", "--flag", "x", PYTHONPATH=str(tmp_path))
    assert done.stdout == "['--flag', 'x'] tool headrace.frontend.api.llm\n", done.stderr
    assert run("-m", "headrace.as_vllm", "-m").returncode == 1


STARTS_PROCESSES = """
import multiprocessing, subprocess, sys
import vllm

def name(of, queue):
    queue.put(f"{of} {vllm.LLM.__module__}")

if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=name, args=(method, queue))
        process.start()
        print(queue.get(timeout=120))
        process.join()
    program = "from vllm.sampling_params import SamplingParams; print('program', SamplingParams.__module__)"
    subprocess.run([sys.executable, "-c", program], check=True)
"""


def test_processes_that_a_script_starts_have_vllm_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STARTS_PROCESSES)
    done = run("-u", "-m", "headrace.as_vllm", str(script))
    assert done.returncode == 0, done.stderr
    llm, params = "headrace.frontend.api.llm", "headrace.frontend.request.parameters.sampling_params"
    assert done.stdout.splitlines() == [f"spawn {llm}", f"forkserver {llm}", f"fork {llm}", f"program {params}"]


def test_the_platform_and_vllms_variables_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace import envs
    from headrace.platforms import current_platform
    from headrace.utils.torch_utils import set_random_seed

    assert current_platform.device_type in ("cpu", "cuda")
    assert current_platform.is_cpu() != current_platform.is_cuda_alike()
    assert current_platform.get_device_name()
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    assert (envs.VLLM_USE_V1, envs.VLLM_HOST_IP) == (True, "")
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.2")
    assert envs.VLLM_HOST_IP == "127.0.0.2"
    with pytest.raises(AttributeError, match="this variable of vLLM's does nothing here"):
        _ = envs.VLLM_ATTENTION_BACKEND
    drawn = []
    for _ in range(2):
        set_random_seed(7)
        drawn.append((random.random(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


def test_a_processors_list_becomes_a_tensor_as_vllms_helper_makes_it() -> None:
    from headrace.utils.torch_utils import async_tensor_h2d

    for data in ([1, 2], np.array([1, 2]), torch.tensor([1, 2])):
        made = async_tensor_h2d(data, dtype=torch.float32, device="cpu")
        assert (made.tolist(), made.dtype) == ([1.0, 2.0], torch.float32)
        assert async_tensor_h2d(data, out=torch.zeros(2, dtype=torch.int32)).dtype is torch.int32
    with pytest.raises(headrace.InvalidRequestError, match="needs a device"):
        async_tensor_h2d([1])


def test_a_chat_template_is_resolved_as_evaluation_harnesses_ask_for_it() -> None:
    from headrace.renderers.hf import resolve_chat_template

    class Templates:
        def get_chat_template(self, chat_template: str | None, tools: Any = None) -> str:
            if tools == []:
                raise ValueError("no template")
            return "with tools" if tools else "its own"

    assert resolve_chat_template(Templates(), "given", None, model_config=None) == "given"
    assert resolve_chat_template(Templates(), None, None, model_config=None) == "its own"
    assert resolve_chat_template(Templates(), None, [{}], trust_remote_code=True) == "with tools"
    assert resolve_chat_template(Templates(), chat_template=None, tools=[]) is None
    with pytest.raises(TypeError, match="unknown arguments template"):
        resolve_chat_template(Templates(), None, None, template="x")


@pytest.mark.parametrize(
    ("program", "package"),
    pairs(
        ("entrypoints.openai.api_server", "entrypoints.launchers.api_server.entry", "entrypoints.cli.main serve"),
        ("headrace", "headrace.as_vllm -m vllm", "vllm"),
    ),
)
def test_the_server_starts_as_a_module(program: str, package: str) -> None:
    command = [*f"-m {package}.{program}".split(), "--help=Server limits"]
    if package == "vllm":  # in a process that a program under headrace.as_vllm starts
        started = f"import headrace.as_vllm, subprocess, sys; sys.exit(subprocess.call([sys.executable, *{command}]))"
        command = ["-c", started]
    shown = run(*command)
    assert shown.returncode == 0, shown.stderr
    assert "--max-body-bytes" in shown.stdout


@pytest.mark.parametrize("cls", [headrace.LLM, headrace.AsyncLLM])
def test_signatures_name_every_option_with_its_type_and_default(cls: type) -> None:
    parameters = inspect.signature(cls).parameters
    assert set(option_specs()) <= set(parameters)
    assert {"swap_space", "enable_lora", "attention_backend", "worker_use_ray", "compilation_config"} <= set(parameters)
    assert (parameters["swap_space"].default, parameters["enable_lora"].default) == (0, False)
    assert parameters["max_num_seqs"].default == option_specs()["max_num_seqs"].default
    assert parameters["block_size"].annotation is int
    taken = {*option_specs(), *taken_options()}
    assert (
        set(engine_keywords.EngineOptions.__annotations__)
        == taken - {"model"}
        == set(parameters) - {"model", "in_process", "heartbeat_timeout"}
    )


def test_the_generated_keywords_are_up_to_date() -> None:
    with open(KEYWORDS_FILE, encoding="utf-8") as file:
        assert file.read() == keywords_module(), "run make docs"
