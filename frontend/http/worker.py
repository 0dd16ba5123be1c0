"""One of several HTTP processes, as a program: told what to do on an inherited socket, and gone with its parent."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path

import msgspec

from headrace.frontend.client.event_loop import run_async
from headrace.frontend.http.engines import Attached, Source
from headrace.frontend.http.launch import say_engine_ended, set_up_server_logging
from headrace.frontend.http.metrics import Pages
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.parent_engine import EngineDown, EngineLost, EngineUp, ParentEngine
from headrace.frontend.http.server import EXIT_ERROR, HttpServer, listen, url_of
from headrace.ipc.channel import Channel, ChannelClosedError, obey_parent
from headrace.ipc.child import die_with_parent, leave_signals_to_parent
from headrace.ipc.failure import Failure, HeadraceError
from headrace.ipc.messages import SCHEMA_HASH, ChildFailed, Ready, Start, Stop
from headrace.ipc.wait import Deadline


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the parent tells each process in its Start."""

    server: ServeOptions
    """With the port that the parent bound."""
    parent_has_engine: bool
    """The parent runs the one engine and says how it is; else they are those of `server`."""
    pages_file: str
    num_processes: int
    index: int


def main(fd: int) -> int:
    """The exit status: that of HttpServer.run, or 1 when the start failed."""
    die_with_parent()
    leave_signals_to_parent()
    set_up_server_logging()
    channel = Channel.inherited(fd, Start | Stop | EngineUp | EngineDown)
    try:
        start = channel.receive(Deadline(10.0))
        if not isinstance(start, Start) or start.schema_hash != SCHEMA_HASH:
            raise HeadraceError("the program that started this HTTP process is of another version of Headrace")
        return _serve(msgspec.convert(start.options, WorkerOptions), channel)
    except ChannelClosedError:
        return EXIT_ERROR  # nobody is left to tell
    except Exception as error:
        with contextlib.suppress(ChannelClosedError):
            channel.send(ChildFailed(failure=Failure.of(error, process="http", phase="start")))
        return EXIT_ERROR


def _serve(options: WorkerOptions, channel: Channel) -> int:
    began_s = time.monotonic()
    sock = listen(options.server, shared=True)

    def tell_lost(lost: EngineLost) -> None:
        with contextlib.suppress(ChannelClosedError):
            channel.send(lost)

    kept = ParentEngine(tell_lost)
    sources: list[Source] = [kept] if options.parent_has_engine else [Attached(each) for each in options.server.engine]
    pages = Pages(len(sources), file=Path(options.pages_file), num_processes=options.num_processes, index=options.index)
    server = HttpServer(options.server, sock, pages)
    address = url_of(options.server, sock)

    def on_ready() -> None:
        with contextlib.suppress(ChannelClosedError):
            channel.send(Ready(address=address, startup_s={"attach": time.monotonic() - began_s}))

    server.on_ready = on_ready
    if not options.parent_has_engine and options.index == 0:  # all of them see it; one tells
        server.on_engine_end = say_engine_ended
    threading.Thread(
        target=obey_parent, args=(channel, server.stop_threadsafe, EXIT_ERROR, kept.tell), name="parent", daemon=True
    ).start()
    return run_async(lambda: server.run(sources))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
