"""What ranks listen on is for the other ranks alone: the address that they meet at, and no other interface."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models
import torch

from headrace import LLM, SamplingParams
from headrace.executor.gpu import collectives
from headrace.executor.parallel.collectives import loopback_store
from headrace.executor.parallel.gloo import open_gloo, open_store
from headrace.executor.parallel.rank_place import PeerError, World
from headrace.executor.parallel.rendezvous import Rendezvous

WORLD = World(tp_size=2, pp_size=1, max_tokens=8, max_seqs=8, hidden_size=16, vocab_size=32)


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    connections = process.net_connections(kind="tcp")
    return {tuple(each.laddr) for each in connections if each.status == psutil.CONN_LISTEN}


class New:
    """The addresses at which this process listens since a moment."""

    def __init__(self) -> None:
        self._before = listening(psutil.Process())

    def hosts(self) -> set[str]:
        return {host for host, _ in listening(psutil.Process()) - self._before}


@contextmanager
def new_sockets() -> Iterator[New]:
    yield New()


def test_the_store_of_one_host_listens_on_loopback_alone() -> None:
    with new_sockets() as new, mmap.mmap(-1, 4096) as memory:
        store = loopback_store(memory, 0, 10.0)
        assert new.hosts() == {"127.0.0.1"}
        other = loopback_store(memory, 1, 10.0)
        store.set("key", "value")
        assert other.get("key") == b"value"
        del store, other


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_a_store_listens_at_the_address_of_its_ranks_alone(host: str) -> None:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        port = free.getsockname()[1]
    with new_sockets() as new:
        store = open_store((host, port), 0, listen_fd=None, opens=True, deadline_s=10.0)
        assert new.hosts() <= {host, "127.0.0.1"} | ({"::1"} if host == "localhost" else set())
        assert len(new.hosts()) == 1
        other = open_store((host, port), 1, listen_fd=None, opens=False, deadline_s=10.0)
        store.set("key", "value")
        assert other.get("key") == b"value"
        del store, other


@pytest.mark.parametrize("interface", ["", "lo"])
def test_ranks_that_meet_on_loopback_listen_there(interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default gloo listens at whatever the host's name resolves to; GLOO_SOCKET_IFNAME chooses the interface."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setattr(socket, "gethostname", lambda: pytest.fail("the host's name does not matter"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with new_sockets() as new, ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(open_gloo, ("127.0.0.1", port), WORLD, rank, opens_store=rank == 0, deadline_s=30.0)
            for rank in range(2)
        ]
        links = [rank.result() for rank in ranks]
        assert new.hosts() == {"127.0.0.1"}
        sums = [pool.submit(link.all_reduce, torch.ones(1, 2)) for link in links]
        assert [each.result().tolist() for each in sums] == [[[2.0, 2.0]]] * 2
        del ranks, sums
        for link in links:
            link.close()


@pytest.mark.parametrize(("named", "used"), [(None, "lo"), ("eth7", "eth7")])
def test_nccl_of_one_host_is_told_to_stay_on_it(named: str | None, used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the variable when its first communicator is made, here in place of which the ranks give up."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME") if named is None else monkeypatch.setenv("NCCL_SOCKET_IFNAME", named)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    seen: list[str] = []

    def groups(*_: object) -> None:
        seen.append(os.environ["NCCL_SOCKET_IFNAME"])
        raise RuntimeError("no GPU")

    monkeypatch.setattr(collectives, "_groups", groups)
    memory = os.memfd_create("headrace-test")
    try:
        os.ftruncate(memory, 4096)
        rendezvous = Rendezvous(WORLD, 0, range(2), memory, 10.0)
        with pytest.raises(PeerError, match="no GPU"):
            collectives.open_nccl(rendezvous, torch.device("cpu"), custom_all_reduce=False, in_order=False)
    finally:
        os.close(memory)
    assert seen == [used]


@pytest.mark.system
def test_an_engine_without_a_compiler_listens_on_loopback_alone(
    tmp_path: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    tiny_models.save("llama3", tmp_path)
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64}
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
    with LLM(str(tmp_path), tensor_parallel_size=2, **options) as llm:
        assert len(llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0].token_ids) == 3
        hosts = {host for child in psutil.Process().children(recursive=True) for host, _ in listening(child)}
        assert hosts == {"127.0.0.1"}
