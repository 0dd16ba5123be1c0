"""ZeroMQ sockets as Headrace uses them: addresses, options, the runtime directory.

A core binds one ROUTER, a client connects one DEALER. Queues are bounded, peers that vanish without closing the
connection (a cut network, a stopped process) are detected by ZMTP heartbeats, and closed sockets linger only briefly.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import zmq

from headrace.ipc.codec import Frame
from headrace.ipc.failure import HeadraceError, let_interrupts_pass
from headrace.ipc.process.runtime_directory import UNIX_PATH_BYTES, AddressError, runtime_directory
from headrace.ipc.transport.engine_records import keys_of, refuses, sweep_records
from headrace.ipc.transport.hosts import any_host, bare_host, host_port, needs_ipv6, where_localhost_listens
from headrace.ipc.transport.keys import is_insecure, key_file, read_engine_keys, read_keys

logger = logging.getLogger(__name__)
HEARTBEAT_INTERVAL_MS = 1_000
HANDSHAKE_MS = 10_000
"""Time that whoever connects has to say that it speaks ZeroMQ, and to prove its key: an idle stranger takes a file
descriptor for no longer."""
PEER_TIMEOUT_S = 60.0
"""How long a connected peer may be silent, unless an option or HEADRACE_PEER_TIMEOUT sets another time.

A peer may only be stopped (by a signal, a debugger, its virtual machine), and continue later where it was.
"""
MAX_MESSAGE_BYTES = 1 << 30
MOST_HEADER_BYTES = 16 << 20
"""Limit of a message's header, without tensors, to a core or coordinator. Decoding this much takes a second or two, in
which nobody else is served."""
MOST_FRAMES = 16
"""Limit of such a message's frames. A message of a million frames would keep the loop's thread from sending."""
QUEUE_MESSAGES = 100_000
"""Bound of the queue in each direction. A core must never block on a slow client, so beyond it messages are refused."""
CLIENT_SENDS_MESSAGES = 1_000
"""Bound of a client's messages in ZeroMQ's queue to the core; the client keeps further ones itself, counted."""
LINGER_MS = 500
NEVER_MS = 7 * 24 * 3600 * 1000
_NO_WAIT, _MORE_FOLLOWS = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)
_DROPPED_AT_ONCE = 256
_LEAST_ASKED_S = 60.0
"""A younger socket may have been bound but not listen yet."""
_BIND_TO_LISTEN_S = 1.0
"""The same for one whose process is not seen here, but may run in another container: ZeroMQ listens right away."""
_KERNEL_DIGITS = 6
_OWN_NAME = re.compile(rf".+-(\d+)-([0-9a-f]{{{_KERNEL_DIGITS}}})[0-9a-f]{{8}}\.sock")
"""Process id and kernel in the name of a socket of `new_ipc_address`."""


class CutShortError(HeadraceError):
    """A message could not be sent whole. Its receiver can tell, and the connection is unusable."""


def sweep_sockets() -> Path:
    """Removes sockets that nobody listens on from the runtime directory, and returns the directory.

    Each is asked first: it must refuse a connection. The directory may be shared with containers, where a process id
    means another process or none, and with other hosts, whose sockets refuse everybody here: only a socket that was
    made under this kernel, as its name says, is removed. A young one may be bound and not listen yet, unless its
    process is gone.
    """
    directory = runtime_directory()
    for leftover in directory.glob("*.sock"):
        if found := _OWN_NAME.fullmatch(leftover.name):
            pid, kernel = found.groups()
            least_age_s = _LEAST_ASKED_S if Path(f"/proc/{pid}").exists() else _BIND_TO_LISTEN_S
            with contextlib.suppress(OSError):
                age_s = time.time() - leftover.stat().st_mtime
                if kernel == this_kernel() and age_s > least_age_s and _refuses(leftover):
                    leftover.unlink(missing_ok=True)
    sweep_records(directory, this_kernel())
    return directory


@functools.cache
def this_kernel() -> str:
    """Names the running kernel, which all containers of a host share: a hash of its boot id."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        boot_id = os.uname().nodename.encode()
    return hashlib.sha256(boot_id).hexdigest()[:_KERNEL_DIGITS]


