"""Runs vLLM's own tests of its server, LLM class and samplers against Headrace, each file in a process of its own.

    python benchmarks/vllm_cases.py VLLM_SOURCES DEMO_FOLDER [--report FILE] [--only PART ...] [--seconds N]

VLLM_SOURCES is an unpacked source archive of vLLM, whose tests run as they are; `benchmarks/demo_folder.py` makes
DEMO_FOLDER. Needs `pytest-asyncio`. The names of models on the hub that the tests ask for are links to DEMO_FOLDER in a
cache that is made for the run, so every model is the demo model. `benchmarks/vllm_stand_ins.py` is the rest of the
adapter.

A case passes; or uses something inside vLLM, which docs/coming-from-vllm.md says does not exist here; or skips itself;
or fails. Each failure is looked up in DOCUMENTED and ELSEWHERE. What neither has is printed as undocumented.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import write_report

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
    "lora",
    "mcp_tools",
    "_vlm",
    "tensorizer",
    "weight_transfer",
    "routed_experts",
    "lmeval",
    "sagemaker",
    "render",
)
"""Parts of paths of tests of adapters, images, tool servers of their own, training and packages that are not here."""
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
"""Of the models that the tests name. The demo model was trained for less."""
MIXED = ("test_sampling_params.py", "test_request_input_bounds.py")
"""Files whose cases test objects of users' too."""
NOT_MODELS = ("application/", "text/", "image/", "audio/", "v1/", "video/")

