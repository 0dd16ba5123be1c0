"""Adapters of requests: loaded beside steps, held until the request ends, evicted, reloaded in place, bounded per step.

The null executor reads an adapter's files, and draws other tokens for other content; it checks that no block is shared
between different adapters, and that no slot changes under a row.
"""

from __future__ import annotations

import json
import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_parts import VOCAB_SIZE, SteppedClient, SteppedCore, make_plan
from patience import wait_until

from headrace.core.adapters.loader import AdapterLoader
from headrace.core.engine.engine import EngineThread
from headrace.core.options.engine_options import Options
from headrace.core.schedule.scheduler import LOOKED_PAST, MOST_STEPS_PASSED
from headrace.executor.testing.null import NullExecutor
from headrace.ipc.adapters import AdapterFacts, AdapterInfo, Adapters, AdapterStats, AdapterUse, KeyAdapter
from headrace.ipc.control import (
    ASLEEP,
    AdapterCommand,
    ListAdapters,
    LoadAdapter,
    PauseGeneration,
    PinAdapter,
    ResumeGeneration,
    ScaleAdapters,
    UnloadAdapter,
)
from headrace.ipc.failure import ModelError, OptionError
from headrace.ipc.messages import (
    SCHEMA_HASH,
    Abort,
    Control,
    CoreMessage,
    EngineStats,
    Finish,
    FinishReason,
    GetStats,
    Goodbye,
    Hello,
    Reply,
    Welcome,
)
from headrace.ipc.prefix_names import PrefixKey, prefix_names
from headrace.ipc.wait import WaitTimeoutError

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


class Counting(NullExecutor):
    """Counts the loads of each path, and lets a test hold them up."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.loads: list[str] = []
        self.may_load = threading.Event()
        self.may_load.set()

    def load_adapter(self, slot: int, path: str, *, is_3d: bool = False) -> AdapterFacts:
        assert self.may_load.wait(60)
        self.loads.append(Path(path).name)
        return super().load_adapter(slot, path, is_3d=is_3d)


class Ahead(Counting):
    """Two steps may be in flight."""

    max_steps_in_flight = 2


class Core(SteppedCore):
    """With adapters."""

    executor: Counting

    def __init__(self, executor_class: type[Counting] = Counting, **options: Any) -> None:
        super().__init__(executor_class=executor_class, **{"enable_lora": True, "max_loras": 4, **options})

    def run_until(self, is_done: Callable[[], object], max_turns: int = 3000) -> None:
        for _ in range(max_turns):
            if is_done():
                return
            if not self.loop.has_work:  # then a turn waits for a message, such as that of a load that has ended
                wait_until(lambda: not self.inbox.empty(), 60.0, "a message to the loop")
            self.loop.turn()
        raise AssertionError("it did not come to that")

    def finish_all(self, *clients: SteppedClient, count: int) -> None:
        """Runs until the clients' requests have ended, `count` of them in all."""
        self.run_until(lambda: sum(len(client.finishes()) for client in clients) == count)
        self.run_until_idle()


def write(folder: Path, content: str, **config: Any) -> str:
    """An adapter's files."""
    folder.mkdir(exist_ok=True)
    for name, text in (("adapter_config.json", json.dumps({"r": 8, **config})), ("adapter_model.safetensors", content)):
        (folder / "new").write_text(text)
        (folder / "new").rename(folder / name)  # whole, even while it is read
    return str(folder)


def order(core: Core, client: SteppedClient, command: AdapterCommand, call: int = 1) -> Reply:
    """Sends a command and runs until its answer."""
    before = len(replies(client))
    client.send(Control(call=call, command=command))
    core.run_until(lambda: len(replies(client)) > before)
    return replies(client)[-1]


def load(core: Core, client: SteppedClient, name: str, path: str, **more: Any) -> AdapterInfo:
    reply = order(core, client, LoadAdapter(name=name, path=path, **more))
    assert isinstance(reply.result, AdapterInfo), reply.failure
    return reply.result


def replies(client: SteppedClient) -> list[Reply]:
    return [each for each in client.heard if isinstance(each, Reply)]


def uses(*names: str, **more: Any) -> tuple[AdapterUse, ...]:
    return tuple(AdapterUse(name=name, **more) for name in names)


def ask(core: Core, *adapters: AdapterUse, prompt: list[int] = PROMPT, **more: Any) -> list[int]:
    """The tokens of one request, by a client of its own."""
    client = core.open()
    client.add(0, prompt, adapters=adapters, **more)
    core.finish_all(client, count=1)
    (finish,) = client.finishes()
    assert finish.reason is FinishReason.LENGTH, finish
    client.send(Goodbye())
    core.run_until_idle()
    return client.tokens()[0]


def failed(core: Core, *adapters: AdapterUse, **more: Any) -> Finish:
    client = core.open()
    client.add(0, PROMPT, adapters=adapters, **more)
    core.finish_all(client, count=1)
    (finish,) = client.finishes()
    assert finish.failure is not None
    return finish


