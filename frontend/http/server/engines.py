"""Which engine serves a request's model, and why none does, in the words of HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.frontend.fleet.adapters import FleetAdapters
from headrace.frontend.fleet.engine import SILENT_AFTER_S, Engine
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.http.server.errors import ApiError, UnknownModelError, unavailable, without_own_names
from headrace.ipc.failure import Failure


def adapter_named(adapters: FleetAdapters, served: Sequence[str], model: str | None) -> str | None:
    """The adapter that a request's `model` names: alone or, as SGLang's clients do, as BASE:ADAPTER. None: it names
    none."""
    if model is None or model in served:
        return None
    if model in adapters:
        return model
    base, _, name = model.rpartition(":")
    return name if base in served and name in adapters else None


def engine_for(pool: EnginePool, model: str | None) -> Engine:
    """An engine that serves the model, or the base of the adapter that it names, for its tokenizer and limits, which
    all engines of the model share. The router chooses where a request runs. Raises ApiError: 404 for an unknown model,
    503 if no engine is available."""
    known = pool.names
    if not model and known:  # an empty name is none, as in vLLM
        model = known[0]
    name = None if model in known else adapter_named(pool.adapters, known, model)
    if name is None and model not in known and known:
        told = [*known, *pool.adapters]
        raise UnknownModelError(model or "", f"the model {model!r:.200} does not exist; served: {', '.join(told)}")
    engine = pool.serving((model if name is None else pool.adapters.base_of(name)) or "")
    if engine is None:
        raise why_unavailable(pool)
    return engine


def why_unavailable(pool: EnginePool) -> ApiError:
    failure = next(filter(None, map(failure_of, pool.engines)), None)
    if failure is not None and not pool.started.is_set() and not pool.dead.is_set():
        return unavailable(f"waiting for an engine: {without_own_names(failure.message)}", code="loading")
    if failure is not None:
        return unavailable(f"the engine is not running: {without_own_names(failure.message)}", code="engine_dead")
    if any(engine.is_silent for engine in pool.engines):
        return unavailable(
            f"the engine has said nothing for more than {SILENT_AFTER_S:g} s; it may be stopped", code="engine_silent"
        )
    if pool.started.is_set():
        return unavailable("the engine is shutting down and takes no new requests", code="shutting_down")
    if not pool.engines:
        return unavailable("no engine is known yet: waiting for one that a coordinator tells of", code="loading")
    return unavailable("the engine is still loading the model", code="loading")


def failure_of(engine: Engine) -> Failure | None:
    """Why the engine is down, also while the pool has not handled its end yet."""
    return engine.failure or (engine.client.failure if engine.client is not None else None)
