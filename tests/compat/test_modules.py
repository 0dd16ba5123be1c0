"""vLLM's module names: each row of the table imports, gives the same classes, and explains what is not there."""

from __future__ import annotations

import importlib
import inspect
import socket
import subprocess
import sys

import pytest

import headrace
from headrace.core.options.document import KEYWORDS_FILE, keywords_module
from headrace.core.options.values import option_specs
from headrace.frontend.api import engine_keywords
from headrace.vllm_modules import MODULES


@pytest.mark.parametrize("row", sorted(MODULES))
def test_a_row_imports_and_each_name_is_there_or_explained(row: str) -> None:
    module = importlib.import_module(f"headrace.{row}")
    for name in MODULES[row]:
        if name in module.__all__:
            assert getattr(module, name) is not None
        else:
            with pytest.raises(ImportError, match=f"has no {name!r}: .{{10,}}"):
                getattr(module, name)
    with pytest.raises(AttributeError, match=r"has no 'NoSuchName'$"):
        _ = module.NoSuchName


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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("platforms", "describe_engine"),
        ("multimodal.utils", "text alone"),
        ("distributed.kv_transfer.kv_connector.v1", "keeps its cache to itself"),
        ("distributed.parallel_state", "tensor_parallel_size"),
        ("entrypoints.pooling", "only generation"),
        ("entrypoints.cli.main", "a program of its own"),
        ("v1.core.sched.output", "a program of its own"),
        ("utils.nobody_knows", "headrace.utils"),
    ],
)
def test_a_module_that_is_not_there_is_told_with_the_reason(name: str, said: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"^Headrace has no module '.*{said}") as told:
        importlib.import_module(f"headrace.{name}")
    assert f"headrace.{name}".startswith(told.value.name or "?")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'headrace\.nonsense'"):
        importlib.import_module("headrace.nonsense")


def test_the_port_and_address_of_helpers_can_be_listened_at() -> None:
    from headrace.utils.network_utils import get_ip, get_open_port

    with socket.socket() as listening:
        listening.bind((get_ip(), get_open_port()))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)


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
try:
    from vllm.lora.request import LoRARequest
except ImportError as error:
    print(error)
try:
    from vllm.platforms import current_platform
except ModuleNotFoundError as error:
    print(error)
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, BatchUpdate
assert AdapterLogitsProcessor.__module__.startswith("headrace")
"""
    done = run("-c", script)
    assert done.returncode == 0, done.stderr
    assert "LoRA adapters are not supported yet" in done.stdout
    assert "Headrace has no module 'vllm.platforms': a script holds no device" in done.stdout


def test_the_api_server_starts_as_a_module() -> None:
    shown = run("-m", "headrace.entrypoints.openai.api_server", "--help=Server limits")
    assert shown.returncode == 0, shown.stderr
    assert "--max-body-bytes" in shown.stdout


@pytest.mark.parametrize("cls", [headrace.LLM, headrace.AsyncLLM])
def test_signatures_name_every_option_with_its_type_and_default(cls: type) -> None:
    parameters = inspect.signature(cls).parameters
    assert set(option_specs()) <= set(parameters)
    assert parameters["max_num_seqs"].default == option_specs()["max_num_seqs"].default
    assert parameters["block_size"].annotation is int
    assert set(engine_keywords.EngineOptions.__annotations__) == set(option_specs()) - {"model"}


def test_the_generated_keywords_are_up_to_date() -> None:
    with open(KEYWORDS_FILE, encoding="utf-8") as file:
        assert file.read() == keywords_module(), "run make docs"
