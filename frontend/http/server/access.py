"""Who may call which route: API keys, admin keys, the Host header, and web pages.

    kind of route | with API keys                      | without API keys
    PUBLIC        | anyone                             | names that are known, pages that are allowed
    STATISTICS    | anyone; with guard_metrics a key   | the same
    CLIENT        | a key                              | the same
    ADMIN         | an admin key                       | the same; then an admin key or, if there is none, this machine

Without API keys a browser on this machine, or in its network, could be made to act for a web page: by requests that
need no permission (text/plain, forms, images), which the headers Origin and Sec-Fetch-Site show; or by a name of the
page's own site whose address changes to this server's (DNS rebinding), which the header Host shows. A browser sends
such a page's requests without a key.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

from headrace.core.options.option import secret_bytes
from headrace.frontend.http.server.connection import HOSTS
from headrace.frontend.http.server.errors import ApiError

if TYPE_CHECKING:
    from headrace.frontend.http.options import ServeOptions
    from headrace.frontend.http.server.connection import Connection
    from headrace.frontend.http.server.exchange import Exchange, Scope


Headers = Sequence[tuple[bytes, bytes]]


class Access(enum.Enum):
    """Who may call a route. Every route declares it."""

    PUBLIC = "anyone"
    STATISTICS = "anyone, or with the option guard_metrics clients: it tells how the server is used"
    CLIENT = "clients"
    ADMIN = "administrators: it changes the server for all clients, or tells how it is set up"


class Caller(NamedTuple):
    tenant: str
    """Identifies the key without revealing it."""
    is_admin: bool


class Keys:
    """The keys that a server knows, by their hashes. An admin key is good for every route."""

    def __init__(self, clients: Sequence[str] = (), admins: Sequence[str] = ()) -> None:
        self._known = {_digest(secret_bytes(key)): False for key in clients} | {
            _digest(secret_bytes(key)): True for key in admins
        }
        self.guards_clients, self.guards_admins = bool(clients), bool(admins)

    @property
    def tenants(self) -> tuple[str, ...]:
        """An id for each key that opens the routes of clients; without such keys the one of everybody."""
        return tuple(map(_tenant, self._known)) if self.guards_clients else ("",)

    def find(self, key: bytes) -> Caller | None:
        """Whose key it is; None for a wrong one. Compares with every key, each in constant time."""
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._known]
        return Caller(_tenant(digest), self._known[digest]) if any(matches) else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _tenant(digest: bytes) -> str:
    return digest[:8].hex()


class AccessControl:
    """Lets requests in, or raises the error that they are answered with."""

    def __init__(self, keys: Keys, options: ServeOptions) -> None:
        self.keys = keys
        self._hosts = KnownHosts([None if options.host == "*" else options.host, *options.allowed_hosts])
        self._origins = frozenset(options.allowed_origins)

    def check(self, exchange: Exchange, *, is_public: bool) -> None:
        """For a request to any path. Sets the exchange's tenant. Raises ApiError (401, 403)."""
        if not self.keys.guards_clients:
            if self._caller(exchange) is None:  # an admin's key, which no page has
                host = self.unknown_host(exchange.scope, exchange.connection)
                if host is not None:
                    raise _not_named(host)
                if b"origin" in exchange.headers or b"sec-fetch-site" in exchange.headers:
                    self._check_page(exchange)
        elif not is_public:
            caller = self._caller(exchange)
            if caller is None:
                raise _unauthorized("the API key is missing or wrong")
            exchange.tenant = caller.tenant

    def check_admin(self, exchange: Exchange) -> None:
        """For a route of the kind ADMIN, after `check`. Raises ApiError (401, 403)."""
        if self.keys.guards_admins:
            caller = self._caller(exchange)
            if caller is None:
                raise _unauthorized("this route needs an admin key (the server's option --admin-api-key)")
            if not caller.is_admin:
                raise _forbidden("this route needs an admin key (the server's option --admin-api-key), not a client's")
        elif self.keys.guards_clients:
            raise _forbidden(
                "this route acts on all clients of the server and needs an admin key, but the server has none: start "
                "it with --admin-api-key"
            )
        elif not is_local(exchange.scope["headers"], exchange.connection):
            raise _forbidden(
                "this route acts on all clients of the server: without keys it answers callers on the same machine "
                "(loopback or a Unix socket, not through a proxy); start the server with --admin-api-key for others"
            )

    def _caller(self, exchange: Exchange) -> Caller | None:
        """Whose key the request has; None without a key, or for a wrong one."""
        scheme, _, bearer = exchange.headers.get(b"authorization", b"").partition(b" ")
        key = bearer.strip() if scheme.lower() == b"bearer" else exchange.headers.get(b"x-api-key")
        return None if key is None else self.keys.find(key)

    def unknown_host(self, scope: Scope, connection: Connection) -> str | None:
        """The host that a request is for, if it is not known to mean this server; with API keys every host is. A client
        of HTTP/1.0 may name none, as no browser does; and no browser connects to a Unix socket."""
        for host in scope["extensions"][HOSTS]:
            if not self._hosts.have(host):
                break
        else:
            return None
        is_excused = _family(connection) == socket.AF_UNIX and is_local(scope["headers"], connection)
        return None if self.keys.guards_clients or is_excused else host

    def _check_page(self, exchange: Exchange) -> None:
        """Raises ApiError (403) for a request that a browser sends for a page of another site. Following a link is not
        one: the page that links does not see the answer."""
        if "*" in self._origins:
            return
        origin = exchange.header(b"origin")
        if origin is not None:
            is_foreign = origin not in self._origins and not _is_same(origin, exchange.header(b"host"))
        else:
            is_link = exchange.scope["method"] in ("GET", "HEAD") and exchange.header(b"sec-fetch-mode") == "navigate"
            is_foreign = exchange.header(b"sec-fetch-site") in ("cross-site", "same-site") and not is_link
        if is_foreign:
            who = f"pages of {origin:.200}" if origin is not None else "pages of other sites"
            raise ApiError(
                HTTPStatus.FORBIDDEN, f"{who} may not call this server: see its option --allowed-origins", code="origin"
            )


