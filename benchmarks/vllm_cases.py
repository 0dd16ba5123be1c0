"""Runs vLLM's own tests of its server, LLM class and samplers against Headrace, each file in a process of its own.

    python benchmarks/vllm_cases.py VLLM_SOURCES DEMO_FOLDER [--report FILE] [--only PART ...] [--seconds N]

VLLM_SOURCES is an unpacked source archive of vLLM, whose tests run as they are; `benchmarks/demo_folder.py` makes
DEMO_FOLDER. Needs `pytest-asyncio`, `accelerate`, `pybase64`, `fastapi` and `sentence-transformers`. The names of
models on the hub that the tests ask for are links to DEMO_FOLDER in a cache that is made for the run, with the context
length that each was published with, so every model is the demo model, and every adapter is a small one of it; those of
tests of pooling are made by `benchmarks/vllm_models.py`. `benchmarks/vllm_stand_ins.py` is the rest of the adapter.

A case passes; or uses something inside vLLM, which docs/coming-from-vllm.md says does not exist here; or skips itself;
or fails. Each failure is looked up in `benchmarks/vllm_verdicts.json`, where a verdict names its cases one by one, and
a part of the message with which they fail: a case that fails otherwise than it is known to is undocumented. So is one
that no verdict names. Verdicts that no failure has met are printed too.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import vllm_models
from report import write_report
from safetensors.torch import save_file

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "coming-from-vllm.md"
FILES = (
    "detokenizer/test_*.py",
    "samplers/test_*.py",
    "v1/sample/test_*.py",
    "v1/logits_processors/test_*.py",
    "v1/engine/test_async_llm.py",
    "v1/engine/test_llm_engine.py",
    "v1/engine/test_engine_args.py",
    "v1/engine/test_abort_final_step.py",
    "v1/engine/test_parallel_sampling.py",
    "v1/structured_output/test_validation.py",
    "v1/e2e/general/test_min_tokens.py",
    "v1/e2e/general/test_context_length.py",
    "v1/e2e/general/test_streaming_input.py",
    "v1/e2e/general/test_async_scheduling.py",
    "basic_correctness/models/test_*.py",
    "engine/test_arg_utils.py",
    "test_sampling_params.py",
    "test_outputs.py",
    "test_logprobs.py",
    "test_regression.py",
    "test_request_input_bounds.py",
    "test_version.py",
    "entrypoints/pooling/**/test_*.py",
    "models/language/pooling/test_*.py",
    "entrypoints/llm/**/test_*.py",
    "entrypoints/cli/test_*.py",
    "entrypoints/openai/**/test_*.py",
    "entrypoints/anthropic/test_*.py",
    "entrypoints/serve/**/test_*.py",
    "entrypoints/launchers/**/test_*.py",
    "entrypoints/rl/**/test_*.py",
    "entrypoints/unit_tests/test_*.py",
)
LEFT_OUT = (
    "mm_loras",
    "mcp_tools",
    "_vlm",
    "_vision",
    "mm_classifier",
    "jina_embeddings_v5",
    "jina_reranker_v3",
    "nomic_max_model_len",
    "mteb",
    "tensorizer",
    "weight_transfer",
    "routed_experts",
    "lmeval",
    "sagemaker_handler",
    "sagemaker_middleware",
    "sagemaker_stateful",
    "render",
)
"""Parts of paths of tests of images, tool servers of their own, training and packages that are not here."""
MODEL_NAME = re.compile(r"""["']([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)["']""")
STARTS = re.compile(r"RemoteOpenAIServer|\bLLM\(|vllm_runner|VllmRunner|AsyncLLM\.|LLMEngine\.|LLMEngine\(")
"""What tests with an engine of their own mention."""
OF_INSIDES = re.compile(
    r"^(from|import) vllm\.(entrypoints\.(?!llm )|v1\.|parser|renderers|snapshot|model_exec)", re.MULTILINE
)
"""An import at the beginning of a file that tests parts of vLLM, unless it starts an engine."""
FOLDERS = re.compile(r"(?:\.\.)?(?:/[\w.+~-]+)+/|(?:[\w.+~-]+/){2,}")
"""Paths in messages, which name folders of the machine."""
CASE = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)
CONTEXT = 32768
CONTEXTS = {"distilbert/distilgpt2": 1024, "openai-community/gpt2": 1024} | dict.fromkeys(
    (
        *("facebook/opt-125m", "JackFram/llama-160m", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        *("hmellor/tiny-random-LlamaForCausalLM", "intfloat/multilingual-e5-small"),
    ),
    2048,
)
"""The context lengths of models that the tests name. Others have CONTEXT, which is more than the demo model was
trained for."""
ADAPTERS = {
    "typeof/zephyr-7b-beta-lora",
    "charent/self_cognition_Alice",
    "Jackmin108/Qwen3-0.6B-Meow-LoRA",
    "Jackmin108/Qwen3-0.6B-Woof-LoRA",
    "jekunz/smollm-135m-lora-fineweb-faroese",
    "peft-internal-testing/opt-125m-dummy-lora",
}
"""The adapters that the tests name."""
ADAPTED = ("q_proj", "v_proj")
RANK = 8
MIXED = ("test_sampling_params.py", "test_request_input_bounds.py")
"""Files whose cases test objects of users' too."""
NOT_MODELS = ("application/", "text/", "image/", "audio/", "v1/", "video/")

VERDICTS = HERE / "vllm_verdicts.json"


class Verdict(NamedTuple):
    """Why some cases fail."""

    kind: str
    """documented: docs/coming-from-vllm.md has the row `why`. elsewhere: the case cannot run or be judged here."""
    why: str
    said: str
    """A part of the message with which the cases fail."""
    cases: frozenset[str]

    @classmethod
    def read(cls) -> list[Verdict]:
        stored = json.loads(VERDICTS.read_text())
        return [cls(each["kind"], each["why"], each["said"], frozenset(each["cases"])) for each in stored]

    def is_of(self, case: dict[str, Any]) -> bool:
        return case["case"] in self.cases and self.said in case["message"]


def make_adapter(demo: Path, folder: Path) -> None:
    """A LoRA adapter of the demo model, with small weights at random."""
    config = json.loads((demo / "config.json").read_text())
    head, hidden = config["head_dim"], config["hidden_size"]
    widths = {"q_proj": head * config["num_attention_heads"], "v_proj": head * config["num_key_value_heads"]}
    random = torch.Generator().manual_seed(0)
    weights = dict[str, torch.Tensor]()
    for layer in range(config["num_hidden_layers"]):
        for part in ADAPTED:
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}.lora"
            weights[f"{name}_A.weight"] = torch.randn(RANK, hidden, generator=random) / hidden
            weights[f"{name}_B.weight"] = torch.randn(widths[part], RANK, generator=random) / hidden
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    asked = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ADAPTED, "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps({"bias": "none", "lora_dropout": 0.0, **asked}))


