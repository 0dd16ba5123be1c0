"""What a client costs before it does anything: the modules it loads, and how a script may end."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from typing import Any

import pytest
from source_tree import PYTHONPATH
from thinned import every, pairs

import headrace

HEAVY = ("torch", "transformers", "numpy", "triton", "huggingface_hub", "safetensors", "gguf")


def run_python(script: str, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments] if stdin is None else [sys.executable, "-"]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)


def loaded_by(script: str) -> list[str]:
    result = run_python(script + "\nimport sys, json; print(json.dumps(sorted(sys.modules)))")
    assert result.returncode == 0, result.stderr
    modules: list[str] = json.loads(result.stdout.splitlines()[-1])
    return modules


def test_importing_the_package_loads_next_to_nothing() -> None:
    loaded = [name for name in loaded_by("import headrace") if name.startswith(("headrace.", "zmq", "msgspec"))]
    assert loaded == ["headrace.frontend", "headrace.frontend.vllm", "headrace.frontend.vllm.modules"]


HOST = """
import asyncio, gc, importlib.util, logging, os, signal, sys, threading, warnings

def host():
    handlers = [signal.getsignal(each) for each in signal.valid_signals()]
    hooks = sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook, sys.gettrace(), sys.getprofile()
    limits = sys.getrecursionlimit(), sys.getswitchinterval(), gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()
    logs = logging.root.level, logging.root.handlers[:], logging.getLoggerClass()
    return (
        sys.meta_path[:], sys.path_hooks[:], sys.path[:], dict(os.environ), handlers, hooks, limits, logs,
        warnings.filters[:], threading.enumerate(), asyncio.get_event_loop_policy(), os.getcwd(), os.umask(0o77),
    )

os.umask(0o77)
before = host()
"""
UNCHANGED = """
for index, (first, then) in enumerate(zip(before, host())):
    assert first == then, (index, first, then)
assert importlib.util.find_spec("vllm") is None
"""
IMPORTS = {
    "the package": "import headrace",
    "its names": "import headrace; [getattr(headrace, name) for name in headrace.__all__]",
    "vLLM's names": """
from headrace.engine.arg_utils import EngineArgs
from headrace.v1.engine.async_llm import AsyncLLM
""",
    "what is missing": """
import headrace
for statement in ("import headrace.lora.peft_helper", "from headrace.config import Nothing", "headrace.nothing"):
    try:
        exec(statement)
    except (ImportError, AttributeError):
        continue
    raise AssertionError(statement)
""",
    "a model's registration": """
from headrace import ModelRegistry
ModelRegistry.register_model("TinyForCausalLM", "tiny_models:FAMILY")
assert "TinyForCausalLM" in ModelRegistry.get_supported_archs()
""",
}


@pytest.mark.parametrize("what", every(2, IMPORTS))
def test_an_import_changes_nothing_of_its_host(what: str) -> None:
    done = run_python(HOST + IMPORTS[what] + UNCHANGED)
    assert done.returncode == 0, done.stderr


def test_the_public_face_loads_nothing_heavy() -> None:
    modules = loaded_by("import headrace; [getattr(headrace, name) for name in headrace.__all__]")
    assert "headrace.frontend.api.llm" in modules
    assert [name for name in HEAVY if name in modules] == []
    assert [name for name in ("tokenizers", "jinja2", "tqdm", "uvloop") if name in modules] == [], "too early"


def test_vllms_module_names_give_the_same_classes_and_load_nothing_heavy() -> None:
    modules = loaded_by(
        """
import headrace, headrace.inputs, headrace.outputs, headrace.sampling_params
assert headrace.inputs.TokensPrompt is headrace.TokensPrompt
assert headrace.outputs.RequestOutput is headrace.RequestOutput
assert headrace.sampling_params.SamplingParams is headrace.SamplingParams
for module in (headrace.inputs, headrace.outputs, headrace.sampling_params):
    assert all(hasattr(module, name) for name in module.__all__)
"""
    )
    assert [name for name in (*HEAVY, "tokenizers", "jinja2", "tqdm", "uvloop") if name in modules] == []


def test_a_session_from_connect_to_close_loads_nothing_heavy() -> None:
    modules = loaded_by(
        f"""
