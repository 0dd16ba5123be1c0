"""Keys for engines that other hosts reach: CURVE (RFC 26, CurveZMQ) encrypts and authenticates tcp:// connections.

A key file is TOML. Only its owner may read it, since whoever has it can use the engines:

    [engine]                  proves that an engine belongs to the deployment
    public_key = "..."        each 40 characters, Z85
    secret_key = "..."        absent from the file of a client that starts no engines
    [client]                  proves the identity of a client with this file
    public_key = "..."
    secret_key = "..."
    [clients]                 the clients that engines admit, by name
    deployment = "..."

The handshake proves both sides' keys with fresh keys per connection, so recorded traffic cannot be replayed, and past
traffic stays secret if a key is disclosed later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.ipc.failure import HeadraceError
from headrace.ipc.process.own_secret import make_once
from headrace.ipc.process.regular_files import read_text
from headrace.ipc.process.runtime_directory import AddressError, runtime_directory
from headrace.ipc.struct_types import threadsafe

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)
VARIABLE = "HEADRACE_KEYS"
INSECURE_VARIABLE = "HEADRACE_INSECURE"
OWN_CLIENT = "deployment"
"""Name of the deployment's own client key, in its key file."""
_OWN_FILE = "own.keys"
_Z85_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class KeyFileError(HeadraceError, ValueError):
    """A key file that is missing, readable by others, or damaged; the message says what is expected."""


class KeyPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    public_key: str
    secret_key: str = ""


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a key file."""

    engine: KeyPair
    client: KeyPair
    clients: dict[str, str] = {}

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Call before the socket connects."""
        socket.curve_publickey = self.client.public_key.encode()
        socket.curve_secretkey = self.client.secret_key.encode()
        socket.curve_serverkey = self.engine.public_key.encode()

    def secure_engine(self, socket: zmq.Socket[bytes]) -> None:
        """Call before the socket binds, and after a `KeyGatekeeper` of its context was created."""
        socket.curve_server = True
        socket.curve_secretkey = self.engine.secret_key.encode()


class KeyGatekeeper:
    """Admits the clients of a key file to the sockets of a ZeroMQ context, on a thread of pyzmq.

    The file is read at each connection, so a client removed from it is refused from its next connection on.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path) -> None:
        from zmq.auth.thread import ThreadAuthenticator  # imports asyncio, which an engine without keys does not need

        self._path = path
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", self)

    def callback(self, domain: str, public_key: bytes) -> bool:
        """Called by pyzmq (as a credentials provider): whether the client with this key (Z85) is admitted."""
        try:
            admitted = read_keys(self._path).clients
        except KeyFileError as error:
            logger.error("no client is admitted: %s", error)
            return False
        return public_key.decode() in admitted.values()

    def close(self) -> None:
        self._authenticator.stop()


def key_file() -> Path | None:
    """The file that HEADRACE_KEYS names."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def is_insecure() -> bool:
    """Whether HEADRACE_INSECURE allows unencrypted, unauthenticated connections beyond this machine."""
    return os.environ.get(INSECURE_VARIABLE, "").lower() not in ("", "0", "false", "no")


def use_keys(path: str | None, insecure: bool) -> None:
    """Applies a command line's options to this process and the children that it starts. Raises KeyFileError if the file
    that is named, by the option or else by HEADRACE_KEYS, is none."""
    if (named := key_file() if path is None else Path(path)) is not None:
        read_keys(named)
        os.environ[VARIABLE] = os.path.abspath(named)
    if insecure:
        os.environ[INSECURE_VARIABLE] = "1"


def use_own_keys() -> Path | None:
    """For what listens on the loopback interface without being given keys: this user's own, of the runtime directory,
    made at their first use, apply to this process and the children that it starts. So no other user of the machine
    gets at it. Returns their file; None where keys are named already, or HEADRACE_INSECURE asks for none.

    Raises AddressError, OwnSecretError and KeyFileError.
    """
    if key_file() or is_insecure():
        return None
    path = make_own_keys()
    use_keys(str(path), insecure=False)
    return path


