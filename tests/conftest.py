"""What every test gets: the demo model when asked for, a cache folder of its own, and a check for stray processes."""

from __future__ import annotations

import gc
import math
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import thinned
from hypothesis import HealthCheck, settings
from patience import within

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a script's background job is started, and as all its children would then be: none would notice Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup leaves it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Hundreds of processes start in these tests: where this is set, each of them compiles every source anew.

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Read as torch is imported, here and in children: else its threads spin for milliseconds after each product, on cores
# that the tests beside this one need.

settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")
# How fast a busy machine makes examples says nothing of what is tested.

LEFTOVER_GRACE_S = 5.0
"""How long a test's processes may take to end after it: what the design promises after a death."""


@pytest.hookimpl(optionalhook=True)  # for pytest without xdist
def pytest_xdist_auto_num_workers() -> int:
    """Twice as many as there are cores: tests wait for other processes for two fifths of their time."""
    return max(2, (os.cpu_count() or 1) * 2)


LONG_FILES = (
    *("kernels/test_triton_values.py", "parallel/test_multiproc_start.py", "gpu/test_gpu_pretend.py"),
    *("http/test_http_lifecycle.py", "sampling/test_grammar_follower.py", "fleet/test_scaling.py"),
    *("core/test_control.py", "parallel/test_multiproc.py", "parallel/test_shared_experts.py"),
    *("http/test_http_docs.py", "core/test_import_path.py", "cpu/test_cpu_build.py", "models/test_parallel_model.py"),
    *("http/test_http_responses.py", "checkpoints/test_hostile_files.py", "models/test_embed.py"),
    *("gpu/test_gpu_states.py", "http/test_http_restart.py", "parallel/test_multiproc_failure.py"),
    *("fleet/test_serve_fleet.py", "http/test_http_demo_model.py", "frontend/test_chat_template_bounds.py"),
    *("frontend/test_hostile_answers.py", "fleet/test_reloads.py", "http/test_http_security.py"),
    *("sampling/test_grammar_backends.py", "core/test_daemon.py", "models/test_recurrent_families.py"),
    *("models/test_mixture_families.py", "http/test_http_abuse.py", "http/test_page_in_browser.py"),
    *("bench/test_bench_serve.py", "checkpoints/test_tokenizer_keys.py", "models/test_adapters.py"),
    *("parallel/test_multinode.py", "http/test_http_completions.py", "models/test_models.py"),
    *("http/test_http_tool_calls.py", "http/test_http_files.py", "core/test_odd_surroundings.py"),
    *("models/test_adapters_beside.py", "checkpoints/test_gguf_keys.py", "http/test_http_access.py"),
    *("sampling/test_hostile_forms.py", "checkpoints/test_hub.py", "sampling/test_unquoted_texts.py"),
    *("models/test_encoders.py", "http/test_http_traces.py"),
)
"""Begun first: if one of them were left for the end, the other processes would wait for it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    begun_first = {Path(__file__).parent / name: rank for rank, name in enumerate(LONG_FILES)}
    places = {path: (begun_first.get(path, len(begun_first)), path.parts) for path in {item.path for item in items}}
    items.sort(key=lambda item: places[item.path])


pytest_generate_tests = thinned.pytest_generate_tests


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is imported and made for thousands of tests stays: the collector of garbage never walks through it."""
    begin_elsewhere(session.config)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # with what little is garbage: looking for it takes a second
        gc.enable()


def begin_elsewhere(config: pytest.Config) -> None:
    """Of several processes that collect all tests, each begins with another file, and finds most of the others' sources
    compiled by them: in a fresh clone each would compile every source, all at the same time."""
    here, place = Path(__file__).parent, getattr(config, "workerinput", None)
    if place is None or [Path(each).resolve() for each in config.args] != [here]:
        return
    files = sorted(here.rglob("test_*.py"))
    first = len(files) * int(place["workerid"].removeprefix("gw")) // place["workercount"]
    config.args[:] = map(str, files[first:] + files[:first])


@pytest.fixture(scope="session")
def frozen_modules() -> set[str]:
    """Those whose objects the collector does not walk through."""
    return set(sys.modules)