DOCUMENTED: dict[str, str] = {
    "*zephyr-lora[]]": "options for unsupported features",
    " kv_transfer_params is refused": "`kv_transfer_params`, `vllm_xargs` that no logits processor reads",
    " enable_response_messages is refused": "`enable_response_messages`, `previous_input_messages` of responses",
    "assert CompletionUsa...": "`usage` of answers",
    "assert 'mode' == 'query.mode'": "`param` of errors in a query",
    "*test_anthropic_streaming": "`usage.input_tokens` of `message_start`",
    "*test_anthropic_streaming_cache_usage": "`usage.input_tokens` of `message_start`",
    "*test_request_output_forward_compatible": "unknown fields of a `RequestOutput`",
    "*test_extra_args_preserves_custom_objects*": "| `extra_args`, `vllm_xargs` |",
    "*test_routed_experts_offset_validated*": "`routed_experts_prompt_start`, `watermarking`",
    "*_limit_can_be_overridden*": "vLLM's environment variables with limits",
    "*test_direct_beam_width_rejects_values_over_sequence_cap": "vLLM's environment variables with limits",
    "*test_bad_word_tokenization_stops_at_worker_limit": "more than 64 `bad_words`",
    "*test_stateful.py::test_background": "`status` of a background response that runs",
    "*test_min_tokens_validation": "the message of a number out of range",
    "*test_min_tokens_with_terminal_structured_output": "| an answer whose form (`structured_outputs`) is complete",
    "*test_show_version": "`GET /version`",
    "*test_check_models": "options for unsupported features",
    " --runner=pooling is refused": "options for unsupported features",
    "*test_long_seed": "the message of a number out of range",
    "*test_unset_max_tokens_rejects_oversized_min_tokens": "the message of a number out of range",
    "*test_require_mm_embeds": "images, audio and video in prompts",
    "*test_sleep.py::test_sleep_mode": "names begin with `vllm:` in Python, and with `--metrics-prefix`",
    "*test_wait_timeout_completes_requests": "names begin with `vllm:` in Python, and with `--metrics-prefix`",
    "*test_trace_replay_params.py*": "`trace_decode_token_ids`, `prompt_logprob_token_ids`",
    "there is no /weight_checker here": "`POST /weight_checker`",
    "*test_weight_checker.py*": "`POST /weight_checker`",
    " data_parallel_external_lb=True is refused": "options for unsupported features",
    "what the engine decided is in `engine`": "| `create_engine_config()` |",
    " has no logits processors to read them": "| `extra_args`, `vllm_xargs` |",
    " is refused: multimodal input is not supported": "images, audio and video in prompts",
}
"""Patterns of a case, or of its message, and the row of docs/coming-from-vllm.md that says what is otherwise."""
WORDS = "words, or a form of answer, that the demo model does not produce"
ELSEWHERE: dict[str, str] = {
    " Timeout (>": "it did not end in time on a machine with other work",
    "Read timed out": "it did not end in time on a machine with other work",
    "ModelConfig.__init__() got": "it constructs a config object of vLLM's inside",
    "No module named 'lm_eval'": "it needs lm-eval",
    "*test_diffusion_rejects_unsupported_params*": "diffusion models are not run here",
    "*test_more_than_one_prompt_logprobs_chat*": WORDS,
    "*test_response_format_json_object": WORDS,
    "*test_completion.py::test_single_completion*": WORDS,
    "*test_completion.py::test_completion_streaming*": WORDS,
    "*test_completion.py::test_parallel_*": WORDS,
    "*test_return_token_ids.py::test_chat_completion_with_tool_use": WORDS,
    "*test_comparison_with_prompt_logprobs_and_logprobs": "the demo model ends at once, and its end token has no text",
    "*test_no_bad_words.py*": "it expects token ids of another tokenizer",
    "*test_sampling_params_e2e.py::test_stop": WORDS,
    "*test_gc": "it reads a GPU's memory",
    "*test_model_from_modelscope": "it needs a hub",
    " Invalid JSON from backend": WORDS,
    " tokenizer_mode=mistral reads": "the demo model's tokenizer is not Mistral's",
    " No module named 'pybase64'": "it needs pybase64",
    " property 'llm_engine' of 'LLM' object": "it replaces vLLM's engine by a mock",
    " No module named 'tests'": "the engine imports nothing from a test's folder",
    "*test_stop_strings.py::test_stop_strings": WORDS,
    "*test_computed_prefix_blocks*": WORDS,
    "*test_chat_extra_kwargs*": "the demo model's template does not read the argument",
    "*responses/test_basic.py*": WORDS,
    "*responses/test_stateful.py::test_*prev*": WORDS,
    "*responses/test_structured_output.py*": WORDS,
    "*test_anthropic_tool_call*": WORDS,
    "*test_anthropic_structured_output*": WORDS,
    "*test_simple.py::test_*reasoning_*": "the demo model does not reason",
    "*test_include_reasoning.py*": "the demo model does not reason",
    "*test_thinking_token_budget_limits_reasoning*": "the demo model does not reason",
    "*test_completion_with_function_calling.py::test_function_tool_use*": "the demo model neither reasons nor calls",
    "*test_function_call.py::test_function_tool_use*": "the demo model does not call",
    "*test_multi_api_servers.py::test_completion_streaming*": WORDS,
    "Harmony tests require gpt_oss": "it needs gpt-oss",
    "No module named 'openai_harmony'": "it needs openai-harmony",
    "*test_engine_metrics": WORDS,
    "LLMEngine has no '_llm'": "it replaces vLLM's engine by a mock",
    "*test_rejects_custom_logitsprocs*": "it compares with a text of vLLM's inside",
    "*test_mm_prefix_lm_raises_batched_tokens_floor": "it replaces a method inside vLLM",
    "v1/structured_output/test_validation.py*": "it calls methods inside vLLM",
    " cannot be loaded: ModuleNotFoundError: Headrace has no": "its logits processor's file imports vLLM's insides",
    "*test_head_dtype.py*": "it computes with a class inside vLLM",
    "*test_async_scheduling.py*": "the adapter has not what it asks of vLLM's test runner",
    "*test_namespace_tool_separator.py*": "the demo model does not call",
    "*test_remote_vllm_server.py*": "it tests the server of vLLM's own tests",
}
"""Patterns of a case, or of its message, and why it cannot run or be judged here."""


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
        for file in demo.iterdir():
            if file.name != "config.json":
                (folder / "snapshots" / revision / file.name).symlink_to(file)
        config = json.loads((demo / "config.json").read_text()) | {"max_position_embeddings": CONTEXT}
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
    }
    command = [sys.executable, str(HERE / "vllm_stand_ins.py"), str(sources), str(results), *map(str, files)]
    log_file = work / f"{files[0].stem}.log"
    with log_file.open("w") as log:
        process = subprocess.Popen(
            command, cwd=work, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            print(f"{[file.stem for file in files]}: not all was run in {seconds:g} s")
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


def matches(table: dict[str, str], case: dict[str, Any]) -> Iterator[str]:
    for pattern, reason in table.items():
        if fnmatch.fnmatchcase(case["case"], pattern) or (" " in pattern and pattern in case["message"]):
            yield reason


def judge(case: dict[str, Any]) -> dict[str, Any]:
    """The case with its kind: passed, inside, skipped, documented, elsewhere, or undocumented."""
    if case["outcome"] == "passed":
        return {**case, "kind": "passed"}
    if "inside vLLM: " in case["message"]:
        return {**case, "kind": "inside", "why": case["message"].split("inside vLLM: ", 1)[1].split("'")[0].strip()}
    if case["outcome"] in ("skipped", "module skipped"):
        return {**case, "kind": "skipped"}
    for kind, table in (("documented", DOCUMENTED), ("elsewhere", ELSEWHERE)):
        for why in matches(table, case):
            return {**case, "kind": kind, "why": why}
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
    missing = sorted(row for row in set(DOCUMENTED.values()) if row not in DOCS.read_text())
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
        if not done:
            done = of_insides(sources, files)
            keep(asked.raw, done)
        known = {each["file"] for each in done}
        for group in groups([file for file in files if str(file.relative_to(sources / "tests")) not in known]):
            found = run_files(sources, group, work, asked.seconds)
            done += found
            keep(asked.raw, found)
            counts = collections.Counter(judge(each)["kind"] for each in found)
            print(f"{group[0].stem}, {len(group)} files: {dict(counts)}", flush=True)
    results = show([judge(each) for each in done])
    told = {each["file"] for each in done}
    results["not_run"] = [name for name in all_files if name not in told]
    if asked.report:
        write_report(asked.report, "vllm_cases", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
