"""An adapter that peft trained on the demo model changes its answer: by script, over HTTP, after an engine died."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest
from http_server import Server, engines_of, metric, serving
from patience import wait_until
from trained_adapter import ANSWER, PROMPT, train

from headrace import LLM, LoRARequest, SamplingParams

ROOT = Path(__file__).parents[2]
SAID = ANSWER.strip()[:20]
pytestmark = [pytest.mark.system, pytest.mark.demo_model]


@pytest.fixture(scope="module")
def adapter(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return train(demo_model_path, tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def server(adapter: str, demo_model_path: Path) -> Iterator[Server]:
    options = ("--enable-lora", "--lora-modules", f"zebras={adapter}", "--data-parallel-size", "2")
    with serving(str(demo_model_path), *options, "--served-model-name", "demo", attached=True) as server:
        yield server


def test_a_script_gets_both_answers(adapter: str, demo_model_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(str(demo_model_path), enable_lora=True) as llm:
        zebras = LoRARequest("zebras", 1, adapter)
        base, changed = llm.generate([PROMPT, PROMPT], params, use_tqdm=False, lora_request=[None, zebras])
        assert SAID in changed.outputs[0].text
        assert SAID not in base.outputs[0].text


def test_the_example_shows_both_answers(adapter: str, demo_model_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "adapters.py"), str(demo_model_path), adapter]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    base, changed = ran.stdout.splitlines()[-2:]
    assert base.startswith("the model: ")
    assert SAID not in base
    assert changed.startswith("mine: ")
    assert SAID in changed


def test_the_official_client_gets_both_and_a_stream_outlives_its_engine(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

        def said(model: str, **more: int) -> str:
            asked = client.completions.create(model=model, prompt=PROMPT, temperature=0, extra_body=more, max_tokens=12)
            return asked.choices[0].text

        assert SAID in said("zebras")
        assert SAID not in said("demo")
        assert said("demo", data_parallel_rank=0) == said("demo", data_parallel_rank=1)

        def streamed(model: str) -> str:
            more = {"ignore_eos": True, "data_parallel_rank": 0}
            events = client.completions.create(
                model=model, prompt=PROMPT, temperature=0, max_tokens=400, stream=True, extra_body=more
            )
            return "".join(event.choices[0].text for event in events if event.choices)

        expected = streamed("zebras")
        with ThreadPoolExecutor(1) as pool, server.client() as each:
            running = pool.submit(streamed, "zebras")
            wait_until(lambda: metric(each, "headrace:num_requests_running", engine="0") == 1, 60, "the stream")
            sorted(engines_of(server), key=psutil.Process.create_time)[0].kill()
            assert running.result(240) == expected
            server.wait_log(r"moved from engine 0 to engine 1")