def why(finish: Finish) -> str:
    assert finish.failure is not None
    return finish.failure.message


def stats(core: Core) -> AdapterStats:
    found = core.loop.stats()
    assert isinstance(found, EngineStats)
    assert found.adapters is not None
    return found.adapters


@contextmanager
def paused(core: Core, client: SteppedClient) -> Iterator[None]:
    """No step is computed meanwhile, so what runs does not end."""
    client.send(Control(call=98, command=PauseGeneration(mode="keep", clear_cache=False)))
    core.run_until(lambda: replies(client)[-1:] and replies(client)[-1].call == 98)
    yield
    client.send(Control(call=99, command=ResumeGeneration()))
    core.run_until(lambda: replies(client)[-1].call == 99)


def loaded_ranks(core: Core) -> dict[int, str]:
    """What the rank has, once it has carried out all orders."""
    done = threading.Event()
    assert core.loop.adapters is not None
    loader = core.loop.adapters._loader
    assert isinstance(loader, AdapterLoader)
    loader._background.submit(done.set)
    assert done.wait(60)
    return core.executor.identities


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    return [write(tmp_path / name, f"content of {name}") for name in "abcdef"]


# --- one content, one answer ------------------------------------------------------------------------------------------


def test_an_adapter_changes_the_answer_and_its_absence_does_not(folders: list[str]) -> None:
    base = ask(Core(enable_lora=False, max_loras=None))
    core = Core()
    client = core.open()
    load(core, client, "a", folders[0])
    adapted = ask(core, *uses("a"))
    assert ask(core) == ask(core, *uses("a", scale=0.0)) == base != adapted
    assert ask(core, *uses("a", scale=0.5)) not in (base, adapted)
    assert ask(core, AdapterUse(name="later", path=folders[0])) == adapted  # the same content, under another name


def test_a_prefix_of_another_adapter_is_not_used(folders: list[str]) -> None:
    """The same prompt with one adapter, then with another: as on a cold cache."""
    cold = [ask(Core(), AdapterUse(name="x", path=path)) for path in folders[:2]]
    core = Core()
    assert [ask(core, AdapterUse(name="x", path=path)) for path in folders[:2]] == cold
    client = core.open()
    for slot, adapters in enumerate([uses("x", path=folders[0]), uses("x", path=folders[1]), (), uses("x", scale=2.0)]):
        client.add(slot, PROMPT, adapters=adapters)
    core.finish_all(client, count=4)
    assert client.cached() == {0: 8, 1: 8, 2: 0, 3: 0}  # each finds its own prefix, and the base has none yet


def test_the_order_of_several_adapters_changes_nothing(folders: list[str]) -> None:
    core = Core()
    a, b = (AdapterUse(name=name, path=path, scale=0.5) for name, path in zip("ab", folders, strict=False))
    both = ask(core, a, b)
    assert ask(core, b, a) == both
    assert len({tuple(each) for each in (both, ask(core, a), ask(core, b), ask(core))}) == 4


def test_reloading_in_place_makes_a_version_for_new_requests_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "old")
    fresh = [ask(Core(), *uses("a", path=path), max_tokens=30)]
    core = Core()
    client = core.open()
    old = load(core, client, "a", path)
    client.add(1, PROMPT, adapters=uses("a"), max_tokens=30)
    core.run_until(lambda: client.tokens().get(1))
    write(tmp_path / "a", "new")
    fresh.append(ask(Core(), *uses("a", path=path), max_tokens=30))
    with paused(core, client):
        new = load(core, client, "a", path, in_place=True)
        assert new.identity != old.identity
    client.add(2, PROMPT, adapters=uses("a"), max_tokens=30)
    core.finish_all(client, count=2)
    assert [client.tokens()[1], client.tokens()[2]] == fresh
    assert stats(core).num_loaded == 1  # the old version left with its last request


def test_a_reload_in_place_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    core = Core()
    client = core.open()
    path = write(tmp_path / "a", "old")
    load(core, client, "a", path)
    before = ask(core, *uses("a"))
    (tmp_path / "a" / "adapter_config.json").write_text("{")
    reply = order(core, client, LoadAdapter(name="a", path=path, in_place=True))
    assert reply.failure is not None
    assert path in reply.failure.message
    assert ask(core, *uses("a")) == before


def test_a_path_is_read_once_for_all_its_requests(folders: list[str]) -> None:
    core = Core()
    client = core.open()
    load(core, client, "a", folders[0], in_place=True)
    core.executor.may_load.clear()
    for slot in range(100):
        client.add(slot, PROMPT, adapters=uses("a") if slot % 2 else uses("b", path=folders[1]), max_tokens=1)
    core.run_until(lambda: len(client.finishes()) == 50)
    core.executor.may_load.set()
    core.finish_all(client, count=100)
    assert core.executor.loads == ["a", "b"]


# --- loads -----------------------------------------------------------------------------------------------------------


