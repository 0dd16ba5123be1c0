"""Headrace as a Ray Serve application.

    serve run ray_serve:application model=MODEL data_parallel_size=2        # in this folder
    serve run ray_serve.yaml                                                # replicas and resources besides

    clients --> Ray Serve's proxy --> a replica --> headrace serve, its child, at a Unix socket
                                                          |  tcp://, encrypted
                                                          +--> engine-cores, placed by Ray (data_parallel_backend=ray)

Arguments are options of `headrace serve`, under their names. A replica passes requests and answers on as they are,
event by event. Ray Serve starts another one when its server ends or hangs. Several engines are placed by Ray unless
data_parallel_backend says otherwise; with `coordinator` a replica serves the engines of another deployment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import aiohttp
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from yarl import URL

if TYPE_CHECKING:
    from ray.serve import Application

MOST_REQUESTS = 4096
"""Of a replica at once. What is too much for the engines the router holds back, which knows them."""
STARTS_WITHIN_S = 1800.0
HEALTH_TIMEOUT_S = 10.0
STOP_GRACE_S = 30.0
POLL_S = 0.1
ONE_HOP = frozenset({"connection", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"})
"""Headers of one connection, which say nothing of the next."""
PROGRAM = """\
import sys
from headrace.ipc.process.child import die_with_parent
from headrace.programs import headrace
die_with_parent()
sys.exit(headrace())
"""
"""The command `headrace`, which does not outlive a replica that is killed."""


class Replica:
    """A server of its own, and what passes requests on to it."""

    async def __init__(self, arguments: dict[str, Any]) -> None:
        """Returns once the server takes requests. Raises RuntimeError when it does not start."""
        options = options_of(arguments)
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-serve-")
        path = Path(self._folder.name) / "http.sock"
        self._child = subprocess.Popen(command(options, path), env=environment(options))
        self._http = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(path), limit=0),
            timeout=aiohttp.ClientTimeout(total=None),  # the server has --request-timeout
            auto_decompress=False,
        )
        end_s = time.monotonic() + STARTS_WITHIN_S
        while not await self._answers("/health/ready"):
            status = self._child.poll()
            if status is not None or time.monotonic() > end_s:
                await self.close()
                how = f"was not ready within {STARTS_WITHIN_S:g} s" if status is None else f"ended with status {status}"
                raise RuntimeError(f"headrace serve {how}; the replica's log says why")
            await asyncio.sleep(POLL_S)

    async def __call__(self, request: Request) -> Response:
        headers = [(name, value) for name, value in request.headers.items() if name not in ONE_HOP - {"host"}]
        headers.append(("via", "1.1 ray-serve"))  # so the server does not take every client for one of this machine
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "")) or "/"
        url, body = url_of(path, request.url.query), await request.body()
        try:
            answer = await self._http.request(request.method, url, headers=headers, data=body, allow_redirects=False)
        except aiohttp.ClientError as error:
            return PlainTextResponse(f"the server of this replica does not answer: {error}", 503)
        response = StreamingResponse(pieces(answer), answer.status)
        response.raw_headers = [
            (name.lower(), value) for name, value in answer.raw_headers if name.lower().decode() not in ONE_HOP
        ]
        return response

    async def check_health(self) -> None:
        """Of Ray Serve, which replaces a replica that raises some times in a row. A server whose engines start again is
        well."""
        if not await self._answers("/health/live"):
            raise RuntimeError("the server of this replica does not answer")

    async def close(self) -> None:
        """What runs has STOP_GRACE_S to finish."""
        await self._http.close()
        await asyncio.to_thread(self._end)

    def __del__(self) -> None:
        """Ray Serve calls it when it stops a replica."""
        if hasattr(self, "_http"):
            self._http.detach()  # it can no longer be waited for
            self._end()

    def _end(self) -> None:
        self._child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(STOP_GRACE_S)
        self._child.kill()
        self._child.wait()
        self._folder.cleanup()

    async def _answers(self, path: str) -> bool:
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        try:
            async with self._http.get(url_of(path), timeout=timeout) as answer:
                return answer.status == HTTPStatus.OK
        except (aiohttp.ClientError, TimeoutError):
            return False


async def pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """As they come. When the client has left, the server hears of it, and ends the request."""
    try:
        async for piece in answer.content.iter_any():
            yield piece
    finally:
        answer.close()


def url_of(path: str, query: str = "") -> URL:
    return URL.build(scheme="http", host="headrace", path=quote(path), query_string=query, encoded=True)


def options_of(arguments: dict[str, Any]) -> dict[str, str]:
    """Of the server, as Ray Serve's arguments name them."""
    options = {name.replace("-", "_"): str(value) for name, value in arguments.items()}
    if int(options.get("data_parallel_size", "1")) > 1 and "coordinator" not in options:
        options.setdefault("data_parallel_backend", "ray")
    return options


def command(options: dict[str, str], path: Path) -> list[str]:
    """Of the server, which listens at this path."""
    named = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if name != "model"]
    model = [options["model"]] if "model" in options else []
    return [sys.executable, "-c", PROGRAM, "serve", *model, *named, f"--uds={path}"]


def environment(options: dict[str, str]) -> dict[str, str]:
    """Where Ray places engines or ranks, it is the Ray that this replica is of."""
    if "ray" not in options.values():
        return dict(os.environ)
    import ray

    return {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def application(arguments: dict[str, str]) -> Application:
    """For `serve run`, and for import_path and args of a Serve config."""
    from ray import serve

    deployment = serve.deployment(
        Replica, name="Headrace", max_ongoing_requests=MOST_REQUESTS, graceful_shutdown_timeout_s=2 * STOP_GRACE_S
    )
    return deployment.bind(dict(arguments))
