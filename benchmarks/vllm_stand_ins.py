"""What vLLM's tests take from its own test helpers and from inside vLLM, for `benchmarks/vllm_cases.py`.

- `vllm` is Headrace (`headrace.as_vllm`). A name that it lacks is an `Inside`: a test that uses it is skipped, and
  counts as one of the insides of vLLM.
- `tests.utils` and `tests.conftest` are made here: a server that `headrace serve` runs, and runners of models.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import socket
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

import headrace.as_vllm  # noqa: F401
from headrace import LLM, BeamSearchParams, SamplingParams

INSIDE = "inside vLLM: "
START_S = 240
ENDS_S = 30.0


AS_VLLM = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"}
"""Headrace's modules under vLLM's names."""


class InsideKind(type):
    """The class of names that Headrace lacks. They can be imported, subclassed and read, but not used."""

    def __call__(cls, *arguments: Any, **others: Any) -> Any:
        pytest.skip(f"{INSIDE}{cls.__qualname__}", allow_module_level=True)

    def __instancecheck__(cls, instance: Any) -> bool:
        pytest.skip(f"{INSIDE}{cls.__qualname__}", allow_module_level=True)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return inside(f"{cls.__qualname__}.{name}")

    def __getitem__(cls, item: Any) -> Any:
        return cls


def inside(name: str) -> Any:
    return InsideKind(name.rsplit(".", 1)[-1], (), {"__qualname__": name})


class Answer(types.SimpleNamespace):
    """A JSON object of an answer, in the place of the class of its form."""

    completion_tokens = 0

    def model_dump(self, exclude: Any = (), **_: Any) -> dict[str, Any]:
        return {
            name: [each.model_dump() if isinstance(each, Answer) else each for each in value]
            if isinstance(value, list)
            else value.model_dump()
            if isinstance(value, Answer)
            else value
            for name, value in vars(self).items()
            if name not in exclude
        }

    @classmethod
    def model_validate(cls, given: dict[str, Any]) -> Answer:
        if "error" in given:
            raise ValueError(f"an error in the place of an answer: {given['error']}")
        answer: Answer = json.loads(json.dumps(given), object_hook=lambda fields: cls(**fields))
        return answer


CLIENTS = ("vllm.utils.serial_utils", "vllm.entrypoints.pooling.utils", "vllm.entrypoints.pooling.scoring.utils")
"""Modules of vLLM with which its tests read answers; they run as they are."""


class Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of vLLM and of its tests' helpers: each name is Headrace's, one of HELPERS, or an `Inside`."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".", maxsplit=1)[0] == "vllm" or name in ("tests.utils", "tests.conftest"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        found = self.ours(spec.name)
        if spec.name.startswith("tests."):
            file = Path(os.environ["CASES_SOURCES"], *spec.name.split("."))
            module.__file__ = str(file.with_suffix(".py"))

        def get(name: str) -> Any:
            if name.startswith("__"):
                if name in ("__path__", "__spec__", "__loader__") or not hasattr(found, name):
                    raise AttributeError(name)
                return getattr(found, name)
            if spec.name.startswith("tests.") and name.startswith(("pytest_", "collect_ignore")):
                raise AttributeError(name)
            if spec.name.startswith("tests.") and name in HELPERS:
                return HELPERS[name]
            if spec.name.startswith("vllm.assets"):
                return Asset
            if spec.name.startswith("vllm.entrypoints.pooling.") and name.endswith("Response"):
                return Answer
            try:
                given = getattr(found, name)
            except (AttributeError, ImportError):
                return inside(f"{spec.name}.{name}")
            return importlib.import_module(f"{spec.name}.{name}") if isinstance(given, types.ModuleType) else given

        module.__getattr__ = get  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Runs what reads answers. Other modules' names are looked up as they are asked for."""
        if module.__name__ in CLIENTS:
            file = Path(os.environ["CASES_ORIGINAL"], *module.__name__.split(".")).with_suffix(".py")
            exec(compile(file.read_text(), file, "exec"), vars(module))

    def ours(self, name: str) -> types.ModuleType | None:
        if not name.startswith("vllm"):
            return None
        if name in AS_VLLM:
            return AS_VLLM[name]
        try:
            return importlib.import_module("headrace" + name.removeprefix("vllm"))
        except ImportError:
            return None