def test_steps_go_on_while_an_adapter_is_loaded(folders: list[str]) -> None:
    core = Core()
    client = core.open()
    core.executor.may_load.clear()
    client.add(0, PROMPT, max_tokens=40)
    client.add(1, PROMPT, adapters=uses("a", path=folders[0]))
    client.send(Control(call=7, command=LoadAdapter(name="b", path=folders[1])))
    core.run_until(client.finishes)
    assert [finish.slot for finish in client.finishes()] == [0]
    assert not replies(client)
    assert core.loop.stats().num_waiting_by_reason == {"capacity": 0, "adapter": 1}
    core.executor.may_load.set()
    core.finish_all(client, count=2)
    core.run_until(lambda: replies(client))


def test_every_client_sees_each_load_and_unload_before_its_answer(folders: list[str]) -> None:
    core = Core()
    one, two = core.open(), core.open()
    info = load(core, one, "a", folders[0], base_model_name="null-base")
    assert (info.name, info.path, info.state, info.rank, info.base_model_name) == (
        "a",
        folders[0],
        "loaded",
        8,
        "null-base",
    )
    for client in (one, two):
        heard = [each for each in client.heard if isinstance(each, Adapters)]
        assert [each.name for each in heard[-1].adapters] == ["a"]
    assert isinstance(one.heard[-1], Reply)
    load(core, two, "b", folders[1])
    assert [each.name for each in _listed(core, one)] == ["a", "b"]
    assert order(core, two, UnloadAdapter(name="a")).failure is None
    heard = [each for each in one.heard if isinstance(each, Adapters)]
    assert [each.name for each in heard[-1].adapters] == ["b"]
    assert why(failed(core, *uses("a"))) == "there is no adapter a; known: b"


def test_a_client_that_comes_later_is_welcomed_with_all_adapters(folders: list[str]) -> None:
    engine = EngineThread(Options(enable_lora=True, max_loras=3, skip_tokenizer_init=True), Counting(Options()))
    try:
        heard: queue.Queue[CoreMessage] = queue.Queue()
        number = engine.port.open(Hello(schema_hash=SCHEMA_HASH, version="test", pid=1), heard.put)
        welcome = heard.get(timeout=60)
        assert isinstance(welcome, Welcome)
        assert (welcome.max_loras, welcome.adapters) == (3, ())
        engine.port.receive(number, Control(call=1, command=LoadAdapter(name="a", path=folders[0])))
        changed, reply = (heard.get(timeout=60) for _ in range(2))
        assert isinstance(reply, Reply)
        assert isinstance(changed, Adapters)
        assert changed.adapters == (reply.result,)
        engine.port.open(Hello(schema_hash=SCHEMA_HASH, version="test", pid=1), heard.put)
        welcome = heard.get(timeout=60)
        assert isinstance(welcome, Welcome)
        assert welcome.adapters == (reply.result,)
    finally:
        engine.stop()


def test_every_client_is_told_which_adapters_apply_where_none_is_named(folders: list[str]) -> None:
    core = Core()
    admin, other = core.open(), core.open()
    for name, path in zip("ab", folders, strict=False):
        load(core, admin, name, path)

    def scales(found: Sequence[AdapterInfo]) -> dict[str, float]:
        return {each.name: each.default_scale for each in found}

    told = order(core, admin, ScaleAdapters(scales={"b": 0.5})).result
    assert isinstance(told, Adapters)
    assert scales(told.adapters) == {"a": 0.0, "b": 0.5}
    heard = [each for each in other.heard if isinstance(each, Adapters)]
    assert scales(heard[-1].adapters) == {"a": 0.0, "b": 0.5}
    load(core, admin, "b", folders[2], in_place=True)
    assert scales(_listed(core, admin)) == {"a": 0.0, "b": 0.5}
    order(core, admin, ScaleAdapters(scales={"a": 2.0}))
    assert scales(_listed(core, admin)) == {"a": 2.0, "b": 0.0}


def test_no_more_adapters_apply_to_every_request_than_one_may_have(folders: list[str]) -> None:
    core = Core(max_loras=2)
    client = core.open()
    for name, path in zip("abc", folders, strict=False):
        load(core, client, name, path)
    refused = order(core, client, ScaleAdapters(scales=dict.fromkeys("abc", 1.0))).failure
    assert refused is not None
    assert "3 adapters would apply to every request, and this engine computes at most 2" in refused.message
    assert not any(each.default_scale for each in _listed(core, client))
    assert order(core, client, ScaleAdapters(scales={"a": 1.0, "b": 0.0, "c": -1.0})).failure is None


def test_a_sleeping_engine_loads_no_adapter_and_lists_them(folders: list[str]) -> None:
    core = Core()
    client = core.open()
    load(core, client, "a", folders[0])
    core.loop._controller.asleep = ASLEEP
    reply = order(core, client, LoadAdapter(name="b", path=folders[1]))
    assert reply.failure is not None
    assert reply.failure.type == "EngineAsleepError"
    assert [each.name for each in _listed(core, client)] == ["a"]
    core.loop._controller.asleep = frozenset()
    assert ask(core, *uses("a")) == ask(Core(), *uses("a", path=folders[0]))


