"""A bounded run of benchmarks/fuzz_wire.py: hostile clients on a real engine's wire, and one that notices nothing."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wire_client import WireClient

from headrace.ipc.messages import Abort, Refused

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fuzz_wire


class Engine:
    """A core that all tests here attack, and what the victim's tokens are."""

    def __init__(self, address: str, process: psutil.Process, child: Any) -> None:
        self.address, self.process, self.child = address, process, child
        self.counts = fuzz_wire.Counts()
        self.expected: list[list[int]] | None = None


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with fuzz_wire.engine(tmp_path_factory.mktemp("model")) as (address, process, child):
        engine = Engine(address, process, child)
        with fuzz_wire.zmq.Context() as context:
            victim = fuzz_wire.Victim(context, address, engine.counts)
            engine.expected = victim.expected
            victim.close()
        yield engine
        assert child.failure is None, child.failure.describe()


@pytest.mark.parametrize("num_examples", [2, pytest.param(40, marks=pytest.mark.system)])
def test_no_client_can_end_the_engine_or_change_anothers_tokens(engine: Engine, num_examples: int) -> None:
    @settings(max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False)
    @given(numbers=st.randoms(use_true_random=False), seed=st.integers(0, 2**32))
    def attack(numbers: random.Random, seed: int) -> None:
        # Shrinking needs hypothesis' own numbers, and long sequences are too many of them.
        chosen = numbers if seed % 2 else random.Random(seed)
        problems = fuzz_wire.fuzz(
            engine.address, chosen, engine.counts, acts=15 if seed % 2 else 60, burst=40, expected=engine.expected
        )
        assert not problems
        assert engine.child.failure is None, engine.child.failure.describe()

    attack()


@pytest.mark.parametrize(
    "frames",
    [
        [b"\x91" * 100_000 + b"\xc0"],
        [b"\x92\xa7Control\x01\x92\xadCallExtension\x81\xa1x" + b"\x91" * 2000 + b"\xc0"],
        [b"\xdd\xff\xff\xff\xff"],
        [b""],
        [b"", b"", b""],
    ],
    ids=["nested arrays", "a nested payload", "four billion entries", "nothing", "empty frames"],
)
def test_a_message_that_cannot_be_decoded_is_refused_and_the_next_is_heard(engine: Engine, frames: list[bytes]) -> None:
    with WireClient(engine.address) as client:
        client.socket.send_multipart(frames)
        client.receive(Refused)
        client.add(1, [5, 6], max_tokens=2)
        client.finish(1)


def test_ten_thousand_adds_and_aborts_leave_nothing_behind(engine: Engine) -> None:
    import psutil

    with WireClient(engine.address) as client:
        process = psutil.Process(client.welcome.pid)
        sizes = []
        for start in range(0, 10_000, 500):
            for slot in range(start, start + 500):
                client.add(slot, [5 + slot % 50] * 100, max_tokens=50)
                client.send(Abort(slots=(slot,)))
            client.finish(start + 499)
            sizes.append(process.memory_info().rss)
        assert sizes[-1] - sizes[len(sizes) // 2] < 10 << 20


@pytest.mark.system
def test_thousands_of_requests_that_are_aborted_at_once_are_each_answered_once_and_leave_nothing(
    engine: Engine,
) -> None:
    samples = fuzz_wire.add_and_abort(engine.address, engine.process, 4000, at_once=200)
    growth = fuzz_wire.growth_of_last_half(samples)
    assert growth is not None
    assert growth < fuzz_wire.MOST_GROWTH_BYTES
    assert engine.child.failure is None
