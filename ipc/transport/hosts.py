"""Host names and addresses as users write them: IPv4, IPv6 with and without brackets, names."""

from __future__ import annotations

import contextlib
import socket

_ASK_S = 1.0


def bare_host(host: str) -> str:
    """Without the brackets in which URLs have IPv6 addresses: what socket functions take."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def host_port(host: str, port: int | str) -> str:
    """HOST:PORT, with an IPv6 address in brackets."""
    host = bare_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def any_host() -> str:
    """The address of all interfaces: of IPv6, which takes IPv4 too, where this machine has it, else of IPv4."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return "0.0.0.0"
    return "::"


def listening(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """A listening TCP socket at this host's address or name, of whichever family it is. Raises OSError."""
    family, *_, address = socket.getaddrinfo(bare_host(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=backlog)


def where_localhost_listens(port: int) -> str:
    """The loopback address, of IPv4 or else of IPv6, that takes connections at this port; IPv4's if neither does."""
    for host in ("127.0.0.1", "::1"):
        with contextlib.suppress(OSError), socket.create_connection((host, port), _ASK_S):
            return host
    return "127.0.0.1"


def needs_ipv6(host: str) -> bool:
    """Whether it is an IPv6 address, or a name that has no IPv4 address. Resolves names, which may take seconds."""
    if ":" in host:
        return True
    try:
        found = {family for family, *_ in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return found == {socket.AF_INET6}
