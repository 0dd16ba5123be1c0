"""LoRA adapters at run time: vLLM's, SageMaker's and llama.cpp's routes.

A load or unload goes to all engines at once, and is answered when all have carried it out, so that every HTTP process
of these engines serves the adapter then. What changes the server for all clients needs --allow-runtime-lora-updating.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from headrace.frontend.fleet.adapters import is_missing, is_unknown
from headrace.frontend.http.apis.development.routes import is_development
from headrace.frontend.http.server.access import Access
from headrace.frontend.http.server.adapters import AdapterScale, scales_of
from headrace.frontend.http.server.api import Api
from headrace.frontend.http.server.engines import why_unavailable
from headrace.frontend.http.server.errors import ApiError, bad_field, without_own_names
from headrace.frontend.http.server.exchange import Exchange
from headrace.frontend.http.server.route_spec import UNAVAILABLE, get, post, route
from headrace.frontend.http.server.state import ServerState
from headrace.ipc.adapters import MOST_NAME
from headrace.ipc.control import LoadAdapter
from headrace.ipc.failure import EngineDeadError, HeadraceError
from headrace.ipc.struct_types import threadsafe

_CHANGES = (400, 403, 404, 413, 415, 500, 503)
_WHERE = "Folder as peft writes it or GGUF file, on the engines' hosts, or OWNER/REPOSITORY on the hub"


class LoadLoRAAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/load_lora_adapter"""

    lora_name: Annotated[str, Meta(description="By which requests ask for it, as their model")] = ""
    lora_path: Annotated[str, Meta(description=_WHERE)] = ""
    load_inplace: Annotated[
        bool, Meta(description="Replace a loaded adapter of this name; running requests keep the former one")
    ] = False
    is_3d_lora_weight: Annotated[bool, Meta(description="The matrices of experts are stacked")] = False


class UnloadLoRAAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/unload_lora_adapter"""

    lora_name: str = ""
    lora_int_id: Annotated[int | None, Meta(description="Accepted without effect: the name says which")] = None


class SageMakerAdapter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /adapters, SageMaker's form of loading one"""

    name: str = ""
    src: Annotated[str, Meta(description=_WHERE)] = ""
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    pin: Annotated[bool, Meta(description="Keep it in memory until it is unloaded")] = False
    preload: Annotated[bool, Meta(description="Accepted without effect: it is loaded now")] = True


class ListedAdapter(msgspec.Struct):
    """An entry of GET /lora-adapters, in llama.cpp's form."""

    id: int
    path: str
    scale: float
    """Its scale in requests without the field `lora`."""
    task_name: Annotated[str, Meta(description="As its GGUF file says; so is prompt_prefix")] = ""
    prompt_prefix: str = ""
    alora_invocation_tokens: Annotated[
        tuple[int, ...] | UnsetType, Meta(description="From which on an activated adapter applies")
    ] = UNSET


# --- vLLM's and SageMaker's -------------------------------------------------------------------------------------------


async def load(state: ServerState, exchange: Exchange) -> None:
    _check_allowed(state, exchange)
    asked = await exchange.prepare(lambda body: state.decoder.decode(body, LoadLoRAAdapterRequest))
    await _load(
        state,
        exchange,
        LoadAdapter(
            name=asked.lora_name, path=asked.lora_path, in_place=asked.load_inplace, is_3d=asked.is_3d_lora_weight
        ),
    )


async def load_for_sagemaker(state: ServerState, exchange: Exchange) -> None:
    _check_allowed(state, exchange)
    asked = await exchange.prepare(lambda body: state.decoder.decode(body, SageMakerAdapter))
    await _load(
        state,
        exchange,
        LoadAdapter(
            name=asked.name,
            path=asked.src,
            in_place=asked.load_inplace,
            is_3d=asked.is_3d_lora_weight,
            pinned=asked.pin,
        ),
    )


async def unload(state: ServerState, exchange: Exchange) -> None:
    _check_allowed(state, exchange)
    asked = await exchange.prepare(lambda body: state.decoder.decode(body, UnloadLoRAAdapterRequest))
    await _unload(state, exchange, asked.lora_name)


async def unload_for_sagemaker(state: ServerState, exchange: Exchange) -> None:
    _check_allowed(state, exchange)
    await _unload(state, exchange, exchange.scope["path_params"]["adapter_name"])


async def _load(state: ServerState, exchange: Exchange, command: LoadAdapter) -> None:
    adapters, name = state.pool.adapters, command.name
    if not name or not command.path:
        raise _invalid("Both 'lora_name' and 'lora_path' must be provided.")
    _check_length("lora_name", name)
    _check_length("lora_path", command.path)
    if "\0" in command.path:
        raise _invalid("'lora_path' has a NUL character, which no path may have.")
    if name in state.pool.names:
        raise _invalid(f"The lora adapter '{name:.200}' has the name of the model itself: choose another.")
    _check_enabled(state)
    async with adapters.lock(name):
        if not command.in_place:
            if name not in adapters:
                await adapters.refresh()
            if name in adapters:
                raise _invalid(
                    f"The lora adapter '{name:.200}' has already been loaded. If you want to load the adapter in place,"
                    " set 'load_inplace' to True."
                )
        try:
            await adapters.load(command)
        except EngineDeadError:
            raise
        except HeadraceError as error:
            raise _not_loaded(command, error) from error
    await exchange.answer_text(f"Success: LoRA adapter '{name}' added successfully.".encode(), _TEXT)


