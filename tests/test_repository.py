"""The rules of the repository that a machine can check: imports by folder, docs that name code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest
import source_tree as tree

ROOT = tree.ROOT

MAY_IMPORT = MappingProxyType(
    {
        "headrace": {"headrace"},
        "ipc": {"headrace.ipc", "msgspec", "zmq", "psutil"},
        "core": {"headrace.core", "headrace.ipc", "msgspec", "zmq", "numpy", "psutil", "xxhash", "yaml"},
        "executor": {
            *("headrace.executor", "headrace.kernels", "headrace.ipc"),
            *("headrace.core.options", "headrace.core.process.child", "headrace.core.process.ray_engines"),
            *("torch", "transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub"),
            *("numpy", "msgspec", "psutil", "tqdm", "pynvml", "regex"),
        },
        "kernels": {"headrace.kernels", "torch", "triton", "numpy", "gguf"},
        "frontend": {
            *("headrace.frontend", "headrace.ipc", "headrace.core.options", "headrace.core.process"),
            "headrace.core.coordinator",
            *("msgspec", "zmq", "tokenizers", "jinja2", "psutil", "tqdm", "uvloop", "pynvml", "rich"),
            *("starlette", "uvicorn", "httptools", "prometheus_client", "python_multipart"),
        },
    }
)
"""Folder -> modules that it may import, with all below them."""
MAY_IMPORT_LAZILY = MappingProxyType(
    {
        "ipc": {"numpy"},  # a client that never touches an array never loads it
        "core": {"tqdm", "ray"},  # for those who look at a terminal; an extra
        "executor": {
            *("ray", "runai_model_streamer", "fastsafetensors", "tensorizer", "modelscope", "mistral_common"),  # extras
            "sentencepiece",  # for the few models that have nothing else
        },
        "frontend": {
            *("headrace.core.engine.engine", "headrace.core.engine.memory_port"),  # a core on a thread of this process
            "matplotlib",  # headrace bench plot
            "huggingface_hub",  # LoRA adapters that a server fetches by name
            "mcp",  # an extra: tools of /v1/responses
            "opentelemetry",  # an extra: traces
        },
    }
)
MAY_IMPORT_BY_FILE = MappingProxyType(
    {
        "ipc/step.py": {"numpy"},
        "kernels/cpu/build.py": {"headrace.ipc"},
        "kernels/cpu/runtime/threads.py": {"headrace.ipc"},
        "core/structured_output/llguidance_backend.py": {"llguidance"},
        "core/structured_output/token_bytes.py": {"tokenizers"},  # imported by llguidance_backend.py alone
        "core/structured_output/xgrammar_backend.py": {"xgrammar", "tvm_ffi"},
        "frontend/cli/commands/models.py": {"headrace.executor.checkpoints.hub.kept"},  # no torch, either
        # What the kernels would be compiled by, and for: no torch comes with it.
        "frontend/cli/commands/doctor.py": {"headrace.kernels.cpu"},
        "frontend/cli/commands/collect_env.py": {"headrace.kernels.cpu.compiler"},
        # Where they are asked for by name.
        "frontend/vllm/helpers.py": {
            *("transformers", "huggingface_hub", "headrace.executor.checkpoints.hub"),
            *("numpy", "torch"),
        },
    }
)

WITHIN = frozenset(
    map(
        Path,
        (
            *(
                "executor/checkpoints/sources/gguf",
                "executor/checkpoints/hub",
                "executor/checkpoints/tokenizers/mistral",
            ),
            *("executor/models/blocks", "executor/models/families"),
            *("executor/gpu/hardware", "executor/gpu/weights", "ipc/process", "ipc/transport"),
            *("frontend/request/parameters", "frontend/bench/results", "frontend/bench/traffic"),
            *(
                "frontend/vllm/on_path/vllm",
                "frontend/cli/commands",
                "frontend/http/process",
                "frontend/http/server/decoding",
            ),
            *(
                f"frontend/http/apis/{api}"
                for api in ("adapters", "anthropic", "development", "health", "ollama", "openai", "pooling", "scaling")
            ),
        ),
    )
)
"""Folders that the README of the one above describes."""

# In parts, so that this file does not match itself.
MACHINE_PATHS = re.compile("|".join(["/" + "work/", "/" + "root/", "/" + r"home/\w", "/" + "opt/", "/" + "Users/"]))
REGISTRY_HOSTS = re.compile(
    "|".join([r"pypi\." + "org", "python" + r"hosted\.", r"download\." + "pytorch", "npm" + "js"])
)


@pytest.mark.parametrize("folder", tree.FOLDERS)
def test_a_folder_imports_only_what_it_may(folder: str) -> None:
    wrong = []
    for path in tree.python_files(folder):
        allowed = MAY_IMPORT[folder] | MAY_IMPORT_BY_FILE.get(str(path), set())
        for found in tree.imports(path):
            names = allowed | (MAY_IMPORT_LAZILY.get(folder, set()) if found.is_lazy else set())
            if found.name != "headrace" and not any(_is_within(found.name, name) for name in names):
                wrong.append(f"{path}:{found.line} imports {found.name}")
    assert not wrong, f"{folder}/ may import {sorted(MAY_IMPORT[folder])}: {wrong}"


@pytest.mark.parametrize(("room", "below"), [("text", {"text"}), ("request", {"text", "request"})])
def test_what_users_ask_for_knows_nothing_of_who_answers(room: str, below: set[str]) -> None:
    wrong = [
        f"{path}:{found.line} imports {found.name}"
        for path in tree.python_files("frontend")
        if path.is_relative_to(f"frontend/{room}")
        for found in tree.imports(path)
        if _is_within(found.name, "headrace.frontend") and found.name.split(".")[2] not in below
    ]
    assert not wrong


def test_the_executor_uses_the_cpu_kernels_by_their_facade() -> None:
    inner = [
        f"{path}:{found.line} imports {found.name}"
        for path in tree.python_files("executor")
        for found in tree.imports(path)
        if _is_within(found.name, "headrace.kernels.cpu") and found.name != "headrace.kernels.cpu.facade"
    ]
    assert not inner


def test_the_import_check_sees_every_kind_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "executor").mkdir()
    file = Path("executor/sample.py")
    (tmp_path / file).write_text(
        "from __future__ import annotations\nimport os, torch.nn\nfrom headrace import kernels, LLM\n"
        "from . import layers\nfrom ..core.engine.loop import Loop\nif TYPE_CHECKING:\n    import never\n"
        "def f():\n    with g():\n        import numpy as np\n"
    )
    monkeypatch.setattr(tree, "ROOT", tmp_path)
    assert [(found.name, found.is_lazy) for found in tree.imports(file)] == [
        ("torch", False),
        ("headrace.kernels", False),
        ("headrace", False),
        ("headrace.executor", False),
        ("headrace.core.engine.loop", False),
        ("numpy", True),
    ]


@pytest.mark.parametrize(
    ("folder", "absent"),
    [
        ("ipc", {"torch", "transformers", "triton", "numpy"}),
        ("core", {"torch", "transformers", "triton", "tokenizers", "headrace.executor"}),
        ("frontend", {"torch", "transformers", "triton", "numpy", "headrace.core.engine.engine"}),
    ],
)
def test_importing_a_thin_folder_loads_nothing_heavy(folder: str, absent: set[str]) -> None:
    modules = [
        "headrace." + ".".join(path.with_suffix("").parts)
        for path in tree.python_files(folder)
        if path.name != "__init__.py" and str(path) not in MAY_IMPORT_BY_FILE
    ]
    code = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\nprint(*sys.modules)"
    if folder == "frontend":
        code = "import headrace\nfor name in headrace.__all__: getattr(headrace, name)\n" + code
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    assert modules
    assert not absent & set(result.stdout.split())


def test_every_folder_says_what_it_is() -> None:
    folders = {
        path.parent
        for path in tree.python_files()
        if path.parts[0] in ("tests", *MAY_IMPORT) and path.parts[0] != "headrace"
    }
    described = WITHIN | {path for path in folders if path.parent == Path("tests")}
    silent = [str(folder) for folder in folders - described if not (ROOT / folder / "README.md").is_file()]
    assert not silent, "each needs a README.md: what it holds, and its invariants"


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = []
    for path in tree.files():
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for pattern in (MACHINE_PATHS, REGISTRY_HOSTS):
            found += [f"{path}: {match.group()}" for match in pattern.finditer(text)]
    assert not found


HOP = re.compile(r"`([\w./]+\.py):([\w.]+)`")
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.\w+)`")


def test_pages_name_code_that_exists() -> None:
    """The map, and the README of every folder of code, which may name files from its folder or the one above."""
    maps = (Path("docs") / f"{name}.md" for name in ("architecture", "decisions", "glossary"))
    pages = [*maps, *(path for path in tree.files() if _is_folders_readme(path))]
    missing = []
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        bases = [Path(), *([] if page.parts[0] == "docs" else [page.parent, page.parent.parent])]
        for file, name in HOP.findall(text):
            if not any(_resolves(str(base / file), name) for base in bases):
                missing.append(f"{page}: {file}:{name}")
        for file in FILE.findall(text):
            if "NAME" not in file and not any((ROOT / base / file).exists() for base in bases):
                missing.append(f"{page}: {file}")
    assert len(pages) > 10
    assert not missing


def test_the_architecture_page_is_a_map() -> None:
    lines = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").splitlines()
    path = lines[lines.index("## The path of a request") :]
    hops = [line for line in path[: path.index("## The six seams")] if line.startswith("|") and HOP.search(line)]
    assert hops


def test_a_hop_that_does_not_exist_is_found() -> None:
    assert _resolves("core/options/plan.py", "Plan.max_model_len")
    assert _resolves("core/options/memory.py", "CPU_CACHE_BYTES")
    assert not _resolves("core/options/plan.py", "Plan.max_modle_len")
    assert not _resolves("core/no_such_file.py", "Plan")


def _is_folders_readme(path: Path) -> bool:
    return path.name == "README.md" and len(path.parts) > 1 and path.parts[0] in tree.FOLDERS


def _resolves(file: str, name: str) -> bool:
    return (ROOT / file).is_file() and tree.defines(Path(file), name)


def _is_within(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(allowed + ".")
