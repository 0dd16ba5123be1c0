"""What a ZeroMQ listener demands of whoever connects, as its greeting says (ZMTP 3.0)."""

from __future__ import annotations

import socket

_GREETING_BYTES = 64


def wants_keys(address: str) -> bool:
    """Whether the listener's mechanism is CURVE. It answers a greeting that names its own, and closes on another."""
    return _answers(address, b"CURVE") and not _answers(address, b"NULL")


def _answers(address: str, mechanism: bytes) -> bool:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=60.0) as sock:
        sock.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32))
        greeting = b""
        while len(greeting) < _GREETING_BYTES:
            part = sock.recv(_GREETING_BYTES - len(greeting))
            if not part:
                return False
            greeting += part
    return greeting[12:32].rstrip(b"\0") == mechanism
