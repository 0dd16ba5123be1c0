"""The `headrace` command as a user runs it: help, errors in a sentence, exit statuses, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from patience import within

import headrace
from headrace.core.process import child
from headrace.frontend.cli.commands.demo import figures
from headrace.frontend.cli.main import commands, main
from headrace.frontend.request.outputs import RequestMetrics
from headrace.ipc.wait import Deadline

NULL = ("--distributed-executor-backend", "headrace.executor.testing.null:NullExecutor", "--model", "null")


def run(*arguments: str, env: dict[str, str] | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(env or {})},
        check=False,
    )


def test_help_lists_every_command_with_its_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    listed = {parts[0]: parts[1] for parts in lines if len(parts) == 2 and parts[0] in commands()}
    assert set(listed) == set(commands()) >= {"complete", "demo", "options", "version"}


def test_help_loads_no_heavy_library() -> None:
    code = (
        "import sys\nfrom headrace.frontend.cli.main import main\n"
        "try: main(['complete', '--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'zmq', 'tokenizers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_help_that_cannot_be_written_is_an_error_and_one_that_is_not_read_is_none() -> None:
    command = (sys.executable, "-m", "headrace", "serve", "--help=all")
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    said = "headrace serve: cannot write the output: no space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_usage_is_one_line_that_names_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    for command, usage in (
        ([], "headrace [-h] [--version] COMMAND ..."),
        (["bench"], "headrace bench [-h] COMMAND ..."),
        (["run-batch"], "headrace run-batch -i FILE -o FILE [options]"),
        (["complete"], "headrace complete [options] [[MODEL] PROMPT]"),
        (["chat"], "headrace chat [options] [MODEL]"),
    ):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        assert capsys.readouterr().out.splitlines()[:2] == [f"usage: {usage}", ""]


def test_help_of_a_command_leaves_the_engines_options_to_help_all(capsys: pytest.CaptureFixture[str]) -> None:
    def help_of(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        assert caught.value.code == 0
        return capsys.readouterr().out

    for command in (["chat"], ["complete"], ["run-batch"], ["bench", "throughput"]):
        assert "--block-size" not in help_of(*command, "--help")
        assert "--help=all" in help_of(*command, "--help")
        assert "--block-size" in help_of(*command, "--help=all")
    assert "--block-size" in help_of("serve", "--help")
    assert "KV cache\n" in help_of("serve", "--help=listgroup")
    cache = help_of("serve", "--help=kv cache")
    assert "--block-size" in cache
    assert "--max-num-seqs" not in cache
    assert "--max-num-seqs" in help_of("serve", "--help=num_seqs")


def test_version_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith(f"headrace {headrace.__version__} ")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"headrace {headrace.__version__} ")
    assert main(["options"]) == 0
    assert "--block-size" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "serve", "--num-prompt", "1"], "did you mean --num-prompts?\nTry: headrace bench serve --help"),
        (["bench", "nonsense"], "argument COMMAND: invalid choice: 'nonsense'"),
        (["complete", "x", "--temprature", "1"], "unknown option --temprature; did you mean --temperature?"),
        (["complete", "x", "--block-size", "0"], "--block-size=0: out of range; it must be 1 to 256 tokens"),
        (["complete", "x", "--engine", "ipc:///x", "--block-size", "8"], "leave out --block-size"),
        (["complete"], "PROMPT"),
        (["complete", "a", "b", "c"], "two at most, not 3"),
        (["complete", "", "x"], "model is empty: name one, or leave it out for the demo model"),
        (["serve", "--model", ""], "model is empty: name one, or leave it out for the demo model"),
        (["complete", "model", "x", "--engine", "ipc:///x"], "leave out model"),
        (["chat", "model", "--url", "http://127.0.0.1:1"], "leave out model"),
        (["chat", "--help=nothing"], "no group or option is called so"),
        (["serv"], "unknown command serv; did you mean serve?"),
        (["xyzzy"], "unknown command xyzzy; known: bench, chat"),
        (["launch", "render"], "there is no command launch: a server has an engine"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    try:
        status: object = main(arguments)
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    said = capsys.readouterr().err
    assert words in said
    known = arguments[0] in commands()
    assert said.splitlines()[-1].startswith(f"Try: headrace {arguments[0]} " if known else "Try: headrace --help")
    assert said.endswith(" --help\n")


@pytest.mark.parametrize(
    "command",
    [
        "serve --engine ipc:///x",
        "serve --coordinator ipc:///x",
        "run-batch -i {folder}/options.yaml -o {folder}/out --engine ipc:///x",
        "complete x --url http://127.0.0.1:9",
        "chat --engine ipc:///x",
    ],
)
def test_an_engines_options_in_a_config_file_are_refused_where_no_engine_is_started(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "options.yaml").write_text("max-model-len: 64\nguided_decoding_backend: xgrammar\n")
    assert main([*command.format(folder=tmp_path).split(), "--config", str(tmp_path / "options.yaml")]) == 2
    said = capsys.readouterr().err
    assert f"leave out max-model-len in {tmp_path}/options.yaml, guided_decoding_backend in {tmp_path}/" in said


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("complete x --temperature -3", "--temperature=-3.0: must be at least 0"),
        ("complete x --min-tokens 5 --max-tokens 2", "--min-tokens=5: must not exceed max_tokens, 2"),
        ("chat --top-p 1.5 --url http://127.0.0.1:9", "--top-p=1.5: must be over 0 and at most 1"),
        ("demo --sampling-seed 99999999999999999999", "--sampling-seed=99999999999999999999: out of range"),
        (
            "serve null --override-generation-config.temperature -3",
            "sets temperature=-3: it must be a number, at least 0",
        ),
        ("serve --override-generation-config.top_k 1.5", "sets top_k=1.5: it must be a whole number, at least -1"),
        ("complete x --override-generation-config.top_p 0", "sets top_p=0: it must be a number, over 0 and at most 1"),
        (
            "bench latency --override-generation-config.tempo 1",
            "cannot set tempo; it can set max_tokens, min_tokens",
        ),
        ("bench serve --top-p 0", "--top-p=0.0: must be over 0 and at most 1"),
        ("bench serve --frequency-penalty 5", "--frequency-penalty=5.0: must be at least -2 and at most 2"),
    ],
)
def test_a_wrong_sampling_value_is_found_before_an_engine_is_started(
    command: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(child, "start_engine", start)
    name, *rest = command.split()
    assert main([name, *rest]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert f"Try: headrace {f'{name} {rest[0]}' if name == 'bench' else name} --help" in error


def test_complete_reads_its_prompt_from_stdin_and_stop_takes_one_value() -> None:
    arguments = ("complete", *NULL, "--max-tokens", "3", "--stop", "a", "--stop", "b")
    given = run(*arguments, "hello")
    piped = run(*arguments, stdin="hello\n")
    assert (piped.returncode, piped.stdout, piped.stderr) == (given.returncode, given.stdout, given.stderr)
    assert "without a tokenizer" in piped.stderr


def test_a_wrong_time_for_silent_peers_ends_the_start_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context of the socket that could not be made used to wait for it, and the engine for the context."""
    monkeypatch.setenv("HEADRACE_PEER_TIMEOUT", "abc")
    done = run("complete", "x", *NULL)
    assert done.returncode != 0
    assert "HEADRACE_PEER_TIMEOUT=abc: it must be seconds, 1 to 86400" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.system
