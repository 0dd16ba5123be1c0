"""lm-eval's `vllm` model, which is Headrace, beside its `hf` model: the same tasks, the same demo model in float32.

    python benchmarks/lm_eval_models.py --python PATH/TO/python DEMO_FOLDER [--out FILE]

PATH/TO/python has lm-eval (`pip install "lm-eval[hf]"`), Headrace and transformers; `benchmarks/demo_folder.py` makes
DEMO_FOLDER. The tasks are made here, so nothing is downloaded: greedy text (for which lm-eval asks for
skip_special_tokens=False and spaces_between_special_tokens=False), multiple choice (log-probabilities of prompts) and
perplexity (of texts that fit the context: lm-eval cuts longer ones elsewhere for each model). The script fails where
the two models' answers differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lm_eval_harness import ANSWER_TASK, CHOICE_TASK, MAX_TOKENS, documents
from report import write_report

CONTEXT = 1024
CHARACTERS = 1500
TOLERANCE = 1e-3
"""Of a log-likelihood, relative: sums of float32 kernels in another order."""
TEXTS = tuple(Path(__file__).with_name(name) for name in ("README.md", "lm_eval_harness.py", "report.py"))
PERPLEXITY_TASK = """task: read_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
"""
TASKS = ("choose_capital", "say_capital", "read_text")
MODELS = {
    "vllm": (["-m", "headrace.as_vllm", "-m", "lm_eval"], f"dtype=float32,max_model_len={CONTEXT}", "auto"),
    "hf": (["-m", "lm_eval"], f"dtype=float32,max_length={CONTEXT}", "8"),
}
"""lm-eval's models, with how each starts, its arguments and its size of batches."""


def write_tasks(folder: Path) -> None:
    rows = {"capitals": documents(), "texts": [{"text": file.read_text()[:CHARACTERS]} for file in TEXTS]}
    for name, documents_ in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents_))
    capitals = folder / "capitals.jsonl"
    (folder / "choose.yaml").write_text(CHOICE_TASK.format(data=capitals))
    (folder / "say.yaml").write_text(ANSWER_TASK.format(data=capitals, max_tokens=MAX_TOKENS))
    (folder / "read.yaml").write_text(PERPLEXITY_TASK.format(data=folder / "texts.jsonl"))


def run(python: str, model: str, demo: Path, folder: Path) -> dict[str, Any]:
    """Each task's figures, and what the model answered to each document."""
    start, options, batch = MODELS[model]
    out = folder / model
    command = [python, *start, "--model", model, "--model_args", f"pretrained={demo},{options}"]
    command += ["--tasks", ",".join(TASKS), "--include_path", str(folder), "--batch_size", batch]
    command += ["--output_path", str(out), "--log_samples"]
    command += ["--device", "cpu"] if model == "hf" else []
    offline = {**os.environ, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=offline, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        sys.exit(f"lm-eval's {model} model failed with status {done.returncode}:\n{done.stderr[-3000:]}")
    (results,) = out.rglob("results_*.json")
    figures = json.loads(results.read_text())["results"]
    answers = {}
    for task in TASKS:
        (samples,) = out.rglob(f"samples_{task}_*.jsonl")
        rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: int(row["doc_id"]))
        answers[task] = [row["resps"] for row in rows]
    return {"figures": figures, "answers": answers}


def numbers(answer: Any) -> list[float]:
    """The log-likelihoods in an answer of lm-eval's, which nests them in lists and pairs with a flag."""
    if isinstance(answer, list):
        return [each for part in answer for each in numbers(part)]
    try:
        return [] if isinstance(answer, bool) or answer in ("True", "False") else [float(answer)]
    except ValueError:
        sys.exit(f"{answer!r} is no log-likelihood")


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """What was compared; exits where the answers differ."""
    said = list(zip(ours["answers"]["say_capital"], theirs["answers"]["say_capital"], strict=True))
    for mine, other in said:
        if mine != other:
            sys.exit(f"Headrace answers {mine!r} where hf answers {other!r}")
    worst = 0.0
    for task in ("choose_capital", "read_text"):
        for mine, other in zip(numbers(ours["answers"][task]), numbers(theirs["answers"][task]), strict=True):
            differs = abs(mine - other) / max(1.0, abs(other))
            if differs > TOLERANCE:
                sys.exit(f"{task}: the log-likelihood {mine!r} differs from hf's {other!r}")
            worst = max(worst, differs)
    return {
        "equal_greedy_answers": len(said),
        "largest_relative_loglikelihood_difference": worst,
        "figures": {"vllm (Headrace)": ours["figures"], "hf": theirs["figures"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="folder of the demo model")
    parser.add_argument("--python", required=True, help="the interpreter that has lm-eval and Headrace")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "lm_eval_models.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder)
        report = compare(*(run(args.python, model, args.demo.resolve(), folder) for model in MODELS))
    print(json.dumps(report, indent=1))
    write_report(args.out, "lm_eval_models", report)


if __name__ == "__main__":
    main()