def remove_leftover(address: str) -> None:
    """Removes the socket of an ipc:// address whose process was killed, and sweeps.

    A sweep alone takes it for one in use where its name has this process's number, as those do that are to be bound
    again by another child.
    """
    path = ipc_path(address)
    if path is not None and _refuses(path):
        path.unlink(missing_ok=True)
    sweep_sockets()


def remove_leftovers_of(pid: int) -> None:
    """Removes what a child of this process, which has ended before it could tell its address, has bound."""
    for path in runtime_directory().glob(f"*-{pid}-{this_kernel()}*.sock"):
        if _OWN_NAME.fullmatch(path.name) and _refuses(path):
            path.unlink(missing_ok=True)
    sweep_sockets()


def new_ipc_address(name: str) -> str:
    """A new ipc:// address in the runtime directory; removes unused sockets from it."""
    directory = sweep_sockets()
    path = directory / f"{name}-{os.getpid()}-{this_kernel()}{secrets.token_hex(4)}.sock"
    if len(os.fsencode(path)) > UNIX_PATH_BYTES:
        raise AddressError(
            f"{path} is longer than the {UNIX_PATH_BYTES} bytes of a Unix socket's path; "
            "set HEADRACE_RUNTIME_DIR to a shorter folder"
        )
    return f"ipc://{path}"


def check_address(address: str, keys: Path | None = None) -> str:
    """Returns an ipc:// or tcp:// address, an IPv6 one in brackets. Raises AddressError for any other.

    Also raises it for a tcp:// address beyond the loopback interface, unless there are keys (by default those of
    `headrace.ipc.transport.keys.key_file`) or insecure connections are allowed.
    """
    if not isinstance(address, str):
        raise AddressError(f"{address!r} is no address, which is a str: ipc:///path/to/socket or tcp://HOST:PORT")
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        return address
    if scheme == "tcp" and ":" in rest:
        host, _, port = rest.rpartition(":")
        host = bare_host(host)
        if host and (port == "*" or (port.isdigit() and int(port) < 65536)):
            if is_loopback(host) or keys or key_file() or is_insecure():
                return f"tcp://{host_port(host, port)}"
            raise AddressError(
                f"{address} is no loopback address (127.0.0.1, [::1]): with other hosts, engine and clients need keys "
                "(`headrace keys FILE` makes them; HEADRACE_KEYS=FILE names them, or the option --keys of the commands "
                "that have it), unless HEADRACE_INSECURE=1 says that everybody who reaches the address may use it"
            )
    if scheme in ("http", "https"):
        raise AddressError(
            f"{address} is no address of an engine-core, but a server's URL, which chat and complete take as --url; "
            "addresses are like ipc:///path/to/socket"
        )
    raise AddressError(f"{address!r} is no address: use ipc:///path/to/socket or tcp://HOST:PORT")


def address_to_dial(address: str) -> str:
    """A checked address with the loopback address for the name localhost: ZeroMQ tries one address of a name alone, and
    an engine is known by its address."""
    port = address.removeprefix("tcp://localhost:")
    return f"tcp://{host_port(where_localhost_listens(int(port)), port)}" if port.isdigit() else address


def is_ipv6(address: str) -> bool:
    """Whether a tcp:// address is reached by IPv6. Resolves a name, which may take seconds."""
    scheme, _, rest = address.partition("://")
    host = bare_host(rest.rpartition(":")[0])
    return scheme == "tcp" and needs_ipv6(any_host() if host == "*" else host)


def is_loopback(host: str) -> bool:
    """Whether only processes of this host reach this host name or address."""
    with contextlib.suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(bare_host(host)).is_loopback
    return False