def _listed(core: Core, client: SteppedClient) -> tuple[AdapterInfo, ...]:
    reply = order(core, client, ListAdapters())
    assert isinstance(reply.result, Adapters)
    return reply.result.adapters


def test_the_same_name_with_another_path_is_another_adapter(folders: list[str]) -> None:
    """Two requests of one name with different files: as from separate engines."""
    alone = [ask(Core(), *uses("x", path=path)) for path in folders[:2]]
    core = Core()
    client = core.open()
    for slot in range(2):
        client.add(slot, PROMPT, adapters=uses("x", path=folders[slot]))
    core.finish_all(client, count=2)
    assert [client.tokens()[slot] for slot in range(2)] == alone
    reply = order(core, client, LoadAdapter(name="x", path=folders[1]))
    assert reply.failure is not None
    assert f"adapter x is registered with the path {folders[0]}" in reply.failure.message


def test_a_folder_that_vanished_fails_the_requests_of_its_adapter_alone(tmp_path: Path, folders: list[str]) -> None:
    core = Core(max_loras=1, max_cpu_loras=1)
    client = core.open()
    path = write(tmp_path / "gone", "content")
    load(core, client, "gone", path)
    load(core, client, "a", folders[0])  # in the only slot
    (tmp_path / "gone" / "adapter_model.safetensors").unlink()
    client.add(0, PROMPT, adapters=uses("gone"))
    client.add(1, PROMPT, adapters=uses("a"))
    client.add(2, PROMPT)
    core.finish_all(client, count=3)
    finishes = {finish.slot: finish for finish in client.finishes()}
    assert finishes[0].reason is FinishReason.FAILED
    assert why(finishes[0]).startswith(f"adapter gone ({path}) could not be loaded: {path}")
    assert {finishes[1].reason, finishes[2].reason} == {FinishReason.LENGTH}
    write(tmp_path / "gone", "content")
    ask(core, *uses("gone"))  # it is tried again
    assert stats(core).num_failed_loads == 1


def test_an_adapter_that_never_loaded_is_not_listed(tmp_path: Path) -> None:
    core = Core()
    missing = str(tmp_path / "missing")
    assert why(failed(core, *uses("m", path=missing))).startswith(f"adapter m ({missing}) could not be loaded")
    assert not _listed(core, core.open())
    assert why(failed(core, *uses("m"))) == "there is no adapter m; known: none"
    core.executor.may_load.clear()
    client = core.open()
    client.add(0, PROMPT, adapters=uses("m", path=missing))
    client.add(1, PROMPT, adapters=uses("m", path=write(tmp_path / "there", "content")))
    core.run_until(lambda: len(core.loop.gates) == 2)
    core.executor.may_load.set()
    core.finish_all(client, count=2)
    assert ask(core, *uses("m")) == client.tokens()[1]  # the name is that of the path that is there


def test_a_load_that_hangs_costs_a_slot_and_no_other_adapter(folders: list[str]) -> None:
    class Hanging(Counting):
        def load_adapter(self, slot: int, path: str, *, is_3d: bool = False) -> AdapterFacts:
            if path == folders[0]:
                raise WaitTimeoutError(f"loading the adapter {path} did not end within 60 s")
            assert slot != 0, "the load that hangs may yet fill this slot"
            return super().load_adapter(slot, path, is_3d=is_3d)

    core = Core(Hanging, max_loras=1, max_cpu_loras=2)
    assert "did not end" in why(failed(core, *uses("a", path=folders[0])))
    for path in folders[1:]:
        ask(core, AdapterUse(name=path, path=path))
    assert "did not end" in why(failed(core, *uses("a", path=folders[0])))
    assert "do not fit into memory" in why(failed(core, *uses("b", path=folders[1])))


# --- slots ------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_adapter_makes_room_and_a_pinned_one_stays(folders: list[str]) -> None:
    core = Core(max_loras=2, max_cpu_loras=3)
    client = core.open()
    for name, path in zip("abc", folders, strict=False):
        load(core, client, name, path)
    assert isinstance(order(core, client, PinAdapter(name="a")).result, AdapterInfo)
    ask(core, *uses("b"))
    load(core, client, "d", folders[3])
    assert {each.name: each.state for each in _listed(core, client)} == {
        "a": "loaded",
        "b": "loaded",
        "c": "registered",
        "d": "loaded",
    }
    ask(core, *uses("c"))
    assert core.executor.loads == ["a", "b", "c", "d", "c"]
    assert stats(core).num_evictions == 2
    assert isinstance(order(core, client, PinAdapter(name="c")).result, AdapterInfo)
    refused = order(core, client, PinAdapter(name="d"))
    assert refused.failure is not None
    assert "2 adapters are pinned, and one of the 3 in memory" in refused.failure.message