async def _unload(state: ServerState, exchange: Exchange, name: str) -> None:
    if not name:
        raise _invalid("'lora_name' needs to be provided to unload a LoRA adapter.")
    _check_length("lora_name", name)
    _check_enabled(state)
    try:
        await state.pool.adapters.unload(name)
    except HeadraceError as error:
        if not is_unknown(error):
            raise
        message = f"The lora adapter '{name:.200}' cannot be found."
        raise ApiError(HTTPStatus.NOT_FOUND, message, type="NotFoundError", param="lora_name") from None
    await exchange.answer_text(f"Success: LoRA adapter '{name}' removed successfully.".encode(), _TEXT)


def _check_length(field: str, text: str) -> None:
    if len(text) > MOST_NAME:
        raise _invalid(f"'{field}' has {len(text)} characters, and at most {MOST_NAME} are taken.")


def _check_known(state: ServerState) -> None:
    """Raises ApiError while no engine can say which adapters there are."""
    if not any(engine.usable for engine in state.pool.engines):
        raise why_unavailable(state.pool)


def _check_enabled(state: ServerState) -> None:
    _check_known(state)
    if not state.pool.adapters.enabled():
        raise _invalid("LoRA is not enabled: start the server with --enable-lora.")


_TEXT = "text/plain; charset=utf-8"
_NEEDS = "--allow-runtime-lora-updating, or --server-dev-mode"


def _check_allowed(state: ServerState, exchange: Exchange) -> None:
    if not (state.options.allow_runtime_lora_updating or is_development(state.options)):
        path = exchange.scope["path"].removeprefix(state.options.root_path)
        raise ApiError(HTTPStatus.NOT_FOUND, f"there is no {path:.200} here: it needs {_NEEDS}", code="not_found")


def _invalid(message: str) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, type="InvalidUserInput")


def _not_loaded(command: LoadAdapter, error: HeadraceError) -> ApiError:
    cause = error.failure.message if error.failure is not None else str(error).partition("\n")[0]
    if is_missing(error):
        message = f"Loading lora {command.name} failed: No adapter found for {command.path}"
        return ApiError(HTTPStatus.NOT_FOUND, message, type="NotFoundError", param="lora_path")
    message = f"Loading lora {command.name} failed: {without_own_names(cause)}"
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, type="InternalServerError")


# --- llama.cpp's ------------------------------------------------------------------------------------------------------


async def list_adapters(state: ServerState, exchange: Exchange) -> None:
    _check_known(state)
    await exchange.answer(msgspec.json.encode(_listed(state)))


async def set_scales(state: ServerState, exchange: Exchange) -> None:
    """Sets with which scales adapters apply to requests without the field `lora`; those not named do not apply."""
    _check_allowed(state, exchange)
    _check_known(state)
    asked = await exchange.prepare(_scales_in)
    adapters = state.pool.adapters
    await adapters.scale(scales_of(adapters, asked, "body"))
    await exchange.answer(msgspec.json.encode(_listed(state)))


def _scales_in(body: bytes) -> list[AdapterScale]:
    try:
        return msgspec.json.decode(body, type=threadsafe(list[AdapterScale]))
    except msgspec.MsgspecError as error:
        raise bad_field("body", f"the body must be a list of {{id, scale}}: {error}") from None


def _listed(state: ServerState) -> Sequence[ListedAdapter]:
    adapters = state.pool.adapters
    return [
        ListedAdapter(
            index,
            info.path,
            info.default_scale,
            info.task_name,
            info.prompt_prefix,
            info.invocation_tokens or UNSET,
        )
        for index, info in enumerate(adapters.infos)
    ]


_post = functools.partial(post, access=Access.ADMIN)
ROUTES = (
    _post(
        "/v1/load_lora_adapter",
        load,
        "Load a LoRA adapter; needs --allow-runtime-lora-updating",
        LoadLoRAAdapterRequest,
        None,
        _CHANGES,
    ),
    _post(
        "/v1/unload_lora_adapter",
        unload,
        "Unload a LoRA adapter; requests that run with it finish",
        UnloadLoRAAdapterRequest,
        None,
        _CHANGES,
    ),
    _post("/adapters", load_for_sagemaker, "SageMaker: load a LoRA adapter", SageMakerAdapter, None, _CHANGES),
    route(
        "DELETE",
        "/adapters/{adapter_name:path}",
        unload_for_sagemaker,
        "SageMaker: unload a LoRA adapter",
        refusals=(403, 404, 503),
        access=Access.ADMIN,
    ),
    get(
        "/lora-adapters",
        list_adapters,
        "llama.cpp: list the LoRA adapters with their ids",
        list[ListedAdapter],
        refusals=UNAVAILABLE,
        access=Access.CLIENT,
    ),
    _post(
        "/lora-adapters",
        set_scales,
        "llama.cpp: set which LoRA adapters apply to requests without the field lora",
        list[AdapterScale],
        list[ListedAdapter],
        _CHANGES,
    ),
)
API = Api(routes=ROUTES)
