"""docker/Dockerfile's images, built with Debian's packages as their base, and run as docs/deploy/docker.md says."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_models
from patience import wait_until
from test_behind_nginx import free_port

ROOT = Path(__file__).parents[2]
BUILD_LIMIT_S = 3000
NEEDED = ("podman", "runc", "mmdebstrap")
MISSING = [each for each in NEEDED if shutil.which(each) is None]
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(BUILD_LIMIT_S),  # the first run compiles the kernels for each level
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (apt-get install)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes Debian's base without further set-up"),
]
MOST_CLIENT_BYTES = 150_000_000
USER = 1000
NULL = ("--distributed-executor-backend", "headrace.executor.testing.null:NullExecutor", "--skip-tokenizer-init")
ON_HOST = ("--host", "127.0.0.1", "--port", "{port}")
RUN = ("--runtime", "runc", "run", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096")
"""runc takes either version of control groups. Without limits podman asks for more than a container's root may."""
LEAST = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")


def podman(*arguments: str, limit_s: float = 120) -> str:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def built(target: str) -> str:
    """The image's name. Steps whose input is unchanged are not repeated."""
    name = f"localhost/headrace-test:{target}"
    command = [ROOT / "docker" / "from_debian.sh", target, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return name


@pytest.fixture(scope="module")
def client_image() -> str:
    return built("client")


@pytest.fixture(scope="module")
def cpu_image() -> str:
    return built("cpu")


class Container:
    def __init__(self, name: str, port: int) -> None:
        self.name, self.port = name, port

    def log(self) -> str:
        shown = subprocess.run(["podman", "logs", self.name], capture_output=True, text=True, check=False)
        return shown.stdout + shown.stderr

    def wait_ready(self, client: httpx.Client) -> None:
        def is_ready() -> bool:
            assert self.state()["Running"], self.log()
            with contextlib.suppress(httpx.TransportError):
                return client.get("/health/ready").status_code == 200
            return False

        wait_until(is_ready, 120, "the container to be ready")

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(podman("inspect", self.name))[0]["State"]
        return found


@contextlib.contextmanager
def running(image: str, options: list[str], arguments: list[str], at: tuple[str, ...] = ON_HOST) -> Iterator[Container]:
    port = free_port()
    name = f"headrace-test-{port}"
    where = [each.format(port=port) for each in at]
    options = [*LEAST, *(["--network", "host"] if at else []), *options]
    podman(*RUN, "--detach", "--health-interval", "disable", "--name", name, *options, image, *arguments, *where)
    try:
        yield Container(name, port)
    finally:
        podman("rm", "--force", "--time", "0", name)


def stopped_while_it_streams(container: Container, client: httpx.Client, body: dict[str, Any]) -> None:
    """SIGTERM in the middle of a stream: it is finished, new requests are refused, and the container ends with 0."""
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        podman("kill", "--signal", "TERM", container.name)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert any('"finish_reason":"length"' in line for line in rest)
    assert podman("wait", container.name, limit_s=120).strip() == "0", container.log()


def test_the_client_image_is_small_and_has_no_torch_no_compiler_and_no_root(client_image: str) -> None:
    (image,) = json.loads(podman("image", "inspect", client_image))
    assert image["Size"] < MOST_CLIENT_BYTES
    assert image["Config"]["User"] == f"{USER}:{USER}"
    assert image["Config"]["Entrypoint"] == ["headrace", "serve"]
    code = (
        "import importlib.util, os, shutil, headrace\n"
        "assert os.getuid() == 1000 and os.environ['HOME'] == '/cache' and os.access('/cache', os.W_OK)\n"
        "assert not any(map(importlib.util.find_spec, ('torch', 'numpy', 'transformers')))\n"
        "assert not any(map(shutil.which, ('cc', 'gcc', 'c++', 'pip')))\n"
        "print(headrace.__version__)"
    )
    once = ("--rm", "--no-healthcheck", "--network", "none", *LEAST)
    assert podman(*RUN, *once, "--entrypoint", "python", client_image, "-c", code).strip()
    assert "--engine" in podman(*RUN, *once, client_image, "--help")


def test_a_client_container_serves_an_engine_elsewhere_and_drains_on_sigterm(client_image: str, tmp_path: Path) -> None:
    deployment, frontend = tmp_path / "deployment.keys", tmp_path / "frontend.keys"
    headrace = [sys.executable, "-m", "headrace"]
    subprocess.run([*headrace, "keys", deployment], check=True, capture_output=True)
    subprocess.run(
        [*headrace, "keys", deployment, "--client", "frontend", "--out", frontend], check=True, capture_output=True
    )
    os.chown(frontend, USER, USER)
    address = f"tcp://127.0.0.1:{free_port()}"
    slow = json.dumps({"step_delay_s": 0.05})
    command = [sys.executable, "-m", "headrace.core.process.daemon", "null", *NULL, "--hf-overrides", slow]
    engine = subprocess.Popen([*command, "--address", address, "--keys", deployment], stdout=subprocess.DEVNULL)
    options = ["--memory", "512m", "--volume", f"{frontend}:/keys/frontend.keys:ro"]
    try:
        arguments = ["--engine", address, "--keys", "/keys/frontend.keys"]
        with (
            running(client_image, options, arguments) as container,
            httpx.Client(base_url=f"http://127.0.0.1:{container.port}", timeout=60) as client,
        ):
            container.wait_ready(client)
            written = ["podman", "exec", container.name, "touch"]
            assert subprocess.run([*written, "/etc/written"], capture_output=True, check=False).returncode == 1
            assert subprocess.run([*written, "/tmp/written"], capture_output=True, check=False).returncode == 0
            stopped_while_it_streams(container, client, {"prompt": [5, 6], "max_tokens": 60, "ignore_eos": True})
    finally:
        engine.terminate()
        engine.wait(30)


def test_a_cpu_container_runs_a_model_within_its_limit_of_memory(cpu_image: str, tmp_path: Path) -> None:
    model = tiny_models.save("llama", tmp_path / "model", tokenizer=True)
    for path in (tmp_path, model, *model.iterdir()):
        path.chmod(0o755)
    options = ["--memory", "2g", "--pids-limit", "200", "--volume", f"{model}:/models/tiny:ro"]
    arguments = ["/models/tiny", "--served-model-name", "tiny", "--max-model-len", "512"]
    with (
        running(cpu_image, options, arguments) as container,
        httpx.Client(base_url=f"http://127.0.0.1:{container.port}", timeout=60) as client,
    ):
        container.wait_ready(client)
        assert podman("exec", container.name, "python", "-c", NOT_COMPILED).strip() == "prebuilt"
        stopped_while_it_streams(container, client, {"prompt": "a", "max_tokens": 300, "ignore_eos": True})
        assert not container.state()["OOMKilled"]


NOT_COMPILED = (
    "from pathlib import Path; from headrace.kernels.cpu import build; "
    "assert not [*Path('/cache').rglob('*.so')]; print(Path(build.load('native').path).parent.name)"
)


def is_healthy(container: Container) -> bool:
    """By the image's own check."""
    command = ["podman", "healthcheck", "run", container.name]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def test_a_container_is_healthy_while_it_serves(cpu_image: str) -> None:
    with running(cpu_image, ["--network", "none"], ["null", *NULL], at=()) as container:
        wait_until(lambda: is_healthy(container), 120, "the container to be healthy")
        podman("exec", container.name, "python", "-c", "import os, signal; os.kill(1, signal.SIGTERM)")
        assert podman("wait", container.name).strip() == "0", container.log()


def test_a_container_without_its_engine_lives_and_is_not_healthy(client_image: str) -> None:
    arguments = ["--engine", f"tcp://127.0.0.1:{free_port()}", "--insecure"]
    with running(client_image, ["--network", "none"], arguments, at=()) as container:
        wait_until(lambda: "waiting for an engine" in container.log(), 60, "its first words")
        assert not is_healthy(container)
        assert container.state()["Running"]