def test_an_adapter_is_unloaded_once_its_last_request_has_ended(folders: list[str]) -> None:
    alone = ask(Core(), *uses("a", path=folders[0]), max_tokens=30)
    core = Core()
    client = core.open()
    load(core, client, "a", folders[0])
    for slot in range(16):
        client.add(slot, PROMPT, adapters=uses("a"), max_tokens=30, seed=slot)
    core.run_until(lambda: client.tokens().get(0))
    assert order(core, client, UnloadAdapter(name="a")).failure is None
    refused = failed(core, *uses("a"))
    assert refused.reason is FinishReason.REJECTED
    assert refused.failure is not None
    assert refused.failure.type == "UnknownAdapterError"
    core.finish_all(client, count=16)
    assert all(tokens == alone for tokens in client.tokens().values())
    assert not loaded_ranks(core)
    assert stats(core).num_loaded == 0
    assert ask(core) == ask(Core())


def test_a_slot_of_an_aborted_request_is_not_reused_under_the_step_in_flight(folders: list[str]) -> None:
    """The plan check raises if the content of a slot changes before the step is computed."""
    core = Core(Ahead, max_loras=1, max_cpu_loras=1, async_scheduling=True)
    client = core.open()
    for turn in range(6):
        client.add(2 * turn, PROMPT, adapters=uses("a", path=folders[0]), max_tokens=20)
        core.run_until(lambda turn=turn: client.tokens().get(2 * turn))  # type: ignore[misc]
        client.add(2 * turn + 1, PROMPT, adapters=uses("b", path=folders[1]), max_tokens=1)
        client.send(Abort(slots=(2 * turn,)))
        core.finish_all(client, count=2 * turn + 2)


def test_an_adapter_that_finds_no_slot_gets_the_next_one_though_others_are_asked_for_all_the_time(
    folders: list[str],
) -> None:
    core = Core(max_loras=2, max_cpu_loras=2)
    client = core.open()
    slot = 0
    for name, path in zip("ab", folders, strict=False):
        client.add(slot, PROMPT, adapters=uses(name, path=path), max_tokens=10)
        slot += 1
    core.run_until(lambda: len(client.tokens()) == 2)
    other = core.open()
    other.add(0, PROMPT, adapters=uses("c", path=folders[2]), max_tokens=2)
    for _ in range(60):  # there is always a request of each
        if other.finishes():
            break
        for name in "ab":
            client.add(slot, PROMPT, adapters=uses(name), max_tokens=10)
            slot += 1
        least = slot - 4
        core.run_until(lambda least=least: len(client.finishes()) >= least or other.finishes())  # type: ignore[misc]
    assert other.finishes()
    core.finish_all(client, count=slot)
    assert all(finish.reason is FinishReason.LENGTH for finish in client.finishes())


def test_requests_of_several_adapters_do_not_wait_for_each_other(folders: list[str]) -> None:
    core = Core(max_loras=2, max_cpu_loras=2)
    client = core.open()
    names = "abcdef"
    for slot in range(12):
        pair = [names[(slot + each) % 6] for each in range(2)]
        adapters = tuple(AdapterUse(name=name, path=folders[names.index(name)]) for name in pair)
        client.add(slot, PROMPT, adapters=adapters, max_tokens=3)
    core.finish_all(client, count=12)
    assert all(finish.reason is FinishReason.LENGTH for finish in client.finishes())


# --- requests come and go ---------------------------------------------------------------------------------------------


def test_a_request_may_end_while_its_adapter_is_loaded(folders: list[str]) -> None:
    core = Core(max_loras=1, max_cpu_loras=1)
    client, leaving = core.open(), core.open()
    core.executor.may_load.clear()
    client.add(0, PROMPT, adapters=uses("a", path=folders[0]))
    client.add(1, PROMPT, adapters=uses("b", path=folders[1]))
    leaving.add(0, PROMPT, adapters=uses("c", path=folders[2]))
    core.run_until(lambda: len(core.loop.gates) == 3)
    client.send(Abort(slots=(0,)))
    leaving.send(Goodbye())
    core.run_until(lambda: len(core.loop.gates) == 1)
    core.executor.may_load.set()
    core.finish_all(client, count=2)
    assert {finish.slot: finish.reason for finish in client.finishes()} == {
        0: FinishReason.ABORT,
        1: FinishReason.LENGTH,
    }
    assert core.executor.loads == ["a", "b"]


def test_an_adapter_that_is_unloaded_while_it_is_loaded_is_dropped(folders: list[str]) -> None:
    core = Core()
    client = core.open()
    core.executor.may_load.clear()
    client.add(0, PROMPT, adapters=uses("a", path=folders[0]), max_tokens=2)
    core.run_until(lambda: len(core.loop.gates) == 1)
    client.send(Control(call=1, command=UnloadAdapter(name="a")))
    core.run_until(lambda: replies(client))
    core.executor.may_load.set()
    core.finish_all(client, count=1)  # it came before
    assert not loaded_ranks(core)
    assert stats(core).num_registered == stats(core).num_loaded == 0