def peer_timeout_s() -> float:
    """The limit of a peer's silence. Raises AddressError for an invalid HEADRACE_PEER_TIMEOUT."""
    named = os.environ.get("HEADRACE_PEER_TIMEOUT")
    if not named:
        return PEER_TIMEOUT_S
    try:
        seconds = float(named)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= 86400.0:
        raise AddressError(f"HEADRACE_PEER_TIMEOUT={named}: it must be seconds, 1 to 86400")
    return seconds


def configure(socket: zmq.Socket[bytes], address: str, timeout_s: float | None, *, ipv6: bool | None = None) -> None:
    """Sets bounded queues, heartbeats and a short linger time, and IPv6 where it is needed.

    ipv6: `is_ipv6(address)`, if that is known: it may wait for a name server.
    """
    socket.set_hwm(QUEUE_MESSAGES)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int((timeout_s or peer_timeout_s()) * 1e3))
    socket.setsockopt(zmq.IPV6, is_ipv6(address) if ipv6 is None else ipv6)


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    *,
    timeout_s: float | None = None,
    unread_messages: int | None = None,
) -> tuple[zmq.Socket[bytes], str]:
    """A ROUTER bound at `address` (or, if empty, at a new ipc:// address), and the bound address.

    timeout_s: how long a client may be silent, by default `peer_timeout_s`; unread_messages: bound of the queue to one
    client. Sending to a client that is gone raises EHOSTUNREACH, and to one whose queue is full EAGAIN, instead of
    dropping silently. Over tcp://, if HEADRACE_KEYS names a file, only clients with keys can connect; a `Gatekeeper` of
    the context decides which. Raises KeyFileError, and AddressError if the address is in use or cannot be used.
    """
    wanted = check_address(address) if address else new_ipc_address("engine")
    path = ipc_path(wanted)
    if path is not None and path.exists() and not _refuses(path):
        raise AddressError(f"cannot listen at {wanted}: another process does")
    keys_path = key_file() if path is None else None
    keys = read_engine_keys(keys_path) if keys_path else None
    socket = context.socket(zmq.ROUTER)
    with _closed_if_it_fails(socket):
        configure(socket, wanted, timeout_s)
        if keys:
            keys.secure_engine(socket)
        elif path is None and not is_insecure():
            logger.warning(
                "%s is open to every user of this machine, who may use and end what listens there: name a key file "
                "(--keys, HEADRACE_KEYS) or listen at ipc://",
                wanted,
            )
        if unread_messages is not None:
            socket.setsockopt(zmq.SNDHWM, unread_messages)
        socket.setsockopt(zmq.ROUTER_MANDATORY, True)
        mask = os.umask(0o077)  # nobody else may connect before `chmod`; folders made meanwhile stay usable
        try:
            socket.bind(wanted)
        except zmq.ZMQError as error:
            raise AddressError(f"cannot listen at {wanted}: {zmq.strerror(error.errno or 0).lower()}") from error
        finally:
            os.umask(mask)
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    if path is not None:
        path.chmod(0o600)
    return socket, bound.decode().rstrip("\0") if isinstance(bound, bytes) else wanted


def new_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    timeout_s: float | None = None,
    keys_path: Path | None = None,
    *,
    ipv6: bool | None = None,
) -> zmq.Socket[bytes]:
    """A DEALER for one connection to `address`, not connected yet. A lost or refused connection is never retried.

    Over tcp:// it uses the keys of `keys_path`, by default of the file that HEADRACE_KEYS names, or else this
    user's own where an engine listens with them. ipv6: as in `configure`. Raises AddressError, KeyFileError.
    """
    address = check_address(address, keys_path)
    used = (keys_path or key_file() or keys_of(address)) if ipc_path(address) is None else None
    keys = read_keys(used) if used else None
    socket = context.socket(zmq.DEALER)
    with _closed_if_it_fails(socket):
        configure(socket, address, timeout_s, ipv6=ipv6)
        if keys:
            keys.secure_client(socket)
        socket.setsockopt(zmq.SNDHWM, CLIENT_SENDS_MESSAGES)
        # Not -1, which would also drop received messages that were not read yet, such as a core's last message.
        socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
    return socket


