"""Tests the client and the server with the lowest and the highest versions that pyproject.toml allows.

    python tests/support/dependency_versions.py lowest highest

Each set gets a virtual environment of its own, in `.venv/versions/`. torch, transformers and triton are the installed
ones: each of them is hundreds of megabytes, and constraints.txt has the versions that all else is tested with.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LARGE = {"torch", "transformers", "triton"}
FOLLOWING = {"huggingface-hub", "safetensors", "tokenizers"}
"""The installed transformers allows few versions of these."""
NOT_FOR_TESTS = {"ray", "modelscope", "mypy", "ruff", "types-psutil", "types-pyyaml"}
"""Of the extra dev, what the tests here do not need, or find to be missing."""
NEEDS_NEWER = {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"}
"""What does not go with the lowest versions, protobuf's among them, and no test here needs."""
TESTS: dict[str, tuple[str, ...]] = {
    "gguf": ("checkpoints/test_checkpoint_gguf.py", "checkpoints/test_gguf_keys.py", "models/test_gguf_encoders.py"),
    "httptools": ("http/test_http_framing.py", "http/test_http_smuggling.py"),
    "huggingface-hub": ("checkpoints/test_hub.py",),
    "jinja2": ("frontend/test_strict_chats.py", "http/test_http_bad_conversations.py"),
    "llguidance": ("sampling/test_grammar_backends.py", "sampling/test_plain_forms.py", "http/test_http_formats.py"),
    "msgspec": ("core/test_options.py", "frontend/test_request_fields.py", "http/test_known_fields.py"),
    "numpy": ("models/test_demo_model.py", "sampling/test_sampler.py", "sampling/test_logits_processors.py"),
    "nvidia-ml-py": ("cli/test_cli_collect_env.py", "gpu/test_gpu_parallel_parts.py"),
    "prometheus-client": ("http/test_http_docs.py", "http/test_dashboard.py"),
    "protobuf": ("checkpoints/test_sentencepiece_files.py",),
    "psutil": ("core/test_daemon.py", "core/test_child.py"),
    "python-multipart": ("http/test_http_files.py", "http/test_http_hostile_uploads.py"),
    "pyyaml": ("cli/test_cli.py", "core/test_secret_options.py"),
    "pyzmq": ("ipc/test_ipc.py", "ipc/test_zmq_port.py", "ipc/test_keys.py", "frontend/test_frontend_transport.py"),
    "regex": ("checkpoints/test_quantisation_keys.py", "checkpoints/test_adapter_files.py"),
    "safetensors": ("checkpoints/test_checkpoint.py", "checkpoints/test_weights.py", "frontend/test_tensor_files.py"),
    "sentencepiece": ("checkpoints/test_mistral_sentencepiece.py", "checkpoints/test_tokenizer_keys.py"),
    "starlette": ("http/test_http_errors.py", "http/test_http_api_document.py", "http/test_page_files.py"),
    "tokenizers": ("frontend/test_frontend_tokenizer.py", "checkpoints/test_tokenizer_bundle.py"),
    "tqdm": ("frontend/test_frontend_llm.py", "checkpoints/test_checkpoint_progress.py"),
    "uvicorn": ("http/test_http_completions.py", "http/test_http_streams.py", "http/test_http_lifecycle.py"),
    "uvloop": ("frontend/test_frontend_imports.py", "frontend/test_frontend_async_llm.py"),
    "xxhash": ("core/test_scheduler.py", "core/test_cache_groups.py"),
}
"""By dependency, the files of tests that go through the most of what is used of it. tests/check.txt comes besides."""


def small_dependencies() -> list[Requirement]:
    """What client and engine need, but for LARGE."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["engine"]]
    return [each for each in map(Requirement, declared) if each.name not in LARGE]


def requirements(which: str) -> list[str]:
    """What pip is asked for: `name==LOWEST`, or the name alone, whose newest version pip takes; and what tests need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    asked = []
    for each in small_dependencies():
        (lowest,) = [spec.version for spec in each.specifier if spec.operator == ">="]
        is_pinned = which == "lowest" and each.name not in FOLLOWING
        asked.append(f"{each.name}=={lowest}" if is_pinned else f"{each.name}{each.specifier}")
    left_out = NOT_FOR_TESTS | (NEEDS_NEWER if which == "lowest" else set())
    for_tests = [each for each in map(Requirement, optional["dev"]) if each.name.lower() not in left_out]
    return [*asked, *map(str, for_tests)]


def test(which: str) -> int:
    folder = ROOT / ".venv" / "versions" / which
    venv.create(folder, with_pip=True, clear=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet"]
    pins = ROOT / "constraints.txt"
    large = [line for line in pins.read_text().splitlines() if line.partition("==")[0] in LARGE]
    subprocess.run([*pip, *large, *requirements(which)], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
    command = [python, "-m", "pytest", "--numprocesses", "auto", "--maxprocesses", "4", "--dist", "loadfile"]
    files = {f"tests/{name}" for names in TESTS.values() for name in names}
    files.update((ROOT / "tests/check.txt").read_text().split())
    return subprocess.run([*command, *sorted(files)], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(max(map(test, sys.argv[1:])))