def test_preempted_and_paused_requests_keep_their_adapters(folders: list[str]) -> None:
    alone = [ask(Core(), *uses("x", path=path), max_tokens=40) for path in folders[:3]]
    core = Core(num_blocks=24, max_loras=2)
    client = core.open()
    for slot, path in enumerate(folders[:3]):
        client.add(slot, PROMPT, adapters=uses("x", path=path), max_tokens=40)
    core.run_until(lambda: len(client.tokens()) >= 2)
    client.send(Control(call=1, command=PauseGeneration(mode="keep")))
    core.run_until(lambda: replies(client))
    client.send(Control(call=2, command=ResumeGeneration()))
    core.finish_all(client, count=3)
    assert [client.tokens()[slot] for slot in range(3)] == alone
    assert core.loop.scheduler.num_preemptions > 0


def test_a_request_goes_on_elsewhere_with_the_same_content_or_fails_naming_both(
    tmp_path: Path, folders: list[str]
) -> None:
    one, other = Core(), Core()
    client = one.open()
    client.add(0, PROMPT, adapters=uses("a", path=folders[0]), max_tokens=20)
    one.finish_all(client, count=1)
    (admitted,) = [each for message in client.outputs() for each in message.admitted]
    (identity,) = admitted.adapters
    tokens = client.tokens()[0]
    there = {"prompt": [*PROMPT, *tokens[:7]], "num_resumed_tokens": 7, "seed": admitted.seed or 0, "max_tokens": 20}
    assert ask(other, *uses("a", path=folders[0], identity=identity), **there) == tokens[7:]
    second = Core()
    load(second, second.open(), "b", folders[1])
    finish = failed(second, *uses("b", identity=identity))
    assert "began with adapter b" in why(finish)
    assert identity in why(finish)
    write(Path(folders[0]), "changed since")
    third = Core()
    finish = failed(third, *uses("a", path=folders[0], identity=identity))
    (info,) = _listed(third, third.open())
    assert identity in why(finish)
    assert info.identity in why(finish)
    # Where the first content is still in use, it is found by its identity.
    client.add(1, PROMPT, adapters=uses("a"), max_tokens=50)
    one.run_until(lambda: client.tokens().get(1))
    with paused(one, client):
        load(one, client, "a", folders[0], in_place=True)
        client.add(2, adapters=uses("a", identity=identity), **there)
        one.run_until(one.inbox.empty)
    one.finish_all(client, count=3)
    assert client.tokens()[2] == tokens[7:]


# --- activated adapters -----------------------------------------------------------------------------------------------


def test_an_activated_adapter_shares_the_base_models_prefix_up_to_its_invocation(tmp_path: Path) -> None:
    path = write(tmp_path / "alora", "content", alora_invocation_tokens=[70, 71])
    prompt = [*range(5, 17), 70, 71, 20, 21, 22, 23, 24, 25, 26]
    core = Core()
    base = ask(core, prompt=prompt)
    client = core.open()
    client.add(0, prompt, adapters=uses("x", path=path))
    core.finish_all(client, count=1)
    client.add(1, prompt, adapters=uses("x"))
    core.finish_all(client, count=2)
    assert client.cached() == {0: 12, 1: 20}  # the base's three blocks; then its own, too
    assert client.tokens()[0] == client.tokens()[1] != base
    assert ask(core, *uses("x")) == ask(core)  # without the invocation it does not apply
    twice = [70, 71, *prompt]
    assert core.loop.scheduler.hasher is not None
    client.add(2, twice, adapters=uses("x"))
    core.finish_all(client, count=3)
    assert client.cached()[2] == 0
    assert ask(core, prompt=twice) != client.tokens()[2]


def test_names_of_prefixes_differ_from_where_an_adapter_applies() -> None:
    tokens = bytes(4 * 256)
    base = prefix_names(tokens, PrefixKey(), 64)
    keys = [PrefixKey(adapters=(KeyAdapter("id", 1.0, start),)) for start in (0, 63, 64, 100)]
    common = [sum(a == b for a, b in zip(base, prefix_names(tokens, key, 64), strict=True)) for key in keys]
    assert common == [0, 0, 1, 1]
    assert len({prefix_names(tokens, key, 64)[-1] for key in keys}) == len(keys)


# --- max_loras --------------------------------------------------------------------------------------------------------


def test_a_step_has_at_most_max_loras_adapters_and_those_that_fit_pass_the_others(folders: list[str]) -> None:
    core = Core(max_loras=2)  # which the plan check verifies in each step
    client = core.open()
    for name, path in zip("abc", folders, strict=False):
        load(core, client, name, path)
    names = "aabbcca"
    for slot, name in enumerate(names):
        client.add(slot, PROMPT, adapters=uses(name), max_tokens=12)
    client.add(len(names), PROMPT, max_tokens=12)
    core.run_until(lambda: core.loop.scheduler.num_running == 6)
    assert stats(core).running == ("a", "b")
    assert stats(core).waiting == ("c",)
    core.finish_all(client, count=len(names) + 1)
    assert {finish.reason for finish in client.finishes()} == {FinishReason.LENGTH}
    assert {finish.slot for finish in client.finishes()[-2:]} == {4, 5}