class Server:
    """`headrace serve`, with the interface of the server of vLLM's tests."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str],
        *,
        env_dict: dict[str, str] | None = None,
        seed: int | None = 0,
        auto_port: bool = True,
        max_wait_seconds: float | None = None,
        override_hf_configs: dict[str, Any] | None = None,
    ) -> None:
        arguments = [*map(str, vllm_serve_args), "--metrics-prefix", "vllm"]
        if "--gpu-memory-utilization" in arguments:  # of a GPU of 80 GB
            at = arguments.index("--gpu-memory-utilization") + 1
            arguments[at] = str(min(0.5, 4 * float(arguments[at])))
        self.uds = arguments[arguments.index("--uds") + 1] if "--uds" in arguments else None
        self.host, self.port = "127.0.0.1", None
        if auto_port and not self.uds:
            arguments += ["--port", str(free_port())]
        if "--port" in arguments:
            self.port = int(arguments[arguments.index("--port") + 1])
        if seed is not None:
            arguments += ["--seed", str(seed)]
        if override_hf_configs is not None:
            arguments += ["--hf-overrides", json.dumps(override_hf_configs)]
        self.show_hidden_metrics = any("show-hidden-metrics" in each for each in arguments)
        command = [sys.executable, "-m", "headrace.frontend.cli.main", "serve", model, *arguments]
        self._log = Path(os.environ["CASES_WORK"]) / f"server-{os.getpid()}-{time.monotonic_ns()}.log"
        with self._log.open("w") as log:
            self.proc = subprocess.Popen(command, env={**os.environ, **(env_dict or {})}, stdout=log, stderr=log)
        try:
            self._wait_until_ready()
        except BaseException:
            self._shutdown()
            raise

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_S
        with self.client() as client:
            while time.monotonic() < end:
                if self.proc.poll() is not None:
                    said = [line for line in self._log.read_text().splitlines() if line.strip()]
                    raise RuntimeError(f"the server ended with status {self.proc.returncode}: {' | '.join(said[-3:])}")
                with contextlib.suppress(httpx.TransportError):
                    if client.get(self.url_for("health")).status_code == 200:
                        return
                time.sleep(0.1)
        raise RuntimeError(f"the server was not ready after {START_S} s")

    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.HTTPTransport(uds=self.uds) if self.uds else None)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._shutdown()

    def _get_process_termination_timeout(self) -> float:
        return ENDS_S

    def _shutdown(self) -> None:
        self.proc.terminate()
        try:
            self.proc.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            self.proc.kill()

    @property
    def url_root(self) -> str:
        return f"http://{self.uds.split('/')[-1]}" if self.uds else f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts)])

    def get_client(self, **given: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._client_options("v1", given))

    def get_async_client(self, **given: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._client_options("v1", given))

    def get_client_anthropic(self, **given: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self._client_options("", given))

    def get_async_client_anthropic(self, **given: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._client_options("", given))

    def _client_options(self, path: str, given: dict[str, Any]) -> dict[str, Any]:
        base = self.url_for(path) if path else self.url_root
        return {"base_url": base, "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 600, **given}


class Asset:
    """An image, a video or a sound, which a test names in its parameters."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing is loaded."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        pytest.skip(f"{INSIDE}vllm.assets", allow_module_level=True)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class VllmRunner:
    """A model run by `LLM`, with the defaults of vLLM's tests."""

    def __init__(self, model_name: str, **options: Any) -> None:
        options = {"seed": 0, "max_model_len": 1024, "block_size": 16, "trust_remote_code": True, **options}
        options["tokenizer"] = options.pop("tokenizer_name", None)
        options.pop("default_torch_num_threads", None)
        self.llm = LLM(model_name, **{name: value for name, value in options.items() if value is not None})

    def __enter__(self) -> VllmRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.shutdown()

    def embed(self, prompts: Any, *_: Any, **others: Any) -> Any:
        return [each.outputs.embedding for each in self.llm.embed(prompts, **others)]

    def classify(self, prompts: Any) -> Any:
        return [each.outputs.probs for each in self.llm.classify(prompts)]

    def token_embed(self, prompts: Any) -> Any:
        return [each.outputs.data for each in self.llm.encode(prompts, pooling_task="token_embed")]

    def token_classify(self, prompts: Any) -> Any:
        return [each.outputs.data for each in self.llm.encode(prompts, pooling_task="token_classify")]

    def score(self, text_1: Any, text_2: Any, *_: Any, **others: Any) -> Any:
        return [each.outputs.score for each in self.llm.score(text_1, text_2, **others)]

    def get_llm(self) -> LLM:
        return self.llm

    def collective_rpc(self, *arguments: Any, **others: Any) -> Any:
        return self.llm.collective_rpc(*arguments, **others)

    def generate(self, prompts: Any, sampling_params: Any, **others: Any) -> Any:
        found = []
        if isinstance(prompts, list):
            prompts = [{"prompt_embeds": each} if hasattr(each, "requires_grad") else each for each in prompts]
        for output in self.llm.generate(prompts, sampling_params=sampling_params, **others):
            ids, text = list(output.prompt_token_ids or ()), output.prompt or ""
            each = [(ids + list(one.token_ids), text + one.text) for one in output.outputs]
            found.append(([one[0] for one in each], [one[1] for one in each]))
        return found

    def generate_greedy(self, prompts: Any, max_tokens: int, **others: Any) -> Any:
        greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
        return [(ids[0], texts[0]) for ids, texts in self.generate(prompts, greedy, **others)]

    def generate_w_logprobs(
        self, prompts: Any, sampling_params: Any, *, include_prompt_token_ids: bool = False, **others: Any
    ) -> Any:
        outputs = self.llm.generate(prompts, sampling_params=sampling_params, **others)
        found: list[tuple[Any, ...]] = [
            (list(each.outputs[0].token_ids), each.outputs[0].text, each.outputs[0].logprobs) for each in outputs
        ]
        if include_prompt_token_ids:
            found = [(*one, each.prompt_token_ids) for one, each in zip(found, outputs, strict=True)]
        if sampling_params.prompt_logprobs is None:
            return found
        return [(*one, each.prompt_logprobs) for one, each in zip(found, outputs, strict=True)]

    def generate_greedy_logprobs(
        self,
        prompts: Any,
        max_tokens: int,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None = None,
        **more: Any,
    ) -> Any:
        names = {name: more[name] for name in ("stop_token_ids", "stop") if name in more}
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=num_logprobs, prompt_logprobs=num_prompt_logprobs, **names
        )
        return self.generate_w_logprobs(prompts, params)

    def generate_beam_search(
        self, prompts: Any, beam_width: int, max_tokens: int, concurrency_limit: int | None = None, **_: Any
    ) -> Any:
        outputs = self.llm.beam_search(
            [{"prompt": each} if isinstance(each, str) else each for each in prompts],
            BeamSearchParams(beam_width=beam_width, max_tokens=max_tokens),
            concurrency_limit=concurrency_limit,
        )
        return [([one.tokens for one in each.sequences], [one.text for one in each.sequences]) for each in outputs]