def test_a_checkpoints_own_text_commands_no_terminal(tmp_path: Path) -> None:
    named = {"architectures": ["Foo\n\x1b[31m" + "x" * 10_000], "model_type": "foo"}
    (tmp_path / "config.json").write_text(json.dumps(named))
    done = run("complete", str(tmp_path), "x", "--load-format", "dummy")
    assert done.returncode == 1
    assert r"the architecture Foo\n\x1b[31mxxx" in done.stderr
    assert "\x1b" not in done.stderr
    assert "x" * 100 not in done.stderr


def test_help_without_docstrings() -> None:
    done = subprocess.run([sys.executable, "-OO", "-m", "headrace", "--help"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert b"save-sharded-state" in done.stdout


def test_an_error_is_a_sentence_and_status_1(tmp_path: Path) -> None:
    missing = run("complete", "x", "--engine", f"ipc://{tmp_path}/nobody")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr.startswith("headrace: ")
    assert "nobody" in missing.stderr
    assert "Traceback" not in missing.stderr
    no_tokenizer = run("complete", "x", *NULL)
    assert no_tokenizer.returncode == 1
    assert "without a tokenizer" in no_tokenizer.stderr
    assert "Traceback" not in no_tokenizer.stderr


def test_ctrl_c_while_the_engine_starts_is_status_130_and_leaves_nothing() -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "headrace.frontend.cli.main",
            "complete",
            "x",
            *NULL,
            "--hf-overrides.load_delay_s",
            "60",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = Deadline(within(30.0))
        while not (children := psutil.Process(process.pid).children()):
            assert not deadline.passed
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=within(30))
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert psutil.wait_procs(children, timeout=within(5))[1] == []


@pytest.mark.demo_model
def test_the_demo_streams_an_answer_and_then_its_figures(demo_model_path: Path) -> None:
    result = run("demo", "--max-tokens", "8", "--temperature", "0", env={"PROMPT": "What is the capital of France?"})
    assert result.returncode == 0, result.stderr
    prompt, *answer, figures_line = result.stdout.strip().splitlines()
    assert prompt == "> What is the capital of France?"
    assert any(line.strip() for line in answer)
    for part in ("time to first token ", "decode ", " tokens/s over 8 tokens", "start-up "):
        assert part in figures_line


@pytest.mark.system
@pytest.mark.demo_model
def test_complete_continues_the_text_as_it_is(demo_model_path: Path) -> None:
    arguments = ("complete", "The capital of France is", "--max-tokens", "6", "--temperature", "0", "--stop", ".")
    result = run(*arguments, "--max-model-len", "64")
    assert result.returncode == 0, result.stderr
    assert result.stdout.rstrip("\n").startswith(" Paris")


def test_figures_leave_out_what_is_not_known() -> None:
    metrics = RequestMetrics(arrival_time=0.0, first_token_latency=0.25, decode_s=2.0, num_generation_tokens=101)
    assert figures(metrics, {"load": 1.0, "tokenizer": 0.5}, 1.75) == (
        "time to first token 0.250 s; decode 50.0 tokens/s over 101 tokens; start-up 1.75 s (load 1.00, tokenizer 0.50)"
    )
    attached = RequestMetrics(arrival_time=0.0, first_token_latency=0.25, decode_s=0.0, num_generation_tokens=1)
    assert figures(attached, {"load": 1.0}, None) == "time to first token 0.250 s"
