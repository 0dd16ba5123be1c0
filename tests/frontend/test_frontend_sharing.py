"""How an LLM is shared: among threads, with forks, and with others that are attached to the same core."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from fake_core import expected_text, memory_core, zmq_core
from fake_llm import core, llm

import headrace
from headrace import (
    LLM,
    HeadraceError,
    InvalidRequestError,
    SamplingParams,
)
from headrace.frontend.client.background import BackgroundLoop
from headrace.ipc.messages import FetchTokenizer

__all__ = ["core", "llm"]  # fixtures
pytestmark = pytest.mark.usefixtures("private_cache")


def test_what_a_background_loop_cannot_run_is_raised_instead_of_waited_for() -> None:
    background = BackgroundLoop("test")
    try:
        with pytest.raises(TypeError, match="coroutine"):
            background.run(cast(Any, None))
        assert background.run(asyncio.sleep(0, "the loop goes on")) == "the loop goes on"
    finally:
        background.stop()


def test_threads_can_share_one(llm: LLM) -> None:
    texts: dict[int, str] = {}

    def work(token_id: int) -> None:
        texts[token_id] = llm.generate([token_id], use_tqdm=False)[0].outputs[0].text

    threads = [threading.Thread(target=work, args=(token_id,)) for token_id in range(10, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {token_id: expected_text(llm, [token_id], 8) for token_id in range(10, 30)}


def test_a_fork_is_told_instead_of_hanging(llm: LLM) -> None:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            llm.generate("Hello", use_tqdm=False)
        except HeadraceError as error:
            os.write(write_end, str(error).encode())
        finally:
            llm.close()
            os._exit(0)
    os.close(write_end)
    said = os.read(read_end, 1000).decode()
    os.close(read_end)
    os.waitpid(pid, 0)
    assert f"belongs to process {os.getpid()}, and this one was forked" in said
    assert llm.generate("Hello", use_tqdm=False)[0].finished


def test_connect_attaches_and_closing_only_detaches(private_cache: Path) -> None:
    with zmq_core() as core:
        for _ in range(2):
            with headrace.connect(core.address) as llm:
                assert llm.engine.model == "fake"
                assert llm.generate("Hello", use_tqdm=False)[0].outputs[0].text == expected_text(
                    llm, [42, 71, 78, 78, 81], 8
                )
                llm.reset_prefix_cache()
        fetched = [message for message in core.core.received if isinstance(message, FetchTokenizer)]
        assert len(fetched) == 1, "the second client should have used the cache"
        (path,) = (private_cache / "tokenizers").iterdir()
        path.write_bytes(b"damaged")
        with headrace.connect(core.address) as llm:
            assert llm.get_tokenizer().encode("Hello") == [42, 71, 78, 78, 81]


def test_without_a_tokenizer_token_ids_work_and_text_is_refused() -> None:
    with memory_core(tokenizer=None) as core, LLM.attach(core.transport) as llm:
        (output,) = llm.generate([5, 6], use_tqdm=False)
        assert (output.prompt, output.outputs[0].text, len(output.outputs[0].token_ids)) == (None, "", 8)
        with pytest.raises(InvalidRequestError, match="without a tokenizer"):
            llm.generate("Hello")
        with pytest.raises(InvalidRequestError, match="without a tokenizer"):
            llm.get_tokenizer()
        with pytest.raises(InvalidRequestError, match="stop needs a tokenizer"):
            llm.generate([5, 6], SamplingParams(stop="x"))