import sys
sys.path[:0] = {PYTHONPATH!r}.split(':')
from fake_core import memory_core
import headrace
with memory_core() as core, headrace.LLM.attach(core.transport) as llm:
    llm.generate("Hello")
    llm.chat([{{"role": "user", "content": "x"}}])
"""
    )
    assert [name for name in HEAVY if name in modules] == []
    assert "uvloop" in modules


def test_the_public_names_are_there() -> None:
    assert {name for name in dir(headrace) if not name.startswith("__")} == set(headrace.__all__) - {
        "__version__",
        "__version_tuple__",
    }
    assert headrace.SamplingParams.__name__ == "SamplingParams"
    assert headrace.__version__ == importlib.metadata.version("headrace")


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(headrace, "LLMs")


def test_what_vllm_has_and_headrace_lacks_is_named_with_the_reason() -> None:
    with pytest.raises(ValueError, match="LateInteractionParams is refused: late chunking and late interaction"):
        headrace.pooling_params.LateInteractionParams()
    assert headrace.PoolingParams is headrace.pooling_params.PoolingParams
    llm: Any = object.__new__(headrace.LLM)
    with pytest.raises(AttributeError, match="LLM has no 'apply_model': the model is in another process"):
        llm.apply_model("x")
    with pytest.raises(AttributeError, match=r"LLM has no 'generrate'$"):
        llm.generrate("x")


def test_the_package_runs_as_the_command_does() -> None:
    done = subprocess.run([sys.executable, "-m", "headrace", "version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"headrace {headrace.__version__} ")


SCRIPT = f"""
import sys
sys.path[:0] = {PYTHONPATH!r}.split(':')
from fake_core import MemoryCore, FakeCore
from headrace import LLM, SamplingParams
core = MemoryCore(FakeCore())
llm = LLM.attach(core.transport)
print(llm.generate("Hello", use_tqdm=False)[0].outputs[0].text)
"""


def test_a_script_from_stdin_that_never_closes_ends_cleanly() -> None:
    result = run_python("", stdin=SCRIPT)
    assert (result.returncode, result.stderr) == (0, "")
    assert len(result.stdout) == len("4!mtBM1m\n")


def test_python_s_end_closes_an_llm_in_order_and_detaches_nothing_under_its_running_loop() -> None:
    """Sockets that another thread closes under the loop's would be read on: an error for each event, at best."""
    script = SCRIPT.replace("MemoryCore, FakeCore", "ZmqCore, FakeCore").replace(
        "MemoryCore(FakeCore())", "ZmqCore(FakeCore())"
    )
    script = script.replace("LLM.attach(core.transport)", "LLM.connect(core.address)")
    code = "import warnings\nwarnings.simplefilter('always', ResourceWarning)\n" + script
    result = run_python(code)
    assert result.returncode == 0
    assert "was not closed" not in result.stderr


def test_a_script_that_ends_in_the_middle_of_a_stream_ends_cleanly() -> None:
    result = run_python(SCRIPT + "core.pause(); stream = llm.stream('x', SamplingParams(max_tokens=99)); sys.exit(3)")
    assert (result.returncode, result.stderr) == (3, "")


@pytest.mark.parametrize(
    ("waits", "wakes_main"),
    pairs(('llm.generate("Hello", use_tqdm=False)', 'list(llm.stream("Hello"))'), (True, False)),
)
def test_ctrl_c_in_a_script_shows_a_keyboard_interrupt_and_nothing_else(waits: str, wakes_main: bool) -> None:
    """A signal that comes while the main thread falls asleep does not wake it, as one to another thread does not."""
    kill = "os.kill(os.getpid(), signal.SIGINT)"
    if not wakes_main:
        kill = "time.sleep(0.2); signal.pthread_kill(threading.get_ident(), signal.SIGINT)"
    script = (
        SCRIPT
        + f"""
import os, signal, threading, time
core.pause()
def interrupt():
    while not core.core.running: pass
    {kill}
threading.Thread(target=interrupt).start()
{waits}
"""
    )
    result = run_python(script)
    assert result.returncode != 0
    assert result.stderr.rstrip().endswith("KeyboardInterrupt")
    assert result.stderr.count("Traceback") == 1
