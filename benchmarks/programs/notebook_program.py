"""A Jupyter kernel: generation with a progress bar in a cell, in asyncio, an interrupt, a restart, no process left."""

from __future__ import annotations

import asyncio
import sys
import time

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

MODEL, _ = sys.argv[1:]
START = f"""
from headrace import LLM, AsyncLLM, SamplingParams
llm = LLM({MODEL!r}, max_model_len=512, dtype="float32")
params = SamplingParams(max_tokens=8, temperature=0)
"""
LONG = """
print("started", flush=True)
llm.generate(["hello"] * 64, SamplingParams(max_tokens=400, ignore_eos=True, n=64))
"""


def text_of(cell: nbformat.NotebookNode) -> str:
    return "".join(each.get("text", "") or str(each.get("data", "")) for each in cell.outputs)


def engines() -> list[psutil.Process]:
    """The processes that the kernel has started."""
    return [each for kernel in psutil.Process().children() for each in kernel.children(recursive=True)]


def main() -> None:
    book = nbformat.v4.new_notebook()
    cells = {
        name: nbformat.v4.new_code_cell(code)
        for name, code in {
            "start": START,
            "generate": "print([output.outputs[0].text for output in llm.generate(['hello', 'there'], params)])",
            "chat": "print(llm.chat([{'role': 'user', 'content': 'hi'}], params)[0].outputs[0].text)",
            "stream": "for piece in llm.stream('hello', params): print(piece.outputs[0].text, end='')",
            "long": LONG,
            "after": "print(len(llm.generate('hello', params, use_tqdm=False)))",
        }.items()
    }
    book.cells = list(cells.values())
    client = NotebookClient(book, timeout=120, kernel_name="python3", interrupt_on_timeout=False)
    with client.setup_kernel():
        for name in ("start", "generate", "chat", "stream"):
            client.execute_cell(cells[name], book.cells.index(cells[name]))
        assert "Processed prompts" in text_of(cells["generate"]), text_of(cells["generate"])
        client.timeout, client.interrupt_on_timeout = 5, True
        began = time.monotonic()
        with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
            client.execute_cell(cells["long"], 4)
        assert time.monotonic() - began < 60
        client.timeout = 120
        client.execute_cell(cells["after"], 5)
        assert text_of(cells["after"]).strip() == "1", text_of(cells["after"])
        started = engines()
        assert started, "the kernel has no engine"
        asyncio.run(client.km.restart_kernel(now=True))
        _, living = psutil.wait_procs(started, timeout=60)
        assert not living, f"an engine outlived its kernel: {living}"


if __name__ == "__main__":
    main()
