"""The LoRA adapters of a fleet's engines, by name.

Each engine has a registry and reports it to all its clients on each change, so every frontend of an engine sees every
load. A command goes to all engines that serve the adapter's base; an engine that joins later is given what it lacks.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.frontend.request.lora_request import LoRARequest, lora_requests_for
from headrace.ipc.adapters import AdapterInfo, AdapterUse, KeyAdapter, activation_start, most_of_request
from headrace.ipc.control import AdapterCommand, ListAdapters, LoadAdapter, PinAdapter, ScaleAdapters, UnloadAdapter
from headrace.ipc.failure import HeadraceError, InvalidRequestError, MissingAdapterError, UnknownAdapterError

if TYPE_CHECKING:
    from headrace.frontend.client.client import CoreClient
    from headrace.frontend.fleet.engine import Engine
    from headrace.frontend.fleet.engines import Engines
    from headrace.frontend.request.prompts import Prompt

logger = logging.getLogger(__name__)


class FleetAdapters:
    """What is registered, as far as this frontend has heard, and the numbers that scripts give to adapters."""

    def __init__(self, fleet: Engines) -> None:
        self._fleet = fleet
        self.known: dict[str, AdapterInfo] = {}
        """By name."""
        self._by_path: dict[tuple[str, str], AdapterInfo] = {}  # by name and path: a name may have several
        self._told: dict[str, Mapping[str, AdapterInfo]] = {}  # by engine's name, what it has reported last
        self._names: dict[int, str] = {}  # by lora_int_id
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._copying: set[asyncio.Task[None]] = set()

    def __contains__(self, name: object) -> bool:
        return name in self.known

    def __iter__(self) -> Iterator[str]:
        return iter([info.name for info in self.infos])

    def get(self, name: str) -> AdapterInfo | None:
        return self.known.get(name)

    def base_of(self, name: str) -> str:
        """The served model that a known adapter is for: the first one unless it says another."""
        named = self.known[name].base_model_name
        return named if named in self._fleet.names else self._fleet.names[0]

    @property
    def infos(self) -> list[AdapterInfo]:
        """All of them, in the order in which the first engine has them: the same in every frontend of the fleet."""
        first = next((each for each in self._fleet.engines if each.usable), None)
        ordered = dict.fromkeys([*(self._told.get(first.name, ()) if first is not None else ()), *self.known])
        return [self.known[name] for name in ordered if name in self.known]

    def default_scales(self, base_names: Sequence[str]) -> dict[str, float]:
        """Adapters of a model of these names that apply to requests that name no scales, as llama.cpp's servers have
        them."""
        own = {name: info.default_scale for name, info in self.known.items() if info.default_scale}
        return {name: scale for name, scale in own.items() if self.base_of(name) in base_names}

    def enabled(self) -> bool:
        """Whether some engine takes adapters."""
        return any(each.client.welcome.max_loras for each in self._fleet.engines if each.usable and each.client)

    # --- requests -----------------------------------------------------------------------------------------------------

    def use(self, name: str, scale: float = 1.0) -> AdapterUse:
        """For an adapter that is known. Its path goes only to engines that do not have it yet (request_table.py)."""
        info = self.known[name]
        return AdapterUse(name=name, scale=scale, path=info.path, is_3d=info.is_3d)

    async def give(self, prompts: Sequence[Prompt], lora_request: Any) -> None:
        """Gives prompts the adapters of a script's argument `lora_request`, and loads again those that it wants in
        place. Raises HeadraceError."""
        for prompt, lora in zip(prompts, lora_requests_for(lora_request, len(prompts)), strict=True):
            if lora is None:
                continue
            self.note(lora)
            if lora.load_inplace:
                await self.add(lora)
            prompt.lora_request, prompt.adapters = lora, (lora.use,)

    def key_of(self, prompt: Prompt) -> tuple[KeyAdapter, ...]:
        """What a prompt's adapters add to the names of its prefixes, as the engines compute them."""
        parts = []
        for use in prompt.adapters:
            info = self._by_path.get((use.name, use.path))
            if not use.scale or info is None:
                continue
            start: int | None = 0
            if info.invocation_tokens:
                start = activation_start(prompt.token_ids or (), info.invocation_tokens)
            if start is not None:
                parts.append(KeyAdapter(info.identity, use.scale, start))
        return tuple(sorted(parts))

    # --- what engines report ------------------------------------------------------------------------------------------

    def heard(self, engine: Engine, infos: Sequence[AdapterInfo]) -> None:
        """An engine has reported its registry. Of several paths of a name, the first is meant by the name alone."""
        self._by_path.update({(info.name, info.path): info for info in infos})
        before, now = self._told.get(engine.name, {}), dict[str, AdapterInfo]()
        for info in infos:
            now.setdefault(info.name, info)
        self._told[engine.name] = now
        for name in before.keys() - now.keys():
            self.known.pop(name, None)
            self._by_path.pop((name, before[name].path), None)
        self.known.update({name: info for name, info in now.items() if before.get(name) != info})

    def joined(self, engine: Engine) -> None:
        """An engine is connected. It is given, beside its requests, what the others have and it lacks."""
        assert engine.client is not None, "it is connected"
        self._told.pop(engine.name, None)
        self.heard(engine, engine.client.welcome.adapters)
        lacks = [info for info in self.known.values() if info.name not in self._told[engine.name]]
        if lacks and engine.client.welcome.max_loras:
            task = asyncio.create_task(_copy(engine.client, engine.name, lacks))
            self._copying.add(task)
            task.add_done_callback(self._copying.discard)

    async def refresh(self) -> None:
        """Asks the engines for their registries: a load that another frontend was answered for is in them."""
        for engine in self._fleet.engines:
            if engine.client is not None and engine.usable and engine.client.welcome.max_loras:
                self.heard(engine, (await engine.client.control(ListAdapters())).adapters)

    # --- commands -----------------------------------------------------------------------------------------------------

    async def add(self, request: LoRARequest) -> bool:
        """Loads a script's adapter. Returns whether it was not registered before. Raises HeadraceError."""
        self.note(request)
        if not request.lora_path:
            raise InvalidRequestError("LoRARequest.lora_path = '': to add an adapter, say where it is")
        command = LoadAdapter(
            name=request.lora_name,
            path=request.use.path,
            in_place=request.load_inplace,
            is_3d=request.is_3d_lora_weight,
            base_model_name=request.base_model_name or "",
        )
        async with self.lock(request.lora_name):
            is_new = request.lora_name not in self
            await self.load(command)
        request.load_inplace = False
        return is_new

    def note(self, request: LoRARequest) -> None:
        """Remembers the number of a script's adapter."""
        self._names[request.lora_int_id] = request.lora_name

    async def load(self, command: LoadAdapter) -> None:
        """Loads it on every engine of its base, or, if one of them fails, leaves it loaded on none where it is new.
        Call with its lock. Raises the first engine's HeadraceError."""
        is_new = command.name not in self
        clients = self._clients(command.base_model_name)
        try:
            infos = await self._call(command, clients)
        except HeadraceError:
            if is_new:
                undone = (client.control(UnloadAdapter(name=command.name)) for client in clients)
                await asyncio.gather(*undone, return_exceptions=True)
            raise
        self.known[command.name] = infos[0]

    async def unload(self, name: str) -> None:
        """Raises HeadraceError (`is_unknown`) if no engine has it."""
        async with self.lock(name):
            clients = [each.client for each in self._fleet.engines if each.usable and each.client is not None]
            unloaded = (client.control(UnloadAdapter(name=name)) for client in clients)
            answers = await asyncio.gather(*unloaded, return_exceptions=True)
            errors = [each for each in answers if isinstance(each, BaseException)]
            for error in errors:
                if not is_unknown(error) or len(errors) == len(clients):
                    raise error
            self.known.pop(name, None)

    async def pin(self, name: str) -> None:
        await self._call(PinAdapter(name=name), self._clients(""))

    async def scale(self, scales: Mapping[str, float]) -> None:
        """Sets `default_scales`, on all engines. Raises InvalidRequestError, and sets none, for more adapters than a
        request may have on one of them."""
        orders: list[tuple[Engine, CoreClient, ScaleAdapters]] = []
        for engine in self._fleet.engines:
            if engine.client is not None and engine.usable and (told := self._told.get(engine.name)):
                own = {name: scale for name, scale in scales.items() if name in told}
                _check_count(own, engine.client.welcome.max_loras)
                orders.append((engine, engine.client, ScaleAdapters(scales=own)))
        for engine, client, command in orders:
            self.heard(engine, (await client.control(command, None)).adapters)

    async def find(self, lora_int_id: int) -> str | None:
        """The name behind a number, if such an adapter is registered. A name may have been given several."""
        await self.numbers()
        name = self._names.get(lora_int_id, "")
        return name if name in self.known else None

    async def numbers(self) -> set[int]:
        """The numbers of all registered adapters. One that no LoRARequest of this process named gets a free one."""
        await self.refresh()
        numbered = {name: number for number, name in self._names.items()}
        for info in self.known.values():
            if info.name not in numbered:
                number = max(self._names, default=0) + 1
                self._names[number], numbered[info.name] = info.name, number
        return {numbered[name] for name in self.known}

    def lock(self, name: str) -> asyncio.Lock:
        """Held while an adapter of this name is looked for, loaded or unloaded by this process."""
        if (lock := self._locks.get(name)) is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    async def _call(self, command: AdapterCommand, clients: Sequence[CoreClient]) -> list[Any]:
        answers = await asyncio.gather(*(client.control(command, None) for client in clients), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def _clients(self, base: str) -> list[CoreClient]:
        """Of the engines that serve a model of this name or, if none does, of those that serve the first model."""
        usable = [each for each in self._fleet.engines if each.usable and each.client is not None]
        serving = [each for each in usable if base in each.names]
        if not serving and usable:
            serving = [each for each in usable if usable[0].names[0] in each.names]
        if not serving:
            self._fleet.check_alive()
        return [each.client for each in serving if each.client is not None]


def _check_count(scales: Mapping[str, float], max_loras: int) -> None:
    names, most = [name for name, scale in scales.items() if scale], most_of_request(max_loras)
    if len(names) > most:
        shown = ", ".join(names)
        raise InvalidRequestError(
            f"{len(names)} adapters ({shown:.200}) would apply to every request without the field lora, and at most "
            f"{most} of a request are computed: max_loras is {max_loras} (the engine's option); give the others a "
            "scale of 0"
        )


async def _copy(client: CoreClient, engine: str, infos: Sequence[AdapterInfo]) -> None:
    for info in infos:
        command = LoadAdapter(
            name=info.name,
            path=info.path,
            pinned=info.pinned,
            is_3d=info.is_3d,
            base_model_name=info.base_model_name,
            default_scale=info.default_scale,
        )
        try:
            await client.control(command, None)
        except HeadraceError as error:
            if client.failure is not None:
                return
            logger.warning("%s lacks the adapter %s, which other engines have: %s", engine, info.name, error)


def is_unknown(error: BaseException) -> bool:
    """Whether no adapter is registered under the name."""
    return _is_of(error, UnknownAdapterError)


def is_missing(error: BaseException) -> bool:
    """Whether an engine found no adapter at the path."""
    return _is_of(error, MissingAdapterError)


def _is_of(error: BaseException, kind: type[HeadraceError]) -> bool:
    failure = error.failure if isinstance(error, HeadraceError) else None
    return failure is not None and failure.type == kind.__name__