def test_a_request_is_passed_in_a_bounded_number_of_steps(folders: list[str]) -> None:
    core = Core(max_loras=1)
    client = core.open()
    load(core, client, "a", folders[0])
    load(core, client, "b", folders[1])
    client.add(0, PROMPT, adapters=uses("a"), max_tokens=30)
    core.run_until(lambda: client.tokens().get(0))
    client.add(1, PROMPT, adapters=uses("b"), max_tokens=1)
    slot = 2
    while 1 not in client.cached():
        client.add(slot, PROMPT, adapters=uses("a"), max_tokens=8)  # one more at each step, and a row for it
        slot += 1
        core.loop.turn()
        assert slot < 2 * MOST_STEPS_PASSED + 100
    passed = sum(bool(message.admitted) for message in client.outputs()) - 2  # one is the first's step, one its own
    assert 0 < passed <= MOST_STEPS_PASSED
    client.send(Abort(slots=tuple(range(slot))))
    core.run_until_idle()


def test_thousands_that_do_not_fit_are_not_looked_through_in_each_step(folders: list[str]) -> None:
    core = Core(max_loras=1)
    client = core.open()
    load(core, client, "a", folders[0])
    load(core, client, "b", folders[1])
    client.add(0, PROMPT, adapters=uses("a"), max_tokens=50)
    core.run_until(lambda: client.tokens().get(0))
    for slot in range(1, 301):
        client.add(slot, PROMPT, adapters=uses("b"), max_tokens=1)
    core.run_until(lambda: len(core.loop.scheduler.waiting) == 300)
    core.run_until(lambda: len(core.loop.scheduler.waiting.aside) == LOOKED_PAST)
    client.send(Abort(slots=tuple(range(100, 301))))
    core.finish_all(client, count=301)
    assert sum(finish.reason is FinishReason.LENGTH for finish in client.finishes()) == 100


def test_a_request_that_can_never_fit_leaves_its_adapters_to_the_next(folders: list[str]) -> None:
    """Both are looked at at once, as they come while another request runs."""
    core = Core(max_loras=2, max_cpu_loras=3)
    client, admin = core.open(), core.open()
    for name, path in zip("ab", folders, strict=False):
        load(core, admin, name, path, pinned=True)
    load(core, admin, "c", folders[2])
    client.add(0, PROMPT, max_tokens=40)
    core.run_until(lambda: client.tokens().get(0))
    client.add(1, PROMPT, adapters=(*uses("c"), *uses("d", path=folders[3])))
    client.add(2, PROMPT, adapters=uses("e", path=folders[4]))
    core.finish_all(client, count=3)
    finishes = {finish.slot: finish for finish in client.finishes()}
    assert "do not fit into memory" in why(finishes[1])
    assert finishes[2].reason is FinishReason.LENGTH


# --- all together -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [2, 19])
def test_whatever_comes_each_request_is_answered_by_the_content_that_it_is_told_of(seed: int, tmp_path: Path) -> None:
    """Requests, aborts, loads, reloads in place of other content, unloads and pins, in few slots."""
    numbers = random.Random(seed)
    contents = [f"content {number}" for number in range(5)]
    of_identity = dict[str, str]()
    for number, content in enumerate(contents):
        (info,) = _listed_after(path := write(tmp_path / f"fixed{number}", content))
        of_identity[info.identity] = path
    core = Core(Ahead, max_loras=2, max_cpu_loras=3, num_blocks=40, async_scheduling=True)
    client, admin = core.open(), core.open()
    asked = dict[int, tuple[AdapterUse, ...]]()

    def act(number: int) -> None:
        name = numbers.choice("abcd")
        path = str(tmp_path / name)
        what = numbers.random()
        if what < 0.6:
            names = numbers.sample("abcd", numbers.choice((0, 1, 1, 1, 2)))
            given = numbers.random() < 0.7
            adapters = tuple(
                AdapterUse(name=each, path=str(tmp_path / each) if given else "", scale=numbers.choice((0.0, 1.0, 2.0)))
                for each in names
            )
            asked[number] = adapters
            client.add(number, PROMPT, adapters=adapters, max_tokens=numbers.randrange(1, 30))
        elif what < 0.7 and asked:
            client.send(Abort(slots=(numbers.choice(list(asked)),)))
        elif what < 0.85:
            write(tmp_path / name, numbers.choice(contents))
            admin.send(Control(call=number, command=LoadAdapter(name=name, path=path, in_place=True)))
        elif what < 0.95:
            admin.send(Control(call=number, command=UnloadAdapter(name=name)))
        else:
            admin.send(Control(call=number, command=PinAdapter(name=name)))

    for name in "abcd":
        write(tmp_path / name, numbers.choice(contents))
    for number in range(150):
        act(number)
        for _ in range(numbers.randrange(3)):
            if core.loop.has_work or not core.inbox.empty():
                core.loop.turn()
    core.finish_all(client, count=len(asked))
    core.run_until(lambda: not core.loop.adapters._waits)  # of commands
    reasons = {finish.slot: finish.reason for finish in client.finishes()}
    identities = {each.slot: each.adapters for message in client.outputs() for each in message.admitted}
    expected = dict[tuple[AdapterUse, ...], list[int]]()
    for slot, tokens in client.tokens().items():
        fixed = tuple(
            AdapterUse(name=of_identity[identity], path=of_identity[identity], scale=use.scale)
            for use, identity in zip(asked[slot], identities[slot] or ("",) * len(asked[slot]), strict=True)
            if use.scale and identity
        )
        if len(set(fixed)) == len({each.name for each in fixed}) == len([use for use in asked[slot] if use.scale]):
            if fixed not in expected:
                expected[fixed] = ask(Core(), *fixed, max_tokens=30)
            assert tokens == expected[fixed][: len(tokens)], (slot, asked[slot])
    failures = [why(finish) for finish in client.finishes() if finish.reason is FinishReason.FAILED]
    assert all("do not fit into memory" in each for each in failures), failures  # two are pinned, of three slots
    assert sum(reason is FinishReason.LENGTH for reason in reasons.values()) > 20
    assert len(replies(admin)) >= 20
    assert not core.loop.adapters._held


