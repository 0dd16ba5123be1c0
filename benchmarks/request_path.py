"""The functions of ours that one `LLM.generate`, and one chat over HTTP, pass through.

    python benchmarks/request_path.py [--list]     # counts, and with --list each function with its depth
    python benchmarks/request_path.py --instructions [--base REV]

Both are traced warm, after the same request has run before, so that what is done once per engine or model does not
count. A function is a code object in one of our folders that is entered between the call and its return, in any thread;
lambdas, comprehensions and generator expressions count too. The depth is the number of our functions on the stack of
one thread. `LLM.generate` runs the core and a tiny random Llama in this process, and counts them by folder; of the chat
(streamed, 8 tokens) the HTTP process is traced, and its engine is another process. The objects of a chat are those of
our classes that exist once its first event has come and did not before, as far as the garbage collector knows them.

--instructions counts by callgrind what a process executes for each further request, and for each further event of a
stream, of this checkout and of REV: the client, and the engine, which computes nothing, are other processes. Only of
the text that `LLM.embed` embeds, the engine is in the same process. On a busy machine an event may have more than one
token.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from check import Side, layout, side_of, worktree

ROOT = Path(__file__).parent.parent
FOLDERS = ("headrace", "core", "executor", "frontend", "ipc", "kernels")
CHAT = {"model": "null", "messages": [{"role": "user", "content": "the quick brown fox"}], "ignore_eos": True}
LOADS = ((6, 10), (30, 10), (6, 70))
"""Requests and tokens of each, one after another: the second differs from the first by requests, the third by
tokens."""
VECTOR = 384
TEXT = "the quick brown fox"
STEP_S = 0.03
"""Of a step of the engine, which is slower than a server under callgrind: tokens then come in events of their own."""


class Tracer:
    """Notes which functions of ours are entered, in every thread started after it was installed."""

    def __init__(self) -> None:
        self.is_on = False
        self.depths: dict[Any, int] = {}
        """The least depth at which each code object was entered, in order of the first entries."""
        self.stacks: dict[Any, list[str]] = {}
        self.calls: Counter[Any] = Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not self.is_on or event != "call" or (folder_of(code) is None):
            return
        self.calls[code] += 1
        stack: list[str] = []
        each: FrameType | None = frame
        while each is not None:
            if folder_of(each.f_code) is not None:
                stack.append(each.f_code.co_qualname)
            each = each.f_back
        if len(stack) < self.depths.get(code, 1000):
            self.depths[code] = len(stack)
            self.stacks[code] = stack[::-1]


def folder_of(code: Any) -> str | None:
    """Our folder that the code is from; None for others' code. Structs' and dataclasses' own methods are not ours."""
    name = code.co_filename
    if not name.startswith("/"):
        return None
    for folder in FOLDERS:
        if name.startswith(f"{ROOT}/{folder}/"):
            return folder
    return None


@contextmanager
def tracing(tracer: Tracer) -> Iterator[None]:
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def room_of(code: Any) -> str:
    parts = Path(code.co_filename).relative_to(ROOT).parts
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def report(name: str, tracer: Tracer, listed: bool) -> None:
    codes = list(tracer.depths)
    by_folder = Counter(folder_of(code) for code in codes)
    deepest = max(codes, key=lambda code: tracer.depths[code])
    print(f"{name}: {len(codes)} functions, {sum(tracer.calls.values())} calls, {tracer.depths[deepest]} deep")
    print("  " + ", ".join(f"{count} {folder}" for folder, count in by_folder.most_common()))
    print("  deepest: " + " > ".join(tracer.stacks[deepest]))
    if not listed:
        return
    rooms: dict[str, list[Any]] = {}
    for code in codes:
        rooms.setdefault(room_of(code), []).append(code)
    for room, inside in rooms.items():
        print(f"  {room}: {len(inside)}")
        for code in inside:
            where = f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_firstlineno}"
            print(f"    {tracer.depths[code]:3} {tracer.calls[code]:4}x {code.co_qualname}  {where}")