FLOATS = {"half": "float16", "float": "float32"}


class HfRunner:
    """The same model run by transformers."""

    def __init__(
        self,
        model_name: str,
        dtype: str = "auto",
        *,
        is_sentence_transformer: bool = False,
        is_cross_encoder: bool = False,
        auto_cls: Any = None,
        **_: Any,
    ) -> None:
        import transformers

        if is_sentence_transformer or is_cross_encoder:
            import sentence_transformers

            kind = sentence_transformers.CrossEncoder if is_cross_encoder else sentence_transformers.SentenceTransformer
            self.model: Any = kind(model_name, device="cpu", model_kwargs={"dtype": dtype})
            return
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model_name)
        kind = auto_cls or transformers.AutoModelForCausalLM
        self.model = kind.from_pretrained(model_name, dtype=FLOATS.get(dtype, dtype)).eval()
        self.config = self.model.config

    @staticmethod
    def wrap_device(given: Any, *_: Any) -> Any:
        return given

    def classify(self, prompts: Sequence[str]) -> Any:
        found = [self.model(**each).logits for each in self.get_inputs(prompts)]
        if self.config.problem_type == "regression":
            return [each[0].tolist() for each in found]
        if self.config.problem_type == "multi_label_classification":
            return [each.sigmoid()[0].tolist() for each in found]
        return [each.softmax(-1)[0].tolist() for each in found]

    def __enter__(self) -> HfRunner:
        return self

    def __exit__(self, *_: object) -> None:
        del self.model

    def encode(self, prompts: Sequence[str], **others: Any) -> Any:
        return self.model.encode(prompts, convert_to_numpy=True, **others).tolist()

    def predict(self, prompts: Any, **others: Any) -> Any:
        return self.model.predict(prompts, convert_to_tensor=True, **others)

    def get_inputs(self, prompts: Sequence[str], **_: Any) -> list[Any]:
        return [self.tokenizer(each, return_tensors="pt") for each in prompts]

    def get_prompt_embeddings(self, prompts: Sequence[str]) -> list[Any]:
        table = self.model.get_input_embeddings()
        return [table(each["input_ids"]).squeeze(0).detach() for each in self.get_inputs(prompts)]

    def _run(self, prompts: Sequence[str], max_tokens: int, **others: Any) -> list[Any]:
        return [
            self.model.generate(**each, max_new_tokens=max_tokens, do_sample=False, use_cache=True, **others)
            for each in self.get_inputs(prompts)
        ]

    def generate_greedy(self, prompts: Sequence[str], max_tokens: int, **_: Any) -> Any:
        found = [each[0].tolist() for each in self._run(prompts, max_tokens)]
        return [(ids, self.tokenizer.decode(ids, skip_special_tokens=True)) for ids in found]

    def generate_beam_search(self, prompts: Sequence[str], beam_width: int, max_tokens: int, **_: Any) -> Any:
        found = []
        for beams in self._run(prompts, max_tokens, num_beams=beam_width, num_return_sequences=beam_width):
            ids = [[each for each in beam if each != self.tokenizer.pad_token_id] for beam in beams.tolist()]
            found.append((ids, [self.tokenizer.decode(each, skip_special_tokens=True) for each in ids]))
        return found

    def generate_greedy_logprobs(self, prompts: Sequence[str], max_tokens: int, **_: Any) -> Any:
        """For each prompt, the log-probabilities of each step: [its tokens, vocab_size] of the prompt, then of each
        token but the last."""
        import torch

        found = []
        for given in self.get_inputs(prompts):
            out = self.model.generate(**given, max_new_tokens=max_tokens, do_sample=False)
            with torch.no_grad():
                logits = self.model(out).logits.float()
            logprobs, prompt = torch.log_softmax(logits[0], dim=-1), given["input_ids"].shape[1]
            found.append([logprobs[:prompt], *logprobs[prompt:-1].split(1)])
        return found