@contextlib.contextmanager
def _closed_if_it_fails(socket: zmq.Socket[bytes]) -> Iterator[None]:
    """The end of a context waits for its open sockets, for ever."""
    try:
        yield
    except BaseException:
        socket.close(0)
        raise


HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""Events of a socket's monitor: the listener is another program, or requires other keys."""


def or_keys(address: str, keys_path: Path | None) -> str:
    """For messages about failed tcp:// handshakes: keys as the other possible cause, as ZeroMQ reports no details."""
    if ipc_path(address) is not None:
        return ""
    if keys_path is None:
        return ", or one that wants keys (HEADRACE_KEYS=FILE, `headrace keys --help`)"
    return f", or has other keys than {keys_path}, or none"


def send_whole(sock: zmq.Socket[bytes], first: Frame | zmq.Frame, rest: Sequence[Frame | zmq.Frame]) -> None:
    """Sends a message without waiting. Raises CutShortError, or zmq.Again or another ZMQError if nothing was sent.

    ZeroMQ accepts a message frame by frame. If it fails between two frames, for example for lack of memory, the frames
    sent so far would be joined with the next message. So an empty frame ends the message, which Headrace's messages
    never contain otherwise: `Codec.decode` reports it.
    """
    if not rest:
        sock.send(first, _NO_WAIT)
        return
    sock.send(first, _MORE_FOLLOWS)
    try:
        if len(rest) == 1:  # copying a small frame takes less time than tracking it
            sock.send(rest[0], _NO_WAIT)
            return
        for frame in rest[:-1]:
            sock.send(frame, _MORE_FOLLOWS, copy=False)
        sock.send(rest[-1], _NO_WAIT, copy=False)
    except BaseException as error:
        sock.send(b"", _NO_WAIT)  # needs no memory
        let_interrupts_pass(error)
        raise CutShortError(f"a message could not be sent whole: {type(error).__name__}: {error}") from error


def has_input(sock: zmq.Socket[bytes]) -> bool:
    """Whether a message has come: in an eighth of the time of a zmq.Again, and a fifth of that of the option EVENTS."""
    return bool(zmq.zmq_poll([(sock, _READABLE)], 0))


def receive_whole(sock: zmq.Socket[bytes]) -> list[bytes]:
    """The frames of a message, without waiting: `recv_multipart` in half the time, as the option RCVMORE is not read.
    Raises zmq.Again."""
    frame = sock.recv(_NO_WAIT, copy=False)
    frames = [frame.bytes]
    while frame.more:
        frame = sock.recv(_NO_WAIT, copy=False)
        frames.append(frame.bytes)
    return frames


def receive_frames(sock: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """The sender's identity and the frames of a message; of a message with too many, `MOST_FRAMES` and one more.

    `drop_frames` discards the rest. Does not wait. Raises zmq.Again.
    """
    frames = [sock.recv(_NO_WAIT, copy=False)]
    while len(frames) < 2 + MOST_FRAMES and frames[-1].more:
        frames.append(sock.recv(_NO_WAIT, copy=False))
    return frames


def drop_frames(sock: zmq.Socket[bytes]) -> bool:
    """Discards some of the remaining frames of a partly read message. Returns whether there are more."""
    for _ in range(_DROPPED_AT_ONCE):
        if not sock.getsockopt(zmq.RCVMORE):
            return False
        sock.recv(_NO_WAIT, copy=False)
    return True


def ipc_path(address: str) -> Path | None:
    """The path of an ipc:// address; None for any other address."""
    return Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None


def _refuses(path: Path) -> bool:
    """Whether this is a leftover socket of a dead process, on which nobody listens."""
    return refuses(f"ipc://{path}")
