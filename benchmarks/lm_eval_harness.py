"""EleutherAI's lm-eval against a live server on the demo model, with both of its OpenAI clients.

    python benchmarks/lm_eval_harness.py --lm-eval PATH/TO/lm-eval

lm-eval must be in its own environment (`pip install "lm-eval[api]"`). The two tasks are made here, so nothing is
downloaded: multiple-choice questions (loglikelihoods, by echo and logprobs), and questions to answer (greedy text). The
answers are compared with `LLM`'s, and the script fails where they differ.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import write_report

from headrace import LLM, SamplingParams

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Greece": "Athens",
    "Russia": "Moscow", "China": "Beijing", "Cuba": "Havana", "Austria": "Vienna", "Poland": "Warsaw", "Peru": "Lima",
}  # fmt: skip
MAX_TOKENS = 16
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024}
CHOICE_TASK = """task: choose_capital
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
"""
ANSWER_TASK = """task: say_capital
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: {max_tokens}, temperature: 0, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def documents() -> list[dict[str, Any]]:
    cities = list(CAPITALS.values())
    found = []
    for index, country in enumerate(CAPITALS):
        choices = [cities[(index + step) % len(cities)] for step in range(4)]
        shift = index % 4
        choices = choices[-shift:] + choices[:-shift]
        found.append({"question": f"The capital of {country} is", "choices": choices, "answer": shift})
    return found


def write_tasks(folder: Path) -> None:
    data = folder / "capitals.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents()))
    (folder / "choose.yaml").write_text(CHOICE_TASK.format(data=data))
    (folder / "say.yaml").write_text(ANSWER_TASK.format(data=data, max_tokens=MAX_TOKENS))


def run(lm_eval: str, folder: Path, client: str, url: str, task: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The task's results, and its samples in the order of the documents."""
    out = folder / f"{client}-{task}"
    chat = ["--apply_chat_template"] if "chat" in client else []
    path = "/v1/chat/completions" if chat else "/v1/completions"
    settings = f"base_url={url}{path},model=demo,num_concurrent=4,max_retries=1,tokenized_requests={not chat}"
    command = [lm_eval, "run", "--model", client, "--model_args", settings, "--tasks", task]
    command += ["--include_path", str(folder), "--output_path", str(out), "--log_samples", *chat]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        sys.exit(f"lm-eval failed with status {done.returncode}:\n{done.stderr[-3000:]}")
    (results,) = out.rglob("results_*.json")
    (samples,) = out.rglob("samples_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    return json.loads(results.read_text())["results"][task], sorted(rows, key=lambda row: row["doc_id"])


def choice_logprobs(llm: LLM) -> list[list[float]]:
    """For each document's choices, the sum of their tokens' logprobs after the question."""
    found = []
    for document in documents():
        num_context = len(llm.get_tokenizer().encode(document["question"]))
        texts = [f"{document['question']} {choice}" for choice in document["choices"]]
        outputs = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        sums = []
        for output in outputs:
            assert output.prompt_logprobs is not None
            pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[num_context:]
            sums.append(sum(entry[token_id].logprob for token_id, entry in pairs if entry is not None))
        found.append(sums)
    return found


def first_line(text: str) -> str:
    return text.split("\n", maxsplit=1)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", required=True, help="the program")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "lm_eval.json")
    args = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "headrace.frontend.cli.main",
        "serve",
        "--served-model-name",
        "demo",
        "--port",
        "0",
    ]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    command.append("--enable-tokenizer-info-endpoint")
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = wait_ready(server)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_tasks(folder)
            chosen, choices = run(args.lm_eval, folder, "local-completions", url, "choose_capital")
            said, answers = run(args.lm_eval, folder, "local-completions", url, "say_capital")
            chatted, replies = run(args.lm_eval, folder, "local-chat-completions", url, "say_capital")
    finally:
        server.terminate()
        server.wait(30)
    with LLM(**OPTIONS) as llm:
        report = compare(llm, choices, answers, replies)
    report |= {"choose_capital": chosen, "say_capital": said, "say_capital_chat": chatted}
    print(json.dumps(report, indent=1))
    write_report(args.out, "lm_eval", report)


def wait_ready(server: subprocess.Popen[str]) -> str:
    """The server's URL, from its log."""
    assert server.stderr is not None
    log = ""
    for line in server.stderr:
        log += line
        if found := re.search(r"ready: (\S+)/v1 for clients", line):
            return found.group(1)
    sys.exit(f"the server did not start:\n{log}")


def compare(llm: LLM, choices: list[Any], answers: list[Any], replies: list[Any]) -> dict[str, Any]:
    """Compares lm-eval's answers with LLM's; exits if they differ, else returns what was compared."""
    worst = 0.0
    for row, ours in zip(choices, choice_logprobs(llm), strict=True):
        theirs = [float(response[0]) for response in row["filtered_resps"]]
        worst = max(worst, *(abs(a - b) for a, b in zip(theirs, ours, strict=True)))
    if worst > 1e-3:
        sys.exit(f"loglikelihoods differ from LLM's by up to {worst:g}")
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, stop=["\n"])
    questions = [document["question"] for document in documents()]
    completed = llm.generate(questions, greedy, use_tqdm=False)
    chats = [[{"role": "user", "content": question}] for question in questions]
    chatted = llm.chat(chats, greedy, use_tqdm=False)
    for name, rows, outputs in (("completions", answers, completed), ("chat", replies, chatted)):
        for row, output in zip(rows, outputs, strict=True):
            answer, read = output.outputs[0].text, row["resps"][0][0]
            if first_line(read) != first_line(answer):
                sys.exit(f"{name}: lm-eval read {read!r} where LLM answers {answer!r}")
    return {
        "documents": len(questions),
        "largest_loglikelihood_difference": worst,
        "equal_greedy_answers": 2 * len(answers),
    }


if __name__ == "__main__":
    main()