def as_it_is(function: Any = None, **_: Any) -> Any:
    """A decorator that leaves the function."""
    return function if callable(function) else lambda each: each


def without_gpus(*_: Any, **__: Any) -> Any:
    return pytest.mark.skip(reason="needs GPUs")


HELPERS: dict[str, Any] = {
    "RemoteOpenAIServer": Server,
    "RemoteOpenAIServerCustom": inside("tests.utils.RemoteOpenAIServerCustom"),
    "RemoteLaunchRenderServer": inside("tests.utils.RemoteLaunchRenderServer"),
    "VllmRunner": VllmRunner,
    "HfRunner": HfRunner,
    "ROCM_EXTRA_ARGS": [],
    "ROCM_ENV_OVERRIDES": {},
    "VLLM_PATH": Path(os.environ.get("CASES_SOURCES", ".")),
    "create_new_process_for_each_test": as_it_is,
    "fork_new_process_for_each_test": as_it_is,
    "spawn_new_process_for_each_test": as_it_is,
    "single_gpu_only": as_it_is,
    "multi_gpu_only": without_gpus,
    "multi_gpu_test": without_gpus,
    "multi_gpu_marks": lambda **_: [pytest.mark.skip(reason="needs GPUs")],
    "large_gpu_mark": lambda min_gb: pytest.mark.skip(reason="needs GPUs"),
    "large_gpu_test": without_gpus,
    "requires_fp8": pytest.mark.skip(reason="needs GPUs"),
    "requires_spawn_multiprocessing": lambda: True,
    "set_random_seed": lambda seed: __import__("torch").manual_seed(seed),
    "flat_product": lambda *lists: __import__("itertools").product(*lists),
    "wait_for_gpu_memory_to_clear": lambda **_: None,
    "wait_for_memory_to_settle": lambda **_: None,
}