@pytest.fixture(autouse=True)
def little_for_the_collector(frozen_modules: set[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever imports a library of models, or calls `gc.unfreeze` as a benchmark or a simulation that ends here does,
    leaves nothing that each `gc.collect` of a rank would walk through for half a second in all tests after it."""
    calls: list[None] = []
    unfreeze = gc.unfreeze
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append(unfreeze()))
    yield
    if calls or len(sys.modules) > len(frozen_modules) + 20:
        # Asking how much is frozen would walk through it, as long as a collection does.
        gc.collect(1)
        gc.freeze()
        frozen_modules.update(sys.modules)


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's GGUF file in the user's cache, fetched when missing. Mark such tests `demo_model`.

    Fails rather than skips when it cannot be had: the sentence says how to get it.
    """
    from headrace.executor.checkpoints.demo_model import fetch_demo_model

    return fetch_demo_model()


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, for this process and the ones it starts."""
    folder = tmp_path / "headrace-cache"
    monkeypatch.setenv("HEADRACE_CACHE", str(folder))
    return folder


@pytest.fixture
def runtime_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for sockets; short, for a Unix socket's path is at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        monkeypatch.setenv("HEADRACE_RUNTIME_DIR", folder)
        yield Path(folder)


class Descendant(NamedTuple):
    """A process below this one: its start, in the kernel's ticks, tells it from another that has its number later."""

    pid: int
    started_ticks: int


@pytest.fixture(autouse=True)
def no_process_left_over() -> Iterator[None]:
    """Fails a test that leaves a child process behind, and ends it so that the next test is not blamed."""
    before, began_s = _descendants(), time.clock_gettime(time.CLOCK_BOOTTIME)
    yield
    # Such a list may lack one while another ends, so a process that it has anew need not be new. A start is known to a
    # tick, and is no sooner than it was.
    since_ticks = began_s * os.sysconf("SC_CLK_TCK") - 1
    left = [each for each in _descendants() - before if each.started_ticks >= since_ticks]
    alive = _alive_in_time(left, before) if left else []
    names = [f"{process.pid} {_command(process)}" for process in alive]
    for process in alive:
        process.kill()
    assert not names, f"processes left over {LEFTOVER_GRACE_S:g} s after the test: {names}"


def _alive_in_time(left: Sequence[Descendant], before: set[Descendant]) -> list[psutil.Process]:
    # What a server of a fixture starts for itself, such as the processes that try grammars, ends with that server.
    known = {each.pid for each in before} | {_template_helper()}
    found = []
    for each in left:
        with suppress(psutil.Error):  # it has ended meanwhile
            process = psutil.Process(each.pid)
            if not known & {process.pid, *(parent.pid for parent in _ancestors(process))}:
                found.append(process)
    _, alive = psutil.wait_procs(found, timeout=within(LEFTOVER_GRACE_S))
    return alive


def _template_helper() -> int | None:
    """The program that renders chat templates for all tests of this process, and ends with it."""
    module = sys.modules.get("headrace.frontend.text.template_renderer")
    pid: int | None = None if module is None else module.renderer().pid
    return pid


def _descendants() -> set[Descendant]:
    """Those alive, by the kernel's lists of children: psutil would read every process of the machine, twice a test."""
    found: set[Descendant] = set()
    todo = [os.getpid()]
    while todo:
        for pid in _children(todo.pop()):
            todo.append(pid)
            with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
                # See proc_pid_stat(5): after the name in brackets come the state and, as the 22nd of all, the start.
                fields = file.read().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    found.add(Descendant(pid, int(fields[19])))
    return found


def _children(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                yield from map(int, file.read().split())


def _ancestors(process: psutil.Process) -> Sequence[psutil.Process]:
    try:
        return process.parents()
    except psutil.Error:
        return ()


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "(gone)"


@pytest.fixture
def drafts_at_any_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """For engines of this process: how long steps take here, beside what else the machine does, decides about no
    draft."""
    from headrace.core.schedule.drafters import step_costs

    monkeypatch.setattr(step_costs, "SHORTEST_S", math.inf)


@pytest.fixture
def ipv6() -> None:
    """Skips where this machine has no IPv6 loopback interface."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
