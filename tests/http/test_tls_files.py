"""A certificate or key that cannot be used is named, with what is wrong and what is right."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

import pytest

from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.process import tls
from headrace.frontend.http.process.tls import tls_arguments, warn_of_dates
from headrace.ipc.failure import OptionError

PAIR = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -subj /CN=localhost"


def openssl(command: str, *files: object) -> None:
    subprocess.run([*command.split(), *map(str, files)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for name in ("own", "other"):
        openssl(f"{PAIR} -nodes -days 2", "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem")
    encrypt, old_form = (f"openssl {tool} -aes256 -passout pass:secret" for tool in ("pkey", "ec"))
    openssl(encrypt, "-in", folder / "own.key", "-out", folder / "encrypted.key")
    openssl(
        old_form,
        "-in",
        folder / "own.key",
        "-out",
        folder / "encrypted_traditional.key",
    )
    openssl("openssl x509 -outform DER", "-in", folder / "own.pem", "-out", folder / "own.der")
    openssl("openssl pkey -outform DER", "-in", folder / "own.key", "-out", folder / "key.der")
    (folder / "both.pem").write_text((folder / "own.pem").read_text() + (folder / "own.key").read_text())
    (folder / "broken.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    (folder / "broken.key").write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    (folder / "empty.pem").write_text("")
    os.mkfifo(folder / "pipe.pem")
    (folder / "folder.pem").mkdir()
    return folder


def arguments(folder: Path, certificate: str, key: str | None = None, authorities: str | None = None) -> ServeOptions:
    return ServeOptions(
        ssl_certfile=str(folder / certificate),
        ssl_keyfile=key and str(folder / key),
        ssl_ca_certs=authorities and str(folder / authorities),
    )


@pytest.mark.parametrize(
    ("files", "named", "said"),
    [
        (("own.pem", "encrypted.key"), "ssl_keyfile={}/encrypted.key", "key is encrypted.*openssl pkey -in"),
        (("own.pem", "encrypted_traditional.key"), "encrypted_traditional.key", "the private key is encrypted"),
        (("own.pem", "other.key"), "other.key", "do not belong together"),
        (("own.pem", "key.der"), "ssl_keyfile={}/key.der", "in DER.*openssl pkey -inform DER"),
        (("own.der", "own.key"), "ssl_certfile={}/own.der", "in DER.*openssl x509 -inform DER"),
        (("own.pem", "own.pem"), "ssl_keyfile={}/own.pem", "must be a PEM file with its private key.*it has none"),
        (("own.pem",), "ssl_certfile={}/own.pem", "must be a PEM file with a certificate and its private key"),
        (("own.key", "own.key"), "ssl_certfile={}/own.key", "must be a PEM file with a certificate"),
        (("empty.pem", "own.key"), "ssl_certfile={}/empty.pem", "must be a PEM file"),
        (("folder.pem", "own.key"), "ssl_certfile={}/folder.pem", "is a folder, and a file is expected"),
        (("pipe.pem", "own.key"), "ssl_certfile={}/pipe.pem", "is a named pipe, and a file is expected"),
        (("own.pem", "pipe.pem"), "ssl_keyfile={}/pipe.pem", "is a named pipe, and a file is expected"),
        (("none.pem", "own.key"), "ssl_certfile={}/none.pem", "there is no such file"),
        (("broken.pem", "own.key"), "broken.pem", "cannot be used"),
        (("own.pem", "broken.key"), "broken.key", "cannot be used"),
        (("own.pem", "own.key", "none.pem"), "ssl_ca_certs={}/none.pem", "there is no such file"),
        (("own.pem", "own.key", "own.der"), "ssl_ca_certs={}/own.der", "in DER"),
        (("own.pem", "own.key", "own.key"), "ssl_ca_certs={}/own.key", "the certificates that sign"),
        (("own.pem", "own.key", "broken.pem"), "ssl_ca_certs={}/broken.pem", "cannot be used"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(folder: Path, files: tuple[str, ...], named: str, said: str) -> None:
    with pytest.raises(OptionError, match=said) as refused:
        tls_arguments(arguments(folder, *files))
    assert named.format(folder) in str(refused.value)


@pytest.mark.parametrize("files", [("own.pem", "own.key"), ("both.pem",), ("both.pem", "both.pem", "other.pem")])
def test_files_that_fit_are_taken(folder: Path, files: tuple[str, ...]) -> None:
    assert tls_arguments(arguments(folder, *files))["ssl_certfile"] == str(folder / files[0])


def test_a_file_that_may_not_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> bytes:
        raise PermissionError(13, "Permission denied")  # root may read every file

    monkeypatch.setattr(tls, "read_file", refuse)
    with pytest.raises(OptionError, match=r"own\.pem cannot be read: Permission denied"):
        tls_arguments(arguments(folder, "own.pem", "own.key"))


def test_a_certificate_that_has_expired_is_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    subprocess.run(
        [*["openssl", "req", "-new", "-subj", "/CN=localhost", "-key"], folder / "own.key", "-out", folder / "own.csr"],
        check=True,
        capture_output=True,
    )
    (folder / "ca").mkdir()
    (folder / "ca" / "index").write_text("")
    (folder / "ca" / "config").write_text(
        f"[ca]\ndefault_ca=a\n[a]\ndatabase={folder}/ca/index\nnew_certs_dir={folder}/ca\nrand_serial=yes\n"
        "default_md=sha256\npolicy=p\n[p]\ncommonName=supplied\n"
    )
    for name, dates in (("expired", "20200101000000Z 20210101000000Z"), ("early", "20900101000000Z 20910101000000Z")):
        first, last = dates.split()
        openssl(
            f"openssl ca -batch -selfsign -notext -startdate {first} -enddate {last} -config",
            *(folder / "ca" / "config", "-keyfile", folder / "own.key"),
            *("-in", folder / "own.csr", "-out", folder / f"{name}.pem"),
        )
        (folder / "ca" / "index").write_text("")
    with caplog.at_level(logging.WARNING):
        warn_of_dates(arguments(folder, "own.pem", "own.key"))
        assert not caplog.messages
        warn_of_dates(arguments(folder, "expired.pem", "own.key"))
        warn_of_dates(arguments(folder, "early.pem", "own.key"))
    assert caplog.messages == [
        f"ssl_certfile={folder}/expired.pem: it has expired, so clients will refuse it",
        f"ssl_certfile={folder}/early.pem: it is not valid yet, so clients will refuse it",
    ]