def named(name: str) -> Any:
    """A name of the helpers, which the engines' processes ask for too."""
    if name.startswith(("__", "pytest_", "collect_ignore")):
        raise AttributeError(name)
    return HELPERS[name] if name in HELPERS else inside(f"tests.utils.{name}")


def install() -> None:
    """Replaces vllm and the helpers in this process."""
    for name in AS_VLLM:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Modules())


class Plugin:
    """The fixtures of vLLM's conftest.py, and a line of JSON for each case that has ended."""

    def __init__(self, results: Path) -> None:
        self._results = results

    def _tell(self, case: str, outcome: str, message: str) -> None:
        with self._results.open("a") as file:
            file.write(json.dumps({"case": case.split("tests/", 1)[-1], "outcome": outcome, "message": message}) + "\n")

    @pytest.fixture(scope="session")
    def vllm_runner(self) -> type[VllmRunner]:
        return VllmRunner

    @pytest.fixture(scope="session")
    def hf_runner(self) -> type[HfRunner]:
        return HfRunner

    @pytest.fixture
    def example_prompts(self) -> list[str]:
        file = Path(os.environ["CASES_SOURCES"]) / "tests" / "prompts" / "example.txt"
        return file.read_text().splitlines()

    @pytest.fixture
    def num_gpus_available(self) -> int:
        return 0

    @pytest.fixture
    def caplog_vllm(self, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
        return caplog

    @pytest.fixture
    def enable_pickle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

    @pytest.fixture
    def use_fresh_inductor_cache(self) -> None:
        """Nothing is compiled with inductor."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            self._tell(report.nodeid, report.outcome, told(report))
        return report

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome != "passed":
            self._tell(report.nodeid, f"module {report.outcome}", told(report))


def told(report: Any) -> str:
    """The line that says why a case did not pass."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:600]
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return f"{Path(crash.path).name}:{crash.lineno}: {crash.message}"[:900]
    return str(report.longrepr)[-600:]


def run_files(sources: Path, results: Path, files: Sequence[str]) -> None:
    """Runs files of tests in this process."""
    install()
    sys.path.insert(0, str(sources))
    os.environ["PY_IGNORE_IMPORTMISMATCH"] = "1"
    for name in ("tests.conftest", "tests.utils"):  # before pytest looks for the files of these names
        importlib.import_module(name)
    fixed = ["-c", "/dev/null", "--rootdir", str(sources), "--continue-on-collection-errors"]
    fixed += ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "pytest_asyncio", "-o", "asyncio_mode=strict"]
    fixed += ["-W", "ignore", "-q", "--no-header", "--tb=short", "--timeout=300"]
    fixed += ["-o", "asyncio_default_fixture_loop_scope=function"]
    code = pytest.main([*fixed, *files], plugins=[Plugin(results)])
    sys.stdout.flush()
    os._exit(int(code))


if __name__ == "__main__":
    run_files(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
