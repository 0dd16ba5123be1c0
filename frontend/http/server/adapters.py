"""LoRA adapters as HTTP requests name them: by `model`, or as llama.cpp does by their numbers, and how one that nobody
has loaded is found."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from headrace.frontend.adapters.folder_resolver import FilesystemResolver
from headrace.frontend.adapters.hub_resolver import HfHubResolver
from headrace.frontend.adapters.lora_modules import parse_lora_modules
from headrace.frontend.adapters.resolver import LoRAResolver, LoRAResolverRegistry, installed_resolvers
from headrace.frontend.fleet.adapters import FleetAdapters
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.engines import adapter_named
from headrace.frontend.http.server.errors import ApiError, UnknownModelError, bad_field, unavailable, without_own_names
from headrace.frontend.request.lora_request import LoRARequest
from headrace.ipc.adapters import MOST_NAME, AdapterUse
from headrace.ipc.control import LoadAdapter
from headrace.ipc.failure import HeadraceError, OptionError, let_interrupts_pass
from headrace.ipc.ranges import FLOAT32

logger = logging.getLogger(__name__)
T = TypeVar("T")
MOST_RESOLVING_S = 600.0
"""Longest time that a resolver may look for an adapter, where `request_timeout` allows it."""


class AdapterScale(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of llama.cpp's field `lora`."""

    id: Annotated[int, Meta(description="The adapter's number in GET /lora-adapters")]
    scale: Annotated[float, Meta(description="Factor of its effect; 0 is none")]


def adapters_of(
    engine: Engine, model: str | None, scaled: Sequence[AdapterScale] | None = None
) -> tuple[AdapterUse, ...]:
    """The adapters of a request with these fields `model` and `lora`. Raises ApiError."""
    adapters = engine.adapters
    if not adapters.known and scaled is None:
        return ()
    name = adapter_named(adapters, engine.names, model)
    scales: dict[str, float] = {} if name is None else {name: 1.0}
    if scaled is None:
        scales = {**adapters.default_scales(engine.names), **scales}
    else:
        scales |= scales_of(adapters, scaled)
    return tuple(adapters.use(name, scale) for name, scale in scales.items() if scale and name in adapters)


def scales_of(adapters: FleetAdapters, scaled: Sequence[AdapterScale], param: str = "lora") -> dict[str, float]:
    """By the adapters' names. Raises ApiError for a number that none has."""
    infos = adapters.infos
    for index, each in enumerate(scaled):
        if not 0 <= each.id < len(infos):
            there = f"0 to {len(infos) - 1}" if infos else "none, as there are no adapters"
            raise bad_field(param, f"{param}[{index}].id is {each.id}; the ids are {there} (GET /lora-adapters)")
        if abs(each.scale) > FLOAT32:
            raise bad_field(param, f"{param}[{index}].scale is {each.scale:g}; at most {FLOAT32:g} is computed")
    return {infos[each.id].name: each.scale for each in scaled}