def is_own_file(path: Path) -> bool:
    """Whether these are this user's own keys, which nobody has named."""
    with contextlib.suppress(AddressError):
        return path == runtime_directory() / _OWN_FILE
    return False


def make_own_keys() -> Path:
    """This user's own key file, in the runtime directory, made at its first use."""
    path = runtime_directory() / _OWN_FILE
    if not path.exists():
        make_once(path, make_key_file)
    return path


def read_keys(path: Path) -> Keys:
    """Raises KeyFileError."""
    try:
        mode = path.stat().st_mode
        keys = msgspec.convert(tomllib.loads(read_text(path)), threadsafe(Keys))
    except OSError as error:
        raise KeyFileError(f"the key file {path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise KeyFileError(f"{path} is no key file (`headrace keys FILE` makes one): {error}") from None
    if mode & 0o077:
        raise KeyFileError(f"others may read the key file {path}: chmod 600 {path}")
    named = {
        "engine.public_key": keys.engine.public_key,
        "client.public_key": keys.client.public_key,
        "client.secret_key": keys.client.secret_key,
        **({"engine.secret_key": keys.engine.secret_key} if keys.engine.secret_key else {}),
        **{f"clients.{name}": key for name, key in keys.clients.items()},
    }
    for name, key in named.items():
        if not _Z85_KEY.fullmatch(key):
            raise KeyFileError(f"{path}: {name} is no key of 40 characters (Z85)")
    return keys


def read_engine_keys(path: Path) -> Keys:
    """Reads the key file that an engine listens with. Raises KeyFileError, also for a client's file."""
    keys = read_keys(path)
    if not keys.engine.secret_key:
        raise KeyFileError(f"{path} is a client's: an engine listens with the file that `headrace keys FILE` made")
    return keys


def make_key_file(path: Path) -> None:
    """Writes new keys of a deployment. Raises KeyFileError if the path exists."""
    engine, client = _new_pair(), _new_pair()
    clients = {OWN_CLIENT: client.public_key}
    _write_new(path, {"engine": msgspec.to_builtins(engine), "client": msgspec.to_builtins(client), "clients": clients})


def add_client(path: Path, name: str, client_path: Path) -> None:
    """Writes a key file for one client, and adds it to `path`, so engines admit it from now on. Raises KeyFileError."""
    keys = read_engine_keys(path)
    if not _NAME.fullmatch(name):
        raise KeyFileError(f"{name!r} is no name of a client: use up to 64 letters, digits, _ and -")
    if name in keys.clients:
        raise KeyFileError(f"{path} admits a client {name} already: remove its line to replace it")
    pair = _new_pair()
    engine = {"public_key": keys.engine.public_key}
    _write_new(client_path, {"engine": engine, "client": msgspec.to_builtins(pair)})
    clients = {**keys.clients, name: pair.public_key}
    text = _toml({**msgspec.to_builtins(keys), "clients": clients})
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _write_new(beside, text)
        beside.replace(path)
    except BaseException as error:
        for unused in (beside, client_path):
            unused.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise KeyFileError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from None
        raise


def _new_pair() -> KeyPair:
    import zmq

    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def _write_new(path: Path, content: dict[str, Any] | str) -> None:
    text = content if isinstance(content, str) else _toml(content)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise KeyFileError(f"{path} exists already: name a new file, or remove it if its keys are not in use") from None
    except OSError as error:
        raise KeyFileError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from None
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write("# Keys of Headrace's engines. Keep them secret: whoever reads this file can use the engines.\n")
            file.write(text)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise KeyFileError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from None


def _toml(tables: dict[str, dict[str, str]]) -> str:
    """Names and keys contain nothing that TOML would escape."""
    sections = [
        "\n".join((f"[{table}]", *(f'{name} = "{text}"' for name, text in rows.items())))
        for table, rows in tables.items()
    ]
    return "\n\n".join(sections) + "\n"
