"""Fleets on virtual time: routers, pools and clients are the real ones. Each seed is a run, always the same."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from simulate import main
from simulation.world import Scenario, simulate
from thinned import every

from headrace.core.coordinator.registry import Registry
from headrace.frontend.client import request_table
from headrace.frontend.fleet.decisions import RouterOptions
from headrace.frontend.fleet.directory import Directory
from headrace.frontend.fleet.router import Router
from headrace.ipc.coordination import Follow
from headrace.ipc.messages import AddRequest

HEAVY = Scenario(faults_per_s=2.0, num_requests=100, arrivals_per_s=20.0)
"""Of five engines, each fails every few seconds."""
SCENARIOS = {
    "few faults": (Scenario(), 25),
    "many faults": (HEAVY, 25),
    "requests that kill": (
        Scenario(faults_per_s=0.5, num_requests=80, arrivals_per_s=20.0, poison_share=0.03, num_engines=8),
        15,
    ),
    "two engines": (Scenario(num_engines=2, num_frontends=1, faults_per_s=1.0, arrivals_per_s=15.0), 20),
    "no moves": (Scenario(faults_per_s=1.0, arrivals_per_s=20.0, router=RouterOptions(max_migrations=0)), 10),
}


def violations(scenario: Scenario, seeds: range) -> list[str]:
    return [f"seed {seed}: {each}" for seed in seeds for each in simulate(seed, scenario).violations]


@pytest.mark.parametrize("name", every(2, SCENARIOS))
def test_no_request_is_lost_doubled_or_changed_whatever_fails(name: str) -> None:
    scenario, num_seeds = SCENARIOS[name]
    assert violations(scenario, range(num_seeds)) == []


def test_a_healthy_fleet_answers_all() -> None:
    report = simulate(0, Scenario(faults_per_s=0.0))
    assert (report.num_finished, report.failures, report.migrations) == (60, {}, {})


def test_faults_move_streams_and_requests_that_kill_are_stopped() -> None:
    """Or the tests above would show nothing."""
    heavy = [simulate(seed, HEAVY) for seed in range(10)]
    assert sum(report.migrations.get("died", 0) for report in heavy) > 20
    assert sum(report.migrations.get("silent", 0) for report in heavy) > 20
    assert any(report.gaps_s["died"] for report in heavy)
    deadly = [simulate(seed, SCENARIOS["requests that kill"][0]) for seed in range(5)]
    assert sum(report.failures.get("quarantined", 0) for report in deadly) > 5


def test_equal_seeds_give_equal_runs() -> None:
    assert simulate(7, HEAVY) == simulate(7, HEAVY)
    assert simulate(7, HEAVY).digest != simulate(8, HEAVY).digest


def test_a_token_that_a_move_loses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    messages_of = request_table._messages_of

    def forgetful(stream: request_table.RequestStream, registered: Mapping[str, str]) -> list[AddRequest]:
        for sequence in stream.sequences:
            del sequence.token_ids[5:6]
        return messages_of(stream, registered)

    monkeypatch.setattr(request_table, "_messages_of", forgetful)
    # By the engine that is to go on after it, or by the reader.
    told = ("after tokens that it never had", "lost, doubled or changed")
    assert sum(any(text in each for text in told) for each in violations(HEAVY, range(10))) > 3


def test_a_router_that_forgets_who_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Router, "_place_held", lambda router, now_s: [])
    crowded = Scenario(num_engines=1, num_frontends=1, faults_per_s=1.0, kinds_of_faults=("crash",), num_requests=30)
    assert any("stood still" in each or "never ended" in each for each in violations(crowded, range(5)))


@pytest.mark.system
def test_many_seeds() -> None:
    assert violations(HEAVY, range(1_000, 2_000)) == []


@pytest.mark.system
def test_a_large_fleet() -> None:
    large = Scenario(
        num_engines=100,
        num_frontends=20,
        num_requests=5_000,
        arrivals_per_s=1_000.0,
        faults_per_s=20.0,
        num_sessions=300,
    )
    assert violations(large, range(1)) == []


def test_the_command_tells_what_held(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3", "--disable-tqdm", "--num-requests", "20"]) == 0
    output = capsys.readouterr().out
    assert "violations" in output
    assert "runs" in output


# --- coordinators -------------------------------------------------------------------------------------------------

COORDINATED = Scenario(
    num_coordinators=1, num_engines=6, num_frontends=2, faults_per_s=0.4, num_requests=150, arrivals_per_s=1.5
)
"""Long enough for leases to run out."""


@pytest.mark.parametrize("num_coordinators", every(2, [2, 1]))
def test_engines_are_found_and_forgotten_and_no_stream_suffers(num_coordinators: int) -> None:
    scenario = msgspec.structs.replace(COORDINATED, num_coordinators=num_coordinators)
    assert violations(scenario, range(8)) == []


def test_each_change_of_membership_is_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.frontend.fleet.discovery")
    simulate(4, COORDINATED)  # of which one engine leaves, and one is lost
    told = Counter(each.rpartition(") ")[2] for each in caplog.messages)
    frontends = COORDINATED.num_frontends
    assert told["has left"] == told["is forgotten: no coordinator has told of it of late"] == frontends
    for number in range(COORDINATED.num_engines):
        found = f" at engine-{number} (simulated) is there"
        assert sum(each.endswith(found) for each in caplog.messages) >= frontends, number


def test_a_coordinator_that_tells_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Directory, "_gone", lambda *_: iter(()))
    monkeypatch.setattr(Directory, "tick", lambda *_: iter(()))
    assert any("after its end" in each for each in violations(COORDINATED, range(5)))


@pytest.mark.system
def test_a_directory_that_never_asks_for_what_it_missed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Registry.receive

    def silent(registry: Registry, peer: bytes, message: Any, now_s: float) -> Any:
        if isinstance(message, Follow):
            message = msgspec.structs.replace(message, needs_all=False)
        return real(registry, peer, message, now_s)

    monkeypatch.setattr(Registry, "receive", silent)
    assert any("has not been found" in each for each in violations(COORDINATED, range(10)))