def overlay(sources: Path, folder: Path) -> Path:
    """The sources, with the stand-ins in place of the helpers of vLLM's tests, for the engines' processes too."""
    (folder.parent / "vllm_sources").symlink_to(sources)
    for one, kept in ((sources, "tests"), (sources / "tests", "")):
        target = folder / one.relative_to(sources)
        target.mkdir(parents=True)
        for each in one.iterdir():
            if each.name not in (kept, "vllm", "utils.py", "conftest.py"):
                (target / each.name).symlink_to(each)
    for name in ("utils", "conftest"):
        (folder / "tests" / f"{name}.py").write_text(
            f"import sys\nsys.path.append({str(HERE)!r})\nimport vllm_stand_ins\nvllm_stand_ins.install()\n"
            "__getattr__ = vllm_stand_ins.named\n"
        )
    return folder


def link_models(sources: Path, files: list[Path], demo: Path, home: Path) -> None:
    """Makes a hub cache in which each model's name that a test mentions is the demo model."""
    names = {name for file in files for name in MODEL_NAME.findall(file.read_text())}
    names |= {name for file in sources.glob("tests/**/conftest.py") for name in MODEL_NAME.findall(file.read_text())}
    revision = "0" * 40
    for name in sorted(names):
        if name.startswith(NOT_MODELS) or name.endswith((".py", ".json", ".txt", ".jinja")):
            continue
        folder = home / "hub" / f"models--{name.replace('/', '--')}"
        for part in ("refs", f"snapshots/{revision}"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text(revision)
        if name in ADAPTERS:
            make_adapter(demo, folder / "snapshots" / revision)
            continue
        if name in vllm_models.MAKERS:
            vllm_models.MAKERS[name](folder / "snapshots" / revision, demo)
            continue
        for file in demo.iterdir():
            if file.name != "config.json":
                (folder / "snapshots" / revision / file.name).symlink_to(file)
        config = json.loads((demo / "config.json").read_text()) | {
            "max_position_embeddings": CONTEXTS.get(name, CONTEXT)
        }
        (folder / "snapshots" / revision / "config.json").write_text(json.dumps(config))


def run_files(sources: Path, files: list[Path], work: Path, seconds: float) -> list[dict[str, Any]]:
    """The outcomes of the cases of some files, in one process."""
    results = work / "results.jsonl"
    results.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "HF_HOME": str(work / "home"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "CASES_WORK": str(work),
        "CASES_SOURCES": str(sources),
        "CASES_ORIGINAL": str(sources.parent / "vllm_sources"),
    }
    command = [sys.executable, str(HERE / "vllm_stand_ins.py"), str(sources), str(results), *map(str, files)]
    log_file = work / f"{files[0].stem}.log"
    cut = list[dict[str, Any]]()
    with log_file.open("w") as log:
        process = subprocess.Popen(
            command, cwd=work, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            message = f"not all was run in {seconds:g} s"
            print(f"{[file.stem for file in files]}: {message}")
            cut.append({"case": f"{files[-1].relative_to(sources / 'tests')}::the rest", "message": message})
        finally:
            for each in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, each)
                except ProcessLookupError:
                    break
                if each == signal.SIGTERM:
                    process.poll() is None and process.wait(30)
            process.wait()
    found = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    found += [{**each, "outcome": "failed"} for each in cut]
    for each in found:
        each["file"] = each["case"].split("::")[0]
    names = {str(file.relative_to(sources / "tests")) for file in files} - {each["file"] for each in found}
    said = log_file.read_text()[-400:]
    return found + [{"case": name, "file": name, "outcome": "module failed", "message": said} for name in sorted(names)]


def of_insides(sources: Path, files: list[Path]) -> list[dict[str, Any]]:
    """The test functions of files that test parts of vLLM; they are not run."""
    found = []
    for file in files:
        text, name = file.read_text(), str(file.relative_to(sources / "tests"))
        if OF_INSIDES.search(text) and not STARTS.search(text) and file.name not in MIXED:
            message = "inside vLLM: what the file imports"
            found += [
                {"case": f"{name}::{case}", "file": name, "outcome": "skipped", "message": message}
                for case in CASE.findall(text)
            ]
    return found


def groups(files: list[Path]) -> Iterator[list[Path]]:
    """The files that start no engine together, then each other by itself."""
    starts = {file: STARTS.search(file.read_text()) is not None for file in files}
    if quick := [file for file in files if not starts[file]]:
        yield quick
    yield from ([file] for file in files if starts[file])


def keep(raw: Path | None, found: list[dict[str, Any]]) -> None:
    if raw is not None:
        with raw.open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in found)


