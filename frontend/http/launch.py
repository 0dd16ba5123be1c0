"""`headrace serve`: starts the engine if it is to be ours, and one HTTP process or several.

one:      this process speaks HTTP itself        --> engine-core child
several:  this process --> HTTP children (http/worker.py), which share the port and the engines
                       --> engine-core child
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

from headrace.core.options.engine_options import Options
from headrace.core.process.supervisor import Child, start_engine
from headrace.frontend.client.event_loop import run_async
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.phases import PhaseLog, process_began_s, say
from headrace.ipc.child import STOP_SIGNALS
from headrace.ipc.failure import Failure
from headrace.ipc.log import protect_stderr, set_up_logging


def launch(engine_options: Options, options: ServeOptions) -> int:
    """Serves until it is told to stop; the exit status. Raises HeadraceError when the start fails."""
    set_up_server_logging()
    phases = PhaseLog("read options", process_began_s())
    child: Child | None = None
    if not options.engine:
        phases.enter("start the engine's process")
        child = start_engine(engine_options)
    try:
        if options.api_server_count > 1:
            from headrace.frontend.http.processes import serve_with_processes

            return serve_with_processes(engine_options, options, child, phases)
        return _serve_here(engine_options, options, child, phases)
    except BaseException:
        if child is not None:
            child.kill()
        raise


def _serve_here(engine_options: Options, options: ServeOptions, child: Child | None, phases: PhaseLog) -> int:
    """In this process, which is all that is needed for most."""
    # Imported while the engine loads.
    from headrace.frontend.http.engines import Attached, Owned, Source
    from headrace.frontend.http.metrics import Pages
    from headrace.frontend.http.server import HttpServer, listen, url_of

    sock = listen(options)
    server = HttpServer(options, sock, Pages(len(options.engine) or 1))
    url = url_of(options, sock)
    sources: Sequence[Source]
    if child is None:
        phases.enter("attach to the engine")
        sources = [Attached(address) for address in options.engine]
    else:
        owned = Owned(lambda: _start_again(engine_options), child, restarts=options.restart_engine)
        owned.on_progress = lambda phase: phases.enter(f"engine: {phase}")
        sources = [owned]
    server.on_ready = lambda: phases.finish(ready_text(url))
    server.on_engine_end = say_engine_ended

    async def serve() -> int:
        _stop_on_signals(server.stop, engine_options.shutdown_timeout)
        return await server.run(sources)

    return run_async(serve)


def _start_again(options: Options) -> Child:
    say("starting the engine again")
    return start_engine(options)


def _stop_on_signals(stop: Callable[[float], None], shutdown_timeout_s: float) -> None:
    """The first drains, the second does not wait, a third ends this process as it stands."""
    received: list[int] = []

    def handle(number: int) -> None:
        received.append(number)
        if len(received) > 2:
            os._exit(128 + number)
        say("stopping; a second signal does not wait" if len(received) == 1 else "stopping at once")
        stop(shutdown_timeout_s if len(received) == 1 else 0.0)

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, handle, number)


def say_engine_ended(failure: Failure) -> None:
    say(f"the engine has ended: {failure.message}")


def ready_text(url: str) -> str:
    return f"ready: {url}/v1 for clients, {url}/docs to read"


def set_up_server_logging() -> None:
    protect_stderr()
    set_up_logging("server", "INFO")
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its chatter about starting is said better by the phases
