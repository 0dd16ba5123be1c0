"""`engine-core`: one engine core as a program, alone or as the child of a client that started it.

Exit status: 0 after an orderly stop, 1 when it could not start, 2 for a wrong command line, 70 when the engine
failed while it ran.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from headrace import __version__
from headrace.core.options.engine_options import Options
from headrace.core.options.parsing import OptionParser, add_options, options_from_arguments, parse_options
from headrace.core.options.vllm_environment import take_vllm_variables
from headrace.core.process.child import START_GRACE_S
from headrace.core.process.child_output import LoadBar
from headrace.core.process.installed import client_alone
from headrace.ipc.failure import EngineDeadError, Failure, HeadraceError, Interrupt, OptionError, let_interrupts_pass
from headrace.ipc.messages import (
    SCHEMA_HASH,
    ChildFailed,
    ParentMessage,
    Progress,
    Ready,
    Start,
    TokenizerInfo,
    TokenizerKnown,
    WeightsRead,
)
from headrace.ipc.process.child import (
    exit_when_slow,
    heeded_signals,
    leave,
    leave_signals_to_parent,
    show_stacks_when_asked,
)
from headrace.ipc.process.deferred_imports import defer
from headrace.ipc.process.host import take_share
from headrace.ipc.process.log import protect_stderr, set_up_logging
from headrace.ipc.process.program import occupy_standard_descriptors
from headrace.ipc.process.resources import (
    give_back_freed_memory,
    raise_file_limit,
    release_unchanged_files,
    what_limits,
)
from headrace.ipc.transport.channel import Channel, ChannelClosedError, obey_parent
from headrace.ipc.transport.keys import KeyFileError, use_keys
from headrace.ipc.wait import Deadline

try:
    from headrace.core.engine.engine import EngineCore, check_node_rank
    from headrace.core.engine.zmq_port import ZmqPort
except ModuleNotFoundError as missing:
    sys.exit(f"engine-core: {client_alone(str(missing.name))}")

logger = logging.getLogger(__name__)
EXIT_START_FAILED, EXIT_ENGINE_FAILED = 1, 70
START_WITHIN_S = 60.0
"""How long the parent may take to send its Start message: it may have started this program before it has options."""


def main() -> None:
    """The `engine-core` command."""
    defer()
    if sys.argv[1:2] == ["--parent-fd"]:
        leave(run_as_child(int(sys.argv[2])))
    parser = make_parser()
    try:
        arguments = parser.parse_args()
        options = options_from_arguments(arguments)
        use_keys(arguments.keys, arguments.insecure)
    except (OptionError, KeyFileError) as error:
        print(f"engine-core: {error}", file=sys.stderr)
        sys.exit(2)
    leave(run_alone(options, arguments.address))


def make_parser() -> OptionParser:
    """The parser of the `engine-core` command line."""
    parser = OptionParser(
        prog="engine-core",
        description="Runs a model and serves it to Headrace clients: headrace.connect(ADDRESS), headrace --engine.",
    )
    parser.add_argument("--version", action="version", version=f"engine-core {__version__}")
    parser.add_argument(
        "--address",
        default="",
        help="Where to listen: ipc:///path/to/socket or tcp://HOST:PORT (PORT may be *), for other hosts with --keys; "
        "default: a new ipc:// address, which is printed",
    )
    parser.add_argument(
        "--keys",
        metavar="FILE",
        help="Key file (`headrace keys FILE`) whose clients alone may connect over tcp://; default: HEADRACE_KEYS",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="Let everybody who reaches a tcp:// address use the engine, unencrypted"
    )
    add_options(parser, positional_model=True)
    return parser


def run_alone(options: Options, address: str) -> int:
    """Runs an engine core without a parent: prints its address once it is ready. SIGTERM or Ctrl-C drains it, a second
    one ends it at once. Returns the exit status."""
    warning = take_vllm_variables(os.environ)
    occupy_standard_descriptors()
    protect_stderr()
    set_up_logging("engine-core", "INFO")
    if warning:
        logger.warning("%s", warning)
    show_stacks_when_asked()
    take_part_of_machine(options)
    if options.node_rank:
        return run_as_node(options)
    try:
        port = new_port(options, address)
    except HeadraceError as error:
        print(f"engine-core: {error}", file=sys.stderr)
        return EXIT_START_FAILED
    core = EngineCore(options, port)
    _stop_on_signals(core, options.shutdown_timeout)
    phase, bar = ["start"], LoadBar(options.use_tqdm_on_load)

    def on_phase(name: str, seconds: float) -> None:
        phase[0] = name
        bar.close(is_done=True)

    limit_s = options.startup_timeout

    def too_slow() -> str:
        port.close()
        return f"engine-core: not ready within {limit_s:g} s (startup_timeout), during {phase[0]}; its threads:"

    try:
        with exit_when_slow(limit_s + START_GRACE_S, too_slow, EXIT_START_FAILED):
            core.start(on_phase, bar.read)
        core.announce(options.coordinator)
        _tell_address(port.address)
        return _serve(core)
    except HeadraceError as error:
        print(f"engine-core: {error}" + (f"\n{error.hint}" if error.hint else ""), file=sys.stderr)
        return EXIT_START_FAILED
    except SystemExit as ended:  # a signal before the engine served, so there is nothing to drain
        return ended.code if isinstance(ended.code, int) else EXIT_START_FAILED
    except Exception as error:
        if (limit := what_limits(error)) is None:
            raise
        print(f"engine-core: {limit}\n  during {phase[0]}", file=sys.stderr)
        return EXIT_START_FAILED
    finally:
        bar.close(is_done=False)
        core.close()


def _tell_address(address: str) -> None:
    """Prints the address; the engine serves also where that fails, on a full disk or a closed pipe."""
    line = f"engine-core: ready at {address}"
    try:
        print(line, flush=True)
    except OSError as error:
        logger.warning("%s (standard output cannot be written: %s)", line, (error.strerror or str(error)).lower())
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would try to write the line again at its end


def take_part_of_machine(options: Options) -> None:
    """Assigns this engine its share of the machine's cores if several engines run here. Must run before modules are
    imported that read the number of cores."""
    if options.num_engines_here > 1:
        take_share(options.data_parallel_rank % options.num_engines_here, options.num_engines_here)


def new_port(options: Options, address: str) -> ZmqPort:
    return ZmqPort(
        address,
        peer_timeout_s=options.peer_timeout,
        unread_messages=options.max_client_unread_messages,
        unread_bytes=int(options.max_client_unread_mb * 1e6),
    )


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupt(128 + number)


def run_as_node(options: Options) -> int:
    """Runs the workers of a host whose engine core is on another host, and ends with that core. Returns the exit
    status."""
    heeded = heeded_signals()
    if signal.SIGTERM in heeded:
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        check_node_rank(options)
        if signal.SIGINT in heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        agent = importlib.import_module(
            "headrace.executor.placement.node_agent"
        )  # by name: the core imports no executor
        agent.run_node(options, heeded)
    except EngineDeadError as error:
        print(f"engine-core: {error}", file=sys.stderr)
        return EXIT_ENGINE_FAILED
    except HeadraceError as error:
        print(f"engine-core: {error}", file=sys.stderr)
        return EXIT_START_FAILED
    except (SystemExit, KeyboardInterrupt) as ended:
        return ended.code if isinstance(ended, SystemExit) and isinstance(ended.code, int) else 130
    except Exception as error:
        if (limit := what_limits(error)) is None:
            raise
        print(f"engine-core: {limit}", file=sys.stderr)
        return EXIT_START_FAILED
    return 0


def run_as_child(fd: int) -> int:
    """Runs an engine core that the parent's Start message configures and that ends with its parent. Returns the exit
    status."""
    # No parent-death signal: `obey_parent` notices the parent's end too, and then closes the socket and stops the
    # workers in order.
    protect_stderr()
    leave_signals_to_parent()
    show_stacks_when_asked()
    set_up_logging("engine-core", "WARNING")
    channel = Channel.inherited(fd, ParentMessage)
    phase = ["start"]

    def on_phase(name: str, seconds: float) -> None:
        phase[0] = name
        channel.send(Progress(phase=name, seconds=seconds))

    def on_read(read_bytes: int, total_bytes: int) -> None:
        channel.send(Progress(phase=phase[0], seconds=0.0, read_bytes=read_bytes, total_bytes=total_bytes))

    def on_weights_path(path: str) -> None:
        with contextlib.suppress(ChannelClosedError):  # the parent is gone
            channel.send(WeightsRead(path=path))

    def on_tokenizer(info: TokenizerInfo) -> None:
        with contextlib.suppress(ChannelClosedError):
            channel.send(TokenizerKnown(info=info))

    core: EngineCore | None = None
    try:
        start = channel.receive(Deadline(START_WITHIN_S))
        if not isinstance(start, Start) or start.schema_hash != SCHEMA_HASH:
            raise HeadraceError("the program that started this engine-core is of another version of Headrace")
        raise_file_limit()
        options = parse_options(**start.options)
        take_part_of_machine(options)
        port = new_port(options, start.bind)
        core = EngineCore(options, port)
        threading.Thread(
            target=obey_parent, args=(channel, core.stop, EXIT_ENGINE_FAILED), name="parent", daemon=True
        ).start()
        core.on_weights_path, core.on_tokenizer = on_weights_path, on_tokenizer
        core.start(on_phase, on_read, start.weights_path)
        assert core.facts is not None, "the start is over"
        ready = Ready(
            address=port.address,
            startup_s=core.startup_s,
            ranks_startup_s=core.facts.ranks_startup_s,
            peer_timeout_s=options.peer_timeout,
        )
        core.announce(options.coordinator, on_ready=lambda: channel.send(ready))
        phase[0] = "serve"

        def on_failure(failure: Failure) -> None:
            """Clients get the failure too, but the parent may see this process end before its client has read it."""
            with contextlib.suppress(ChannelClosedError):
                channel.send(ChildFailed(failure=failure))

        return _serve(core, on_failure)
    except ChannelClosedError:
        return EXIT_START_FAILED  # the parent is gone
    except BaseException as error:
        let_interrupts_pass(error)
        told = what_limits(error) or error
        with contextlib.suppress(ChannelClosedError):
            channel.send(ChildFailed(failure=Failure.of(told, process="engine-core", phase=phase[0])))
        return EXIT_START_FAILED
    finally:
        if core is not None:
            core.close()


def _serve(core: EngineCore, on_failure: Callable[[Failure], None] = lambda failure: None) -> int:
    # The loop's thread and the I/O thread share the interpreter: the default of 5 ms would delay every token.
    sys.setswitchinterval(2e-4)
    # All objects of the start-up stay alive, torch's too: collections while streaming should not traverse them.
    gc.freeze()
    core.on_first_idle = _release_memory  # the first request would have to wait for it, and for the pages again
    try:
        core.run()
    except BaseException as error:
        let_interrupts_pass(error)
        # Our own errors are sentences for the user, which a traceback would only hide.
        logger.error("the engine failed: %s", error, exc_info=not isinstance(error, HeadraceError))
        on_failure(Failure.of(error, process="engine-core", phase="step"))
        return EXIT_ENGINE_FAILED
    return 0


def _release_memory() -> None:
    give_back_freed_memory()
    release_unchanged_files()


def _stop_on_signals(core: EngineCore, shutdown_timeout_s: float) -> None:
    """Sets handlers for SIGTERM, SIGINT and SIGHUP: the first signal drains the engine, the second stops it without
    waiting, a third ends the process. Before the engine serves, the first one ends the process."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if not core.startup_s or len(received) > 2:
            raise Interrupt(128 + number)
        core.stop(shutdown_timeout_s if len(received) == 1 else 0.0)

    for number in heeded_signals():
        signal.signal(number, handle)


if __name__ == "__main__":
    main()