def trace_generate(listed: bool) -> None:
    import tiny_models

    from headrace import LLM, SamplingParams

    tracer = Tracer()
    with tempfile.TemporaryDirectory() as folder, tracing(tracer):
        tiny_models.save("llama", Path(folder), tokenizer=True)
        with LLM(
            folder, in_process=True, dtype="float32", num_gpu_blocks_override=64, max_model_len=128,
            use_tqdm_on_load=False,
        ) as llm:  # fmt: skip
            params = SamplingParams(max_tokens=4, ignore_eos=True)
            llm.generate("The water", params, use_tqdm=False)
            time.sleep(0.5)
            tracer.is_on = True
            llm.generate("The water", params, use_tqdm=False)
            tracer.is_on = False
    report("LLM.generate", tracer, listed)


@contextmanager
def engine(step_s: float = 0.0) -> Iterator[str]:
    """The address of an engine that computes nothing, in a process of its own."""
    import null_with_tokenizer

    from headrace import LLM

    overrides = {"vocab_size": null_with_tokenizer.VOCAB_SIZE, "step_delay_s": step_s, "vector_width": VECTOR}
    with LLM("null", distributed_executor_backend=null_with_tokenizer.BACKEND, hf_overrides=overrides) as llm:
        yield llm._client.engines[0].source.address


@contextmanager
def server(address: str) -> Iterator[int]:
    """The port of an HTTP server in a thread of this process."""
    from headrace.frontend.fleet.sources import Attached
    from headrace.frontend.http.options import ServeOptions
    from headrace.frontend.http.process.server import HttpServer, listen
    from headrace.frontend.http.server.metrics import Pages

    options, ready = ServeOptions(port=0), threading.Event()
    sock = listen(options)
    served = HttpServer(options, sock, Pages())
    served.on_ready = ready.set
    thread = threading.Thread(target=lambda: asyncio.run(served.run([Attached(address)])))
    thread.start()
    try:
        assert ready.wait(300)
        yield sock.getsockname()[1]
    finally:
        served.stop_threadsafe(0.0)
        thread.join(60)


def chat(connection: http.client.HTTPConnection, num_tokens: int) -> int:
    """Returns how many events the answer had."""
    body = json.dumps({**CHAT, "stream": True, "max_tokens": num_tokens}).encode()
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    events = answer.read().count(b"data: ")
    if answer.status != 200 or events <= num_tokens // 8:
        raise SystemExit(f"the server answered with {answer.status} and {events} events")
    return events


def objects_of_chat(connection: http.client.HTTPConnection) -> list[str]:
    """The classes of the objects that a chat has made when its first event comes."""
    before = {id(each): each for each in ours()}  # held, so that no id is used again
    body = json.dumps({**CHAT, "stream": True, "max_tokens": 50}).encode()
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.readline()
    made = [type(each).__name__ for each in ours() if id(each) not in before]
    answer.read()
    return made


def ours() -> list[Any]:
    return [each for each in gc.get_objects() if str(type(each).__module__).startswith("headrace.")]


def trace_chat(listed: bool) -> None:
    tracer = Tracer()
    with engine(0.01) as address, tracing(tracer), server(address) as port:
        sys.setprofile(None)
        connection = http.client.HTTPConnection("127.0.0.1", port)
        for _ in range(3):
            chat(connection, 8)
        time.sleep(0.5)
        tracer.is_on = True
        chat(connection, 8)
        time.sleep(0.1)
        tracer.is_on = False
        made = objects_of_chat(connection)
        connection.close()
    print(f"objects of a chat: {len(made)}: {', '.join(sorted(made))}")
    report("a chat over HTTP", tracer, listed)


