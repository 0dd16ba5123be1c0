"""Serves a nearly free model by Headrace and by vLLM, in turn: what remains is the servers' own time.

    python benchmarks/http_overhead.py [--peers PEERS] [--load http_load.py] [--rounds 3]
    python benchmarks/http_overhead.py --parsers

The model is a random Llama of one layer, 128 wide, in bf16, with the demo model's tokeniser. 64 streams and then one
ask for 128 tokens each after 32 random ones. The servers are loaded in turn, so that drift of the machine affects both.
vLLM's processes are suspended while Headrace is loaded; Headrace's, which use no processor time while idle, are not
suspended. Nothing else may run meanwhile. PEERS is where the peers' setup.sh installed vLLM, whose start takes a
minute: `--peer-url` names a running server of the same model (`--model FOLDER`, made by `--keep-model FOLDER`).
`--load` names another client with the same arguments and output as `http_load.py`.

`--parsers` measures the cost of parsing answers for tool calls and reasoning: the same chats with tools, parsed and not
parsed in turn (`--rounds 40` resolves 2%), in processor time of the HTTP process per streamed token. The model
generates words or, constrained by a regular expression, a call whose arguments last to the last token; it is streamed
as `tool_calls` when parsed and as text when not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import vllm_peer
from report import write_report

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "http_overhead.json"
LOADS = ((64, 256), (1, 12))  # concurrent streams, requests
PROMPT_TOKENS, OUTPUT_TOKENS, MAX_MODEL_LEN = 32, 128, 2048
START_S = 240.0


def make_model(folder: Path) -> None:
    """A random checkpoint as transformers saves it, with the demo model's tokeniser."""
    import torch
    import transformers

    from headrace.executor.checkpoints.demo_model import fetch_demo_model

    gguf = fetch_demo_model()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
        tie_word_embeddings=True,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