def _not_named(host: str) -> ApiError:
    return ApiError(
        HTTPStatus.FORBIDDEN,
        f"this server has no keys and does not answer to the name {host!r:.200}, it may be a web page's: use "
        "localhost or an IP address, allow it with --allowed-hosts, or start the server with --api-key",
        code="host_not_allowed",
    )


def _unauthorized(why: str) -> ApiError:
    message = f"{why}: send Authorization: Bearer KEY, or x-api-key: KEY"
    return ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")


def _forbidden(why: str) -> ApiError:
    return ApiError(HTTPStatus.FORBIDDEN, why, type="permission_error", code="admin_key_required")


# --- callers on this machine -----------------------------------------------------------------------------------------

_OF_PROXIES = (
    b"forwarded",
    b"via",
    b"x-forwarded-",
    b"x-real-ip",
    b"x-original-",
    b"cf-connecting-ip",
    b"true-client-ip",
)
"""Beginnings of the names of headers that only proxies send."""


def is_local(headers: Headers, connection: Connection) -> bool:
    """Whether the caller is on this machine: connected by loopback or a Unix socket, and no proxy. A proxy's headers
    are believed where they say that there is one, and never for where a request comes from."""
    if any(name.startswith(_OF_PROXIES) for name, _ in headers):
        return False
    if _family(connection) == socket.AF_UNIX:
        return True
    peer = connection.transport.get_extra_info("peername")
    try:
        address = ipaddress.ip_address(peer[0].partition("%")[0])
    except (TypeError, IndexError, ValueError):
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _family(connection: Connection) -> int | None:
    sock = connection.transport.get_extra_info("socket")
    return None if sock is None else sock.family


# --- names of hosts --------------------------------------------------------------------------------------------------

_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^\[\]:]*)(?::(\d*))?")
_NAMES_KEPT = 32
"""Names whose meaning is remembered: a server's clients send the same ones with each request."""


@functools.lru_cache(_NAMES_KEPT)
def _split(authority: str) -> tuple[str, str]:
    """(name, port) of HOST, HOST:PORT or [ADDRESS]:PORT, the name in lower case and without its final dot. The name is
    empty if it is none of these."""
    match = _AUTHORITY.fullmatch(authority.strip())
    return ("", "") if match is None else (match[1].lower().removesuffix("."), match[2] or "")


class KnownHosts:
    """The names to which a server without keys answers."""

    def __init__(self, names: Sequence[str | None]) -> None:
        """names: exact ones, *.NAME or .NAME for all below it, * for all. Upper case and a final dot do not count."""
        given = [_ascii(name).lower().removesuffix(".") for name in names if name]
        self._takes_all = "*" in given
        self._below = tuple(name.removeprefix("*") for name in given if name.startswith((".", "*.")))
        self._names = frozenset({"localhost", *given})

    def have(self, authority: str) -> bool:
        """Whether HOST, HOST:PORT or [ADDRESS]:PORT means this server. Addresses do: no page can change what they
        mean."""
        name, _ = _split(authority)
        return self._takes_all or name in self._names or name.endswith(self._below) or _is_address(name)


def _ascii(name: str) -> str:
    return name if name.isascii() else name.encode("idna").decode()


@functools.lru_cache(_NAMES_KEPT)
def _is_address(name: str) -> bool:
    is_bracketed = name.startswith("[")
    try:
        return ipaddress.ip_address(name.strip("[]")).version == (6 if is_bracketed else 4)
    except ValueError:
        return False


_PORTS = {"http": "80", "https": "443"}


def _is_same(origin: str, host: str | None) -> bool:
    """Whether a page of this origin is this server's own: it has the host and port that the browser connected to. The
    scheme may differ, as behind a proxy that ends TLS."""
    scheme, separator, authority = origin.partition("://")
    name, port = _split(authority)
    own_name, own_port = _split(host or "")
    usual = _PORTS.get(scheme.lower(), "")
    return bool(separator and name) and (name, port or usual) == (own_name, own_port or usual)