def send_chats(port: int, requests: int, num_tokens: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    print("events:", sum(chat(connection, num_tokens) for _ in range(requests)), flush=True)


def send_texts(port: int, requests: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = json.dumps({"input": TEXT, "encoding_format": "base64"}).encode()
    for _ in range(requests):
        connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        if len(answer.read()) < VECTOR or answer.status != 200:
            raise SystemExit(f"the server answered with {answer.status}")


def embed_in_process(requests: int) -> None:
    import null_with_tokenizer

    from headrace import LLM

    overrides = {"vocab_size": null_with_tokenizer.VOCAB_SIZE, "vector_width": VECTOR}
    with LLM(
        "null", in_process=True, distributed_executor_backend=null_with_tokenizer.BACKEND, hf_overrides=overrides,
        use_tqdm_on_load=False,
    ) as llm:  # fmt: skip
        for _ in range(requests):
            llm.embed(TEXT, use_tqdm=False)


def run_part(part: str, *words: str) -> None:
    """The program of one of the processes that --instructions starts."""
    if part == "engine":
        with engine(STEP_S) as address:
            print(address, flush=True)
            sys.stdin.read()
    elif part == "chats":
        send_chats(*map(int, words))
    elif part == "texts":
        send_texts(*map(int, words[:2]))
    elif part in ("serve", "serve texts"):
        with server(words[0]) as port:
            sent = "chats" if part == "serve" else "texts"
            subprocess.run([sys.executable, __file__, "--part", sent, str(port), *words[1:]], check=True)
    elif part == "embed":
        embed_in_process(int(words[1]))
    elif part == "generate":
        from headrace import LLM, SamplingParams

        with LLM.connect(words[0], 300) as llm:
            for _ in range(int(words[1])):
                llm.generate("the quick brown fox", SamplingParams(max_tokens=int(words[2])), use_tqdm=False)


def counted(side: Side, part: str, address: str, requests: int, num_tokens: int) -> tuple[int, int]:
    """Instructions of a process that serves, or generates, so much; and the events of its answers."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out", sys.executable, __file__]
        command += ["--part", part, address, str(requests), str(num_tokens)]
        done = subprocess.run(command, capture_output=True, text=True, env=side.variables, cwd="/", check=False)
    if (found := re.search(r"Collected : (\d+)", done.stderr)) is None or done.returncode:
        raise SystemExit(f"callgrind counted nothing: {done.stderr[-2000:]}")
    events = re.search(r"events: (\d+)", done.stdout)
    return int(found.group(1)), int(events.group(1)) if events is not None else 0


def instructions(side: Side) -> dict[str, float]:
    """Of one further request, and one further token."""
    command = [sys.executable, __file__, "--part", "engine"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=side.variables, cwd="/"
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            few, more, longer = (counted(side, "serve", address, *load) for load in LOADS)
            short, long = (counted(side, "generate", address, number, 1) for number in (20, 80))
            some, texts = (counted(side, "serve texts", address, number, 1) for number in (20, 80))
            one, ones = (counted(side, "embed", address, number, 1) for number in (20, 80))
        finally:
            process.stdin.close()
    of_event = (longer[0] - few[0]) / (longer[1] - few[1])
    of_request = (more[0] - few[0] - of_event * (more[1] - few[1])) / (LOADS[1][0] - LOADS[0][0])
    return {
        "a chat, besides its events": of_request,
        "an event of a chat": of_event,
        "a generate of 1 token": (long[0] - short[0]) / 60,
        "a text's vector over HTTP": (texts[0] - some[0]) / 60,
        "a text's vector, with the engine": (ones[0] - one[0]) / 60,
    }


def compare(base: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        now = instructions(side_of(ROOT, layout(ROOT, Path(folder) / "now")))
        before: dict[str, float] = {}
        if base is not None:
            tree = stack.enter_context(worktree(base))
            before = instructions(side_of(tree, layout(tree, Path(folder) / "before")))
    for name, count in now.items():
        ratio = f", {before[name]:,.0f} in {base}: {count / before[name]:.3f}" if name in before else ""
        print(f"{name}: {count:,.0f} instructions{ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="each function, by folder")
    parser.add_argument("--only", choices=("generate", "chat"))
    parser.add_argument("--instructions", action="store_true", help="count instructions in place of functions")
    parser.add_argument("--base", help="the commit to compare instructions with")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    if arguments.part:
        run_part(*arguments.part)
        return
    if arguments.instructions:
        compare(arguments.base)
        return
    os.environ["PYTHONPATH"] = str(ROOT / "tests" / "support")
    if arguments.only != "chat":
        trace_generate(arguments.list)
    if arguments.only != "generate":
        trace_chat(arguments.list)


if __name__ == "__main__":
    main()
