"""The server's certificate and key: what uvicorn needs of them, and sentences for files that OpenSSL only refuses."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any

from headrace.frontend.http.options import ServeOptions
from headrace.ipc.failure import OptionError
from headrace.ipc.process.regular_files import NoFileError, read_file

logger = logging.getLogger(__name__)
_CERTIFICATE, _KEY = "CERTIFICATE-----", "PRIVATE KEY-----"
_ENCRYPTED = ("ENCRYPTED PRIVATE KEY-----", "Proc-Type: 4,ENCRYPTED")
_EXPIRED, _NOT_YET = 10, 9
"""OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED and X509_V_ERR_CERT_NOT_YET_VALID."""


def tls_arguments(options: ServeOptions) -> dict[str, Any]:
    """uvicorn's. Raises OptionError that names the file, what is wrong with it, and what is right."""
    if options.ssl_certfile is None:
        return {}
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        file = getattr(options, name)
        if file is not None and not Path(file).exists():
            raise OptionError(f"{name}={file}: there is no such file")
    certificate = f"ssl_certfile={options.ssl_certfile}"
    _check_pem(certificate, options.ssl_certfile, _CERTIFICATE, "a certificate")
    key = f"ssl_keyfile={options.ssl_keyfile}" if options.ssl_keyfile else certificate
    file = options.ssl_keyfile or options.ssl_certfile
    found = _check_pem(
        key, file, _KEY, "its private key" if options.ssl_keyfile else "a certificate and its private key"
    )
    if any(mark in found for mark in _ENCRYPTED):
        raise OptionError(
            f"{key}: the private key is encrypted, and the server cannot ask for a password; decrypt it: "
            f"openssl pkey -in {file} -out KEY, and let only the server read KEY"
        )
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise OptionError(
                f"{certificate} and {key} do not belong together: the key is of another certificate than the first one "
                "in the file, which must be the server's own"
            ) from None
        raise OptionError(f"{certificate} with {key} cannot be used: {error}") from None
    except OSError as error:
        raise OptionError(f"{certificate} with {key} cannot be used: {error.strerror or error}") from None
    if options.ssl_ca_certs is not None:
        authorities = f"ssl_ca_certs={options.ssl_ca_certs}"
        _check_pem(authorities, options.ssl_ca_certs, _CERTIFICATE, "the certificates that sign the clients'")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(options.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise OptionError(f"{authorities} cannot be used: {error}") from None
    return {
        "ssl_certfile": options.ssl_certfile,
        "ssl_keyfile": options.ssl_keyfile,
        "ssl_ca_certs": options.ssl_ca_certs,
        "ssl_cert_reqs": options.ssl_cert_reqs,
    }


def _check_pem(option: str, file: str, mark: str, holds: str) -> str:
    """Returns the file's text. Raises OptionError if there is no PEM block with this mark in it."""
    try:
        data = read_file(file)
    except NoFileError as error:
        raise OptionError(f"{option}: {error}") from None
    except OSError as error:
        raise OptionError(f"{option} cannot be read: {error.strerror}") from None
    text = data.decode("latin-1")
    if mark in text:
        return text
    if data[:1] == b"\x30":  # an ASN.1 sequence, as all of these are
        kind = "pkey" if mark == _KEY else "x509"
        raise OptionError(
            f"{option} is in DER (or PKCS #12), not in PEM; convert it: openssl {kind} -inform DER -in {file} -out PEM"
        )
    raise OptionError(f"{option} must be a PEM file with {holds} (-----BEGIN ... {mark}); it has none")


def warn_of_dates(options: ServeOptions) -> None:
    """Logs a warning if the certificate has expired, or is not valid yet: clients will refuse it."""
    if options.ssl_certfile is None:
        return
    problem = _date_problem(options.ssl_certfile, options.ssl_keyfile)
    if problem:
        logger.warning("ssl_certfile=%s: %s, so clients will refuse it", options.ssl_certfile, problem)


def _date_problem(certificate: str, key: str | None) -> str:
    """A handshake within this process, whose client trusts nothing but the certificate itself."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(certificate, key)
    client.load_verify_locations(certificate)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    for end in ends * 3:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return {_EXPIRED: "it has expired", _NOT_YET: "it is not valid yet"}.get(error.verify_code, "")
        except ssl.SSLError:
            return ""  # the other end says why
    return ""