def _listed_after(path: str) -> tuple[AdapterInfo, ...]:
    core = Core()
    ask(core, AdapterUse(name="x", path=path))
    return _listed(core, core.open())


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_bad_requests_and_commands_are_refused_in_words(folders: list[str]) -> None:
    core = Core(max_loras=2)
    client = core.open()
    for name, path in zip("abc", folders, strict=False):
        load(core, client, name, path)
    twice = failed(core, *uses("a"), AdapterUse(name="a", path=folders[0]))
    assert "an adapter is given twice among a, a" in why(twice)
    assert "3 adapters are given, and this engine computes at most 2" in why(failed(core, *uses("a", "b", "c")))
    assert "scale is nan" in why(failed(core, *uses("a", scale=float("nan"))))
    for command, words in (
        (LoadAdapter(name="null", path=folders[0]), "null is a name of the model itself"),
        (LoadAdapter(name="", path=folders[0]), "has a name and a path"),
        (LoadAdapter(name="x", path="p" * 5000), "path has a length of 5000"),
        (UnloadAdapter(name="zz"), "there is no adapter zz; known: a, b, c"),
        (PinAdapter(name="zz"), "there is no adapter zz"),
        (ScaleAdapters(scales={"a": 1.0, "zz": 1.0}), "there is no adapter zz"),
    ):
        reply = order(core, client, command)
        assert reply.failure is not None
        assert words in reply.failure.message


def test_an_engine_without_adapters_refuses_them(folders: list[str]) -> None:
    core = SteppedCore()
    client = core.open()
    client.add(0, PROMPT, adapters=uses("a", path=folders[0]))
    client.send(Control(call=1, command=LoadAdapter(name="a", path=folders[0])))
    client.send(GetStats(call=2))
    core.run_until_idle()
    (finish,) = client.finishes()
    assert "start it with enable_lora" in why(finish)
    told, counted = replies(client)
    assert told.failure is not None
    assert "start it with enable_lora" in told.failure.message
    assert isinstance(counted.result, EngineStats)
    assert counted.result.adapters is None
    with pytest.raises(ModelError, match="has no adapters"):
        super(NullExecutor, core.executor).load_adapter(0, folders[0])


def test_options_of_adapters_are_checked_together() -> None:
    plan, _ = make_plan(enable_lora=True, max_loras=100)
    assert plan.adapters is not None
    assert (plan.adapters.slots, plan.adapters.dtype) == (100, "float32")
    few, _ = make_plan(enable_lora=True, max_cpu_loras=2)  # as vLLM's command lines have it
    assert few.adapters is not None
    assert (few.adapters.slots, few.adapters.max_loras) == (2, 2)
    none, _ = make_plan(max_loras=1, max_lora_rank=16, max_cpu_loras=None)  # lm-eval passes vLLM's defaults on
    assert none.adapters is None
    for options, words in (
        ({"max_lora_rank": 32}, "max_lora_rank=32 needs enable_lora"),
        ({"max_loras": 4}, "max_loras=4 needs enable_lora"),
        (
            {"enable_lora": True, "max_cpu_loras": 2, "max_loras": 8},
            "max_cpu_loras=2 adapters in memory are fewer than the max_loras=8",
        ),
        ({"enable_lora": True, "distributed_executor_backend": "external_launcher"}, "cannot apply with"),
        ({"enable_lora": True, "enable_expert_parallel": True, "data_parallel_size": 2}, "engines share experts"),
    ):
        with pytest.raises(OptionError, match=words):
            make_plan(**options)
    assert Options().enable_lora is False
    assert VOCAB_SIZE > 80  # the tests' invocation tokens are in the vocabulary
