"""Adapters of several engines: a load reaches all or none, and a stream that moves keeps its adapter's content."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fleet_parts import Session
from null_adapters import write

from headrace import HeadraceError, InvalidRequestError, LoRARequest, OptionError, SamplingParams
from headrace.core.engine.engine import EngineThread
from headrace.core.options.parsing import parse_options
from headrace.executor.testing.null import NullExecutor
from headrace.frontend.fleet.adapters import is_missing
from headrace.frontend.fleet.decisions import Affinity
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.adapters import AdapterFinder, adapters_of
from headrace.frontend.http.server.engines import engine_for
from headrace.frontend.request.checks import check
from headrace.frontend.request.prompts import Prompt
from headrace.ipc.adapters import AdapterFacts
from headrace.ipc.codec import Tensor
from headrace.ipc.control import ListAdapters, LoadAdapter, UnloadAdapter
from headrace.ipc.messages import AddRequest, ClientMessage
from headrace.ipc.prefix_names import PrefixKey, prefix_names

PROMPT = list(range(20, 150))
LONG = SamplingParams(max_tokens=60, ignore_eos=True, seed=5, detokenize=False)


def null_engine(executor: str = "headrace.executor.testing.null:NullExecutor", **options: Any) -> EngineThread:
    return EngineThread(
        parse_options(model="null", distributed_executor_backend=executor, skip_tokenizer_init=True, **options)
    )


@pytest.fixture
def threads() -> Iterator[tuple[EngineThread, EngineThread]]:
    both = null_engine(enable_lora=True, max_loras=4), null_engine(enable_lora=True, max_loras=4)
    yield both
    for each in both:
        each.stop()


class Watched(Session):
    """Keeps the requests that were sent."""

    def __init__(self, thread: EngineThread, **more: Any) -> None:
        super().__init__(thread, **more)
        self.requests: list[AddRequest] = []

    def heard_of_client(self, message: ClientMessage) -> None:
        if isinstance(message, AddRequest):
            self.requests.append(message)


@contextlib.asynccontextmanager
async def pool_of(*sessions: Session) -> AsyncIterator[EnginePool]:
    pool = EnginePool(sessions)
    pool.start()
    try:
        await asyncio.wait_for(pool.started.wait(), 60)
        yield pool
    finally:
        await pool.close(0.0)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def registered(pool: EnginePool) -> list[dict[str, str]]:
    """By engine, the names and identities that it has."""
    found = []
    for engine in pool.engines:
        assert engine.client is not None
        infos = (await engine.client.control(ListAdapters())).adapters
        found.append({info.name: info.identity for info in infos})
    return found


async def prompt_of(pool: EnginePool, lora: LoRARequest | None) -> Prompt:
    prompt = Prompt(token_ids=PROMPT)
    await pool.adapters.give([prompt], lora)
    return prompt


def test_a_load_reaches_every_engine_and_an_unload_too(threads, tmp_path: Path) -> None:
    async def main() -> None:
        async with pool_of(*map(Session, threads)) as pool, pool_of(*map(Session, threads)) as other:
            assert await pool.add_lora(LoRARequest("sql", 1, write(tmp_path / "sql", "sql"))) is True
            first, second = await registered(pool)
            assert first == second
            assert list(first) == ["sql"]
            await until(lambda: "sql" in other.adapters)
            assert await other.remove_lora(*await other.list_loras()) is True
            assert await registered(pool) == [{}, {}]
            await until(lambda: "sql" not in pool.adapters)

    asyncio.run(main())


def test_a_load_that_one_engine_refuses_is_undone_at_the_others(threads, tmp_path: Path) -> None:
    without = null_engine()

    async def main() -> None:
        async with pool_of(Session(threads[0]), Session(without)) as pool:
            with pytest.raises(HeadraceError, match="enable_lora"):
                await pool.add_lora(LoRARequest("sql", 1, write(tmp_path / "sql", "sql")))
            assert "sql" not in pool.adapters
            client = pool.engines[0].client
            assert client is not None
            assert (await client.control(ListAdapters())).adapters == ()

    try:
        asyncio.run(main())
    finally:
        without.stop()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("a=/no/where", r"the adapter 'a' at /no/where: .*could not be loaded"),
        ("null=/a", "'null' is the name of the model itself"),
    ],
)
def test_modules_that_cannot_be_loaded_end_a_servers_start(threads, module: str, said: str) -> None:
    async def main() -> None:
        async with pool_of(Session(threads[0])) as pool:
            await AdapterFinder(pool, ServeOptions(lora_modules=(module,))).load_modules()

    with pytest.raises(OptionError, match=rf"^lora_modules: {said}"):
        asyncio.run(main())


def test_an_engine_that_joins_gets_what_the_others_have(threads, tmp_path: Path) -> None:
    async def main() -> None:
        async with pool_of(Session(threads[0])) as pool:
            await pool.adapters.load(LoadAdapter(name="sql", path=write(tmp_path / "sql", "sql"), pinned=True))
            await pool.adapters.load(LoadAdapter(name="chat", path=write(tmp_path / "chat", "chat")))
            await pool.adapters.scale({"chat": 0.5})
            assert pool.adapters.default_scales(["null"]) == {"chat": 0.5}
            engine = pool.add(Watched(threads[1]))
            await until(lambda: engine.client is not None and len(engine.client.welcome.adapters) == 2)
            first, second = await registered(pool)
            assert first == second
            assert engine.client is not None
            assert [info.pinned for info in engine.client.welcome.adapters] == [True, False]
            assert [info.default_scale for info in engine.client.welcome.adapters] == [0.0, 0.5]

    asyncio.run(main())


def test_adapters_that_apply_where_none_is_named_apply_to_their_own_model(tmp_path: Path) -> None:
    both = [null_engine(enable_lora=True, max_loras=2, served_model_name=name) for name in ("one", "two")]

    async def main() -> None:
        async with pool_of(*map(Session, both)) as pool:
            for name, base in (("sql", "one"), ("chat", "two")):
                path = write(tmp_path / name, name)
                await pool.adapters.load(LoadAdapter(name=name, path=path, base_model_name=base))
            await until(lambda: len(pool.adapters.known) == 2)
            await pool.adapters.scale({"sql": 0.5, "chat": 2.0})
            for model, scale in (("one", {"sql": 0.5}), ("two", {"chat": 2.0})):
                given = adapters_of(engine_for(pool, model), model)
                assert {use.name: use.scale for use in given} == scale

    try:
        asyncio.run(main())
    finally:
        for each in both:
            each.stop()


def test_engines_all_take_the_adapters_of_every_request_or_none_does(tmp_path: Path) -> None:
    both = [null_engine(enable_lora=True, max_loras=most) for most in (3, 1)]

    async def main() -> None:
        async with pool_of(*map(Session, both)) as pool:
            for name in ("sql", "chat"):
                await pool.adapters.load(LoadAdapter(name=name, path=write(tmp_path / name, name)))
            with pytest.raises(InvalidRequestError, match=r"2 adapters \(sql, chat\) would apply .* max_loras is 1"):
                await pool.adapters.scale({"sql": 0.5, "chat": 2.0})
            assert pool.adapters.default_scales(["null"]) == {}
            await pool.adapters.scale({"sql": 0.5, "chat": 0.0})
            assert pool.adapters.default_scales(["null"]) == {"sql": 0.5}

    try:
        asyncio.run(main())
    finally:
        for each in both:
            each.stop()


class Noting(NullExecutor):
    """Says which orders it got."""

    orders: ClassVar[list[tuple[str, bool]]] = []

    def load_adapter(self, slot: int, path: str, *, is_3d: bool = False) -> AdapterFacts:
        self.orders.append((Path(path).name, is_3d))
        return super().load_adapter(slot, path, is_3d=is_3d)


def test_a_copy_is_loaded_with_what_was_said_of_the_form(threads, tmp_path: Path) -> None:
    """Of an engine that joins, and of one that hears of the adapter by a request."""
    noting = null_engine(executor=f"{Noting.__module__}:Noting", enable_lora=True, max_loras=4)
    stacked, plain = (write(tmp_path / name, name) for name in ("stacked", "plain"))

    async def main() -> None:
        async with pool_of(Session(threads[0])) as pool:
            await pool.adapters.load(LoadAdapter(name="stacked", path=stacked, is_3d=True))
            await pool.adapters.load(LoadAdapter(name="plain", path=plain))
            assert [(use.name, use.is_3d) for use in map(pool.adapters.use, ("stacked", "plain"))] == [
                ("stacked", True),
                ("plain", False),
            ]
            engine = pool.add(Watched(noting))
            await until(lambda: engine.client is not None and "plain" in engine.client.requests.adapters)

    try:
        asyncio.run(main())
        assert Noting.orders == [("stacked", True), ("plain", False)]
    finally:
        noting.stop()


def test_a_path_that_is_nowhere_on_the_engines_host_is_told_from_a_broken_one(threads, tmp_path: Path) -> None:
    broken = write(tmp_path / "broken", "broken", r="no number")
    (tmp_path / "empty").mkdir()

    async def main() -> None:
        async with pool_of(*map(Session, threads)) as pool:
            for path, missing in ((broken, False), (str(tmp_path / "gone"), True), (str(tmp_path / "empty"), True)):
                with pytest.raises(HeadraceError) as caught:
                    await pool.adapters.load(LoadAdapter(name="a", path=path))
                assert is_missing(caught.value) is missing

    asyncio.run(main())


def test_an_engine_that_returns_with_nothing_is_given_it_again(threads, tmp_path: Path) -> None:
    async def main() -> None:
        session = Watched(threads[0], num_lives=2)
        async with pool_of(session, Session(threads[1])) as pool:
            await pool.adapters.load(LoadAdapter(name="sql", path=write(tmp_path / "sql", "sql")))
            engine, client = pool.engines[0], pool.engines[0].client
            assert client is not None
            session.kill()
            await until(lambda: engine.client is not client)
            async with pool_of(Session(threads[0])) as other:  # as if it had started anew
                other_client = other.engines[0].client
                assert other_client is not None
                await other_client.control(UnloadAdapter(name="sql"))
            await until(lambda: engine.client is not None)
            await until(lambda: engine.client is not None and "sql" in engine.client.requests.adapters)
            assert "sql" in pool.adapters

    asyncio.run(main())


def moved(
    threads: tuple[EngineThread, EngineThread],
    lora: LoRARequest,
    before_the_end: Callable[[EnginePool], Any] | None = None,
) -> tuple[list[int], list[AddRequest]]:
    """The tokens of a stream whose engine dies amid it, and what its second engine was asked for."""

    async def main() -> tuple[list[int], list[AddRequest]]:
        sessions = [Watched(each) for each in threads]
        async with pool_of(*sessions) as pool:
            await pool.add_lora(lora)
            reached = asyncio.Event()

            def look() -> None:
                if stream.num_tokens >= 10:
                    sessions[0].on_step = None
                    sessions[0].is_deaf = True  # it says no more
                    reached.set()

            prompt = await prompt_of(pool, lora)
            sessions[0].on_step = look
            stream = pool.submit(check("a", prompt, LONG, pool), affinity=Affinity(rank=0))
            await asyncio.wait_for(reached.wait(), 60)
            if before_the_end is not None:
                await before_the_end(pool)
            sessions[0].kill()
            output = await asyncio.wait_for(stream.final(), 60)
            return output.outputs[0].token_ids, sessions[1].requests

    return asyncio.run(main())


def test_a_stream_goes_on_with_the_same_adapter(threads, tmp_path: Path) -> None:
    lora = LoRARequest("sql", 1, write(tmp_path / "sql", "sql"))

    async def undisturbed(lora: LoRARequest | None) -> list[int]:
        async with pool_of(Session(threads[1])) as pool:
            stream = pool.submit(check("a", await prompt_of(pool, lora), LONG, pool))
            return (await stream.final()).outputs[0].token_ids

    token_ids, asked = moved(threads, lora)
    assert token_ids == asyncio.run(undisturbed(lora)) != asyncio.run(undisturbed(None))
    (request,) = asked
    assert request.num_resumed_tokens >= 10
    (use,) = request.adapters
    assert use.name == "sql"
    assert len(use.identity) == 64, "it must be this content"


def test_a_stream_whose_adapter_was_replaced_ends_and_names_both_contents(threads, tmp_path: Path) -> None:
    lora, identities = LoRARequest("sql", 1, write(tmp_path / "sql", "sql")), list[str]()

    async def replace(pool: EnginePool) -> None:
        client = pool.engines[1].client
        assert client is not None
        identities.append((await client.control(ListAdapters())).adapters[0].identity)
        write(tmp_path / "sql", "other")
        info = await client.control(LoadAdapter(name="sql", path=lora.lora_path, in_place=True))
        identities.append(info.identity)

    with pytest.raises(HeadraceError) as caught:
        moved(threads, lora, replace)
    assert len(set(identities)) == 2
    assert all(identity in str(caught.value) for identity in identities)


def test_routers_name_prefixes_as_engines_do(threads, tmp_path: Path) -> None:
    async def main() -> None:
        async with pool_of(*map(Session, threads)) as pool:
            lora = LoRARequest("sql", 1, write(tmp_path / "sql", "sql"))
            await pool.add_lora(lora)
            prompt = await prompt_of(pool, lora)
            await pool.submit(check("a", prompt, LONG, pool), affinity=Affinity(rank=1)).final()
            key = PrefixKey(adapters=pool.adapters.key_of(prompt), weights=pool.welcome.model_version)
            assert key.adapters
            assert all(each.identity for each in key.adapters)
            names = prefix_names(bytes(Tensor.of("int32", PROMPT).data), key, 64)
            await until(lambda: len(pool.router.prefixes.holders(names, -1)) == len(names) == 2)

    asyncio.run(main())