class AdapterFinder:
    """Finds a model that is not served: an adapter that the engines have got through another process, or one that a
    resolver knows."""

    def __init__(self, pool: EnginePool, options: ServeOptions) -> None:
        """Raises OptionError for resolvers that cannot be made."""
        self._pool = pool
        self._modules = parse_lora_modules(options.lora_modules)
        self._has_loaded = not self._modules
        self._timeout_s = min(options.request_timeout or MOST_RESOLVING_S, MOST_RESOLVING_S)
        self._own: dict[str, LoRAResolver] = {}
        if options.lora_resolver_cache_dir:
            self._own["lora_resolver_cache_dir"] = FilesystemResolver(options.lora_resolver_cache_dir)
        if options.lora_resolver_hf_repo_list:
            repos = [each.strip() for each in options.lora_resolver_hf_repo_list.split(",") if each.strip()]
            self._own["lora_resolver_hf_repo_list"] = HfHubResolver(repos)
        self._own |= installed_resolvers()

    @property
    def resolvers(self) -> Mapping[str, LoRAResolver]:
        return {**self._own, **LoRAResolverRegistry.resolvers}

    def check_loaded(self) -> None:
        """Raises ApiError (503) while the adapters of the option lora_modules are not all loaded."""
        if not self._has_loaded:
            raise unavailable("the adapters of lora_modules are still loading", code="loading")

    async def load_modules(self) -> None:
        """Loads the adapters of the option lora_modules. Raises OptionError with the cause if one cannot be loaded."""
        for each in self._modules:
            if each.name in self._pool.names:
                raise OptionError(f"lora_modules: {each.name!r} is the name of the model itself")
            try:
                async with self._pool.adapters.lock(each.name):
                    await self._pool.adapters.load(
                        LoadAdapter(
                            name=each.name,
                            path=each.path,
                            is_3d=each.is_3d_lora_weight,
                            base_model_name=each.base_model_name or "",
                        )
                    )
            except HeadraceError as error:
                cause = error.failure.message if error.failure is not None else str(error)
                raise OptionError(f"lora_modules: the adapter {each.name!r} at {each.path}: {cause}") from error
        self._has_loaded = True

    async def find(self, error: UnknownModelError) -> None:
        """Returns once the model that was not known is served. Raises the error itself if there is none, and ApiError
        (400) if there is one that cannot be loaded."""
        if any(each.name == error.model for each in self._modules):
            self.check_loaded()
        adapters = self._pool.adapters
        if not error.model or len(error.model) > MOST_NAME or not adapters.enabled():
            raise error
        base, _, name = error.model.rpartition(":")
        if base not in self._pool.names:
            name = error.model
        async with adapters.lock(name):
            if name not in adapters:
                await adapters.refresh()
            if name not in adapters:
                await self._resolve(name, error)

    async def twice(self, run: Callable[[], Awaitable[T]]) -> T:
        """Runs what names a model, and once more if that was not known and is found. Raises what it raises."""
        try:
            return await run()
        except UnknownModelError as error:
            await self.find(error)
        return await run()

    async def _resolve(self, name: str, unknown: UnknownModelError) -> None:
        problem, status = "", HTTPStatus.BAD_REQUEST
        for title, resolver in self.resolvers.items():
            step = f"could not be resolved: the resolver {title} failed"
            try:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        found: Any = await resolver.resolve_lora(self._pool.welcome.model, name)
                except TimeoutError as error:
                    status = HTTPStatus.GATEWAY_TIMEOUT
                    raise TimeoutError(str(error) or f"it took longer than {self._timeout_s:g} s") from error
                if found is None:
                    continue
                if not isinstance(found, LoRARequest):
                    raise TypeError(f"resolve_lora returned {found!r:.100}; expected: a LoRARequest or None")
                step = "was found but could not be loaded"
                command = LoadAdapter(
                    name=name,
                    path=found.use.path,
                    is_3d=found.is_3d_lora_weight,
                    base_model_name=found.base_model_name or "",
                )
                await self._pool.adapters.load(command)
            except BaseException as error:  # a resolver may be anybody's
                let_interrupts_pass(error)
                if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                    raise
                cause = str(error).partition("\n")[0] or type(error).__name__
                problem = f"{step}: {without_own_names(cause)}"
                logger.warning("the LoRA adapter %s of the resolver %s: %s", name, title, problem)
            else:
                logger.info("the LoRA adapter %s was found by the resolver %s", name, title)
                return
        if not problem:
            raise unknown
        is_late = status is HTTPStatus.GATEWAY_TIMEOUT
        raise ApiError(
            status,
            f"LoRA adapter '{name:.200}' {problem}",
            type="timeout_error" if is_late else "BadRequestError",
            param="model",
            code="timeout" if is_late else None,
        )


def _is_cancelled() -> bool:
    """Whether the running task is, and not merely something that it called raised CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
