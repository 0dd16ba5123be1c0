"""Requests that wait for a condition: held back, let go by a message, aborted, timed out, counted by reason."""

from __future__ import annotations

from collections.abc import Sequence

from engine_parts import SteppedClient, SteppedCore

from headrace.core.engine.gates import Gate, GateFailed, GateOpened
from headrace.core.engine.loop import MESSAGES_BESIDE_STEPS
from headrace.core.schedule.requests import Request
from headrace.ipc.failure import Failure
from headrace.ipc.messages import Abort, AddRequest, EngineStats, FinishReason, GetStats, Goodbye, Reply

ADAPTER, GRAMMAR = Gate("adapter", "fr"), Gate("grammar", "json")


class OfSalt:
    """Gates by words of the request's cache salt, in the place of adapters and grammars."""

    def __init__(self, timeout_s: float = 60.0, gates: Sequence[Gate] = (ADAPTER, GRAMMAR)) -> None:
        self.timeout_s, self._gates = timeout_s, gates

    def closed_gates(self, request: Request, message: AddRequest) -> Sequence[Gate]:
        return [gate for gate in self._gates if gate.key in message.cache_salt]


def gated_core(*gatekeepers: OfSalt) -> tuple[SteppedCore, SteppedClient]:
    core = SteppedCore()
    for each in gatekeepers or (OfSalt(),):
        core.loop.gates.register(each)
    return core, core.open()


def turn(core: SteppedCore) -> None:
    if not core.inbox.empty() or core.loop.has_work:
        core.loop.turn()


def test_only_requests_whose_gates_are_all_open_enter_the_queue() -> None:
    core, client = gated_core()
    client.add(0, [5, 6], cache_salt="fr json", max_tokens=3)
    client.add(1, [5, 6], max_tokens=3)
    core.run_until_idle()
    assert [finish.slot for finish in client.finishes()] == [1]
    core.inbox.put((0, GateOpened(GRAMMAR)))
    core.run_until_idle()
    assert [finish.slot for finish in client.finishes()] == [1]
    core.inbox.put((0, GateOpened(ADAPTER)))
    core.run_until_idle()
    assert [finish.slot for finish in client.finishes()] == [1, 0]
    assert client.tokens()[0] == client.tokens()[1]
    assert len(core.loop.gates) == 0


def test_one_gate_lets_all_its_requests_go_in_order_of_arrival() -> None:
    core, client = gated_core()
    for slot in range(3):
        client.add(slot, [5, 6], cache_salt="fr", max_tokens=1)
    core.run_until_idle()
    core.inbox.put((0, GateOpened(ADAPTER)))
    core.run_until_idle()
    assert [each.slot for message in client.outputs() for each in message.admitted] == [0, 1, 2]


def test_of_thousands_behind_one_gate_a_few_enter_between_the_steps_of_what_runs() -> None:
    core, client = gated_core()
    most = 3 * MESSAGES_BESIDE_STEPS
    for slot in range(1, most + 1):
        client.add(slot, [5, 6], cache_salt="fr", max_tokens=1)
    core.run_until_idle()
    client.add(0, [5, 6], max_tokens=200)
    while not core.loop.scheduler.num_running:
        turn(core)
    core.inbox.put((0, GateOpened(ADAPTER)))
    left = []
    for _ in range(4):
        turn(core)
        left.append(len(core.loop.gates))
    assert left == [most - MESSAGES_BESIDE_STEPS, most - 2 * MESSAGES_BESIDE_STEPS, 0, 0]
    core.run_until_idle()
    assert len(client.finishes()) == most + 1


def test_a_gated_request_can_be_aborted_and_its_client_can_leave() -> None:
    core, client = gated_core()
    leaving = core.open()
    client.add(0, [5, 6], cache_salt="fr")
    leaving.add(0, [5, 6], cache_salt="fr json")
    core.run_until_idle()
    client.send(Abort(slots=(0,)))
    leaving.send(Goodbye())
    core.run_until_idle()
    assert [finish.reason for finish in client.finishes()] == [FinishReason.ABORT]
    assert len(core.loop.gates) == 0
    core.inbox.put((0, GateOpened(ADAPTER)))
    core.run_until_idle()
    assert client.tokens() == {}


def test_a_gate_that_fails_ends_its_requests_with_the_cause() -> None:
    core, client = gated_core()
    client.add(0, [5, 6], cache_salt="fr json")
    client.add(1, [5, 6], cache_salt="json")
    core.run_until_idle()
    core.inbox.put((0, GateFailed(ADAPTER, Failure(message="there is no adapter fr"))))
    core.run_until_idle()
    (finish,) = client.finishes()
    assert (finish.slot, finish.reason) == (0, FinishReason.FAILED)
    assert finish.failure is not None
    assert finish.failure.message == "there is no adapter fr"
    assert core.loop.gates.waiting_by_reason() == {"grammar": 1}


def test_a_gate_that_never_opens_times_out_in_an_idle_engine_with_a_clear_failure() -> None:
    core, client = gated_core(OfSalt(0.05))
    client.add(0, [5, 6], cache_salt="fr")
    core.loop.turn()
    core.loop.turn()  # waits for a message, until the time is up
    (finish,) = client.finishes()
    assert finish.reason is FinishReason.FAILED
    assert finish.failure is not None
    assert finish.failure.message == "the request waited 0.05 s for adapter fr, which did not become ready"


def test_each_kind_of_gate_has_its_own_time_out() -> None:
    core, client = gated_core(OfSalt(60.0, [GRAMMAR]), OfSalt(0.05, [ADAPTER]))
    client.add(0, [5, 6], cache_salt="json")
    client.add(1, [5, 6], cache_salt="json fr")
    client.add(2, [5, 6], cache_salt="fr")
    core.run_until_idle()
    for _ in range(3):
        core.loop.turn()
        if len(client.finishes()) == 2:
            break
    assert sorted(finish.slot for finish in client.finishes()) == [1, 2]
    assert core.loop.gates.waiting_by_reason() == {"grammar": 1}
    core.inbox.put((0, GateOpened(GRAMMAR)))
    core.run_until_idle()
    assert len(client.finishes()) == 3
    assert core.loop.gates.next_deadline_s() is None


def test_gated_requests_count_as_waiting_by_reason() -> None:
    core, client = gated_core()
    client.add(0, [5, 6], cache_salt="fr")
    client.add(1, [5, 6], cache_salt="fr json")
    client.send(GetStats(call=1))
    core.run_until_idle()
    (reply,) = [message for message in client.heard if isinstance(message, Reply)]
    assert isinstance(reply.result, EngineStats)
    assert reply.result.num_waiting == 2
    assert reply.result.num_waiting_by_reason == {"capacity": 0, "adapter": 2, "grammar": 1}


def test_an_engine_that_stops_waits_for_gated_requests_until_the_deadline_and_no_longer() -> None:
    from headrace.core.engine.sessions import StopRequest

    core, client = gated_core()
    client.add(0, [5, 6], cache_salt="fr")
    core.inbox.put((0, StopRequest(0.05)))
    core.loop.run()
    (finish,) = client.finishes()
    assert finish.reason is FinishReason.FAILED
    assert finish.failure is not None
    assert finish.failure.type == "ShutDown"
