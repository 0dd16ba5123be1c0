"""Engines that Ray places: on a Ray of this machine's own, and one that dies is replaced."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import wait_until

from headrace import LLM, SamplingParams
from headrace.core.engine.engine import load_executor
from headrace.core.options.parsing import parse_options
from headrace.core.process.ray_engines import RayEngine
from headrace.frontend.fleet.start import start_ranks
from headrace.ipc.failure import EngineStartError, OptionError
from headrace.ipc.transport.keys import VARIABLE, make_key_file

NULL: dict[str, Any] = {
    "distributed_executor_backend": "headrace.executor.testing.null:NullExecutor", "skip_tokenizer_init": True,
    "data_parallel_backend": "ray", "hf_overrides": {"step_delay_s": 0.02},
}  # fmt: skip
NUM_TOKENS = 100


def daemons(others: Sequence[psutil.Process] = ()) -> list[psutil.Process]:
    """Engines below this process, but for those that other tests keep."""
    below = psutil.Process().children(recursive=True)
    return [each for each in below if each not in others and "headrace.core.process.daemon" in each.cmdline()]


@pytest.mark.system
def test_requests_of_an_engine_under_ray_that_dies_go_on_and_ray_starts_another() -> None:
    params = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=each) for each in range(12)]
    prompts = [[5, each] for each in range(12)]
    others = daemons()
    with LLM("null", data_parallel_size=2, **NULL) as llm:
        before = daemons(others)
        assert len(before) == 2
        expected = [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]
        llm.enqueue(prompts, params)
        wait_until(lambda: llm.get_stats().num_generated_tokens > 12 * NUM_TOKENS + 24, 20, "tokens of all")
        before[0].kill()
        outputs = llm.wait_for_completion(use_tqdm=False)
        assert [each.outputs[0].token_ids for each in outputs] == expected
        wait_until(
            lambda: len(daemons(others)) == 2 and before[0] not in daemons(others),
            60,
            "the engine that takes its place",
        )
        before[1].parent().kill()  # the actor, with which its engine ends
        again = llm.generate(prompts, params, use_tqdm=False)
        assert [each.outputs[0].token_ids for each in again] == expected
    wait_until(lambda: not daemons(others), 20, "their end")


@pytest.mark.system
def test_ray_ends_with_the_client_though_an_engine_has_left_before(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody stops an engine that has left: Ray was not shut down, and the next client waited for a dead cluster."""
    import ray

    with LLM("null", data_parallel_size=2, **NULL) as llm:
        llm._background.run(llm._client.engines[0].process.drain(5.0))
        wait_until(lambda: "left, as it was asked to" in caplog.text, 30, "that it has left")
        assert ray.is_initialized()
    assert not ray.is_initialized()


def coordinators() -> list[psutil.Process]:
    below = psutil.Process().children(recursive=True)
    return [each for each in below if "CoordinatorActor" in " ".join(each.cmdline())]


@pytest.mark.system
def test_a_coordinator_under_ray_tells_others_of_the_engines_and_is_replaced_when_it_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_key_file(tmp_path / "deployment.keys")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "deployment.keys"))
    prompts = [[5, each] for each in range(8)]
    params = SamplingParams(max_tokens=5, ignore_eos=True, seed=1)

    def ask() -> list[list[int]]:
        """A frontend of its own, which knows where the coordinator is and nothing else."""
        with LLM(coordinator=addresses) as llm:
            pool = llm._client
            wait_until(lambda: [each.index for each in pool.engines if each.usable] == [0, 1], 20, "both engines")
            return [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]

    engines = start_ranks(parse_options(model="null", data_parallel_size=2, **NULL))
    try:
        for each in engines:
            each.wait_ready()
        first = engines[0]
        assert isinstance(first, RayEngine)
        addresses = first.fleet.coordinators
        expected = ask()
        (before,) = coordinators()
        before.kill()
        wait_until(lambda: not before.is_running() and len(coordinators()) == 1, 60, "the one that takes its place")
        assert ask() == expected
        assert first.fleet.coordinators == addresses
    finally:
        for each in engines:
            each.stop()
    wait_until(lambda: not coordinators(), 20, "its end")


def test_a_ray_that_is_not_there_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse_options(model="null", data_parallel_size=2, **NULL)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    for wrong in (address, "no-such-host.invalid:6379", "127.0.0.1:99999"):
        monkeypatch.setenv("RAY_ADDRESS", wrong)
        with pytest.raises(EngineStartError, match=f"there is no Ray at {wrong}, which RAY_ADDRESS names"):
            start_ranks(options)
    monkeypatch.setenv("RAY_ADDRESS", "not an address")
    with pytest.raises(EngineStartError, match="Ray can neither be joined nor started"):
        start_ranks(options)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match="data_parallel_backend=ray needs the package ray"):
        start_ranks(options)


@pytest.mark.system
def test_what_ray_cannot_place_is_refused_with_the_numbers() -> None:
    with pytest.raises(OptionError, match="needs data_parallel_size=2 or more"):
        start_ranks(parse_options(model="null", **NULL))
    shared = {"enable_expert_parallel": True, "data_parallel_meeting": "m"}
    with pytest.raises(OptionError, match="share experts"):
        start_ranks(parse_options(model="null", data_parallel_size=2, data_parallel_backend="ray", **shared))
    with pytest.raises(OptionError, match="for what starts engines"):
        load_executor(parse_options(model="null", data_parallel_size=2, **NULL))
    asked = parse_options(model="null", data_parallel_size=500, node_join_timeout=1.0, **NULL)
    with pytest.raises(EngineStartError, match=r"did not place 500 engines of 1 CPU each within 1 s .* has [0-9]+ in"):
        start_ranks(asked)
