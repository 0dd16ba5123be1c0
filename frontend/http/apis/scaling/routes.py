"""vLLM's routes that change the number of engines while the server runs."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Annotated

import msgspec
from msgspec import Meta

from headrace.frontend.http.server.access import Access
from headrace.frontend.http.server.errors import ApiError, bad_field, unavailable
from headrace.frontend.http.server.exchange import Exchange
from headrace.frontend.http.server.route_spec import post
from headrace.frontend.http.server.state import ServerState
from headrace.ipc.failure import HeadraceError, OptionError

_LOOK_S = 0.2


class ScaleRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /scale_elastic_ep"""

    new_data_parallel_size: Annotated[
        int, Meta(ge=1, le=1024, description="Number of data parallel engines to scale to")
    ]
    drain_timeout: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="Seconds that removed engines have to finish their requests; the rest continue on other "
            "engines",
        ),
    ] = 120.0


class ScaleResponse(msgspec.Struct):
    message: str


class ScalingResponse(msgspec.Struct):
    is_scaling_elastic_ep: bool


async def scale(state: ServerState, exchange: Exchange) -> None:
    """Answers 200 once there are that many engines. Requests are served meanwhile."""
    request = await exchange.prepare(lambda body: state.decoder.decode(body, ScaleRequest))
    if state.scaler is None:
        raise ApiError(HTTPStatus.BAD_REQUEST, state.why_fixed, code="not_scalable")
    state.num_scaling += 1
    scaling = asyncio.ensure_future(state.scaler.scale(request.new_data_parallel_size, request.drain_timeout))
    try:
        while not (await asyncio.wait((scaling,), timeout=_LOOK_S))[0]:
            if state.draining:
                raise unavailable("the server is shutting down, and its engines with it", code="shutting_down")
        scaling.result()
    except OptionError as error:
        raise bad_field("new_data_parallel_size", str(error)) from None
    except HeadraceError as error:
        raise unavailable(str(error).partition("\n")[0], code="scaling_failed") from None
    finally:
        scaling.cancel()
        state.num_scaling -= 1
    await exchange.answer(ScaleResponse(f"Scaled to {request.new_data_parallel_size} data parallel engines"))


async def is_scaling(state: ServerState, exchange: Exchange) -> None:
    """Whether this HTTP process is changing the number of engines now."""
    await exchange.answer(ScalingResponse(state.num_scaling > 0))


ROUTES = (
    post(
        "/scale_elastic_ep",
        scale,
        "Change the number of data parallel engines",
        ScaleRequest,
        ScaleResponse,
        (400, 413, 415, 503),
        access=Access.ADMIN,
    ),
    post(
        "/is_scaling_elastic_ep",
        is_scaling,
        "Whether the number of engines is being changed",
        None,
        ScalingResponse,
        access=Access.CLIENT,
    ),
)