@contextmanager
def program(
    command: list[str], log: Path, environment: dict[str, str], folder: Path
) -> Iterator[subprocess.Popen[Any]]:
    """Runs a server in its own session, until the block ends."""
    with log.open("w") as written:
        process = subprocess.Popen(
            command,
            stdout=written,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            cwd=folder,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_ready(process: subprocess.Popen[Any], url: str, log: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            time.sleep(0.25)
    raise SystemExit(f"the server at {url} did not start:\n{log.read_text()[-3000:]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def servers(arguments: argparse.Namespace, model: Path, work: Path, stack: ExitStack) -> dict[str, str]:
    """The servers' names and addresses, once all answer. vLLM gets its best settings: both cores, Intel's OpenMP."""
    common = [str(model), "--host", "127.0.0.1", "--max-model-len", str(MAX_MODEL_LEN)]
    starting: dict[str, tuple[list[str], dict[str, str]]] = {
        "headrace": ([sys.executable, "-m", "headrace", "serve", *common], {})
    }
    if arguments.peers is not None and arguments.peer_url is None:
        environment = vllm_peer.settings(arguments.peers / "vllm")
        starting["vllm"] = ([str(arguments.peers / "vllm/bin/vllm"), "serve", *common], environment)
    urls, running = {}, []
    for name, (command, environment) in starting.items():
        port, log = free_port(), work / f"{name}.log"
        urls[name] = f"http://127.0.0.1:{port}"
        # In another folder: a peer that looks for the package `kernels` would find our folder of that name here.
        process = stack.enter_context(program([*command, "--port", str(port)], log, environment, work))
        running.append((process, urls[name], log))
    for each in running:
        wait_ready(*each)
    if arguments.peer_url is not None:
        urls["vllm"] = arguments.peer_url
    return urls


def run_load(client: Path, url: str, model: Path, streams: int, requests: int, *body: str) -> dict[str, Any]:
    numbers = map(str, (streams, requests, PROMPT_TOKENS, OUTPUT_TOKENS))
    command = [sys.executable, str(client), url, str(model), *numbers, *body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"the load on {url} failed:\n{done.stderr[-3000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def processes_behind(url: str) -> list[psutil.Process]:
    """The processes that have the address's port open, and their children."""
    port = int(re.findall(r":(\d+)", url)[-1])
    owners = {each.pid for each in psutil.net_connections("tcp") if each.laddr and each.laddr.port == port}
    servers = [psutil.Process(pid) for pid in owners - {None}]
    return [process for server in servers for process in (server, *server.children(recursive=True))]


def processor_seconds(url: str) -> dict[str, float]:
    """Processor seconds so far of the processes behind an address, by pid and name."""
    spent = {f"{process.pid} {process.name()}": process.cpu_times() for process in processes_behind(url)}
    return {name: times.user + times.system for name, times in spent.items()}


@contextmanager
def stopped(url: str | None) -> Iterator[None]:
    """Suspends the server's processes within the context."""
    processes = [] if url is None else processes_behind(url)
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def measure(urls: dict[str, str], arguments: argparse.Namespace, model: Path) -> list[dict[str, Any]]:
    samples = []
    for number in range(arguments.rounds):
        for streams, requests in LOADS:
            for name, url in urls.items():
                before = processor_seconds(url)
                with stopped(urls.get("vllm") if name == "headrace" else None):
                    row = run_load(arguments.load, url, model, streams, requests)
                after = processor_seconds(url)
                tokens = row["done"] * OUTPUT_TOKENS
                spent = {key: 1e6 * (after[key] - before.get(key, 0.0)) / max(tokens, 1) for key in after}
                samples.append({"server": name, "round": number, **row, "cpu_us_per_token": spent})
                print(f"round {number + 1} {name}: {row}", flush=True)
    return samples


def ratios(samples: list[dict[str, Any]]) -> dict[str, float | None]:
    """Ratios of medians to vLLM's: the rate with many streams, and the inter-token time with one."""
    many, one = LOADS[0][0], LOADS[1][0]

    def median(server: str, streams: int, of: Any) -> float:
        return statistics.median(of(row) for row in samples if (row["server"], row["conc"]) == (server, streams))

    rate = [median(server, many, lambda row: row["out_tok_s"]) for server in ("headrace", "vllm")]
    gap_ms = [median(server, one, lambda row: row["itl_ms"]["p50"]) for server in ("headrace", "vllm")]
    each = [median(server, one, lambda row: row["out_tok_s"]) for server in ("headrace", "vllm")]
    return {
        "output_tokens_per_s": rate[0] / rate[1],
        # The client sees no time between tokens that a server sends together.
        "inter_token_p50": gap_ms[0] / gap_ms[1] if gap_ms[1] else None,
        "inter_token_mean": each[1] / each[0],
    }


NOTHING, WORDS = "nothing", "words"
READS = {
    NOTHING: ("--tool-call-parser", "none"),
    "calls": ("--tool-call-parser", "hermes"),
    "calls and reasoning": ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
    "reasoning": ("--tool-call-parser", "none", "--reasoning-parser", "deepseek_r1"),
    "calls in xml": ("--tool-call-parser", "qwen3_xml"),
    "calls in python": ("--tool-call-parser", "pythonic"),
}
FORMS = {
    "a call": r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "[a-z ]{9000}',
    "a call in xml": r"<tool_call>\n<function=get_weather>\n<parameter=city>\n[a-z ]{9000}",
    "a call in python": r"\[get_weather\(city='[a-z ]{9000}",
}
"""Regular expressions that constrain the model; it also generates words without one."""
CASES = (
    (WORDS, "calls"),
    ("a call", "calls"),
    ("a call in xml", "calls in xml"),
    ("a call in python", "calls in python"),
    (WORDS, "reasoning"),  # answers in this format begin with reasoning
    (WORDS, "calls and reasoning"),
)
"""What the model generates, and what the server parses."""
READ_FOR_TOOLS = ("calls", "calls in xml", "calls in python")
"""These servers parse nothing for a request whose `tool_choice` is none."""
PARSER_LOAD = (64, 128)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
CHAT = {"messages": [{"role": "user", "content": "How warm is it in Zürich?"}], "tools": [TOOL]}


def words_of(model: Path) -> list[int]:
    """Tokens that are words. A parser streams no special tokens, nor spaces before it knows what follows, and a random
    model might prefer those."""
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
    return sorted(each for text, each in vocabulary.items() if text[0] == "Ġ" and text[1:].isalpha())[:100]


def start_reader(model: Path, work: Path, reads: str, stack: ExitStack) -> str:
    """The address of a server that parses that."""
    port, log = free_port(), work / f"{reads}.log"
    command = [sys.executable, "-m", "headrace", "serve", str(model), "--max-model-len", str(MAX_MODEL_LEN)]
    process = stack.enter_context(program([*command, *READS[reads], "--port", str(port)], log, {}, work))
    wait_ready(process, url := f"http://127.0.0.1:{port}", log)
    return url


def bodies_of(model: Path) -> dict[str, dict[str, Any]]:
    """Request bodies by what the model then generates."""
    bodies: dict[str, dict[str, Any]] = {WORDS: {**CHAT, "allowed_token_ids": words_of(model)}}
    return bodies | {said: {**CHAT, "structured_outputs": {"regex": form}} for said, form in FORMS.items()}


def measure_parsers(arguments: argparse.Namespace, model: Path, work: Path, stack: ExitStack) -> dict[str, Any]:
    """Microseconds of the HTTP process per token, parsed and not parsed, in consecutive pairs; and the additional cost
    of parsing, as the median and the mean over the pairs."""
    urls = {reads: start_reader(model, work, reads, stack) for reads in READS}
    bodies = bodies_of(model)
    found = dict[str, Any]()
    for said, reads in CASES:
        # Uses one process for both if possible: two processes of one program differ by some percent, by their memory
        # layout.
        server_without = reads if reads in READ_FOR_TOOLS else NOTHING
        without = {**bodies[said], **({"tool_choice": "none"} if reads in READ_FOR_TOOLS else {})}
        check_answer(urls[reads], bodies[said], said, reads)
        check_answer(urls[server_without], without, said, NOTHING)
        sides = ((urls[server_without], without), (urls[reads], bodies[said]))
        pairs = []
        for number in range(arguments.rounds + 1):
            spent = {side: us_per_token(*sides[side], arguments, model) for side in (number % 2, 1 - number % 2)}
            if number:  # the first warms up
                pairs.append((spent[0], spent[1]))
                print(f"{said}, read for {reads}: {spent[0]:.1f} us a token without, {spent[1]:.1f} with", flush=True)
        more = [read / plain - 1 for plain, read in pairs]
        found[f"{said}, {reads}"] = {
            "without": statistics.median(plain for plain, _ in pairs),
            "with": statistics.median(read for _, read in pairs),
            "more": statistics.median(more),
            "mean_more": statistics.mean(more),
            "standard_error_of_mean": statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else None,
            "pairs": pairs,
        }
    return {"streams": PARSER_LOAD[0], "requests": PARSER_LOAD[1], "cpu_us_per_token": found}


def us_per_token(url: str, body: dict[str, Any], arguments: argparse.Namespace, model: Path) -> float:
    """Processor time of the HTTP process under load, in microseconds per streamed token."""
    (server, *_) = processes_behind(url)
    before = server.cpu_times()
    row = run_load(arguments.load, url, model, *PARSER_LOAD, json.dumps(body))
    after = server.cpu_times()
    seconds: float = after.user + after.system - before.user - before.system
    return 1e6 * seconds / (row["done"] * OUTPUT_TOKENS)


def check_answer(url: str, body: dict[str, Any], said: str, reads: str) -> None:
    """Checks that the answer has the form that the measurement is named for."""
    data = json.dumps({**body, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        message = json.load(response)["choices"][0]["message"]
    calls = message.get("tool_calls") or ()
    found = {
        "a call": "".join(call["function"]["arguments"] for call in calls),
        "reasoning": message.get("reasoning") or "",
        "text": message.get("content") or "",
    }
    wanted = "a call" if said in FORMS and reads != NOTHING else "reasoning" if reads == "reasoning" else "text"
    if len(found.pop(wanted)) < OUTPUT_TOKENS or any(found.values()):
        raise SystemExit(f"the answer is not what is to be measured: {message}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="where the peers are installed; without it only ours is measured")
    parser.add_argument("--peer-url", help="a vLLM that serves --model already")
    parser.add_argument("--model", type=Path, help="a folder that --keep-model wrote")
    parser.add_argument("--keep-model", type=Path, help="write the model there and end")
    parser.add_argument("--load", type=Path, default=ROOT / "benchmarks" / "http_load.py")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parsers", action="store_true", help="only what reading calls and reasoning costs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.keep_model is not None:
        make_model(arguments.keep_model)
        return
    for name in ("peers", "model", "load"):
        if (path := getattr(arguments, name)) is not None:
            setattr(arguments, name, path.resolve())
    with tempfile.TemporaryDirectory(prefix="headrace-overhead-") as folder, ExitStack() as stack:
        work = Path(folder)
        model = arguments.model or work / "model"
        if arguments.model is None:
            make_model(model)
        if arguments.parsers:
            found = measure_parsers(arguments, model, work, stack)
            for name, case in found["cpu_us_per_token"].items():
                spread = case["standard_error_of_mean"] or 0.0
                print(
                    f"{name}: {case['more']:+.1%} in the median, {case['mean_more']:+.1%} +- {spread:.1%} in the mean"
                )
            write_report(arguments.out or RESULTS.with_stem("http_parsers"), "http_parsers", found)
            return
        samples = measure(servers(arguments, model, work, stack), arguments, model)
    results: dict[str, Any] = {"client": arguments.load.name, "loads": LOADS, "samples": samples}
    if any(row["server"] == "vllm" for row in samples):
        results["ratios"] = ratios(samples)
        print(results["ratios"])
    write_report(arguments.out or RESULTS, "http_overhead", results)


if __name__ == "__main__":
    main()