def judge(case: dict[str, Any], verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """The case with its kind: passed, inside, skipped, documented, elsewhere, or undocumented."""
    if case["outcome"] == "passed":
        return {**case, "kind": "passed"}
    if "inside vLLM: " in case["message"]:
        return {**case, "kind": "inside", "why": case["message"].split("inside vLLM: ", 1)[1].split("'")[0].strip()}
    if case["outcome"] in ("skipped", "module skipped"):
        return {**case, "kind": "skipped"}
    for each in verdicts:
        if each.is_of(case):
            return {**case, "kind": each.kind, "why": each.why}
    return {**case, "kind": "undocumented"}


KINDS = ("passed", "inside", "skipped", "documented", "elsewhere", "undocumented")


def show(cases: list[dict[str, Any]]) -> dict[str, Any]:
    by_file: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for each in cases:
        by_file[each["file"]][each["kind"]] += 1
    total = sum(by_file.values(), collections.Counter[str]())
    print(f"{'file':72}" + "".join(f"{kind:>14}" for kind in KINDS))
    for name, counts in [*sorted(by_file.items()), ("all", total)]:
        print(f"{name:72}" + "".join(f"{counts[kind]:14}" for kind in KINDS))
    for kind in ("documented", "elsewhere", "undocumented"):
        for each in cases:
            if each["kind"] == kind:
                print(f"{kind}: {each['case']}: {each.get('why') or each['message']}")
    failed = [{name: each[name] for name in ("case", "kind", "why", "message") if name in each} for each in cases]
    failed = [each for each in failed if each["kind"] in ("documented", "elsewhere", "undocumented")]
    for one in failed:
        one["message"] = FOLDERS.sub("", one["message"])
    return {"total": {kind: total[kind] for kind in KINDS}, "by_file": by_file, "failed": failed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="folder of an unpacked source archive of vLLM")
    parser.add_argument("demo", type=Path, help="folder of the demo model")
    parser.add_argument("--report", type=Path, help="file for the results as JSON")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of the files to run")
    parser.add_argument("--seconds", type=float, default=600, help="limit per file (default 600)")
    parser.add_argument("--raw", type=Path, help="file of outcomes: read if it exists, written otherwise")
    asked = parser.parse_args()
    sources = asked.sources.resolve()
    verdicts, docs = Verdict.read(), DOCS.read_text()
    missing = sorted({each.why for each in verdicts if each.kind == "documented" and each.why not in docs})
    if missing:
        sys.exit(f"{DOCS.name} does not say: {missing}")
    files = sorted({file for pattern in FILES for file in (sources / "tests").glob(pattern)})
    files = [file for file in files if not any(part in str(file) for part in LEFT_OUT)]
    all_files = [str(file.relative_to(sources / "tests")) for file in files]
    files = [file for file in files if not asked.only or any(part in str(file) for part in asked.only)]
    done = [json.loads(line) for line in asked.raw.read_text().splitlines()] if asked.raw and asked.raw.exists() else []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        link_models(sources, files, asked.demo.resolve(), work / "home")
        laid = overlay(sources, work / "sources")
        known = {each["file"] for each in done}
        files = [file for file in files if str(file.relative_to(sources / "tests")) not in known]
        inside = of_insides(sources, files)
        done += inside
        keep(asked.raw, inside)
        known = {each["file"] for each in inside}
        for group in groups([file for file in files if str(file.relative_to(sources / "tests")) not in known]):
            found = run_files(laid, [laid / file.relative_to(sources) for file in group], work, asked.seconds)
            done += found
            keep(asked.raw, found)
            counts = collections.Counter(judge(each, verdicts)["kind"] for each in found)
            print(f"{group[0].stem}, {len(group)} files: {dict(counts)}", flush=True)
    results = show([judge(each, verdicts) for each in done])
    for each in verdicts:
        for case in sorted(each.cases - {one["case"] for one in done if each.is_of(one)}):
            print(f"not met: {case}: {each.why}")
    told = {each["file"] for each in done}
    results["not_run"] = [name for name in all_files if name not in told]
    if asked.report:
        write_report(asked.report, "vllm_cases", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
